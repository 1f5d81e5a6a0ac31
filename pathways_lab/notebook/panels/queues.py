"""Device queues: a lane for the devices that do alike, and their work over time.

Full bars are computations, the thin grey ones below are transfers that arrive.
Between bars, small marks tell what the device waited for, each cause in a
colour and at a height of its own; a device without work has none.  The running
gang is an open bar that grows to the present; the gangs that wait behind it in the
device's queue are counted at the right.

Paper: section 2 (devices are FIFO queues of non-preemptible computations).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pathways_lab.notebook.scene.gang_number import number
from pathways_lab.notebook.scene.palette import PAINTS, ink_on
from pathways_lab.notebook.scene.plot import BOXES, CATALOGUE, DATA, FRAME, TEXTS, Layer, Plot, wide
from pathways_lab.notebook.scene.row_layout import Rows, short
from pathways_lab.notebook.scene.scene import WAITS, Scene
from pathways_lab.notebook.scene.text import nothing
from pathways_lab.timeline.records import own

TEXT_WIDTH = 7.2
"""Pixels that one character of a bar's label takes, about."""

MOST_WORDS = 120
"""Labels on bars at most."""

TALL, BESIDE = 22.0, 0.3
"""Pixels of a lane that has room for words beside marks, and their distance in lanes."""

NAMED = np.array([wide(cause) + 12 for cause in WAITS])
"""Pixels of a mark that has room for the name of its cause."""

HOVER = (
    ("computation", "@what{node} of @what{program}"),
    ("run", "@run"),
    ("client", "@what{client}"),
    ("line", "@what{line}"),
    ("from", "@left{0.0000} s to @right{0.0000} s"),
    ("took", "@busy{0.0} ms each"),
    ("gangs × devices", "@count"),
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
    bars = scene.bars.columns()
    return Plot(
        name="queues",
        title="Device queues",
        note="bars compute; marks tell what a device waits for; thin below, transfers that arrive",
        height=max(60, round(each * (rows.end + 0.5))),
        x=scene.range(now),
        y=(-0.6, max(rows.end, 0.5) + 0.1),
        layers=(
            Layer(
                "queues-waits",
                BOXES,
                scene.waited.table.columns(),
                first=scene.waited.table.first,
                hover=WAITED,
                alpha=0.9,
                kinds=WAITS,
                lined=True,
            ),
            Layer("queues-bars", BOXES, bars, first=scene.bars.first, hover=HOVER, lined=True),
            Layer("queues-open", BOXES, open_bars, hover=HOVER, hatch="right_diagonal_line"),
            Layer("queues-causes", TEXTS, _causes(scene, now, each)),
            Layer("queues-words", TEXTS, _words(scene, bars, now) if each >= 15 else _no_words()),
            Layer(CATALOGUE, DATA, scene.catalogue_columns()),
        ),
        time=True,
        rows=rows.labels if each >= 13 else _host_labels(rows, each),
        groups=rows.groups,
        readouts=_readouts(scene) if each >= 13 else {},
        bands=rows.bands[1::2],
        empty=nothing(scene),
    )


def _open(scene: Scene, now: float) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {
        name: []
        for name in ("left", "right", "top", "bottom", "paint", "alpha", "what", "count", "busy",
                     "run", "gang")
    }  # fmt: skip
    seen: dict[float, None] = {}
    for lane, (run, step), since, what in scene.running():
        row = scene.drawn_at(lane)
        if row is None or row in seen:
            continue
        seen[row] = None
        end = max(now, since)
        values = {
            "left": since - scene.origin,
            "right": end - scene.origin,
            "top": row - 0.40,
            "bottom": row + 0.30,
            "paint": scene.palette.code(what.program, what.node),
            "alpha": 0.55,
            "what": scene.what(what),
            "count": 1,
            "busy": 1000 * (end - since),
            "run": float(own(run)),
            "gang": number(run, step),
        }
        for name, column in columns.items():
            column.append(values[name])
    return columns


def _readouts(scene: Scene) -> dict[float, str]:
    """How many gangs wait behind the running one, per lane."""
    out = dict.fromkeys(scene.lanes.rows.labels, "")
    for lane, waiting in scene.waiting.items():
        row = scene.drawn_at(lane)
        if row is not None and len(waiting.queue) > 1:
            out[row] = f"{len(waiting.queue) - 1} waiting"
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


def _causes(scene: Scene, now: float, each: float) -> dict[str, list[Any]]:
    """The names of causes beside the marks that are wide enough: colours alone may look alike."""
    start, end = scene.range(now)
    marks: dict[str, Any] = scene.waited.table.columns()
    left, right = np.maximum(marks["left"], start), np.minimum(marks["right"], end)
    room, kinds = (right - left) * FRAME / (end - start), marks["kind"].astype(int)
    fits = np.flatnonzero((room > NAMED[kinds]) & (each >= TALL))[-MOST_WORDS:]
    middle = (marks["top"] + marks["bottom"]) / 2
    inward = np.where(kinds < len(WAITS) // 2, BESIDE, -BESIDE)
    return {
        "x": [float(left[n] + right[n]) / 2 for n in fits],
        "y": [float(middle[n] + inward[n]) for n in fits],
        "text": [WAITS[kinds[n]] for n in fits],
    }


def _no_words() -> dict[str, list[Any]]:
    return {"x": [], "y": [], "text": [], "ink": []}


def _words(scene: Scene, bars: dict[str, Any], now: float) -> dict[str, list[Any]]:
    """Names on the bars that are wide enough, where the axis will be after a tick or two."""
    start, end = scene.range(now)
    per_second = FRAME / (end - start)
    left = np.maximum(bars["left"], start)
    room = (bars["right"] - left) * per_second / TEXT_WIDTH
    thick = (bars["bottom"] - bars["top"]) > 0.5
    names = [what.node for what in scene.catalogue]
    sizes = np.array([len(name) + 1 if name else 1 << 20 for name in names] or [1 << 20])
    fits = np.flatnonzero(thick & (room > sizes[bars["what"]]))
    if len(fits) > MOST_WORDS:
        fits = fits[-MOST_WORDS:]
    # Where hosts share a row, their bars may lie on each other: one label will do.
    at = {(float(bars["top"][n]), round(float(left[n]) * per_second / 8)): n for n in fits}
    fits = np.array(sorted(at.values()), np.int64)
    return {
        "x": [float(left[n] + bars["right"][n]) / 2 for n in fits],
        "y": [float(bars["top"][n] + bars["bottom"][n]) / 2 for n in fits],
        "text": [names[bars["what"][n]] for n in fits],
        "ink": [ink_on(PAINTS[bars["paint"][n]]) for n in fits],
    }
