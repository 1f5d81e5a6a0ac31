"""The steps of a loop, and the window of the last two of them, which stands still between steps.

Problem: on an axis of twenty seconds a training step is a bar code, and an axis that moves on
with every picture cannot be read.  A program that repeats says by itself how much is worth looking
at: the step before, whole, and the present one beside it, as an oscilloscope shows a signal.

Rule for maintainers: folded from computations only, so that a picture of the past and a saved one
find the same window.  A window holds everything that is newest, or there is none.

Paper: figure 10 (trace of a pipeline's steps).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import numpy as np

from pathways_lab.timeline.packed import Item, Row
from pathways_lab.timeline.records import Span

LAST = 2
"""Steps that are shown."""

SHORTEST = 0.05
"""Seconds that are shown at least: of shorter steps, more than two."""

SOONEST = 1e-9
"""Seconds between two steps below which they do not follow each other."""

KEPT = 64
"""Steps whose start is remembered."""

REPEATS = 3
"""Runs of a program that make it a loop."""

USUAL = 5
"""Newest steps of which the usual time is taken."""

LATE = 0.3
"""Seconds by which hosts may tell late that a step has ended, and the next one begun."""

Key = tuple[str, str]
"""A client, and a program of his."""

LOOPS = 256
"""Programs that are remembered."""


class Window(NamedTuple):
    """The part of a record that is shown (seconds on the records' clock), and of what.

    usual: how long it usually is, in seconds.  runs: of *program* that begin in it.
    """

    start: float
    end: float
    usual: float
    program: str
    runs: tuple[int, ...]


@dataclass(slots=True)
class _Loop:
    """The runs of one program.

    starts: of the newest ones, by number.  newest: the highest number.  last: until when it has
    computed.  seconds: of devices, of all of its runs.
    """

    starts: dict[int, float] = field(default_factory=dict)
    newest: int = -1
    last: float = -math.inf
    seconds: float = 0.0

    def add(self, run: int, start: float, end: float, devices: int) -> None:
        if run in self.starts:
            self.starts[run] = min(start, self.starts[run])
        elif run > self.newest:
            self.newest = run
            self.starts[run] = start
            if len(self.starts) > KEPT:
                del self.starts[next(iter(self.starts))]
        self.last = max(self.last, end)
        self.seconds += devices * (end - start)

    def shown(self, until: float) -> tuple[float, float, float, tuple[int, ...]] | None:
        """The start and the end of its last steps, how long one is, and their runs; None: it does
        not repeat.

        until: what is shown must not end before.  A step that takes longer than usual doubles the
        room for it, so that the window still stands.
        """
        runs = sorted(self.starts, key=lambda run: self.starts[run])
        starts = [self.starts[run] for run in runs]
        if len(starts) < REPEATS:
            return None
        newest = starts[-USUAL - 1 :]
        usual = median(b - a for a, b in pairwise(newest))
        if usual < SOONEST:
            return None
        steps = min(max(LAST, math.ceil(SHORTEST / usual)), len(starts))
        end = starts[-1] + usual
        over = (max(self.last, until) - starts[-1]) / usual
        if over > 1:
            end = starts[-1] + usual * 2.0 ** math.ceil(math.log2(over))
        return starts[-steps], end, usual, tuple(runs[-steps:])


class Steps:
    """All loops of a record.

    first: when the first computation began (seconds).
    """

    def __init__(self) -> None:
        self.first = math.inf
        self._loops: dict[Key, _Loop] = {}

    def add(self, items: Iterable[Item]) -> None:
        """Fold what has become known."""
        for item in items:
            if isinstance(item, Row):
                about = item.abouts[0]
                start = float(np.frombuffer(item.columns[2]).min()) + item.offset
                end, devices = item.known_at, len(about.devices)
                key = about.client, about.program
            elif isinstance(item, Span) and item.kind == "gang":
                start, end, devices = item.start, item.end, len(item.devices)
                key = item.client, item.program
            else:
                continue
            self.first = min(self.first, start)
            loop = self._loops.get(key)
            if loop is None:
                loop = self._loops[key] = _Loop()
                if len(self._loops) > LOOPS:
                    del self._loops[next(iter(self._loops))]
            loop.add(item.run, start, end, devices)

    def window(self, now: float, running: Collection[Key], most: float) -> Window | None:
        """The last steps of the loop that devices compute for most; None where none goes on, or
        where they are longer than *most* seconds.

        running: the programs that devices compute for at *now*.
        """
        newest = max((loop.last for loop in self._loops.values()), default=0.0)
        now -= LATE
        for key, loop in sorted(self._loops.items(), key=lambda kv: -kv[1].seconds):
            shown = loop.shown(now if key in running else -math.inf)
            if shown is None:
                continue
            start, end, usual, runs = shown
            # Another one that came or goes on after it is not in its window: it is over.
            others = now if any(other != key for other in running) else -math.inf
            if max(newest, others) <= end and end - start <= most:
                return Window(start, end, usual * len(runs), key[1], runs)
        return None
