"""Spent: the time of devices between two moments, as shares that are all of it.

Problem: a share of the time for which devices wait, without the rest, leaves a reader to wonder
what the rest is.

Rule for maintainers: computing, waiting by cause, and nothing to do are 100 %.  Only devices that
ever computed count.  The present counts, too: a gang that computes, and an idle device whose
next gang has its place and not its inputs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pathways_lab.notebook.scene.awaited import needed
from pathways_lab.notebook.scene.palette import family
from pathways_lab.notebook.scene.scene import WAITS, Scene
from pathways_lab.timeline.gangs import GangKey
from pathways_lab.timeline.machine import Lane
from pathways_lab.timeline.waits import INPUT


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
        return max(0.0, 1.0 - self.busy - self.share(*WAITS)) if self.whole else 0.0


def percents(*shares: float) -> list[int]:
    """Shares that are 1 together, as whole numbers that are 100 together."""
    sums = np.cumsum((0.0, *shares))
    bounds = [round(100 * bound) for bound in (sums / max(sums[-1], 1e-9)).tolist()]
    return [b - a for a, b in pairwise(bounds)]


def together(times: Iterable[Spent]) -> Spent:
    """All of them as one."""
    computed, waited, whole = defaultdict[str, float](float), defaultdict[str, float](float), 0.0
    for time in times:
        whole += time.whole
        for sums, seconds in (computed, time.computed), (waited, time.waited):
            for name, each in seconds.items():
                sums[name] += each
    return Spent(computed, waited, whole)


def spent(scene: Scene, start: float, end: float) -> dict[str, Spent]:
    """The time of the devices of each island that computed, between two moments (seconds on the
    axis)."""
    lanes = {lane for lane in scene.recent if lane in scene.rows.of}
    devices = Counter(lane.island for lane in lanes)
    out = {
        island: Spent(defaultdict(float), defaultdict(float), devices[island] * (end - start))
        for island in scene.machine.islands
    }
    bars, held = scene.computed.seconds(start, end)
    held *= bars["bottom"] - bars["top"] > 0.5  # not arrivals
    marks, idle = scene.waited.seconds(start, end)
    functions = [family(what.node) if what.node else "several" for what in scene.catalogue]
    for (low, high), time in zip(scene.lanes.rows.bands, out.values(), strict=False):
        for columns, seconds, key, names, sums in (
            (bars, held, "what", functions, time.computed),
            (marks, idle, "kind", WAITS, time.waited),
        ):
            here = (columns["top"] > low) & (columns["top"] < high)
            each = np.bincount(columns[key][here].astype(int), seconds[here])
            for n in np.flatnonzero(each):
                sums[names[n]] += float(each[n])
    _add_running(scene, start, end, lanes, out)
    running = {lane for lane, *_ in scene.running()}
    for lane in needed(scene).keys() & lanes - running:
        idle_since = max(start, scene.waiting[lane].ended - scene.origin)
        out[lane.island].waited[INPUT] += max(0.0, end - idle_since)
    return out


def _add_running(
    scene: Scene, start: float, end: float, lanes: set[Lane], out: dict[str, Spent]
) -> None:
    """Count what computes, and what was waited for before it."""
    together: dict[tuple[GangKey, str], list[tuple[Lane, float, str]]] = {}
    for lane, key, since, what in scene.running():
        together.setdefault((key, lane.host), []).append((lane, since - scene.origin, what.node))
    for (key, _), found in together.items():
        of_gang = tuple(lane for lane, _, _ in found)
        for lane, since, node in found:
            if lane not in lanes:
                continue
            time = out[lane.island]
            time.computed[family(node)] += max(0.0, end - max(start, since))
            began = since + scene.origin
            for cause, begun, over in scene.waits.so_far(*key, node, of_gang, lane, began):
                until = min(end, over - scene.origin)
                time.waited[cause] += max(0.0, until - max(start, begun - scene.origin))
