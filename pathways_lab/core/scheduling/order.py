"""The gang scheduler: one order of gangs per island, and whose gang comes next.

Problem: devices are FIFO queues that cannot be interrupted; two computations
that communicate must be queued in the same order everywhere.  Every gang gets
the next number of each island that it touches, all of them in one step, and
every host hears of them in that order, so one order on all hosts holds by
construction.  Grants run ahead of the data, but only so far that priorities
and cancellation still act.

Rule for maintainers: numbers are given out in :meth:`Order.place` and nowhere
else.  Nothing here may grow with devices, nor with the number of runs that
wait behind others on the same slices.

Paper: section 4.4 (gang-scheduled dynamic dispatch).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pathways_lab.core.program.plans import Window
from pathways_lab.core.program.program import SliceId
from pathways_lab.core.scheduling.policies import APART
from pathways_lab.core.scheduling.runs import RunRecord
from pathways_lab.core.slices.slices import Cell


@dataclass(slots=True)
class IslandOrder:
    """epoch: of the numbers.  next: number to give.  last: per host, the last one sent."""

    epoch: int = 0
    next: int = 0
    last: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Order:
    """The places of all gangs on all islands."""

    islands: dict[str, IslandOrder] = field(default_factory=dict)

    def place(self, window: Window) -> list[tuple[str, int, int, int]]:
        """Give a window its numbers on all its islands at once.

        Returns ``(host, epoch, place, previous)`` for every host of it.
        """
        first: dict[str, int] = {}
        for name, count in window.islands:
            island = self.islands[name]
            first[name] = island.next
            island.next += count
        found = []
        for host, name in window.hosts:
            island = self.islands[name]
            place = first[name]
            previous = island.last.get(host, -1)
            assert place > previous, f"{host} would get place {place} after {previous}"
            island.last[host] = place
            found.append((host, island.epoch, place, previous))
        return found

    def end_epoch(self, name: str) -> None:
        """A host is gone: the island's numbers begin anew."""
        old = self.islands[name]
        self.islands[name] = IslandOrder(old.epoch + 1)


LATELY = 1.0
"""Seconds for which devices count as shared after somebody else has asked for them."""
BRIEF = 2000
"""Device microseconds: a gang that takes less is brief."""
Asker = tuple[str, str, int]
"""Client, program and priority, as far as the policy in force tells runs apart by them."""
NOBODY: tuple[float, Asker] = (float("-inf"), ("", "", 0))


