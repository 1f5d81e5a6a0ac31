"""The idle share of this machine's processors, and giving way on them.

Problem: processes that draw must know how busy the machine is, and go last.

Rule for maintainers: effects only; :mod:`.cpu_budget` decides what follows.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time

import psutil

COUNT = psutil.cpu_count() or 1

NICE = 10
"""How much those that draw give way to those that compute."""


BRIEFLY = 0.1
"""Seconds in which nothing new is said: systems count processor time in hundredths of a second, so
over less than several of them a machine seems to be idle or full by chance."""


class Spare:
    """How much this machine has to spare."""

    def __init__(self) -> None:
        self._asked, self._found = float("-inf"), 0.0

    def __call__(self) -> float:
        """Processors that were idle of late."""
        now = time.monotonic()
        if now - self._asked >= BRIEFLY:
            self._asked = now
            self._found = COUNT * (1 - float(psutil.cpu_percent()) / 100)
        return self._found


spare = Spare()


class Idle:
    """How much this process has to spare."""

    def __init__(self) -> None:
        self._asked, self._used = time.monotonic(), time.process_time()

    def share(self) -> float:
        """Share of the time since this was asked last in which it did not compute (0 .. 1)."""
        asked, self._asked = self._asked, time.monotonic()
        used, self._used = self._used, time.process_time()
        return max(0.0, 1 - (self._used - used) / max(self._asked - asked, 1e-3))


@functools.cache
def give_way() -> None:
    """From now on at a low priority."""
    spare()  # what was before it was needed is no sign of what is now
    with contextlib.suppress(OSError):
        os.nice(NICE)
