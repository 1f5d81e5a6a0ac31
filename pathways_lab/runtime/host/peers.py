"""This host's links to other hosts: made when first needed, never waited for.

Problem: a transfer must not stand still because another host is slow, stopped
or starting again; connecting waits for the other end, sending does not.

How: what is to be sent to a host that has no open link yet is kept in order
until there is one.  A host that does not answer is tried again for as long as
the control plane counts it as a member.

Rule for maintainers: all methods are called in the reactor's thread but
:meth:`Peers.send`, which is called in one other thread (the exchange's).

Paper: section 4.5 (direct host-to-host transfers over the DCN).
"""

from __future__ import annotations

import ssl
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from pathways_lab.transport.handshake import SILENCE, stream, tune
from pathways_lab.transport.link import Link, LinkClosed
from pathways_lab.transport.reactor import Reactor

Done = Callable[[Exception | None], None]
_PAUSE = 0.2
"""Seconds between two tries."""
_REFUSALS = 25
"""Tries that a host which answers "nobody is here" gets, until its letters are given up."""
_GONE = "{host} has left or was replaced"


class _Outbox:
    def __init__(self) -> None:
        self.link: Link | None = None
        self.letters: deque[tuple[str, dict[str, Any], Sequence[Any], Done]] = deque()
        self.connecting = False
        self.refusals = 0


class Peers:
    """Addresses of the other hosts, and links to those that were written to.

    options: for ``Reactor.connect`` (the TLS context).
    silence: seconds without a sign of a host's machine after which its link breaks.
    """

    silence = SILENCE

    def __init__(self, reactor: Reactor, key: bytes, name: str, **options: Any) -> None:
        self._reactor = reactor
        self._key = key
        self._hello = {"role": "host", "name": name}
        self._options = options
        self._addresses: dict[str, str] = {}
        self._boxes: dict[str, _Outbox] = {}
        self._lock = threading.Lock()

    def members(self, addresses: dict[str, str]) -> None:
        """These are the hosts of the lab now."""
        with self._lock:
            gone = [
                (host, self._boxes.pop(host))
                for host in list(self._boxes)
                if addresses.get(host) != self._addresses.get(host)
            ]
            self._addresses = dict(addresses)
        for host, box in gone:
            if box.link is not None:
                box.link.close(_GONE.format(host=host))
            self._give_up(box, ConnectionError(f"host {host} has left the lab"))

    def send(
        self, host: str, op: str, fields: dict[str, Any], buffers: Sequence[Any], done: Done
    ) -> None:
        """Send to a host; done(None) when it is on its way, done(error) when it never will be."""
        with self._lock:
            box = self._boxes.setdefault(host, _Outbox())
            link = box.link
            if link is None or link.closed is not None:
                box.link = None
                box.letters.append((op, fields, buffers, done))
                if not box.connecting:
                    box.connecting = True
                    self._reactor.call_soon(self._connect, host, box)
                return
        _post(link, op, fields, buffers, done)

    def stream(self, number: int, host: str) -> ssl.SSLSocket:
        """A connection to a host for the collectives of a formation; waits.

        Raises OSError, AuthenticationError, WireError.
        """
        address = self._addresses.get(host)
        if address is None:
            raise ConnectionError(f"host {host} is not in the lab")
        hello = {**self._hello, "number": number}
        sock = stream(address, self._key, hello, self._options["context"])
        tune(sock, self.silence)
        return sock

    # --- in the reactor's thread ----------------------------------------------------

    def _connect(self, host: str, box: _Outbox) -> None:
        address = self._addresses.get(host)
        if self._boxes.get(host) is not box:
            return
        if address is None:
            with self._lock:
                del self._boxes[host]
            self._give_up(box, ConnectionError(f"host {host} is not in the lab"))
            return
        self._reactor.connect_soon(
            address,
            self._key,
            self._hello,
            lambda result: self._connected(host, box, result),
            name=host,
            tag="data",
            bulk=True,
            **self._options,
        )

    def _connected(self, host: str, box: _Outbox, result: Link | Exception) -> None:
        if isinstance(result, Exception):
            # A stopped host does not answer, a starting one refuses: both may come back.
            box.refusals += not isinstance(result, TimeoutError)
            if self._boxes.get(host) is box and box.refusals < _REFUSALS:
                self._reactor.call_later(_PAUSE, self._connect, host, box)
                return
            with self._lock:
                if self._boxes.get(host) is box:
                    del self._boxes[host]
            self._give_up(box, result)
            return
        result.bear(self.silence)
        box.refusals = 0
        while True:
            with self._lock:
                if self._boxes.get(host) is not box:
                    break
                if not box.letters:
                    box.link, box.connecting = result, False
                    return
                letter = box.letters.popleft()
            _post(result, *letter)
        result.close(_GONE.format(host=host))

    def _give_up(self, box: _Outbox, error: Exception) -> None:
        while box.letters:
            box.letters.popleft()[3](error)


def _post(link: Link, op: str, fields: dict[str, Any], buffers: Sequence[Any], done: Done) -> None:
    try:
        link.send(op, fields, buffers)
    except LinkClosed as error:
        done(error)
    else:
        done(None)
