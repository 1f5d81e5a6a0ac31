"""The overview of a record: how busy its devices were, from the first computation to the last.

Problem: panels show the last steps, and whoever looks at them wants to see what was before and
whether it was the same.

Rule for maintainers: of one size however long the record is: parts become twice as long when
they are full.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pathways_lab.timeline.busy import pour
from pathways_lab.timeline.packed import Item, Row
from pathways_lab.timeline.records import Span

PARTS, SHORTEST = 160, 0.005
"""How many parts there are, and seconds of each at the beginning."""

Overview = tuple[float, float, str]
"""Where it begins and how long each part is, in seconds, and of each part a digit: 9 for all
devices."""


class Profile:
    """Device seconds of computation in parts of equal length."""

    def __init__(self) -> None:
        self._begin, self._length = np.inf, SHORTEST
        self._seconds = np.zeros(PARTS)

    def add(self, items: Iterable[Item]) -> None:
        """Fold what has become known."""
        for item in items:
            if isinstance(item, Row):
                start, end = item.begun, item.known_at
                held = float(np.frombuffer(item.columns[3]).sum())
                held -= float(np.frombuffer(item.columns[2]).sum())
                devices = len(item.abouts[0].devices) * held / max(end - start, 1e-9)
            elif isinstance(item, Span) and item.kind == "gang":
                start, end, devices = item.start, item.end, float(len(item.devices))
            else:
                continue
            self._begin = min(self._begin, start) if np.isinf(self._begin) else self._begin
            while end - self._begin > PARTS * self._length:
                self._length *= 2
                self._seconds[: PARTS // 2] = self._seconds.reshape(-1, 2).sum(axis=1)
                self._seconds[PARTS // 2 :] = 0.0
            begin = self._begin
            pour(self._seconds, start - begin, end - begin, self._length, devices)

    def told(self, origin: float, devices: int) -> Overview:
        """As pages draw it.  origin: the moment that their axis calls 0 (seconds)."""
        if np.isinf(self._begin):
            return 0.0, SHORTEST, ""
        shares = self._seconds / (self._length * max(devices, 1))
        digits = np.where(shares > 0, np.clip(np.ceil(9 * shares), 1, 9), 0).astype(int)
        text = "".join(map(str, digits.tolist())).rstrip("0")
        return round(float(self._begin) - origin, 4), self._length, text
