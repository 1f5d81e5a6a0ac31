"""A view: a timeline, some panels, and a thread that keeps the picture up to date.

Problem: the picture must move while the kernel is busy, stop costing anything
when nothing happens, and become a frozen one at the end, in every page that
shows it.

Rule for maintainers: the thread prints nothing and raises nothing; what fails
ends the view and is remembered in ``timeline.failures``.  It reads the timeline
and calls nobody else, except the two functions that it is given.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from pathways_lab.notebook.frozen import Bundle, freeze, waiting_legend
from pathways_lab.notebook.live import Header, LiveFigures
from pathways_lab.notebook.palette import palette_of
from pathways_lab.notebook.panels import chosen, plots
from pathways_lab.notebook.plot import FRAME, Plot
from pathways_lab.notebook.scene import Scene
from pathways_lab.notebook.text import merged_note, summary, table
from pathways_lab.timeline.log import Timeline, within
from pathways_lab.timeline.records import Event, Span

PERIOD = 0.1
"""Seconds between two updates."""

SHARE = 6
"""A view rests at least this many times as long as an update took."""

SETTLE = 0.3
"""Seconds after the end of a run in which its last records arrive."""

PATIENCE = 3.0
"""Seconds that a view waits for computations to end that it saw begin."""

OUTCOMES = ("failed", "cancelled", "finished")
"""How a run may end, worst first."""

LIVE, FROZEN = 4, 16
"""Live views per timeline, and frozen ones that late pages may still ask for; the
oldest of more are frozen, or forgotten."""

_live: WeakKeyDictionary[Timeline, list[View]] = WeakKeyDictionary()
_frozen: deque[LiveFigures] = deque()


class View:
    """Panels over a timeline, shown by a notebook as a live picture.

    panels: names; none means the usual four.
    window: seconds that it looks back while it is live.
    origin: time (records' clock) that the axis calls 0; None takes the newest
        *window* seconds of what is remembered.
    runs: the view ends when these runs have ended.
    gangs: how many gangs they have, when that is known.
    ended: asked at every update; its answer is "" while what is shown goes on,
        then how it ended (``"finished"``, ``"failed"``, ``"cancelled"``).
    cancel: called when somebody presses *cancel*, in any thread.
    """

    def __init__(
        self,
        timeline: Timeline,
        panels: tuple[str, ...] = (),
        title: str = "",
        window: float = 20.0,
        origin: float | None = None,
        runs: frozenset[int] = frozenset(),
        gangs: int = 0,
        ended: Callable[[], str] | None = None,
        cancel: Callable[[], None] | None = None,
    ) -> None:
        self.timeline = timeline
        self.panels = chosen(panels)
        self.title = title or "Pathways Lab"
        self._gangs = gangs
        self._runs, self._ended, self._cancel = runs, ended, cancel
        now = timeline.clock()
        records = timeline.records
        if origin is None:
            first = min((r.time for r in records if not isinstance(r, Span)), default=now)
            origin = max(first, now - window)
        self.palette = palette_of(timeline)
        self.scene = Scene(origin, window, self.palette)
        for plan in timeline.plans:
            self.scene.flows.add(plan)
        self.outcome = ""
        self._version = 0
        self._over_at = 0.0
        self._closed = threading.Event()
        self._lock = threading.RLock()
        self._plots: tuple[Plot, ...] = ()
        self._thread: threading.Thread | None = None
        self._handles: list[Any] = []
        self.live: LiveFigures | None = None
        self._collect(now)

    # --- what it shows -------------------------------------------------------

    def _collect(self, now: float) -> bool:
        """Fold new records; True when there were any that count."""
        batch = self.timeline.since(self._version)
        self._version = batch.version
        self.scene.dropped += batch.missed
        records = [r for r in batch.records if within(r, self.scene.origin)]
        self.scene.add(records, now)
        return bool(records)

    def header(self, now: float) -> Header:
        """What stands above the figures at *now*."""
        scene = self.scene
        active = scene.busy or now - scene.last < 1.0
        state = self.outcome or ("running" if active else "idle")
        if not scene.started and not self.outcome:
            state = "waiting"
        shown = {what.program for what in scene.catalogue} | {
            what.program for _, _, _, what in scene.running()
        }
        return Header(
            title=self.title,
            state={"finished": "done"}.get(state, state),
            status=self._progress(),
            notes=(*self.notes(), *self._coarse()),
            legend=tuple(
                (program, tuple(nodes))
                for program, nodes in self.palette.legend()
                if program in shown
            )
            + waiting_legend(scene, self.panels),
            summary=summary(scene, now, self.title),
            actions=("cancel",) if self._cancel is not None and not self.outcome else (),
        )

    def _progress(self) -> str:
        """How many gangs are done, of those that are expected or known."""
        gangs = self.scene.gangs
        known = self._gangs or len(gangs.by_key) + sum(gangs.gone.values())
        done = sum(n for run, n in gangs.done.items() if not self._runs or run in self._runs)
        return f"{done:,} of {known:,} gangs done" if known else ""

    def notes(self) -> tuple[str, ...]:
        """Remarks that a reader needs to trust the picture."""
        scene = self.scene
        out = []
        if scene.machine.emulated:
            out.append("emulated devices")
        if scene.machine.simulated:
            out.append("simulated: nothing of this was computed")
        if scene.dropped:
            out.append(f"{scene.dropped:,} records dropped")
        return tuple(out)

    def _coarse(self) -> tuple[str, ...]:
        """Said when bars are merged that a reader could tell apart."""
        resolution = self.scene.resolution
        if resolution <= 2 * self.scene.window / FRAME:
            return ()
        return (merged_note(resolution),)

    def __str__(self) -> str:
        """The picture as text."""
        with self._lock:
            now = self.timeline.clock()
            if not self.outcome:
                self._collect(now)
            return table(self.scene, now, self.title)

    def __repr__(self) -> str:
        return f"<View of {', '.join(self.panels)}: {self.outcome or 'live'}>"

    # --- live ------------------------------------------------------------------

    def tick(self) -> None:
        """Bring every page up to date.  Called by the view's own thread."""
        with self._lock:
            if self.live is None or self._closed.is_set():
                return
            now = self.timeline.clock()
            news = self._collect(now)
            quiet = not news and not self.scene.busy and now - self.scene.last > 1.0
            if not quiet or not self._plots:
                self._plots = plots(self.panels, self.scene, now)
            self.live.update(self._plots, self.header(now))

    def _run(self) -> None:
        pause = PERIOD
        while not self._closed.wait(pause):
            begun = time.thread_time()
            try:
                self.tick()
                if self._over():
                    self.freeze()
            except Exception as error:
                self.timeline.failures.append(f"a view ended: {type(error).__name__}: {error}")
                self._closed.set()
                return
            pause = max(PERIOD, SHARE * (time.thread_time() - begun))

    def _over(self) -> bool:
        """Whether what is shown has ended and its last records have arrived."""
        outcome = self._ended() if self._ended is not None else ""
        outcome = outcome or self._outcome_of_runs()
        if not outcome:
            return False
        now = time.monotonic()
        self._over_at = self._over_at or now
        if now - self._over_at < SETTLE:
            return False
        if self.scene.busy and now - self._over_at < PATIENCE:
            return False
        self.outcome = outcome
        return True

    def _outcome_of_runs(self) -> str:
        """How the view's runs have ended: the worst of them; "" before the last has."""
        outcomes = {self.scene.ended.get(run, "") for run in self._runs}
        if not outcomes or "" in outcomes:
            return ""
        return next(worst for worst in OUTCOMES if worst in outcomes)

    # --- notebook ----------------------------------------------------------------

    def _ipython_display_(self) -> None:
        self.show()

    def show(self) -> None:
        """Display the view where the present cell puts its output."""
        with self._lock:
            if self._closed.is_set():
                _display(*self.bundle())
                return
            if not widgets_work():
                _display({"text/plain": str(self)})
                return
            if self.live is None:
                self._begin()
            assert self.live is not None
            widget = {"version_major": 2, "version_minor": 0, "model_id": self.live.model_id}
            text = summary(self.scene, self.timeline.clock(), self.title)
            data = {"text/plain": text, "application/vnd.jupyter.widget-view+json": widget}
            self._handles.append(_display(data, display_id=True))

    def _begin(self) -> None:
        now = self.timeline.clock()
        self._plots = plots(self.panels, self.scene, now)
        self.live = LiveFigures(self._plots, self.header(now), self._act)
        self._thread = threading.Thread(target=self._run, name="pathways view", daemon=True)
        self._thread.start()
        others = _live.setdefault(self.timeline, [])
        others.append(self)
        for old in others[:-LIVE]:
            old.freeze()

    def _act(self, name: str) -> None:
        if name == "cancel" and self._cancel is not None:
            self._cancel()

    def bundle(self) -> Bundle:
        """The frozen picture of everything that the view has seen."""
        with self._lock:
            self._collect(self.timeline.clock())
            scene = self.scene
            last = max(scene.last, scene.origin + 1e-3)
            records = [r for r in self.timeline.records if within(r, scene.origin)]
            return freeze(
                records, scene.origin, last, self.panels, self.title, self.palette,
                self.notes(), scene.machine,
            )  # fmt: skip

    def freeze(self) -> View:
        """Replace the live picture by a static one, in every page and in the notebook."""
        with self._lock:
            if self._closed.is_set():
                return self
            self._closed.set()
            self.outcome = self.outcome or "ended"
            if self in _live.get(self.timeline, ()):
                _live[self.timeline].remove(self)
            if self.live is None:
                return self
            data, metadata = self.bundle()
            self.live.freeze(data, metadata)
            for handle in self._handles:
                handle.update(data, metadata=metadata, raw=True)
            _frozen.append(self.live)
            while len(_frozen) > FROZEN:
                _frozen.popleft().close()
        return self


def view_of(timeline: Timeline, *panels: str, **options: Any) -> View:
    """A view of a timeline: live while it grows, frozen and of all of it when it was loaded."""
    if not timeline.loaded:
        return View(timeline, panels, **options)
    records = timeline.records
    spans = [r for r in records if isinstance(r, Span)]
    events = [r.time for r in records if isinstance(r, Event) and r.run]
    start = min([*(s.start for s in spans), *events], default=0.0)
    end = max([*(s.end for s in spans), *events], default=start)
    given = {
        "title": f"Loaded: {Path(timeline.loaded).name}",
        "origin": start,
        "window": max(end - start, 1e-3),
        **options,
    }
    return View(timeline, panels, **given).freeze()


def _display(
    data: Mapping[str, Any], metadata: Mapping[str, Any] | None = None, display_id: bool = False
) -> Any:
    """Publish a MIME bundle as output; returns a handle when it shall be updated."""
    from IPython import display as ipython

    show: Any = ipython.display
    options: dict[str, Any] = {"display_id": True} if display_id else {}
    return show(dict(data), metadata=dict(metadata or {}), raw=True, **options)


def freeze_all(timeline: Timeline) -> None:
    """End every live view of a timeline: its lab has closed."""
    for view in tuple(_live.get(timeline, ())):
        view.freeze()


def widgets_work() -> bool:
    """Whether this process is a Jupyter kernel (plain IPython gets text)."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None
