"""The machine as the core sees it: islands, hosts, requests for devices, bindings.

Problem: users ask for virtual devices; the resource manager answers with
physical ones of one island.  These are the nouns of that conversation.

Rule for maintainers: slices own *devices*; bytes belong to the store and order
to the gang scheduler.

Paper: section 4.1 (resource manager), section 3 (virtual device sets).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from pathways_lab.core.program.program import SliceId

Owned = tuple[str, int]
"""A physical device: its host, and its number there."""


@dataclass(frozen=True, slots=True)
class SliceRequest:
    """shape: mesh shape, 1 to 3 dimensions.  axes: one name per dimension.

    island, kind: constraints; None means any.
    memory: least bytes per device; 0 means any.
    at: the devices themselves, as in a binding: for who looks into devices and not for programs.
    window: seconds of work that may be ahead on its devices when one of its gangs gets its place;
        None: as the lab says.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    island: str | None = None
    kind: str | None = None
    memory: int = 0
    at: tuple[Owned, ...] = ()
    window: float | None = None

    @property
    def devices(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class SliceBinding:
    """A slice bound to physical devices of one island.

    devices: ``(host, local device number)`` per virtual device, row-major over
    *shape*.  generation: how often it was bound to other devices before.
    """

    slice: SliceId
    client: str
    island: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    devices: tuple[Owned, ...]
    kind: str
    generation: int = 0

    def __hash__(self) -> int:
        """The hash of its name: bindings are looked up often, and may have thousands of devices."""
        return hash((self.slice, self.generation))

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts of the slice, each once, in device order."""
        return tuple(dict.fromkeys(host for host, _ in self.devices))

    @property
    def by_host(self) -> dict[str, tuple[int, ...]]:
        """Its virtual devices, by number, of each host; both in device order."""
        found: dict[str, list[int]] = {}
        for device, (host, _) in enumerate(self.devices):
            found.setdefault(host, []).append(device)
        return {host: tuple(devices) for host, devices in found.items()}


@functools.lru_cache(maxsize=256)
def locals_of(binding: SliceBinding) -> Mapping[str, tuple[int, ...]]:
    """The hosts' own numbers of its devices, by host; both in device order."""
    found: dict[str, list[int]] = {}
    for host, device in binding.devices:
        found.setdefault(host, []).append(device)
    return {host: tuple(devices) for host, devices in found.items()}


@dataclass(frozen=True, slots=True)
class HostInfo:
    """One host.  memory: bytes per device.  block: how its devices are wired."""

    name: str
    island: str
    devices: int
    kind: str
    memory: int
    block: tuple[int, ...] = ()
