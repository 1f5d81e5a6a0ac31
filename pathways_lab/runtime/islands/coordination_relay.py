"""Between a host and its coordination service, so that the host survives its loss.

Problem: JAX ends a process as soon as the connection to its coordination
service breaks, although what the process computes does not need it: the
service only introduces devices that never computed together before.

How: the process connects to a Unix socket of its own; this relay carries the
bytes to the service and back.  When the service goes, the relay keeps the
process's side open and silent, and says so (*on_lost*): then the agent can be shut down
in peace, after which nothing in it minds.

Rule for maintainers: never close a connection of the process's side before
the agent at its end was shut down (:meth:`Relay.close`).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pathways_lab.runtime.islands.tls_tunnel import carry
from pathways_lab.transport.auth import HOSTS, AuthenticationError
from pathways_lab.transport.framing import WireError
from pathways_lab.transport.handshake import stream
from pathways_lab.transport.tls import client_context

_CHUNK = 65536
Upstream = Callable[[], socket.socket]
"""A new connection to a coordination service; waits.  Raises OSError."""


class Relay:
    """Carries bytes between one local Unix socket and a coordination service.

    upstream: the service's own Unix socket, as gRPC names it, or what connects to it elsewhere.
    address: of the local socket, as gRPC names it.
    lost: whether the service went away.
    on_lost: called when it does, once, in the relay's thread.

    One thread.  The amounts are tiny (a few kB per group of devices), so one
    side that is slow to read may hold up the other.
    """

    def __init__(
        self,
        upstream: str | Upstream,
        folder: Path,
        on_lost: Callable[[], object] = lambda: None,
    ) -> None:
        self.lost = False
        self._on_lost = on_lost
        self._connect = partial(to_service, upstream) if isinstance(upstream, str) else upstream
        self._folder = Path(tempfile.mkdtemp(prefix="r", dir=folder))
        path = str(self._folder / "s")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self.address = f"unix:{path}"
        self._other: dict[socket.socket, socket.socket | None] = {}
        self._inner: set[socket.socket] = set()
        self._closing = threading.Event()
        self._waker, self._wakee = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for sock in (self._listener, self._wakee):
            self._selector.register(sock, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cut everything.  The agent must have been shut down.  Again is fine."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _run(self) -> None:
        while not self._closing.is_set():
            for key, _ in self._selector.select():
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._listener:
                    self._accept()
                elif sock in self._other:
                    self._carry(sock)
        for sock in (*self._other, self._listener, self._waker, self._wakee):
            sock.close()
        self._selector.close()
        with contextlib.suppress(OSError):
            os.unlink(self._folder / "s")
            os.rmdir(self._folder)

    def _accept(self) -> None:
        inner, _ = self._listener.accept()
        self._inner.add(inner)
        self._selector.register(inner, selectors.EVENT_READ)
        try:
            outer = self._connect()
        except OSError:
            self._other[inner] = None
            self._lose()
            return
        self._other[inner], self._other[outer] = outer, inner
        self._selector.register(outer, selectors.EVENT_READ)

    def _carry(self, sock: socket.socket) -> None:
        other = self._other[sock]
        try:
            data = sock.recv(_CHUNK)
        except OSError:
            data = b""
        if data and other is not None:
            # An other end that is gone shows when it is read.
            with contextlib.suppress(OSError):
                other.sendall(data)
            return
        if data:
            return
        # This end is gone.  An outer one leaves its inner one open, and silent.
        self._selector.unregister(sock)
        del self._other[sock]
        sock.close()
        if sock in self._inner:
            self._inner.discard(sock)
            if other is not None:
                self._selector.unregister(other)
                del self._other[other]
                other.close()
        else:
            assert other is not None
            self._other[other] = None
            self._lose()

    def _lose(self) -> None:
        if not self.lost:
            self.lost = True
            self._on_lost()


def to_service(address: str) -> socket.socket:
    """A connection to a coordination service of this machine.  Raises OSError."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(address.removeprefix("unix:"))
    except OSError:
        sock.close()
        raise
    return sock


def through_control(settings: Mapping[str, Any], number: int) -> socket.socket:
    """A connection to a service of another machine, through the control plane's door.

    settings: of the device process.  Raises OSError.
    """
    hello = {"name": settings["name"], "number": number}
    key, context = bytes.fromhex(settings["key"]), client_context(settings["tls"])
    try:
        sealed = stream(settings["control"], key, hello, context, HOSTS)
    except (AuthenticationError, WireError) as error:
        raise ConnectionError(str(error)) from error
    near, far = socket.socketpair()
    carry(far, sealed)
    return near
