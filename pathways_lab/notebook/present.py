"""A timeline folded up to now: what pictures that look at the same stretch of it share.

Problem: folding a record costs more than drawing it, and pages that show other panels
of the same lab would all fold the same records.

Rule for maintainers: no thread, and nothing here knows panels.  Who looks folds what is
new, for all who share it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from pathways_lab.notebook.palette import palette_of
from pathways_lab.notebook.scene import Scene
from pathways_lab.timeline.log import Timeline, within
from pathways_lab.timeline.records import Record, Span
from pathways_lab.timeline.waits import known_at

Made = TypeVar("Made")


class Present:
    """The newest part of a timeline as a scene.

    window: seconds that pictures of it look back.
    origin: time (records' clock) that the axis calls 0; None: when the record begins.
    since: only what happened from then on is in it; None: the newest *window* seconds.
    folded: until when records are in the scene.  folds: how often something new came.
    version: how many records of the timeline are in the scene, or wait for it.
    """

    def __init__(
        self,
        timeline: Timeline,
        window: float,
        origin: float | None = None,
        since: float | None = None,
    ) -> None:
        self.timeline, self.window = timeline, window
        now = timeline.clock()
        first = min((r.time for r in timeline.records if not isinstance(r, Span)), default=now)
        origin = origin if origin is not None else first
        self.since = max(origin, since if since is not None else now - window)
        self.scene = self.blank(origin)
        self.folded, self.folds = now, 0
        self.version = self._left = 0
        self._waiting: list[Record] = []
        self._made: dict[Hashable, Any] = {}
        self._made_of = (0, 0.0)
        self.collect(now)

    def blank(self, origin: float) -> Scene:
        """A scene in which nothing has happened yet."""
        scene = Scene(origin, self.window, palette_of(self.timeline))
        for plan in self.timeline.plans:
            scene.flows.add(plan)
        return scene

    @property
    def behind(self) -> bool:
        """Whether records that have come are not in the scene yet."""
        return bool(self._waiting or self._left)

    def collect(self, now: float, most: int = 0) -> None:
        """Fold new records, *most* at most (0: all); the others are not even read."""
        if not most or len(self._waiting) < most:
            batch = self.timeline.since(self.version, most)
            self.version, self._left = batch.version, batch.left
            if batch.missed:
                self.scene.lose(batch.missed)
            self._waiting += [r for r in batch.records if within(r, self.since)]
        ready, self._waiting = self._waiting, []
        if most and len(ready) > most:
            ready, self._waiting = ready[:most], ready[most:]
        if not self.behind:
            self.folded = now
        elif ready:
            self.folded = min(now, known_at(ready[-1]))
        self.scene.add(ready, self.folded)
        self.folds += bool(ready)

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
        """One that begins anew at *now*, for whoever wants that; what is there and what is
        under way is no past."""
        other, known = copy.copy(self), self.scene
        batch = self.timeline.since(0)
        other.since, other.folded, other._made = now, now, {}
        other.version, other._left, other._waiting = batch.version, 0, []
        other.scene = self.blank(known.origin)
        other.scene.add([r for r in batch.records if within(r, now) or _standing(r, known)], now)
        return other


def newest(timeline: Timeline, window: float, most: int) -> Present:
    """The present of the last *window* seconds, or of about the newest *most* records: no
    more than a first picture can wait for."""
    records = timeline.records
    since = timeline.clock() - window
    if len(records) > most:
        since = max(since, known_at(records[-most]))
    return Present(timeline, window, since=since)


def _standing(record: Record, scene: Scene) -> bool:
    """Whether a record is of a run that has not ended, and no computation that has."""
    if isinstance(record, Span):
        return False
    run = getattr(record, "run", 0)
    return bool(run) and run not in scene.ended and run in scene.runs
