"""Tile assignments, which say how XLA cuts an array, as layouts over a mesh, and back.

Problem: XLA says how an array is cut by an array of device positions (a tile assignment), the lab
by named axes of a mesh.  Two ways to say the same must come out as the same layout, since the lab
moves an array whose layout differs from the wanted one.

How: along each cut dimension the positions run in strides; each stride is an axis of the mesh.
Axes are ordered by stride, the gaps between them are axes that cut nothing, and
neighbours that cut nothing are one axis.

Rule for maintainers: pure; what no mesh can express raises :class:`Inexpressible` by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pathways_lab.core.program.layout import Layout


class Inexpressible(ValueError):
    """A sharding that is no layout over a mesh."""


def strides_of(positions: Sequence[int]) -> list[tuple[int, int]]:
    """``(stride, length)`` of the loops, major first, that count these positions."""
    loops: list[tuple[int, int]] = []
    rest = list(positions)
    while len(rest) > 1:
        stride, length = rest[1] - rest[0], 1
        while length < len(rest) and rest[length] == rest[0] + stride * length:
            length += 1
        while len(rest) % length:
            length -= 1
        if length < 2 or stride < 1:
            raise Inexpressible(f"device positions {list(positions)} are in no regular order")
        loops.append((stride, length))
        rest = rest[::length]
    return loops[::-1]


def layout_of_tiles(tiles: np.ndarray[Any, Any], count: int, ndim: int) -> Layout:
    """The layout for a tile assignment whose first *ndim* dimensions are those of the array."""
    flat = tiles.reshape(*tiles.shape[:ndim], -1).min(axis=-1)
    cuts: list[list[tuple[int, int]]] = []
    for dimension in range(ndim):
        line = flat[tuple(slice(None) if d == dimension else 0 for d in range(ndim))]
        cuts.append(strides_of([int(x) for x in np.atleast_1d(line)]))
    axes = sorted(((*loop, d) for d, loops in enumerate(cuts) for loop in loops), reverse=True)
    mesh: list[tuple[str, int]] = []
    names: dict[tuple[int, int], str] = {}
    above = count

    def axis(size: int) -> str:
        mesh.append((f"a{len(mesh)}", size))
        return mesh[-1][0]

    for stride, length, dimension in axes:
        gap, uneven = divmod(above, stride * length)
        if uneven or gap < 1:
            raise Inexpressible(f"tiles {tiles.tolist()} are no mesh of {count} devices")
        if gap > 1:
            axis(gap)
        names[stride, dimension] = axis(length)
        above = stride
    if above > 1 or not mesh:
        axis(above)
    spec = tuple(tuple(names[stride, d] for stride, _ in loops) for d, loops in enumerate(cuts))
    layout = Layout(tuple(mesh), spec)
    same = tiles_of(layout).reshape((*flat.shape, -1))
    if not np.array_equal(np.sort(same), np.sort(tiles.reshape(same.shape))):
        raise Inexpressible(f"tiles {tiles.tolist()} are no mesh of {count} devices")
    return layout


def tiles_of(layout: Layout) -> np.ndarray[Any, Any]:
    """The tile assignment of a layout, with one more dimension for the copies."""
    sizes = [size for _, size in layout.mesh]
    order = {name: number for number, (name, _) in enumerate(layout.mesh)}
    used = [order[name] for axes in layout.spec for name in axes]
    perm = used + [n for n in range(len(sizes)) if n not in used]
    by_name = dict(layout.mesh)
    shape = [math.prod(by_name[name] for name in axes) for axes in layout.spec]
    grid = np.arange(math.prod(sizes)).reshape(sizes).transpose(perm)
    return grid.reshape(*shape, -1)


def canonical(layout: Layout) -> Layout:
    """The one layout that all that cut the same have."""
    return layout_of_tiles(tiles_of(layout), layout.devices, len(layout.spec))


def whole(count: int, ndim: int) -> Layout:
    """A copy on each device."""
    return Layout((("a0", count),), ((),) * ndim)


def over(layout: Layout, axes: Sequence[tuple[str, int]]) -> Layout:
    """The same over a mesh of these axes, if they can say it; else the layout as it is."""
    strides = _strides([size for _, size in layout.mesh])
    own = [*zip(axes, _strides([size for _, size in axes]), strict=True)]
    names: dict[str, tuple[str, ...]] = {}
    for (name, size), stride in zip(layout.mesh, strides, strict=True):
        within = [each for each in own if stride <= each[1] < stride * size]
        if math.prod(length for (_, length), _ in within) != size or (
            size > 1 and within[-1][1] != stride
        ):
            within = []
        names[name] = tuple(axis for (axis, length), _ in within if length > 1)
    used = {name for cut in layout.spec for name in cut}
    sizes = dict(layout.mesh)
    if any(not names[name] for name in used if sizes[name] > 1):
        return layout
    spec = tuple(tuple(axis for name in cut for axis in names[name]) for cut in layout.spec)
    return Layout(tuple(axes), spec)


def _strides(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[n + 1 :]) for n in range(len(sizes))]
