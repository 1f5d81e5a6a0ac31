"""The records that a host puts into the timeline: pure functions of its events.

Problem: every bar in every view is one of these records; they must name the
gang, its place, its devices and the user's line, in the same way everywhere.

Rule for maintainers: nothing is kept here but names; times come in
on this process's monotonic clock (those of transfers on the control plane's
already) and go out on the control plane's.

Paper: section 5 (per-gang timelines of the figures).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pathways_lab.core.errors import Failure
from pathways_lab.core.program.program import Call, Line, Plan
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.executor.actions import Decision, Receive, Send
from pathways_lab.runtime.devices import Place
from pathways_lab.runtime.host.compiler import Code, Executable
from pathways_lab.runtime.host.segment_job import Ends, SegmentJob
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

    def launched(self, job: SegmentJob, at: int) -> Event:
        """A gang was handed to its devices, and is not over yet."""
        segment, part = job.segment, job.parts[at]
        poisoned = not segment.lost.keys().isdisjoint(part.inputs)
        names = (segment.plan.name, part.call.name, job.place.binding.client)
        return launched(
            self._island,
            self._host,
            job.called[at] + self._offset(),
            (segment.run.id, part.index, *names),
            _text(part.call.line),
            job.place.locals,
            in_common(segment.seq + at, part.call.slice, poisoned, self._emulated),
        )

    def ended(self, job: SegmentJob, ends: Ends, spoiled: list[int]) -> list[record_encoding.Ended]:
        """Gangs are over: what it took to launch them, and their times on the devices.

        Each lap of a loop is a gang, and its number the step.  spoiled: those without results,
        from the first.
        """
        segment, work, first = job.segment, job.segment.stamp, ends.first
        opens, work.told = not work.told, True
        parts = job.parts[first : first + len(ends.ends)]
        whole = record_encoding.Ended(
            [self.about(segment.plan, part.index, part.call, job.place) for part in parts],
            segment.run.id,
            parts[0].index,
            segment.seq + first,
            spoiled,
            max(job.announced - first, 0),
            opens,
            (work.received, work.began, work.ended, job.handed),
            (ends.called, ends.returned, ends.starts, ends.ends),
        )
        return [
            whole._replace(
                step=lap.first,
                announced=1,
                opens=opens and not at,
                columns=([lap.called], [lap.returned], [lap.start], [lap.end]),
            )
            for at, lap in enumerate(job.laps)
        ] or [whole]

    def segments(self, ended: list[record_encoding.Ended]) -> bytes:
        """All of these, written."""
        return record_encoding.segments(
            self._island, self._host, self._emulated, ended, self._offset()
        )

    def sent(self, action: Send, start: float, end: float, nbytes: int, client: str) -> Span:
        """The parts of a transfer's source have left.  nbytes: what went to other hosts."""
        more = {"nbytes": nbytes}
        return self._transfer("send", start, end, action, action.source.locals, client, more)

    def arrived(self, arrived: Arrived, client: str) -> Span:
        """A transfer is complete on this host."""
        action, end = arrived.action, arrived.end
        start = end if arrived.start is None else min(arrived.start, end)
        more = {
            "slice": action.target.value.slice,
            "nbytes": arrived.nbytes,
            "source": ", ".join(arrived.sources),
            "target": self._host,
            "poisoned": arrived.failure is not None,
        }
        return self._transfer("transfer", start, end, action, action.target.locals, client, more)

    def _transfer(
        self, kind: str, start: float, end: float, action: Send | Receive,
        devices: tuple[int, ...], client: str, more: Mapping[str, object],
    ) -> Span:  # fmt: skip
        of = (*action.key, action.plan.name, action.node.name, client)
        line, args = _text(action.node.line), {"seq": action.seq, **more}
        return Span(kind, start, end, self._island, self._host, devices, *of, line, args)

    def counted(self, decision: Decision, rows: int, client: str, now: float) -> Event:
        """A value that decides has said how many rows there are."""
        node = decision.plan.steps[decision.step].node
        return Event(
            "rows",
            now + self._offset(),
            self._island,
            self._host,
            decision.run,
            decision.step,
            decision.plan.name,
            node.name,
            client,
            {"expert": decision.at, "rows": rows},
        )

    def compiling(self, binding: SliceBinding, code: Code, start: float, waiting: int) -> Event:
        """A function begins to be compiled; so many others wait for that."""
        return Event(
            "compiling",
            start + self._offset(),
            self._island,
            self._host,
            node=code.name,
            client=binding.client,
            args={
                "function": code.function,
                "slice": code.slice,
                "waiting": waiting,
                "line": _text(code.line),
            },
        )

    def compiled(
        self,
        binding: SliceBinding,
        code: Code,
        start: float,
        end: float,
        result: Executable | Failure,
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
            args={
                "function": code.function,
                "slice": code.slice,
                "failed": isinstance(result, Failure),
                "temporary": 0 if isinstance(result, Failure) else result.temporary,
            },
        )
