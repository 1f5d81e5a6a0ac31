"""A link that ends gives what came before the end, and then says why it ended, for ever."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import socket
import weakref
from collections import deque
from typing import Any
from unittest.mock import Mock

import pytest

import pathways_lab.transport.link
from pathways_lab.transport.framing import Decoder, WireError, encode
from pathways_lab.transport.handshake import broken
from pathways_lab.transport.link import Link, LinkClosed, _Frame, _together
from pathways_lab.transport.reactor import Reactor
from pathways_lab.transport.shared_memory import DESCRIPTORS

OWNER: Any = None
STAGE = 64 * 1024
WORD = b"".join(encode("word", {"text": "x" * (128 - 19)}))
WHOLE = WORD * (STAGE // len(WORD))
"""Messages that fill one reading, so that there is a second one at once."""
WRONG = b"\xff\xff\xff\xff"


def test_a_link_that_breaks_delivers_a_large_message_that_had_come() -> None:
    got: list[str] = []
    reactor = Reactor("r", lambda link, op, *_: got.append(op), lambda *_: None)
    near, far = socket.socketpair()
    far.sendall(b"".join(encode("word", {}, [bytes(2 * STAGE)])))
    reactor._add_link(link := Link(reactor, near, "other", {}, Decoder()), [])
    reactor._broke(link, "it broke")
    assert (got, link.closed) == (["word"], "it broke")
    far.close()
    reactor.close()


@pytest.fixture
def two_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """One turn of a link takes more than fills a reading."""
    monkeypatch.setattr(pathways_lab.transport.link, "_READ_BUDGET", 4 * STAGE)


class Scripted:
    """A socket that gives this, then that; then nothing, as if it lived."""

    family = socket.AF_UNIX

    def __init__(self, *said: bytes | Exception) -> None:
        self._said = deque(said)

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def sendmsg(self, pieces: list[memoryview]) -> int:
        raise BlockingIOError

    def recv_into(self, space: memoryview) -> int:
        if not self._said:
            raise BlockingIOError
        said = self._said.popleft()
        if isinstance(said, Exception):
            raise said
        space[: len(said)] = said
        return len(said)


def heard_and_then(link: Link, error: type[Exception], says: str) -> int:
    """How many messages came before this."""
    assert not link.hidden
    heard = link.receive()
    assert {message.op for message in heard} == {"word"}
    for _ in range(2):
        assert link.hidden, "nothing may come any more that wakes a selector"
        with pytest.raises(error, match=says):
            link.receive()
    return len(heard)


def test_a_link_that_has_much_leaves_others_their_turn() -> None:
    many = 4 << 20
    link = Link(OWNER, Scripted(*[WHOLE] * (many // len(WHOLE))), "a", {}, Decoder())  # type: ignore[arg-type]
    sizes = []
    while heard := link.receive():
        sizes.append(len(heard) * len(WORD))
    assert sum(sizes) == many
    assert max(sizes) <= many // 32


@pytest.mark.usefixtures("two_readings")
@pytest.mark.parametrize(
    ("said", "error", "says"),
    [
        ((WHOLE, OSError(errno.ECONNRESET, "reset")), ConnectionResetError, "reset"),
        ((WHOLE, OSError(errno.ETIMEDOUT, "timed out")), TimeoutError, "timed out"),
        ((WHOLE, b""), LinkClosed, "closed the connection"),
        ((WHOLE, WRONG), WireError, "over the limit"),
        ((WHOLE, WORD + WRONG), WireError, "over the limit"),
        ((WORD + WRONG,), WireError, "over the limit"),
    ],
)
def test_whole_messages_before_the_end_are_heard(
    said: tuple[Any, ...], error: type[Exception], says: str
) -> None:
    sock: Any = Scripted(*said)
    link = Link(OWNER, sock, "other", {}, Decoder())
    whole = sum(len(part) for part in said if isinstance(part, bytes)) // len(WORD)
    assert heard_and_then(link, error, says) == whole


@pytest.mark.usefixtures("two_readings")
@pytest.mark.parametrize(
    ("found", "error", "says"),
    [
        (OSError(errno.ETIMEDOUT, "timed out"), TimeoutError, "timed out"),
        (OSError(errno.EHOSTUNREACH, "no route"), OSError, "no route"),
        (OSError(errno.EPIPE, "broken pipe"), LinkClosed, "other closed the connection"),
    ],
)
def test_a_connection_that_broke_while_writing_was_not_closed_by_the_other_end(
    found: OSError, error: type[Exception], says: str
) -> None:
    sock: Any = Scripted(WHOLE, b"")
    sock.sendmsg = Mock(side_effect=found)
    link = Link(Mock(), sock, "other", {}, Decoder())
    with pytest.raises(LinkClosed, match=str(found)[-8:]):
        link.send("word")
    assert heard_and_then(link, error, says) == STAGE // len(WORD)


@pytest.mark.parametrize("said", [(b"",), (WHOLE, WRONG)])
def test_a_link_that_has_ended_keeps_nothing_of_whoever_waited(said: tuple[bytes, ...]) -> None:
    """Threads that wait for a value read links; a closed link stays until another replaces it."""

    def no_route(pieces: Any) -> int:
        raise OSError(errno.EHOSTUNREACH, "no route")

    sock: Any = Scripted(*said)
    sock.sendmsg = no_route
    link = Link(Mock(), sock, "other", {}, Decoder())

    class Value:
        pass

    def waits_for_it() -> weakref.ref[Value]:
        value = Value()
        for does in (lambda: link.send("word"), *[link.receive] * 3):
            with contextlib.suppress(OSError, WireError):
                does()
        return weakref.ref(value)

    value = waits_for_it()
    gc.collect()
    assert value() is None


@pytest.mark.usefixtures("two_readings")
def test_over_tls_too_a_connection_that_timed_out_was_not_closed_by_the_other_end() -> None:
    """Python's TLS tells every error of its socket as an end."""
    sock: Any = Scripted(WHOLE, b"")
    sock.getsockopt = Mock(return_value=errno.ETIMEDOUT)
    link = Link(OWNER, sock, "other", {}, Decoder())
    link._tls = True
    assert heard_and_then(link, TimeoutError, "timed out") == STAGE // len(WORD)


