"""From a fresh socket to an authenticated link with both hellos exchanged.

Problem: the connecting end may wait, the accepting end must not (it serves
others meanwhile); neither may parse anything before the other has proved the
key.

Rule for maintainers: before the proof only fixed numbers of bytes are read;
the first message after it is ``hello`` (or ``refused`` with a reason).

After the authentication of :mod:`pathways_lab.transport.auth` both ends send one
message ``hello``, the connecting end first.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, TypeVar

from pathways_lab.transport import addresses, auth, clock_sync, versions
from pathways_lab.transport.dask_comms import dial, is_comm, scheduler_of
from pathways_lab.transport.framing import Decoder, Limits, Message, WireError, encode


class Refused(ConnectionError):
    """The other end took the key but not the hello; ``str()`` is its reason."""


STREAM = "stream"
"""The role, in a hello, of a connection that carries another program's bytes and no messages."""
HOST = "hostname"
"""The field of a hello with what its sender's machine calls itself."""
_STREAM_SECONDS = 10.0
_QUIET = 1.0
"""Seconds after which a caller is told that nothing has come."""
_T = TypeVar("_T")
SILENCE = 30.0
"""A machine that vanishes says nothing: its connections break after so many seconds, unless its
lab says another number.  A process that is stopped is none of that: its system answers for it."""


def tune(sock: socket.socket, silence: float = SILENCE) -> None:
    """Small messages leave at once, and a machine that is not there any more is noticed.

    silence: seconds without a sign of it, where the operating system has these settings.
    """
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", max(1, round(silence / 3))),
        ("TCP_KEEPINTVL", max(1, round(silence / 6))),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", round(1000 * silence)),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


_SILENT = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}


def no_sign() -> OSError:
    """The error by which the system says that a machine gives no sign."""
    return TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


def is_silence(error: Exception) -> bool:
    """Whether a connection broke, or was not made, since nothing came from the other machine."""
    silent = isinstance(error, OSError) and error.errno in _SILENT
    return silent or isinstance(error, TimeoutError)


def broken(who: str, error: OSError, seconds: float) -> str:
    """Why a connection broke, in words; never "closed" for one that only fell silent.

    seconds: since something came last.
    """
    if is_silence(error):
        return f"no word from {who} for {seconds:.0f} s ({error.strerror or error})"
    if isinstance(error, ConnectionResetError):
        return f"{who} was killed, or its machine has started anew (it reset the connection)"
    return f"the connection to {who} broke: {error}"


def is_through(sock: socket.socket) -> bool:
    """Whether a link's socket leads through Dask to another machine: no other has TLS there."""
    return sock.family == socket.AF_UNIX and isinstance(sock, ssl.SSLSocket)


def machine_of(sock: socket.socket, peer: dict[str, Any]) -> str:
    """The machine at the other end of a link, for people; "" for this one."""
    name = str(peer.get(HOST, "its machine"))[:64]
    if sock.family == socket.AF_UNIX:
        return f" on {name}" if is_through(sock) else ""
    with contextlib.suppress(OSError):
        at = sock.getpeername()[0]
        if at != sock.getsockname()[0]:
            return f" on {name} ({at})"
    return ""


class Arrival:
    """An accepted connection on its way: call :meth:`step` whenever bytes are there."""

    def __init__(self, sock: socket.socket, key: bytes, limits: Limits) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.decoder = Decoder(limits)
        self._responder = auth.Responder(key)
        self._encrypting = isinstance(sock, ssl.SSLSocket)
        self._received = b""
        self._wanted = auth.GREETING_BYTES
        self._proved = False

    @property
    def holder(self) -> int:
        """The holder whose key the other end has proved: see :mod:`pathways_lab.transport.auth`."""
        return self._responder.holder

    def step(self) -> list[Message]:
        """Go on as far as the bytes reach; the hello and what follows it, once it is there.

        Raises AuthenticationError, WireError, OSError: close the socket then.
        """
        try:
            if self._encrypting:
                assert isinstance(self.sock, ssl.SSLSocket)
                self.sock.do_handshake()
                self._encrypting = False
            while not self._proved:
                self._prove()
            messages: list[Message] = []
            while not messages:
                count = _some(self.sock.recv_into(self.decoder.space()))
                self.decoder.advance(count, messages)
            _check_hello(messages[0])
            return messages
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return []

    def _prove(self) -> None:
        data = self.sock.recv(self._wanted - len(self._received))
        _some(len(data))
        self._received += data
        if len(self._received) < self._wanted:
            return
        if self._wanted == auth.GREETING_BYTES:
            # A fresh socket takes 72 bytes; one that does not is not worth waiting for.
            if self.sock.send(self._responder.reply(self._received)) != auth.REPLY_BYTES:
                raise ConnectionError("the other end does not read")
            self._wanted = auth.ANSWER_BYTES
        else:
            self._responder.check(self._received)
            self._proved = True
        self._received = b""


