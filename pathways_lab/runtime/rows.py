"""The gangs of a straight stretch between the launcher and their lane, as few jobs.

Problem: between two small gangs on the same devices there is nothing to decide,
and to be handed from thread to thread costs more than to be launched.

How: the lane launches them in one loop, and stores what they compute in a list.
The loop ends a *piece* when gangs take longer than launching them, so that ends
are seen, results used and runs stopped as promptly as with gangs that are
launched one by one; the lane goes on with the rest of the row at once.

Rule for maintainers: what is lost is never launched: all devices of a stretch
are here, nobody waits for its gangs elsewhere (rule 4).

Paper: section 4.5 (parallel asynchronous dispatch).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from pathways_lab.core.errors import Failure
from pathways_lab.runtime.actions import Key, LaunchRow
from pathways_lab.runtime.devices import Place
from pathways_lab.runtime.functions import Executable
from pathways_lab.runtime.gangs import failure_in, gathered, missing
from pathways_lab.runtime.lanes import Times

UNSEEN = 3
"""So many gangs of one piece at most are launched and not over.

Times :data:`pathways_lab.runtime.lanes.IN_FLIGHT` it stays below what one CPU client takes."""

SECONDS = 0.001
"""After so long a piece ends in any case."""

_LOST = object()


class End(NamedTuple):
    """A part that is over; seconds on this process's monotonic clock."""

    at: int
    called: float
    returned: float
    start: float
    end: float
    failure: Failure | None


class Course:
    """A row that was handed to its lane.

    called: when its parts were, as far as they were.
    over, announced: so many parts are over; were said to be launched.
    """

    def __init__(
        self,
        launch: LaunchRow,
        place: Place,
        executables: Mapping[str, Executable],
        host: str,
        on_over: Callable[[Piece, Times], None],
        handed: float,
    ) -> None:
        self.launch = launch
        self.place = place
        self.host = host
        self.on_over = on_over
        self.handed = handed
        self.parts = launch.stretch.parts
        self.called: list[float] = []
        self.over = 0
        self.announced = 0
        self.executables = [executables.get(part.call.function) for part in self.parts]
        self.cells: list[Any] = [None] * launch.stretch.cells
        self.lossy = False
        self.unread: dict[int, Exception] = {}

    @property
    def key(self) -> Key:
        """Of its first part."""
        return self.launch.run, self.parts[0].index

    def fill(self) -> None:
        """Take what comes from outside, in the lane's thread."""
        for cell, slot in enumerate(self.launch.inputs):
            array = None
            try:
                if cell not in self.launch.lost:
                    array = gathered(slot, self.place)
            except Exception as error:
                self.unread[cell] = error
            self.cells[cell] = array
            if array is None:
                self.cells[cell], self.lossy = _LOST, True

    def lacks(self, at: int) -> bool:
        """Whether a part cannot be launched.  Raises why when that is news."""
        part = self.parts[at]
        for cell in part.inputs:
            if self.cells[cell] is _LOST:
                if cell in self.unread:
                    raise self.unread[cell]
                return True
        return False

    def lose(self, at: int) -> None:
        """A part has no results."""
        self.lossy = True
        for cell in self.parts[at].outputs:
            self.cells[cell] = _LOST


class Piece:
    """Some parts of a row, as a lane's job.  first: the first of them."""

    def __init__(self, course: Course, first: int) -> None:
        self.course = course
        self.devices = course.place.locals
        self.first = first
        self._returned: list[float] = []
        self._ends: list[float] = []
        self._receipts: list[Any] = []
        self._errors: dict[int, BaseException] = {}

    def start(self) -> Piece:
        """Launch as many parts as are over nearly at once, at least one."""
        course, at = self.course, self.first
        if not at:
            course.fill()
        cells, outputs, clock = course.cells, course.launch.outputs, time.monotonic
        receipts, ends = self._receipts, self._ends
        seen, until = 0, clock() + SECONDS
        for part, executable in zip(course.parts[at:], course.executables[at:], strict=True):
            course.called.append(clock())
            receipt = None
            try:
                if executable is None:
                    raise missing(part.call, course.host)
                if course.lossy and course.lacks(at):
                    course.lose(at)
                else:
                    results, receipt = executable([cells[cell] for cell in part.inputs])
                    for cell, result in zip(part.outputs, results, strict=True):
                        cells[cell] = result
                    for position, value in part.exports:
                        outputs[value].payload = results[position]
            except Exception as error:
                self._errors[at] = error
                course.lose(at)
            for cell in part.clears:
                cells[cell] = None
            receipts.append(receipt)
            now = clock()
            self._returned.append(now)
            at += 1
            while seen < len(receipts) and _is_ready(receipts[seen]):
                ends.append(now)
                seen += 1
            if now > until or len(receipts) - seen >= UNSEEN:
                break
        return self

    def rest(self) -> Piece | None:
        """What of the row was not launched yet."""
        launched = self.first + len(self._returned)
        return Piece(self.course, launched) if launched < len(self.course.parts) else None

    def ready(self, receipt: Any) -> bool:
        return all(_is_ready(each) for each in self._receipts[len(self._ends) :])

    def wait(self, receipt: Any) -> None:
        seen = len(self._ends)
        try:
            jax.block_until_ready([each for each in self._receipts[:seen] if each is not None])
        except Exception:
            for at in range(seen):
                self._wait_one(at)
        for at in range(seen, len(self._receipts)):
            self._wait_one(at)
            self._ends.append(time.monotonic())

    def _wait_one(self, at: int) -> None:
        try:
            if self._receipts[at] is not None:
                self._receipts[at].block_until_ready()
        except Exception as error:
            self._errors[self.first + at] = error

    def over(self, times: Times, error: BaseException | None) -> None:
        if error is not None:
            raise error  # a bug: what goes wrong with a part is noted with that part
        self._receipts.clear()
        self.course.on_over(self, times)

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for the end of one of its parts, as in ``Launch.awaited``."""
        launch, parts = self.course.launch, self.course.parts
        until = self.first + len(self._ends)
        if until == len(parts) and (launch.last or launch.followers):
            return True
        exports = (value for part in parts[self.first : until] for _, value in part.exports)
        return any(launch.outputs[value].awaited for value in exports)

    def ends(self, times: Times) -> Iterator[End]:
        """Its parts, once it is over."""
        course, before = self.course, times.start
        stamps = zip(self._returned, self._ends, strict=True)
        for at, (returned, seen) in enumerate(stamps, self.first):
            called = course.called[at]
            # A gang before it may have been seen to end later than this one.
            start = max(called, before)
            end = max(seen, start)
            error = self._errors.get(at)
            failure = None
            if error is not None:
                part = course.parts[at]
                failure = failure_in(error, course.launch.plan, part.call, course.host)
            yield End(at, called, returned, start, end, failure)
            before = end


def _is_ready(receipt: Any) -> bool:
    return receipt is None or bool(receipt.is_ready())
