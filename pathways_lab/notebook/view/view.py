"""A view: a live picture of a timeline in the notebook, until it is frozen.

Problem: the picture must move while the kernel is busy, stop costing anything
when nothing happens, and become a frozen one at the end, in every page that
shows it.

Rule for maintainers: a :class:`~.picture.Picture` decides what is shown, and a renderer
(:mod:`.renderers`) draws it; here is its place in the notebook.  Nothing
prints and nothing raises in the background; an error ends the view and is
remembered in ``timeline.failures``.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from pathways_lab.notebook.kernel import line_index
from pathways_lab.notebook.panels import chosen
from pathways_lab.notebook.view import renderers
from pathways_lab.notebook.view.answers import ANSWERED
from pathways_lab.notebook.view.frozen import Bundle
from pathways_lab.notebook.view.live import LiveFigures
from pathways_lab.notebook.view.picture import LAST, SETTLE, Picture, Wanted
from pathways_lab.notebook.view.stills import Still
from pathways_lab.notebook.view.stream import Message
from pathways_lab.timeline.log import Timeline
from pathways_lab.timeline.records import Event, Span

WINDOW = 20.0
"""Seconds that a view looks back."""

LIVE, FROZEN = 4, 16
"""Live views per timeline, and frozen ones that late pages may still ask for; the
oldest of more are frozen, or forgotten."""

LAST_WORDS = 10.0
"""Seconds that are waited for the frozen picture of a view that is ended."""

LOOK = 0.02
"""Seconds between two looks at whether the last records have come."""

_live: WeakKeyDictionary[Timeline, list[View]] = WeakKeyDictionary()
_frozen: deque[LiveFigures] = deque()


class View:
    """Panels over a timeline, shown by a notebook as a live picture.

    panels: names; none means the usual four.
    window: seconds that it looks back while it is live; None: the last two runs of a program
        that repeats, or :data:`WINDOW` seconds while none does.
    origin: time (records' clock) that the axis calls 0, and from which on the view
        shows what happened; None: the newest *window* seconds, on an axis that
        begins with the record.
    until: time at which the axis ends, however late it is.
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
        window: float | None = None,
        origin: float | None = None,
        until: float = math.inf,
        runs: frozenset[int] = frozenset(),
        gangs: int = 0,
        ended: Callable[[], str] | None = None,
        cancel: Callable[[], None] | None = None,
    ) -> None:
        self.timeline = timeline
        self.panels = chosen(panels)
        self.title = str(title or "Pathways Lab")
        stepwise = window is None
        window = WINDOW if window is None else window
        if not (isinstance(window, int | float) and 0 < window < math.inf):
            raise ValueError(f"window={window!r} is not a number of seconds above 0, like 20")
        if not (origin is None or (isinstance(origin, int | float) and math.isfinite(origin))):
            raise ValueError(f"origin={origin!r} is not a time: give seconds of the records' clock")
        self.wanted = Wanted(
            self.panels, self.title, window, stepwise, origin, origin, until, runs, gangs,
            ("cancel", "clear") if cancel is not None else ("clear",),
        )  # fmt: skip
        self.outcome = ""
        self._ended, self._cancel = ended, cancel
        self._closed, self._over = threading.Event(), threading.Event()
        self._lock = threading.RLock()
        self._handles: list[Any] = []
        self._painter: renderers.Painter | None = None
        self._picture: Picture | None = None
        self._bundle: Bundle | None = None
        self.live: LiveFigures | None = None

    @property
    def picture(self) -> Picture:
        """Its picture, made in this process when a caller asks here."""
        with self._lock:
            if isinstance(self._painter, renderers.Thread):
                return self._painter.picture
            if self._picture is None:
                self._picture = Picture(self.timeline, self.wanted)
            return self._picture

    def __str__(self) -> str:
        """The picture as text."""
        return self.picture.text()

    def __repr__(self) -> str:
        return f"<View of {', '.join(self.panels)}: {self.outcome or 'live'}>"

    # --- a renderer's screen ----------------------------------------------------

    def message(self, message: Message) -> None:
        """Something for the pages."""
        if header := message.get("header"):
            header["place"] = line_index.place_of(header["line"])
            if told := self.timeline.operations.get(header["node"]):
                header["chosen"] = (*header["chosen"], ("operations", told))
        if self.live is not None:
            self.live.post(message)

    def ended(self) -> str:
        """How what is shown has ended, as far as the kernel knows, or ""."""
        return self._ended() if self._ended is not None else ""

    def still(self, still: Still) -> None:
        """The notebook keeps it: a page saves it, or else the output is replaced, which
        draws it anew and so is done only while nothing moves."""
        with self._lock:
            if self.live is None or self._closed.is_set():
                return
            data, metadata = still.bundle
            facts = metadata["pathways_lab"] | {"view": self.live.model_id}
            metadata = metadata | {"pathways_lab": facts}
            self.live.keep(data, metadata)
            if still.stands and self.live.keeper is False:
                data = data | _widget(self.live)
            elif not (still.stands and self.live.silent()):
                return
            self._replace(data, metadata)

    def frozen(self, outcome: str, bundle: Bundle) -> None:
        """It is over: the static picture takes the live one's place, wherever it is shown."""
        with self._lock:
            if self._over.is_set():
                return
            self._closed.set()
            self._over.set()
            self.outcome, self._bundle = outcome, bundle
            if self in _live.get(self.timeline, ()):
                _live[self.timeline].remove(self)
            if self.live is None:
                return
            data, metadata = bundle
            self.live.freeze(data, metadata)
            self._replace(data, metadata)
            _frozen.append(self.live)
            while len(_frozen) > FROZEN:
                _frozen.popleft().close()

    def _replace(self, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        """The outputs that show it show this."""
        for handle in self._handles:
            handle.update(data, metadata=metadata, raw=True)

    def failed(self, why: str) -> None:
        """It cannot be drawn any more; what is known here is left."""
        self.timeline.failures.append(f"a view ended: {why}")
        self._painter = None
        try:
            bundle = self.picture.bundle()
        except Exception as error:
            # The thread that reads the drawing process goes on: other views live by it.
            self.timeline.failures.append(f"its picture: {type(error).__name__}: {error}")
            bundle = {"text/plain": f"This view ended: {why}"}, {}
        self.frozen(self.outcome or "ended", bundle)

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
            data = {"text/plain": f"{self.title}: a live view"} | _widget(self.live)
            live = {"pathways_lab": {"live": True}}
            self._handles.append(_display(data, live, display_id=True))

    def _begin(self) -> None:
        self.live = LiveFigures(self._ask, self._act)
        self._painter = renderers.painter_of(self.timeline, self.wanted, self)
        others = _live.setdefault(self.timeline, [])
        others.append(self)
        for old in others[:-LIVE]:
            old.freeze(wait=False)

    def _ask(self) -> None:
        if self._painter is not None and not self._closed.is_set():
            self._painter.whole()

    def _act(self, name: str, value: Any) -> None:
        """Somebody pressed or moved something."""
        if name == "cancel":
            if self._cancel is not None:
                self._cancel()
        elif self._painter is not None and not self._closed.is_set():
            answered = name in ANSWERED
            self._painter.answer(name) if answered else self._painter.do(name, value)

    def bundle(self) -> Bundle:
        """The frozen picture of everything that the view has seen."""
        return self._bundle if self._bundle is not None else self.picture.bundle()

    def freeze(self, wait: bool = True) -> View:
        """Replace the live picture by a static one, in every page and in the notebook.

        wait: until it is done; else it is done soon.
        """
        with self._lock:
            if self._closed.is_set():
                return self
            self._closed.set()
            painter = self._painter
        outcome = self.outcome or "ended"
        if painter is not None:
            painter.end(outcome)
            if not wait:
                return self
            self._over.wait(LAST_WORDS)
        elif wait and self.timeline.written is not None:
            self._wait_for_records()
        self.frozen(outcome, self.bundle())
        return self

    def _wait_for_records(self) -> None:
        """Have what began come to its end: as a view does that was live."""
        began = time.monotonic()
        while time.monotonic() < began + (LAST if self.picture.waiting else SETTLE):
            time.sleep(LOOK)
            self.picture.present.collect(self.timeline.clock())


def view_of(timeline: Timeline, *panels: str, replay: bool = False, **options: Any) -> View:
    """A view of a timeline: live while it grows, frozen and of all of it afterwards.

    replay: keep a view of what is over live, so that its scrubber, zoom and clicks work.
    """
    if timeline.grows:
        options.setdefault("ended", lambda: "ended" if timeline.over else "")
        return View(timeline, panels, **options)
    records = timeline.records
    spans = [r for r in records if isinstance(r, Span)]
    events = [r.time for r in records if isinstance(r, Event) and r.run]
    start = min([*(s.start for s in spans), *events], default=0.0)
    end = max([*(s.end for s in spans), *events], default=start)
    given = {
        "title": f"Loaded: {Path(timeline.loaded).name}" if timeline.loaded else "",
        "origin": start,
        "window": max(end - start, 1e-3),
        "until": end,
        **options,
    }
    view = View(timeline, panels, **given)
    return view if replay else view.freeze()


def _widget(live: LiveFigures) -> dict[str, Any]:
    """The part of a MIME bundle that shows a live view."""
    widget = {"version_major": 2, "version_minor": 0, "model_id": live.model_id}
    return {"application/vnd.jupyter.widget-view+json": widget}


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
    renderers.close(timeline)


def widgets_work() -> bool:
    """Whether this process is a Jupyter kernel (plain IPython gets text)."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None
