"""Device queues: a lane for the devices that do alike, and their work over time.

Full bars are computations, the thin ones below are transfers that arrive.
Between bars, small marks tell what the device waited for, each cause in a
colour and at a height of its own; a device without work has none.  The running
gang is an open bar that grows to the present; the gangs that wait behind it in the
device's queue are counted at the right.

Paper: section 2 (devices are FIFO queues of non-preemptible computations).
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pathways_lab.notebook.kernel.line_index import source, split
from pathways_lab.notebook.scene.awaited import (
    ClientWait,
    client_waits,
    maker,
    needed,
    waits_so_far,
    works_at,
)
from pathways_lab.notebook.scene.duration import duration
from pathways_lab.notebook.scene.gang_number import number, parts
from pathways_lab.notebook.scene.lanes import STEADY
from pathways_lab.notebook.scene.palette import INK, PAINTS, family, ink_on, is_between
from pathways_lab.notebook.scene.plot import (
    ARROWS,
    BOXES,
    CATALOGUE,
    DATA,
    TEXTS,
    WORD,
    Growing,
    Layer,
    Plot,
    blank,
    in_ways,
    put,
)
from pathways_lab.notebook.scene.row_layout import GAP, Rows, short
from pathways_lab.notebook.scene.scene import MARKS, WAITS, Scene
from pathways_lab.notebook.scene.text import nothing
from pathways_lab.timeline.records import own
from pathways_lab.timeline.waits import INPUT

MOST_WORDS = 200
"""Labels on bars at most, and beside marks."""

LEAST = 0.003
"""Share of the width below which nothing is named before somebody zooms."""

TALL, BESIDE = 22.0, 0.38
"""Pixels of a lane that has room for words beside marks, and their distance in lanes."""

NOTE = "hatched: still computes; thin: arrives; line: waits"

CLIENTS, LONG = 3, 0.2
"""Clients whose waiting is drawn, at most, and the share of the time from which on it is."""

OTHERWISE = "its own work"
"""The name of the time in which a client does not wait."""

FAINT = 0.25
"""Share of the delay of the latest host above which other hosts are said to be late, too."""

HOVER = (
    ("", "@what{node} of @what{program}"),
    ("run", "@run"),
    ("client", "@what{client}"),
    ("line", "@what{line}"),
    ("from", "@left{0.0000} s to @right{0.0000} s"),
    ("took", "@busy{0.0} ms each"),
    ("gangs × devices", "@count"),
)
CLIENT_WAITS = (
    ("", "@client waits for a result"),
    ("line", "@line"),
    ("from", "@left{0.0000} s to @right{0.0000} s"),
    ("waited", "@busy{0.00} ms"),
)
WAITED = (
    ("waits for", "@kind{custom}"),
    ("before", "@what{node} of @what{program}"),
    ("line", "@what{line}"),
    ("from", "@left{0.0000} s to @right{0.0000} s"),
    ("waited", "@busy{0.00} ms"),
)
"""Hover text of a mark."""


def plot(scene: Scene, now: float) -> Plot:
    """The panel at *now* (seconds)."""
    rows = scene.lanes.rows
    count = len(rows.labels)
    each = max(7.0, min(28.0, 420.0 / max(count, 1)))
    open_bars = _open(scene, now)
    waited, open_waits = scene.waited.table.columns(), waits_so_far(scene, now)
    marks = {name: np.concatenate((waited[name], column)) for name, column in open_waits.items()}
    bars = scene.bars.columns()
    clients = _clients(scene, now) if each >= 13 else {}
    end = rows.end + (GAP + len(clients)) * bool(clients)
    at = {rows.end + GAP + 0.5 + n: client for n, client in enumerate(clients)}
    words = _causes(scene, marks, now, each)
    for column, more in zip(words.values(), _lines(scene, clients, now, at).values(), strict=True):
        column += more
    return Plot(
        name="queues",
        title="Device queues",
        note=_shown(scene) + NOTE,
        height=max(60, round(each * (end + 0.65))),
        x=scene.range(now),
        y=(-0.75, max(end, 0.5) + 0.1),
        layers=(
            Layer(
                "queues-waits",
                BOXES,
                waited,
                first=scene.waited.table.first,
                hover=WAITED,
                alpha=0.9,
                kinds=MARKS,
                lined=True,
            ),
            Layer(
                "queues-waits-open",
                BOXES,
                open_waits,
                hover=WAITED,
                alpha=0.9,
                kinds=MARKS,
                lined=True,
            ),
            Layer("queues-bars", BOXES, bars, first=scene.bars.first, hover=HOVER, lined=True),
            Layer("queues-open", BOXES, open_bars, hover=HOVER, hatch="right_diagonal_line"),
            Layer("queues-clients", BOXES, _boxes(clients, at), hover=CLIENT_WAITS),
            Layer("queues-causes", TEXTS, words),
            Layer("queues-words", TEXTS, _words(scene, bars, now) if each >= 15 else blank(WORD)),
            Layer("queues-arrows", ARROWS, blank(("x0", "y0", "x1", "y1", "cx0", "cx1"))),
            Layer(CATALOGUE, DATA, scene.catalogue.columns()),
        ),
        time=True,
        rows={
            **(rows.labels if each >= 13 else _host_labels(rows, each)),
            **at,
        },
        groups={**rows.groups, **dict.fromkeys(at, "client")},
        readouts=_readouts(scene, now) if each >= 13 else {},
        bands=rows.bands[1::2],
        empty=nothing(scene),
    )


def _shown(scene: Scene) -> str:
    """The repetitions in the window, counted, and those within each.  Calls that are their own
    program may go as one run."""
    if scene.shown is None:
        return ""
    program, runs = scene.shown.program, scene.shown.runs
    flows = [[stage.node for stage in scene.flows.run(run) if not stage.transfer] for run in runs]
    count = sum(map(len, flows))
    if count > len(runs) and any({*program.split(", ")} & {*nodes} for nodes in flows):
        return f"last {count} calls of {program} · "
    functions = Counter(node for node in flows[-1] if not is_between(node))
    ((node, most),) = functions.most_common(1) or [("", 0)]
    each = f", each with {most} × {node}" if most > 1 else ""
    return f"last {len(runs)} runs of {program}{each} · "


def _clients(scene: Scene, now: float) -> dict[str, list[ClientWait]]:
    """The clients that wait for long, and from when to when: first that which waits longest.

    Where runs are many, only the newest are remembered, and it is a share of their time.  One that
    waited for long in the last seconds keeps its lane: with one that waits at every fourth step
    the panel would be higher and lower all the time.
    """
    start, end = scene.elapsed(now)
    known = min([run.submitted for run in scene.runs.values()], default=0.0) - scene.origin
    start = min(max(start, known), end)
    waits = client_waits(scene, start, end)
    periods = [(start, waits)]
    if not scene.final:
        of_late = min(start, max(known, end - STEADY))
        periods.append((of_late, client_waits(scene, of_late, end)))
    sums: dict[str, float] = {}
    for since, found in periods:
        for client, each in found.items():
            share = sum(wait.end - wait.start for wait in each) / (end - since)
            sums[client] = max(share, sums.get(client, 0.0))
    longest = sorted(sums, key=lambda client: -sums[client])[:CLIENTS]
    return {client: waits.get(client, []) for client in longest if sums[client] > LONG}


def _boxes(clients: dict[str, list[ClientWait]], at: dict[float, str]) -> Growing:
    columns = blank(("left", "right", "top", "bottom", "fill", "client", "line", "busy"))
    for row, client in at.items():
        for start, end, line in clients[client]:
            put(columns, start, end, row + 0.06, row + 0.26, INK, client, source(line),
                1000 * (end - start))  # fmt: skip
    return columns


def _lines(
    scene: Scene, clients: dict[str, list[ClientWait]], now: float, at: dict[float, str]
) -> dict[str, list[Any]]:
    """The lines at which clients wait, above their marks, and that they do something else between
    two of these."""
    start, end = scene.range(now)
    waits = [
        (row, wait.start, wait.end, _at("waits", wait.line))
        for row, client in at.items() for wait in clients[client]
    ]  # fmt: skip
    for row, client in at.items():
        ways = _at(OTHERWISE, works_at(scene, client))
        waits += [(row, a.end, b.start, ways) for a, b in pairwise(clients[client])]
    rooms = np.array([until - since for _, since, until, _ in waits]) / (end - start)
    fits = _widest(rooms)
    return {
        "x": [(waits[n][1] + waits[n][2]) / 2 for n in fits],
        "y": [waits[n][0] - 0.17 for n in fits],
        **in_ways([(waits[n][3], float(rooms[n])) for n in fits]),
    }


def _open(scene: Scene, now: float) -> Growing:
    columns = blank(
        ("left", "right", "top", "bottom", "paint", "alpha", "what", "count", "busy", "run", "gang")
    )
    seen: dict[float, None] = {}
    for lane, (run, step), since, what in scene.running():
        row = scene.drawn_at(lane)
        if row is None or row in seen:
            continue
        seen[row] = None
        end = max(now, since)
        paint, about = scene.palette.code(what.program, what.node), scene.catalogue.row(what)
        put(
            columns, since - scene.origin, end - scene.origin, row - 0.40, row + 0.30, paint, 0.55,
            about, 1, 1000 * (end - since), float(own(run)), number(run, step),
        )  # fmt: skip
    return columns


def _readouts(scene: Scene, now: float) -> dict[float, str]:
    """By lane: by how much its host is late by itself, or else how many gangs wait behind the
    running one, or which node an idle lane waits for.  Beside a host that is late, hosts that are
    hardly so are no news."""
    out = dict.fromkeys(scene.lanes.rows.labels, "")
    late, idle = scene.late(now), needed(scene)
    least = FAINT * max(late.values(), default=0.0)
    for lane in scene.rows.of:
        row = scene.drawn_at(lane)
        if row is None:
            continue
        queue = scene.waiting[lane].queue if lane in scene.waiting else ()
        if late.get(lane.host, 0.0) > least:
            out[row] = f"{duration(late[lane.host], 2)} late"
        elif len(queue) > 1:
            out[row] = f"{len(queue) - 1} queued"
        elif not queue and lane in idle:
            out[row] = idle[lane]
    return out


def _host_labels(rows: Rows, each: float) -> dict[float, str]:
    """A label per host where there is no room for one per device."""
    of: dict[tuple[str, str], list[float]] = {}
    for lane, row in rows.of.items():
        of.setdefault((lane.island, lane.host), []).append(row)
    if len({(lane.host, row) for lane, row in rows.of.items()}) > len(rows.labels):
        return {}  # lanes of several hosts
    if rows.level != "device" or each * min(map(len, of.values()), default=0) < 13:
        return {}
    return {(min(at) + max(at)) / 2: short(host) for (_, host), at in of.items()}


def _causes(scene: Scene, marks: dict[str, Any], now: float, each: float) -> dict[str, list[Any]]:
    """The names of causes beside their marks, since colours alone may look alike: of an earlier
    computation its own.  Marks that stand for several lie on each other."""
    start, end = scene.range(now)
    left, right = np.maximum(marks["left"], start), np.minimum(marks["right"], end)
    room, kinds = (right - left) / (end - start), marks["kind"].astype(int)
    middle = (marks["top"] + marks["bottom"]) / 2
    named = (each >= TALL) & (marks["gang"] >= 0)
    fits = _apart(_widest(room * named), middle, (left - start) / (end - start))
    runs = {own(run): run for run in scene.runs}

    def words(n: int) -> tuple[str, ...]:
        run, step = parts(marks["gang"][n])
        made = kinds[n] == WAITS.index(INPUT) and run in runs
        until = float(marks["right"][n]) + scene.origin
        first = maker(scene, runs[run], step, until) if made else None
        return (
            (f"waits for {first.node}", f"for {first.node}", "") if first else (MARKS[kinds[n]], "")
        )

    inward = np.where(kinds < len(WAITS) // 2, BESIDE, -BESIDE)
    return {
        "x": [float(left[n] + right[n]) / 2 for n in fits],
        "y": [float(middle[n] + inward[n]) for n in fits],
        **in_ways([(words(n), float(room[n])) for n in fits]),
    }


def _words(scene: Scene, bars: dict[str, Any], now: float) -> dict[str, list[Any]]:
    """Names on bars, where the axis will be after a tick or two."""
    start, end = scene.range(now)
    names = [what.node for what in scene.catalogue]
    named = np.array([bool(name) for name in names] or [False])
    left, right = np.maximum(bars["left"], start), np.minimum(bars["right"], end)
    thick = (bars["bottom"] - bars["top"]) > 0.5
    room = (right - left) / (end - start)
    fits = _widest(room * (thick & named[bars["what"]]))
    fits = _apart(fits, bars["top"], (left - start) / (end - start))
    return {
        "x": [float(left[n] + right[n]) / 2 for n in fits],
        "y": [float(bars["top"][n] + bars["bottom"][n]) / 2 for n in fits],
        **in_ways([(_names(names[bars["what"][n]]), float(room[n])) for n in fits]),
        "ink": [ink_on(PAINTS[bars["paint"][n]]) for n in fits],
    }


def _names(name: str) -> tuple[str, ...]:
    """Where a name does not fit, its function's may."""
    return name, family(name), ""


def _widest(room: NDArray[np.float64]) -> list[int]:
    """The marks that may have room for a word at some zoom, in their order."""
    found = np.flatnonzero(room > LEAST)
    widest = found[np.argsort(-room[found], kind="stable")[:MOST_WORDS]]
    return sorted(widest.tolist())


def _apart(fits: list[int], rows: NDArray[np.float64], begin: NDArray[np.float64]) -> list[int]:
    """Where hosts share a row, what they have in common lies on each other: one label will do.

    begin: where each begins, as a share of the width.
    """
    return [*{(float(rows[n]), round(90 * float(begin[n]))): n for n in fits}.values()]


def _at(what: str, line: str) -> tuple[str, ...]:
    """The ways to say what a client does, and at which line if that is known."""
    known = split(line)
    if known is None:
        return what, ""
    whole = f"{what} at line {source(line)}"
    return whole, whole.partition(": ")[0], f"{what} at line {known[1]}", what, ""
