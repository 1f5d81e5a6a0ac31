"""The memory of a lab's observer: the newest records, and all islands, slices and clients.

Problem: a page may be opened when the records of joining clients are long gone.

Rule for maintainers: one thread asks (the server's loop); records arrive in another.
"""

from __future__ import annotations

import contextlib
import time

from pathways_lab.runtime.cluster.attach import ControlAddress
from pathways_lab.runtime.control_plane.observer import Observer
from pathways_lab.timeline.log import Timeline
from pathways_lab.timeline.machine import Machine
from pathways_lab.timeline.packed import Packed, Row
from pathways_lab.timeline.records import Event, Record
from pathways_lab.transport.clock_sync import Difference

CAPACITY = 60_000
"""Records that are kept: some tens of MB."""


class Watch:
    """A lab, as its records tell it.

    timeline: the newest records.  clients: names of those that are connected.
    ended: why nothing more will come, or "".
    """

    def __init__(self, control: ControlAddress) -> None:
        self.ended = ""
        self.clients: dict[str, None] = {}
        self.machine = Machine()
        self._version = 0
        self._apart = Difference()
        self.timeline = Timeline(CAPACITY, clock=lambda: time.monotonic() + self._apart.offset)
        self._observer = Observer(control, self.timeline.extend_later, self._end)
        self._apart = self._observer.clock

    def look(self) -> None:
        """Fold what is new."""
        batch = self.timeline.since(self._version)
        self._version = batch.version
        for item in batch.items:
            with contextlib.suppress(Exception):  # the scene counts what is not understood
                if isinstance(item, Row):
                    self.machine.add_row(item)
                elif not isinstance(item, Packed):
                    self.machine.add(item)
            if isinstance(item, Event) and item.kind == "client-joined":
                self.clients[item.client] = None
            elif isinstance(item, Event) and item.kind == "client-left":
                self.clients.pop(item.client, None)

    def recall(self) -> None:
        """Say again who is there, if the records that said it are gone."""
        self.look()
        if self.timeline.evicted:
            self.timeline.extend(present(self.machine, self.timeline.clock()))

    def close(self) -> None:
        """Follow no more."""
        self._observer.close()

    def _end(self, reason: str) -> None:
        self.ended = reason


def present(machine: Machine, now: float) -> list[Record]:
    """Records that make *machine* out of nothing."""
    out: list[Record] = []
    for host in machine.hosts.values():
        about = {"devices": host.devices, "kind": host.kind, "emulated": machine.emulated}
        out.append(Event("host-joined", now, host.island, host.name, args=about))
        if host.lost:
            lost = {"reason": host.lost}
            out.append(Event("host-lost", now, host.island, host.name, args=lost))
    for held in machine.slices.values():
        bound = {"slice": held.slice, "shape": held.shape, "axes": held.axes}
        bound |= {"devices": held.devices, "elsewhere": held.elsewhere}
        out.append(Event("slice-bound", now, held.island, client=held.client, args=bound))
    return out
