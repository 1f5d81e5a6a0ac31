"""Spent: the time of devices between two moments, as shares that are all of it.

Problem: a share of the time for which devices wait, without the rest, leaves a reader to wonder
what the rest is.

Rule for maintainers: computing, waiting by cause, and nothing to do are 100 %.  Only devices that
ever computed count.  The present counts, too: a gang that computes, and an idle device whose
next gang has its place and not its inputs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from pathways_lab.notebook.scene.awaited import waits_so_far
from pathways_lab.notebook.scene.palette import PAINTS, family
from pathways_lab.notebook.scene.scene import MARKS, Scene
from pathways_lab.timeline.machine import Lane


class Spent(NamedTuple):
    """Device seconds: of computing by function, of waiting by cause, and of all devices."""

    computed: dict[str, float]
    waited: dict[str, float]
    whole: float

    def share(self, *causes: str) -> float:
        """The part of it that was spent waiting for some causes, 0 to 1."""
        return sum(self.waited.get(cause, 0.0) for cause in causes) / max(self.whole, 1e-9)

    @property
    def busy(self) -> float:
        """The part of it in which devices computed, 0 to 1."""
        return sum(self.computed.values()) / max(self.whole, 1e-9)

    @property
    def nothing(self) -> float:
        """The part of it in which devices had nothing to do, 0 to 1."""
        return max(0.0, 1.0 - self.busy - self.share(*MARKS)) if self.whole else 0.0


def by_device(scene: Scene, start: float, end: float) -> dict[Lane, dict[int, float]]:
    """By device that ever computed, and index into the palette: the share of the time between two
    moments (seconds on the axis) in which it computed.

    Devices that share a row of the device queues share its mean.  Where many hosts share one, the
    share is their host's, and without colours.
    """
    lanes, running = scene.lanes.rows.of, scene.running()
    used = [lane for lane in {*scene.recent, *(each[0] for each in running)} if lane in lanes]
    length = max(end - start, 1e-9)
    if scene.many:
        edges = np.array([start, end]) + scene.origin
        held = scene.heat.seconds(edges, [(lane, since) for lane, _, since, _ in running])
        many = Counter((lane.island, lane.host) for lane in used)
        shares = {of: float(held[of][0]) / many[of] / length if of in held else 0.0 for of in many}
        return {lane: {0: min(1.0, shares[lane.island, lane.host])} for lane in used}
    found: dict[float, dict[int, float]] = {row: {} for row in scene.lanes.rows.labels}
    at, devices = sorted(found), Counter(lanes[lane] for lane in used)
    bars, seconds = scene.computed.seconds(start, end)
    seconds *= bars["bottom"] - bars["top"] > 0.5  # not arrivals
    keys = np.searchsorted(at, bars["top"]) * len(PAINTS) + bars["paint"]
    sums = np.bincount(keys, seconds)
    for key in np.flatnonzero(sums).tolist():
        found[at[key // len(PAINTS)]][key % len(PAINTS)] = float(sums[key])
    for lane, _, since, what in running:
        if lane in lanes:
            computed, paint = found[lanes[lane]], scene.palette.code(what.program, what.node)
            begun = max(start, since - scene.origin)
            computed[paint] = computed.get(paint, 0.0) + max(0.0, end - begun)
    for row, computed in found.items():
        for paint in computed:
            computed[paint] = min(1.0, computed[paint] / devices[row] / length)
    return {lane: found[lanes[lane]] for lane in used}


def percents(*shares: float) -> list[int]:
    """Shares that are 1 together, as whole numbers that are 100 together."""
    sums = np.cumsum((0.0, *shares))
    bounds = [round(100 * bound) for bound in (sums / max(sums[-1], 1e-9)).tolist()]
    return [b - a for a, b in pairwise(bounds)]


def spent(scene: Scene, start: float, end: float) -> dict[str, Spent]:
    """The time of the devices that computed, by island and ("") of all, between two moments
    (seconds on the axis)."""
    lanes = {lane for lane in scene.recent if lane in scene.rows.of}
    devices = Counter(lane.island for lane in lanes) + Counter({"": len(lanes)})
    bands = {"": (-np.inf, np.inf)}
    bands |= dict(zip(scene.machine.islands, scene.lanes.rows.bands, strict=False))
    out = {
        island: Spent(defaultdict(float), defaultdict(float), devices[island] * (end - start))
        for island in bands
    }
    bars, held = scene.computed.seconds(start, end)
    held *= bars["bottom"] - bars["top"] > 0.5  # not arrivals
    marks, idle = scene.waited.seconds(start, end)
    so_far: dict[str, Any] = waits_so_far(scene, end + scene.origin)
    lasted = np.minimum(so_far["right"], end) - np.maximum(so_far["left"], start)
    idle = np.concatenate((idle, np.maximum(lasted, 0.0) * so_far["count"]))
    marks = {name: np.concatenate((marks[name], so_far[name])) for name in ("top", "kind")}
    functions = [family(what.node) if what.node else "several" for what in scene.catalogue]
    for (low, high), time in zip(bands.values(), out.values(), strict=True):
        for columns, seconds, key, names, sums in (
            (bars, held, "what", functions, time.computed),
            (marks, idle, "kind", MARKS, time.waited),
        ):
            here = (columns["top"] > low) & (columns["top"] < high)
            each = np.bincount(columns[key][here].astype(int), seconds[here])
            for n in np.flatnonzero(each):
                sums[names[n]] += float(each[n])
    for lane, _, since, what in scene.running():
        if lane in lanes:
            begun = max(start, since - scene.origin)
            for island in ("", lane.island):
                out[island].computed[family(what.node)] += max(0.0, end - begun)
    return out
