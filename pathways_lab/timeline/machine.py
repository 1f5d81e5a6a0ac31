"""The machine as the records tell it: islands, hosts, devices, slices.

Problem: a view must draw devices before anything ran on them, and also when
the log is so old that the records of their arrival are gone.

Rule for maintainers: what a record mentions exists; a host that only a span
mentions is shown with the devices that it is known to have.  Fold order must
not matter beyond *joined* and *lost* of the same host.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.timeline.packed import Row
from pathways_lab.timeline.records import Event, Record, Sample, own

FEEDS = "feeds"
"""Stands for an island in the lanes of workers that make elements of feeds."""


class Lane(NamedTuple):
    """One device, seen as a lane of a figure."""

    island: str
    host: str
    device: int


@functools.lru_cache(maxsize=4096)
def lanes_of(island: str, host: str, devices: tuple[int, ...]) -> tuple[Lane, ...]:
    """The lanes of some devices of one host; remembered, since every record asks."""
    return tuple([Lane(island, host, device) for device in devices])


@dataclass(slots=True)
class HostSeen:
    """devices: how many.  memory: bytes of each, 0 if unknown.  lost: why it is gone, or ""."""

    name: str
    island: str
    devices: int = 0
    kind: str = ""
    lost: str = ""
    memory: int = 0


class SliceSeen(SliceBinding):
    """A slice, as its record says."""

    __slots__ = ()

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Its devices, with the island of each."""
        home = self.home
        return tuple(Lane(home[host], host, device) for host, device in self.devices)

    def __str__(self) -> str:
        sizes = ", ".join(
            f"{axis}={size}" for axis, size in zip(self.axes, self.shape, strict=False)
        )
        return f"slice s{own(self.slice)} ({sizes or self.shape})"


@dataclass(slots=True)
class Machine:
    """hosts by name, bound slices by number.

    workers: those that made elements of feeds, by name.
    emulated, simulated: whether any device stands in for one, or exists on paper only.
    structure: grows whenever islands, hosts or device counts change, so that a
        view knows when to lay itself out anew.
    """

    hosts: dict[str, HostSeen] = field(default_factory=dict)
    slices: dict[int, SliceSeen] = field(default_factory=dict)
    workers: dict[str, None] = field(default_factory=dict)
    emulated: bool = False
    simulated: bool = False
    structure: int = 0
    _lanes: tuple[int, tuple[Lane, ...]] = (0, ())

    def add(self, record: Record) -> None:
        """Fold one record."""
        if isinstance(record, Sample):
            return
        args = record.args
        if args.get("emulated"):
            self.emulated = True
        if args.get("simulated"):
            self.simulated = True
        if isinstance(record, Event):
            kind = record.kind
            if kind == "host-joined":
                host = self._host(record.island, record.host, int(args.get("devices", 0)))
                host.kind, host.lost = str(args.get("kind", "")), ""
                host.memory = int(args.get("memory", 0))
                return
            if kind == "host-lost":
                host = self._host(record.island, record.host, 0)
                host.lost = str(args.get("reason", "")) or "lost"
                return
            if kind == "slice-bound":
                self._bind(record)
                return
            if kind in ("slice-freed", "slice-suspended", "slice-withdrawn"):
                self.slices.pop(int(args.get("slice", -1)), None)
                return
            devices = tuple(args.get("devices", ())) if kind == "launched" else ()
        else:
            devices = record.devices
            if record.kind == "host-computation" and record.host not in self.workers:
                self.workers[record.host] = None
                self.structure += 1
        if record.host and record.island and devices:
            self._host(record.island, record.host, max(devices) + 1)

    def join(self, items: Iterable[object]) -> None:
        """Fold the hosts of *items* that joined, before anything else; wrong ones are left out."""
        for item in items:
            if isinstance(item, Event) and item.kind == "host-joined":
                with contextlib.suppress(ValueError, TypeError):
                    self.add(item)

    def add_row(self, row: Row) -> None:
        """Fold a row of gangs."""
        self.emulated = self.emulated or row.emulated
        self._host(row.island, row.host, max(row.abouts[0].devices) + 1)

    def _host(self, island: str, name: str, devices: int) -> HostSeen:
        host = self.hosts.get(name)
        if host is None:
            host = self.hosts[name] = HostSeen(name, island)
            self.structure += 1
        if devices > host.devices:
            host.devices = devices
            self.structure += 1
        return host

    def _bind(self, event: Event) -> None:
        args = event.args
        number = int(args.get("slice", -1))
        devices = tuple((str(host), int(local)) for host, local in args.get("devices", ()))
        elsewhere = args.get("elsewhere", ())
        bound = self.slices[number] = SliceSeen(
            slice=number,
            client=event.client,
            island=event.island,
            shape=tuple(int(size) for size in args.get("shape", ())),
            axes=tuple(str(axis) for axis in args.get("axes", ())),
            devices=devices,
            kind="",
            elsewhere=tuple((str(host), str(island)) for host, island in elsewhere),
        )
        for lane in bound.lanes:
            self._host(lane.island, lane.host, lane.device + 1)

    @property
    def islands(self) -> tuple[str, ...]:
        """Island names, sorted as people count (island2 before island10)."""
        return tuple(sorted({h.island for h in self.hosts.values()}, key=natural))

    def hosts_of(self, island: str) -> tuple[HostSeen, ...]:
        """Hosts of one island, sorted as people count."""
        return tuple(
            sorted(
                (h for h in self.hosts.values() if h.island == island),
                key=lambda h: natural(h.name),
            )
        )

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Every device: by island, then host, then number."""
        if self._lanes[0] != self.structure:
            lanes = [
                Lane(island, host.name, device)
                for island in self.islands
                for host in self.hosts_of(island)
                for device in range(host.devices)
            ]
            self._lanes = self.structure, tuple(lanes)
        return self._lanes[1]

    @property
    def feeders(self) -> tuple[Lane, ...]:
        """A lane for every worker that made elements of feeds."""
        return tuple(Lane(FEEDS, name, 0) for name in sorted(self.workers, key=natural))

    @property
    def held(self) -> dict[tuple[str, int], SliceSeen]:
        """The newest slice on every device that has one, by host and local number."""
        return {place: seen for seen in self.slices.values() for place in seen.devices}


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """A sort key that counts digits as numbers."""
    return tuple(
        (0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part
    )
