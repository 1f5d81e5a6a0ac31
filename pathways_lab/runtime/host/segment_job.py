"""Runs a segment of consecutive gangs as a few device-queue jobs.

Problem: between two small gangs on the same devices there is nothing to decide,
and to be handed from thread to thread costs more than to be launched.

How: the device queue launches them in one loop, and stores their results in a list.
The loop ends a *piece* when gangs take longer than launching them, so that ends
are seen, results used and runs stopped as promptly as with gangs that are
launched one by one; the device queue goes on with the rest of the segment at once.

Where other hosts launch the same gangs, each gang is launched, with zeros for lost
inputs.  Else a gang that lacks an input is not launched.  A gang with something special
(callbacks, a first meeting) is a segment by itself, and so is a whole loop.

Rule for maintainers: a job touches payloads only between its hand-over to the device
queue and its end; until then the launcher keeps its slots alive.  No gang of a segment over
several hosts may be left out while its devices are one (rule 4); the order is that of
the parts.

Paper: section 4.4, section 4.5 (parallel asynchronous dispatch).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pathways_lab.core.diagnosis.stall import LAUNCHED, QUEUED, WAITING, Seen
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.program.bundles import arrays_of
from pathways_lab.core.program.program import Value
from pathways_lab.executor.local_array import Slot
from pathways_lab.executor.steps import Key, Segment
from pathways_lab.runtime import arrays, nan_checks
from pathways_lab.runtime.devices import Place
from pathways_lab.runtime.host.compiler import Executable
from pathways_lab.runtime.host.gang_failures import CallbackError, doom, failure_in, missing
from pathways_lab.runtime.host.host_loop import Lap, Laps
from pathways_lab.runtime.host.local_slices import Tenants

_LEFT_BEHIND = 1.0
"""Seconds after which a gang that was ended, and does not end, is not waited for any more."""
_LOOK = 0.002
"""Seconds between two looks at a gang that may never end."""
UNSEEN = 3
"""So many gangs of one piece at most are launched and not over.

