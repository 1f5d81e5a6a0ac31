"""The part of one host in one transfer: pure arithmetic over layouts and bindings.

Problem: the hosts of both ends must agree, without a message, on the sender and the
receiver of every box.  Both compute the same :class:`Route` from data that they have
anyway: shape, layouts, bindings.

How: target devices of one host that want the same box are a *group*; it is
assembled once, and its devices share the memory.  The pieces of a group are
those of its first device; each crosses the wire once.  Between machines a large piece that several
hosts want leaves its owner once, in parts; each of these hosts sends a part on to the
next one while the other parts come.

Rule for maintainers: deterministic, and the same on every host; no host plans
to hold more than its own groups.

Paper: section 4.3 (transfers between differently sharded computations).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from pathways_lab.core.program.layout import Box, Layout, boxes, exchange
from pathways_lab.core.slices.topology import SliceBinding

_PART = 1 << 18
"""Elements of a part of a piece that goes from host to host."""
Taker = tuple[str, int]
"""A host, and the target that names its group."""


@dataclass(frozen=True, slots=True)
class Coming:
    """One piece of a group.

    source, owner: the device whose piece it is, and its host.  sender: the host that it comes from.
    onward: takers that it goes on to from here, one after the other.
    """

    box: Box
    source: int
    owner: str
    sender: str
    onward: tuple[Taker, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """Devices of this host that want the same box.

    target: the first of them, which names the group.  devices: all of them.
    pieces: they fill it.
    """

    target: int
    devices: tuple[int, ...]
    box: Box
    pieces: tuple[Coming, ...]


@dataclass(frozen=True, slots=True)
class Sending:
    """One piece that this host gives away.

    target: the group on *host*.  onward: the takers that it goes on to from there.
    """

    host: str
    target: int
    box: Box
    source: int
    onward: tuple[Taker, ...] = ()


@dataclass(frozen=True, slots=True)
class Route:
    """sends: pieces from devices of this host, its own groups included.

    groups: what this host assembles.  origins: the box of every source device.
    """

    sends: tuple[Sending, ...]
    groups: tuple[Group, ...]
    origins: tuple[Box, ...]

    @property
    def receivers(self) -> frozenset[str]:
        """Hosts that get something from this one, itself included, also by way of others."""
        takers = (taker for send in self.sends for taker in send.onward)
        return frozenset(host for host, _ in takers) | {send.host for send in self.sends}


@functools.lru_cache(maxsize=1024)
def route(
    shape: tuple[int, ...],
    source: Layout,
    target: Layout,
    source_binding: SliceBinding,
    target_binding: SliceBinding,
    host: str,
    apart: bool = False,
) -> Route:
    """The part of *host* in copying an array from one slice's layout to another's.

    apart: hosts are on several machines, so that their links are what is scarce.
    """
    source_hosts = tuple(name for name, _ in source_binding.devices)
    target_hosts = tuple(name for name, _ in target_binding.devices)
    wanted = boxes(target, shape)
    members: dict[tuple[str, Box], list[int]] = {}
    for device, box in enumerate(wanted):
        members.setdefault((target_hosts[device], box), []).append(device)
    first = {devices[0]: devices for devices in members.values()}
    takers: dict[tuple[int, Box], list[Taker]] = {}
    for piece in exchange(shape, source, target, source_hosts, target_hosts):
        if piece.target in first:
            taker = (target_hosts[piece.target], piece.target)
            takers.setdefault((piece.source, piece.box), []).append(taker)
    pieces: dict[int, list[Coming]] = {device: [] for device in first}
    sends: list[Sending] = []
    for (device, box), all_takers in takers.items():
        owner = source_hosts[device]
        for part, way in _ways(box, owner, all_takers, apart):
            if owner == host:
                (next_host, next_target), *onward = way
                sends.append(Sending(next_host, next_target, part, device, tuple(onward)))
            sender = owner
            for place, (taking, group) in enumerate(way, 1):
                if taking == host:
                    pieces[group].append(Coming(part, device, owner, sender, way[place:]))
                sender = taking
    groups = tuple(
        Group(device, tuple(devices), wanted[device], tuple(pieces[device]))
        for device, devices in first.items()
        if target_hosts[device] == host
    )
    return Route(tuple(sends), groups, boxes(source, shape))


def _ways(
    box: Box, owner: str, takers: list[Taker], apart: bool
) -> Iterator[tuple[Box, tuple[Taker, ...]]]:
    """The parts in which a piece leaves its owner, and the takers that each goes through."""
    far = tuple(taker for taker in takers if taker[0] != owner)
    large = math.prod(stop - start for start, stop in box) > _PART
    together = apart and large and len(far) > 1
    for taker in takers:
        if not together or taker[0] == owner:
            yield box, (taker,)
    if together:
        for part in _parts(box):
            yield part, far


def _parts(box: Box) -> Iterator[Box]:
    """A box cut across its longest side."""
    sizes = [stop - start for start, stop in box]
    side = max(range(len(box)), key=sizes.__getitem__)
    step = max(1, _PART * sizes[side] // math.prod(sizes))
    begin, end = box[side]
    for start in range(begin, end, step):
        yield *box[:side], (start, min(start + step, end)), *box[side + 1 :]
