"""Placement of a slice's devices on an island: pure geometry.

Problem: collectives are fast between neighbours, so a mesh of devices should
be a rectangle of the island's grid; and the load should be spread, so that
no two slices share a device while another stands idle.

Rule for maintainers: rectangles first (turned any way), runs of consecutive
devices where no rectangle fits.  Among equals the least loaded wins, and then
one that begins or ends where the load changes, so that the less loaded devices
stay in one piece; that last rule is what keeps the loads of a row within one
of each other, whatever sizes are asked for.

Paper: section 4.1 (resource manager).
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence

Grid = tuple[int, ...]
Choice = tuple[tuple[int, ...], tuple[int, ...]]
"""``(key, devices)``: the smallest key wins; devices row-major over the mesh."""


def place(grid: Grid, loads: Sequence[int | None], shape: tuple[int, ...]) -> Choice | None:
    """The best devices for a mesh of *shape* on an island.

    grid: extents of the island's topology, 1 to 3 dimensions.
    loads: per device (row-major over the grid) how many slices hold it; None
        where it may not be used.
    Returns the key of the choice, comparable over islands, and its devices;
    None when there is no room at all.
    """
    best = min(_rectangles(grid, loads, shape), default=None) if len(grid) > 1 else None
    return best or _run(loads, math.prod(shape))


def _rectangles(
    grid: Grid, loads: Sequence[int | None], shape: tuple[int, ...]
) -> Iterator[Choice]:
    """Every axis-aligned box of the grid that can carry the mesh, each turn of it."""
    wide = [k for k, size in enumerate(shape) if size > 1]
    strides = [math.prod(grid[d + 1 :]) for d in range(len(grid))]
    for axes in itertools.permutations(range(len(grid)), len(wide)):
        extent = [1] * len(grid)
        for mesh_axis, grid_axis in zip(wide, axes, strict=True):
            extent[grid_axis] = shape[mesh_axis]
        if any(e > g for e, g in zip(extent, grid, strict=True)):
            continue
        # Offsets of the mesh's devices from the box's corner, row-major over the mesh.
        steps = [strides[axis] for axis in axes]
        offsets = [
            sum(i * s for i, s in zip(index, steps, strict=True))
            for index in itertools.product(*(range(shape[k]) for k in wide))
        ]
        corners = itertools.product(*(range(g - e + 1) for g, e in zip(grid, extent, strict=True)))
        for corner in corners:
            first = sum(c * s for c, s in zip(corner, strides, strict=True))
            devices = tuple(first + o for o in offsets)
            held = [loads[d] for d in devices]
            if None in held:
                continue
            known = [h for h in held if h is not None]
            yield (max(known), sum(known), 0, 0, first, *axes), devices


def _run(loads: Sequence[int | None], size: int) -> Choice | None:
    """The best run of consecutive devices in row-major order, as on a ring."""
    count = len(loads)
    if size > count:
        return None
    best: tuple[int, ...] | None = None
    blocked = sum(1 for d in range(size) if loads[d] is None)
    total = sum(loads[d] or 0 for d in range(size))
    tops: deque[int] = deque()  # positions of a falling sequence of loads: the run's maxima
    for d in range(size):
        _push(tops, loads, d)
    for start in range(1 if size == count else count):
        end = start + size
        if start:
            gone, come = loads[start - 1], loads[(end - 1) % count]
            blocked += (come is None) - (gone is None)
            total += (come or 0) - (gone or 0)
            while tops and tops[0] < start:
                tops.popleft()
            _push(tops, loads, end - 1)
        if not blocked:
            flush = (loads[start - 1] or 0) > (loads[start] or 0) or (loads[end % count] or 0) > (
                loads[(end - 1) % count] or 0
            )
            key = (loads[tops[0] % count] or 0, total, int(not flush), int(end > count), start)
            best = key if best is None else min(best, key)
    if best is None:
        return None
    return best, tuple(d % count for d in range(best[-1], best[-1] + size))


def _push(tops: deque[int], loads: Sequence[int | None], position: int) -> None:
    load = loads[position % len(loads)] or 0
    while tops and (loads[tops[-1] % len(loads)] or 0) <= load:
        tops.pop()
    tops.append(position)
