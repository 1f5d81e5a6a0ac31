"""A timeline folded up to now: what pictures that look at the same stretch of it share.

Problem: folding a record costs more than drawing it, and pages that show other panels
of the same lab would all fold the same records.

Rule for maintainers: no thread, and nothing here knows panels.  Who looks folds what is
new, for all who share it.
"""

from __future__ import annotations

from pathways_lab.notebook.palette import palette_of
from pathways_lab.notebook.scene import Scene
from pathways_lab.timeline.log import Timeline, within
from pathways_lab.timeline.records import Record, Span
from pathways_lab.timeline.waits import known_at


class Present:
    """The newest part of a timeline as a scene.

    window: seconds that pictures of it look back.
    origin: time (records' clock) that the axis calls 0; None: when the record begins.
    since: only what happened from then on is in it; None: the newest *window* seconds.
    folded: until when records are in the scene.  folds: how often something new came.
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
        self._version = 0
        self._waiting: list[Record] = []
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
        return bool(self._waiting)

    def collect(self, now: float, most: int = 0) -> None:
        """Fold new records, *most* at most (0: all)."""
        batch = self.timeline.since(self._version)
        self._version = batch.version
        self.scene.dropped += batch.missed
        self._waiting += [r for r in batch.records if within(r, self.since)]
        ready, self._waiting = self._waiting, []
        if most and len(ready) > most:
            ready, self._waiting = ready[:most], ready[most:]
        self.folded = min(now, known_at(ready[-1])) if self._waiting else now
        self.scene.add(ready, self.folded)
        self.folds += bool(ready)

    def forget(self, now: float) -> None:
        """Begin anew at *now*; what is there and what is under way is no past."""
        known = self.scene
        self.since = now
        self.scene = self.blank(known.origin)
        self.scene.add(
            [r for r in self.timeline.records if within(r, now) or _standing(r, known)], now
        )


def _standing(record: Record, scene: Scene) -> bool:
    """Whether a record is of a run that has not ended, and no computation that has."""
    if isinstance(record, Span):
        return False
    run = getattr(record, "run", 0)
    return bool(run) and run not in scene.ended and run in scene.runs
