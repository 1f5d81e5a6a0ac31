"""The control plane's book of islands whose hosts start as one runtime: accelerators.

Problem: the runtime of GPUs and TPUs joins all processes of an island before any
of them has devices at all, and none of them survives the loss of another.  So
hosts that are to compute together *wait* first, without devices; when all of
them are there, they are told where to meet; and when one is lost, all start
anew (a new assembly, the island's next epoch).  CPU devices do without: see
:mod:`pathways_lab.runtime.islands.process_groups`.

Rule for maintainers: pure; one thread (the reactor's); no order of gangs here.

Paper: section 4.5, appendix A (pluggable runtimes).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pathways_lab.runtime.islands.process_groups import Services, Tell

End = Callable[[str, str], object]
"""``(host, reason)``: end a device process, whose worker starts another; never raises."""


class HostWaiting(NamedTuple):
    """A device process without devices, which waits until *members* hosts of its island do."""

    name: str
    island: str
    members: int

    @classmethod
    def seen(cls, hello: dict[str, Any]) -> HostWaiting:
        """The one that a hello describes.  Raises KeyError, TypeError, ValueError."""
        found = cls(hello["name"], hello["island"], hello["members"])
        if not all(type(text) is str and text for text in found[:2]):
            raise ValueError("name and island must be text")
        if type(found.members) is not int or found.members < 2:
            raise ValueError("members must be a number from 2 on")
        return found


@dataclass(slots=True)
class _Assembly:
    """members: how many there are to be.  number: of its service, once all are there."""

    members: int
    hosts: set[str] = field(default_factory=set)
    number: int = 0


class Assemblies:
    """All assemblies of a cluster, by island.

    Their numbers are below zero: formations have those above, at the same services.
    """

    def __init__(self, services: Services, tell: Tell, end: End) -> None:
        self._services = services
        self._numbers = itertools.count(-1, -1)
        self._tell = tell
        self._end = end
        self._islands: dict[str, _Assembly] = {}

    def waits(self, host: str, island: str, members: int) -> None:
        """A device process without devices waits for the others of its island."""
        known = self._islands.get(island)
        if known is not None and (known.number or known.members != members):
            known.hosts.discard(host)
            self._dissolve(island, f"{host} starts anew")
        assembly = self._islands.setdefault(island, _Assembly(members))
        assembly.hosts.add(host)
        if len(assembly.hosts) == members:
            assembly.number = next(self._numbers)
            self._services.open(assembly.number, members, self)

    def opened(self, number: int, address: str) -> None:
        """The service of an assembly is there: all its hosts meet at it."""
        for assembly in self._islands.values():
            if assembly.number == number:
                hosts = sorted(assembly.hosts)
                for host in hosts:
                    fields = {"address": address, "number": number, "hosts": hosts}
                    self._tell(host, "assemble", fields)

    def refused(self, number: int, reason: str) -> None:
        """There is no service for an assembly."""
        for island, assembly in list(self._islands.items()):
            if assembly.number == number:
                self._dissolve(island, f"no coordination service: {reason}")

    def orphaned(self, numbers: Iterable[int]) -> None:
        """The services of these are gone: what never computed together could not meet any more."""
        for number in numbers:
            self.refused(number, "the process that introduces hosts was lost")

    def lost(self, host: str, reason: str) -> None:
        """A host is gone, waiting or at work: those that were assembled with it start anew."""
        for island, assembly in list(self._islands.items()):
            if host in assembly.hosts:
                assembly.hosts.discard(host)
                if assembly.number:
                    self._dissolve(island, f"{host} was lost: {reason}")

    def _dissolve(self, island: str, reason: str) -> None:
        assembly = self._islands.pop(island)
        if assembly.number:
            self._services.close(assembly.number)
        for host in sorted(assembly.hosts):
            self._end(host, f"{reason}; the hosts of {island} start anew together")
