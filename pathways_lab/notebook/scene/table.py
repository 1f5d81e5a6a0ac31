"""Rows that are appended at one end and forgotten at the other, as numpy columns.

Problem: the queue panel holds thousands of bars and gains some every tick; its
columns must be at hand without building them again.

Rule for maintainers: a row never changes.  Rows are numbered from the first one
ever, so that "what is new since" is a subtraction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.generic]


class Table:
    """Columns of fixed types.

    first: number of the oldest row that is still here.
    """

    def __init__(self, types: Mapping[str, type[np.generic]]) -> None:
        self._store: dict[str, Column] = {n: np.zeros(256, t) for n, t in types.items()}
        self._low = self._high = 0
        self.first = 0

    def __len__(self) -> int:
        return self._high - self._low

    def append(self, rows: Mapping[str, Sequence[float] | Column]) -> None:
        """Add rows, one sequence per column."""
        count = len(next(iter(rows.values())))
        size = len(next(iter(self._store.values())))
        if self._high + count > size:
            self._move(max(256, 2 * (len(self) + count)))
        for name, values in rows.items():
            self._store[name][self._high : self._high + count] = values
        self._high += count

    def _move(self, size: int) -> None:
        held = len(self)
        for name, column in self._store.items():
            new = np.zeros(size, column.dtype)
            new[:held] = column[self._low : self._high]
            self._store[name] = new
        self._low, self._high = 0, held

    def drop(self, count: int) -> None:
        """Forget the oldest *count* rows."""
        count = min(count, len(self))
        self._low += count
        self.first += count

    def clear(self) -> None:
        """Forget all rows; numbering goes on, with a gap, so nobody mistakes new for old."""
        self.first += len(self) + 1
        self._low = self._high = 0

    def columns(self) -> dict[str, Column]:
        """Copies of the columns."""
        return {n: column[self._low : self._high].copy() for n, column in self._store.items()}
