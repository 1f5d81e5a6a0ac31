"""Links between two reactors over real sockets: order, flooding, keys, bad bytes, closing."""

from __future__ import annotations

import contextlib
import errno
import functools
import re
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from pathways_lab.runtime.cluster import dask_private
from pathways_lab.transport import auth, handshake, versions
from pathways_lab.transport.auth import AuthenticationError, new_key
from pathways_lab.transport.dask_comms import is_comm
from pathways_lab.transport.framing import Limits, encode
from pathways_lab.transport.handshake import Refused, stamps
from pathways_lab.transport.link import Link, LinkClosed
from pathways_lab.transport.listener import Listener, Reception
from pathways_lab.transport.reactor import Reactor
from pathways_lab.transport.tls import client_context, server_context
from tests.runtime.processes import until

distributed = pytest.importorskip("distributed")

KEY = new_key()


class Anywhere(Reactor):
    """Brings certificates where the transport wants them."""

    def listen(self, address: str, *args: Any, **options: Any) -> str:
        if is_comm(address):
            options["context"] = server_context(pems())
        return super().listen(address, *args, **options)

    def connect(self, address: str, *args: Any, **options: Any) -> Link:
        if is_comm(address):
            options["context"] = client_context(pems())
        return super().connect(address, *args, **options)


@functools.cache
def pems() -> dict[str, str]:
    made = dask_private.pems_of(distributed.Security.temporary(), "worker")
    assert made is not None
    return made


class End:
    """One reactor that remembers what happened to it."""

    def __init__(self, name: str, **options: Any) -> None:
        self.messages: list[tuple[str, dict[str, Any], list[memoryview]]] = []
        self.closed: list[str] = []
        self.opened: list[Link] = []
        self.errors: list[str] = []
        self.on_message: Callable[[Link, str], None] | None = None
        self.reactor = Anywhere(
            name,
            self._message,
            lambda link, reason: self.closed.append(reason),
            lambda link, peer: self.opened.append(link),
            on_error=self.errors.append,
            **options,
        )
        self.reactor.start()

    def _message(
        self, link: Link, op: str, fields: dict[str, Any], buffers: list[memoryview]
    ) -> None:
        self.messages.append((op, fields, buffers))
        if self.on_message:
            self.on_message(link, op)


@pytest.fixture
def ends() -> Iterator[Callable[..., End]]:
    made: list[End] = []

    def make(name: str, **options: Any) -> End:
        made.append(End(name, **options))
        return made[-1]

    yield make
    for end in made:
        end.reactor.close()
        assert not end.errors


