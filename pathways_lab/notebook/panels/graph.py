"""Program graph: the newest run's nodes on their slices, its data edges, its critical path.

A row per slice, a column per step of dependence, so that what may run at the
same time stands below each other.  Lines are data edges, wider where more bytes
move.  States look as in the panel of the gang order.  The critical path, the
chain of computations that nothing can shorten but themselves, has dark edges.

Paper: figure 3 (a program and its sharded representation).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pathways_lab.notebook.kernel import line_index
from pathways_lab.notebook.scene.gang_number import NOBODY, number
from pathways_lab.notebook.scene.palette import FAILED, INK, NEUTRAL, PAINTS, ink_on
from pathways_lab.notebook.scene.plot import (
    BOXES,
    FRAME,
    LINES,
    TEXTS,
    WORD,
    Growing,
    Layer,
    Plot,
    blank,
    in_way,
    put,
    shorter,
)
from pathways_lab.notebook.scene.scene import Scene
from pathways_lab.notebook.scene.text import nothing
from pathways_lab.timeline.flow import Flow
from pathways_lab.timeline.planned import RunSeen
from pathways_lab.timeline.records import own

MOST_COLUMNS = 60
"""Columns; of deeper programs, neighbouring ones become one."""

MOST_STACK = 6
"""Nodes below each other in one row; more are drawn as one."""

SOON = 0.3
"""Seconds after which a run that goes on is looked at for its messages."""

UNSEEN = "waiting"
STATES = (UNSEEN, "granted", "launched", "done", "failed")

HOVER = (
    ("node", "@node"),
    ("state", "@state"),
    ("no.", "@step"),
    ("line", "@line"),
    ("took", "@took"),
    ("critical path", "@critical"),
)
NODE = ("node", "state", "step", "line", "took", "critical", "fill", "edge", "gang", "left",
        "right", "top", "bottom", "alpha")  # fmt: skip
EDGE = ("xs", "ys", "fill", "width", "about", "bytes")
EDGE_HOVER = (("data", "@about"), ("bytes per device", "@bytes{0,0}"))


@dataclass(slots=True)
class Box:
    """One node, or several that do not fit."""

    steps: list[int]
    column: int
    row: int
    top: float = 0.0
    bottom: float = 0.0


def ranks(flow: Flow) -> dict[int, int]:
    """Depth of every computation: how many must end before it, one after the other."""
    depth: dict[int, int] = {}
    for step, stage in enumerate(flow):
        before = max((depth[a] for a in stage.after), default=-1)
        depth[step] = before if stage.transfer else before + 1
    return {step: rank for step, rank in depth.items() if not flow[step].transfer}


def edges(flow: Flow) -> list[tuple[int, int, int]]:
    """``(from, to, bytes)`` between computations; transfers are edges."""
    out = []
    for step, stage in enumerate(flow):
        for source in () if stage.transfer else stage.after:
            nbytes = flow[source].nbytes
            while flow[source].transfer and flow[source].after:
                source = flow[source].after[0]
            if not flow[source].transfer:
                out.append((source, step, nbytes))
    return out


def critical(flow: Flow, seconds: dict[int, float]) -> tuple[int, ...]:
    """The chain of steps along data edges that takes longest.  seconds: by step."""
    reached: dict[int, float] = {}
    came: dict[int, int] = {}
    for step, stage in enumerate(flow):
        best = max(stage.after, key=lambda a: reached[a], default=-1)
        if best >= 0:
            came[step] = best
        reached[step] = (reached[best] if best >= 0 else 0.0) + seconds.get(step, 0.0)
    if not reached or max(reached.values()) <= 0:
        return ()
    step = max(reached, key=lambda s: reached[s])
    path = [step]
    while step in came:
        step = came[step]
        path.append(step)
    return tuple(s for s in reversed(path) if not flow[s].transfer)


def newest(
    scene: Scene, now: float = 0.0, whole: bool = False, told: bool = False
) -> RunSeen | None:
    """The run to show: the newest of whose computations anything is known, else the newest.

    Rather one whose program is known.  whole, told: one that has ended, or whose messages are
    known, if there is any; the messages of one that goes on are known when it has gone on for a
    moment at *now* (seconds).
    """
    runs = [run for run in scene.runs.values() if run.run]
    ran = [run for run in runs if run.count]
    fit = [
        run for run in ran
        if (run.ended is not None or not (whole or (told and now - run.begin < SOON)))
        and (run.messages or not told)
    ]  # fmt: skip
    known = [run for run in fit or ran if scene.flows.run(run.run)]
    return max(known or fit or ran or runs, key=lambda run: (run.begin, run.run), default=None)


def plot(scene: Scene, now: float) -> Plot:
    """The panel at *now* (seconds)."""
    run = newest(scene)
    flow = scene.flows.run(run.run) if run is not None else ()
    if run is None or not flow:
        return _empty(
            "the program of this run is not in the records"
            if run
            else nothing(scene) or "waiting for a run"
        )
    seconds: dict[int, float] = {}
    for gang in run.gangs:
        seconds[gang.step] = max(seconds.get(gang.step, 0.0), gang.end - gang.start)
    for span in run.transfers:
        seconds[span.step] = max(seconds.get(span.step, 0.0), span.end - span.start)
    path = set(critical(flow, seconds))
    slices = sorted({stage.slice for stage in flow if not stage.transfer})
    depth = ranks(flow)
    columns = min(MOST_COLUMNS, 1 + max(depth.values(), default=0))
    boxes = _boxes(flow, depth, slices, columns)
    stack = max(Counter((box.row, box.column) for box in boxes).values(), default=1)
    of = {step: box for box in boxes for step in box.steps}
    across = max(columns - 1, 5) + 1.2
    each = FRAME / across
    layers = (
        Layer("graph-edges", LINES, _edge_columns(flow, of, path), hover=EDGE_HOVER, alpha=0.6),
        *_states(scene, run, flow, boxes, path, seconds),
        *_words(scene, run, flow, boxes, each, seconds),
    )
    return Plot(
        name="graph",
        title="Program graph",
        note="□ waiting or granted  ▨ launched  ■ done;  framed: critical path;  "
        f"the newest run of {run.program}",
        height=round(len(slices) * (16 + 20 * stack)),
        x=(-0.6, across - 0.6),
        y=(-0.5, len(slices) - 0.5),
        layers=layers,
        rows={float(row): _named(scene, each) for row, each in enumerate(slices)},
        bands=tuple((row - 0.5, row + 0.5) for row in range(1, len(slices), 2)),
    )


def _empty(why: str) -> Plot:
    layers = (
        Layer("graph-edges", LINES, blank(EDGE), hover=EDGE_HOVER, alpha=0.6),
        *(_state_layer(state, blank(NODE)) for state in STATES),
        Layer("graph-words", TEXTS, blank(WORD)),
        Layer("graph-names", TEXTS, blank(WORD[:5])),
    )  # fmt: skip
    return Plot("graph", "Program graph", 52, (-0.6, 5.6), (-0.5, 0.5), layers, empty=why)


def _named(scene: Scene, number: int) -> str:
    seen = scene.machine.slices.get(number)
    name = f"s{own(number)}"
    return f"{'+'.join(seen.islands)} · {name}" if seen is not None else name


def _boxes(flow: Flow, depth: dict[int, int], slices: list[int], columns: int) -> list[Box]:
    """Where every node stands; within a row, those of one column share its height."""
    wide = math.ceil((1 + max(depth.values(), default=0)) / columns)
    places: dict[tuple[int, int], list[int]] = {}
    rows = {number: row for row, number in enumerate(slices)}
    for step, rank in depth.items():
        places.setdefault((rows[flow[step].slice], rank // wide), []).append(step)
    out = []
    for (row, column), steps in places.items():
        groups = [[step] for step in steps] if len(steps) <= MOST_STACK else [steps]
        high = 0.8 / len(groups)
        for place, group in enumerate(groups):
            top = row - 0.4 + place * high
            out.append(Box(group, column, row, top, top + 0.86 * high))
    return out


def _edge_columns(flow: Flow, of: dict[int, Box], path: set[int]) -> Growing:
    merged: dict[tuple[int, int], list[float]] = {}
    marked: dict[tuple[int, int], bool] = {}
    about: dict[tuple[int, int], str] = {}
    boxes = {id(box): box for box in of.values()}
    for source, target, nbytes in edges(flow):
        key = id(of[source]), id(of[target])
        if key[0] != key[1]:
            merged.setdefault(key, []).append(nbytes)
            marked[key] = marked.get(key, False) or (source in path and target in path)
            about[key] = f"{flow[source].node} to {flow[target].node}"
    out = blank(EDGE)
    for key, sizes in merged.items():
        a, b = boxes[key[0]], boxes[key[1]]
        xs = [a.column + 0.40, a.column + 0.48, b.column - 0.48, b.column - 0.40]
        start, end = (a.top + a.bottom) / 2, (b.top + b.bottom) / 2
        width = min(4.0, 0.6 + 0.35 * math.log10(1 + sum(sizes))) + 1.2 * marked[key]
        told = about[key] if len(sizes) == 1 else f"{len(sizes)} edges"
        fill = INK if marked[key] else NEUTRAL
        put(out, xs, [start, start, end, end], fill, round(width, 1), told, float(sum(sizes)))
    return out


def _state_layer(state: str, columns: Growing) -> Layer:
    hatch = {"launched": "right_diagonal_line", "failed": "x"}.get(state, "")
    return Layer(
        f"graph-{state}", BOXES, columns, hover=HOVER, hatch=hatch, hatch_alpha=0.3, corner=2
    )


def _states(
    scene: Scene, run: RunSeen, flow: Flow, boxes: Sequence[Box], path: set[int],
    seconds: dict[int, float],
) -> list[Layer]:  # fmt: skip
    # An unfinished node has its name in it, on an unknown ground: light or dark.
    alphas = {UNSEEN: 0.04, "granted": 0.15, "launched": 0.2, "done": 1.0, "failed": 0.2}
    columns = {state: blank(NODE) for state in STATES}
    for box in boxes:
        states = _states_of(scene, run, box, seconds)
        worst = _worst(states)
        first = flow[box.steps[0]]
        many = len(box.steps) > 1
        on_path = any(step in path for step in box.steps)
        colour = PAINTS[scene.palette.code(run.program, "" if many else first.node)]
        known = [seconds[step] for step in box.steps if step in seconds]
        put(
            columns[worst],
            f"{len(box.steps)} nodes" if many else first.node,
            worst if len(set(states)) == 1 else f"{states.count('done')} done",
            ", ".join(map(str, box.steps[:8])) + (" …" if len(box.steps) > 8 else ""),
            line_index.source(first.line),
            f"{1000 * sum(known):.2f} ms" if known else "not known yet",
            "yes" if on_path else "no",
            FAILED if worst == "failed" else colour,
            INK if on_path else colour,
            NOBODY if many else number(run.run, box.steps[0]),
            *(box.column - 0.40, box.column + 0.40, box.top, box.bottom, alphas[worst]),
        )
    return [_state_layer(state, columns[state]) for state in STATES]


def _states_of(scene: Scene, run: RunSeen, box: Box, seconds: dict[int, float]) -> list[str]:
    known = scene.gangs.by_key
    # The records of a run that has finished may be gone in part, and yet all of it is done.
    finished = run.outcome == "finished"
    return [
        known[run.run, step].state if (run.run, step) in known
        else "done" if finished or step in seconds else UNSEEN
        for step in box.steps
    ]  # fmt: skip


def _worst(states: list[str]) -> str:
    return "failed" if "failed" in states else min(states, key=STATES.index)


def _words(
    scene: Scene, run: RunSeen, flow: Flow, boxes: Sequence[Box], each: float,
    seconds: dict[int, float],
) -> tuple[Layer, Layer]:  # fmt: skip
    """The names on boxes that are filled, and those that lie on the ground of the page."""
    done, going = blank(WORD), blank(WORD[:5])
    for box in boxes:
        many = len(box.steps) > 1
        word = f"{len(box.steps)} ×" if many else flow[box.steps[0]].node
        colour = PAINTS[scene.palette.code(run.program, "" if many else word)]
        shown = in_way(shorter(word), 0.8 * each / FRAME)
        at = float(box.column), (box.top + box.bottom) / 2, *shown
        if _worst(_states_of(scene, run, box, seconds)) == "done":
            put(done, *at, ink_on(colour))
        else:
            put(going, *at)
    return Layer("graph-words", TEXTS, done), Layer("graph-names", TEXTS, going)
