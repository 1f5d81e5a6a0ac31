"""The launcher decides which granted step starts next on this host: no threads, no JAX.

Problem: grants arrive ahead of data, in one order per island.  Every host must
launch its gangs in that order and yet keep disjoint devices busy; devices
shared by two differently cut slices must behave as one FIFO queue; memory is
given back after the last use; and whatever fails, every granted gang is
launched once, with zeros for missing inputs, because other hosts have perhaps
entered the same collective (rule 4).

How: :mod:`pathways_lab.executor.order` keeps the waits for earlier gangs,
:mod:`pathways_lab.executor.device_memory` those for memory; an input wakes the steps that
wait for it.  Gangs are launched as segments (:mod:`pathways_lab.executor.segments`), transfers
are in :mod:`pathways_lab.executor.transfers`.

Rule for maintainers: the driver calls in, gets a list of actions, and carries
them out in order; a device queue launches segments in the order of the
:class:`Segment` actions.  Every granted step is reported exactly once.

Paper: section 4.4 (gang scheduling: consistent order), section 4.5 (parallel
asynchronous dispatch).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import Grant
from pathways_lab.core.program.program import Call, Plan, SliceId, Value
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.executor.actions import Action, Broken, Decision, RunOver
from pathways_lab.executor.local_array import Reader, Slot
from pathways_lab.executor.local_plans import REPEATED
from pathways_lab.executor.order import Order
from pathways_lab.executor.run_values import Values
from pathways_lab.executor.segments import Segments
from pathways_lab.executor.steps import Key, Move, Segment
from pathways_lab.executor.transfers import Moves


class Launcher:
    """The queue of granted steps of one host, and what it holds.

    All methods return the actions that became possible.  Payloads are opaque.
    limit: bytes per device, or None: never wait for memory.
    """

    def __init__(self, host: str, island: str, limit: int | None = None) -> None:
        self.host = host
        self._values = values = Values(host, island, limit)
        self._book, self._actions = values.book, values.actions
        self._runs, self._over = values.runs, values.over
        self.memory, self.buffers = values.memory, values.buffers
        self._ready: deque[Segment | Move] = deque()
        self._segments = Segments(values, Order(host, self._ready.append))
        self._moves = Moves(values)

    # --- what the host knows ----------------------------------------------------------

    def bind(self, binding: SliceBinding, lane: str = "") -> None:
        """A slice exists.  lane: its queue on this host, "" when it has no device here."""
        self._book.bind(binding, lane)
        self._segments.forget()

    def unbind(self, slice_id: SliceId) -> list[Action]:
        """A slice is gone, with every buffer on it."""
        self._segments.leave(slice_id)
        self._book.unbind(slice_id)
        return self.free(self.buffers.on_slice(slice_id))

    def leave(self, slice_id: SliceId) -> list[Action]:
        """The slice is elsewhere now, with every buffer on it."""
        for buffer in self.buffers.on_slice(slice_id):
            self.buffers.forget(buffer)
        return self.unbind(slice_id)

    def program(self, plan: Plan) -> None:
        """A program that may be granted from now on."""
        self._book.program(plan)
        self._segments.forget()

    def forget(self, plans: Iterable[str], functions: Iterable[tuple[str, SliceId]]) -> None:
        """Nothing of these will be granted any more."""
        self._book.forget(plans)
        self._segments.forget(functions)

    def plan(self, key: str) -> Plan | None:
        """A program that was sent here."""
        return self._book.plan(key)

    def needs(self, function: str, slice_id: SliceId, temporary: int) -> None:
        """Bytes per device that this function takes while it runs, beside inputs and outputs."""
        self._segments.temporary[function, slice_id] = temporary

    def launches_alone(self, function: str, slice_id: SliceId) -> None:
        """This function calls back into Python, and may fail on one device only."""
        self._segments.alone.add((function, slice_id))
        self._segments.forget()

    def first_launches_alone(self, function: str, slice_id: SliceId) -> None:
        """Its hosts must meet before they compute this together for the first time."""
        self._segments.first_alone.add((function, slice_id))
        self._segments.forget()

    @property
    def runs(self) -> tuple[int, ...]:
        """Runs of which something was granted, and that may go on."""
        return tuple(self._runs)

    @property
    def idle(self) -> bool:
        """Whether no granted step is unfinished."""
        return not any(run.steps for run in self._runs.values())

    def unfinished(self) -> list[tuple[Key, str]]:
        """Granted steps that are not over, with what they are doing: for people."""
        found: list[tuple[Key, str]] = []
        for run in self._runs.values():
            for index, step in run.steps.items():
                left = step.stretch.parts[step.over :] if isinstance(step, Segment) else ()
                indices = [part.index for part in left] or [index]
                found += [((run.id, each), self._doing(step)) for each in indices]
        return found

    def segments(self) -> list[Segment]:
        """Granted segments that are not over, in the order in which they came."""
        steps = [step for run in self._runs.values() for step in run.steps.values()]
        found = [step for step in steps if isinstance(step, Segment)]
        return sorted(found, key=lambda segment: segment.number)

    def _doing(self, step: Segment | Move) -> str:
        if self.memory.waits(step):
            return self.memory.story(step)
        return "launched" if isinstance(step, Segment) and step.handed else "waiting"

    # --- grants -----------------------------------------------------------------------

    def grant(
        self,
        grant: Grant,
        arguments: Mapping[int, Any] | None = None,
        stamp: Any = None,
        free: bool = False,
    ) -> list[Action]:
        """Take one window.  arguments: payloads by plan input, with a run's first window.

        An argument that could not be made is a :class:`Failure` in its place.
        stamp: comes back with every :class:`Segment` of the window.
        free: the order is off: it is launched as it comes, whatever its number.
        """
        wrong = self._book.take(grant, free)
        if wrong == REPEATED:
            return []
        if not wrong and grant.run in self._over:
            wrong = f"{self.host} was granted a part of run {grant.run}, which is over"
        if wrong:
            return [Broken(wrong)]
        reading = self._book.reading(grant.plan)
        steps = reading.plan.steps
        run = self._runs.get(grant.run)
        if run is None:
            run = self._runs[grant.run] = self._values.new_run(grant, reading, arguments or {})
        if grant.skipped:
            self._values.drop(run, reading.freed(grant.first, grant.last, tuple(run.values)))
            run.complete = run.complete or grant.last >= reading.end
            self._values.end_if_over(run)
            return self._take()
        seq = grant.place
        window = {} if free else self._segments.in_window(grant.plan, grant.first, grant.last)
        end = 0
        for index in range(grant.first, min(grant.last, len(steps))):
            if index >= end and reading.ours[index]:
                node = steps[index].node
                if isinstance(node, Call):
                    end = self._segments.add(run, index, window.get(index), seq, stamp)
                else:
                    self._moves.add(run, index, node, seq)
            seq += reading.places[index]
        for index in range(grant.first, grant.last) if reading.decisions else ():
            for at, value in enumerate(reading.decides(index)):
                cases = reading.decisions.cases(value)
                decision = Decision(run.id, value, reading.plan, index, at, cases)
                self.buffers.ask(decision, self._values.value(run, value))
        run.complete = run.complete or grant.last >= reading.end
        self._values.end_if_over(run)
        return self._take()

    # --- gangs ------------------------------------------------------------------------

    def done(
        self, key: Key, times: Sequence[float], failures: Mapping[int, Failure]
    ) -> list[Action]:
        """So many more gangs of the segment with this first step are over: the next ones of it.

        times: device seconds of each.  failures: by position in the segment, their own.
        """
        self._segments.done(key, times, failures)
        return self._take()

    # --- transfers --------------------------------------------------------------------

    def sent(self, key: Key, failure: Failure | None = None) -> list[Action]:
        """The source of a transfer is not needed any more."""
        self._moves.sent(key, failure)
        return self._take()

    def received(
        self, key: Key, payload: Any = None, failure: Failure | None = None
    ) -> list[Action]:
        """All parts of a transfer are here, or some never will be."""
        self._moves.received(key, payload, failure)
        return self._take()

    # --- ends -------------------------------------------------------------------------

    def abort(self, run_id: int, failure: Failure) -> list[Action]:
        """The run ended early: nothing of it is waited for; granted gangs still launch."""
        run = self._runs.get(run_id)
        if run is None:
            if run_id in self._over:
                return []
            self._over.add(run_id)
            return [RunOver(run_id)]
        run.complete = True
        run.failure = failure
        for move in [step for step in run.steps.values() if isinstance(step, Move)]:
            self._moves.cancel(move, failure)
        self._values.end_if_over(run)
        return self._take()

    # --- buffers of clients -----------------------------------------------------------

    def uploaded(self, buffer: int, value: Value, payload: Any) -> list[Action]:
        """All parts of an upload for this host are here (or why not: a Failure)."""
        slot = self._values.new_slot(value)
        self._values.fill(slot, f"buffer {buffer}", payload)
        self.buffers.use(slot)
        self.buffers.bind(buffer, slot)
        if not slot.lacking:
            self.buffers.upload(buffer, slot)
        self.buffers.release(slot)
        return self._take()

    def free(self, buffers: tuple[int, ...]) -> list[Action]:
        """Clients do not know these buffers any more."""
        for buffer in buffers:
            self.buffers.free(buffer)
        return self._take()

    def fetch(self, fetch: Hashable, buffer: int) -> list[Action]:
        """Somebody wants the bytes of a buffer; Serve or Refuse follows, perhaps later."""
        self.buffers.fetch(fetch, buffer)
        return self._take()

    def served(self, slot: Slot, reader: Reader) -> list[Action]:
        """The bytes that a Serve asked for were read."""
        self.buffers.end_reading(slot, reader)
        return self._take()

    def forget_fetches(self, which: Callable[[Hashable], bool]) -> None:
        """Those who asked are gone."""
        self.buffers.forget_fetches(which)

    def _take(self) -> list[Action]:
        while True:
            while self._ready:
                step = self._ready.popleft()
                if not self.memory.begin(step):
                    continue
                if isinstance(step, Segment):
                    self._segments.hand_over(step)
                else:
                    self._moves.accept(step)
            self._ready.extend(self.memory.freed())
            if not self._ready:
                break
        actions = self._actions[:]
        self._actions.clear()
        return actions
