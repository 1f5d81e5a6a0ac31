"""Collectives between machines: what a tunnel carries, and whom it lets in."""

from __future__ import annotations

import os
import socket
import ssl
import sys
import threading
from collections.abc import Iterator

import distributed
import pytest

from pathways_lab.runtime.cluster import dask_private
from pathways_lab.runtime.control_plane.directory import HostSeen, Registry
from pathways_lab.runtime.islands import tls_tunnel
from pathways_lab.runtime.islands.tls_tunnel import (
    Tunnel,
    carry,
    let_in,
    own_address,
    own_calls,
    owner_of,
)
from pathways_lab.transport.handshake import Refused, stream
from pathways_lab.transport.link import Link
from pathways_lab.transport.reactor import Reactor
from pathways_lab.transport.tls import client_context, server_context

pytestmark = pytest.mark.skipif(
    bool(tls_tunnel.why_clear()), reason=tls_tunnel.why_clear() or "Linux"
)

KEY = bytes(range(32))


@pytest.fixture(scope="module")
def pems() -> dict[str, str]:
    found = dask_private.pems_of(distributed.Security.temporary(), "worker")
    assert found is not None
    return found


def sealed_pair(pems: dict[str, str], invited: bool = False) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    """Both ends of a connection with mutual TLS.  invited: the first has no certificate."""
    with socket.create_server(("127.0.0.1", 0)) as there:
        near = socket.create_connection(there.getsockname(), 10)
        far, _ = there.accept()
    server = server_context(pems, invited=invited)
    client = client_context({"ca": pems["ca"]} if invited else pems)
    assert server
    assert client
    ends: list[ssl.SSLSocket] = []
    accepting = threading.Thread(
        target=lambda: ends.append(server.wrap_socket(far, server_side=True))
    )
    accepting.start()
    calling = client.wrap_socket(near)
    accepting.join()
    # The accepting end's hello comes last, so nothing of this TLS is under way after it.
    ends[0].sendall(b"hello")
    assert calling.recv(10) == b"hello"
    return calling, ends[0]


def carried(sealed: ssl.SSLSocket) -> socket.socket:
    """The near end of what is carried to a stream."""
    near, near_end = socket.socketpair()
    near.settimeout(30)
    carry(near_end, sealed)
    return near


def test_bytes_go_both_ways_at_once_and_the_end_of_one_side_is_the_end(
    pems: dict[str, str],
) -> None:
    """As many as no buffer on the way takes: neither direction waits for the other."""
    one, other = sealed_pair(pems)
    near, far = carried(one), carried(other)
    data = os.urandom(8 << 20)
    senders = [threading.Thread(target=end.sendall, args=(data,)) for end in (near, far)]
    got = {near: bytearray(), far: bytearray()}

    def receive(end: socket.socket) -> None:
        while len(got[end]) < len(data):
            got[end] += end.recv(1 << 16)

    receivers = [threading.Thread(target=receive, args=(end,)) for end in (near, far)]
    for each in (*senders, *receivers):
        each.start()
    for each in (*senders, *receivers):
        each.join()
    assert got[near] == got[far] == data
    near.sendall(b"last words")
    near.close()
    assert far.recv(100) == b"last words"
    assert far.recv(100) == b""
    far.close()


def test_who_shows_no_certificate_is_not_carried(pems: dict[str, str]) -> None:
    client, server = sealed_pair(pems, invited=True)
    guest, host = carried(client), carried(server)
    guest.sendall(b"let me in")
    assert host.recv(100) == b""
    assert guest.recv(100) == b""
    for end in (guest, host):
        end.close()


@pytest.fixture
def door() -> Iterator[socket.socket]:
    with socket.create_server((own_address(), 0)) as made:
        yield made


def calls(door: socket.socket, caller: socket.socket | None = None) -> bool:
    """Whether a connection is made."""
    with caller or socket.socket() as sock:
        sock.settimeout(0.2)
        try:
            sock.connect(door.getsockname())
        except TimeoutError:
            return False
        return True


def test_the_system_lets_in_one_caller_and_nobody_else(door: socket.socket) -> None:
    assert calls(door)
    meant = socket.socket()
    meant.bind((own_address(), 0))
    let_in(door, meant.getsockname())
    assert not calls(door)
    beside = socket.socket()
    beside.bind((meant.getsockname()[0], 0))
    assert not calls(door, beside)
    assert calls(door, meant)


def test_gloos_own_port_is_shut_but_for_what_a_tunnel_brings(
    pems: dict[str, str], door: socket.socket
) -> None:
    tunnel = Tunnel(lambda host: pytest.fail(f"{host} was called"))
    tunnel.shut(door.getsockname(), devices=1)
    assert not calls(door)
    here, there = sealed_pair(pems)
    tunnel.admit(there, "west/two", door.getsockname())
    door.settimeout(10)
    came, _ = door.accept()
    came.settimeout(10)
    caller = carried(here)
    caller.sendall(b"hello")
    assert came.recv(10) == b"hello"
    came.close()
    caller.close()
    assert not calls(door)
    tunnel.open()
    assert calls(door)


