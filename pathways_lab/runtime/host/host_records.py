"""The records that a host puts into the timeline: pure functions of its events.

Problem: every bar in every view is one of these records; they must name the
gang, its place, its devices and the user's line, in the same way everywhere.

Rule for maintainers: nothing is kept here but names; times come in
on this process's monotonic clock (those of transfers on the control plane's
already) and go out on the control plane's.

Paper: section 5 (per-gang timelines of the figures).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pathways_lab.core.errors import Failure
from pathways_lab.core.program.program import Call, Line, Plan
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.executor.actions import Key, Send
from pathways_lab.runtime.devices import Place
from pathways_lab.runtime.host.compiler import Code
from pathways_lab.runtime.host.device_queues import Times
from pathways_lab.runtime.host.gang_job import GangJob
from pathways_lab.runtime.host.row_job import Course, Ends
from pathways_lab.runtime.host.transfer_engine import Arrived
from pathways_lab.timeline.packed import in_common, launched
from pathways_lab.timeline.records import Event, Span
from pathways_lab.transport import record_encoding


def _text(line: Line) -> str:
    return str(line) if line.number else ""


class Story:
    """Makes the records of one host.

    emulated: whether its devices stand in for accelerators.
    offset(): seconds to add to this process's clock.
    """

    def __init__(self, host: str, island: str, emulated: bool, offset: Callable[[], float]) -> None:
        self._host = host
        self._island = island
        self._emulated = emulated
        self._offset = offset
        self._about: dict[str, dict[int, bytes]] = {}
        """By plan and step."""

    def about(self, plan: Plan, step: int, call: Call, place: Place) -> bytes:
        """The fields that all gangs of this step have in common."""
        steps = self._about.get(plan.key)
        if steps is None:
            steps = self._about[plan.key] = {}
        known = steps.get(step)
        if known is None:
            client, devices = place.binding.client, place.locals
            known = steps[step] = record_encoding.about(
                plan.name, call.name, client, _text(call.line), call.slice, devices
            )
        return known

    def forget(self, gone: Callable[[str], bool]) -> None:
        """Programs have gone, and what their steps have in common with them: *gone* says which."""
        for plan in [plan for plan in self._about if gone(plan)]:
            del self._about[plan]

    def launched(self, job: GangJob) -> Event:
        """A gang was handed to its devices, and is not over yet."""
        launch = job.launch
        poisoned = launch.poison is not None
        return self._launched(
            launch.plan, launch.key, launch.call, launch.seq, job.place, job.called, poisoned
        )

    def part_launched(self, course: Course, at: int) -> Event:
        """The same of a part of a row."""
        launch, part = course.launch, course.parts[at]
        key, seq = (launch.run, part.index), launch.seq + at
        return self._launched(
            launch.plan, key, part.call, seq, course.place, course.called[at], False
        )

    def _launched(
        self,
        plan: Plan,
        key: Key,
        call: Call,
        seq: int,
        place: Place,
        called: float,
        poisoned: bool,
    ) -> Event:
        return launched(
            self._island,
            self._host,
            called + self._offset(),
            (*key, plan.name, call.name, place.binding.client),
            _text(call.line),
            place.locals,
            in_common(seq, call.slice, poisoned, self._emulated),
        )

    def laps(self, job: GangJob, poisoned: bool) -> Iterator[Span]:
        """The records of :meth:`ended`, for each lap of a loop; its number is the step."""
        launch, offset = job.launch, self._offset()
        place = job.place.binding
        names = (launch.plan.name, launch.call.name, place.client, _text(launch.call.line))
        host, run = (self._island, self._host), launch.key[0]
        for lap in job.laps:
            args = {
                **in_common(launch.seq, launch.call.slice, poisoned, self._emulated),
                "inputs_ready": job.handed + offset,
                "steps": lap.steps,
            }
            called, returned = lap.called + offset, lap.returned + offset
            seq = {"seq": launch.seq}
            yield Span("launch", called, returned, *host, (), run, lap.first, *names, seq)
            start, end = lap.start + offset, lap.end + offset
            yield Span("gang", start, end, *host, job.devices, run, lap.first, *names, args)

    def ended(self, job: GangJob, times: Times, poisoned: bool) -> record_encoding.Ended:
        """A gang is over: what it took to launch it, and its time on the devices."""
        launch, work = job.launch, job.launch.stamp
        opens, work.told = not work.told, True
        return record_encoding.Ended(
            self.about(launch.plan, launch.key[1], launch.call, job.place),
            *launch.key,
            launch.seq,
            poisoned,
            job.announced,
            opens,
            work.received,
            work.began,
            work.ended,
            job.handed,
            times.called,
            times.returned,
            times.start,
            times.end,
        )

    def parts_ended(self, course: Course, ends: Ends, spoiled: set[int]) -> bytes:
        """The same of parts of a row, written.  spoiled: those without results, from the first."""
        launch, work, first = course.launch, course.launch.stamp, ends.first
        opens, work.told = not work.told, True
        parts = course.parts[first : first + len(ends.ends)]
        return record_encoding.row(
            self._island,
            self._host,
            self._emulated,
            self._offset(),
            [self.about(launch.plan, part.index, part.call, course.place) for part in parts],
            (launch.run, parts[0].index, launch.seq + first),
            spoiled,
            max(course.announced - first, 0),
            opens,
            (work.received, work.began, work.ended, course.handed),
            (ends.called, ends.returned, ends.starts, ends.ends),
        )

    def gangs(self, ended: list[record_encoding.Ended]) -> bytes:
        """All of these, written."""
        return record_encoding.gangs(
            self._island, self._host, self._emulated, ended, self._offset()
        )

    def sent(self, action: Send, start: float, end: float, nbytes: int, client: str) -> Span:
        """The parts of a transfer's source have left.  nbytes: what went to other hosts."""
        return Span(
            "send",
            start,
            end,
            self._island,
            self._host,
            action.source.locals,
            *action.key,
            action.plan.name,
            action.node.name,
            client,
            _text(action.node.line),
            {"seq": action.seq, "nbytes": nbytes},
        )

    def arrived(self, arrived: Arrived, end: float, client: str) -> Span:
        """A transfer is complete on this host."""
        action = arrived.action
        return Span(
            "transfer",
            end if arrived.start is None else min(arrived.start, end),
            end,
            self._island,
            self._host,
            action.target.locals,
            *action.key,
            action.plan.name,
            action.node.name,
            client,
            _text(action.node.line),
            {
                "seq": action.seq,
                "slice": action.target.value.slice,
                "nbytes": arrived.nbytes,
                "source": ", ".join(arrived.sources),
                "target": self._host,
                "poisoned": arrived.failure is not None,
            },
        )

    def compiled(
        self, binding: SliceBinding, code: Code, start: float, end: float, failure: Failure | None
    ) -> Span:
        """A function was compiled, or could not be."""
        offset = self._offset()
        return Span(
            "compile",
            start + offset,
            end + offset,
            self._island,
            self._host,
            node=code.name,
            client=binding.client,
            line=_text(code.line),
            args={"function": code.function, "slice": code.slice, "failed": failure is not None},
        )
