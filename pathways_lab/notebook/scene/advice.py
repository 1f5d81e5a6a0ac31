"""One sentence of advice: why devices of an island are idle or a client waits, and a remedy.

Problem: a picture shows that devices wait, or that a client waits for devices that compute for
another one, and its reader wants to know what would help.

Rule for maintainers: one sentence at most, of the largest cause in what is shown, and none
below :data:`WORTH` but for a host that is late: its client waits for it and asks others for
nothing.  Devices that nobody asked for anything need no advice.

Paper: section 5.1 (dispatch overheads), section 5.2 (several clients), section 5.3 (pipelines).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pathways_lab.notebook.scene.device_state import source
from pathways_lab.notebook.scene.duration import duration
from pathways_lab.notebook.scene.scene import WAITS, Scene
from pathways_lab.timeline.columns import Floats
from pathways_lab.timeline.compiling import Making
from pathways_lab.timeline.waits import COMPILE, DISPATCH, INPUT, MEMORY, ORDER, TRANSFER, TURN

WORTH = 0.2
"""Share of the time of an island's devices from which on a cause is worth a sentence."""

FULL = 0.8
"""Share of the time for which bytes are on their way to an island whose network is full."""

PARTS = 200
"""Moments at which the network, and devices that clients share, are looked at."""

UNEVEN = 1.5
"""How many times as long an island must compute as any other one to be named."""

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
        "only the first call with new shapes does that; fewer shapes, and jax.lax.scan in place of"
        " a long Python loop, spare it, and JAX_COMPILATION_CACHE_DIR keeps it for the next lab",
    ),
    MEMORY: ("memory", "drop handles, donate inputs, or use more devices"),
    TURN: ("its turn", "the lab's policy gives other clients theirs first"),
    ORDER: ("its turn", "computations that share a part of its devices are before it"),
}


def advice(scene: Scene, now: float) -> str:
    """The sentence about what is shown at *now* (seconds); "" where none is worth it."""
    if not scene.busy and (making := scene.compiling.now()):
        return _compiling(making, now)
    start, end = scene.range(now)
    end = min(end, (now if scene.busy else scene.last) - scene.origin)  # what is to come is empty
    if end <= start:
        return ""
    marks, seconds = scene.waited.seconds(start, end)
    names = ["", *(what.node for what in list(scene.catalogue)[1:])]  # the first is "several"
    best, said = max((WORTH, ""), _shared(scene, start, end))
    behind, slow = scene.late(now), ""
    for island, (low, high) in zip(scene.machine.islands, scene.lanes.rows.bands, strict=False):
        here = (marks["top"] > low) & (marks["top"] < high)
        late, word = _latest(scene, behind, end - start, island)
        slow = slow or word
        # The devices of a late host are those that the others wait for.
        devices = sum(lane.island == island and lane.host != late for lane in scene.recent)
        spent = np.bincount(marks["kind"][here].astype(int), seconds[here], len(WAITS))
        share = float(spent.max()) / (max(devices, 1) * (end - start))
        if share > best:
            cause = int(spent.argmax())
            here &= marks["kind"] == cause
            before = np.bincount(marks["what"][here].astype(int), seconds[here])
            node = names[int(before.argmax())]
            awaited, remedy = _REMEDIES[WAITS[cause]]
            best = share
            who = f"the rest of {island}" if late and WAITS[cause] == INPUT else island
            said = f"{who} waits {100 * min(share, 1):.0f} % of the time for {awaited}"
            said += f", mostly before {node}" if node else ""
            if WAITS[cause] == INPUT:
                remedy += _uneven(scene, start, end)
                remedy = word or _network(scene, start, end) or remedy
            said += f": {remedy}"
    return said or slow


def _compiling(making: Making, now: float) -> str:
    where, left = source(making.line), making.total - making.number
    return (
        f"no device computes: hosts compile {making.name}{f' (line {where})' if where else ''},"
        f" {max(0.0, now - making.since):.0f} s so far{f', {left} more after it' if left else ''};"
        f" {_REMEDIES[COMPILE][1]}"
    )


def _shared(scene: Scene, start: float, end: float) -> tuple[float, str]:
    """The client that waits longest while devices that it uses compute for another one.

    Returns for which share of the time, and the sentence.
    """
    clients = [what.client for what in scene.catalogue]
    if len({*clients} - {""}) < 2:
        return 0.0, ""
    moments = np.linspace(start, end, PARTS)
    bars: dict[str, Any] = scene.bars.columns()
    seen = (bars["bottom"] - bars["top"] > 0.5) & (bars["right"] > start) & (bars["left"] < end)
    left, right, tops, whats = (bars[name][seen] for name in ("left", "right", "top", "what"))
    of = np.array(clients)[whats]
    waits = _waiting(scene, moments + scene.origin)
    found = (0.0, "", "")
    for client, waiting in waits.items():
        for other in {*of.tolist()} - {client, ""}:
            shared = np.intersect1d(tops[of == client], tops[of == other])
            here = (of == other) & np.isin(tops, shared)
            busy = np.searchsorted(np.sort(left[here]), moments, "right")
            busy -= np.searchsorted(np.sort(right[here]), moments, "right")
            found = max(found, (float(np.mean(waiting & (busy > 0))), client, other))
    share, client, other = found
    return share, (
        f"{client} waits {100 * share:.0f} % of the time for its turn while devices compute for"
        f" {other}: lab.policy can prefer it, window=0.0 of {other}'s programs lets it in sooner,"
        " a slice on other devices spares it the wait"
    )


def _waiting(scene: Scene, moments: Floats) -> dict[str, NDArray[np.bool_]]:
    """By client, whether any of its runs was submitted and had not begun at each moment."""
    begun = {gang[0]: since for _, gang, since, _ in scene.running()}
    out: dict[str, NDArray[np.bool_]] = {}
    for number, run in scene.runs.items():
        over = math.inf if run.ended is None else run.ended
        until = min(run.begun, begun.get(number, math.inf), over)
        if run.client and run.submitted < moments[-1] and until > moments[0]:
            waited = (moments >= run.submitted) & (moments < until)
            out[run.client] = out.get(run.client, False) | waited
    return out


def _latest(scene: Scene, behind: dict[str, float], shown: float, island: str) -> tuple[str, str]:
    """The host of an island that ends computations later than others, and a word about it.

    behind: by host, seconds by which it does.  shown: seconds.  Both are "" where that is not
    worth one.
    """
    here = {host.name for host in scene.machine.hosts_of(island)}
    late = {host: by for host, by in behind.items() if host in here}
    host = max(late, key=lambda host: late[host], default="")
    if not host or late[host] < LATE * shown:
        return "", ""
    by = duration(late[host], 2)
    return host, (
        f"{host} ends up to {by} after the others of its gang; lab.stacks({host!r}) shows its work"
    )


def _uneven(scene: Scene, start: float, end: float) -> str:
    """The island that computes much more than any other one, if there is one."""
    bars, held = scene.computed.seconds(start, end)
    whole = bars["bottom"] - bars["top"] > 0.5
    shares = [(0.0, "")]
    for island, (low, high) in zip(scene.machine.islands, scene.lanes.rows.bands, strict=False):
        here = whole & (bars["top"] > low) & (bars["top"] < high)
        devices = sum(lane.island == island for lane in scene.recent)
        shares.append((float(held[here].sum()) / (max(devices, 1) * (end - start)), island))
    *_, (less, _), (most, island) = sorted(shares)
    if most < UNEVEN * less or not less:
        return ""
    return f"; even stages wait less: {island} computes {most / less:.1f} times as long as others"


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
