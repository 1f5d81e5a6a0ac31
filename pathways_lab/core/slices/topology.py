"""The machine as the core sees it: islands, hosts, requests for devices, bindings.

Problem: users ask for virtual devices; the resource manager answers with
physical ones of one island, or of several.  These are the nouns of that conversation.

Rule for maintainers: slices own *devices*; bytes belong to the store and order
to the gang scheduler.

Paper: section 4.1 (resource manager), section 3 (virtual device sets).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from pathways_lab.core.program.program import LONGEST_WINDOW, SliceId, is_window

Owned = tuple[str, int]
"""A physical device: its host, and its number there."""


@dataclass(frozen=True, slots=True)
class SliceRequest:
    """shape: mesh shape, 1 to 3 dimensions.  axes: one name per dimension.

    island, kind: constraints; None means any.
    islands: those that it spans, each with an equal part of the first dimension, in this order;
        "" means any.  Nothing: it lies on one.
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
    islands: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        return math.prod(self.shape)

    @property
    def parts(self) -> tuple[str, ...]:
        """The wanted island of each part of the mesh; "" means any."""
        return self.islands or (self.island or "",)

    @property
    def part(self) -> tuple[int, ...]:
        """The mesh shape on each island."""
        return (self.shape[0] // len(self.parts), *self.shape[1:])

    @property
    def malformed(self) -> str:
        """The rule that the wish breaks whatever devices there are, or ""."""
        if not 1 <= len(self.shape) <= 3 or any(size < 1 for size in self.shape):
            return f"slice shape {self.shape} must have 1 to 3 sizes, each at least 1"
        if len(set(self.axes)) != len(self.shape):
            return f"shape {self.shape} needs one distinct axis name per size, got {self.axes}"
        if not all(axis.isascii() for axis in self.axes):
            return f"axis names {self.axes} must be ASCII: others end the process that compiles"
        if self.at and not len(self.at) == len(set(self.at)) == self.devices:
            return f"shape {self.shape} needs {self.devices} different devices, got {self.at}"
        named = [name for name in self.islands if name]
        if self.islands and (self.island is not None or len({*named}) != len(named)):
            return f"a slice lies on island {self.island!r}, or spans {self.islands}, each once"
        if self.shape[0] % len(self.parts):
            return (
                f"the first size of shape {self.shape} cannot be cut into"
                f" {len(self.parts)} equal parts, one for each island"
            )
        if not is_window(self.window):
            return f"a window is a number of seconds, 0 to {LONGEST_WINDOW:g}, got {self.window!r}"
        return ""


@dataclass(frozen=True, slots=True)
class SliceBinding:
    """A slice bound to physical devices, of one island unless it spans several.

    island: of its first device.  elsewhere: ``(host, island)`` of its hosts on other islands.
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
    elsewhere: tuple[tuple[str, str], ...] = ()

    def __hash__(self) -> int:
        """The hash of its name: bindings are looked up often, and may have thousands of devices."""
        return hash((self.slice, self.generation))

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts of the slice, each once, in device order."""
        return tuple(dict.fromkeys(host for host, _ in self.devices))

    @property
    def islands(self) -> tuple[str, ...]:
        """Islands of the slice, each once, that of its first device first."""
        return tuple(dict.fromkeys((self.island, *(island for _, island in self.elsewhere))))

    @property
    def spread(self) -> tuple[str, ...]:
        """The wish to lie on as many islands again; nothing where one will do, or has to."""
        count = len(self.islands)
        return ("",) * count if count > 1 and not self.shape[0] % count else ()

    @property
    def home(self) -> dict[str, str]:
        """The island of each of its hosts, in device order."""
        return dict.fromkeys(self.hosts, self.island) | dict(self.elsewhere)

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
    """One host.  memory: bytes per device.  block: how its devices are wired.

    site: see :class:`~pathways_lab.core.messages.HostJoined`.
    """

    name: str
    island: str
    devices: int
    kind: str
    memory: int
    block: tuple[int, ...] = ()
    site: str = ""
