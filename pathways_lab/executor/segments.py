"""Segments of gangs as the launcher sees them: one step in the order, whatever their length.

Problem: one decision for many gangs must come to the same as one decision for
each: the same places, the same poison, the same reports; and gangs that may need a
decision between them must go one by one.

How: :mod:`pathways_lab.executor.stretches` cuts a plan's window into stretches, most of
them long, some of one gang; :mod:`pathways_lab.runtime.host.segment_job` launches a segment
on a device queue.  A long stretch whose gangs might wait for different things when it is
granted is taken apart.

Rule for maintainers: one way for all lengths; only a stretch of one calls back into
Python or meets other hosts first.

Paper: section 4.5 (parallel asynchronous dispatch).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pathways_lab.core.errors import Failure
from pathways_lab.core.program.program import Call, SliceId
from pathways_lab.executor.actions import Report
from pathways_lab.executor.local_array import DONATED, FAILED, ISSUED, PENDING
from pathways_lab.executor.order import Order
from pathways_lab.executor.run_values import Values
from pathways_lab.executor.steps import Key, Run, Segment
from pathways_lab.executor.stretches import Stretch, stretches

Code = tuple[str, SliceId]
"""A compiled function on a slice."""


class Segments:
    """The stretches of a host's programs, and the segments in progress.

    temporary: bytes per device that functions take while they run.
    alone: functions that call back into Python, and may fail on one device only.
    first_alone: whose hosts must meet before they compute them together for the first time.
    """

    def __init__(self, values: Values, order: Order) -> None:
        self.temporary: dict[Code, int] = {}
        self.alone: set[Code] = set()
        self.first_alone: set[Code] = set()
        self._values = values
        self._order = order
        self._stretches: dict[tuple[str, int, int], dict[int, Stretch]] = {}

    def forget(self, functions: Iterable[Code] = ()) -> None:
        """Programs, slices or functions have changed.  functions: those that are gone."""
        for code in functions:
            self.alone.discard(code)
            self.first_alone.discard(code)
            self.temporary.pop(code, None)
        self._stretches.clear()

    def leave(self, slice_id: SliceId) -> None:
        """A slice is gone, with its functions and its lane."""
        self._order.forget(self._values.book.lane(slice_id))
        known = {*self.alone, *self.first_alone, *self.temporary}
        self.forget([code for code in known if code[1] == slice_id])

    def in_window(self, plan: str, first: int, last: int) -> dict[int, Stretch]:
        """The stretches of these steps of a plan, by their first steps."""
        key = (plan, first, last)
        found = self._stretches.get(key)
        if found is None:
            reading = self._values.book.reading(plan)
            found = stretches(reading.plan, first, last, reading.ours, self._plain, reading.decides)
            self._stretches[key] = found
        return found

    def _plain(self, call: Call) -> bool:
        code = (call.function, call.slice)
        return code not in self.alone and code not in self.first_alone

    def add(self, run: Run, index: int, stretch: Stretch | None, seq: int, stamp: Any) -> int:
        """The gang of a step was granted, and those after it in its *stretch*, if it has one.

        Returns one more than the last step that waits for its turn now.
        """
        plan = run.reading.plan.key
        segment = self._new(run, stretch or self._one(plan, index), seq, stamp)
        if not self._may_go_as_one(segment):
            segment = self._new(run, self._one(plan, index), seq, stamp)
        if segment.first:
            self.first_alone.discard((segment.stretch.first.function, segment.stretch.first.slice))
            self._stretches.clear()
        run.steps[index] = segment
        self._values.memory.lodge(segment)
        for slot in (*segment.inputs, *segment.outputs.values()):
            self._values.buffers.use(slot)
        self._order.add(segment)
        for cell in segment.stretch.gives:
            for reader in segment.inputs[cell].readers:
                reader.when_over.append(lambda: self._order.less(segment))
                segment.waits += 1
        self._order.less(segment)
        return segment.stretch.parts[-1].index + 1

    def _one(self, plan: str, index: int) -> Stretch:
        return self.in_window(plan, index, index + 1)[index]

    def _new(self, run: Run, stretch: Stretch, seq: int, stamp: Any) -> Segment:
        values, call = self._values, stretch.first
        code = (call.function, call.slice)
        return Segment(
            run,
            stretch,
            values.book.lane(call.slice),
            values.book.devices(call.slice),
            values.book.locals_on(call.slice),
            tuple([values.value(run, v) for v in stretch.externals]),
            {v: values.value(run, v) for v in stretch.exports},
            max([self.temporary.get((f, call.slice), 0) for f in stretch.functions]),
            seq,
            code in self.alone or code in self.first_alone,
            code in self.first_alone,
            stamp,
        )

    def _may_go_as_one(self, segment: Segment) -> bool:
        """Whether no gang of it would wait for what only a later one needs."""
        stretch, inputs = segment.stretch, segment.inputs
        if len(stretch.parts) == 1:
            return True
        together = all(inputs[cell].state != PENDING for cell in stretch.later)
        if stretch.gives and together:
            at_once = stretch.parts[0].gives
            together = not any(inputs[c].readers for c in stretch.gives if c not in at_once)
        return together and self._values.memory.plenty(segment)

    def hand_over(self, segment: Segment) -> None:
        """Its turn has come, its inputs and its room."""
        segment.handed = True
        for cell, slot in enumerate(segment.inputs):
            if slot.lacking and slot.failure is not None:
                segment.lost[cell] = slot.failure
        segment.copies = segment.shared()
        self._values.actions.append(segment)
        self._take_memory(segment)
        for part in segment.stretch.parts if segment.lost else ():
            cause = segment.cause(part)
            if cause is not None:
                segment.lost.update(dict.fromkeys(part.outputs, cause))
                for _, value in part.exports:
                    segment.outputs[value].become(FAILED, cause)
        for slot in segment.outputs.values():
            if slot.state == PENDING:
                slot.become(ISSUED)
        self._order.handed(segment)

    def _take_memory(self, segment: Segment) -> None:
        """Exactly what it needed room for; zeros take as much as what they stand for."""
        buffers, stretch, copies = self._values.buffers, segment.stretch, segment.copies
        segment.held = segment.temporary + segment.growth(copies) - stretch.kept
        for slot in segment.inputs:
            buffers.count(slot)
        for cell in stretch.gives:
            if cell not in copies:
                segment.held += stretch.sizes[cell]
                buffers.uncount(segment.inputs[cell])
        for slot in segment.outputs.values():
            buffers.count(slot)
        if segment.held:
            self._values.memory.take(segment.locals, segment.held)
        for part in stretch.parts if stretch.gives else ():
            given = [c for c in part.gives if c < len(segment.inputs) and c not in copies]
            why = segment.donation(part, self._values.host) if given else None
            for cell in given:
                if not segment.inputs[cell].lacking:
                    segment.inputs[cell].become(DONATED, why)

    def done(self, key: Key, times: Sequence[float], failures: Mapping[int, Failure]) -> None:
        """So many more gangs of the segment with this first step are over.

        times: device seconds of each.  failures: by position in the segment, their own.
        """
        values = self._values
        run = values.runs[key[0]]
        segment = run.steps[key[1]]
        assert isinstance(segment, Segment)
        assert segment.handed
        parts, first = segment.stretch.parts, segment.over
        segment.over = until = first + len(times)
        segment.done = until == len(parts)
        good = not (failures or segment.spoiled)
        seen: Sequence[int] = range(first, until)
        if good:
            seen = [at for at in segment.stretch.seen if first <= at < until]
        lost = {} if good else self._lose(segment, seen, failures)
        values.actions.append(Report(run.id, parts[first].index, times, lost))
        for at in seen:
            part = parts[at]
            for _, value in part.exports:
                values.settle(segment.outputs[value], segment.lost.get(part.outputs[0]))
        if segment.done:
            if segment.held:
                values.memory.give(segment.locals, segment.held)
            self._order.done(segment)
        for at in seen:
            part = parts[at]
            for cell in part.releases:
                values.buffers.release(segment.inputs[cell])
            for _, value in part.exports:
                values.buffers.release(segment.outputs[value])
            values.drop(run, part.frees)
        if segment.done:
            del run.steps[key[1]]
            values.end_if_over(run)

    def _lose(
        self, segment: Segment, seen: Sequence[int], failures: Mapping[int, Failure]
    ) -> dict[int, Failure]:
        """By step, why gangs have no results.  Some of them may be good."""
        lost = {}
        for at in seen:
            part = segment.stretch.parts[at]
            cause = segment.cause(part, failures.get(at))
            if cause is not None:
                segment.lost.update(dict.fromkeys(part.outputs, cause))
                lost[part.index] = cause
        return lost
