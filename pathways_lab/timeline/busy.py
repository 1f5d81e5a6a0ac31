"""Utilisation: which part of the time a device was held by a computation.

Problem: a figure wants a value for every tenth of a second, ten times a second; the question "how
busy was it" wants one exact number.

Rule for maintainers: only gangs count, transfers do not hold a device; both
ways of asking must agree (tested).  Devices are FIFO, so the spans of one
device do not overlap; should clocks make them overlap by a hair, the exact
answer counts a device once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pathways_lab.timeline.machine import Lane, lanes_of
from pathways_lab.timeline.records import Record, Span

Floats = NDArray[np.float64]


def utilisation(records: Iterable[Record], start: float, end: float) -> dict[Lane, float]:
    """Busy share (0 to 1) of every device that ran anything, between two times (seconds)."""
    if end <= start:
        raise ValueError(f"the range must have a length: {start} to {end}")
    held: dict[Lane, list[tuple[float, float]]] = {}
    for record in records:
        if isinstance(record, Span) and record.kind == "gang":
            for lane in lanes_of(record.island, record.host, record.devices):
                held.setdefault(lane, []).append((max(record.start, start), min(record.end, end)))
    out = {}
    for lane, spans in held.items():
        busy, reached = 0.0, start
        for a, b in sorted(spans):
            a = max(a, reached)
            if b > a:
                busy += b - a
                reached = b
        out[lane] = busy / (end - start)
    return out


class Computed(NamedTuple):
    """The part of some records in which devices computed.

    start, end: of the first computation, and of the last one (seconds).
    busy: which share of that time a device computed, as a mean over the devices.
    """

    start: float
    end: float
    busy: float


def computed(
    records: Iterable[Record], since: float, lanes: Collection[Lane] | None = None
) -> Computed:
    """The one meaning of *busy* for a recording, wherever a report tells it.

    since: computations that began earlier do not count.  lanes: the devices; None: all that
    computed.
    """
    gangs = [r for r in records if isinstance(r, Span) and r.kind == "gang" and r.start >= since]
    of = [(gang, lanes_of(gang.island, gang.host, gang.devices)) for gang in gangs]
    if lanes is None:
        lanes = {lane for _, each in of for lane in each}
    gangs = [gang for gang, each in of if any(lane in lanes for lane in each)]
    start = min((gang.start for gang in gangs), default=since)
    end = max((gang.end for gang in gangs), default=start + 1e-9)
    held = utilisation(gangs, start, max(end, start + 1e-9))
    share = sum(held.get(lane, 0.0) for lane in lanes) / max(1, len(lanes))
    return Computed(start, end, share)


class Busy:
    """Held seconds per key in bins of equal width, for the last *bins* bins.

    width: seconds per bin.  Time 0 of the bins is *origin*.
    """

    def __init__(self, width: float, bins: int, origin: float = 0.0) -> None:
        self.width, self.bins, self.origin = width, bins, origin
        self._seconds: dict[str, Floats] = {}
        self._first = 0
        self._base = origin
        self._length = width * bins

    def add(self, key: str, start: float, end: float, weight: float = 1.0) -> None:
        """Count ``end - start`` seconds for *key*, *weight* times."""
        if end <= start:
            return
        if end - self._base >= self._length:
            self._scroll(self._bin(end))
        row = self._seconds.setdefault(key, np.zeros(self.bins))
        pour(row, start - self._base, end - self._base, self.width, weight)

    def _bin(self, time: float) -> int:
        return math.floor((time - self.origin) / self.width)

    def _time(self, index: int) -> float:
        return self.origin + index * self.width

    def _scroll(self, newest: int) -> None:
        """Make room for bin *newest*; bins that fall out at the left are gone."""
        steps = newest - (self._first + self.bins - 1)
        if steps <= 0:
            return
        for key, row in self._seconds.items():
            moved = np.zeros(self.bins)
            if steps < self.bins:
                moved[: self.bins - steps] = row[steps:]
            self._seconds[key] = moved
        self._first += steps
        self._base = self._time(self._first)

    def shares(self, now: float, coarse: int = 1) -> tuple[Floats, dict[str, Floats]]:
        """Left edges of the bins up to *now*, and every key's held share of them.

        With weights a share may exceed 1.
        coarse: so many bins become one; their edges stay where they are as time
            goes on.  The first and the last may be shorter than the others.
        """
        self._scroll(self._bin(now))
        last = max(0, min(self.bins, self._bin(now) - self._first + 1))
        lengths: Floats = np.full(last, self.width, np.float64)
        if last:
            lengths[-1] = max(now - self._time(self._first + last - 1), 1e-9)
        numbers = np.arange(self._first, self._first + last)
        heads = np.flatnonzero((numbers % coarse == 0) | (numbers == self._first))
        edges = np.asarray(self._base + heads * self.width, np.float64)
        wide = np.add.reduceat(lengths, heads) if last else lengths

        def share(row: Floats) -> Floats:
            return np.add.reduceat(row[:last], heads) / wide if last else np.zeros(0)

        return edges, {key: share(row) for key, row in self._seconds.items()}


def pour(row: Floats, start: float, end: float, width: float, weight: float = 1.0) -> None:
    """Add the seconds of ``start .. end`` (relative to the row) to the bins they cover."""
    start, end = max(start, 0.0), min(end, len(row) * width)
    if end <= start:
        return
    first, last = int(start // width), min(int(end // width), len(row) - 1)
    if first == last:
        row[first] += (end - start) * weight
        return
    row[first] += ((first + 1) * width - start) * weight
    row[first + 1 : last] += width * weight
    row[last] += (end - last * width) * weight


def poured(edges: Floats, start: Floats, end: Floats, height: Floats | float = 1.0) -> Floats:
    """:func:`pour` for many times, which may lie on each other, into bins between *edges*."""
    at = np.concatenate((start, end))
    order = np.argsort(at, kind="stable")
    heights = np.broadcast_to(height, start.shape)
    at, rises = at[order], np.concatenate((heights, -heights))[order]
    area = np.concatenate(([0.0], np.cumsum(np.cumsum(rises)[:-1] * np.diff(at))))
    return np.asarray(np.diff(np.interp(edges, at, area)), np.float64)
