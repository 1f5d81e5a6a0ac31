"""Utilisation: how much of each island computed, and what, over time.

One band per island from 0 to 100 %; functions are stacked in their colours, so
that idle time stays visible as what is missing at the top.  Transfers do not
count: they hold no device.  Where several clients compute, a band for each
client follows, of all devices.

Paper: section 5.2 (sharing of accelerators between clients).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pathways_lab.notebook.scene.palette import PAINTS
from pathways_lab.notebook.scene.plot import AREAS, Layer, Plot, blank, put
from pathways_lab.notebook.scene.scene import Scene
from pathways_lab.notebook.scene.text import nothing
from pathways_lab.timeline.busy import poured

TALL = 0.86
"""Height of 100 % in rows; the rest separates the bands."""

STEPS = 100
"""Steps of the curves over the shown time."""

MOST = 8
"""Clients that get a row each; of more, hover texts tell."""

HOVER = (
    ("program", "@program on @island"),
    ("client", "@client"),
    ("share of the time drawn", "@share"),
)


Of = tuple[int, str, str]
"""The index into the palette, the program and the client of computations."""


@dataclass(frozen=True, slots=True)
class Band:
    """One row: whose time it is of, of how many devices, and how many of them computed what."""

    name: str
    devices: int
    computed: dict[Of, NDArray[np.float64]]


def plot(scene: Scene, now: float) -> Plot:
    """The panel at *now* (seconds)."""
    edges, shares = _shares(scene, now)
    bands = _bands(scene, shares)
    areas = blank(("xs", "ys", "fill", "program", "client", "island", "share"))
    readouts = {}
    for row, band in enumerate(bands):
        floor = np.zeros(len(edges) - 1)
        for of in sorted(band.computed):
            share = band.computed[of] / band.devices
            ceiling = np.minimum(floor + share, 1.0)
            for part in _stretches(share > 1e-4):
                until = float(edges[part.stop])
                xs, ys = steps(edges[part], until, floor[part], ceiling[part])
                ys = [round(row + 0.5 - y * TALL, 4) for y in ys]
                told = f"{100 * _mean(edges, share):.0f} %"
                put(areas, xs, ys, PAINTS[of[0]], *of[1:], band.name, told)
            floor = ceiling
        readouts[float(row)] = f"{100 * _mean(edges, floor):.0f} %"
    islands = len(scene.machine.islands)
    clients = " and client" if len(bands) > islands else ""
    return Plot(
        name="utilisation",
        title="Utilisation",
        note=f"share of each island{clients} that computes; at the right, of the time drawn",
        height=max(56, min(420, 52 * len(bands) + 4)),
        x=scene.range(now),
        y=(-0.52, max(len(bands), 1) - 0.5 + 0.02),
        layers=(Layer("utilisation-areas", AREAS, areas, hover=HOVER),),
        time=True,
        brief=True,
        groups={float(row): band.name for row, band in enumerate(bands)},
        readouts=readouts,
        rows={row + 0.5 - TALL: "100 %" for row in range(len(bands))},
        rules=tuple(row + 0.5 - TALL * level for row in range(len(bands)) for level in (0, 1)),
        bands=((islands - 0.5, len(bands) - 0.5),) if clients else (),
        empty=nothing(scene),
    )


def bounds(scene: Scene, now: float) -> NDArray[np.float64]:
    """Bounds of equal parts of what is shown up to *now* (seconds on the axis).

    They stay where they are as time goes on; the first and the last part may be shorter.
    """
    start, end = scene.elapsed(now)
    end = max(end, start + 1e-9)
    width = 2.0 ** math.ceil(math.log2(scene.span(now) / STEPS))
    inner = np.arange(math.floor(start / width) + 1, math.ceil(end / width)) * width
    return np.concatenate(([start], inner, [end]))


def _stretches(there: NDArray[np.bool_]) -> list[slice]:
    """The parts of a curve in which something is there."""
    bounds = np.flatnonzero(np.diff(there.astype(np.int8), prepend=0, append=0))
    return [slice(first, after) for first, after in bounds.reshape(-1, 2).tolist()]


def _mean(edges: NDArray[np.float64], share: NDArray[np.float64]) -> float:
    """Over all parts between *edges*."""
    return float(share @ np.diff(edges) / (edges[-1] - edges[0]))


def _shares(
    scene: Scene, now: float
) -> tuple[NDArray[np.float64], dict[tuple[str, Of], NDArray[np.float64]]]:
    """The bounds of parts, and for each island how many devices computed what in each part."""
    edges = bounds(scene, now)
    bars: dict[str, Any] = scene.bars.columns()
    gangs = bars["bottom"] - bars["top"] > 0.5
    left, right = bars["left"][gangs], np.maximum(bars["right"], bars["left"] + 1e-9)[gangs]
    devices = (bars["busy"] * bars["count"] / 1000)[gangs] / (right - left)
    highs = np.array([high for _, high in scene.lanes.rows.bands])
    named = [(what.program, what.client) for what in scene.catalogue]
    known = {of: code for code, of in enumerate(dict.fromkeys(named))}
    codes = np.array([known[of] for of in named], np.int64)
    kinds = np.searchsorted(highs, bars["top"][gangs]) * len(codes) + codes[bars["what"][gangs]]
    kinds = kinds * len(PAINTS) + bars["paint"][gangs]
    parts: dict[tuple[str, Of], list[NDArray[np.float64]]] = {}
    for kind in np.unique(kinds).tolist():
        rest, paint = divmod(kind, len(PAINTS))
        island, code = divmod(rest, len(codes))
        key = scene.machine.islands[island], (paint, *list(known)[code])
        here = kinds == kind
        parts.setdefault(key, []).append(poured(edges, left[here], right[here], devices[here]))
    begun: dict[tuple[str, Of], list[float]] = {}
    for lane, _, since, what in scene.running():
        of = scene.palette.code(what.program, what.node), what.program, what.client
        begun.setdefault((lane.island, of), []).append(since - scene.origin)
    for key, times in begun.items():
        at = np.array(times)
        part = poured(edges, at, np.maximum(at, edges[-1]))
        parts.setdefault(key, []).append(part)
    lengths = np.maximum(np.diff(edges), 1e-9)
    return edges, {key: np.sum(each, axis=0) / lengths for key, each in parts.items()}


def _bands(scene: Scene, computed: Mapping[tuple[str, Of], NDArray[np.float64]]) -> list[Band]:
    """Every island; and where several clients compute, every client on all of them."""
    sizes = {
        island: sum(host.devices for host in scene.machine.hosts_of(island))
        for island in scene.machine.islands
    }
    of_island: dict[str, dict[Of, NDArray[np.float64]]] = {}
    of_client: dict[str, dict[Of, NDArray[np.float64]]] = {}
    for (island, of), devices_at in computed.items():
        of_island.setdefault(island, {})[of] = devices_at
        own = of_client.setdefault(of[2], {})
        own[of] = own.get(of, 0.0) + devices_at
    found = [Band(name, max(1, n), of_island.get(name, {})) for name, n in sizes.items()]
    if 1 < len(of_client) <= MOST:
        devices = max(1, sum(sizes.values()))
        found += [Band(name, devices, own) for name, own in sorted(of_client.items())]
    return found


def steps(
    edges: NDArray[np.float64],
    end: float,
    floor: NDArray[np.float64],
    ceiling: NDArray[np.float64],
) -> tuple[list[float], list[float]]:
    """The outline of the area between two step curves over bins.

    Neighbouring bins of equal height become one step, so quiet stretches cost
    nothing.
    """
    bounds = np.append(edges, end)
    change = np.flatnonzero((np.diff(floor) != 0) | (np.diff(ceiling) != 0)) + 1
    starts = np.concatenate(([0], change))
    stops = np.concatenate((change, [len(edges)]))
    xs: list[float] = []
    top: list[float] = []
    bottom: list[float] = []
    for a, b in zip(starts, stops, strict=True):
        xs += [round(float(bounds[a]), 5), round(float(bounds[b]), 5)]
        top += [float(ceiling[a])] * 2
        bottom += [float(floor[a])] * 2
    return _there_and_back(xs, xs), _there_and_back(top, bottom)


def _there_and_back(out: Sequence[float], back: Sequence[float]) -> list[float]:
    return [*out, *reversed(back)]
