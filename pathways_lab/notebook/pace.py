"""How much of the machine looking may take, and so when a picture is drawn again.

Problem: whoever draws takes processor time from those who compute, unless there is
some to spare; a picture that rests for long is of little use.  So what was used is a
debt that is paid by resting: quickly where processors are idle, slowly where they are not.

Rule for maintainers: no clock and no look at the machine here, both are given.
"""

from __future__ import annotations

LEAST, MOST = 0.02, 0.25
"""Shares of one processor that looking may take: on a machine that is busy, and on an idle one."""

RESERVE, OF_SPARE = 0.5, 0.5
"""So many idle processors belong to those who compute; of more, this part may be used."""

PATIENCE = 0.5
"""Seconds after which the machine is looked at again: it may be idle now."""

SHORTEST = 0.001
"""Seconds of rest that are not worth it."""

SMALLEST = 0.25
"""The part of an update's work that is worth an update."""


def share(spare: float) -> float:
    """The share of one processor that may be used.  spare: processors that are idle."""
    return min(MOST, max(LEAST, OF_SPARE * (spare - RESERVE)))


class Pace:
    """When to go on, and how much to do then.  now: seconds on a clock of whoever asks."""

    def __init__(self, now: float) -> None:
        self._debt = 0.0
        self._rate = LEAST
        self._paid = now

    def spent(self, seconds: float) -> None:
        """So much processor time was used."""
        self._debt += seconds

    def rest(self, now: float, spare: float) -> float:
        """Seconds until it may go on, or should be asked again; 0: now.

        spare: processors that were idle since it was asked last.
        """
        self._rate = share(spare)
        self._debt = max(0.0, self._debt - self._rate * (now - self._paid))
        self._paid = now
        rest = self._debt / self._rate
        return min(rest, PATIENCE) if rest > SHORTEST else 0.0

    def part(self, of: int) -> int:
        """How much of what is worth doing at once on an idle machine: often little is felt less
        than seldom much."""
        return max(round(SMALLEST * of), round(self._rate / MOST * of))
