"""Processor cores that the devices of a machine share, as JAX's CPU devices do.

Problem: devices of CPUs are not as fast together as alone.  While more
computations run than there are cores, each gets its part of them, and when one
ends the others go faster from that moment on.

Rule for maintainers: all that compute at a moment go equally fast, so one clock
that runs more slowly when it is crowded tells the end of each of them.

Paper: none (accelerators compute by themselves).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from pathways_lab.sim.agenda import Agenda


class Cores:
    """So many cores, shared by whatever computes.  count: may be infinite, or a fraction."""

    def __init__(self, agenda: Agenda, count: float) -> None:
        self._agenda = agenda
        self._count = count
        self._numbers = itertools.count()
        self._ends: list[tuple[float, int, float, Callable[..., None], tuple[Any, ...]]] = []
        self._demand = 0.0
        self._clock = 0.0
        self._looked = 0.0
        self._plan = 0

    def work(self, seconds: float) -> None:
        """Keep one core busy with something for which nothing waits."""
        if seconds and self._count != float("inf"):
            self.compute(seconds, 1.0, _nothing)

    def compute(self, seconds: float, cores: float, call: Callable[..., None], *args: Any) -> None:
        """Make a call after so much computation.

        seconds: that it takes where nothing else computes.  cores: that it then keeps busy.
        """
        weight = min(cores, self._count)
        if not weight or self._count == float("inf"):
            self._agenda.after(seconds, call, *args)
            return
        self._advance()
        heappush(self._ends, (self._clock + seconds, next(self._numbers), weight, call, args))
        self._demand += weight
        self._look_again()

    def _speed(self) -> float:
        return min(1.0, self._count / self._demand) if self._ends else 1.0

    def _advance(self) -> None:
        self._clock += (self._agenda.now - self._looked) * self._speed()
        self._looked = self._agenda.now

    def _look_again(self) -> None:
        """When the next computation ends, unless another begins or ends before."""
        self._plan += 1
        if self._ends:
            left = (self._ends[0][0] - self._clock) / self._speed()
            self._agenda.after(max(left, 0.0), self._end, self._plan)

    def _end(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        _, _, weight, call, args = heappop(self._ends)
        self._demand = self._demand - weight if self._ends else 0.0
        self._look_again()
        call(*args)


def _nothing() -> None:
    return None
