"""The values of runs in progress on one host: the slot of each, and the end of its life.

Problem: a value of a run may be an argument that came with the run, a buffer
that an earlier run makes, or the result of a later step here.  Its first reader
looks it up; it goes when its last reader is over.

Rule for maintainers: no order and no launching here; no JAX, no threads.

Paper: section 4.2 (sharded buffers).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import Grant
from pathways_lab.core.program.program import Value, ValueId
from pathways_lab.executor.actions import Action, RunOver
from pathways_lab.executor.buffers import Buffers, Past
from pathways_lab.executor.device_memory import Memory
from pathways_lab.executor.local_array import DONATED, FAILED, ISSUED, PENDING, READY, Slot
from pathways_lab.executor.local_plans import Book, Reading
from pathways_lab.executor.steps import Move, Run, Segment


class Values:
    """Runs by id, and their values.

    actions: what the launcher will answer.  memory: the account of the host's devices.
    """

    def __init__(self, host: str, island: str, limit: int | None) -> None:
        self.host = host
        self.book = Book(host, island)
        self.actions: list[Action] = []
        self.memory: Memory[Segment | Move] = Memory(limit)
        self.buffers = Buffers(host, self.actions, self.memory)
        self.runs: dict[int, Run] = {}
        self.over: Past[int] = Past()

    def new_run(self, grant: Grant, reading: Reading, arguments: Mapping[int, Any]) -> Run:
        """The first window of a run was granted.  arguments: payloads by plan input."""
        run, plan = Run(grant.run, reading), reading.plan
        for position, (value, buffer) in enumerate(zip(plan.inputs, grant.inputs, strict=True)):
            if buffer is not None:
                run.inputs[value] = buffer
            elif self.book.lane(plan.values[value].slice):
                slot = run.values[value] = self.new_slot(plan.values[value])
                self.fill(slot, f"argument {position}", arguments.get(position))
                self.buffers.name(slot)
        for value, buffer in zip(plan.outputs, grant.outputs, strict=True):
            if self.book.lane(plan.values[value].slice):
                self.buffers.bind(buffer, self.value(run, value))
        return run

    def fill(self, slot: Slot, what: str, payload: Any) -> None:
        """Give a new slot its payload, or its failure when there is none."""
        if payload is None:
            payload = Failure("internal", f"{what} is not on {self.host}", host=self.host)
        if isinstance(payload, Failure):
            slot.become(FAILED, payload)
            return
        # It lies in the host's own memory, and takes its devices' with its first reader.
        slot.payload = payload
        slot.become(READY)

    def new_slot(self, value: Value) -> Slot:
        """For a value that nobody here has a slot of."""
        return Slot(value, self.book.locals_of(value))

    def value(self, run: Run, value: int) -> Slot:
        """The slot of a value, found or made."""
        slot = run.values.get(value)
        if slot is None:
            # A buffer is looked up by its first reader: the run that makes it may have been
            # granted after an earlier window of this one, but always before its readers.
            buffer = run.inputs.get(value)
            slot = self.buffers.get(buffer) if buffer is not None else None
            if slot is None:
                slot = self.new_slot(run.reading.plan.values[value])
                if buffer is not None:
                    self.fill(slot, f"buffer {buffer}", None)
            run.values[value] = slot
            self.buffers.name(slot)
        return slot

    def settle(self, slot: Slot, failure: Failure | None) -> None:
        """The step that makes it is over."""
        if slot.state == ISSUED:
            slot.become(FAILED if failure else READY, failure)
        elif slot.state == DONATED and failure is not None:
            slot.become(FAILED, failure)

    def finish(self, run: Run, index: int) -> None:
        """A step is over, and with it the values of which it is the last use."""
        del run.steps[index]
        self.drop(run, run.reading.plan.steps[index].frees)
        self.end_if_over(run)

    def drop(self, run: Run, values: Iterable[ValueId]) -> None:
        """No step of the run needs these values any more."""
        for value in values:
            slot = run.values.pop(value, None)
            if slot is not None:
                self.buffers.unname(slot)

    def end_if_over(self, run: Run) -> None:
        """Forget the run when nothing of it is left to do."""
        if not run.complete or run.steps or run.id not in self.runs:
            return
        del self.runs[run.id]
        self.over.add(run.id)
        for value, slot in run.values.items():
            if slot.state == PENDING and value not in run.inputs:
                missing = Failure("cancelled", f"run {run.id} ended before this value was made")
                slot.become(FAILED, run.failure or missing)
            self.buffers.unname(slot)
        run.values.clear()
        self.actions.append(RunOver(run.id))
