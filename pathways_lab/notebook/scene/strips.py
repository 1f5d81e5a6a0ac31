"""Bars of several kinds in one row: computations, what a device waits for, what a host does.

Problem: rows have several stories, told by bars that must be cheap, merge when they are too
many, and be told apart without colour: each kind has a height of its own within the row.

Rule for maintainers: merged, never dropped; ``count`` and ``busy`` add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pathways_lab.notebook.scene.gang_number import number
from pathways_lab.notebook.scene.table import Table
from pathways_lab.timeline.bars import Bar, Bars, fitting
from pathways_lab.timeline.columns import Floats
from pathways_lab.timeline.records import Span

HELD = 8
"""Bars that are kept for each that is drawn, at most: of devices that share a lane."""

Drawn = Mapping[float, tuple[float, float]]
"""Where rows are drawn, and for how many each stands; others are not drawn."""


Column = tuple[type[np.generic], Callable[[Bar], float]]
"""A type, and what a bar has in a column of it."""


class Strip:
    """Bars in rows.

    origin: seconds that the axis calls 0.
    edges: by kind (0, 1, ...), the part of a row that its bars take, in rows from its middle.
    what: the row of the catalogue that tells of a bar.  paint: its index into the palette.
    budget: bars that are drawn before they go coarser.  more: further columns.
    bars: all of them.  table: those that are drawn.
    """

    def __init__(
        self, origin: float, edges: Sequence[tuple[float, float]], budget: int,
        what: Callable[[Bar], int], paint: Callable[[Bar], int], **more: Column,
    ) -> None:  # fmt: skip
        self.origin, self.edges, self.budget = origin, edges, budget
        self.bars, self._coarse = Bars(), 0.0
        self._drawn: Drawn | None = None  # each row at its own place
        self._columns: dict[str, Column] = {
            "left": (np.float64, lambda b: b.start - origin),
            "right": (np.float64, lambda b: b.end - origin),
            "paint": (np.uint8, paint),
            "what": (np.uint16, what),
            "busy": (np.float32, lambda b: 1000 * b.busy / b.count),
            "gang": (np.float64, lambda b: number(b.run, b.step)),
            **more,
        }
        self._types: dict[str, type[np.generic]] = {
            **{name: kind for name, (kind, _) in self._columns.items()},
            "top": np.float32, "bottom": np.float32, "count": np.int32,
        }  # fmt: skip
        self.table = Table(self._types)

    def add(self, bars: Iterable[Bar]) -> None:
        """Add bars, which are drawn when they are sealed."""
        self.bars.add(bars)

    def seal(self) -> None:
        """Draw the added bars from now on."""
        self._show(self.bars.seal())

    def lay(self, drawn: Drawn) -> None:
        """Rows are drawn there from now on."""
        self._drawn = drawn
        self._again()

    def _shown(self, bars: list[Bar]) -> list[Bar]:
        drawn = self._drawn
        return bars if drawn is None else [bar for bar in bars if bar.row in drawn]

    def _show(self, bars: list[Bar]) -> None:
        if bars := self._shown(bars):
            self.table.append(self.columns(bars))

    def columns(self, bars: Sequence[Bar]) -> dict[str, NDArray[np.generic]]:
        """The columns of some bars in rows that are drawn, as the table has them."""
        drawn, count = self._drawn, np.array([b.count for b in bars])
        places = [drawn[b.row] if drawn else (b.row, 1.0) for b in bars]
        at, stands = np.reshape(places, (-1, 2)).T
        top, bottom = np.reshape([self.edges[b.kind] for b in bars], (-1, 2)).T
        found: dict[str, Any] = {n: list(map(of, bars)) for n, (_, of) in self._columns.items()}
        found |= {"top": at + top, "bottom": at + bottom, "count": stands * count}
        return {name: np.array(found[name], kind) for name, kind in self._types.items()}

    def move(self, rows: Mapping[float, float]) -> None:
        """Rows have new places."""
        for bar in self.bars.items:
            bar.row = rows.get(bar.row, bar.row)
        self._again()

    def _again(self) -> None:
        self.table.clear()
        self._show(self.bars.sealed)

    def within(self, start: float, end: float, column: str) -> set[int]:
        """The values in a column of whole numbers of what is drawn between two moments (seconds on
        the axis)."""
        columns: dict[str, Any] = self.table.columns()
        seen = (columns["left"] < end) & (columns["right"] > start)
        return set(np.unique(columns[column][seen]).astype(int).tolist())

    def seconds(self, start: float, end: float) -> tuple[dict[str, Any], Floats]:
        """The columns of what is drawn, and how many device seconds of each are between two
        moments (seconds on the axis)."""
        columns: dict[str, Any] = self.table.columns()
        left, right = columns["left"], columns["right"]
        shown = np.minimum(right, end) - np.maximum(left, start)
        within = np.clip(shown / np.maximum(right - left, 1e-9), 0.0, 1.0)
        return columns, within * columns["busy"] * columns["count"] / 1000

    def refine(self, resolution: float) -> None:
        """New bars are merged to *resolution* (seconds), or coarser where there are too many."""
        self.bars.resolution = max(resolution, self._coarse)

    def forget_before(self, time: float, kept: float) -> None:
        """Drop what ended before *time*, and go coarser when too much is left: see *coarsen*."""
        self.table.drop(len(self._shown(self.bars.forget_before(time))))
        over = max(len(self.table), len(self.bars.items) / HELD) / self.budget
        if over > 1:
            self.coarsen(int(2 / 3 * len(self.table) / over), kept)

    def coarsen(self, most: int, kept: float) -> None:
        """Merge until at most about *most* bars are drawn: those that ended before *kept*
        (seconds) if that is enough, else all."""
        items, resolution = self.bars.items, self.bars.resolution
        most_items = most * len(items) // max(len(self.table), 1)
        newest = [bar for bar in items if bar.end >= kept]
        if 0 < len(newest) <= most_items // 2:
            old = [bar for bar in items if bar.end < kept]
            merged, _ = fitting(old, most_items - len(newest), max(resolution, 1e-6))
            merged += newest
        else:
            merged, resolution = fitting(items, most_items, max(resolution, 1e-6))
            self._coarse = resolution
        self.bars = Bars(resolution)
        self.bars.items = merged
        self.bars.seal()
        self._again()


def shared_row(
    low: float, high: float, kinds: int, thick: float = 0.0
) -> list[tuple[float, float]]:
    """Edges of kinds that share a part of a row, each at a height of its own.

    thick: of each, where no two are there at a time; 0: as much as leaves room between them.
    """
    thick = thick or 0.86 * (high - low) / kinds
    step = (high - low - thick) / max(kinds - 1, 1)
    return [(low + kind * step, low + kind * step + thick) for kind in range(kinds)]


def mark(row: float, kind: int, start: float, end: float, span: Span, count: int = 1) -> Bar:
    """A mark of a strip that tells of *span*."""
    return Bar(
        row, kind, start, end, span.program, span.node, span.client, span.line, span.run,
        span.step, count, count * (end - start),
    )  # fmt: skip


def by_kind(paints: Sequence[int]) -> Callable[[Bar], int]:
    """A paint for each kind of bar."""
    return lambda bar: paints[bar.kind]
