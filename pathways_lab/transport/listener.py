"""Listening sockets, and connections on their way to become links.

Problem: every peer that can reach a listener can open connections, send nothing, send
nonsense, or send slowly; none of that may stop others from coming in, or cost
more than a few bytes and a bounded time.

Rule for maintainers: everything here happens in the reactor's thread; a
connection leaves either as a link that is authenticated and greeted, or closed
and counted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from pathways_lab.transport.auth import AuthenticationError
from pathways_lab.transport.framing import Limits, Message, WireError
from pathways_lab.transport.handshake import Arrival, tune

_HANDSHAKE_SECONDS = 10.0
_ARRIVALS = 64
"""Connections that may be on their way at once; the oldest gives way to a newer one."""
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""This process or this machine has no room for one more connection."""
_REST_SECONDS = 0.5
"""Then it stays at the door, and a selector would tell of it without end."""


@dataclass(slots=True, eq=False)
class Listener:
    """A listening socket.  greet(arrival, messages): the hello, and what followed it, are there.

    limits: what one message of an arrival may claim.
    sock: None when connections come from elsewhere, see :meth:`Reception.take`.
    """

    sock: socket.socket | None
    address: str
    key: bytes
    context: ssl.SSLContext | None
    greet: Callable[[Arrival, list[Message]], None]
    limits: Limits


class Reception:
    """All listeners of a reactor, and the arrivals at them.

    rejected: connections that were closed before they became links.
    """

    def __init__(self, selector: selectors.BaseSelector, call_later: Callable[..., None]) -> None:
        self.rejected = 0
        self._selector = selector
        self._call_later = call_later
        self._listeners: list[Listener] = []
        self._arrivals: dict[Arrival, Listener] = {}

    def open(self, listener: Listener) -> None:
        """Take connections at *listener* from now on."""
        self._listeners.append(listener)
        self._watch(listener)

    def admit(self, arrival: Arrival) -> None:
        """It becomes a link: its socket is the caller's from now on."""
        del self._arrivals[arrival]
        self._selector.unregister(arrival.sock)

    def turn_away(self, arrival: Arrival) -> None:
        """Close a connection that is not a link yet; nothing if it is one by now."""
        if self._arrivals.pop(arrival, None) is not None:
            self.rejected += 1
            self._selector.unregister(arrival.sock)
            arrival.sock.close()

    def close(self) -> None:
        """Close all listeners and arrivals."""
        for listener in self._listeners:
            if listener.sock is not None:
                with contextlib.suppress(KeyError):  # it rests
                    self._selector.unregister(listener.sock)
                listener.sock.close()
            if listener.address.startswith("unix:"):
                with contextlib.suppress(OSError):
                    os.unlink(listener.address.removeprefix("unix:"))
        self._listeners.clear()
        for arrival in tuple(self._arrivals):
            self.turn_away(arrival)

    def _watch(self, listener: Listener) -> None:
        sock = listener.sock
        if sock is not None and listener in self._listeners:
            self._selector.register(
                sock, selectors.EVENT_READ, lambda _events: self._accept(listener, sock)
            )

    def _accept(self, listener: Listener, door: socket.socket) -> None:
        for _ in range(16):
            try:
                sock, _ = door.accept()
            except OSError as error:
                if error.errno in _FULL:
                    with contextlib.suppress(KeyError):  # two threads were told of it
                        self._selector.unregister(door)
                        self._call_later(_REST_SECONDS, self._watch, listener)
                return
            self.take(listener, sock)

    def take(self, listener: Listener, sock: socket.socket) -> None:
        """A connection has come: it is on its way to become a link."""
        if listener not in self._listeners:
            sock.close()
            return
        try:
            tune(sock)
            if listener.context is not None:
                sock = listener.context.wrap_socket(
                    sock, server_side=True, do_handshake_on_connect=False
                )
            arrival = Arrival(sock, listener.key, listener.limits)
        except OSError:
            sock.close()
            return
        if len(self._arrivals) >= _ARRIVALS:
            self.turn_away(next(iter(self._arrivals)))
        self._arrivals[arrival] = listener
        self._selector.register(sock, selectors.EVENT_READ, lambda _events: self._arriving(arrival))
        self._call_later(_HANDSHAKE_SECONDS, self.turn_away, arrival)

    def _arriving(self, arrival: Arrival) -> None:
        if arrival not in self._arrivals:
            return  # two threads were told of it, and to the first one it has become a link
        try:
            messages = arrival.step()
        except (AuthenticationError, WireError, OSError):
            self.turn_away(arrival)
            return
        if messages:
            self._arrivals[arrival].greet(arrival, messages)
