"""One sentence of advice: the cause for which devices of an island are idle, and a remedy.

Problem: a picture shows that devices wait, and its reader wants to know what would help.

Rule for maintainers: one sentence at most, of the largest cause in what is shown, and none
below :data:`WORTH`.  Devices that nobody asked for anything need no advice.

Paper: section 5.1 (dispatch overheads), section 5.3 (pipelines).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pathways_lab.notebook.scene.duration import duration
from pathways_lab.notebook.scene.scene import WAITS, Scene
from pathways_lab.timeline.waits import COMPILE, DISPATCH, INPUT, MEMORY, ORDER, TRANSFER, TURN

WORTH = 0.2
"""Share of the time of an island's devices from which on a cause is worth a sentence."""

FULL = 0.8
"""Share of the time for which bytes are on their way to an island whose network is full."""

PARTS = 200
"""Moments at which the network is looked at."""

LATE = 0.05
"""Share of what is shown by which a host must be late to be named."""

_REMEDIES = {
    INPUT: (
        "an earlier computation",
        "more microbatches let devices compute while others make their inputs",
    ),
    TRANSFER: ("transfers", "send less, or place both slices on one island"),
    DISPATCH: (
        "the lab to start its next computation",
        "a first run needs more of it than later ones, and longer computations hide it",
    ),
    COMPILE: (
        "hosts that compile",
        "only the first call of a function with new shapes does that",
    ),
    MEMORY: ("memory", "drop handles, donate inputs, or use more devices"),
    TURN: ("its turn", "the lab's policy gives other clients theirs first"),
    ORDER: ("its turn", "computations that share a part of its devices are before it"),
}


def advice(scene: Scene, now: float) -> str:
    """The sentence about what is shown at *now* (seconds); "" where none is worth it."""
    if not scene.started and (making := scene.compiling.now()):
        return f"hosts compile {making.name}: {_REMEDIES[COMPILE][1]}"
    start, end = scene.range(now)
    end = end if scene.busy else min(end, scene.last - scene.origin)
    marks, seconds = scene.waited.seconds(start, end)
    if end <= start or not len(seconds):
        return ""
    names = ["", *(what.node for what in list(scene.catalogue)[1:])]  # the first is "several"
    best, said = WORTH, ""
    for island, (low, high) in zip(scene.machine.islands, scene.lanes.rows.bands, strict=False):
        here = (marks["top"] > low) & (marks["top"] < high)
        devices = sum(lane.island == island for lane in scene.recent)
        spent = np.bincount(marks["kind"][here].astype(int), seconds[here], len(WAITS))
        share = float(spent.max()) / (max(devices, 1) * (end - start))
        if share > best:
            cause = int(spent.argmax())
            here &= marks["kind"] == cause
            before = np.bincount(marks["what"][here].astype(int), seconds[here])
            node = names[int(before.argmax())]
            awaited, remedy = _REMEDIES[WAITS[cause]]
            best = share
            said = f"{island} waits {100 * min(share, 1):.0f} % of the time for {awaited}"
            said += f", mostly before {node}" if node else ""
            if WAITS[cause] == INPUT:
                remedy = _latest(scene, now, island) or _network(scene, start, end) or remedy
            said += f": {remedy}"
    return said


def _latest(scene: Scene, now: float, island: str) -> str:
    """The host of an island that ends computations later than others, if that is worth a word."""
    start, end = scene.range(now)
    here = {host.name for host in scene.machine.hosts_of(island)}
    late = {host: by for host, by in scene.late(now).items() if host in here}
    host = max(late, key=lambda host: late[host], default="")
    if not host or late[host] < LATE * (end - start):
        return ""
    by = duration(late[host], 2)
    return (
        f"{host} ends up to {by} after the others of its gang; lab.stacks({host!r}) shows its work"
    )


def _network(scene: Scene, start: float, end: float) -> str:
    """The island to which bytes are on their way for most of the time, if there is one."""
    bars: dict[str, Any] = scene.bars.columns()
    thin = (bars["bottom"] - bars["top"] < 0.5) & (bars["right"] > start) & (bars["left"] < end)
    edges = np.linspace(start, end, PARTS + 1)
    for island, (low, high) in zip(scene.machine.islands, scene.lanes.rows.bands, strict=False):
        here = thin & (bars["top"] > low) & (bars["top"] < high)
        left, right = np.sort(bars["left"][here]), np.sort(bars["right"][here])
        # Under way at each moment: those that have begun, without those that are over.
        under_way = np.searchsorted(left, edges) - np.searchsorted(right, edges)
        share = float(np.mean(under_way > 0))
        if share > FULL:
            return (
                f"bytes are on their way to {island} for {100 * share:.0f} % of it; "
                + _REMEDIES[TRANSFER][1]
            )
    return ""
