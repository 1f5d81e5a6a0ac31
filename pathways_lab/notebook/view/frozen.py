"""The frozen picture: everything from its first to its last moment, in one MIME bundle.

Problem: what a cell showed live must stay when the kernel is gone, in front
ends that trust nothing, within a size that nobody minds in a repository.

How: a static picture for all places, and beside it the data of a live one (:mod:`.saved`).

Rule for maintainers: at most :data:`WHOLE` bytes whatever happened, by merging
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
from typing import Any, NamedTuple

from pathways_lab.notebook.draw.svg import picture
from pathways_lab.notebook.panels import completed, plots
from pathways_lab.notebook.panels.legend import legend
from pathways_lab.notebook.scene.advice import advice
from pathways_lab.notebook.scene.header import Header
from pathways_lab.notebook.scene.palette import Palette
from pathways_lab.notebook.scene.plot import Plot
from pathways_lab.notebook.scene.scene import Scene
from pathways_lab.notebook.scene.text import lead_note, merged_note, shares, summary, table
from pathways_lab.notebook.view.saved import MIME, saved, within
from pathways_lab.timeline.bars import GANG, Bar
from pathways_lab.timeline.machine import Machine
from pathways_lab.timeline.packed import Item
from pathways_lab.timeline.waits import known_order

LIMIT, WHOLE = 100_000, 149_000
"""Bytes of the static picture with its text at most, and with the data of a live one: a notebook
writes some more around them."""

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
            _merge(scene, budget)
            sheet = _sheet(scene, end, panels, title, notes)
            bundle = _static(scene, sheet, end)
            if fits := _size(bundle) <= LIMIT:
                break
        if fits or coarsest:
            break
    return _coarser(bundle, scene, sheet, end, panels, title, notes)


def _merge(scene: Scene, budget: int) -> None:
    if scene.marks > 2 * budget or len(scene.bars) > budget:
        scene.coarsen(budget)


def _coarser(
    static: Bundle, scene: Scene, sheet: Sheet, end: float, panels: tuple[str, ...], title: str,
    notes: Sequence[str],
) -> Bundle:  # fmt: skip
    """The static picture with the data of a live one, coarser ones if they would be too large."""
    bundle = _lively(static, sheet)
    for budget in BUDGETS:
        if bundle is not None:
            break
        _merge(scene, budget)
        bundle = _lively(static, _sheet(scene, end, panels, title, notes))
    return bundle or static


def still(
    scene: Scene, end: float, panels: tuple[str, ...], title: str, notes: Sequence[str]
) -> Bundle | None:
    """The picture of a scene as it is live; None: it would be larger than :data:`LIMIT`."""
    sheet = _sheet(scene, end, panels, title, notes)
    static = _static(scene, sheet, end)
    return (_lively(static, sheet) or static) if _size(static) <= LIMIT else None


def _size(bundle: Bundle) -> int:
    return sum(len(json.dumps(part)) for part in bundle)


class Sheet(NamedTuple):
    """All that is drawn, and the words around it."""

    plots: tuple[Plot, ...]
    header: Header


def _sheet(
    scene: Scene, end: float, panels: tuple[str, ...], title: str, notes: Sequence[str]
) -> Sheet:
    drawn = plots(panels, scene, end, edge="end")
    timed = any(plot.time for plot in drawn)
    if scene.lead and not scene.shown and timed:
        notes = (*notes, lead_note(scene.lead))
    if scene.merged and "queues" in panels:
        notes = (*notes, merged_note(scene.resolution))
    begin, length, parts = everything = scene.profile.told(scene.origin, len(scene.machine.lanes))
    shown = scene.range(end)
    header = Header(
        title=title,
        state="saved",
        shares=shares(scene, end),
        notes=tuple(notes),
        legend=legend(completed(panels, scene), (scene, end)),
        advice=advice(scene, end) if timed else "",
        summary=summary(scene, end, title),
        moments=(min(begin, shown[0]), max(begin + length * len(parts), shown[1])),
        shown=shown,
        overview=everything,
    )
    return Sheet(drawn, header)


def _static(scene: Scene, sheet: Sheet, end: float) -> Bundle:
    header, facts = sheet.header, _facts(scene, end)
    overview = header.overview if scene.shown else None
    svg = picture(
        sheet.plots, header.title, header.notes, header.legend, facts, header.summary,
        header.advice, overview,
    )  # fmt: skip
    text = table(scene, end, header.title)
    data = {"text/html": image(svg, header.summary), "text/plain": text}
    return data, {"pathways_lab": facts}


def _lively(static: Bundle, sheet: Sheet) -> Bundle | None:
    """The same with the data of a live picture, of all that it has or of the time that it shows;
    None: it would be larger than :data:`WHOLE`."""
    data, metadata = static
    for shown in (sheet.plots, tuple(map(within, sheet.plots))):
        bundle = {**data, MIME: saved(shown, sheet.header)}, metadata
        if _size(bundle) <= WHOLE:
            return bundle
    return None


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
