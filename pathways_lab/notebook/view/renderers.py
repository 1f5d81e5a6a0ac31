"""Renderers make a view's messages: in a process beside the kernel, or in a thread of it.

Problem: pictures of a lab must cost the kernel nothing, and those of a timeline
that exists only in the kernel (a simulation, a file, a test) have to be made there.

How: a timeline that has its records as bytes (``timeline.written``) is drawn, while it grows, by
one :class:`Studio` for all of its views; any other by a :class:`Thread` per view.  Both are
told what a person wants, and tell the :class:`Screen` that opened them.

Rule for maintainers: nothing here waits in the caller's thread; threads print nothing
and raise nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import queue
import socket
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from pathways_lab.notebook.kernel import line_index
from pathways_lab.notebook.view import answers
from pathways_lab.notebook.view.cpu_budget import LATE, PERIOD, Pace
from pathways_lab.notebook.view.frozen import Bundle
from pathways_lab.notebook.view.machine_load import Idle
from pathways_lab.notebook.view.picture import FOLD, Picture, Wanted
from pathways_lab.notebook.view.stills import Still, Stills
from pathways_lab.notebook.view.stream import Message, Stream
from pathways_lab.runtime.processes import child_process
from pathways_lab.timeline.log import Timeline
from pathways_lab.transport.addresses import private_folder, remove_folder

SHARE, CATCHING_UP = 6, 2
"""A thread of the kernel rests at least this many times as long as an update took, and as a picture
that is behind."""

POLL = 0.2
"""Seconds between two looks whether what a view shows has ended."""

MODULE = "pathways_lab.notebook.view.render_process"


class Screen(Protocol):
    """The screen that shows a renderer's messages.  Any thread."""

    def message(self, message: Message) -> None:
        """Something for the pages."""

    def ended(self) -> str:
        """How what is shown has ended, as far as the kernel knows, or ""."""

    def still(self, still: Still) -> None:
        """A picture of now, for the notebook to keep."""

    def frozen(self, outcome: str, bundle: Bundle) -> None:
        """It is over, and this is left.  Nothing comes after it."""

    def failed(self, why: str) -> None:
        """It cannot be drawn any more.  Nothing comes after it."""


class Painter(Protocol):
    """Makes the messages of one view."""

    def do(self, name: str, value: Any = None) -> None:
        """Do a person's wish: see :meth:`.picture.Picture.do`."""

    def whole(self) -> None:
        """A snapshot is wanted."""

    def answer(self, name: str) -> None:
        """One of :data:`.answers.ANSWERED` is wanted."""

    def end(self, outcome: str) -> None:
        """It shall freeze."""


def painter_of(timeline: Timeline, wanted: Wanted, screen: Screen) -> Painter:
    """The renderer of a view of *timeline*."""
    if timeline.written is None or timeline.over:
        return Thread(timeline, wanted, screen)
    studio = _studios.get(timeline)
    if studio is None or not studio.alive:
        studio = _studios[timeline] = Studio(timeline)
    return studio.open(wanted, screen)


class Thread:
    """Draws in a thread of the kernel."""

    def __init__(self, timeline: Timeline, wanted: Wanted, screen: Screen) -> None:
        self._timeline, self._screen = timeline, screen
        self.picture = Picture(timeline, wanted)
        self._stream = Stream(*self.picture.look(timeline.clock()))
        self._stills = Stills(self.picture)
        self._lock = threading.RLock()
        self._over = threading.Event()
        self.whole()
        threading.Thread(target=self._run, name="pathways view", daemon=True).start()

    def do(self, name: str, value: Any = None) -> None:
        with self._lock:
            self.picture.do(name, value)
            self.picture.fold(self._timeline.clock(), FOLD)
            self._draw()

    def whole(self) -> None:
        with self._lock:
            self._say(self._stream.snapshot())

    def answer(self, name: str) -> None:
        with self._lock:
            self._screen.message(answers.answer(self.picture, name))

    def end(self, outcome: str) -> None:
        with self._lock:
            if not self._over.is_set():
                self._over.set()
                self.picture.outcome = outcome
                self._screen.frozen(outcome, self.picture.bundle())

    def _draw(self) -> None:
        if self._over.is_set():
            return
        message = self._stream.update(*self.picture.shown(self._timeline.clock()))
        if message is not None:
            self._say(message)

    def _say(self, message: Message) -> None:
        from pathways_lab.notebook.draw.bokeh_figures import (
            documented,  # whoever opens a view waits for Bokeh
        )

        self._screen.message(documented(message))

    def _run(self) -> None:
        pause, pace = PERIOD, Pace(time.monotonic(), 1)
        while not self._over.wait(pause):
            try:
                with self._lock:
                    begun, present = time.thread_time(), self.picture.present
                    self.picture.fold(self._timeline.clock(), pace.part)
                    folded = time.thread_time()
                    self._draw()
                    drawn = time.thread_time()
                    pace.drew(folded - begun, drawn - folded)
                    late = present.behind and self._timeline.clock() - present.folded > LATE
                    pause = max(PERIOD, (CATCHING_UP if late else SHARE) * (drawn - begun))
                    if self.picture.over(self._screen.ended()):
                        self.end(self.picture.outcome)
                    elif still := self._stills.take(self._timeline.clock()):
                        self._screen.still(still)
            except Exception as error:
                self._over.set()
                self._screen.failed(f"{type(error).__name__}: {error}")


