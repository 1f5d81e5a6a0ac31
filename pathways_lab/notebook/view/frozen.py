"""The frozen picture: everything from its first to its last moment, in one MIME bundle.

Problem: what a cell showed live must stay when the kernel is gone, in front
ends that trust nothing, within a size that nobody minds in a repository.

Rule for maintainers: at most :data:`LIMIT` bytes whatever happened, by merging
bars and by saying so, never by leaving some out; ``metadata`` holds the numbers
by which a test, or a reader, can compare the picture with the records.
"""

from __future__ import annotations

import base64
import html
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from pathways_lab.notebook.draw.svg import picture
from pathways_lab.notebook.panels import completed, plots
from pathways_lab.notebook.panels.legend import legend
from pathways_lab.notebook.scene.advice import advice
from pathways_lab.notebook.scene.palette import Palette
from pathways_lab.notebook.scene.scene import Scene
from pathways_lab.notebook.scene.text import lead_note, merged_note, summary, table
from pathways_lab.timeline.bars import GANG, Bar
from pathways_lab.timeline.machine import Machine
from pathways_lab.timeline.packed import Item
from pathways_lab.timeline.waits import known_order

LIMIT = 100_000
"""Bytes of the whole bundle at most."""

FINEST = 20_000
"""Bars that are kept while the records are read."""

BUDGETS = (4500, 1500, 500, 150, 50)
"""Numbers of bars to try, from fine to coarse."""

ENOUGH = 90
"""Bars of a row that still tell enough: with fewer, devices, and then hosts, share rows, which
hides less than wider bars do."""

Bundle = tuple[dict[str, str], dict[str, Any]]
"""MIME data and metadata, as ``display`` takes them."""


def freeze(
    records: Sequence[Item],
    origin: float,
    end: float,
    panels: tuple[str, ...],
    title: str,
    palette: Palette,
    notes: Sequence[str] = (),
    machine: Machine | None = None,
    stepwise: bool = False,
) -> Bundle:
    """The picture of *records* between two times (seconds on their clock).

    machine: what is known of islands, hosts and slices beside the records.
    stepwise: lanes show the last steps of what repeats, and an overview below them everything.
    """
    window = max(end - origin, 1e-3)
    known = sorted(records, key=known_order)
    for level in ("", "host", "island"):
        scene = Scene(
            origin, window, palette, final=True, budget=FINEST, level=level,
            machine=deepcopy(machine), stepwise=stepwise,
        )  # fmt: skip
        scene.add(known, end)
        coarsest = scene.rows.level == "island"
        least = 0 if coarsest else ENOUGH * len(scene.lanes.rows.labels)
        for budget in (BUDGETS[0], *(each for each in BUDGETS[1:] if each >= least)):
            if scene.marks > 2 * budget or len(scene.bars) > budget:
                scene.coarsen(budget)
            bundle = _bundle(scene, end, panels, title, notes)
            if _size(bundle) <= LIMIT:
                return bundle
        if coarsest:
            break
    return bundle


def still(
    scene: Scene, end: float, panels: tuple[str, ...], title: str, notes: Sequence[str]
) -> Bundle | None:
    """The picture of a scene as it is live; None: it would be larger than :data:`LIMIT`."""
    bundle = _bundle(scene, end, panels, title, notes)
    return bundle if _size(bundle) <= LIMIT else None


def _size(bundle: Bundle) -> int:
    return sum(len(json.dumps(part)) for part in bundle)


def _bundle(
    scene: Scene, end: float, panels: tuple[str, ...], title: str, notes: Sequence[str]
) -> Bundle:
    drawn = plots(panels, scene, end, edge="end")
    facts = _facts(scene, end)
    if scene.lead and not scene.shown and any(plot.time for plot in drawn):
        notes = (*notes, lead_note(scene.lead))
    if facts["merged"] and "queues" in panels:
        notes = (*notes, merged_note(scene.resolution))
    line = summary(scene, end, title)
    said = advice(scene, end) if any(plot.time for plot in drawn) else ""
    known = legend(completed(panels, scene), (scene, end))
    everything = scene.profile.told(scene.origin, len(scene.machine.lanes))
    overview = everything if scene.shown else None
    svg = picture(drawn, title, notes, known, facts, line, said, overview)
    data = {"text/html": image(svg, line), "text/plain": table(scene, end, title)}
    return data, {"pathways_lab": facts}


def image(svg: str, description: str) -> str:
    """An SVG file as HTML that front ends show even when they trust nobody."""
    source = "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
    style = "max-width:100%;height:auto"
    return f'<img alt="{html.escape(description)}" src="{source}" style="{style}">'


def _by_program(gangs: Iterable[Bar]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for bar in gangs:
        counted[bar.program] += bar.count
    return counted


def _facts(scene: Scene, end: float) -> Mapping[str, Any]:
    """The content of a picture, in numbers.

    bars: drawn bars; computations, transfers: how many (times devices) they
        stand for; programs: computations by program ("" where several were merged),
    the largest ones; start, end: of the earliest and latest bar, seconds from the
        picture's origin; held: device seconds of computation; merged: whether a
        bar stands for more than one; resolution: seconds; dropped: records that
        were lost before they could be drawn.
    """
    bars = scene.computed.bars.items
    gangs = [bar for bar in bars if bar.kind == GANG]
    return {
        "bars": len(scene.bars),
        "computations": sum(bar.count for bar in gangs),
        "programs": dict(_by_program(gangs).most_common(20)),
        "transfers": sum(bar.count for bar in bars if bar.kind != GANG),
        "start": round(min((bar.start - scene.origin for bar in bars), default=0.0), 6),
        "end": round(max((bar.end - scene.origin for bar in bars), default=0.0), 6),
        "held": round(sum(bar.busy for bar in gangs), 6),
        "merged": scene.merged,
        "resolution": round(scene.resolution, 6),
        "seconds": round(end - scene.origin, 6),
        "rows": len(scene.lanes.rows.labels),
        "dropped": scene.dropped,
    }
