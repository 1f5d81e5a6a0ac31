"""The island's order on one host, as pure data: each gang knows the gangs that it waits behind.

Problem: devices shared by two differently cut slices must behave as one queue,
disjoint ones must not wait for each other, and no step should search a queue.

How: a lane is a set of devices.  A gang knows the last gang before it on its lane and
on each lane that shares a device with it, and waits for *those*.  A gang behind one of
the same lane waits until that one is handed over, for the lane is a queue; behind one of
another lane on a device of this host, until that one is done, for lanes know nothing of
each other; behind one that it meets only on devices of other hosts, until it is
handed over.  So a gang that waits for its inputs is passed over only by gangs
that share no device and no lane with it, on any host (rule 1).

Rule for maintainers: nothing here knows what a segment computes.  The overlap of two lanes
 is worked out once: a slice may have thousands of devices.

Paper: section 4.4 (gang scheduling: consistent order).
"""

from __future__ import annotations

from collections.abc import Callable

from pathways_lab.executor.local_array import PENDING
from pathways_lab.executor.steps import Segment


class Order:
    """ready(unit): nothing keeps it from starting any more."""

    def __init__(self, host: str, ready: Callable[[Segment], None]) -> None:
        self._host = host
        self._ready = ready
        self._last: dict[str, Segment] = {}
        """By lane, while it is not done."""
        self._shared: dict[tuple[str, str], bool | None] = {}

    def add(self, unit: Segment) -> None:
        """The next one that was granted: it waits for those before it, and for its inputs."""
        for before, until_done in self._before(unit).items():
            (before.when_done if until_done else before.when_handed).append(unit)
            unit.waits += 1
        for slot in unit.inputs:
            if slot.state == PENDING:
                unit.waits += slot.when_issued(lambda: self.less(unit))

    def _before(self, unit: Segment) -> dict[Segment, bool]:
        """The units right before this one; True: wait until it is done, not only handed over."""
        before: dict[Segment, bool] = {}
        for lane, last in self._last.items():
            if lane == unit.lane:
                before[last] = last.alone or unit.alone
            elif (ours := self._share(last, unit)) is not None:
                before[last] = ours
        self._last[unit.lane] = unit
        return {u: done for u, done in before.items() if not (u.done or (u.handed and not done))}

    def _share(self, last: Segment, unit: Segment) -> bool | None:
        """Whether two lanes share a device of this host; None: no device at all."""
        lanes = last.lane, unit.lane
        if lanes not in self._shared:
            hosts = {host for host, _ in set(unit.devices).intersection(last.devices)}
            self._shared[lanes] = self._host in hosts if hosts else None
        return self._shared[lanes]

    def forget(self, lane: str) -> None:
        """A slice of this lane is gone."""
        self._shared = {lanes: ours for lanes, ours in self._shared.items() if lane not in lanes}

    def less(self, unit: Segment) -> None:
        """One condition of the unit is met."""
        unit.waits -= 1
        if unit.waits == 0:
            self._ready(unit)

    def handed(self, unit: Segment) -> None:
        """It is in the queue of its lane."""
        followers, unit.when_handed = unit.when_handed, []
        for follower in followers:
            self.less(follower)

    def done(self, unit: Segment) -> None:
        """It is over on the devices of this host."""
        followers, unit.when_done = unit.when_done, []
        for follower in followers:
            self.less(follower)
        if self._last.get(unit.lane) is unit:
            del self._last[unit.lane]
