"""The share of the machine that looking may take, and so when a picture is drawn again.

Problem: drawing takes processor time from computations, unless there is
some to spare; a picture that rests for long is of little use.  So used time is a
debt that is paid by resting: quickly where processors are idle, slowly where they are not.
Time used in the kernel is a second debt: the user's cells have no interpreter but that one, and on
a machine of many processors they may wait for it while the others are idle.  A picture that
stands still seems to be broken, so a debt that is not paid after :data:`LONGEST` is forgiven.

The time goes into two things: to take in the new records, and to draw them.  A picture that
is behind takes in more before it draws again.

Rule for maintainers: no clock and no look at the machine here, both are given.
"""

from __future__ import annotations

PERIOD = 0.1
"""Seconds between two updates of a view."""

LEAST, MOST = 0.015, 0.25
"""The share of looking: this part of all processors where they are busy, and so much of one
where they are idle.  The same for a kernel's interpreter, as if it were a machine with one
processor."""

LATE = 1.0
"""Seconds behind which a picture may have all processors that are idle but those of the reserve:
what only catches up is not what anybody waits for, but a picture of long ago is of no use."""

RESERVE = 0.75
"""So many idle processors belong to computations: these wait for each other for moments, and
would wait for a thread that fills the gaps.  Further idle processors may be used."""

LONGEST = 5.0
"""Seconds for which a picture rests at most, however slow the machine and however full."""

PATIENCE = 0.5
"""Seconds after which the machine is looked at again: it may be idle now."""

SHORTEST = 0.001
"""Seconds of rest that are not worth it."""

FOLDING = 5.0
"""So many times as long as it takes to draw a picture may be folded before."""

FEWEST, MANY = 250, 20_000
"""Records that are folded for a picture at most: between these."""


def share(spare: float, processors: int, late: float = 0.0) -> float:
    """The share of one processor that may be used.

    spare: *processors* that are idle.  late: seconds by which the picture is behind.
    """
    least = min(MOST, LEAST * processors)
    return max(least, min(MOST if late < LATE else 1.0, spare - RESERVE))


class _Debt:
    """Processor seconds that were used, of so many processors."""

    def __init__(self, now: float, processors: int) -> None:
        self.owed = 0.0
        self._processors = processors
        self._paid = now

    def rest(self, now: float, spare: float, late: float = 0.0) -> float:
        """Seconds until it is paid."""
        rate = share(spare, self._processors, late)
        self.owed = max(0.0, self.owed - rate * (now - self._paid))
        self._paid = now
        return self.owed / rate


class Pace:
    """When to go on, and how much to do then.

    now: seconds on a clock of whoever asks.  processors: that the machine has.
    part: records that are worth folding before the next picture.
    """

    def __init__(self, now: float, processors: int) -> None:
        self.part = FEWEST
        self._machine, self._kernel = _Debt(now, processors), _Debt(now, 1)
        self._went_on = now

    def spent(self, seconds: float, kernel: float = 0.0) -> None:
        """So much processor time was used here, and so much in the kernel."""
        self._machine.owed += seconds + kernel
        self._kernel.owed += kernel

    def rest(self, now: float, spare: float, idle: float = 1.0, late: float = 0.0) -> float:
        """Seconds until it may go on, or should be asked again; 0: now.

        spare: processors that were idle since it was asked last.  idle: share of the kernel's time
        in which that computed nothing.  late: seconds by which the picture is behind.
        """
        rest = max(self._machine.rest(now, spare, late), self._kernel.rest(now, idle))
        if rest > SHORTEST and now - self._went_on < LONGEST:
            return min(rest, PATIENCE)
        self._machine.owed = self._kernel.owed = 0.0
        self._went_on = now
        return 0.0

    def drew(self, folding: float, drawing: float) -> None:
        """So long, in processor seconds, the last picture took."""
        if folding > 0:
            wanted = self.part * min(2.0, FOLDING * drawing / folding)
            self.part = round(min(MANY, max(FEWEST, wanted)))
