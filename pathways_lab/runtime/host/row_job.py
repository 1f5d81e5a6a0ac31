"""Runs a segment of consecutive gangs as a few device-queue jobs.

Problem: between two small gangs on the same devices there is nothing to decide,
and to be handed from thread to thread costs more than to be launched.

How: the device queue launches them in one loop, and stores their results in a list.
The loop ends a *piece* when gangs take longer than launching them, so that ends
are seen, results used and runs stopped as promptly as with gangs that are
launched one by one; the device queue goes on with the rest of the row at once.

Where other hosts launch the same gangs, each gang is launched, with zeros for lost
inputs, as it would be by itself.  Else a gang that lacks an input is not launched.

Rule for maintainers: no gang of a row over several hosts may be left out while
its devices are one (rule 4); the order is that of the parts.

Paper: section 4.5 (parallel asynchronous dispatch).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.executor.actions import Key, LaunchRow
from pathways_lab.runtime import arrays
from pathways_lab.runtime.devices import Place
from pathways_lab.runtime.host.compiler import Executable
from pathways_lab.runtime.host.device_queues import Times
from pathways_lab.runtime.host.gang_job import doom, failure_in, gathered, missing, outwait

UNSEEN = 3
"""So many gangs of one piece at most are launched and not over.

Times :data:`.host.device_queues.IN_FLIGHT` it stays below what one CPU client takes."""

SECONDS = 0.005
"""After so long a piece ends in any case."""
AWAITED_SECONDS = 0.001
"""The same where somebody waits for what one of its parts has computed."""

_LOST = object()


class Ends(NamedTuple):
    """Parts that are over, in their order; seconds on this process's monotonic clock.

    first: the first of them.  failures: by part, its own.
    """

    first: int
    called: list[float]
    returned: list[float]
    starts: list[float]
    ends: list[float]
    failures: dict[int, Failure]


class Course:
    """A row that was handed to its lane.

    explain(failure): what a gang failed of, where other hosts may be the cause; may wait.
    called: when its parts were, as far as they were.
    over, announced: so many parts are over; were said to be launched.
    doomed: why the rest shall not be launched, or was ended: its devices are formed again.
    """

    def __init__(
        self,
        launch: LaunchRow,
        place: Place,
        executables: Mapping[str, Executable],
        host: str,
        on_over: Callable[[Piece, Times], None],
        explain: Callable[[Failure], Failure],
        handed: float,
    ) -> None:
        self.launch = launch
        self.place = place
        self.host = host
        self.on_over = on_over
        self.explain = explain
        self.handed = handed
        self.parts = launch.stretch.parts
        self.called: list[float] = []
        self.over = 0
        self.announced = 0
        self.doomed: Failure | None = None
        self.executables = [executables.get(part.call.function) for part in self.parts]
        self.cells: list[Any] = [None] * launch.stretch.cells
        self.lossy = False
        self.unread: dict[int, Exception] = {}

    @property
    def key(self) -> Key:
        """The run, and the index of its first part."""
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
        """Whether a part has to do without an input."""
        return self.lossy and any(self.cells[cell] is _LOST for cell in self.parts[at].inputs)

    def news(self, at: int) -> Exception | None:
        """Why an input of a part could not be read."""
        return next((self.unread[c] for c in self.parts[at].inputs if c in self.unread), None)

    def substitutes(self, at: int) -> list[Any]:
        """The inputs of a part, zeros in place of those that are lost."""
        part, values = self.parts[at], self.launch.plan.values
        return [
            arrays.zeros(values[value], self.place)
            if self.cells[cell] is _LOST
            else self.cells[cell]
            for cell, value in zip(part.inputs, part.call.inputs, strict=True)
        ]

    def failure(self, at: int, error: BaseException) -> Failure:
        """The failure of a part."""
        call, plan = self.parts[at].call, self.launch.plan
        if self.doomed is not None:
            return doom(self.doomed, plan, call, self.host)
        return self.explain(failure_in(error, plan, call, self.host))

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
        self._failures: dict[int, Failure] = {}

    @property
    def doomed(self) -> Failure | None:
        return self.course.doomed

    def start(self) -> Piece:
        """Launch as many parts as are over nearly at once, at least one."""
        course, at = self.course, self.first
        if not at:
            course.fill()
        cells, outputs, clock = course.cells, course.launch.outputs, time.monotonic
        receipts, ends, returned = self._receipts, self._ends, self._returned
        seen, now = 0, clock()
        until, soon = now + SECONDS, now + AWAITED_SECONDS
        for part, executable in zip(course.parts[at:], course.executables[at:], strict=True):
            course.called.append(now)
            receipt = None
            if course.lossy or course.doomed is not None or executable is None:
                receipt = self._special(at, executable)
            else:
                try:
                    results, receipt = executable([cells[cell] for cell in part.inputs])
                    for cell, result in zip(part.outputs, results, strict=True):
                        cells[cell] = result
                    for position, value in part.exports:
                        outputs[value].payload = results[position]
                        if outputs[value].awaited:
                            until = soon
                except Exception as error:
                    self._errors[at] = error
                    course.lose(at)
            for cell in part.clears:
                cells[cell] = None
            receipts.append(receipt)
            now = clock()
            returned.append(now)
            at += 1
            while seen < len(receipts) and _is_ready(receipts[seen]):
                ends.append(now)
                seen += 1
            if now > until or len(receipts) - seen >= UNSEEN:
                break
        return self

    def _special(self, at: int, executable: Executable | None) -> Any:
        """Launch a part of which something may be wrong, or leave it out; its receipt."""
        course, part, receipt = self.course, self.course.parts[at], None
        lacks, error = course.lacks(at), course.news(at)
        try:
            if course.doomed is not None:
                raise PathwaysError(course.doomed)
            if executable is None:
                raise missing(part.call, course.host)
            if not lacks or course.launch.together:
                results, receipt = executable(course.substitutes(at))
                if not lacks:
                    for cell, result in zip(part.outputs, results, strict=True):
                        course.cells[cell] = result
                    for position, value in part.exports:
                        course.launch.outputs[value].payload = results[position]
        except Exception as raised:
            error = error or raised
        if error is not None:
            self._errors[at] = error
        if lacks or error is not None:
            course.lose(at)
        return receipt

    def rest(self) -> Piece | None:
        """The rest of the row, which was not launched yet."""
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
        receipt = self._receipts[at]
        try:
            if receipt is not None:
                if self.doomed is not None:
                    outwait(receipt, lambda: self.doomed)
                receipt.block_until_ready()
        except Exception as error:
            self._errors.setdefault(self.first + at, error)

    def over(self, times: Times, error: BaseException | None) -> None:
        if error is not None:
            raise error  # a bug: what goes wrong with a part is noted with that part
        self._receipts.clear()
        self._failures = {at: self.course.failure(at, e) for at, e in sorted(self._errors.items())}
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

    def ends(self, times: Times) -> Ends:
        """Its parts, once it is over."""
        called = self.course.called[self.first : self.first + len(self._returned)]
        starts, ends, before = [], [], times.start
        for own, seen in zip(called, self._ends, strict=True):
            # A gang before it may have been seen to end later than this one.
            start = own if own > before else before
            before = seen if seen > start else start
            starts.append(start)
            ends.append(before)
        return Ends(self.first, called, self._returned, starts, ends, self._failures)


def _is_ready(receipt: Any) -> bool:
    return receipt is None or bool(receipt.is_ready())
