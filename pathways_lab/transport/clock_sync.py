"""The pulse between two machines: is the other one there, and what does its clock say.

Problem: times in the timeline are seconds on the control plane's monotonic clock.  Processes of
one machine share that clock already; others estimate the difference, and clocks drift by
some milliseconds an hour.  A machine that is not there any more says nothing, which is also what
one does that has nothing to say.

How: the connecting end asks every second, and the other one answers with its clock.  That clock
was read after the question left and before the answer came: so causality bounds the difference
from both sides.  Older bounds hold too, but for the drift since; the tightest ones count.

Rule for maintainers: never wall-clock time.  Everything but :func:`stamp` is pure.

Paper: none.
"""

from __future__ import annotations

import functools
import math
import time
from pathlib import Path
from typing import Any

PERIOD = 1.0
"""Seconds between two questions."""
ANSWER = 1.5
"""Seconds for an answer, which costs the other end microseconds."""
DRIFT = 1e-4
"""Seconds by which two clocks come apart within a second, at most.  A clock that is being set by
more contradicts older bounds, which are then forgotten."""
_WORSE = 1.5
"""An estimate that may be off by so many times the least possible is made anew.  So it stands
still otherwise: times of one process shall not jump."""


@functools.cache
def machine() -> str:
    """An id of this boot of this machine; "" where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def stamp() -> dict[str, Any]:
    """The clock in a hello: this process's monotonic clock, and its machine."""
    return {"clock": time.monotonic(), "machine": machine()}


class Difference:
    """Between this process's clock and another one.

    offset: seconds to add to this clock to get the other one.
    one: it is one and the same clock.
    """

    __slots__ = ("_at", "_lower", "_upper", "offset", "one")

    def __init__(self, one: bool = True) -> None:
        self.one = one
        self.offset = 0.0
        self._at = -math.inf
        self._lower, self._upper = (0.0, 0.0) if one else (-math.inf, math.inf)

    @classmethod
    def of_hello(cls, hello: dict[str, Any], sent: float, received: float) -> Difference:
        """Between this process's clock and that of the hello's sender.

        sent, received: this clock before asking for the hello and on getting it.
        """
        clock = hello.get("clock")
        if not isinstance(clock, float):
            return cls()
        if machine() and hello.get("machine") == machine() and sent <= clock <= received:
            # The same clock (and not another one in a container of its own).
            return cls()
        found = cls(one=False)
        found.learn(sent, clock, received)
        return found

    def learn(self, asked: float, told: float, heard: float) -> None:
        """The other clock said *told* between these two times of this one."""
        if self.one:
            return
        lower, upper = told - heard, told - asked
        slack = DRIFT * (heard - self._at)
        low, high = max(lower, self._lower - slack), min(upper, self._upper + slack)
        if low > high:
            low, high = lower, upper
        self._lower, self._upper, self._at = low, high, heard
        if self.error(heard) > _WORSE * (high - low) / 2:
            self.offset = (low + high) / 2

    def error(self, now: float) -> float:
        """How far off the offset may be at *now*, in seconds."""
        if self.one:
            return 0.0
        slack = DRIFT * max(0.0, now - self._at)
        return slack + max(self._upper - self.offset, self.offset - self._lower)


class Beat:
    """Whether the other end of a link answers."""

    __slots__ = ("_asked", "_looked", "_told", "_waits")

    def __init__(self, now: float) -> None:
        self._looked = now
        self._asked = -math.inf
        self._waits = math.inf
        """When that was asked to which nothing has come."""
        self._told = False

    def due(self, now: float) -> bool:
        """Whether it is time to ask, which the caller then does."""
        if now - self._asked < PERIOD:
            return False
        self._asked = now
        self._waits = min(self._waits, now)
        return True

    def waits(self, now: float) -> float:
        """For how many seconds an answer is missing."""
        return max(0.0, now - self._waits)

    def silent(self, heard: float, now: float) -> float | None:
        """For how many seconds it has said nothing, once; 0.0 once it answers again; else None.

        heard: when something came last.  Now and then: a process that did not look for a while,
        since its machine was busy or slept, has heard nothing either.
        """
        away, self._looked = now - self._looked > ANSWER, now
        if heard >= self._waits:
            self._waits = math.inf
        elif away:
            self._waits = now
        if (now - self._waits > ANSWER) is self._told:
            return None
        self._told = not self._told
        return now - heard if self._told else 0.0
