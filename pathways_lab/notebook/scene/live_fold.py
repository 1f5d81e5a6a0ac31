"""A timeline folded up to now, shared by pictures that look at the same stretch of it.

Problem: folding a record costs more than drawing it, and pages that show other panels
of the same lab would all fold the same records.

Rule for maintainers: no thread, and nothing here knows panels.  The picture that looks folds
the new records, for all pictures that share them.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from pathways_lab.notebook.scene.device_state import Waiting
from pathways_lab.notebook.scene.palette import palette_of
from pathways_lab.notebook.scene.scene import Scene
from pathways_lab.timeline.compiling import KINDS, Compiling
from pathways_lab.timeline.gangs import Gang, Gangs
from pathways_lab.timeline.log import Timeline, items_within, within
from pathways_lab.timeline.packed import Item, Packed, Row, single
from pathways_lab.timeline.records import ENDS, Event, Record, Sample, Span
from pathways_lab.timeline.waits import known_at, known_order

Made = TypeVar("Made")

ROW = 6
"""A row of gangs takes so many times as long to fold as a record."""

LATE = 0.15
"""Seconds by which hosts' records may come late: hosts report in batches."""


class Present:
    """The newest part of a timeline as a scene.

    window: seconds that pictures of it look back.
    origin: time (records' clock) that the axis calls 0; None: when the record begins.
    since: only what happened from then on is in it; None: the newest *window* seconds.
    late: seconds by which records may come late, so that newer ones wait for them: what a gang
        waited for is folded before it.
    until: it begins not later than then, however late it is.
    stepwise: pictures of it show the last steps of what repeats, while anything does.
    unfolded: what is unfolded of its lanes, in all scenes of it.
    folded: until when records are in the scene.  folds: how often something new came.
    version: how many records of the timeline are in the scene, or wait for it.
    """

    def __init__(
        self,
        timeline: Timeline,
        window: float,
        origin: float | None = None,
        since: float | None = None,
        late: float = 0.0,
        until: float = math.inf,
        stepwise: bool = False,
    ) -> None:
        self.timeline, self.window, self._late = timeline, window, late
        self.stepwise = stepwise
        now = min(timeline.clock(), until)
        first = min(map(_happened, timeline.items), default=now)
        origin = origin if origin is not None else first
        self.since = max(origin, since if since is not None else now - window)
        self.unfolded: set[Hashable] = set()
        self.scene = self.blank(origin)
        self.scene.compiling = self._compiling()
        gangs = map(_gang_known, timeline.items)
        newest = max((at for at in gangs if at < self.since), default=None)
        self.scene.earlier = None if newest is None else self.since - newest
        self.folded, self.folds = now, 0
        self.version = self._left = 0
        self._waiting: list[Item] = []
        self._made: dict[Hashable, Any] = {}
        self._made_of = (0, 0.0)
        self.collect(now)

    def blank(self, origin: float) -> Scene:
        """A scene in which nothing has happened yet."""
        scene = Scene(
            origin, self.window, palette_of(self.timeline), unfolded=self.unfolded,
            stepwise=self.stepwise,
        )  # fmt: skip
        for record in self.timeline.kept:
            scene.flows.add(record)
        return scene

    def _compiling(self) -> Compiling:
        """The functions that hosts had begun to make before the picture begins."""
        seen = Compiling()
        for item in self.timeline.items:
            if (
                isinstance(item, Span | Event)
                and item.kind in KINDS
                and known_at(item) < self.since
            ):
                seen.add(item)
        return seen

    @property
    def behind(self) -> bool:
        """Whether records that have come are not in the scene yet."""
        return bool(self._waiting or self._left)

    def collect(self, now: float, most: int = 0) -> None:
        """Fold what is new, worth *most* records at most (0: all); the rest is not even read."""
        if not most or len(self._waiting) < most:
            batch = self.timeline.since(self.version, most)
            self.version, self._left = batch.version, batch.left
            if batch.missed:
                self.scene.lose(batch.missed)
            self._waiting += items_within(batch.items, self.since)
        self._waiting.sort(key=known_order)
        settled = len(self._waiting)
        if most and not self._left:
            settled = bisect_right(self._waiting, (now - self._late, 2), key=known_order)
        count = settled
        if most:
            worth = accumulate([ROW if isinstance(i, Row) else 1 for i in self._waiting[:most]])
            count = min(count, 1 + bisect_left(list(worth), most))
        ready, self._waiting = self._waiting[:count], self._waiting[count:]
        if not self.behind:
            self.folded = now
        elif count == settled and not self._left:
            self.folded = now - self._late
        elif ready:
            self.folded = min(now, known_at(ready[-1]))
        self.scene.add(ready, self.folded)
        self.folds += bool(ready)

    def laid(self) -> None:
        """Other lanes are unfolded now, or another part of it is to be shown."""
        self.scene.stepwise = self.stepwise
        self.scene.add((), self.folded)
        self.folds += 1

    def once(self, what: Hashable, make: Callable[[Scene, float], Made]) -> Made:
        """Something made of the scene as it is now: once for all who share it."""
        state = self.folds, self.folded
        if state != self._made_of:
            self._made_of, self._made = state, {}
        if what not in self._made:
            self._made[what] = make(self.scene, self.folded)
        made: Made = self._made[what]
        return made

    def forgetting(self, now: float) -> Present:
        """A copy that forgets everything before *now* (seconds) but keeps the machine's state
        and the unfinished runs."""
        other = copy.copy(self)
        batch = self.timeline.since(0)
        other.since, other.folded, other._made = now, now, {}
        other.version, other._left, other._waiting = batch.version, 0, []
        other.scene = self.blank(self.scene.origin)
        standing, over = still(batch.items, now)
        other.scene.gangs.leave_out(over)
        other.scene.compiling = other._compiling()
        for lane, waiting in self.scene.waiting.items():
            other.scene.waiting[lane] = Waiting(ended=waiting.ended)
        other.scene.add(standing, now)
        for gang in over:
            other.scene.backlog.placed(gang.run, 1)
        return other


