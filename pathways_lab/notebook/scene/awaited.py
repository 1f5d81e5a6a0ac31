"""Awaited: the computation that a device waits for, and where it is made.

Problem: "an earlier computation" is no answer to a reader who asks why a device is idle.

Rule for maintainers: nothing is guessed.  A gang waits for the makers of its inputs, which its
program names, or for the computation until whose end its run had no places; where neither is in
the records, nothing is told.

Paper: section 4.2 (programs as sharded dataflow), 4.5 (grants ahead of the data).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pathways_lab.notebook.scene.device_state import What
from pathways_lab.notebook.scene.gang_number import number
from pathways_lab.notebook.scene.palette import CAUSE_PAINTS
from pathways_lab.notebook.scene.scene import MARKS, UNKNOWN, Scene
from pathways_lab.timeline.bars import GANG, Bar
from pathways_lab.timeline.flow import Flow
from pathways_lab.timeline.gangs import Gang, GangKey
from pathways_lab.timeline.machine import Lane
from pathways_lab.timeline.waits import DISPATCH, INPUT, ORDER

SAME = 1e-6
"""Seconds by which times may differ that mean the same moment."""


NEAR = 128
"""Steps among which one is looked for that might have computed earlier."""


def makers(flow: Flow, step: int) -> list[int]:
    """The computations that make the inputs of a step, none for a bar that stands for several."""
    made = flow[step].after if 0 <= step < len(flow) else ()
    found = [s for n in made for s in (flow[n].after if flow[n].transfer else (n,))]
    return list(dict.fromkeys(found))


def maker(scene: Scene, run: int, step: int, until: float) -> tuple[str, str]:
    """The node for whose end a gang was waited until some moment (seconds on the records' clock),
    and its island; both "" where that is not known."""
    ended, node, where = scene.waits.ahead(run)
    flow = scene.flows.run(run)
    made = makers(flow, step)
    if made and abs(ended - until) > SAME:
        last = max(made, key=lambda step: ended_at(scene, run, step))
        node, where = flow[last].node, flow[last].slice
    bound = scene.machine.slices.get(where)
    return node, " and ".join(bound.islands) if bound else ""


def ahead(scene: Scene, gang: Gang, until: float) -> Bar | None:
    """The computation that had devices of a gang's host until some moment (seconds on the records'
    clock), and a place before it; None where it is not remembered."""
    rows = {scene.rows.of[lane] for lane in _lanes(scene, gang) if lane in scene.rows.of}
    before = (
        bar for bar in scene.computed.bars.items
        if bar.kind == GANG and bar.row in rows and bar.end <= until + SAME
        and (bar.run, bar.step) != (gang.run, gang.step)
    )  # fmt: skip
    return max(before, key=lambda bar: bar.end, default=None)


def ended_at(scene: Scene, run: int, step: int) -> float:
    """When all hosts had ended a gang (seconds); infinite where one has not."""
    gang = scene.gangs.by_key.get((run, step))
    return max(gang.ended.values()) if gang is not None and gang.state == "done" else math.inf


def later(scene: Scene, run: int, step: int, moment: float) -> str:
    """The first node after a step, of its run and on its slice, that others wait for and whose
    inputs were there at a moment (seconds on the records' clock): it might have computed then.
    "" for a bar that stands for several steps."""
    flow = scene.flows.run(run) if step >= 0 else ()
    near = flow[step + 1 : step + NEAR]
    leaves = {n for stage in near for n in stage.after if stage.transfer}
    for n, stage in enumerate(near, step + 1):
        if stage.transfer or stage.slice != flow[step].slice or n not in leaves:
            continue
        if all(ended_at(scene, run, made) <= moment for made in makers(flow, n)):
            return stage.node
    return ""


def missing(scene: Scene, gang: Gang, host: str) -> tuple[str, Gang | None]:
    """The node whose value a gang has not got on a host, "" for none, and the gang that makes it
    if that has not ended."""
    flow = scene.flows.run(gang.run)
    for step in flow[gang.step].after if gang.step < len(flow) else ():
        source = step
        while flow[source].transfer and flow[source].after:
            source = flow[source].after[0]
        made = scene.gangs.by_key.get((gang.run, source))
        if made is not None and made.state != "done":
            return made.node, made
        seen = scene.runs.get(gang.run)
        arrived = seen is None or (step, host) in [(t.step, t.host) for t in seen.transfers]
        if step != source and not arrived:
            return flow[source].node, None
    return "", None


def nexts(scene: Scene) -> dict[Lane, Gang]:
    """The gangs that have the next places on devices, and are not launched there."""
    out: dict[Lane, Gang] = {}
    for island in () if scene.final else scene.machine.islands:
        seen: set[int] = set()
        for gang in scene.gangs.order(island):
            bound = scene.machine.slices.get(gang.slice)
            if gang.over or bound is None or gang.slice in seen:
                continue
            seen.add(gang.slice)
            for lane in bound.lanes:
                if lane not in out and gang.state_on(lane.host) == "granted":
                    out[lane] = gang
    return out


def needed(scene: Scene) -> dict[Lane, str]:
    """The nodes whose values the next gangs of devices have not got."""
    found = {lane: missing(scene, gang, lane.host)[0] for lane, gang in nexts(scene).items()}
    return {lane: node for lane, node in found.items() if node}


def waits_so_far(scene: Scene, now: float) -> dict[str, NDArray[np.generic]]:
    """Marks of what devices waited for before what they work on, and of what idle ones wait for
    *now* (seconds), as those of what has ended."""
    if now not in scene.so_far:
        scene.so_far[now] = _waits_so_far(scene, now)
    return scene.so_far[now]


def _waits_so_far(scene: Scene, now: float) -> dict[str, NDArray[np.generic]]:
    together: dict[tuple[GangKey, str], list[Lane]] = {}
    begun = {}
    for lane, key, since, what in scene.running():
        together.setdefault((key, lane.host), []).append(lane)
        begun[key, lane.host] = since, what
    busy, next_gangs = {lane for lanes in together.values() for lane in lanes}, nexts(scene)
    for lane, gang in next_gangs.items():
        if lane in scene.recent and lane not in busy:
            together.setdefault(((gang.run, gang.step), lane.host), []).append(lane)
    marks: list[dict[str, float]] = []
    seen: set[float] = set()
    for (key, host), lanes in together.items():
        rows = {scene.drawn_at(lane): lane for lane in reversed(lanes)}
        for row, lane in rows.items():
            if row is None or row in seen:
                continue
            seen.add(row)
            rest, more = DISPATCH, []
            if (key, host) in begun:
                since, what = begun[key, host]
            else:
                gang, since = next_gangs[lane], max(now, scene.waiting[lane].ended)
                what = What(gang.node, gang.program, gang.client, gang.line)
                rest, more = UNKNOWN, _sure(scene, gang, host, busy, since)
            stands = scene.lanes.drawn[scene.rows.of[lane]][1]
            parts = scene.waits.so_far(*key, what.node, tuple(lanes), lane, since, more)
            for cause, start, over in parts:
                # Nothing that is known explains the last part yet.
                cause = rest if (cause, over) == (DISPATCH, since) else cause
                marks.append(_mark(scene, key, what, row, stands, cause, start, over))
    return {
        name: np.array([mark[name] for mark in marks], column.dtype)
        for name, column in scene.waited.table.columns().items()
    }


def _sure(
    scene: Scene, gang: Gang, host: str, busy: set[Lane], now: float
) -> list[tuple[str, float]]:
    """The causes for which a gang waits whatever comes, and until when (seconds) at least.

    Its bytes may not have been under way since they were made, and where others compute on its
    devices that may be told to be the cause of all of it.
    """
    made = makers(scene.flows.run(gang.run), gang.step)
    shared = any(other.host == host for other in busy & _lanes(scene, gang))
    if shared:
        return [] if missing(scene, gang, host)[0] else [(ORDER, now)]
    return (
        [(INPUT, min(now, max(ended_at(scene, gang.run, step) for step in made)))] if made else []
    )


def _lanes(scene: Scene, gang: Gang) -> set[Lane]:
    bound = scene.machine.slices.get(gang.slice)
    return set(bound.lanes) if bound else set()


def _mark(
    scene: Scene, key: GangKey, what: What, row: float, count: float,
    cause: str, begun: float, over: float,
) -> dict[str, float]:  # fmt: skip
    kind = MARKS.index(cause)
    top, bottom = scene.waited.edges[kind]
    return {
        "left": begun - scene.origin, "right": over - scene.origin,
        "top": row + top, "bottom": row + bottom, "paint": CAUSE_PAINTS[kind],
        "what": scene.catalogue.row(what), "busy": 1000 * (over - begun),
        "gang": number(*key), "kind": kind, "count": count,
    }  # fmt: skip
