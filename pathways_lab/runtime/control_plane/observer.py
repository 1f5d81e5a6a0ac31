"""A link that only listens: what happens on a lab, told to a process that is no client.

Problem: pages that show a lab to everybody need its records, and must not be
counted among its clients, hold anything, or be able to ask for anything.

Rule for maintainers: nothing is ever sent; records stay packed until somebody
looks (see :mod:`pathways_lab.transport.record_encoding`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.runtime.cluster.attach import ControlAddress
from pathways_lab.timeline.packed import Item
from pathways_lab.timeline.records import Event, Record
from pathways_lab.timeline.records_of import bound
from pathways_lab.transport import record_encoding, tls
from pathways_lab.transport.codec import unpack
from pathways_lab.transport.link import Link
from pathways_lab.transport.reactor import Reactor

Remember = Callable[[int, Callable[[], Iterable[Item]]], object]
"""``remember(least, read)``: at least so many records have come; ``read()`` makes them.
As :meth:`pathways_lab.timeline.log.Timeline.extend_later` takes them."""


class Observer:
    """Follows a lab until it ends.

    remember: called in a thread of its own; first with the islands, hosts, slices
        and clients that are there, as records.
    ended: called with the reason, in that thread.
    clock: the difference between this process's monotonic clock and the records'.

    Raises what :meth:`Reactor.connect` raises.
    """

    def __init__(
        self, control: ControlAddress, remember: Remember, ended: Callable[[str], object]
    ) -> None:
        self._remember = remember
        self._ended = ended
        self._introduced = False
        self._reactor, link = _connected(control, self._message, self._closed)
        self.clock = link.clock
        link.beat(lambda _: None)
        self._reactor.call_soon(self._introduce, link)

    def close(self) -> None:
        """Stop listening."""
        self._reactor.close()

    def _introduce(self, link: Link) -> None:
        """The state before the oldest record comes first."""
        if not self._introduced:
            self._introduced = True
            known = _records(link.peer["topology"], time.monotonic() + link.clock.offset)
            self._remember(len(known), lambda: known)

    def _message(
        self, link: Link, op: str, fields: dict[str, Any], buffers: list[memoryview]
    ) -> None:
        if op == "records":
            self._introduce(link)
            written = fields["records"]
            self._remember(
                record_encoding.count(written), lambda: record_encoding.read_packed(written)
            )

    def _closed(self, link: Link, reason: str) -> None:
        self._ended(reason)


def look(control: ControlAddress) -> Mapping[str, Any]:
    """The topology message of a lab as it is now: its hosts, clients and kept values.

    Raises what :meth:`Reactor.connect` raises.
    """
    reactor, link = _connected(control, lambda *_: None, lambda *_: None)
    reactor.close()
    told: Mapping[str, Any] = link.peer["topology"]
    return told


def _connected(
    control: ControlAddress, message: Callable[..., None], closed: Callable[[Link, str], None]
) -> tuple[Reactor, Link]:
    reactor = Reactor("observer", message, closed)
    reactor.start()
    try:
        context = tls.client_context(control.tls)
        hello = {"role": "observer"}
        return reactor, reactor.connect(control.address, control.key, hello, context=context)
    except BaseException:
        reactor.close()
        raise


def _records(topology: Mapping[str, Any], now: float) -> list[Record]:
    """A topology message, as the events from which it came, all *now*."""
    out: list[Record] = []
    for island in topology["islands"]:
        for host in island["hosts"]:
            args = {name: host[name] for name in ("devices", "kind", "memory", "emulated", "pid")}
            out.append(Event("host-joined", now, island["name"], host["name"], args=args))
    out += [Event("client-joined", now, client=name) for name in topology["clients"]]
    out += [bound(unpack(SliceBinding, packed), now) for packed in topology["slices"]]
    return out
