"""The process that draws: pictures of a lab's timeline, made beside the kernel.

Problem: folding and drawing records takes the interpreter that the user's cells
need; under load a live view cost a quarter of a kernel's calls.  So the kernel
only hands on bytes: records that it has not read on the way here, and
finished messages on the way to pages.

How: the kernel's :mod:`.renderers` starts ``python -m pathways_lab.notebook.view.render_process``
on a lifeline and shares a socket with it.  Ten times a second, while any view is
open, the process asks for new records, folds them once for all views that show the same
part of the record, draws them once for all that show the same panels, and sends one
message per view that has something to show.  It runs at a low priority, and on a
busy machine less often (:mod:`.cpu_budget`): computations go first.  It reads no more
than it folds, and a picture that is late says so.

Rule for maintainers: both ends are this package's, so frames are pickled tuples
``(kind, view, ...)``; no JAX here, to start quickly.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import pickle
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any
from weakref import WeakValueDictionary

from pathways_lab.notebook.draw.bokeh_figures import documented
from pathways_lab.notebook.kernel import line_index
from pathways_lab.notebook.scene.live_fold import LATE, Present, newest
from pathways_lab.notebook.view.answers import answer
from pathways_lab.notebook.view.cpu_budget import PERIOD, Pace
from pathways_lab.notebook.view.machine_load import COUNT, give_way, spare
from pathways_lab.notebook.view.picture import LAST, SETTLE, Picture, Wanted
from pathways_lab.notebook.view.stills import Stills
from pathways_lab.notebook.view.stream import Stream
from pathways_lab.runtime.processes import child_process
from pathways_lab.timeline.entries import Counted
from pathways_lab.timeline.log import Timeline
from pathways_lab.timeline.records import Sample
from pathways_lab.transport import record_encoding

FIRST = 50_000
"""Records that the first picture of the newest ones is made of at most: a second of work."""

STILL, SELDOM = 1.0, 1.0
"""Seconds without a record after which pictures that do not change are drawn more and more seldom,
and how seldom at last: that of an idle lab took a twentieth of a processor for as long as a page
was open."""

GARBAGE = (700, 10, 1_000)
"""When garbage is looked for (see :mod:`gc`).  To look among all records, and all that
was imported, takes as long as many pictures, so that is done when a view has ended."""


class Shown:
    """One view of the kernel's.

    told: what the kernel says of how it ended, or "".  closing: when it ends, or None.
    """

    def __init__(self, picture: Picture) -> None:
        self.picture = picture
        self.stream: Stream | None = None
        self.stills = Stills(picture)
        self.told = ""
        self.closing: float | None = None

    def over(self, now: float) -> bool:
        """Whether it ends at *now* (records' clock)."""
        if self.closing is None:
            return self.picture.over(self.told)
        # A value may be there before the records of what made it.
        settled = now > self.closing - LAST + SETTLE
        return now > self.closing or (settled and not self.picture.waiting)

    def message(self, now: float, whole: bool = False) -> dict[str, Any] | None:
        """The changes as a message, or with *whole* a snapshot."""
        plots, header = self.picture.shown(now)
        if self.stream is None:
            self.stream = Stream(plots, header)
            whole = True
        else:
            found = self.stream.update(plots, header)
            if not whole:
                return found
        return self.stream.snapshot()


class Studio:
    """All views of one kernel's lab.  say: sends a frame.  clock: of the records.

    elsewhere: processor seconds that the kernel has used for them, and nobody has counted.
    idle: share of the last moments in which the kernel computed nothing.
    extra: processor seconds of the present turn that went into first documents, frozen pictures
    and still ones: once for a view, or bounded by themselves, so nothing rests for them.
    """

    def __init__(self, say: Any, clock: Any) -> None:
        self._say = say
        self.timeline = Timeline(clock=clock)
        self.elsewhere, self.idle, self.extra = 0.0, 1.0, 0.0
        self._sent = 0
        self._stirred, self._again, self._rest = clock(), 0.0, PERIOD
        self.views: dict[int, Shown] = {}
        self._presents: WeakValueDictionary[Any, Present] = WeakValueDictionary()

    def hear(self, kind: str, *rest: Any) -> None:
        """A frame from the kernel."""
        if kind == "records":
            if rest[0]:
                self._stir()
            self._remember(*rest)
            return
        self._stir()
        number, *values = rest
        try:
            if kind == "open":
                wanted: Wanted = values[0]
                picture = Picture(self.timeline, wanted, self._present(wanted))
                self.views[number] = Shown(picture)
                self._draw(number, self.views[number])
            elif number in self.views:
                self._about(kind, number, self.views[number], values)
        except Exception as error:
            self._fail(number, error)

    def _stir(self) -> None:
        """Something has come: what it changes may be seen some moments later, and goes on."""
        self._stirred, self._again, self._rest = self.timeline.clock(), 0.0, PERIOD

    def _remember(
        self, batches: list[Counted], missed: int, used: float, idle: float, keep: int,
        cells: dict[str, int],
    ) -> None:  # fmt: skip
        line_index.numbers.update(cells)
        self.timeline.capacity = keep
        self.elsewhere += used
        self.idle = idle
        if missed:
            lost = Sample("dropped", self.timeline.clock(), float(missed))
            self.timeline.extend_later(1, lambda: [lost])
        for entries, records in batches:
            self.timeline.extend_later(
                records, functools.partial(record_encoding.read_packed, entries)
            )

    def _present(self, wanted: Wanted) -> Present:
        """The picture of a view, shared with others that show the same part of the record."""
        key = wanted.window, wanted.origin, wanted.since, wanted.stepwise
        present = self._presents.get(key)
        if present is None:
            if wanted.since is None and wanted.origin is None:
                present = newest(self.timeline, wanted.window, FIRST, LATE, wanted.stepwise)
            else:
                present = Present(self.timeline, *key[:3], late=LATE, stepwise=wanted.stepwise)
            self._presents[key] = present
        return present

    def _about(self, kind: str, number: int, shown: Shown, values: list[Any]) -> None:
        if kind == "do":
            shown.picture.do(*values)
            self._draw(number, shown)
        elif kind == "whole":
            self._draw(number, shown, whole=True)
        elif kind == "answer":
            self._say("message", number, answer(shown.picture, *values))
        elif kind == "told":
            shown.told = values[0]
        elif kind == "close":
            shown.picture.outcome = values[0]
            now = self.timeline.clock()
            shown.closing = now + LAST
            if shown.over(now):
                self._end(number, shown)

    @property
    def late(self) -> float:
        """Seconds by which a picture is behind, at most."""
        presents = (shown.picture.present for shown in self.views.values())
        folded = min((each.folded for each in presents if each.behind), default=math.inf)
        return max(0.0, self.timeline.clock() - folded)

    def tick(self, most: int) -> tuple[float, float]:
        """Draw what is new in every view: so many records more, at most.

        Returns the processor seconds of folding and drawing; see *extra*.
        """
        self.extra = 0.0
        now, begun = self.timeline.clock(), time.thread_time()
        if now < self._again and not self.late:
            return 0.0, 0.0
        sent = self._sent
        for present in {shown.picture.present for shown in self.views.values()}:
            present.collect(now, most)
        folded = time.thread_time()
        for number, shown in list(self.views.items()):
            try:
                self._draw(number, shown)
                if shown.over(now):
                    self._end(number, shown)
                else:
                    self._keep(number, shown)
            except Exception as error:
                self._fail(number, error)
        if self._sent == sent and now > self._stirred + STILL:
            self._rest = min(2 * self._rest, SELDOM)
            self._again = now + self._rest
        return folded - begun, time.thread_time() - folded - self.extra

    def _draw(self, number: int, shown: Shown, whole: bool = False) -> None:
        first = shown.stream is None
        message = shown.message(self.timeline.clock(), whole)
        if message is not None:
            self._sent += 1
            begun = time.thread_time()
            message = documented(message)
            if first:  # later ones, of runs that look different, are looking too
                self.extra += time.thread_time() - begun
            self._say("message", number, message)

    def _keep(self, number: int, shown: Shown) -> None:
        begun = time.thread_time()
        still = shown.stills.take(self.timeline.clock())
        if still is not None:
            self._say("still", number, still)
            self.extra += time.thread_time() - begun

    def _end(self, number: int, shown: Shown) -> None:
        del self.views[number]
        begun = time.thread_time()
        self._say("frozen", number, shown.picture.outcome, shown.picture.bundle())
        gc.collect()
        self.extra += time.thread_time() - begun

    def _fail(self, number: int, error: Exception) -> None:
        """A view that cannot be drawn ends, and others go on."""
        traceback.print_exc()
        self.views.pop(number, None)
        self._say("failed", number, f"{type(error).__name__}: {error}")


def serve(connection: Connection, offset: float) -> None:
    """Until the kernel is gone.  offset: seconds from this machine's clock to the records'."""

    def say(*frame: Any) -> None:
        connection.send_bytes(pickle.dumps(frame, protocol=5))

    studio = Studio(say, lambda: time.monotonic() + offset)
    pace = Pace(time.monotonic(), COUNT)
    asked = False
    due = asked_at = 0.0
    while True:
        wait = max(0.0, due - time.monotonic()) if studio.views else None
        if asked or connection.poll(wait):
            begun = time.thread_time()
            frame = pickle.loads(connection.recv_bytes())
            studio.hear(*frame)
            if frame[0] == "open":
                # The first picture comes as soon as it can; the next ones give way.
                due = time.monotonic()
                give_way()
            if asked and frame[0] == "records":
                asked = False
                pace.drew(*studio.tick(pace.part))
                pace.spent(time.thread_time() - begun - studio.extra, studio.elsewhere)
                studio.elsewhere = 0.0
                due = asked_at + PERIOD
        elif studio.views:
            now = time.monotonic()
            rest = pace.rest(now, spare(), studio.idle, studio.late)
            due = now + rest
            if not rest:
                say("since", 0)
                asked, asked_at = True, now


def main() -> None:
    """The entry point of ``python -m``."""
    child_process.begin()
    while "socket" not in (configuration := child_process.configuration()):
        pass  # it was started before anybody looked
    connection = Connection(configuration["socket"])
    gc.freeze()
    gc.set_threshold(*GARBAGE)
    with contextlib.suppress(EOFError, OSError):
        serve(connection, configuration["offset"])
    child_process.leave()


if __name__ == "__main__":
    main()
