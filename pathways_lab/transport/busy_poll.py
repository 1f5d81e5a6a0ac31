"""Decides whether a thread sleeps until the next message, or polls for it.

Problem: to wake a sleeping process takes some 50 us, and the waking process pays as
much again.  Where a client waits for each of its small calls, that is a third of the way
from the call to the launch.  A process that polls all the time takes a processor.

How: while messages come in quick succession, the reading thread polls for a moment,
giving way each time to other threads that could run; only then it sleeps.  After one
message that came late it sleeps at once, until two have come quickly.  While it polls it may
also look for what ends without a message (:class:`Watch`), which then wakes nobody either.

Rule for maintainers: only where nothing else of the process has anything to do; else it would
take the interpreter, and not only the processor, from the others.

Paper: section 5.1 (dispatch of small computations).
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable
from typing import Protocol

SECONDS = 0.0008 if (os.cpu_count() or 1) > 1 else 0.0
"""For so long a message is looked for: the time between two, where each call is waited for."""
_QUICK = 2
"""So many in a row must have come quickly."""

Ready = list[tuple[selectors.SelectorKey, int]]


def _give_way() -> None:
    os.sched_yield() if hasattr(os, "sched_yield") else time.sleep(0)


class Watch(Protocol):
    """Something that may end while a thread waits."""

    def look(self) -> bool:
        """Whether it has ended; the waiting thread then sees to that."""

    def leave(self) -> None:
        """The thread goes to sleep, and will not look any more."""


class Vigil:
    """Waits in a selector, awake or asleep.  seconds: awake at most so long; 0: never."""

    def __init__(
        self,
        select: Callable[[float], Ready],
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
        give_way: Callable[[], object] = _give_way,
    ) -> None:
        self._select = select
        self._seconds = seconds
        self._clock = clock
        self._give_way = give_way
        self._last = clock()
        self._quick = 0

    def select(self, patience: float, watch: Watch | None = None) -> Ready:
        """As the selector's own: what is ready, after at most so many seconds.

        Nothing, if what is watched has ended.
        """
        ready: Ready = []
        if self._quick >= _QUICK:
            begun = now = self._clock()
            until = min(begun + patience, self._last + self._seconds)
            while now < until and not (ready := self._select(0.0)):
                if watch is not None and watch.look():
                    self._last = now
                    return ready
                self._give_way()
                now = self._clock()
            patience -= now - begun
        if not ready:
            if watch is not None:
                watch.leave()
            ready = self._select(max(patience, 0.0))
        if not self._seconds:
            return ready
        if ready:
            now = self._clock()
            self._quick = self._quick + 1 if now - self._last <= self._seconds else 0
            self._last = now
        return ready
