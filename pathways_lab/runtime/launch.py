"""Which granted step may start next on this host: pure decisions, no threads, no JAX.

Problem: grants arrive ahead of data, in one order per island.  Every host must
launch its gangs in that order and yet keep disjoint devices busy; devices
shared by two differently cut slices must behave as one FIFO queue; memory is
given back after the last use; and whatever fails, every granted gang is
launched once, with zeros for what is missing, because other hosts have perhaps
entered the same collective (rule 4).

How: who waits behind whom is in :mod:`pathways_lab.runtime.order`, who waits
for memory in :mod:`pathways_lab.runtime.memory`; inputs call those who wait for
them.  Straight stretches of a plan go as one (:class:`Row`).

Rule for maintainers: the rim calls in, gets a list of actions, and carries
them out in order; a lane launches what it is handed in the order of the
:class:`Launch` actions.  Every granted step is reported exactly once.

Paper: section 4.4 (gang scheduling: consistent order), section 4.5 (parallel
asynchronous dispatch).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import Grant
from pathways_lab.core.program import Call, Plan, SliceId, Transfer, Value
from pathways_lab.core.topology import SliceBinding
from pathways_lab.runtime.actions import (
    Action,
    Broken,
    CancelReceive,
    Key,
    Launch,
    Receive,
    Report,
    RunOver,
    Send,
)
from pathways_lab.runtime.book import REPEATED, Book, Reading
from pathways_lab.runtime.buffers import Buffers, Past
from pathways_lab.runtime.memory import Memory
from pathways_lab.runtime.order import Order
from pathways_lab.runtime.slots import DONATED, FAILED, ISSUED, PENDING, READY, Reader, Slot
from pathways_lab.runtime.steps import Gang, Move, Row, Run
from pathways_lab.runtime.stretches import Stretch, stretches


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
        self._book = Book(host, island)
        self._actions: list[Action] = []
        self._rows = rows
        self._stretches: dict[tuple[str, int, int], dict[int, Stretch]] = {}
        self.memory: Memory[Gang | Row | Move] = Memory(limit)
        self.buffers = Buffers(host, self._actions, self.memory)
        self._temporary: dict[tuple[str, SliceId], int] = {}
        self._alone: set[tuple[str, SliceId]] = set()
        self._first_alone: set[tuple[str, SliceId]] = set()
        self._runs: dict[int, Run] = {}
        self._over: Past[int] = Past()
        self._ready: deque[Gang | Row | Move] = deque()
        self._order = Order(host, self._ready.append)

    # --- what the host knows ----------------------------------------------------------

    def bind(self, binding: SliceBinding, lane: str = "") -> None:
        """A slice exists.  lane: its queue on this host, "" when it has no device here."""
        self._book.bind(binding, lane)

    def unbind(self, slice_id: SliceId) -> list[Action]:
        """A slice is gone, with every buffer on it."""
        self._book.unbind(slice_id)
        self._stretches.clear()
        self._alone = {entry for entry in self._alone if entry[1] != slice_id}
        self._first_alone = {entry for entry in self._first_alone if entry[1] != slice_id}
        self._temporary = {e: n for e, n in self._temporary.items() if e[1] != slice_id}
        return self.free(self.buffers.on_slice(slice_id))

    def program(self, plan: Plan) -> None:
        """A program that may be granted from now on."""
        self._book.program(plan)
        self._stretches.clear()

    def plan(self, key: str) -> Plan | None:
        """A program that was sent here."""
        return self._book.plan(key)

    def needs(self, function: str, slice_id: SliceId, temporary: int) -> None:
        """Bytes per device that this function takes while it runs, beside inputs and outputs."""
        self._temporary[function, slice_id] = temporary

    def launches_alone(self, function: str, slice_id: SliceId) -> None:
        """This function calls back into Python, and may fail on one device only."""
        self._alone.add((function, slice_id))
        self._stretches.clear()

    def first_launches_alone(self, function: str, slice_id: SliceId) -> None:
        """Its hosts must meet before they compute this together for the first time."""
        self._first_alone.add((function, slice_id))

    @property
    def idle(self) -> bool:
        """Whether no granted step is unfinished."""
        return not any(run.steps for run in self._runs.values())

    def unfinished(self) -> list[tuple[Key, str]]:
        """Granted steps that are not over, with what they are doing: for people."""
        return [
            ((run.id, index), self._doing(step))
            for run in self._runs.values()
            for index, step in run.steps.items()
        ]

    def gangs(self) -> list[Gang]:
        """Granted gangs that are not over, in the order in which they came."""
        steps = [step for run in self._runs.values() for step in run.steps.values()]
        return sorted((s for s in steps if isinstance(s, Gang)), key=lambda gang: gang.number)

    def rows(self) -> list[Row]:
        """The same of gangs that are launched as one."""
        steps = [step for run in self._runs.values() for step in run.steps.values()]
        return list(dict.fromkeys(step for step in steps if isinstance(step, Row)))

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
            run = self._runs[grant.run] = self._new_run(grant, reading, arguments or {})
        seq = grant.place
        straight = {} if free or not self._rows else self._straight(grant)
        row_end = 0
        for index in range(grant.first, min(grant.last, len(steps))):
            if index >= row_end and index in straight:
                row_end = self._add_row(run, straight[index], seq, stamp)
            if index >= row_end and reading.ours[index]:
                node = steps[index].node
                if isinstance(node, Call):
                    self._add_gang(run, index, node, seq, stamp)
                else:
                    self._add_move(run, index, node, seq)
            seq += reading.places[index]
        run.complete = run.complete or grant.last >= reading.end
        self._end_if_over(run)
        return self._take()

    def _new_run(self, grant: Grant, reading: Reading, arguments: Mapping[int, Any]) -> Run:
        run, plan = Run(grant.run, reading), reading.plan
        for position, (value, buffer) in enumerate(zip(plan.inputs, grant.inputs, strict=True)):
            if buffer is not None:
                run.inputs[value] = buffer
            elif self._book.lane(plan.values[value].slice):
                slot = run.values[value] = self._new_slot(plan.values[value])
                self._fill(slot, f"argument {position}", arguments.get(position))
                self.buffers.name(slot)
        for value, buffer in zip(plan.outputs, grant.outputs, strict=True):
            if self._book.lane(plan.values[value].slice):
                self.buffers.bind(buffer, self._value(run, value))
        return run

    def _fill(self, slot: Slot, what: str, payload: Any) -> None:
        """Give a new slot its payload, or its failure when there is none."""
        if payload is None:
            payload = Failure("internal", f"{what} is not on {self.host}", host=self.host)
        if isinstance(payload, Failure):
            slot.become(FAILED, payload)
            return
        # It lies in the host's own memory, and takes its devices' with its first reader.
        slot.payload = payload
        slot.become(READY)

    def _new_slot(self, value: Value) -> Slot:
        return Slot(value, self._book.locals_of(value))

    def _value(self, run: Run, value: int) -> Slot:
        slot = run.values.get(value)
        if slot is None:
            # A buffer is looked up by its first reader: the run that makes it may have been
            # granted after an earlier window of this one, but always before its readers.
            buffer = run.inputs.get(value)
            slot = self.buffers.get(buffer) if buffer is not None else None
            if slot is None:
                slot = self._new_slot(run.reading.plan.values[value])
                if buffer is not None:
                    self._fill(slot, f"buffer {buffer}", None)
            run.values[value] = slot
            self.buffers.name(slot)
        return slot

    # --- gangs ------------------------------------------------------------------------

    def _add_gang(self, run: Run, index: int, call: Call, seq: int, stamp: Any) -> None:
        code = (call.function, call.slice)
        first = code in self._first_alone
        self._first_alone.discard(code)
        gang = Gang(
            run,
            index,
            call,
            self._book.lane(call.slice),
            self._book.devices(call.slice),
            first or code in self._alone,
            first,
            seq,
            tuple([self._value(run, v) for v in call.inputs]),
            tuple([self._value(run, v) for v in call.outputs]),
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

    def _straight(self, grant: Grant) -> dict[int, Stretch]:
        """What may be launched as one in this window, by its first step."""
        key = (grant.plan, grant.first, grant.last)
        found = self._stretches.get(key)
        if found is None:
            plan = self._book.reading(grant.plan).plan
            found = stretches(plan, grant.first, grant.last, self._plain)
            self._stretches[key] = found
        return found

    def _plain(self, call: Call) -> bool:
        """Whether a call is on this host only, and never alone on its lane."""
        here = all(host == self.host for host, _ in self._book.devices(call.slice))
        return here and (call.function, call.slice) not in self._alone | self._first_alone

    def _add_row(self, run: Run, stretch: Stretch, seq: int, stamp: Any) -> int:
        """One more than its last step, or 0: its gangs have to go by themselves just now."""
        slice_id = stretch.first.slice
        inputs = tuple([self._value(run, v) for v in stretch.externals])
        if any(inputs[cell].state == PENDING for cell in stretch.later):
            return 0
        outputs = {v: self._value(run, v) for part in stretch.parts for _, v in part.exports}
        temporary = max(self._temporary.get((p.call.function, slice_id), 0) for p in stretch.parts)
        row = Row(
            run,
            stretch,
            self._book.lane(slice_id),
            self._book.devices(slice_id),
            seq,
            inputs,
            outputs,
            self._book.locals_on(slice_id),
            stretch.inner + temporary,
            stamp,
        )
        if not self.memory.plenty(row):
            return 0
        run.steps.update(dict.fromkeys([part.index for part in stretch.parts], row))
        self.memory.lodge(row)
        for slot in (*inputs, *outputs.values()):
            self.buffers.use(slot)
        self._order.add(row)
        self._order.less(row)
        return stretch.parts[-1].index + 1

    def _hand_row(self, row: Row) -> None:
        row.handed, outputs = True, row.outputs
        self._actions.append(row.launch())
        for slot in (*row.inputs, *outputs.values()):
            self.buffers.count(slot)
        if row.held:
            self.memory.take(row.locals, row.held)
        for part in row.stretch.parts:
            cause = row.cause(part) if row.lost else None
            if cause is not None:
                row.lost.update(dict.fromkeys(part.outputs, cause))
            for _, value in part.exports:
                outputs[value].become(FAILED if cause else ISSUED, cause)
        self._order.handed(row)

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
        for position in call.donated:
            slot = gang.inputs[position]
            if position not in copies and not slot.lacking:
                slot.become(DONATED, gang.donation(self.host))
        for slot in gang.outputs:
            slot.become(FAILED if gang.poison else ISSUED, gang.poison)
        self._order.handed(gang)

    def _take_memory(self, gang: Gang, copies: tuple[int, ...]) -> None:
        """Exactly what the gang needed room for; zeros take as much as what they stand for."""
        gang.held = gang.temporary + (max(-gang.growth, 0) if gang.call.donated else 0)
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
            # What an input failed of meanwhile is the cause; its echo here is not, and without
            # an echo it was computed from zeros.
            cause = next((s.failure for s in gang.inputs if s.state == FAILED), None)
            gang.poison = cause or failure
        for slot in gang.outputs:
            self._settle(slot, gang.poison)
        if gang.held:
            self.memory.give(gang.locals, gang.held)
        self._actions.append(Report(key, seconds, gang.poison))
        self._order.done(gang)
        for slot in (*gang.inputs, *gang.outputs):
            self.buffers.release(slot)
        self._finish(run, gang.index)
        return self._take()

    def row_done(self, key: Key, ends: Iterable[tuple[float, Failure | None]]) -> list[Action]:
        """Some more gangs of the row to which this step belongs are over: the next ones of it."""
        run = self._runs[key[0]]
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
                self._settle(slot, cause)
            self._actions.append(Report((run.id, part.index), seconds, cause))
            if row.done:
                if row.held:
                    self.memory.give(row.locals, row.held)
                self._order.done(row)
            for slot in (*[row.inputs[cell] for cell in part.releases], *exports):
                self.buffers.release(slot)
            self._finish(run, part.index)
        return self._take()

    def _settle(self, slot: Slot, failure: Failure | None) -> None:
        """Whoever makes it is over."""
        if slot.state == ISSUED:
            slot.become(FAILED if failure else READY, failure)
        elif slot.state == DONATED and failure is not None:
            slot.become(FAILED, failure)

    # --- transfers --------------------------------------------------------------------

    def _add_move(self, run: Run, index: int, node: Transfer, seq: int) -> None:
        plan = run.reading.plan
        move = Move(run, index, node, seq)
        run.steps[index] = move
        if self._book.lane(plan.values[node.output].slice):
            move.target = self._value(run, node.output)
            self.buffers.use(move.target)
            self.memory.lodge(move)
            if self.memory.begin(move):
                self._accept(move)
        if self._book.lane(plan.values[node.input].slice):
            move.source = self._value(run, node.input)
            self.buffers.use(move.source)
            move.source.readers.append(move.reader)
            if not move.source.when_settled(lambda: self._send(move)):
                self._send(move)

    def _accept(self, move: Move) -> None:
        """There is room for what will come; parts that came before wait in the host's memory."""
        assert move.target is not None
        move.accepted = True
        self.buffers.count(move.target)
        key, plan = (move.run.id, move.index), move.run.reading.plan
        self._actions.append(Receive(key, plan, move.node, move.target, move.seq))

    def _send(self, move: Move) -> None:
        source = move.source
        if source is None:  # cancelled before its source was settled
            return
        move.started = True
        failure = source.failure if source.lacking else None
        key = (move.run.id, move.index)
        self._actions.append(Send(key, move.run.reading.plan, move.node, source, failure, move.seq))

    def sent(self, key: Key, failure: Failure | None = None) -> list[Action]:
        """The source of a transfer is not needed any more."""
        move = self._runs[key[0]].steps[key[1]]
        assert isinstance(move, Move)
        self._end_send(move, failure)
        self._end_move(move)
        return self._take()

    def _end_send(self, move: Move, failure: Failure | None) -> None:
        assert move.source is not None
        source, move.source = move.source, None
        move.failure = move.failure or failure
        self.buffers.end_reading(source, move.reader)

    def received(
        self, key: Key, payload: Any = None, failure: Failure | None = None
    ) -> list[Action]:
        """All parts of a transfer are here, or some never will be."""
        run = self._runs.get(key[0])
        move = run.steps.get(key[1]) if run else None
        if not isinstance(move, Move) or move.target is None:
            return []  # cancelled while its last part came
        self._end_receive(move, payload, failure)
        self._end_move(move)
        return self._take()

    def _end_receive(self, move: Move, payload: Any, failure: Failure | None) -> None:
        assert move.target is not None
        target, move.target = move.target, None
        move.failure = move.failure or failure
        target.payload = payload
        target.become(FAILED if failure else READY, failure)
        self.buffers.release(target)

    def _end_move(self, move: Move) -> None:
        if move.source is None and move.target is None:
            self._actions.append(Report((move.run.id, move.index), 0.0, move.failure))
            self._finish(move.run, move.index)

    # --- ends -------------------------------------------------------------------------

    def _finish(self, run: Run, index: int) -> None:
        del run.steps[index]
        for value in run.reading.plan.steps[index].frees:
            slot = run.values.pop(value, None)
            if slot is not None:
                self.buffers.unname(slot)
        self._end_if_over(run)

    def _end_if_over(self, run: Run) -> None:
        if not run.complete or run.steps or run.id not in self._runs:
            return
        del self._runs[run.id]
        self._over.add(run.id)
        for value, slot in run.values.items():
            if slot.state == PENDING and value not in run.inputs:
                missing = Failure("cancelled", f"run {run.id} ended before this value was made")
                slot.become(FAILED, run.failure or missing)
            self.buffers.unname(slot)
        run.values.clear()
        self._actions.append(RunOver(run.id))

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
            if move.target is not None:
                if not move.accepted:
                    self.memory.withdraw(move)
                self._actions.append(CancelReceive((run_id, move.index)))
                self._end_receive(move, None, failure)
            if move.source is not None and not move.started:
                self._end_send(move, failure)
            self._end_move(move)
        self._end_if_over(run)
        return self._take()

    # --- buffers of clients -----------------------------------------------------------

    def uploaded(self, buffer: int, value: Value, payload: Any) -> list[Action]:
        """All parts of an upload for this host are here (or why not: a Failure)."""
        slot = self._new_slot(value)
        self._fill(slot, f"buffer {buffer}", payload)
        self.buffers.use(slot)
        self.buffers.bind(buffer, slot)
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
                    self._hand_row(step)
                else:
                    self._accept(step)
            self._ready.extend(self.memory.freed())
            if not self._ready:
                break
        actions = self._actions[:]
        self._actions.clear()
        return actions
