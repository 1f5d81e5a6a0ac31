"""Straight stretches of gangs as the launcher sees them: one step in the order.

Problem: one decision for many gangs must come to the same as one decision for
each: the same places, the same poison, the same reports.

How: :mod:`pathways_lab.executor.stretches` defines a stretch, and
:mod:`pathways_lab.runtime.host.row_job` launches it on a device queue.

Rule for maintainers: gangs that may need a decision between them are no
stretch; then :meth:`Straight.add` says no, and they go one by one.

Paper: section 4.5 (parallel asynchronous dispatch).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import Grant
from pathways_lab.core.program.program import Call, SliceId
from pathways_lab.executor.actions import Key, Report
from pathways_lab.executor.local_array import FAILED, ISSUED, PENDING
from pathways_lab.executor.order import Order
from pathways_lab.executor.run_values import Values
from pathways_lab.executor.steps import Row, Run
from pathways_lab.executor.stretches import Stretch, stretches


class Straight:
    """The stretches of a host's programs, and the rows in progress.

    temporary: bytes per device that functions take while they run.
    by_itself(function, slice): whether its gangs are launched one by one.
    """

    def __init__(
        self,
        values: Values,
        order: Order,
        temporary: dict[tuple[str, SliceId], int],
        by_itself: Callable[[str, SliceId], bool],
    ) -> None:
        self._values = values
        self._order = order
        self._temporary = temporary
        self._by_itself = by_itself
        self._stretches: dict[tuple[str, int, int], dict[int, Stretch]] = {}

    def forget(self) -> None:
        """Programs, slices or functions have changed."""
        self._stretches.clear()

    def in_window(self, grant: Grant) -> dict[int, Stretch]:
        """The stretches that may be launched as one in this window, by their first steps."""
        key = (grant.plan, grant.first, grant.last)
        found = self._stretches.get(key)
        if found is None:
            plan = self._values.book.reading(grant.plan).plan
            found = stretches(plan, grant.first, grant.last, self._plain)
            self._stretches[key] = found
        return found

    def _plain(self, call: Call) -> bool:
        """Whether a call is on this host, and never alone on its lane."""
        here = self._values.book.lane(call.slice) != ""
        return here and not self._by_itself(call.function, call.slice)

    def add(self, run: Run, stretch: Stretch, seq: int, stamp: Any) -> int:
        """One was granted: one more than its last step, or 0: its gangs have to go one by one."""
        slice_id = stretch.first.slice
        inputs = tuple([self._values.value(run, v) for v in stretch.externals])
        if any(inputs[cell].state == PENDING for cell in stretch.later):
            return 0
        outputs = {v: self._values.value(run, v) for part in stretch.parts for _, v in part.exports}
        temporary = max(self._temporary.get((p.call.function, slice_id), 0) for p in stretch.parts)
        row = Row(
            run,
            stretch,
            self._values.book.lane(slice_id),
            self._values.book.devices(slice_id),
            seq,
            inputs,
            outputs,
            self._values.book.locals_on(slice_id),
            stretch.inner + temporary,
            stamp,
        )
        if not self._values.memory.plenty(row):
            return 0
        run.steps[stretch.parts[0].index] = row
        self._values.memory.lodge(row)
        for slot in (*inputs, *outputs.values()):
            self._values.buffers.use(slot)
        self._order.add(row)
        self._order.less(row)
        return stretch.parts[-1].index + 1

    def hand_over(self, row: Row) -> None:
        """Its turn has come, its inputs and its room."""
        row.handed, outputs = True, row.outputs
        self._values.actions.append(row.launch())
        for slot in (*row.inputs, *outputs.values()):
            self._values.buffers.count(slot)
        if row.held:
            self._values.memory.take(row.locals, row.held)
        for part in row.stretch.parts:
            cause = row.cause(part) if row.lost else None
            if cause is not None:
                row.lost.update(dict.fromkeys(part.outputs, cause))
            for _, value in part.exports:
                outputs[value].become(FAILED if cause else ISSUED, cause)
        self._order.handed(row)

    def done(self, key: Key, times: Sequence[float], failures: Mapping[int, Failure]) -> None:
        """So many more gangs of the row with this first step are over.

        times: device seconds of each.  failures: by position in the row, their own.
        """
        values = self._values
        run = values.runs[key[0]]
        row = run.steps[key[1]]
        assert isinstance(row, Row)
        parts, first = row.stretch.parts, row.over
        row.over = until = first + len(times)
        row.done = until == len(parts)
        good = not (failures or row.spoiled)
        seen: Sequence[int] = range(first, until)
        if good:
            seen = [at for at in row.stretch.seen if first <= at < until]
        lost = {} if good else self._lose(row, seen, failures)
        values.actions.append(Report(run.id, parts[first].index, times, lost))
        for at in seen:
            part = parts[at]
            for _, value in part.exports:
                cause = None if good else row.lost.get(part.outputs[0])
                values.settle(row.outputs[value], cause)
        if row.done:
            if row.held:
                values.memory.give(row.locals, row.held)
            self._order.done(row)
        for at in seen:
            part = parts[at]
            for cell in part.releases:
                values.buffers.release(row.inputs[cell])
            for _, value in part.exports:
                values.buffers.release(row.outputs[value])
            values.drop(run, part.frees)
        if row.done:
            del run.steps[key[1]]
            values.end_if_over(run)

    def _lose(
        self, row: Row, seen: Sequence[int], failures: Mapping[int, Failure]
    ) -> dict[int, Failure]:
        """By step, why gangs have no results.  Some of them may be good."""
        lost = {}
        for at in seen:
            part = row.stretch.parts[at]
            cause = row.cause(part, failures.get(at))
            if cause is not None:
                row.lost.update(dict.fromkeys(part.outputs, cause))
                lost[part.index] = cause
        return lost