@pytest.fixture(params=["unix", "tcp", "dask"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Both transports: kept sockets, and Dask's comms."""
    addresses = {
        "unix": f"unix:{tmp_path}/s",
        "tcp": "tcp://127.0.0.1:0",
        "dask": "dask+tls://127.0.0.1:0",
    }
    return addresses[request.param]


def test_hellos_names_and_replies(ends: Callable[..., End], where: str) -> None:
    server, client = ends("server"), ends("client")

    def greet(link: Link, peer: dict[str, Any]) -> dict[str, Any]:
        link.name = "kernel-1"
        return {"name": "control", "you": peer["pid"]}

    address = server.reactor.listen(where, KEY, greet)
    link = client.reactor.connect(address, KEY, {"name": "kernel", "pid": 7})
    assert (link.name, link.peer["you"]) == ("control", 7)
    assert link.clock.one  # one machine, one clock
    until(lambda: server.opened)
    assert server.opened[0].name == "kernel-1"
    server.on_message = lambda link, op: link.send("pong") and None
    link.send("ping", {"a": [1, None, "x"]}, [b"abc"])
    until(lambda: client.messages)
    assert client.messages[0][0] == "pong"
    assert server.messages[0][1] == {"a": [1, None, "x"]}


def test_what_waits_to_be_written_when_a_link_is_closed_still_leaves(
    ends: Callable[..., End], where: str
) -> None:
    server, client = ends("server"), ends("client")
    link = client.reactor.connect(server.reactor.listen(where, KEY, {}), KEY, {"name": "client"})
    link._blocked = True  # as when the socket was full a moment ago
    link.send("last")
    link.close()
    until(lambda: server.closed)
    assert [op for op, _, _ in server.messages] == ["last"]


def linked(ends: Callable[..., End], where: str) -> tuple[End, End, Link]:
    """A server and a client that have heard of each other, and the client's link."""
    server, client = ends("server"), ends("client")
    address = server.reactor.listen(where, KEY, {"name": "server"})
    link = client.reactor.connect(address, KEY, {"name": "client"})
    until(lambda: server.opened)
    return server, client, link


def test_two_ends_flooding_each_other_do_not_dead_lock(
    ends: Callable[..., End], where: str
) -> None:
    """Both send 64 MiB before either has read any: only queues make this end."""
    server, client, link = linked(ends, where)
    data = np.random.default_rng(0).integers(0, 256, 8 << 20, dtype=np.uint8)

    def flood(out: Link) -> None:
        for number in range(8):
            out.send("data", {"number": number}, [data, b"small"])

    # From inside the reactors' own threads, which therefore do not read meanwhile.
    server.reactor.call_soon(flood, server.opened[0])
    client.reactor.call_soon(flood, link)
    until(lambda: len(server.messages) == len(client.messages) == 8)
    for end in (server, client):
        assert [fields["number"] for _, fields, _ in end.messages] == list(range(8))
        assert all(np.array_equal(np.frombuffer(b[0], np.uint8), data) for *_, b in end.messages)
    until(lambda: link.pending == 0)


def test_many_threads_send_whole_messages_each_in_order(
    ends: Callable[..., End], where: str
) -> None:
    server, client = ends("server"), ends("client")
    address = server.reactor.listen(where, KEY, {"name": "server"})
    link = client.reactor.connect(address, KEY, {})

    def work(thread: int) -> None:
        for number in range(300):
            link.send("x", {"thread": thread, "number": number}, [bytes(number * 100)])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: len(server.messages) == 1200)
    for thread in range(4):
        got = [f["number"] for _, f, _ in server.messages if f["thread"] == thread]
        assert got == list(range(300))


def test_a_foreign_key_is_refused_and_tells_nothing(ends: Callable[..., End], where: str) -> None:
    server, client = ends("server"), ends("client")
    address = server.reactor.listen(where, KEY, {"name": "server", "secret": "s"})
    with pytest.raises(AuthenticationError, match="key"):
        client.reactor.connect(address, new_key(), {"name": "client"})
    until(lambda: server.reactor.rejected == 1)
    assert not server.opened


def test_bytes_before_the_proof_are_not_parsed(ends: Callable[..., End]) -> None:
    """A stranger who sends frames at once is closed; others go on."""
    server, client = ends("server"), ends("client")
    address = server.reactor.listen("tcp://127.0.0.1:0", KEY, {"name": "server"})
    port = int(address.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"".join(encode("hello", {"name": "me"})).ljust(100, b"\0"))
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    assert client.reactor.connect(address, KEY, {}).peer["name"] == "server"
    for sock in silent:
        sock.close()
    assert server.reactor.rejected >= 1


def test_ends_that_vanish_during_or_right_after_the_greeting_are_no_error(
    ends: Callable[..., End], tmp_path: Path
) -> None:
    server, client = ends("server"), ends("client")
    address = server.reactor.listen(f"unix:{tmp_path}/s", KEY, {"name": "server"})
    for words in range(3):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(f"{tmp_path}/s")
            initiator = auth.Initiator(KEY)
            if words:
                sock.sendall(initiator.greeting())
                answer = initiator.answer(sock.recv(auth.REPLY_BYTES))
            if words == 2:
                sock.sendall(answer + b"".join(encode("hello", {"name": "brief", **stamps()})))
    until(lambda: server.reactor.rejected == 2 and server.closed)
    assert client.reactor.connect(address, KEY, {}).name == "server"


def test_a_peer_of_other_versions_is_refused_by_name(
    ends: Callable[..., End], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = ends("server"), ends("client")
    address = server.reactor.listen(f"unix:{tmp_path}/s", KEY, {"name": "server"})
    link = client.reactor.connect(address, KEY, {"name": "b1"})
    assert link.peer["versions"] == versions.here()
    for theirs, told in (
        ({**versions.here(), "JAX": "0.1"}, f"JAX 0.1 and the lab {versions.here()['JAX']}"),
        ({**versions.here(), "Python": "3" * 1000}, f"Python {'3' * 40} and the lab "),
        ({}, "Python of no known version and the lab "),
        ("nonsense", "Python of no known version and the lab "),
    ):
        monkeypatch.setattr(handshake, "stamps", lambda theirs=theirs: {"versions": theirs})
        with pytest.raises(Refused, match=f"b2 has {re.escape(told)}.*install the same version"):
            client.reactor.connect(address, KEY, {"name": "b2"})


def test_a_listener_rests_while_there_is_no_room_for_a_connection() -> None:
    selector, later, door = Mock(), Mock(), Mock()
    door.accept.side_effect = OSError(errno.EMFILE, "too many open files")
    reception = Reception(selector, later)
    reception.open(Listener(door, "tcp://127.0.0.1:1", KEY, None, Mock(), Limits()))
    ready = selector.register.call_args.args[2]
    ready(selectors.EVENT_READ)
    selector.unregister.side_effect = KeyError
    ready(selectors.EVENT_READ)  # by another thread, which was told of it too
    (rest,) = later.call_args_list
    _, watch, listener = rest.args
    watch(listener)
    assert selector.register.call_count == 2
    reception.close()
    watch(listener)
    assert selector.register.call_count == 2


def test_a_malformed_message_closes_only_its_link(ends: Callable[..., End], where: str) -> None:
    server, client = ends("server", limits=Limits(header=1000)), ends("client")
    address = server.reactor.listen(where, KEY, {"name": "server"})
    bad = client.reactor.connect(address, KEY, {"name": "bad"})
    good = client.reactor.connect(address, KEY, {"name": "good"})
    bad.send("x", {"text": "a" * 2000})
    until(lambda: server.closed)
    assert server.closed[0].startswith("bad sent a malformed message: a header of 20")
    assert server.closed[0].endswith("is over the limit 1000")
    good.send("fine")
    until(lambda: server.messages)
    until(lambda: bad.closed)
    with pytest.raises(LinkClosed, match=r"closed|broke"):
        bad.send("x")


def test_what_came_before_a_malformed_message_is_heard(ends: Callable[..., End]) -> None:
    server, client = ends("server"), ends("client")
    address = server.reactor.listen("tcp://127.0.0.1:0", KEY, {"name": "server"})
    link = client.reactor.connect(address, KEY, {"name": "client"})
    link.sock.send(b"".join(encode("closing", {"reason": "last words"})) + b"\xff" * 100)
    until(lambda: server.closed)
    assert [op for op, _, _ in server.messages] == ["closing"]
    assert server.closed[0].startswith("client sent a malformed message: a header of 42")


def test_a_hello_can_be_refused_with_a_reason(ends: Callable[..., End], where: str) -> None:
    server, client = ends("server"), ends("client")

    def refuse(link: Link, peer: dict[str, Any]) -> dict[str, Any]:
        raise Refused("no room for another kernel")

    address = server.reactor.listen(where, KEY, refuse)
    with pytest.raises(Refused, match="no room"):
        client.reactor.connect(address, KEY, {})


def test_a_silent_listener_times_out(ends: Callable[..., End], tmp_path: Path) -> None:
    client = ends("client")
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(f"{tmp_path}/deaf")
        deaf.listen()
        with pytest.raises(TimeoutError, match=r"did not answer within 0\.05 s"):
            client.reactor.connect(f"unix:{tmp_path}/deaf", KEY, {}, timeout=0.05)


def test_last_words_arrive_before_the_end(ends: Callable[..., End], where: str) -> None:
    server, client = ends("server"), ends("client")
    address = server.reactor.listen(where, KEY, {"name": "server"})
    link = client.reactor.connect(address, KEY, {"name": "client"})
    link.send("closing", {"reason": "done"})
    link.close("done")
    until(lambda: server.closed)
    assert server.messages[0][0] == "closing"
    assert server.closed == ["client closed the connection"]
    until(lambda: client.closed == ["done"])


def test_last_words_are_heard_by_who_finds_the_end_in_writing(
    ends: Callable[..., End], where: str
) -> None:
    server, client, link = linked(ends, where)
    reads = threading.Event()
    client.reactor.call_soon(reads.wait, 20)
    server.opened[0].send("closing", {"reason": "done"})
    server.opened[0].close("done")
    until(lambda: server.closed)

    def broken() -> bool:
        try:
            link.send("question")
        except LinkClosed:
            return True
        return False

    until(broken)
    reads.set()
    until(lambda: client.closed)
    assert [op for op, _, _ in client.messages] == ["closing"]


def test_what_an_interrupt_left_behind_leaves_with_the_next_sweep(
    ends: Callable[..., End], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Struck while sending, and again while somebody is asked to write the rest."""
    server, client, link = linked(ends, f"unix:{tmp_path}/s")

    def strike(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as worst:
        worst.setattr(link, "_pump", strike)
        worst.setattr(client.reactor, "wants_write", strike)
        with pytest.raises(KeyboardInterrupt):
            link.send("left behind")
    assert link.backlog
    until(lambda: server.messages)
    assert [op for op, _, _ in server.messages] == ["left behind"]


def test_who_connects_while_the_reactor_ends_gets_a_link_that_is_closed(
    ends: Callable[..., End], where: str
) -> None:
    server, client = ends("server"), ends("client")
    address = server.reactor.listen(where, KEY, {"name": "server"})
    busy, go_on = threading.Event(), threading.Event()
    client.reactor.call_soon(busy.set)
    client.reactor.call_soon(go_on.wait, 20)
    assert busy.wait(20)
    closing = threading.Thread(target=client.reactor.close)
    closing.start()
    until(lambda: [call.__name__ for call, _ in client.reactor._calls] == ["_stop"])
    link = client.reactor.connect(address, KEY, {"name": "client"})
    go_on.set()
    closing.join()
    assert link.closed == "closed by this end"
    until(lambda: server.closed)


def test_an_arrival_that_became_a_link_is_not_read_by_who_was_told_before(tmp_path: Path) -> None:
    """Two threads wait in a selector; the second one may handle what is out of date by then."""
    sent = threading.Event()

    class Told(Reactor):
        again = True

        def _handle(self, ready: Any) -> None:
            super()._handle(ready)
            if self.links and self.again:
                self.again = False
                sent.wait(10)
                super()._handle(ready)

    came: list[str] = []
    errors: list[str] = []
    server = Told(
        "server", lambda link, op, *_: came.append(op), lambda *_: None, on_error=errors.append
    )
    server.start()
    client = End("client")
    try:
        address = server.listen(f"unix:{tmp_path}/s", KEY, {"name": "server"})
        client.reactor.connect(address, KEY, {"name": "client"}).send("first")
        sent.set()
        until(lambda: came)
        assert not errors
    finally:
        client.reactor.close()
        server.close()


def test_a_handler_that_raises_is_reported_and_survived() -> None:
    server, client = End("server"), End("client")
    address = server.reactor.listen("tcp://127.0.0.1:0", KEY, {"name": "server"})
    link = client.reactor.connect(address, KEY, {})

    def wrong(link: Link, op: str) -> None:
        raise ValueError(op)

    server.on_message = wrong
    link.send("one")
    link.send("two")
    until(lambda: len(server.errors) == 2)
    assert "ValueError: one" in server.errors[0]
    client.reactor.close()
    server.reactor.close()
    server.reactor.close()


def test_timers_and_connecting_without_waiting(ends: Callable[..., End]) -> None:
    server, client = ends("server"), ends("client")
    address = server.reactor.listen("tcp://127.0.0.1:0", KEY, {"name": "server"})
    seen: list[Any] = []
    client.reactor.call_later(0.02, seen.append, "late")
    client.reactor.call_later(0.01, seen.append, "early")
    until(lambda: len(seen) == 2)
    assert seen == ["early", "late"]
    client.reactor.connect_soon(address, KEY, {}, seen.append)
    client.reactor.connect_soon("tcp://127.0.0.1:1", KEY, {}, seen.append)
    until(lambda: len(seen) == 4)
    assert {type(result) for result in seen[2:]} == {Link, ConnectionRefusedError}


def test_a_listener_that_comes_later_is_waited_for(
    ends: Callable[..., End], tmp_path: Path
) -> None:
    server, client = ends("server"), ends("client")
    address = f"unix:{tmp_path}/later"
    with pytest.raises(FileNotFoundError):
        client.reactor.connect(address, KEY, {}, timeout=0.02, retry=True)
    timer = threading.Timer(0.05, server.reactor.listen, (address, KEY, {"name": "server"}))
    timer.start()
    assert client.reactor.connect(address, KEY, {}, retry=True).name == "server"
    timer.join()


def test_a_socket_left_by_a_killed_process_is_replaced_and_a_live_one_is_not(
    ends: Callable[..., End], tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(f"{tmp_path}/s")
    server, client = ends("server"), ends("client")
    address = server.reactor.listen(f"unix:{tmp_path}/s", KEY, {"name": "server"})
    assert client.reactor.connect(address, KEY, {}).name == "server"
    with pytest.raises(OSError, match="in use"):
        client.reactor.listen(address, KEY, {})
    assert client.reactor.connect(address, KEY, {}).name == "server"


def test_long_socket_paths_are_refused_with_the_remedy(ends: Callable[..., End]) -> None:
    with pytest.raises(ValueError, match="shorter folder"):
        ends("server").reactor.listen("unix:/" + "x" * 120, KEY, {})


def test_dask_comms_are_not_used_without_certificates(ends: Callable[..., End]) -> None:
    """Dask's protocol unpickles what arrives, before anything here can look at it."""
    reactor = ends("server").reactor
    with pytest.raises(ValueError, match="certificates"):
        Reactor.listen(reactor, "dask+tls://127.0.0.1:0", KEY, {})
    invited = server_context(pems(), invited=True)
    with pytest.raises(ValueError, match="certificates"):
        Reactor.listen(reactor, "dask+tls://127.0.0.1:0", KEY, {}, context=invited)
    with pytest.raises(ValueError, match="certificates"):
        Reactor.connect(reactor, "dask+tcp://127.0.0.1:1", KEY, {})


def test_a_stranger_without_certificate_gets_nowhere(ends: Callable[..., End]) -> None:
    server, client = ends("server"), ends("client")
    address = server.reactor.listen("dask+tls://127.0.0.1:0", KEY, {"name": "server"})
    other = dask_private.pems_of(distributed.Security.temporary(), "worker")
    with pytest.raises(OSError):
        Reactor.connect(
            client.reactor, address, KEY, {}, timeout=2.0, context=client_context(other)
        )
    assert not server.opened
    assert client.reactor.connect(address, KEY, {}).name == "server"


def test_a_door_has_limits_of_its_own(ends: Callable[..., End], where: str, tmp_path: Path) -> None:
    """A client's message may claim less than one of the control plane."""
    server, client = ends("server"), ends("client")
    narrow = server.reactor.listen(where, KEY, {}, limits=Limits(header=1000, body=1 << 20))
    wide = server.reactor.listen(f"unix:{tmp_path}/wide", KEY, {})
    for address, expected in ((narrow, 0), (wide, 1)):
        for fields, buffers in (({"text": "x" * 2000}, []), ({}, [bytes(2 << 20)])):
            server.messages.clear()
            server.closed.clear()
            link = client.reactor.connect(address, KEY, {})
            with contextlib.suppress(LinkClosed):
                link.send("large", fields, buffers)
            until(lambda: bool(server.messages or server.closed))
            assert len(server.messages) == expected
            link.close()
            until(lambda: bool(server.closed))
    assert server.reactor.rejected == 2


def test_timers_are_looked_at_by_nobody_without_the_role() -> None:
    """They are the next holder's as soon as it is released, also to take them out."""
    reactor = Reactor("r", Mock(), Mock())
    reactor.call_later(60.0, Mock())

    class Role:
        acquire = Mock(return_value=True)

        def release(self) -> None:
            del reactor._timers

    role: Any = Role()
    reactor._role = role
    called = Mock()
    reactor.call_here(called)
    called.assert_called_once()


def test_a_timer_may_be_taken_out_while_somebody_looks_how_long_to_wait() -> None:
    class TakenOut(list[Any]):
        def __bool__(self) -> bool:
            return True

    reactor = Reactor("r", Mock(), Mock())
    reactor._timers = TakenOut()
    assert reactor._patience() > 0
