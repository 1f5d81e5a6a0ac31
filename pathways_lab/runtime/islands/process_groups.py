"""The control plane's book of formations: wanted, forming, formed, over.

Problem: hosts form a common runtime only if all of them are told the same, in
the same order of events, with the address of a service that is opened
meanwhile; and all of them must be told at once when it is over, because gangs
there wait for the other hosts.

How: slices that span hosts and cover the same devices share a formation.
Hosts are told ``span`` before the slice is bound, ``form`` when the service is
there, ``dissolve`` when it is over: the last slice is gone, a host was lost,
it could not be formed, or its collectives broke.  Then its slices are lost even
if all hosts live, and the driver is told.

To JAX the end of a service is the end of every process that still uses it, with all its
values; so a service ends only when every living host has said that it has left.

Rule for maintainers: pure; one thread (the reactor's); no order of gangs here.

Paper: section 4.1, section 4.5.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pathways_lab.core.errors import Failure
from pathways_lab.core.program.program import SliceId
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.runtime.islands.process_group import Formation
from pathways_lab.transport.codec import pack

_ATTEMPTS = 2
"""How often a service is asked for: the coordination process may have died once."""

Tell = Callable[[str, str, dict[str, Any]], object]
"""``(host, operation, fields)``: one message to one host; never raises."""


class Book(Protocol):
    """The part that asked for a service, and hears its fate."""

    def opened(self, number: int, address: str) -> None: ...

    def refused(self, number: int, reason: str) -> None: ...

    def orphaned(self, numbers: list[int]) -> None: ...


class Services(Protocol):
    """The coordination process (:mod:`pathways_lab.runtime.islands.coordination_service`)."""

    def open(self, formation: int, processes: int, book: Book) -> None: ...

    def close(self, formation: int) -> None: ...


@dataclass(slots=True)
class _Entry:
    """orphaned: its service is gone; it goes on, but new slices get another one."""

    formation: Formation
    slices: set[SliceId] = field(default_factory=set)
    attempts: int = 1
    orphaned: bool = False


@dataclass(eq=False, repr=False)
class Formations:
    """All formations of a cluster.  See the module's text for who calls what.

    lost(slices, reason): nothing will compute on these any more, although their hosts live.
    """

    _services: Services
    _tell: Tell
    _lost: Callable[[tuple[SliceId, ...], str], object]
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1), init=False)
    _entries: dict[int, _Entry] = field(default_factory=dict, init=False)
    _staying: dict[int, set[str]] = field(default_factory=dict, init=False)
    """Hosts of ended formations that live and have not said that they have left."""

    def __len__(self) -> int:
        return len(self._entries)

    def of_slice(self, slice_id: SliceId) -> Formation | None:
        """The formation that a slice computes in; None if it needs none or it is over."""
        for entry in self._entries.values():
            if slice_id in entry.slices:
                return entry.formation
        return None

    # --- slices ----------------------------------------------------------------------

    def bind(self, binding: SliceBinding, epoch: int) -> None:
        """A slice is about to be bound on its hosts: call before they are told."""
        if len(binding.hosts) < 2:
            return
        formation = Formation.of(binding, next(self._numbers), epoch)
        known = next(
            (
                entry
                for entry in self._entries.values()
                if entry.formation.footprint == formation.footprint and not entry.orphaned
            ),
            None,
        )
        entry = known or _Entry(formation)
        entry.slices.add(binding.slice)
        fields = {"slice": binding.slice, "formation": pack(entry.formation)}
        for host in entry.formation.hosts:
            self._tell(host, "span", fields)
        if known is None:
            self._entries[formation.number] = entry
            self._services.open(formation.number, len(formation.parts), self)

    def unbind(self, slice_id: SliceId) -> None:
        """A slice is gone, and its hosts were told."""
        for number, entry in list(self._entries.items()):
            if slice_id in entry.slices:
                entry.slices.discard(slice_id)
                if not entry.slices:
                    self._end(number, "its last slice was released")

    # --- hosts -----------------------------------------------------------------------

    def host_lost(self, host: str, reason: str) -> None:
        """Call before the core is told: what waits for this host must not wait on."""
        for number, entry in list(self._entries.items()):
            if host in entry.formation.hosts:
                self._end(number, f"{host} was lost: {reason}", without=host)
        for number in list(self._staying):
            self.left(number, host)

    def left(self, number: int, host: str) -> None:
        """A host says that it uses the service of a formation no more."""
        staying = self._staying.get(number)
        if staying is not None:
            staying.discard(host)
            if not staying:
                del self._staying[number]
                self._services.close(number)

    def formed(self, number: int, host: str, why: str | None) -> None:
        """A host says "joined": that it is in, or *why* it is not."""
        if why is not None:
            self.broken(number, f"{host} could not join: {why}", host)

    def broken(self, number: int, reason: str, host: str = "") -> None:
        """Its hosts cannot compute together (any more); a slice bound later gets a new one.

        host: says so, if it is one of them; "": it is said here.
        """
        entry = self._entries.get(number)
        if entry is not None and host in ("", *(name for name, _ in entry.formation.parts)):
            slices = tuple(sorted(entry.slices))
            self._end(number, reason)
            self._lost(slices, reason)

    def renew(self, slices: Collection[SliceId], failure: Failure) -> None:
        """End the formations of these slices, and form them again: their hosts hang in them.

        failure: why whatever was granted there fails.
        """
        for number, entry in list(self._entries.items()):
            if entry.slices.isdisjoint(slices):
                continue
            del self._entries[number]
            self._staying[number] = set(entry.formation.hosts)
            formation = replace(entry.formation, number=next(self._numbers))
            self._entries[formation.number] = _Entry(formation, entry.slices)
            fields = {
                "number": number,
                "failure": pack(failure),
                "formation": pack(formation),
                "slices": sorted(entry.slices),
            }
            for host in formation.hosts:
                self._tell(host, "reform", fields)
            self._services.open(formation.number, len(formation.parts), self)

    def together(self, slices: Collection[SliceId]) -> set[SliceId]:
        """These slices, and all that share a formation with one of them."""
        shared = [e.slices for e in self._entries.values() if not e.slices.isdisjoint(slices)]
        return set(slices).union(*shared)

    # --- services --------------------------------------------------------------------

    def opened(self, number: int, address: str) -> None:
        """The service of a formation is there: all its hosts meet at it."""
        entry = self._entries.get(number)
        if entry is None:
            return
        for host in entry.formation.hosts:
            self._tell(host, "form", {"number": number, "address": address})

    def refused(self, number: int, reason: str) -> None:
        """There is no service for a formation."""
        entry = self._entries.get(number)
        if entry is None:
            return
        if entry.attempts < _ATTEMPTS:
            entry.attempts += 1
            self._services.open(number, len(entry.formation.parts), self)
        else:
            self.broken(number, f"no coordination service: {reason}")

    def orphaned(self, numbers: list[int]) -> None:
        """The services of these are gone; groups of devices that met before compute on."""
        for number in numbers:
            if number in self._entries:
                self._entries[number].orphaned = True

    def _end(self, number: int, reason: str, without: str = "") -> None:
        formation = self._entries.pop(number).formation
        self._staying[number] = {*formation.hosts, without}
        for host in formation.hosts:
            if host != without:
                self._tell(host, "dissolve", {"number": number, "reason": reason})
        self.left(number, without)
