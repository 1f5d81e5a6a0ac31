"""The share of the machine that looking may take, and so when a picture is drawn again.

Problem: drawing takes processor time from computations, unless there is some to spare; a picture
that rests for long is of little use, and one that stands still seems to be broken.  So used time
is a debt that is paid by resting: quickly where processors are idle, slowly where they are not.
Time used in the kernel is a second debt: the user's cells have no interpreter but that one, and on
a machine of many processors they may wait for it while the others are idle.

On a busy machine looking takes 5% of all processors, and 1.5% of the kernel's interpreter.  A
picture rests for half a second at most: where that is too short to pay, it takes a quarter of one
processor, as on an idle machine, and never more.  One that is several seconds behind may take as
many times its share, up to that quarter.

The time goes into two things: to take in the new records, and to draw them.  A picture that
is behind takes in more before it draws again, on a busy machine no more than it pays for within
half a second.

Rule for maintainers: no clock and no look at the machine here, both are given.
"""

from __future__ import annotations

PERIOD = 0.1
"""Seconds between two updates of a view."""

LEAST, MOST = 0.05, 0.25
"""The share of looking: this part of all processors where they are busy, and so much of one
where they are idle."""

KERNEL = 0.015
"""The part of a kernel's interpreter while that is busy; an idle one is like an idle processor."""

LATE = 1.0
"""Seconds behind which a picture may have all processors that are idle but those of the reserve:
what only catches up is not what anybody waits for, but a picture of long ago is of no use."""

RESERVE = 0.75
"""So many idle processors belong to computations: these wait for each other for moments, and
would wait for a thread that fills the gaps.  Further idle processors may be used."""

LONGEST = 0.5
"""Seconds for which a picture rests at most, however full the machine, unless it would take more
than :data:`MOST` then."""

SHORTEST = 0.001
"""Seconds of rest that are not worth it."""

FOLDING = 5.0
"""So many times as long as it takes to draw a picture may be folded before."""

FEWEST, MANY = 250, 20_000
"""Records that are folded for a picture at most: between these."""


def share(spare: float, least: float, late: float = 0.0) -> float:
    """The share of one processor that may be used.

    spare: processors that are idle.  least: where none is.  late: seconds by which the picture is
    behind.
    """
    least *= max(1.0, late / LATE)
    return max(min(MOST, least), min(MOST if late < LATE else 1.0, spare - RESERVE))


class _Debt:
    """Processor seconds that were used.

    least: share of a processor by which it is paid at least.  rate: the present one.
    """

    def __init__(self, now: float, least: float) -> None:
        self.owed = 0.0
        self.rate = MOST
        self._least = least
        self._paid = now

    def rest(self, now: float, spare: float, late: float = 0.0) -> float:
        """Seconds until it is paid."""
        self.rate = share(spare, self._least, late)
        self.owed = max(0.0, self.owed - self.rate * (now - self._paid))
        self._paid = now
        return self.owed / self.rate


class Pace:
    """When to go on, and how much to do then.

    now: seconds on a clock of whoever asks.  processors: that the machine has.
    part: records that are worth folding before the next picture.
    """

    def __init__(self, now: float, processors: int) -> None:
        self.part = FEWEST
        self._machine, self._kernel = _Debt(now, LEAST * processors), _Debt(now, KERNEL)
        self._went_on, self._spent = now, 0.0

    def spent(self, seconds: float, kernel: float = 0.0) -> None:
        """So much processor time was used here, and so much in the kernel."""
        self._spent += seconds + kernel
        self._machine.owed += seconds + kernel
        self._kernel.owed += kernel

    def rest(self, now: float, spare: float, idle: float = 1.0, late: float = 0.0) -> float:
        """Seconds until it may go on, as far as is known now; 0: now.

        spare: processors that were idle since it was asked last.  idle: share of the kernel's time
        in which that computed nothing.  late: seconds by which the picture is behind.
        """
        rest = max(self._machine.rest(now, spare, late), self._kernel.rest(now, idle))
        longest = self._went_on + max(LONGEST, self._spent / MOST) - now
        if min(rest, longest) > SHORTEST:
            return min(rest, longest, LONGEST)
        self._machine.owed = self._kernel.owed = self._spent = 0.0
        self._went_on = now
        return 0.0

    def drew(self, folding: float, drawing: float) -> None:
        """So long, in processor seconds, the last picture took."""
        if folding > 0:
            room = FOLDING * drawing
            if self._machine.rate < MOST:
                room = min(room, self._machine.rate * LONGEST - drawing)
            wanted = self.part * min(2.0, room / folding)
            self.part = round(min(MANY, max(FEWEST, wanted)))