def still(items: Sequence[Item], now: float) -> tuple[list[Item], list[Gang]]:
    """The past that a picture from *now* on needs: the machine, and the unfinished runs.

    That is all that is known of runs that go on, but for work that is over; and their gangs that
    are over, which count among theirs.
    """
    ended = {item.run for item in items if isinstance(item, Event) and item.kind in ENDS}
    out: list[Item] = []
    going: list[Record] = []
    for item in items:
        if isinstance(item, Sample) or not item.run or item.run in ended:
            out += items_within([item], now)
        else:
            going += single([item])
    gangs = Gangs()
    for record in going:
        gangs.add(record)

    def needed(record: Record) -> bool:
        if isinstance(record, Sample) or within(record, now):
            return True
        if isinstance(record, Span) and record.kind != "gang":
            return False
        gang = gangs.by_key.get((record.run, record.step))
        return gang is None or not gang.over

    out += [record for record in going if needed(record)]
    return out, [gang for gang in gangs.by_key.values() if gang.over]


def newest(
    timeline: Timeline, window: float, most: int, late: float, stepwise: bool = False
) -> Present:
    """The present of the last *window* seconds, or of about the newest *most* records: no
    more than a first picture can wait for."""
    items = timeline.items
    since = timeline.clock() - window
    if len(items) > most:
        since = max(since, known_at(items[-most]))
    return Present(timeline, window, since=since, late=late, stepwise=stepwise)


def _gang_known(item: Item) -> float:
    """When the end of a gang, or of a row of them, was known; never for other items."""
    gang = isinstance(item, Row) or (isinstance(item, Span) and item.kind == "gang")
    return known_at(item) if gang else math.inf


def _happened(item: Item) -> float:
    """When it happened, of what happens at once."""
    if isinstance(item, Packed):
        return item.known_at
    return float("inf") if isinstance(item, Span) else item.time