def test_devices_of_one_host_connect_to_each_other_past_a_tunnel_that_carries(
    pems: dict[str, str], door: socket.socket
) -> None:
    tunnel = Tunnel(lambda host: pytest.fail(f"{host} was called"))
    tunnel.shut(door.getsockname(), devices=3)
    door.settimeout(10)
    inside = [socket.socket() for _ in range(3)]
    for end in inside:
        end.setblocking(False)
        end.connect_ex(door.getsockname())
    here, there = sealed_pair(pems)
    tunnel.admit(there, "west/two", door.getsockname())
    caller = carried(here)
    came = [door.accept()[0] for _ in range(4)]
    ends = {end.getpeername() for end in came}
    assert {end.getsockname() for end in inside} < ends
    caller.sendall(b"hello")
    (other,) = (end for end in came if end.getpeername() not in {e.getsockname() for e in inside})
    other.settimeout(10)
    assert other.recv(10) == b"hello"
    tunnel.close()
    for end in (*inside, *came, caller):
        end.close()


def test_calls_from_inside_are_known_until_they_are_accepted(door: socket.socket) -> None:
    own = door.getsockname()
    let_in(door)
    assert own_calls(own) == set()
    with socket.socket() as one:
        one.setblocking(False)
        one.connect_ex(own)
        end = one.getsockname()
        assert own_calls(own) == own_calls(own, {end, ("127.0.0.1", 9)}) == {end}
        let_in(door, end)
        door.settimeout(10)
        came, _ = door.accept()
        assert own_calls(own, {end}) == set()
        came.close()


def test_a_tunnel_takes_connections_of_its_own_account_alone(
    pems: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    here, there = sealed_pair(pems)

    def reach(host: str) -> ssl.SSLSocket:
        asked.append(host)
        return there

    with socket.create_server((own_address(), 0)) as free:
        at = free.getsockname()
    tunnel = Tunnel(reach)
    tunnel.stand_for("west/two", at)
    monkeypatch.setattr(tls_tunnel.os, "getuid", lambda: 12345)
    with socket.create_connection(at, 10) as stranger:
        assert stranger.recv(1) == b""
    assert not asked
    monkeypatch.undo()
    with socket.create_connection(at, 10) as own:
        assert owner_of(own.getsockname()) == os.getuid()
        far = carried(here)
        own.sendall(b"hello")
        assert far.recv(10) == b"hello"
    assert asked == ["west/two"]
    tunnel.close()
    far.close()


def test_a_host_that_is_not_reached_is_named(door: socket.socket) -> None:
    def reach(host: str) -> ssl.SSLSocket:
        raise TimeoutError("no answer within 10 s")

    door.close()
    tunnel = Tunnel(reach)
    tunnel.stand_for("west/two", at := (own_address(), 40_404))
    with socket.create_connection(at, 10) as own:
        assert own.recv(1) == b""
    assert tunnel.why == "west/two is not reached: no answer within 10 s"
    tunnel.close()


def test_streams_come_through_the_door_of_links_to_who_has_a_certificate(
    pems: dict[str, str],
) -> None:
    came: list[ssl.SSLSocket] = []
    there = threading.Event()

    def meet(link: Link, hello: dict[str, object]) -> dict[str, object]:
        if not link.certified:
            raise Refused("no certificate")
        link.taker = lambda sock: (came.append(sock), there.set())
        return {"name": "door"}

    reactor = Reactor("door", lambda *_: None, lambda *_: None)
    context = server_context(pems, invited=True)
    address = reactor.listen("tcp://127.0.0.1:0", KEY, meet, context=context)
    reactor.start()
    invited = client_context({"ca": pems["ca"]})
    with pytest.raises(Refused, match="no certificate"):
        stream(address, KEY, {"name": "guest"}, invited)
    with stream(address, KEY, {"name": "host"}, client_context(pems)) as sock:
        assert there.wait(10)
        came[0].setblocking(True)
        sock.sendall(b"no message")
        assert came[0].recv(100) == b"no message"
        assert not reactor.links
    reactor.close()
    came[0].close()


def test_only_linux_has_a_loopback_address_for_each_host() -> None:
    assert tls_tunnel.why_clear("linux") == ""
    assert "darwin" in tls_tunnel.why_clear("darwin")
    assert sys.platform.startswith("linux")


def test_a_host_of_another_machine_is_refused_where_both_would_compute_in_the_clear() -> None:
    def host(name: str, machine: str, clear: bool = True) -> HostSeen:
        island, at = name.split("/")[0], "unix:/there"
        return HostSeen(name, island, 1, "cpu", 1, 1, 1, at, False, machine=machine, clear=clear)

    for plain in (False, True):
        registry = Registry(plain_collectives=plain)
        registry.hosts["west/1"] = host("west/1", "one")
        assert registry.check_host(host("west/2", "one")) == ""
        assert registry.check_host(host("east/2", "two")) == ""
        wrong = "" if plain else "west/2 and west/1 are on two machines, and JAX sends"
        assert registry.check_host(host("west/2", "two")).startswith(wrong)
        assert bool(registry.check_host(host("west/2", "two", clear=False))) is not plain
        registry.hosts["west/1"] = host("west/1", "one", clear=False)
        assert registry.check_host(host("west/2", "two", clear=False)) == ""
