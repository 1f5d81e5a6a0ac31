"""Heat strips: how busy each island and its worst hosts were over time, as intensity.

A strip per island is the mean of its devices; below it are those of its hosts that are worst:
first hosts that end computations later than others of their gang, then those that compute
least.  Islands come in the same order: that of the latest host is on top.  Where islands are too
many for their hosts to have strips, there are strips of islands only, and of those the worst.

Paper: section 5.3 (2,048 devices), section 4.4 (a gang ends with its slowest host).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pathways_lab.notebook.panels.utilisation import bounds
from pathways_lab.notebook.scene.duration import duration
from pathways_lab.notebook.scene.palette import FAILED, HEAT
from pathways_lab.notebook.scene.plot import BOXES, Growing, Layer, Plot, blank, put
from pathways_lab.notebook.scene.row_layout import GAP, short
from pathways_lab.notebook.scene.scene import Scene
from pathways_lab.notebook.scene.text import nothing
from pathways_lab.timeline.columns import Floats
from pathways_lab.timeline.machine import HostSeen

STRIPS = 24
"""Strips that are drawn at most."""

EACH = 14
"""Pixels of a strip with its distance to the next one."""

LEVELS = 8
"""Intensities that are told apart: neighbours of one are one box."""

STEADY = 0.05
"""Shares that differ by less than so much do not change the order."""

HOVER = (("strip", "@name"), ("busy", "@share"), ("from", "@left{0.0000} s to @right{0.0000} s"))


@dataclass(frozen=True, slots=True)
class Strip:
    """One strip.

    share: of its devices that computed, in each part of what is shown; busy: over all of it.
    late: seconds by which it, or a host of it, ended later than others of its gang, if it did.
    """

    label: str
    name: str
    share: Floats
    busy: float
    late: float = 0.0
    lost: bool = False

    @property
    def worst(self) -> tuple[bool, float, float]:
        """A key to sort by, the worst first."""
        return not self.lost, -self.late, STEADY * round(self.busy / STEADY)

    def readout(self, late: bool) -> str:
        """At the right of it.  late: also how late it is."""
        if self.lost:
            return "lost"
        by = f" · +{duration(self.late)}" if late and self.late else ""
        return f"{100 * self.busy:.0f} %{by}"


def plot(scene: Scene, now: float) -> Plot:
    """The panel at *now* (seconds)."""
    edges = bounds(scene, now)
    groups = list(_groups(scene, now, edges))
    boxes = blank(("left", "right", "top", "bottom", "fill", "alpha", "name", "share"))
    rows: dict[float, str] = {}
    names: dict[float, str] = {}
    readouts: dict[float, str] = {}
    bands: list[tuple[float, float]] = []
    row = 0.0
    for strips in groups:
        first = row
        for strip in strips:
            last = strip is strips[-1] or strip is not strips[0]  # no host tells of it below
            rows[row], readouts[row] = strip.label, strip.readout(late=last)
            _draw(boxes, strip, edges, row, 0.44 if strip is strips[0] else 0.36)
            row = round(row + 1, 3)
        bands.append((first - 0.5, row - 0.5))
        names[(first + row - 1) / 2] = strips[0].name
        row = round(row + (GAP if len(strips) > 1 else 0), 3)
    end = bands[-1][1] if bands else 0.5
    return Plot(
        name="heat",
        title="Heat",
        note=_note(scene, len(groups)),
        height=max(44, round(EACH * (end + 0.6))),
        x=scene.range(now),
        y=(-0.6, end + 0.1),
        layers=(Layer("heat-boxes", BOXES, boxes, hover=HOVER),),
        time=True,
        brief=True,
        rows=rows,
        groups=names,
        readouts=readouts,
        bands=tuple(bands[1::2]),
        empty=nothing(scene),
    )


def _note(scene: Scene, shown: int) -> str:
    islands = len(scene.machine.islands)
    some = f"the {shown} worst of {islands} islands; " if shown < islands else ""
    hosts = ", below it its worst hosts" if _hosts_each(islands) else ""
    return f"{some}busy share of each island{hosts}: the fuller the colour, the busier"


def _hosts_each(islands: int) -> int:
    """How many hosts of each island have a strip."""
    return max(0, STRIPS // max(islands, 1) - 1)


def _groups(scene: Scene, now: float, edges: Floats) -> Iterator[list[Strip]]:
    """The strips of the worst islands, each followed by those of its worst hosts."""
    machine, origin = scene.machine, scene.origin
    running = [(lane, since) for lane, _, since, _ in scene.running()]
    seconds = scene.heat.seconds(edges + origin, running)
    late, lengths = scene.late(now), np.maximum(np.diff(edges), 1e-9)
    whole = max(float(edges[-1] - edges[0]), 1e-9)
    none = np.zeros(len(lengths))

    def strip(label: str, name: str, hosts: Sequence[HostSeen]) -> Strip:
        devices = max(sum(host.devices for host in hosts), 1)
        held = sum((seconds.get((host.island, host.name), none) for host in hosts), none)
        share = np.minimum(held / lengths / devices, 1.0)
        busy = min(float(held.sum()) / whole / devices, 1.0)
        most = max((late.get(host.name, 0.0) for host in hosts), default=0.0)
        return Strip(label, name, share, busy, most, all(host.lost for host in hosts))

    found: list[tuple[Strip, Sequence[HostSeen]]] = []
    for island in machine.islands:
        all_of_it = machine.hosts_of(island)
        many = f"{len(all_of_it)} host{'s' * (len(all_of_it) != 1)}"
        found.append((strip(many, island, all_of_it), all_of_it))
    found.sort(key=lambda each: each[0].worst)
    most = _hosts_each(len(found))
    for of_island, hosts in found[:STRIPS]:
        strips = [strip(short(host.name), host.name, (host,)) for host in hosts]
        yield [of_island, *sorted(strips, key=lambda each: each.worst)[:most]]


def _draw(boxes: Growing, strip: Strip, edges: Floats, row: float, half: float) -> None:
    """The boxes of a strip: one for neighbours of one intensity."""
    levels = np.ceil(strip.share * LEVELS - 1e-6).astype(int)
    heads = np.concatenate(([0], np.flatnonzero(np.diff(levels)) + 1, [len(levels)]))
    for first, after in zip(heads[:-1].tolist(), heads[1:].tolist(), strict=True):
        if strip.lost or levels[first]:
            left, right = round(float(edges[first]), 6), round(float(edges[after]), 6)
            busy = round(levels[first] / LEVELS, 2)
            look = (HEAT, busy) if busy else (FAILED, 0.15)
            share = f"{100 * float(strip.share[first:after].mean()):.0f} %"
            put(boxes, left, right, row - half, row + half, *look, strip.name, share)
