"""Straight stretches of gangs as the launcher sees them: one step in the order.

Problem: what is decided once for many gangs must come to the same as if it had
been decided for each: the same places, the same poison, the same reports.

How: see :mod:`pathways_lab.runtime.stretches` for what a stretch is, and
:mod:`pathways_lab.runtime.rows` for how a lane launches it.

Rule for maintainers: whatever may need a decision between two gangs is no
stretch; then :meth:`Straight.add` says no, and they go one by one.

Paper: section 4.5 (parallel asynchronous dispatch).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import Grant
from pathways_lab.core.program import Call, SliceId
from pathways_lab.runtime.actions import Key, Report
from pathways_lab.runtime.order import Order
from pathways_lab.runtime.slots import FAILED, ISSUED, PENDING
from pathways_lab.runtime.steps import Row, Run
from pathways_lab.runtime.stretches import Stretch, stretches
from pathways_lab.runtime.values import Values


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
        """What may be launched as one in this window, by its first step."""
        key = (grant.plan, grant.first, grant.last)
        found = self._stretches.get(key)
        if found is None:
            plan = self._values.book.reading(grant.plan).plan
            found = stretches(plan, grant.first, grant.last, self._plain)
            self._stretches[key] = found
        return found

    def _plain(self, call: Call) -> bool:
        """Whether a call is on this host only, and never alone on its lane."""
        here = all(host == self._values.host for host, _ in self._values.book.devices(call.slice))
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
        run.steps.update(dict.fromkeys([part.index for part in stretch.parts], row))
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

    def done(self, key: Key, ends: Iterable[tuple[float, Failure | None]]) -> None:
        """Some more of its gangs are over: the next ones."""
        run = self._values.runs[key[0]]
        row = run.steps[key[1]]
        assert isinstance(row, Row)
        for seconds, failure in ends:
            part = row.stretch.parts[row.over]
            row.over += 1
            row.done = row.over == len(row.stretch.parts)
            cause = row.cause(part, failure)
            if cause is not None:
                row.lost.update(dict.fromkeys(part.outputs, cause))
            exports = [row.outputs[value] for _, value in part.exports]
            for slot in exports:
                self._values.settle(slot, cause)
            self._values.actions.append(Report((run.id, part.index), seconds, cause))
            if row.done:
                if row.held:
                    self._values.memory.give(row.locals, row.held)
                self._order.done(row)
            for slot in (*[row.inputs[cell] for cell in part.releases], *exports):
                self._values.buffers.release(slot)
            self._values.finish(run, part.index)
