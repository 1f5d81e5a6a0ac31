"""Utilisation: how much of each island computed, and for which program, over time.

One band per island from 0 to 100 %; programs are stacked in their colours, so
that idle time stays visible as what is missing at the top.  Transfers do not
count: they hold no device.

Paper: section 5.2 (sharing of accelerators between clients).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pathways_lab.notebook.plot import AREAS, Layer, Plot
from pathways_lab.notebook.scene import Scene
from pathways_lab.timeline.busy import recent

TALL = 0.86
"""Height of 100 % in rows; the rest separates the bands."""

STEPS = 100
"""Steps of the curves over the shown time."""

RECENT = 1.0
"""Seconds that the number at the right averages over."""

HOVER = (
    ("program", "@program on @island"),
    ("client", "@client"),
    ("share of the window", "@share"),
)


def plot(scene: Scene, now: float) -> Plot:
    """The panel at *now* (seconds)."""
    islands = scene.machine.islands
    running = [
        ((lane.island, what.program), since, 1.0) for lane, _, since, what in scene.running()
    ]
    coarse = max(1, round(scene.span(now) / STEPS / scene.by_program.width))
    edges, seconds = scene.by_program.shares(now, running, coarse)
    areas: dict[str, list[Any]] = {
        name: [] for name in ("xs", "ys", "fill", "program", "client", "island", "share")
    }
    readouts = {}
    for row, island in enumerate(islands):
        devices = max(1, sum(host.devices for host in scene.machine.hosts_of(island)))
        floor = np.zeros(len(edges))
        programs = sorted(
            (program for place, program in seconds if place == island), key=scene.palette.number
        )
        for program in programs:
            share = seconds[island, program] / devices
            ceiling = np.minimum(floor + share, 1.0)
            if np.max(share, initial=0.0) > 1e-4:
                xs, ys = steps(edges - scene.origin, now - scene.origin, floor, ceiling)
                areas["xs"].append(xs)
                areas["ys"].append([round(row + 0.5 - y * TALL, 4) for y in ys])
                areas["fill"].append(scene.palette.colour(program))
                areas["program"].append(program)
                areas["client"].append(scene.clients.get(program, ""))
                areas["island"].append(island)
                areas["share"].append(f"{100 * float(share.mean()):.0f} %")
            floor = ceiling
        back = scene.span(now) if scene.final else RECENT
        readouts[float(row)] = f"{100 * recent(edges, floor, now, back):.0f} %"
    return Plot(
        name="utilisation",
        title="Utilisation",
        note="share of each island that computes, by program; at the right over the "
        + ("whole time" if scene.final else "last second"),
        height=max(56, min(240, 52 * len(islands) + 4)),
        x=scene.range(now),
        y=(-0.52, max(len(islands), 1) - 0.5 + 0.02),
        layers=(Layer("utilisation-areas", AREAS, areas, hover=HOVER),),
        time=True,
        groups={float(row): island for row, island in enumerate(islands)},
        readouts=readouts,
        rows={row + 0.5 - TALL: "100 %" for row in range(len(islands))},
        rules=tuple(row + 0.5 - TALL * level for row in range(len(islands)) for level in (0, 1)),
        empty="" if scene.started else "waiting for the first gang",
    )


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
