"""The launcher decides which granted step starts next on this host: no threads, no JAX.

Problem: grants arrive ahead of data, in one order per island.  Every host must
launch its gangs in that order and yet keep disjoint devices busy; devices
shared by two differently cut slices must behave as one FIFO queue; memory is
given back after the last use; and whatever fails, every granted gang is
launched once, with zeros for missing inputs, because other hosts have perhaps
entered the same collective (rule 4).

How: :mod:`pathways_lab.executor.order` keeps the waits for earlier gangs,
:mod:`pathways_lab.executor.device_memory` those for memory; an input wakes the steps that
wait for it.  Straight stretches of a plan go as one (:mod:`pathways_lab.executor.straight`),
transfers are in :mod:`pathways_lab.executor.transfers`.

Rule for maintainers: the driver calls in, gets a list of actions, and carries
them out in order; a device queue launches gangs in the order of the
:class:`Launch` actions.  Every granted step is reported exactly once.

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
from pathways_lab.executor.actions import Action, Broken, Key, Launch, Report, RunOver
from pathways_lab.executor.local_array import DONATED, FAILED, ISSUED, Reader, Slot
from pathways_lab.executor.local_plans import REPEATED
from pathways_lab.executor.order import Order
from pathways_lab.executor.run_values import Values
from pathways_lab.executor.steps import Gang, Move, Row, Run
from pathways_lab.executor.straight import Straight
from pathways_lab.executor.transfers import Moves


class Launcher:
    """The queue of granted steps of one host, and what it holds.

    All methods return the actions that became possible.  Payloads are opaque.
    limit: bytes per device, or None: never wait for memory.
    rows: whether straight stretches are launched as one; else each gang is, by itself.
    """

    def __init__(
        self, host: str, island: str, limit: int | None = None, *, rows: bool = False
    ) -> None:
        self.host = host
        self._values = values = Values(host, island, limit)
        self._book, self._actions = values.book, values.actions
        self._runs, self._over = values.runs, values.over
        self.memory, self.buffers = values.memory, values.buffers
        self._rows = rows
        self._temporary: dict[tuple[str, SliceId], int] = {}
        self._alone: set[tuple[str, SliceId]] = set()
        self._first_alone: set[tuple[str, SliceId]] = set()
        self._ready: deque[Gang | Row | Move] = deque()
        self._order = Order(host, self._ready.append)
        self._straight = Straight(values, self._order, self._temporary, self._by_itself)
        self._moves = Moves(values)

    # --- what the host knows ----------------------------------------------------------

    def bind(self, binding: SliceBinding, lane: str = "") -> None:
        """A slice exists.  lane: its queue on this host, "" when it has no device here."""
        self._book.bind(binding, lane)
        self._straight.forget()

    def unbind(self, slice_id: SliceId) -> list[Action]:
        """A slice is gone, with every buffer on it."""
        self._order.forget(self._book.lane(slice_id))
        self._book.unbind(slice_id)
        known = (*self._alone, *self._first_alone, *self._temporary)
        self.forget((), [entry for entry in known if entry[1] == slice_id])
        return self.free(self.buffers.on_slice(slice_id))

    def leave(self, slice_id: SliceId) -> list[Action]:
        """The slice is elsewhere now, with every buffer on it."""
        for buffer in self.buffers.on_slice(slice_id):
            self.buffers.forget(buffer)
        return self.unbind(slice_id)

    def program(self, plan: Plan) -> None:
        """A program that may be granted from now on."""
        self._book.program(plan)
        self._straight.forget()

    def forget(self, plans: Iterable[str], functions: Iterable[tuple[str, SliceId]]) -> None:
        """Nothing of these will be granted any more."""
        self._book.forget(plans)
        for function in functions:
            self._alone.discard(function)
            self._first_alone.discard(function)
            self._temporary.pop(function, None)
        self._straight.forget()

    def plan(self, key: str) -> Plan | None:
        """A program that was sent here."""
        return self._book.plan(key)

    def needs(self, function: str, slice_id: SliceId, temporary: int) -> None:
        """Bytes per device that this function takes while it runs, beside inputs and outputs."""
        self._temporary[function, slice_id] = temporary

    def launches_alone(self, function: str, slice_id: SliceId) -> None:
        """This function calls back into Python, and may fail on one device only."""
        self._alone.add((function, slice_id))
        self._straight.forget()

    def first_launches_alone(self, function: str, slice_id: SliceId) -> None:
        """Its hosts must meet before they compute this together for the first time."""
        self._first_alone.add((function, slice_id))
        self._straight.forget()

    def _by_itself(self, function: str, slice_id: SliceId) -> bool:
        code = (function, slice_id)
        return code in self._alone or code in self._first_alone

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
                parts = step.stretch.parts[step.over :] if isinstance(step, Row) else ()
                indices = [part.index for part in parts] or [index]
                found += [((run.id, each), self._doing(step)) for each in indices]
        return found

    def gangs(self) -> list[Gang]:
        """Granted gangs that are not over, in the order in which they came."""
        steps = [step for run in self._runs.values() for step in run.steps.values()]
        return sorted((s for s in steps if isinstance(s, Gang)), key=lambda gang: gang.number)

    def rows(self) -> list[Row]:
        """The same of gangs that are launched as one."""
        steps = [step for run in self._runs.values() for step in run.steps.values()]
        return [step for step in steps if isinstance(step, Row)]

    def _doing(self, step: Gang | Row | Move) -> str:
        if self.memory.waits(step):
            return self.memory.story(step)
        return "launched" if getattr(step, "handed", False) else "waiting"

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
        stamp: comes back with every :class:`Launch` of the window.
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
        seq = grant.place
        straight = {} if free or not self._rows else self._straight.in_window(grant)
        row_end = 0
        for index in range(grant.first, min(grant.last, len(steps))):
            if index >= row_end and index in straight:
                row_end = self._straight.add(run, straight[index], seq, stamp)
            if index >= row_end and reading.ours[index]:
                node = steps[index].node
                if isinstance(node, Call):
                    self._add_gang(run, index, node, seq, stamp)
                else:
                    self._moves.add(run, index, node, seq)
            seq += reading.places[index]
        run.complete = run.complete or grant.last >= reading.end
        self._values.end_if_over(run)
        return self._take()

    # --- gangs ------------------------------------------------------------------------

    def _add_gang(self, run: Run, index: int, call: Call, seq: int, stamp: Any) -> None:
        code = (call.function, call.slice)
        first = code in self._first_alone
        if first:
            self._first_alone.discard(code)
            self._straight.forget()
        gang = Gang(
            run,
            index,
            call,
            self._book.lane(call.slice),
            self._book.devices(call.slice),
            first or code in self._alone,
            first,
            seq,
            tuple([self._values.value(run, v) for v in call.inputs]),
            tuple([self._values.value(run, v) for v in call.outputs]),
            self._book.locals_on(call.slice),
            self._temporary.get(code, 0),
            stamp=stamp,
        )
        run.steps[index] = gang
        self.memory.lodge(gang)
        for slot in (*gang.inputs, *gang.outputs):
            self.buffers.use(slot)
        self._order.add(gang)
        for position in call.donated:
            for reader in gang.inputs[position].readers:
                reader.when_over.append(lambda: self._order.less(gang))
                gang.waits += 1
        self._order.less(gang)

    def _hand_over(self, gang: Gang) -> None:
        call, run = gang.call, gang.run
        gang.handed = True
        gang.poison = next((s.failure for s in gang.inputs if s.lacking), None)
        copies = gang.copies
        self._actions.append(
            Launch(
                (run.id, gang.index),
                run.reading.plan,
                call,
                gang.lane,
                gang.inputs,
                gang.outputs,
                copies,
                gang.alone,
                gang.first,
                gang.poison,
                gang.seq,
                gang.index == run.reading.end - 1,
                gang.when_done,
                gang.stamp,
            )
        )
        self._take_memory(gang, copies)
        given = gang.donation(self.host) if call.donated else None
        for position in call.donated:
            slot = gang.inputs[position]
            if position not in copies and not slot.lacking:
                slot.become(DONATED, given)
        for slot in gang.outputs:
            slot.become(FAILED if gang.poison else ISSUED, gang.poison)
        self._order.handed(gang)

    def _take_memory(self, gang: Gang, copies: frozenset[int]) -> None:
        """Exactly what the gang needed room for; zeros take as much as what they stand for."""
        gang.held = gang.temporary + (max(-gang.growth(copies), 0) if gang.call.donated else 0)
        for slot in gang.inputs:
            self.buffers.count(slot)
        for position in gang.call.donated:
            if position not in copies:
                self.buffers.uncount(gang.inputs[position])
        for slot in gang.outputs:
            self.buffers.count(slot)
        if gang.held:
            self.memory.take(gang.locals, gang.held)

    def done(self, key: Key, seconds: float, failure: Failure | None = None) -> list[Action]:
        """A launched gang is over on the devices of this host, or could not start."""
        run = self._runs[key[0]]
        gang = run.steps[key[1]]
        assert isinstance(gang, Gang)
        assert gang.handed
        gang.done = True
        if gang.poison is None:
            # An input's failure meanwhile is the cause; its echo here is not, and without
            # an echo it was computed from zeros.
            cause = next((s.failure for s in gang.inputs if s.state == FAILED), None)
            gang.poison = cause or failure
        for slot in gang.outputs:
            self._values.settle(slot, gang.poison)
        if gang.held:
            self.memory.give(gang.locals, gang.held)
        failures = {} if gang.poison is None else {gang.index: gang.poison}
        self._actions.append(Report(run.id, gang.index, (seconds,), failures))
        self._order.done(gang)
        for slot in (*gang.inputs, *gang.outputs):
            self.buffers.release(slot)
        self._values.finish(run, gang.index)
        return self._take()

    def row_done(
        self, key: Key, times: Sequence[float], failures: Mapping[int, Failure]
    ) -> list[Action]:
        """So many more gangs of the row with this first step are over: the next ones of it.

        times: device seconds of each.  failures: by position in the row, their own.
        """
        self._straight.done(key, times, failures)
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
                if isinstance(step, Gang):
                    self._hand_over(step)
                elif isinstance(step, Row):
                    self._straight.hand_over(step)
                else:
                    self._moves.accept(step)
            self._ready.extend(self.memory.freed())
            if not self._ready:
                break
        actions = self._actions[:]
        self._actions.clear()
        return actions
