"""Results that are passed on together are kept together: one buffer for all of them.

Problem: which arrays go the same way is not known when a function makes them.  A training step
gives parameters, which the next step takes all at once, and a loss, which is read and dropped.

How: the results of a function are buffers of their own at first.  Those that a later call takes
side by side are *bundles* from the function's next call on (:class:`Habit`).  When an array of a
bundle goes another way after all, the bundle is taken apart, and the next ones are cut there.
An array of a bundle is read without that.

Rule for maintainers: handles know what they share with others, users do not; each use of an
array that is no use of the whole bundle takes it apart first.

Paper: section 4.2 (one bookkeeping entry per logical buffer).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Protocol

from pathways_lab.core.program.bundles import Range

FEW = 8
"""Fewer arrays are not worth a bundle."""
_OFTEN = 4
"""A function that has to take apart more than one bundle in so many makes no more of them."""


class Habit:
    """Which results of a function are passed on side by side.

    ranges: positions of results that it gives as bundles.
    """

    def __init__(self) -> None:
        self.ranges: tuple[Range, ...] = ()
        self._seen: list[Range] = []
        self._cuts: set[int] = set()
        self._made = self._apart = 0
        self._none = False

    def together(self, first: int, last: int) -> None:
        """The results in this range were passed on as consecutive arguments of one call."""
        if last - first < FEW or self._none:
            return
        seen: list[Range] = []
        for begin, end in sorted([*self._seen, (first, last)]):
            if seen and begin <= seen[-1][1]:
                seen[-1] = seen[-1][0], max(end, seen[-1][1])
            else:
                seen.append((begin, end))
        self._seen = seen
        self.cut((first, last))

    def cut(self, positions: Iterable[int]) -> None:
        """No bundle reaches across these."""
        self._cuts.update(positions)
        found: list[Range] = []
        for first, last in self._seen:
            ends = [first, *sorted(c for c in self._cuts if first < c < last), last]
            found += [(a, b) for a, b in pairwise(ends) if b - a >= FEW]
        self.ranges = tuple(found)

    def made(self, count: int) -> None:
        """So many bundles were made."""
        self._made += count

    def taken_apart(self) -> None:
        """A bundle was taken apart."""
        self._apart += 1
        if self._apart > FEW and self._apart * _OFTEN > self._made:
            self.ranges, self._seen, self._none = (), [], True


class Result(Protocol):
    """A buffer: which result it is, of which run.  habit: of the function that made it."""

    habit: Habit | None
    run: int
    place: int


def learn(buffers: Sequence[Result | None]) -> None:
    """These are the arguments of a call: those that one run has made stay together."""
    begin = 0
    for at in range(1, len(buffers) + 1):
        before, now = buffers[at - 1], buffers[at] if at < len(buffers) else None
        if (
            before is not None
            and now is not None
            and now.habit is not None
            and (now.habit, now.run, now.place) == (before.habit, before.run, before.place + 1)
        ):
            continue
        first = buffers[begin]
        if first is not None and first.habit is not None:
            first.habit.together(first.place, first.place + at - begin)
        begin = at
