"""Simulated time: one heap of future calls.

Problem: a simulation must be the same on every machine and in every run.

Rule for maintainers: ties are decided by priority and then by the order in
which calls were entered, never by hashing or identity; nothing else holds the
time.

Paper: none (the simulator is this project's own instrument).
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Agenda:
    """Calls to be made, ordered by (time, priority, counter).

    now: seconds.  made: calls so far.
    """

    __slots__ = ("_count", "_heap", "made", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.made = 0
        self._heap: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, time: float, call: Callable[..., None], *args: Any, priority: int = 0) -> None:
        """Make a call at *time* (not before now)."""
        self._count += 1
        heappush(self._heap, (max(time, self.now), priority, self._count, call, args))

    def after(self, delay: float, call: Callable[..., None], *args: Any, priority: int = 0) -> None:
        """Make a call *delay* seconds from now."""
        self.at(self.now + delay, call, *args, priority=priority)

    def step(self) -> bool:
        """Make the next call; False when there is none."""
        if not self._heap:
            return False
        self.now, _, _, call, args = heappop(self._heap)
        self.made += 1
        call(*args)
        return True

    def run(self, until: float = float("inf"), calls: int | None = None) -> int:
        """Make calls until the time, their number, or the agenda is exhausted; returns how many."""
        before = self.made
        while self._heap and self._heap[0][0] <= until and self.made - before != calls:
            self.step()
        return self.made - before
