"""The times of gangs, of a row or of a whole run, as arrays, for whoever folds many at once.

Problem: :mod:`.packed` passes through processes that have no use for numpy.

Rule for maintainers: of a row that is *plain* one gang follows the other in every
column; what is not is folded gang by gang.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pathways_lab.timeline.packed import About, Row

Floats = NDArray[np.float64]


class Times(NamedTuple):
    """When each gang was called, returned, started and ended: seconds on the records' clock."""

    called: Floats
    returned: Floats
    start: Floats
    end: Floats


def times(row: Row) -> Times:
    """The times of each gang of *row*."""
    called, returned, start, end = [np.frombuffer(c) + row.offset for c in row.columns]
    return Times(called, returned, start, end)


def plain(row: Row, when: Times) -> bool:
    """Whether all gangs are alike but for their function, none is poisoned, and one follows the
    other."""
    return not (
        row.poisoned
        or not all(alike(row.abouts[0], other) for other in row.abouts[1:])
        or _overlap(when.start, when.end)
        or _overlap(when.called, when.returned)
    )


def alike(one: About, other: About) -> bool:
    """Whether two gangs differ in nothing but their function and its line."""
    return (one.program, one.client, one.slice, one.devices) == (
        other.program, other.client, other.slice, other.devices
    )  # fmt: skip


def follows(before: Times, after: Times) -> bool:
    """Whether one row follows another in every column."""
    return bool(before.end[-1] <= after.start[0] and before.returned[-1] <= after.called[0])


def _overlap(start: Floats, end: Floats) -> bool:
    """Whether any does not end before the next one starts, or ends before it starts."""
    return bool((end < start).any() or (start[1:] < end[:-1]).any())


Told = tuple[int, int, str, str]
"""Run and step of a gang, node and line; the last two are "" of several that differ."""


class Joined:
    """Rows of one program on the same devices of one host, one after the other, as one.

    when: of all gangs.  heads: of each row, how many gangs are before it.
    """

    def __init__(self, rows: Sequence[Row], when: Sequence[Times]) -> None:
        self.rows = rows
        self.island, self.host = rows[0].island, rows[0].host
        self.program, _, self.client, _, _, self.devices = rows[0].abouts[0]
        self.when = Times(*map(np.concatenate, zip(*when, strict=True)))
        self.heads = list(accumulate([row.count for row in rows], initial=0))
        self._plain = not any(row.numbers for row in rows)

    def __len__(self) -> int:
        return self.heads[-1]

    def told(self, at: Sequence[int]) -> Told:
        """The records of some gangs, in order: of the first, as far as all are alike."""
        first = bisect_right(self.heads, at[0]) - 1
        if self._plain:
            last = bisect_right(self.heads, at[-1]) - 1
            abouts = {row.abouts[0] for row in self.rows[first : last + 1]}
        else:
            abouts = {self.about(each) for each in at}
        nodes, lines = {about.node for about in abouts}, {about.line for about in abouts}
        return (
            self.rows[first].run,
            self.rows[first].step + at[0] - self.heads[first],
            nodes.pop() if len(nodes) == 1 else "",
            lines.pop() if len(lines) == 1 else "",
        )

    def longest(self, length: Floats) -> dict[About, float]:
        """The longest of *length* for each kind of gang."""
        if self._plain:
            each = np.maximum.reduceat(length, self.heads[:-1]).tolist()
            kinds = [row.abouts[0] for row in self.rows]
        else:
            each, kinds = length.tolist(), [self.about(at) for at in range(len(self))]
        out: dict[About, float] = {}
        for about, most in zip(kinds, each, strict=True):
            out[about] = max(most, out.get(about, most))
        return out

    def about(self, at: int) -> About:
        """The known times of one gang."""
        row = bisect_right(self.heads, at) - 1
        return self.rows[row].about(at - self.heads[row])


BLOCK = 64
"""Steps whose times are kept together."""


class StepTimes:
    """The latest time (seconds) of each step, -inf where none is known.

    In blocks: as small as columns, and as quick to ask however many windows, rows and hosts there
    were, whatever numbers steps have.
    """

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: dict[int, Floats] = {}

    def __getitem__(self, step: int) -> float:
        block = self._blocks.get(step // BLOCK)
        return float("-inf") if block is None else float(block[step % BLOCK])

    def add(self, step: int, time: float) -> None:
        """One step."""
        block = self._block(step // BLOCK)
        block[step % BLOCK] = max(time, block[step % BLOCK])

    def add_many(self, first: int, times: Floats) -> None:
        """Steps one after the other."""
        for number, at, count, done in self._parts(first, len(times)):
            part = self._block(number)[at : at + count]
            np.maximum(part, times[done : done + count], out=part)

    def _block(self, number: int) -> Floats:
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = np.full(BLOCK, -np.inf)
        return block

    @staticmethod
    def _parts(first: int, count: int) -> Iterator[tuple[int, int, int, int]]:
        """Block, place in it, how many there, and how many before, of *count* steps."""
        done = 0
        while done < count:
            number, at = divmod(first + done, BLOCK)
            many = min(count - done, BLOCK - at)
            yield number, at, many, done
            done += many
