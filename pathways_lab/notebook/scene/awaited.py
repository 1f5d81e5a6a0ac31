"""Awaited: the computation that a device waits for, and where it is made.

Problem: "an earlier computation" is no answer to a reader who asks why a device is idle.

Rule for maintainers: nothing is guessed.  A gang waits for the makers of its inputs, which its
program names, or for the computation until whose end its run had no places; where neither is in
the records, nothing is told.

Paper: section 4.2 (programs as sharded dataflow), 4.5 (grants ahead of the data).
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pathways_lab.notebook.scene.device_state import What
from pathways_lab.notebook.scene.gang_number import number
from pathways_lab.notebook.scene.scene import MARKS, UNKNOWN, Scene
from pathways_lab.timeline.bars import GANG, Bar
from pathways_lab.timeline.flow import Stage
from pathways_lab.timeline.gangs import Gang, GangKey
from pathways_lab.timeline.machine import Lane
from pathways_lab.timeline.planned import RunSeen
from pathways_lab.timeline.waits import DISPATCH, INPUT, ORDER

SAME = 1e-6
"""Seconds by which times may differ that mean the same moment."""


NEAR = 128
"""Steps among which one is looked for that might compute earlier."""

AHEAD = 16
"""Runs, at most, for whose computations without places devices wait."""


PAUSE = 1.0
"""Seconds between two runs of a client from which on it does something else."""

CALLS = 4
"""Newest runs that tell a loop, and whether its client waits for each."""


TURNS = 8
"""Calls of a loop between two waits, at most, that tell what its client does next."""


class ClientWait(NamedTuple):
    """A client waited from *start* to *end* (seconds on the axis), at a line if that is known."""

    start: float
    end: float
    line: str


def sources(scene: Scene, run: int, step: int) -> list[GangKey]:
    """The computations that make the inputs of a step, in its run and in others."""
    flows = scene.flows

    def before(run: int, step: int) -> list[GangKey]:
        return [(run, n) for n in flows.run(run)[step].after] + flows.sources(run, step)

    return _computations(scene, run, step, before)


def makers(scene: Scene, run: int, step: int) -> list[int]:
    """Those of them that its own run computes, none for a bar that stands for several."""
    return [n for of, n in sources(scene, run, step) if of == run]


def users(scene: Scene, run: int, step: int) -> list[GangKey]:
    """The computations that use the results of a step, in its run and in others."""
    flows = scene.flows

    def after(run: int, step: int) -> list[GangKey]:
        flow = flows.run(run)
        here = [(run, n) for n in range(step + 1, len(flow)) if step in flow[n].after]
        return here + flows.users(run, step)

    return _computations(scene, run, step, after)


def _computations(
    scene: Scene, run: int, step: int, near: Callable[[int, int], list[GangKey]]
) -> list[GangKey]:
    """The computations next to a step, and those next to transfers that are next to it."""
    found: dict[GangKey, None] = {}
    asked = near(run, step)[::-1] if 0 <= step < len(scene.flows.run(run)) else []
    while asked:
        key = asked.pop()
        if scene.flows.run(key[0])[key[1]].transfer:
            asked += near(*key)[::-1]
        else:
            found[key] = None
    return list(found)


class Made(NamedTuple):
    """A computation for whose end others wait.

    where: its islands.  gang: its number.  line: the user's.
    """

    node: str
    where: str
    gang: float
    line: str

    @property
    def told(self) -> str:
        """Its node, and where it is made."""
        return " on ".join(filter(None, self[:2]))


def maker(scene: Scene, run: int, step: int, until: float) -> Made | None:
    """The computation for whose end a gang was waited until some moment (seconds on the records'
    clock); None where that is not known."""
    ended, node, where, of, at = scene.waits.ahead(run)
    if abs(ended - until) > SAME:
        made = sources(scene, run, step)
        if not made:
            return None
        of, at = max(made, key=lambda key: ended_at(scene, *key))
        stage = scene.flows.run(of)[at]
        node, where = stage.node, stage.slice
    bound, gang = scene.machine.slices.get(where), scene.gangs.by_key.get((of, at))
    line = gang.line if gang else ""
    return Made(node, " and ".join(bound.islands) if bound else "", number(of, at), line)


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


def later(scene: Scene, run: int, step: int, moment: float) -> Stage | None:
    """The first computation after a step, of its run and on its slice, that others wait for and
    whose inputs were there at a moment (seconds on the records' clock): it might have computed
    then.  None for a bar that stands for several steps."""
    flow = scene.flows.run(run) if step >= 0 else ()
    near = flow[step + 1 : step + NEAR]
    leaves = {n for stage in near for n in stage.after if stage.transfer}
    for n, stage in enumerate(near, step + 1):
        if stage.transfer or stage.slice != flow[step].slice or n not in leaves:
            continue
        if all(ended_at(scene, run, made) <= moment for made in makers(scene, run, n)):
            return stage
    return None


def missing(scene: Scene, gang: Gang, host: str) -> tuple[str, Gang | None]:
    """The node whose value a gang has not got on a host, "" for none, and the gang that makes it
    if that has not ended."""
    for key in sources(scene, gang.run, gang.step):
        maker, run = scene.gangs.by_key.get(key), scene.runs.get(key[0])
        if maker is None and run is not None and run.ended is None:
            # It has no place yet, or nobody can tell it from others that have ended.
            node = scene.flows.run(run.run)[key[1]].node
            return ("", None) if run.placed else (node, Gang(*key, run.program, node))
        if maker is not None and maker.state != "done":
            return maker.node, maker
    flow, seen = scene.flows.run(gang.run), scene.runs.get(gang.run)
    arrived = {(moved.step, moved.host) for moved in seen.transfers} if seen else set()
    for step in flow[gang.step].after if gang.step < len(flow) and seen else ():
        if flow[step].transfer and (step, host) not in arrived:
            of = sources(scene, gang.run, step)
            return (scene.flows.run(of[0][0])[of[0][1]].node if of else flow[step].node), None
    return "", None


def nexts(scene: Scene) -> dict[Lane, Gang]:
    """The gangs that have the next places on devices, and are not launched there; where there are
    none, those that will have them next."""
    out: dict[Lane, Gang] = {}
    if scene.final:
        return out
    for island in scene.machine.islands:
        seen: set[int] = set()
        for gang in scene.gangs.order(island):
            bound = scene.machine.slices.get(gang.slice)
            if gang.over or bound is None or gang.slice in seen:
                continue
            seen.add(gang.slice)
            for lane in bound.lanes:
                if lane not in out and gang.state_on(lane.host) == "granted":
                    out[lane] = gang
    for gang in _unplaced(scene):
        for lane in scene.machine.slices[gang.slice].lanes:
            out.setdefault(lane, gang)
    return out


def _unplaced(scene: Scene) -> Iterator[Gang]:
    """By slice, the first computation that has no place yet, of the oldest run that has one."""
    last: dict[tuple[int, int], int] = {}
    for (of, step), gang in scene.gangs.by_key.items():
        last[of, gang.slice] = max(step, last.get((of, gang.slice), -1))
    taken: set[int] = set()
    for run in islice((run for run in scene.runs.values() if run.ended is None), AHEAD):
        placed: dict[int, float] | None = None
        for slice_id, steps in scene.flows.computations(run.run).items():
            if slice_id in taken or slice_id not in scene.machine.slices:
                continue
            known = last.get((run.run, slice_id), -1)
            if known < 0:  # those that had places are over, and counted only, or there were none
                placed = run.granted if placed is None else placed
                known = max((step for step in steps if step in placed), default=-1)
            if (at := bisect(steps, known)) < len(steps):
                taken.add(slice_id)
                stage = scene.flows.run(run.run)[steps[at]]
                about = run.program, stage.node, run.client, stage.line, slice_id
                yield Gang(run.run, steps[at], *about)


def needed(scene: Scene) -> dict[Lane, str]:
    """The values that the next gangs of devices have not got, by the nodes that make them."""
    out: dict[Lane, str] = {}
    told: dict[tuple[int, int, str], str] = {}  # the devices of a host need the same
    for lane, gang in nexts(scene).items():
        key = gang.run, gang.step, lane.host
        if key not in told:
            node, made = missing(scene, gang, lane.host)
            told[key] = node and (f"needs {node}" if made else f"receives {node}")
        if told[key]:
            out[lane] = told[key]
    return out


def waits_so_far(scene: Scene, now: float) -> dict[str, NDArray[np.generic]]:
    """Marks of what devices waited for before what they work on, and of what idle ones wait for
    *now* (seconds), as those of what has ended."""
    return _so_far(scene, now)[1]


def open_waits(scene: Scene, now: float) -> list[Bar]:
    """The same as bars."""
    return _so_far(scene, now)[0]


def _so_far(scene: Scene, now: float) -> tuple[list[Bar], dict[str, NDArray[np.generic]]]:
    if now not in scene.so_far:
        bars = _waits_so_far(scene, now)
        scene.so_far[now] = bars, scene.waited.columns(bars)
    return scene.so_far[now]


def called(scene: Scene) -> list[RunSeen]:
    """The runs of all clients, in the order in which these submitted them."""
    # One that has ended without a gang is a part of another one, which was made of several calls.
    whole = (run for run in scene.runs.values() if run.count or run.ended is None)
    runs = (run for run in whole if run.client and run.submitted < math.inf)
    return sorted(runs, key=attrgetter("submitted"))


def in_turn(runs: Sequence[RunSeen]) -> bool:
    """Whether the newest of some runs are a loop of one client, which waited for each of them
    before it submitted the next."""
    newest = runs[-CALLS:]
    loop = len({(run.client, run.program) for run in newest}) == 1
    return loop and len(newest) == CALLS and -math.inf not in map(_until, newest, newest[1:])


def _until(before: RunSeen, after: RunSeen) -> float:
    """When a client's wait for a run ended (seconds), after which it submitted another one; minus
    infinity where it did not wait."""
    if before.ended is None or not before.end <= after.submitted < before.end + PAUSE:
        return -math.inf
    return min(before.ended, after.submitted)


def client_waits(scene: Scene, start: float, end: float) -> dict[str, list[ClientWait]]:
    """By client, its waits for runs between two moments (seconds on the axis): it submitted the
    next run when that before it had ended.  A loop that waited for each call of a program, or for
    each third of them, waits for the newest one, too, when it is that one's turn."""
    found: dict[str, list[ClientWait]] = {}
    by_client: dict[str, list[RunSeen]] = {}
    for run in called(scene):
        by_client.setdefault(run.client, []).append(run)
    for client, runs in by_client.items():
        newest = runs[-1]
        waits = [(a.submitted, _until(a, b), b.waited) for a, b in pairwise(runs)]
        alike = [(_until(a, b), b) for a, b in pairwise(runs) if a.program == newest.program]
        if before := _turn([until > -math.inf for until, _ in alike]):
            over = math.inf if newest.ended is None else newest.ended
            waits.append((newest.submitted, over, alike[-before][1].waited))
        for since, until, line in waits:
            begun, over = max(start, since - scene.origin), min(end, until - scene.origin)
            if begun < over:
                found.setdefault(client, []).append(ClientWait(begun, over, line))
    return found


def works_at(scene: Scene, client: str) -> str:
    """The line at which a client was seen at work most often between its newest calls; "" if at
    none."""
    seen = Counter(run.worked for run in scene.runs.values() if run.client == client)
    del seen[""]
    return max(seen, key=lambda line: seen[line], default="")


def _turn(waited: Sequence[bool]) -> int:
    """So many calls before the newest one the same turn of a loop was, if its client waited for
    that; else 0.  waited: whether it waited for each of those before."""
    for length in range(1, TURNS + 1):
        known = max(CALLS, 2 * length)
        newest = waited[-known:]
        if len(newest) == known and newest[-length] and newest[length:] == newest[:-length]:
            return length
    return 0


def device_at(scene: Scene, y: float) -> Lane | None:
    """The device that is drawn nearest to a height in the device queues."""
    at = {lane: there for lane in scene.rows.of if (there := scene.drawn_at(lane)) is not None}
    return min(at, key=lambda lane: abs(at[lane] - y), default=None)


def wait_at(scene: Scene, lane: Lane, moment: float, now: float) -> Bar | None:
    """The wait of a device at a moment, as known *now* (seconds on the records' clock)."""
    row, waited = scene.rows.of.get(lane), scene.waited.bars.items
    bars = (bar for known in (open_waits(scene, now), reversed(waited)) for bar in known)
    return next((b for b in bars if b.row == row and b.start <= moment <= b.end), None)


def _waits_so_far(scene: Scene, now: float) -> list[Bar]:
    together: dict[tuple[GangKey, str], list[Lane]] = {}
    begun = {}
    for lane, key, since, what in scene.running():
        together.setdefault((key, lane.host), []).append(lane)
        begun[key, lane.host] = since, what
    busy, next_gangs = {lane for lanes in together.values() for lane in lanes}, nexts(scene)
    for lane, gang in next_gangs.items():
        if lane in scene.recent and lane not in busy:
            together.setdefault(((gang.run, gang.step), lane.host), []).append(lane)
    marks: list[Bar] = []
    seen: set[float] = set()
    for (key, host), lanes in together.items():
        rows = {scene.drawn_at(lane): lane for lane in reversed(lanes)}
        for row, lane in rows.items():
            if row is None or row in seen:
                continue
            seen.add(row)
            rest, more, placed = DISPATCH, [], (key, host) in begun
            if placed:
                since, what = begun[key, host]
            else:
                gang, since = next_gangs[lane], max(now, scene.waiting[lane].ended)
                placed = gang.run not in scene.runs or scene.runs[gang.run].placed
                what = What(gang.node, gang.program, gang.client, gang.line)
                rest, more = UNKNOWN, _sure(scene, gang, host, busy, since) if placed else []
            parts = scene.waits.so_far(*key, what.node, tuple(lanes), lane, since, more)
            for cause, start, over in parts:
                # Nothing that is known explains the last part yet.
                cause = cause if placed and (cause, over) != (DISPATCH, since) else rest
                about = what.program, what.node, what.client, what.line, *key
                mark = Bar(scene.rows.of[lane], MARKS.index(cause), start, over, *about)
                mark.busy = over - start
                marks.append(mark)
    return marks


def _sure(
    scene: Scene, gang: Gang, host: str, busy: set[Lane], now: float
) -> list[tuple[str, float]]:
    """The causes for which a gang waits whatever comes, and until when (seconds) at least.

    Its bytes may not have been under way since they were made, and where others compute on its
    devices that may be told to be the cause of all of it.
    """
    made = makers(scene, gang.run, gang.step)
    shared = any(other.host == host for other in busy & _lanes(scene, gang))
    if shared:
        return [] if missing(scene, gang, host)[0] else [(ORDER, now)]
    return (
        [(INPUT, min(now, max(ended_at(scene, gang.run, step) for step in made)))] if made else []
    )


def _lanes(scene: Scene, gang: Gang) -> set[Lane]:
    bound = scene.machine.slices.get(gang.slice)
    return set(bound.lanes) if bound else set()
