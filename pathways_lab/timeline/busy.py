"""Utilisation: which part of the time a device was held by a computation.

Problem: the figure wants a value for every tenth of a second and every device,
ten times a second; the question "how busy was it" wants one exact number.

Rule for maintainers: only gangs count, transfers do not hold a device; both
ways of asking must agree (tested).  Devices are FIFO, so the bars of one
device do not overlap; if clocks make them overlap by a hair, a device is never
counted twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from pathways_lab.timeline.machine import Lane
from pathways_lab.timeline.records import Record, Span

Floats = NDArray[np.float64]


def utilisation(records: Iterable[Record], start: float, end: float) -> dict[Lane, float]:
    """Busy share (0 to 1) of every device that ran anything, between two times (seconds)."""
    if end <= start:
        raise ValueError(f"the range must have a length: {start} to {end}")
    held: dict[Lane, list[tuple[float, float]]] = {}
    for record in records:
        if isinstance(record, Span) and record.kind == "gang":
            for device in record.devices:
                lane = Lane(record.island, record.host, device)
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


class Busy:
    """Busy seconds per device in bins of equal width, for the last *bins* bins.

    width: seconds per bin.  Time 0 of the bins is *origin*.
    """

    def __init__(self, width: float, bins: int, origin: float = 0.0) -> None:
        self.width, self.bins, self.origin = width, bins, origin
        self._seconds: dict[Lane, Floats] = {}
        self._first = 0
        self._reached: dict[Lane, float] = {}

    def add(self, span: Span) -> None:
        """Count one span; other kinds than gangs are ignored."""
        if span.kind != "gang":
            return
        for device in span.devices:
            lane = Lane(span.island, span.host, device)
            start = max(span.start, self._reached.get(lane, -math.inf))
            if span.end > start:
                self._fill(lane, start, span.end)
                self._reached[lane] = span.end

    def _fill(self, lane: Lane, start: float, end: float) -> None:
        row = self._seconds.get(lane)
        if row is None:
            row = self._seconds[lane] = np.zeros(self.bins)
        self._scroll(self._bin(end))
        row = self._seconds[lane]
        pour(row, start - self._time(self._first), end - self._time(self._first), self.width)

    def _bin(self, time: float) -> int:
        return math.floor((time - self.origin) / self.width)

    def _time(self, index: int) -> float:
        return self.origin + index * self.width

    def _scroll(self, newest: int) -> None:
        """Make room for bin *newest*; bins that fall out at the left are gone."""
        steps = newest - (self._first + self.bins - 1)
        if steps <= 0:
            return
        for lane, row in self._seconds.items():
            moved = np.zeros(self.bins)
            if steps < self.bins:
                moved[: self.bins - steps] = row[steps:]
            self._seconds[lane] = moved
        self._first += steps

    def shares(
        self, now: float, running: Mapping[Lane, float] | None = None
    ) -> tuple[Floats, dict[Lane, Floats]]:
        """Left edges of the bins up to *now*, and every device's busy share in them.

        running: start of the computation that still runs, by device: it counts
            up to *now*.  The last bin is the share of its part before *now*.
        """
        self._scroll(self._bin(now))
        last = max(0, min(self.bins, self._bin(now) - self._first + 1))
        base = self._time(self._first)
        lengths = np.full(last, self.width)
        if last:
            lengths[-1] = max(now - self._time(self._first + last - 1), 1e-9)
        edges: Floats = base + np.arange(last, dtype=np.float64) * self.width
        out: dict[Lane, Floats] = {}
        for lane in {*self._seconds, *(running or {})}:
            row = self._seconds.get(lane)
            held = np.zeros(self.bins) if row is None else row.copy()
            since = (running or {}).get(lane)
            if since is not None and now > since:
                pour(held, since - base, now - base, self.width)
            out[lane] = np.clip(held[:last] / lengths, 0.0, 1.0)
        return edges, out


def pour(row: Floats, start: float, end: float, width: float) -> None:
    """Add the seconds of ``start .. end`` (relative to the row) to the bins they cover."""
    start, end = max(start, 0.0), min(end, len(row) * width)
    if end <= start:
        return
    first, last = int(start // width), min(int(end // width), len(row) - 1)
    if first == last:
        row[first] += end - start
        return
    row[first] += (first + 1) * width - start
    row[first + 1 : last] += width
    row[last] += end - last * width