def meet(
    address: str,
    key: bytes,
    hello: dict[str, Any],
    timeout: float,
    limits: Limits,
    context: ssl.SSLContext | None = None,
    dial: Callable[[str, ssl.SSLContext | None, float], socket.socket] | None = None,
    holder: int = 0,
    quiet: Callable[[float], object] | None = None,
) -> tuple[socket.socket, Decoder, list[Message], clock_sync.Difference]:
    """Connect, authenticate and exchange hellos, waiting at most *timeout* seconds.

    dial: makes the socket for an address that is reached over a comm.
    holder: whose key it is (see :mod:`pathways_lab.transport.auth`).
    quiet(seconds): called now and then while the other end, which is connected, says nothing.
    Returns the socket, its decoder, the messages received (the first is the
    hello of the other end), and the difference of clocks.  Raises Refused,
    AuthenticationError, WireError, TimeoutError, OSError.
    """
    began = time.monotonic()
    deadline = began + timeout
    if dial is not None and is_comm(address):
        sock = dial(address, context, timeout)
    else:
        family, place = addresses.parse(address)
        sock = socket.socket(family, socket.SOCK_STREAM)
    try:

        def patience(most: float = timeout) -> None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{address} did not answer within {timeout:g} s")
            sock.settimeout(min(left, most))

        def heard(step: Callable[[], _T]) -> _T:
            while True:
                patience(timeout if quiet is None else _QUIET)
                try:
                    return step()
                except TimeoutError:
                    if quiet is None:
                        raise
                    quiet(time.monotonic() - began)

        patience()
        if not is_comm(address):
            sock.connect(place)
            tune(sock)
        if context is not None and (scheduler_of(address) or not is_comm(address)):
            sock = context.wrap_socket(sock, do_handshake_on_connect=False)
            heard(sock.do_handshake)
        initiator = auth.Initiator(key, holder)
        sock.sendall(initiator.greeting())
        answer = initiator.answer(_exactly(sock, auth.REPLY_BYTES, heard))
        sent = time.monotonic()
        sock.sendall(answer + b"".join(encode("hello", {**hello, **stamps()})))
        decoder = Decoder(limits)
        messages: list[Message] = []
        while not messages:
            count = heard(lambda: sock.recv_into(decoder.space()))
            decoder.advance(_some(count), messages)
        _check_hello(messages[0])
        apart = clock_sync.Difference.of_hello(messages[0].fields, sent, time.monotonic())
        return sock, decoder, messages, apart
    except TimeoutError:
        sock.close()
        raise TimeoutError(f"{address} did not answer within {timeout:g} s") from None
    except BaseException:
        sock.close()
        raise


def stream(
    address: str, key: bytes, hello: dict[str, Any], context: ssl.SSLContext | None, holder: int = 0
) -> ssl.SSLSocket:
    """A connection for another program's bytes, after the same handshake; waits.

    Raises what :func:`meet` raises.
    """
    hello = {**hello, "role": STREAM}
    sock, *_ = meet(address, key, hello, _STREAM_SECONDS, Limits(), context, dial, holder)
    if not isinstance(sock, ssl.SSLSocket):
        sock.close()
        raise ConnectionError(f"{address} takes no TLS, and another program's bytes need it")
    return sock


def stamps() -> dict[str, Any]:
    """Every hello carries them: the clock, versions and machine of this process."""
    return {
        **clock_sync.stamp(),
        versions.FIELD: versions.here(),
        HOST: socket.gethostname(),
    }


def check_versions(hello: dict[str, Any], name: str) -> None:
    """Raises Refused where the sender of a hello has other versions than this process."""
    if wrong := versions.apart(hello.get(versions.FIELD), name, "the lab"):
        raise Refused(f"{wrong}: {versions.REMEDY}")


def _check_hello(message: Message) -> None:
    if message.op == "refused":
        raise Refused(str(message.fields.get("reason")))
    if message.op != "hello":
        raise WireError(f"the first message is {message.op[:40]!r}, not 'hello'")


def _some(count: int) -> int:
    if count == 0:
        raise auth.AuthenticationError(
            "the other end closed the connection during the handshake (does it have another key?)"
        )
    return count


def _exactly(
    sock: socket.socket, count: int, heard: Callable[[Callable[[], bytes]], bytes]
) -> bytes:
    data = b""
    while len(data) < count:
        part = heard(functools.partial(sock.recv, count - len(data)))
        _some(len(part))
        data += part
    return data
