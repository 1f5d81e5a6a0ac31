"""A slice's backlog in seconds: calls may wait for each other as long as devices have work.

Problem: a call that waits for others costs its devices nothing while they have work, and a message
for each call costs as much for a training step of 50 ms as for a gang of 50 us.  How long a
step takes only its end tells, and ends are told in groups.

How: the time between the ends of runs on a slice, over the last few of them and as long as the
slice does not run dry.  The last such time of a slice that did is remembered.  One step is taken
for almost over.

Rule for maintainers: an estimate may be wrong; so a call leaves in any case when nothing is under
way any more.  Runs on several slices say nothing here.

Paper: section 4.5 (dispatch ahead of the devices).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from pathways_lab.core.program.program import SliceId

_ENDS = 8
"""So many ends are looked at."""
_TOGETHER = 200e-6
"""Ends so close (seconds) came with one message, and are one."""
_DRY = 64
"""So many slices are known at least, though nothing is under way on them."""


class _Queue:
    """The steps of one slice.

    done: of all its runs that are over.  ends: when (seconds) and how many were done then.
    pace: seconds a step took before it ran dry.
    """

    __slots__ = ("done", "ends", "pace", "steps")

    def __init__(self) -> None:
        self.steps = self.done = 0
        self.ends: deque[tuple[float, int]] = deque(maxlen=_ENDS)
        self.pace = 0.0

    def seconds_a_step(self) -> float:
        if len(self.ends) < 2:
            return self.pace
        (begin, before), (end, done) = self.ends[0], self.ends[-1]
        return (end - begin) / (done - before)


class Backlog:
    """The steps under way on each slice, and the time that one takes.  From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[SliceId, _Queue] = {}

    def began(self, slices: Sequence[SliceId], steps: int) -> None:
        """A run of so many steps is under way."""
        if len(slices) == 1:
            with self._lock:
                self._queues.setdefault(slices[0], _Queue()).steps += steps

    def ended(self, now: float, slices: Sequence[SliceId], steps: int) -> None:
        """It is over, at *now* (seconds)."""
        if len(slices) != 1:
            return
        with self._lock:
            queue = self._queues[slices[0]]
            queue.steps -= steps
            queue.done += steps
            if queue.ends and now - queue.ends[-1][0] < _TOGETHER:
                queue.ends[-1] = queue.ends[-1][0], queue.done
            else:
                queue.ends.append((now, queue.done))
            if not queue.steps:
                queue.pace = queue.seconds_a_step()
                queue.ends.clear()
                if len(self._queues) > _DRY:
                    del self._queues[slices[0]]

    def seconds(self, slice_id: SliceId) -> float:
        """So long the slice has work; 0 where nobody knows."""
        with self._lock:
            queue = self._queues.get(slice_id)
            return 0.0 if queue is None else max(0, queue.steps - 1) * queue.seconds_a_step()
