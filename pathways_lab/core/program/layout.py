"""How an array is cut over the devices of a slice: pure arithmetic.

Problem: two slices with different meshes hold the same logical array in
different pieces; every host must know, without asking anybody and without
holding the array, which of its bytes go where.  A :class:`Layout` is the part
of a JAX ``NamedSharding`` that matters for this: mesh axes and, per array
dimension, the mesh axes that cut it (major to minor).  From it follow the
*box* (half-open index range per dimension) of every device, and from two
layouts the pieces to exchange.

Rule for maintainers: standard library only, and agreement with
``NamedSharding.devices_indices_map`` is a property test, not a hope.

Paper: section 4.2 (sharded logical buffers), section 4.3 (transfers are
operations of the lowered program).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]
"""Half-open ``(start, stop)`` per dimension; ``()`` for a scalar."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A sharding of one array over the mesh of one slice.

    mesh: ``((axis name, size), ...)``, major to minor; devices of the slice
        are numbered row-major over it.
    spec: per array dimension the names of the mesh axes that cut it, major to
        minor; ``()`` means not cut.  Axes named nowhere replicate.
    """

    mesh: tuple[tuple[str, int], ...]
    spec: tuple[tuple[str, ...], ...]

    @property
    def devices(self) -> int:
        """Number of devices in the mesh."""
        return math.prod(size for _, size in self.mesh)

    def __str__(self) -> str:
        dims = ", ".join("+".join(axes) if axes else "None" for axes in self.spec)
        return f"P({dims})"


def shard_shape(layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one device's shard.  Cuts are even: JAX demands it too."""
    sizes = dict(layout.mesh)
    return tuple(
        dim // math.prod(sizes[a] for a in axes) if axes else dim
        for dim, axes in zip(shape, layout.spec, strict=True)
    )


def boxes(layout: Layout, shape: tuple[int, ...]) -> tuple[Box, ...]:
    """The box of every device of the mesh, in row-major device order."""
    sizes = dict(layout.mesh)
    local = shard_shape(layout, shape)
    out: list[Box] = []
    for device in range(layout.devices):
        position: dict[str, int] = {}
        rest = device
        for name, size in reversed(layout.mesh):
            rest, position[name] = divmod(rest, size)
        box = []
        for extent, axes in zip(local, layout.spec, strict=True):
            index = 0
            for name in axes:
                index = index * sizes[name] + position[name]
            box.append((index * extent, (index + 1) * extent))
        out.append(tuple(box))
    return tuple(out)


@dataclass(frozen=True, slots=True)
class Piece:
    """One copy of an exchange: *box* (global indices) from device to device.

    source, target: row-major device numbers in the source and target mesh.
    """

    source: int
    target: int
    box: Box


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, or None when they share no element."""
    out = []
    for (a0, a1), (b0, b1) in zip(a, b, strict=True):
        lo, hi = max(a0, b0), min(a1, b1)
        if lo >= hi:
            return None
        out.append((lo, hi))
    return tuple(out)


def exchange(
    shape: tuple[int, ...],
    source: Layout,
    target: Layout,
    source_hosts: tuple[str, ...],
    target_hosts: tuple[str, ...],
) -> tuple[Piece, ...]:
    """The pieces that turn *source* shards into *target* shards.

    Every target element comes from exactly one source device.  Among replicas
    one on the target's own host is preferred; else the readers are spread over
    the replicas, so that no link carries what another could.

    source_hosts, target_hosts: the host of each device, row-major.
    Zero-size arrays need no piece.  Cost: distinct source boxes x targets.
    """
    if 0 in shape:
        return ()
    replicas: dict[Box, list[int]] = {}
    for device, box in enumerate(boxes(source, shape)):
        replicas.setdefault(box, []).append(device)
    pieces: list[Piece] = []
    for device, wanted in enumerate(boxes(target, shape)):
        host = target_hosts[device]
        for box, holders in replicas.items():
            common = intersect(box, wanted)
            if common is None:
                continue
            near = [h for h in holders if source_hosts[h] == host]
            pool = near or holders
            pieces.append(Piece(pool[device % len(pool)], device, common))
    return tuple(pieces)
