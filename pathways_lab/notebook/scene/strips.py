"""Thin bars of several kinds in one row: what a device waits for, what a host's process does.

Problem: beside its computations a row has a second story, told by small marks
that must be cheap, merge like bars when they are too many, and be told apart
without colour: each kind has a height of its own within the row.

Rule for maintainers: merged, never dropped; ``count`` and ``busy`` add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from pathways_lab.notebook.scene.gang_number import number
from pathways_lab.notebook.scene.table import Table
from pathways_lab.timeline.bars import Bar, Bars, fitting


class Strip:
    """Marks in rows.

    paints: index into the palette, by kind (0, 1, ...).
    what: the row of the catalogue that tells of a mark.
    low, high: the part of a row (in rows from its middle) that the kinds share.
    """

    def __init__(
        self, paints: Sequence[int], low: float, high: float, budget: int,
        what: Callable[[Bar], int],
    ) -> None:  # fmt: skip
        self.paints, self.budget, self.what = paints, budget, what
        self._low, self._each = low, (high - low) / len(paints)
        self.bars = Bars()
        self.table = Table(
            {
                "left": np.float64,
                "right": np.float64,
                "top": np.float32,
                "bottom": np.float32,
                "paint": np.uint8,
                "what": np.uint16,
                "kind": np.float32,
                "count": np.int32,
                "busy": np.float32,
                "gang": np.float64,
            }
        )

    def add(self, bars: Iterable[Bar]) -> None:
        """Add marks; a bar's *kind* is the mark's."""
        self.bars.add(bars)

    def seal(self, origin: float) -> None:
        """Draw the added bars from now on.  origin: seconds that the axis calls 0."""
        self._show(self.bars.seal(), origin)

    def _show(self, bars: list[Bar], origin: float) -> None:
        if bars:
            self.table.append(
                {
                    "left": [b.start - origin for b in bars],
                    "right": [b.end - origin for b in bars],
                    "top": [b.row + self._low + b.kind * self._each for b in bars],
                    "bottom": [b.row + self._low + (b.kind + 0.86) * self._each for b in bars],
                    "paint": [self.paints[b.kind] for b in bars],
                    "what": [self.what(b) for b in bars],
                    "kind": [float(b.kind) for b in bars],
                    "count": [b.count for b in bars],
                    "busy": [1000 * b.busy / b.count for b in bars],
                    "gang": [number(b.run, b.step) for b in bars],
                }
            )

    def move(self, rows: Mapping[float, float], origin: float) -> None:
        """Rows have new places."""
        for bar in self.bars.items:
            bar.row = rows.get(bar.row, bar.row)
        self._again(origin)

    def _again(self, origin: float) -> None:
        self.table.clear()
        self._show(self.bars.sealed, origin)

    def forget_before(self, time: float, origin: float) -> None:
        """Drop what ended before *time*, and go coarser when too much is left."""
        self.table.drop(self.bars.forget_before(time))
        if len(self.table) > self.budget:
            self.coarsen(2 * self.budget // 3, origin)

    def coarsen(self, most: int, origin: float) -> None:
        """Merge until there are at most about *most* marks."""
        kept = Bars(self.bars.resolution)
        kept.items, kept.resolution = fitting(
            self.bars.items, most, max(self.bars.resolution, 1e-6)
        )
        kept.seal()
        self.bars = kept
        self._again(origin)