@pytest.mark.usefixtures("two_readings")
def test_whole_messages_before_too_many_descriptors_are_heard() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = Link(OWNER, theirs, "other", {}, Decoder())
        link.share(connected=False)
        ours.sendall(WHOLE)
        socket.send_fds(ours, [WORD], [ours.fileno()] * (DESCRIPTORS + 1))
        assert heard_and_then(link, WireError, "too many") == STAGE // len(WORD)
        link.shut("over")


def test_a_descriptor_goes_along_with_the_first_byte_of_its_own_message() -> None:
    segment: Any = object()
    plain, carrier = _Frame([memoryview(b"a")]), _Frame([memoryview(b"b")], segment)
    assert _together([plain, plain, carrier, plain]) == (plain, plain)
    assert _together([carrier, plain]) == (carrier,)
    assert _together([plain, plain]) == (plain, plain)


def test_each_end_of_a_connection_has_its_own_words() -> None:
    who = "west/one on one (10.0.0.2)"

    def words(number: int) -> str:
        return broken(who, OSError(number, os.strerror(number)), 5.2)

    assert words(errno.ETIMEDOUT) == f"no word from {who} for 5 s (Connection timed out)"
    assert words(errno.EHOSTUNREACH) == f"no word from {who} for 5 s (No route to host)"
    assert words(errno.ECONNRESET).startswith(f"{who} was killed, or its machine")
    assert words(errno.EPIPE) == f"the connection to {who} broke: [Errno 32] Broken pipe"
