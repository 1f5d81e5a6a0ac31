"""The island's order on one host, as pure data: each gang knows the gangs that it waits behind.

Problem: devices shared by two differently cut slices must behave as one queue,
disjoint ones must not wait for each other, and no step should search a queue.

How: a gang knows the last gang before it on its device queue and on each of its
devices, and waits for *those*.  Behind a gang of the same device queue it waits until
that one is handed over, for the device queue keeps the order.  Behind a gang of another
device queue on a device of this host it waits until that one is done, for device queues
know nothing of each other.  Behind a gang that it meets only on devices of other hosts
it waits until that one is handed over.  So a gang that waits for its inputs is passed
over only by gangs that share no device and no device queue with it, on any host (rule 1).

Rule for maintainers: gangs and rows alike; nothing here knows what they compute.

Paper: section 4.4 (gang scheduling: consistent order).
"""

from __future__ import annotations

from collections.abc import Callable

from pathways_lab.executor.local_array import PENDING
from pathways_lab.executor.steps import Gang, Row

Unit = Gang | Row


class Order:
    """ready(unit): nothing keeps it from starting any more."""

    def __init__(self, host: str, ready: Callable[[Unit], None]) -> None:
        self._host = host
        self._ready = ready
        self._last_on_lane: dict[str, Unit] = {}
        self._last_on_device: dict[tuple[str, int], Unit] = {}

    def add(self, unit: Unit) -> None:
        """The next one that was granted: it waits for those before it, and for its inputs."""
        for before, until_done in self._before(unit).items():
            (before.when_done if until_done else before.when_handed).append(unit)
            unit.waits += 1
        for slot in unit.inputs:
            if slot.state == PENDING:
                unit.waits += slot.when_issued(lambda: self.less(unit))

    def _before(self, unit: Unit) -> dict[Unit, bool]:
        """The units right before this one; True: wait until it is done, not only handed over."""
        before: dict[Unit, bool] = {}
        last = self._last_on_lane.get(unit.lane)
        if last is not None:
            before[last] = last.alone or unit.alone
        self._last_on_lane[unit.lane] = unit
        for device in unit.devices:
            last = self._last_on_device.get(device)
            if last is not None and last.lane != unit.lane:
                before[last] = before.get(last, False) or device[0] == self._host
            self._last_on_device[device] = unit
        return {u: done for u, done in before.items() if not (u.done or (u.handed and not done))}

    def less(self, unit: Unit) -> None:
        """One condition of the unit is met."""
        unit.waits -= 1
        if unit.waits == 0:
            self._ready(unit)

    def handed(self, unit: Unit) -> None:
        """It is in the queue of its lane."""
        followers, unit.when_handed = unit.when_handed, []
        for follower in followers:
            self.less(follower)

    def done(self, unit: Unit) -> None:
        """It is over on the devices of this host."""
        followers, unit.when_done = unit.when_done, []
        for follower in followers:
            self.less(follower)
        if self._last_on_lane.get(unit.lane) is unit:
            del self._last_on_lane[unit.lane]
        for device in unit.devices:
            if self._last_on_device.get(device) is unit:
                del self._last_on_device[device]