@dataclass(slots=True)
class Pace:
    """How far grants run ahead: what is granted and not finished, per cell.

    Devices are *shared* while two askers or more want them, and some gang there is not brief: a
    policy has a choice, and so that its choice is soon felt, less is granted ahead of it.  A run
    asks when it is submitted and with each of its windows.  Where all gangs are brief, to hear of
    their ends so often would cost more than they take.

    limit: device microseconds; close: the same on shared devices; least: gangs (see
        :class:`Rules`).  limits: by slice, where its client wants less.
    ahead, gangs: of each cell; by_slice: both, of each slice.
    asked: by slice, who asked last, and when.  last: the same of each cell; others: of each cell,
        when somebody else than the last one did.  busy: of each cell, when the last gang that is
        not brief got its place.
    """

    limit: int
    close: int
    least: int
    cells_of: Mapping[SliceId, tuple[int, ...]] = field(default_factory=dict)
    by_slice: dict[SliceId, tuple[int, int]] = field(default_factory=dict)
    ahead: list[int] = field(default_factory=list)
    gangs: list[int] = field(default_factory=list)
    limits: dict[SliceId, int] = field(default_factory=dict)
    asked: dict[SliceId, tuple[float, Asker]] = field(default_factory=dict)
    last: list[tuple[float, Asker]] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    def limit_of(self, slice_id: SliceId) -> int:
        """The work that may be ahead on a slice."""
        return min(self.limit, self.limits.get(slice_id, self.limit))

    def divide(self, cells: tuple[Cell, ...], cells_of: Mapping[SliceId, tuple[int, ...]]) -> None:
        """The slices changed."""
        self.cells_of = cells_of
        self.by_slice = {s: n for s, n in self.by_slice.items() if s in cells_of}
        self.ahead = [0] * len(cells)
        self.gangs = [0] * len(cells)
        self.last = [NOBODY] * len(cells)
        self.others = [NOBODY[0]] * len(cells)
        self.busy = [NOBODY[0]] * len(cells)
        for slice_id, (time, asker) in sorted(self.asked.items(), key=lambda item: item[1]):
            self.ask(slice_id, asker, time)
        for slice_id, (cost, gangs) in self.by_slice.items():
            for cell in cells_of[slice_id]:
                self.ahead[cell] += cost
                self.gangs[cell] += gangs

    def ask(self, slice_id: SliceId, asker: Asker, time: float, each: int = 0) -> None:
        """Somebody wants the devices of a slice.

        each: device microseconds of a gang that gets its place there; 0: none does yet.
        """
        cells = self.cells_of.get(slice_id)
        if cells is not None:
            self.asked[slice_id] = time, asker
            for cell in cells:
                before, who = self.last[cell]
                if who != asker:
                    self.others[cell] = before
                self.last[cell] = time, asker
                if each >= BRIEF:
                    self.busy[cell] = time

    def shared(self, slices: Iterable[SliceId], time: float) -> bool:
        """Whether several have lately wanted some devices of these slices."""
        since, cells = time - LATELY, (c for s in slices for c in self.cells_of.get(s, ()))
        return any(self.others[c] > since and self.busy[c] > since for c in cells)

    def allows(self, window: Window, time: float) -> bool:
        """Whether every device of the window is near enough to its end of work.

        That is asked of the devices and not of the window, which covers half of the limit at
        most: else whoever has the shorter gangs would always find room before the others.
        """
        ahead, gangs, others, busy = self.ahead, self.gangs, self.others, self.busy
        half, since = window.limit // 2, time - LATELY
        close = min(half, self.close // 2) if window.shared else half
        least = self.least if window.limit else 1
        for slice_id, _, _ in window.slices:
            for cell in self.cells_of[slice_id]:
                near = close if others[cell] > since and busy[cell] > since else half
                if gangs[cell] >= least and (ahead[cell] > near or not half):
                    return False
        return True

    def add(self, slice_id: SliceId, cost: int, gangs: int) -> None:
        """Work was granted (or is finished, when negative)."""
        cells = self.cells_of.get(slice_id)
        if cells is not None:
            before = self.by_slice.get(slice_id, (0, 0))
            self.by_slice[slice_id] = before[0] + cost, before[1] + gangs
            for cell in cells:
                self.ahead[cell] += cost
                self.gangs[cell] += gangs


def _by_order(run: RunRecord) -> int:
    return run.order


@dataclass(slots=True)
class Lanes:
    """Runs whose next window waits for nothing but its turn.

    Runs of one program and priority are interchangeable: they lie in one lane
    in order of submission, and only its head need be looked at.  Those that clients say
    something of (*data*) have a lane of their own, whose first :data:`APART` are told apart.
    """

    lanes: dict[tuple[str, int, bool], list[RunRecord]] = field(default_factory=dict)

    def put(self, run: RunRecord) -> None:
        """The run may have its turn."""
        if not run.open:
            run.open = True
            key = run.index.plan.key, run.priority, bool(run.data)
            lane = self.lanes.get(key)
            if lane is None:
                self.lanes[key] = [run]
            else:
                insort(lane, run, key=_by_order)

    def take(self, run: RunRecord) -> None:
        """The run leaves its lane."""
        if run.open:
            run.open = False
            key = run.index.plan.key, run.priority, bool(run.data)
            lane = self.lanes[key]
            lane.remove(run)
            if not lane:
                del self.lanes[key]

    def promote(self, run: RunRecord, priority: int) -> None:
        """The run gets another priority."""
        waits = run.open and run.state == "admitted"
        if waits:
            self.take(run)
        run.priority = priority
        if waits:
            self.put(run)

    def heads(self) -> list[RunRecord]:
        """The first run of every lane, and of each data in it."""
        found: list[RunRecord] = []
        for (_, _, told), lane in self.lanes.items():
            if told:
                found += {run.data: run for run in reversed(lane[:APART])}.values()
            else:
                found.append(lane[0])
        return found