class Studio:
    """The process that draws all views of one timeline, and this end of its socket.

    The time of its threads here, in the user's interpreter, is a part of the cost of looking.
    """

    def __init__(self, timeline: Timeline) -> None:
        assert timeline.written is not None
        self._written = timeline.written
        self._sent = 0
        self._named: dict[str, int] = {}
        self._used = 0.0  # by both threads; that a sum is lost now and then does not matter
        self._idle = Idle()
        self._numbers = itertools.count(1)
        self._screens: dict[int, Screen] = {}
        self._told: set[int] = set()
        self._frames: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._child, self._connection, self._folder, there = _process()
        self._child.tell({"socket": there, "offset": timeline.clock() - time.monotonic()})
        self.alive = True
        threading.Thread(target=self._write, name="pathways studio out", daemon=True).start()
        threading.Thread(target=self._read, name="pathways studio in", daemon=True).start()

    def open(self, wanted: Wanted, screen: Screen) -> Seat:
        """Begin a view."""
        number = next(self._numbers)
        self._screens[number] = screen
        self._frames.put(("records", 0))
        self._frames.put(("open", number, wanted))
        return Seat(self, number)

    def tell(self, *frame: Any) -> None:
        """Send a frame, when its turn comes."""
        self._frames.put(frame)

    def close(self) -> None:
        """End the process; views that are open fail."""
        self._frames.put(None)
        self._child.let_go()

    def _write(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while (frame := self._frames.get()) is not None:
                begun = time.thread_time()
                if frame[0] == "records":
                    entries, sent, missed = self._written.since(self._sent)
                    # Records that were pushed out before anybody looked are not missed.
                    missed, self._sent = missed if self._sent else 0, sent
                    used, self._used = self._used, 0.0
                    keep, cells = self._written.capacity, line_index.numbers.copy()
                    named, self._named = dict(cells.items() - self._named.items()), cells
                    frame = ("records", entries, missed, used, self._idle.share(), keep, named)
                self._connection.send_bytes(pickle.dumps(frame, protocol=5))
                self._used += time.thread_time() - begun

    def _read(self) -> None:
        looked = 0.0
        with contextlib.suppress(EOFError, OSError):
            while True:
                if self._connection.poll(POLL if self._screens else None):
                    begun = time.thread_time()
                    self._hear(*pickle.loads(self._connection.recv_bytes()))
                    self._used += time.thread_time() - begun
                if time.monotonic() - looked > POLL:
                    looked = time.monotonic()
                    self._look()
        self.alive = False
        self._frames.put(None)
        for number in tuple(self._screens):
            self._screens.pop(number).failed("the process that draws it has ended")
        self._connection.close()
        self._child.end()
        remove_folder(self._folder)

    def _look(self) -> None:
        """Pass on how views have ended, as far as the kernel knows."""
        for number, screen in tuple(self._screens.items()):
            outcome = screen.ended() if number not in self._told else ""
            if outcome:
                self._told.add(number)
                self.tell("told", number, outcome)

    def _hear(self, kind: str, number: int, *values: Any) -> None:
        if kind == "since":
            self._frames.put(("records", 0))
            return
        screen = self._screens.get(number)
        if screen is None:
            return
        if kind in ("message", "still"):
            getattr(screen, kind)(*values)
            return
        del self._screens[number]
        self._told.discard(number)
        if kind == "frozen":
            screen.frozen(*values)
        else:
            screen.failed(*values)


class Seat:
    """One view of a :class:`Studio`."""

    def __init__(self, studio: Studio, number: int) -> None:
        self._studio, self._number = studio, number

    def do(self, name: str, value: Any = None) -> None:
        self._studio.tell("do", self._number, name, value)

    def whole(self) -> None:
        self._studio.tell("whole", self._number)

    def answer(self, name: str) -> None:
        self._studio.tell("answer", self._number, name)

    def end(self, outcome: str) -> None:
        self._studio.tell("records", 0)  # on a busy machine it is seconds behind
        self._studio.tell("close", self._number, outcome)


_Process = tuple[child_process.Child, Connection, Path, int]
"""A process that draws, this end of its socket, its folder, and the number of its own end."""

_spare: queue.SimpleQueue[_Process] = queue.SimpleQueue()


def prepare() -> None:
    """Start a process for the first view now: it takes a second, and people look at once."""
    if _spare.empty():
        _spare.put(_spawn())


def _process() -> _Process:
    with contextlib.suppress(queue.Empty):
        spare = _spare.get_nowait()
        if spare[0].alive:
            return spare
    return _spawn()


def _spawn() -> _Process:
    folder = private_folder()
    here, there = socket.socketpair()
    with there:
        number = there.fileno()
        remove = {child_process.REMOVE: [str(folder)]}
        child = child_process.spawn(
            MODULE, remove, name="studio", folder=folder, pass_fds=(number,)
        )
    return child, Connection(here.detach()), folder, number


_studios: WeakKeyDictionary[Timeline, Studio] = WeakKeyDictionary()


def close(timeline: Timeline) -> None:
    """End the process that draws a timeline, if there is one."""
    studio = _studios.pop(timeline, None)
    if studio is not None:
        studio.close()