Times :data:`.host.device_queues.IN_FLIGHT` it stays below what one CPU client takes."""

SECONDS = 0.005
"""After so long a piece ends in any case."""
AWAITED_SECONDS = 0.001
"""The same where somebody waits for what one of its parts has computed."""

_LOST = object()


@dataclass(slots=True)
class Work:
    """When this host received a grant, and prepared all its gangs, on its monotonic clock.

    told: the timeline knows.  free: the order is off.
    """

    received: float
    began: float
    ended: float = 0.0
    told: bool = False
    free: bool = False


class Ends(NamedTuple):
    """Gangs that are over, in their order; seconds on this process's monotonic clock.

    first: the first of them.  failures: by position in the segment, their own.
    """

    first: int
    called: list[float]
    returned: list[float]
    starts: list[float]
    ends: list[float]
    failures: dict[int, Failure]


class SegmentJob:
    """A segment that was handed to its device queue.

    on_over(piece): called in the queue's threads.
    tenants: know other hosts of its slice, which may be the cause of a failure.
    handed: monotonic seconds when its inputs and its turn had come.
    called: when its gangs were, as far as they were.
    over, announced: so many gangs are over; were said to be launched.
    laps: of a loop, once it is over.
    doomed: why the rest shall not be launched, or was ended: its devices are formed again.
    """

    def __init__(
        self,
        segment: Segment,
        place: Place,
        executables: Mapping[str, Executable],
        host: str,
        on_over: Callable[[Piece], None],
        tenants: Tenants,
        handed: float,
    ) -> None:
        self.segment = segment
        self.place = place
        self.host = host
        self.on_over = on_over
        self.handed = handed
        self.parts = segment.stretch.parts
        self.called: list[float] = []
        self.over = 0
        self.announced = 0
        self.laps: tuple[Lap, ...] = ()
        self.doomed: Failure | None = None
        self.executables = [executables.get(part.call.function) for part in self.parts]
        self.cells: list[Any] = [None] * len(segment.stretch.sizes)
        self.lossy = False
        self.unread: dict[int, Exception] = {}
        self.free = isinstance(segment.stamp, Work) and segment.stamp.free
        only = self.executables[0] if len(self.parts) == 1 else None
        alone = only is not None and only.alone
        self.special = alone or segment.first
        self._tenants = tenants

    # --- in the queue's threads -----------------------------------------------------------

    def fill(self) -> None:
        """Take what comes from outside, for ever if it is given away."""
        for cell, slot in enumerate(self.segment.inputs):
            array = None
            try:
                if cell not in self.segment.lost:
                    array = taken(slot, self.place)
            except Exception as error:
                self.unread[cell] = error
            self.cells[cell] = array
            if array is None:
                self.cells[cell], self.lossy = _LOST, True
        for cell in self.segment.stretch.gives:
            if cell not in self.segment.copies:
                self.segment.inputs[cell].payload = None

    def lacks(self, at: int) -> bool:
        """Whether a part has to do without an input."""
        return self.lossy and any(self.cells[cell] is _LOST for cell in self.parts[at].inputs)

    def news(self, at: int) -> Exception | None:
        """Why an input of a part could not be read."""
        return next((self.unread[c] for c in self.parts[at].inputs if c in self.unread), None)

    def arguments(self, at: int) -> list[Any]:
        """The inputs of a part: zeros for those that are lost, copies of those to be kept."""
        part, values, place = self.parts[at], self.segment.plan.values, self.place
        found = []
        for cell, value in zip(part.inputs, part.call.inputs, strict=True):
            array = self.cells[cell]
            if array is _LOST:
                array = arrays.zeros(values[value], place)
            if cell in self.segment.copies and cell in part.gives:
                array = arrays.copied(values[value], array, place)
            found.append(array)
        return found

    def made(self, at: int, results: list[Any]) -> list[Any]:
        """The results of a part, those of a bundle together."""
        if not self.segment.stretch.bundled:
            return results
        values = self.segment.plan.values
        return arrays.gathered(results, [values[v] for v in self.parts[at].call.outputs])

    def prepare(self, at: int, executable: Executable) -> None:
        """Before the launch of a special gang."""
        if executable.calls_python:
            executable.gangs.key, executable.gangs.errors = self.segment.key, []
        if self.segment.first:
            self._tenants.meet(self.place, self.parts[at].call)

    def look(self, at: int, receipt: Any) -> None:
        """Read the receipt of a special gang.  Raises the error that it tells of."""
        executable, call = self.executables[at], self.parts[at].call
        values = self.segment.plan.values
        assert executable is not None
        if isinstance(receipt, Laps):
            self.laps = receipt.laps
        if executable.calls_python and executable.gangs.errors:
            raise CallbackError(*executable.gangs.errors[0])
        if executable.check is not None and not self.segment.lost:
            inputs, outputs = (
                arrays_of([values[v] for v in many]) for many in (call.inputs, call.outputs)
            )
            nan_checks.complain(receipt, call, inputs, outputs, self.place.binding)

    def failure(self, at: int, error: BaseException) -> Failure:
        """The failure of a part."""
        call, plan = self.parts[at].call, self.segment.plan
        if self.doomed is not None:
            return doom(self.doomed, plan, call, self.host)
        return self._tenants.explained(self.place, failure_in(error, plan, call, self.host))

    def lose(self, at: int) -> None:
        """A part has no results."""
        self.lossy = True
        for cell in self.parts[at].outputs:
            self.cells[cell] = _LOST


class Piece:
    """Some gangs of a segment, as a device queue's job.  first: the first of them."""

    def __init__(self, job: SegmentJob, first: int) -> None:
        self.job = job
        self.devices = job.place.locals
        self.first = first
        self._returned: list[float] = []
        self._ends: list[float] = []
        self._receipts: list[Any] = []
        self._errors: dict[int, BaseException] = {}
        self._failures: dict[int, Failure] = {}
        self._begun = 0.0

    @property
    def doomed(self) -> Failure | None:
        return self.job.doomed

    def start(self) -> None:
        """Launch as many parts as are over nearly at once, at least one."""
        job, at = self.job, self.first
        if not at:
            job.fill()
        cells, outputs, clock = job.cells, job.segment.outputs, time.monotonic
        receipts, ends, returned = self._receipts, self._ends, self._returned
        bundled = job.segment.stretch.bundled
        special = job.special or bool(job.segment.copies)
        seen, now = 0, clock()
        until, soon = now + SECONDS, now + AWAITED_SECONDS
        for part, executable in zip(job.parts[at:], job.executables[at:], strict=True):
            job.called.append(now)
            receipt = None
            doomed = job.doomed is not None
            if special or job.lossy or doomed or executable is None:
                receipt = self._special(at, executable)
            else:
                try:
                    given = [cells[cell] for cell in part.inputs]
                    if bundled:
                        given = arrays.spread(given)
                    results, receipt = executable(given)
                    if bundled:
                        results = job.made(at, results)
                    for cell, result in zip(part.outputs, results, strict=True):
                        cells[cell] = result
                    for position, value in part.exports:
                        outputs[value].payload = results[position]
                        if outputs[value].awaited:
                            until = soon
                except Exception as error:
                    self._errors[at] = error
                    job.lose(at)
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

    def _special(self, at: int, executable: Executable | None) -> Any:
        """Launch a part of which something may be wrong, or leave it out; its receipt."""
        job, part, receipt = self.job, self.job.parts[at], None
        lacks, error = job.lacks(at), job.news(at)
        try:
            if job.doomed is not None:
                raise PathwaysError(job.doomed)
            if executable is None:
                raise missing(part.call, job.host)
            if not lacks or job.segment.together:
                job.prepare(at, executable)
                results, receipt = executable(arrays.spread(job.arguments(at)))
                if not lacks:
                    results = job.made(at, results)
                    for cell, result in zip(part.outputs, results, strict=True):
                        job.cells[cell] = result
                    for position, value in part.exports:
                        job.segment.outputs[value].payload = results[position]
        except Exception as raised:
            error = error or raised
        if error is not None:
            self._errors[at] = error
        if lacks or error is not None:
            job.lose(at)
        return receipt

    def rest(self) -> Piece | None:
        """The rest of the segment, which was not launched yet."""
        launched = self.first + len(self._returned)
        return Piece(self.job, launched) if launched < len(self.job.parts) else None

    def ready(self) -> bool:
        return all(_is_ready(each) for each in self._receipts[len(self._ends) :])

    def wait(self) -> None:
        seen = len(self._ends)
        known = 0 if self.job.special else seen
        try:
            for each in self._receipts[:known]:
                if each is not None:
                    each.block_until_ready()
        except Exception:
            known = 0
        for at in range(known, len(self._receipts)):
            self._wait_one(at)
            if at >= seen:
                self._ends.append(time.monotonic())

    def _wait_one(self, at: int) -> None:
        receipt, job = self._receipts[at], self.job
        try:
            if receipt is not None:
                if job.doomed is not None or job.free:
                    outwait(receipt, lambda: job.doomed)
                receipt.block_until_ready()
                if job.special:
                    job.look(self.first + at, receipt)
        except Exception as error:
            self._errors.setdefault(self.first + at, error)

    def over(self, start: float) -> None:
        self._begun = start
        self._receipts.clear()
        for at, raised in sorted(self._errors.items()):
            self._failures[at] = self.job.failure(at, raised)
        self.job.on_over(self)

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for the end of one of its parts, as in ``Slot.awaited``."""
        segment, parts = self.job.segment, self.job.parts
        until = self.first + len(self._ends)
        if until == len(parts) and (segment.last or segment.when_done):
            return True
        exports = (value for part in parts[self.first : until] for _, value in part.exports)
        return any(segment.outputs[value].awaited for value in exports)

    def ends(self) -> Ends:
        """Its parts, once it is over."""
        called = self.job.called[self.first : self.first + len(self._returned)]
        starts, ends, before = [], [], self._begun
        for own, seen in zip(called, self._ends, strict=True):
            # A gang before it may have been seen to end later than this one.
            start = own if own > before else before
            before = seen if seen > start else start
            starts.append(start)
            ends.append(before)
        return Ends(self.first, called, self._returned, starts, ends, self._failures)


def _is_ready(receipt: Any) -> bool:
    return receipt is None or bool(receipt.is_ready())


def outwait(receipt: Any, doomed: Callable[[], Failure | None]) -> None:
    """Wait for what may hang, by looking: nothing wakes a thread that waits in native code.

    Most collectives raise when their connections are cut.  A few miss it
    and wait for ever, in a thread of a client that is not used any more.
    """
    left = _LEFT_BEHIND
    while not receipt.is_ready():
        why = doomed()
        if why is not None:
            if left <= 0.0:
                raise PathwaysError(why)
            left -= _LOOK
        time.sleep(_LOOK)


def taken(slot: Slot, place: Place) -> Any:
    """The array of a slot, of a bundle a list of them; None when there is none."""
    payload = slot.payload
    if type(payload) is list:
        if place.renewed or isinstance(payload[0], arrays.OnDemand):
            own = zip(arrays_of([slot.value]), payload, strict=True)
            payload = [_on_devices(value, each, place) for value, each in own]
        return payload
    return payload if payload is None else _on_devices(slot.value, payload, place)


def _on_devices(value: Value, payload: Any, place: Place) -> Any:
    array = arrays.resolved(payload)
    assert array is not None
    return arrays.here(value, array, place) if place.renewed else array


def progress(segments: Iterable[Segment], jobs: Mapping[Key, SegmentJob]) -> Iterator[Seen]:
    """The launched and the other gangs of *segments*.  jobs: those handed to device queues."""
    now = time.monotonic()
    for segment in segments:
        job, parts = jobs.get(segment.key), segment.stretch.parts
        called: Sequence[float] = job.called if job is not None else ()
        for at in range(segment.over, len(parts)):
            state, seconds = WAITING if job is None else QUEUED, 0.0
            if at < len(called):
                state, seconds = LAUNCHED, now - called[at]
            yield Seen(segment.run.id, parts[at].index, state, seconds, segment.locals)
