"""The picture of a view: a timeline folded, at the present or at a moment of the past.

Problem: the same picture is made in the kernel, or in a process of its own that
takes nothing from the kernel, and a person looks at the present, back to a
moment, or at one gang.

Rule for maintainers: no thread, no widget, no Bokeh: it is asked for plots and
told what a person wants.  It reads the timeline and nothing else.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from pathways_lab.notebook.panels import chosen, completed, plots
from pathways_lab.notebook.panels.legend import legend
from pathways_lab.notebook.scene.advice import advice
from pathways_lab.notebook.scene.awaited import device_at
from pathways_lab.notebook.scene.duration import duration
from pathways_lab.notebook.scene.header import Header
from pathways_lab.notebook.scene.live_fold import Present
from pathways_lab.notebook.scene.palette import palette_of
from pathways_lab.notebook.scene.plot import FRAME, Plot
from pathways_lab.notebook.scene.scene import Scene
from pathways_lab.notebook.scene.text import (
    Card,
    about_stretch,
    card,
    compile_card,
    merged_note,
    shares,
    summary,
    table,
    wait_card,
)
from pathways_lab.notebook.view.frozen import Bundle, freeze, still
from pathways_lab.notebook.view.saved import MIME
from pathways_lab.timeline.log import Timeline, items_within
from pathways_lab.timeline.machine import Lane
from pathways_lab.timeline.packed import Item, Packed, single, size
from pathways_lab.timeline.records import ENDS, Event, Sample
from pathways_lab.timeline.waits import known_at, known_order

SETTLE = 0.3
"""Seconds after the end of a run in which its last records arrive."""

PATIENCE = 3.0
"""Seconds that a view waits for computations to end that it saw begin."""

LAST = 1.0
"""Seconds for which a view that is closed waits for what is on its way: values are faster than
records."""

QUIET = 1.0
"""Seconds after the last computation in which a picture still moves on."""

FOLD = 1_000
"""Records that one look folds at most, some 25 ms of work: a picture that is behind moves on, and
says so."""

AGAIN = 20_000
"""Records that are folded anew for a static picture of one that moves, at most: a second."""

BEHIND = 0.5
"""Seconds of lag that are not told."""

CLOCKS = 3
"""Hosts whose clocks are named, the worst ones."""

OUTCOMES = ("failed", "cancelled", "finished")
"""How a run may end, worst first."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The subject of a view.

    panels: names.  window: seconds that it looks back while it is live.
    stepwise: it shows the last steps of a program that repeats, where one does.
    origin: time (records' clock) that the axis calls 0; None: when the record begins.
    since: only what happened from then on is shown; None: the newest *window* seconds.
    until: what happens afterwards is not shown.
    runs: it ends when these have ended.  gangs: how many they have, 0 when unknown.
    actions: what else its buttons offer.
    """

    panels: tuple[str, ...] = ()
    title: str = "Pathways Lab"
    window: float = 20.0
    stepwise: bool = False
    origin: float | None = None
    since: float | None = None
    until: float = math.inf
    runs: frozenset[int] = frozenset()
    gangs: int = 0
    actions: tuple[str, ...] = ()


class Picture:
    """One view's content.

    outcome: how what it shows has ended, "" while it goes on.
    present: of the timeline, where other pictures show the same part of it.
    """

    def __init__(self, timeline: Timeline, wanted: Wanted, present: Present | None = None) -> None:
        self.timeline = timeline
        self.wanted = wanted
        self.panels = self._names = chosen(wanted.panels)
        self.outcome = ""
        self.palette = palette_of(timeline)
        self.present = present or Present(
            timeline, wanted.window, wanted.origin, wanted.since, until=wanted.until,
            stepwise=wanted.stepwise,
        )  # fmt: skip
        self._folds = -1
        self._over_at = 0.0
        self._first, self._cleared = float("inf"), 0
        self._gang: float | None = None
        self._wait: tuple[Lane, float] | None = None
        self._sums: tuple[tuple[str, str], ...] = ()
        self._past: Past | None = None
        self._drawn: tuple[Plot, ...] = ()
        self._drawn_at = 0.0

    @property
    def scene(self) -> Scene:
        """The scene that is shown while the picture follows the present."""
        return self.present.scene

    @property
    def since(self) -> float:
        """The picture's start: earlier records are not shown (seconds on the records' clock)."""
        return self.present.since

    # --- looking -------------------------------------------------------------

    def look(self, now: float) -> tuple[tuple[Plot, ...], Header]:
        """Fold the new records at *now* (records' clock), and return the plots as :meth:`shown`."""
        self.fold(now, FOLD)
        return self.shown(now)

    def fold(self, now: float, most: int) -> None:
        """Fold the new records at *now* (records' clock), *most* of them."""
        self.present.collect(min(now, self.wanted.until), most)

    def shown(self, now: float) -> tuple[tuple[Plot, ...], Header]:
        """The plots and the header of what is folded; *now* is the time (records' clock)."""
        now = min(now, self.wanted.until)
        news, self._folds = self.present.folds != self._folds, self.present.folds
        self._names = completed(self._names, self.scene)  # what was there once stays
        if self._past is not None:
            self._drawn = self._past.plots(self._names)
            return self._drawn, self.header(self._past.scene, self._past.now, now)
        if not self._drawn or news or self._moves(self.scene, now):
            self._drawn = self.present.once(self._names, self._plots)
            self._drawn_at = self.present.folded
        return self._drawn, self.header(self.scene, self._drawn_at, now)

    def _moves(self, scene: Scene, now: float) -> bool:
        return bool(scene.busy) or now - scene.last < QUIET

    def _plots(self, scene: Scene, at: float) -> tuple[Plot, ...]:
        return plots(self._names, scene, at)

    def header(self, scene: Scene, at: float, now: float) -> Header:
        """The text above the figures; *scene* is shown as it is *at* some moment."""
        active = self._moves(scene, at if self._past is not None else self.present.folded)
        active &= self.timeline.grows
        state = self.outcome or ("running" if active else "idle")
        if not scene.started and not self.outcome:
            state = "waiting"
        making = None if self.outcome else scene.compiling.now()
        if making and not scene.busy:
            state = "compiling"
        done, all_known = self._counted(scene)
        begun = round(self.since - scene.origin, 3)
        told = Card(self._sums)
        if self._wait is not None:
            told = wait_card(scene, *self._wait, at)
        elif self._gang is not None:
            told = card(scene, self._gang)
        elif making and not self._sums:
            told = compile_card(making)
        return Header(
            title=self.wanted.title,
            state={"finished": "done"}.get(state, state),
            status=self._status(scene, done, all_known, at),
            shares=shares(scene, at),
            progress=round(done / all_known, 3) if all_known and self.wanted.gangs else -1.0,
            notes=(*self.notes(), *self._coarse()),
            late=lag if (lag := round(now - self.present.folded, 1)) > BEHIND else 0.0,
            compiling=making
            and (*making[:3], int(max(0.0, (now if self._past is None else at) - making.since))),
            legend=legend(completed(self.panels, scene), (scene, at)),
            advice=advice(scene, at),
            summary=summary(scene, at, self.wanted.title),
            actions=self.wanted.actions if self.timeline.grows and not self.outcome else (),
            chosen=told.facts,
            links=told.links,
            arrows=told.arrows,
            line=told.line,
            node=told.node,
            moments=(begun, max(begun, round(scene.elapsed(self._drawn_at)[1], 3))),
            at=round(at - scene.origin, 4) if self._past is not None else None,
            window=self._other_window(scene),
            shown=tuple(round(bound, 4) for bound in scene.range(at)),
            overview=self.scene.profile.told(scene.origin, len(self.scene.machine.lanes)),
        )

    def _counted(self, scene: Scene) -> tuple[int, int]:
        """Gangs that are done, and that are expected, or known and submitted."""
        gangs, runs = scene.gangs, self.wanted.runs
        known = self.wanted.gangs or gangs.known() + scene.backlog.gangs
        if not runs:
            return gangs.all_done, known
        return self._cleared + sum(gangs.done.get(run, 0) for run in runs), known

    def _status(self, scene: Scene, done: int, known: int, at: float) -> str:
        if not known:
            return ""
        text = f"{done:,} of {known:,} gangs done"
        self._first = min(self._first, scene.first)  # also of what was cleared since
        took = at - self._first
        if self.wanted.gangs and 0 < done < known and took > 2.0 and not self.outcome:
            text += f", about {duration(took * (known - done) / done, 2)} left"
        return text

    def _other_window(self, scene: Scene) -> str:
        if scene.shown:
            return f"last {scene.window:g} s"
        return "last runs" if self.wanted.stepwise and not scene.stepwise else ""

    def notes(self) -> tuple[str, ...]:
        """Remarks that a reader needs to trust the picture."""
        scene = self.scene
        out = []
        if scene.machine.emulated:
            out.append("emulated devices")
        if scene.machine.simulated:
            out.append("simulated: nothing of this was computed")
        lost = {host.name for host in scene.machine.hosts.values() if host.lost}
        apart = {host: e for host, e in scene.clocks.items() if e and host not in lost}
        if apart:
            worst = sorted(apart, key=apart.__getitem__, reverse=True)[:CLOCKS]
            told = ", ".join(f"{host} ± {duration(apart[host])}" for host in worst)
            more = len(apart) - len(worst)
            out.append(f"clocks: {told}" + (f", and {more} by less" if more else ""))
        if scene.dropped:
            out.append(f"{scene.dropped:,} records dropped")
        return tuple(out)

    def _coarse(self) -> tuple[str, ...]:
        """Said when bars are merged that a reader could tell apart."""
        resolution = self.scene.resolution
        if resolution <= 2 * self.scene.window / FRAME:
            return ()
        return (merged_note(resolution),)

    def text(self) -> str:
        """The picture as text."""
        now = min(self.timeline.clock(), self.wanted.until)
        if self._past is not None:
            return table(self._past.scene, self._past.now, self.wanted.title)
        if not self.outcome:
            self.present.collect(now)
        return table(self.scene, now, self.wanted.title)

    @property
    def _shown(self) -> Scene:
        return self._past.scene if self._past is not None else self.scene

    # --- what a person wants ------------------------------------------------------

    def do(self, name: str, value: object = None) -> None:
        """``"choose"`` a gang by its number (None: none), or the wait at a moment, in seconds on
        the axis, and a height in the device queues, ``"sum"`` what is between two moments,
        ``"seek"`` a moment (None: follow), ``"clear"`` what was until now, ``"fold"`` a lane, or
        unfold it (None: all), ``"window"`` the last steps or the whole window."""
        number = float(value) if isinstance(value, int | float) else None
        pair = [*map(float, value)] if isinstance(value, list) and len(value) == 2 else None
        if name == "choose":
            self._gang, self._wait, self._sums = number, None, ()
            if pair and (lane := device_at(self._shown, pair[1])):
                self._wait = lane, pair[0] + self.scene.origin
        elif name == "sum" and pair:
            self._gang, self._wait = None, None
            self._sums = about_stretch(self._shown, min(pair), max(pair))
        elif name == "seek":
            if number is None:
                self._past = None
                self._drawn = ()
            else:
                self._past = self._past or Past(self)
                self._past.go(number + self.scene.origin)
        elif name == "clear":
            self._clear()
        elif name in ("fold", "window"):
            if name == "fold":
                self._shown.lanes.turn(self.present.unfolded, number)
            else:
                self.present.stepwise = not self.present.stepwise
            self.present.laid()
            if self._past is not None:
                self._past.scene.stepwise = self.present.stepwise
                self._past.go(self._past.now)

    def _clear(self) -> None:
        self._past, self._gang, self._wait, self._sums, self._drawn = None, None, None, (), ()
        done = self.scene.gangs.done
        self.present = self.present.forgetting(self.timeline.clock())
        left = self.scene.gangs.done  # of runs that go on, whole
        self._cleared += sum(done.get(run, 0) for run in self.wanted.runs if run not in left)

    # --- the end --------------------------------------------------------------

    @property
    def content(self) -> tuple[float, ...]:
        """Another value when a still picture would be another one."""
        scene = self.scene
        return self.since, scene.last, bool(scene.busy), len(scene.machine.lanes)

    @property
    def stands(self) -> bool:
        """Whether nothing moves: a still picture shows all there is."""
        return not self.present.behind and not self._moves(self.scene, self.present.folded)

    @property
    def waiting(self) -> bool:
        """Whether there is more to come of what it has seen begin."""
        return self.scene.busy or self.scene.gangs.open or self.present.behind

    def over(self, told: str) -> bool:
        """Whether what is shown has ended and its last records have arrived.

        told: what others say of how it ended, or "".
        """
        outcome = told or self._outcome_of_runs()
        if not outcome:
            return False
        now = time.monotonic()
        self._over_at = self._over_at or now
        if now - self._over_at < SETTLE:
            return False
        if self.waiting and now - self._over_at < PATIENCE:
            return False
        self.outcome = outcome
        return True

    def _outcome_of_runs(self) -> str:
        """How the view's runs have ended: the worst of them; "" before the last has."""
        outcomes = {self.scene.ended.get(run, "") for run in self.wanted.runs}
        if not outcomes or "" in outcomes:
            return ""
        return next(worst for worst in OUTCOMES if worst in outcomes)

    def bundle(self) -> Bundle:
        """The frozen picture of everything that the view has seen."""
        if self.timeline.version != self.present.version or self.present.behind:
            self.present.collect(self.timeline.clock())
        return self.present.once(("frozen", self.panels, self.wanted.title), self._freeze)

    def _freeze(self, scene: Scene, at: float) -> Bundle:
        last = max(min(scene.last, self._until(self.timeline.items)), self.since + 1e-3)
        return self._frozen(scene, self.since, last)

    def _frozen(self, scene: Scene, since: float, last: float) -> Bundle:
        return freeze(
            items_within(self.timeline.items, since, last), since, last, self.panels,
            self.wanted.title, self.palette, self.notes(), scene.machine, scene.stepwise,
        )  # fmt: skip

    def still(self) -> Bundle | None:
        """The live picture as a static one; None: it would be too large, and it moves, so that
        there is no time to fold its records anew until it fits."""
        return self.present.once(("still", self.panels, self.wanted.title), self._still)

    def _still(self, scene: Scene, at: float) -> Bundle | None:
        at = at if scene.busy else min(at, max(scene.last, self.since) + QUIET)
        bundle = still(scene, at, self.panels, self.wanted.title, self.notes())
        if bundle is not None and MIME in bundle[0]:
            return bundle
        since = max(self.since, at - scene.window)
        many = sum(map(size, items_within(self.timeline.items, since, at)))
        return self._frozen(scene, since, at) if self.stands or many <= AGAIN else bundle

    def _until(self, items: Iterable[Item]) -> float:
        """When the last of the view's runs was over: the next cell's may have begun since."""
        runs = self.wanted.runs
        mine = [i for i in items if not isinstance(i, Sample) and i.run in runs]
        ends = [i for i in mine if not isinstance(i, Event) or i.kind in ENDS]
        return max(map(known_at, ends), default=float("inf"))


class Past:
    """The records as they were known at a moment.

    now: that moment, seconds on the records' clock.
    """

    def __init__(self, picture: Picture) -> None:
        self._picture = picture
        self._items = sorted(items_within(picture.timeline.items, picture.since), key=known_order)
        self._folded = 0
        self._plots: tuple[Plot, ...] = ()
        self.now = picture.since
        self.scene = picture.present.blank(picture.scene.origin)

    def go(self, moment: float) -> None:
        """Stand at *moment*."""
        if moment < self.now:
            self.scene = self._picture.present.blank(self._picture.scene.origin)
            self._folded = 0
        self._part(moment)
        until = bisect_right(self._items, moment, key=known_at)
        self.scene.add(self._items[self._folded : until], moment)
        self._folded, self.now, self._plots = until, moment, ()

    def _part(self, moment: float) -> None:
        """Columns that are known in part at *moment* go on as single records.

        None of it was known before, so what was folded stays as it is.
        """

        def partly(item: Item) -> bool:
            if not isinstance(item, Packed) or item.known_at <= moment:
                return False
            return not item.within(moment, math.inf)

        rest = self._items[self._folded :]
        parted = [item for item in rest if partly(item)]
        if parted:
            whole = [item for item in rest if not partly(item)]
            self._items[self._folded :] = sorted([*whole, *single(parted)], key=known_order)

    def plots(self, panels: tuple[str, ...]) -> tuple[Plot, ...]:
        """The panels at that moment."""
        self._plots = self._plots or plots(panels, self.scene, self.now, edge="held")
        return self._plots
