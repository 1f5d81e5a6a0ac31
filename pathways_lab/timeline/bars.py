"""Bars: what every device did when, as columns, and honestly made coarser.

Problem: a cluster runs more gangs in a second than a figure has pixels.  A
view must draw some thousands of bars, a frozen picture still fewer, and
neither may drop what it cannot draw: neighbours that are closer than a pixel
become one bar that knows how many gangs it stands for and how long its device
was really busy.

Rule for maintainers: ``count`` and ``busy`` add up to the records' numbers
whatever the resolution; a bar never mixes kinds, and mixes programs only where
nothing else fits (then its program is "").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pathways_lab.timeline.machine import Lane
from pathways_lab.timeline.records import Record, Span

GANG, TRANSFER = 0, 1
"""Kinds of bar: a computation on the device, or bytes that arrive for it."""

Columns = dict[str, NDArray[np.generic]]


@dataclass(slots=True)
class Bar:
    """One bar in one lane; times in seconds on the records' clock.

    node: the compiled function, or "" when several are merged.
    count: gangs (or transfers) that it stands for.
    busy: seconds out of ``end - start`` in which the device was held.
    """

    lane: int
    kind: int
    start: float
    end: float
    program: str
    node: str
    client: str
    line: str
    run: int
    step: int
    count: int = 1
    busy: float = 0.0
    failed: bool = False


def bars_of(span: Span, lanes: Mapping[Lane, int]) -> list[Bar]:
    """The bars of one span: one for each of its devices that has a lane.

    A transfer that names no devices is drawn on all lanes of its host.
    """
    if span.kind == "gang":
        kind = GANG
    elif span.kind == "transfer":
        kind = TRANSFER
    else:
        return []
    if span.devices:
        places = [lanes.get(Lane(span.island, span.host, device)) for device in span.devices]
    else:
        places = [n for lane, n in lanes.items() if kind == TRANSFER and lane.host == span.host]
    return [
        Bar(
            place,
            kind,
            span.start,
            span.end,
            span.program,
            span.node,
            span.client,
            span.line,
            span.run,
            span.step,
            1,
            span.end - span.start,
            bool(span.args.get("poisoned")),
        )
        for place in places
        if place is not None
    ]


class Bars:
    """Bars in the order in which they were added, merged to a resolution.

    resolution: two neighbours of one lane, kind and program become one bar
        when the gap between them, and each of them, is shorter than this many
        seconds; 0 merges nothing.
    mix: merge neighbours of different programs too.
    """

    def __init__(self, resolution: float = 0.0, mix: bool = False) -> None:
        self.resolution = resolution
        self.mix = mix
        self.items: list[Bar] = []
        self._last: dict[tuple[int, int], Bar] = {}
        self._sealed = 0

    def add(self, bars: Iterable[Bar]) -> None:
        """Append *bars*, merging each with its neighbour where that is allowed."""
        for bar in bars:
            key = (bar.lane, bar.kind)
            last = self._last.get(key)
            if last is not None and self._same(last, bar):
                _absorb(last, bar)
            else:
                self.items.append(bar)
                self._last[key] = bar

    def _same(self, last: Bar, bar: Bar) -> bool:
        limit = self.resolution
        return (
            bar.start - last.end < limit
            and bar.end - bar.start < limit
            and (last.end - last.start < limit or last.count > 1)
            and (self.mix or last.program == bar.program)
            and last.failed == bar.failed
        )

    def seal(self) -> list[Bar]:
        """The bars since the last call; they will not change any more."""
        new = self.items[self._sealed :]
        self._sealed = len(self.items)
        self._last.clear()
        return new

    def forget_before(self, time: float) -> int:
        """Drop the oldest bars that ended before *time*; returns how many."""
        gone = 0
        while gone < self._sealed and self.items[gone].end < time:
            gone += 1
        if gone:
            del self.items[:gone]
            self._sealed -= gone
        return gone


def _absorb(last: Bar, bar: Bar) -> None:
    last.start = min(last.start, bar.start)
    last.end = max(last.end, bar.end)
    last.count += bar.count
    last.busy += bar.busy
    if last.program != bar.program:
        last.program = last.node = ""
    if last.node != bar.node:
        last.node = ""
    if last.line != bar.line:
        last.line = ""


def coarser(bars: Iterable[Bar], resolution: float, mix: bool = False) -> list[Bar]:
    """The same bars at a lower resolution (seconds); the originals are not touched."""
    out = Bars(resolution, mix)
    out.add(replace(bar) for bar in sorted(bars, key=lambda b: b.start))
    return out.items


def fitting(bars: list[Bar], limit: int, resolution: float) -> tuple[list[Bar], float]:
    """At most about *limit* bars, and the resolution (seconds) that this took.

    Starts from *resolution*, which must be positive, and doubles it until the
    bars fit; from the sixth doubling on programs are mixed too.
    """
    out = coarser(bars, resolution)
    for doubling in range(1, 24):
        if len(out) <= limit:
            break
        resolution *= 2
        out = coarser(bars, resolution, mix=doubling >= 6)
    return out, resolution


def columns(records: Iterable[Record], lanes: Mapping[Lane, int]) -> Columns:
    """Every bar of *records* as numpy columns, unmerged.

    Columns: ``lane``, ``kind``, ``run``, ``step`` (int64), ``start``, ``end``
    (float64, seconds), ``program``, ``node`` (text).
    """
    bars = [b for r in records if isinstance(r, Span) for b in bars_of(r, lanes)]
    return {
        "lane": np.array([b.lane for b in bars], np.int64),
        "kind": np.array([b.kind for b in bars], np.int64),
        "run": np.array([b.run for b in bars], np.int64),
        "step": np.array([b.step for b in bars], np.int64),
        "start": np.array([b.start for b in bars], np.float64),
        "end": np.array([b.end for b in bars], np.float64),
        "program": np.array([b.program for b in bars], np.str_),
        "node": np.array([b.node for b in bars], np.str_),
    }
