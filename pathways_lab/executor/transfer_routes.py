"""The part of one host in one transfer: pure arithmetic over layouts and bindings.

Problem: the hosts of both ends must agree, without a message, on the sender and the
receiver of every box.  Both compute the same :class:`Route` from data that they have
anyway: shape, layouts, bindings.

How: target devices of one host that want the same box are a *group*; it is
assembled once, and its devices share the memory.  The pieces of a group are
those of its first device; each crosses the wire once.

Rule for maintainers: deterministic, and the same on every host; no host plans
to hold more than its own groups.

Paper: section 4.3 (transfers between differently sharded computations).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from pathways_lab.core.program.layout import Box, Layout, boxes, exchange
from pathways_lab.core.slices.topology import SliceBinding


@dataclass(frozen=True, slots=True)
class Group:
    """Devices of this host that want the same box.

    target: the first of them, which names the group.  devices: all of them.
    pieces: ``(box, source device, source host)`` that fill it.
    """

    target: int
    devices: tuple[int, ...]
    box: Box
    pieces: tuple[tuple[Box, int, str], ...]


@dataclass(frozen=True, slots=True)
class Sending:
    """One piece that this host gives away.  target: the group on *host*."""

    host: str
    target: int
    box: Box
    source: int


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
        """Hosts that this one sends to, itself included."""
        return frozenset(send.host for send in self.sends)


@functools.lru_cache(maxsize=1024)
def route(
    shape: tuple[int, ...],
    source: Layout,
    target: Layout,
    source_binding: SliceBinding,
    target_binding: SliceBinding,
    host: str,
) -> Route:
    """The part of *host* in copying an array from one slice's layout to another's."""
    source_hosts = tuple(name for name, _ in source_binding.devices)
    target_hosts = tuple(name for name, _ in target_binding.devices)
    wanted = boxes(target, shape)
    members: dict[tuple[str, Box], list[int]] = {}
    for device, box in enumerate(wanted):
        members.setdefault((target_hosts[device], box), []).append(device)
    first = {devices[0]: devices for devices in members.values()}
    pieces: dict[int, list[tuple[Box, int, str]]] = {device: [] for device in first}
    sends: list[Sending] = []
    for piece in exchange(shape, source, target, source_hosts, target_hosts):
        if piece.target not in first:
            continue
        owner = source_hosts[piece.source]
        pieces[piece.target].append((piece.box, piece.source, owner))
        if owner == host:
            sends.append(Sending(target_hosts[piece.target], piece.target, piece.box, piece.source))
    groups = tuple(
        Group(device, tuple(devices), wanted[device], tuple(pieces[device]))
        for device, devices in first.items()
        if target_hosts[device] == host
    )
    return Route(tuple(sends), groups, boxes(source, shape))
