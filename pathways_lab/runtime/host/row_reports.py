"""The rows that a host has handed to its device queues, and the ends of their gangs.

Problem: a row ends piece by piece, while the launcher, the timeline and the search
for stuck gangs think in single gangs.

Rule for maintainers: in the reactor's thread only; device queues know pieces, not this.

Paper: section 4.5.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import sub

from pathways_lab.core.diagnosis.stall import LAUNCHED, QUEUED, WAITING, Seen
from pathways_lab.core.errors import Failure
from pathways_lab.core.program.program import SliceId
from pathways_lab.executor.actions import Action, Key, LaunchRow, Report
from pathways_lab.executor.launcher import Launcher
from pathways_lab.executor.steps import Row
from pathways_lab.runtime.devices import Place
from pathways_lab.runtime.host.compiler import Executable
from pathways_lab.runtime.host.device_queues import Times
from pathways_lab.runtime.host.host_records import Story
from pathways_lab.runtime.host.reports import Reports
from pathways_lab.runtime.host.row_job import Course, Piece
from pathways_lab.timeline.records import Event


class Courses:
    """All rows of a host that were handed to lanes and are not over.

    on_over(piece, times), explain(place, failure): called in the lanes' threads.
    """

    def __init__(
        self,
        host: str,
        story: Story,
        on_over: Callable[[Piece, Times], None],
        explain: Callable[[Place, Failure], Failure],
    ) -> None:
        self._host = host
        self._story = story
        self._on_over = on_over
        self._explain = explain
        self._courses: dict[Key, Course] = {}

    def launch(
        self, launch: LaunchRow, place: Place, executables: Mapping[str, Executable]
    ) -> Piece:
        """The job for a device queue."""
        course = Course(
            launch,
            place,
            executables,
            self._host,
            self._on_over,
            lambda failure: self._explain(place, failure),
            time.monotonic(),
        )
        self._courses[course.key] = course
        return Piece(course, 0)

    def over(
        self, piece: Piece, times: Times, launcher: Launcher, reports: Reports
    ) -> list[Action]:
        """Some parts are over: what the launcher wants done then.  Their reports go ahead."""
        course, ends = piece.course, piece.ends(times)
        taken = list(map(sub, ends.ends, ends.starts))
        actions = launcher.row_done(course.key, taken, ends.failures)
        run, first = course.key[0], course.parts[piece.first].index
        spoiled = {
            step - first
            for a in actions
            if isinstance(a, Report) and a.run == run
            for step in a.failures
        }
        reports.record_packed(self._story.parts_ended(course, ends, spoiled))
        course.over += len(taken)
        if course.over == len(course.parts):
            del self._courses[course.key]
        return actions

    def doom(self, slices: Sequence[SliceId], failure: Failure) -> None:
        """Gangs of these slices that are not over shall not be launched, or end in failure."""
        for course in self._courses.values():
            if course.launch.stretch.first.slice in slices:
                course.doomed = failure

    def __contains__(self, key: Key) -> bool:
        return key in self._courses

    def launched(self, before: float) -> Iterator[Event]:
        """For the timeline: what was launched *before*, is not over and was not told yet."""
        for course in self._courses.values():
            for at in range(max(course.announced, course.over), len(course.called)):
                if course.called[at] > before:
                    break
                course.announced = at + 1
                yield self._story.part_launched(course, at)

    def progress(self, rows: Iterable[Row]) -> Iterator[Seen]:
        """The launched and the other ones of the gangs of *rows*."""
        for row in rows:
            course = self._courses.get((row.run.id, row.stretch.parts[0].index))
            yield from _progress(row, course)


def _progress(row: Row, course: Course | None) -> Iterator[Seen]:
    now, parts = time.monotonic(), row.stretch.parts
    called: Sequence[float] = course.called if course is not None else ()
    for at in range(row.over, len(parts)):
        state, seconds = WAITING if course is None else QUEUED, 0.0
        if at < len(called):
            state, seconds = LAUNCHED, now - called[at]
        yield Seen(row.run.id, parts[at].index, state, seconds, row.locals)
