"""Utilisation: how much of each island computed, and for which program, over time.

One band per island from 0 to 100 %; programs are stacked in their colours, so
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

from pathways_lab.notebook.scene.plot import AREAS, Layer, Plot
from pathways_lab.notebook.scene.scene import Scene
from pathways_lab.notebook.scene.text import nothing
from pathways_lab.timeline.busy import poured, recent

TALL = 0.86
"""Height of 100 % in rows; the rest separates the bands."""

STEPS = 100
"""Steps of the curves over the shown time."""

MOST = 8
"""Clients that get a row each; of more, hover texts tell."""

RECENT = 1.0
"""Seconds that the number at the right averages over."""

HOVER = (
    ("program", "@program on @island"),
    ("client", "@client"),
    ("share of the window", "@share"),
)


@dataclass(frozen=True, slots=True)
class Band:
    """One row: whose time it is of, of how many devices, and by ``(program, client)`` how much."""

    name: str
    devices: int
    seconds: dict[tuple[str, str], NDArray[np.float64]]


def plot(scene: Scene, now: float) -> Plot:
    """The panel at *now* (seconds)."""
    edges, shares = _shares(scene, now)
    bands = _bands(scene, shares)
    whole = scene.final or scene.shown is not None
    areas: dict[str, list[Any]] = {
        name: [] for name in ("xs", "ys", "fill", "program", "client", "island", "share")
    }
    readouts = {}
    for row, band in enumerate(bands):
        floor = np.zeros(len(edges) - 1)
        for program, client in sorted(band.seconds, key=lambda of: scene.palette.number(of[0])):
            share = band.seconds[program, client] / band.devices
            ceiling = np.minimum(floor + share, 1.0)
            if np.max(share, initial=0.0) > 1e-4:
                xs, ys = steps(edges[:-1], float(edges[-1]), floor, ceiling)
                areas["xs"].append(xs)
                areas["ys"].append([round(row + 0.5 - y * TALL, 4) for y in ys])
                areas["fill"].append(scene.palette.colour(program))
                areas["program"].append(program)
                areas["client"].append(client)
                areas["island"].append(band.name)
                areas["share"].append(f"{100 * float(share.mean()):.0f} %")
            floor = ceiling
        back = float(edges[-1] - edges[0]) if whole else RECENT
        percent = 100 * recent(edges[:-1], floor, float(edges[-1]), back)
        readouts[float(row)] = f"{percent:.0f} %"
    islands = len(scene.machine.islands)
    clients = " and client" if len(bands) > islands else ""
    return Plot(
        name="utilisation",
        title="Utilisation",
        note=f"share of each island{clients} that computes; at the right, of the "
        + ("whole time" if whole else "last second"),
        height=max(56, min(420, 52 * len(bands) + 4)),
        x=scene.range(now),
        y=(-0.52, max(len(bands), 1) - 0.5 + 0.02),
        layers=(Layer("utilisation-areas", AREAS, areas, hover=HOVER),),
        time=True,
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
    start, end = scene.range(now)
    end = min(max(now - scene.origin, start + 1e-9), end)
    width = 2.0 ** math.ceil(math.log2(scene.span(now) / STEPS))
    inner = np.arange(math.floor(start / width) + 1, math.ceil(end / width)) * width
    return np.concatenate(([start], inner, [end]))


def _shares(
    scene: Scene, now: float
) -> tuple[NDArray[np.float64], dict[tuple[str, str, str], NDArray[np.float64]]]:
    """The bounds of parts, and for each island, program and client how many devices computed in
    each part."""
    edges = bounds(scene, now)
    bars: dict[str, Any] = scene.bars.columns()
    gangs = bars["bottom"] - bars["top"] > 0.5
    left, right = bars["left"][gangs], np.maximum(bars["right"], bars["left"] + 1e-9)[gangs]
    devices = (bars["busy"] * bars["count"] / 1000)[gangs] / (right - left)
    highs = np.array([high for _, high in scene.lanes.rows.bands])
    named = [(what.program, what.client) for what in scene.catalogue]
    programs = {program: code for code, program in enumerate(dict.fromkeys(named))}
    codes = np.array([programs[program] for program in named], np.int64)
    kinds = np.searchsorted(highs, bars["top"][gangs]) * len(codes) + codes[bars["what"][gangs]]
    parts: dict[tuple[str, str, str], list[NDArray[np.float64]]] = {}
    for kind in np.unique(kinds).tolist():
        island, code = divmod(kind, len(codes))
        key = scene.machine.islands[island], *list(programs)[code]
        of = kinds == kind
        parts.setdefault(key, []).append(poured(edges, left[of], right[of], devices[of]))
    begun: dict[tuple[str, str, str], list[float]] = {}
    for lane, _, since, told in scene.running():
        begun.setdefault((lane.island, told.program, told.client), []).append(since - scene.origin)
    for key, times in begun.items():
        at = np.array(times)
        part = poured(edges, at, np.maximum(at, edges[-1]))
        parts.setdefault(key, []).append(part)
    lengths = np.maximum(np.diff(edges), 1e-9)
    return edges, {key: np.sum(each, axis=0) / lengths for key, each in parts.items()}


def _bands(scene: Scene, seconds: Mapping[tuple[str, str, str], NDArray[np.float64]]) -> list[Band]:
    """Every island; and where several clients compute, every client on all of them."""
    sizes = {
        island: sum(host.devices for host in scene.machine.hosts_of(island))
        for island in scene.machine.islands
    }
    of_island: dict[str, dict[tuple[str, str], NDArray[np.float64]]] = {}
    of_client: dict[str, dict[tuple[str, str], NDArray[np.float64]]] = {}
    for (island, program, client), spent in seconds.items():
        of_island.setdefault(island, {})[program, client] = spent
        own = of_client.setdefault(client, {})
        own[program, client] = own.get((program, client), 0.0) + spent
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
