"""A simulated host: the launcher of a device process, and devices that take their time.

Problem: what a host decides (order, memory, poison, ends) must be what a real one
decides, so it is decided by the same code, :class:`pathways_lab.executor.launcher.Launcher`;
this module is its other rim, in simulated time.

How: what the launcher hands over waits in its lane until its devices have room
for one more launch, and is launched by the host's one launch thread.  The devices of a
lane are one FIFO queue that cannot be interrupted, for gangs of two lanes are never at
once on one device; a collective holds its devices from its turn on until all its
partners have come.  Payloads are numbers that stand for contents
(:func:`pathways_lab.sim.parts.made_of`).

Rule for maintainers: no decision about order, memory or failure here.

Paper: section 4.4, section 4.5 (host-side work of executors).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import Grant
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.program import Plan, SliceId, Value
from pathways_lab.executor.actions import (
    Action,
    Broken,
    CancelReceive,
    Decision,
    Receive,
    Report,
    RunOver,
    Send,
    Serve,
)
from pathways_lab.executor.ends import Ends
from pathways_lab.executor.launcher import Launcher
from pathways_lab.executor.steps import Key, Segment
from pathways_lab.sim.parts import Part, WorldPort, made_of

_BYTES = Layout((("x", 1),), ((),))
"""Only the size of an upload matters."""


@dataclass(slots=True, eq=False)
class Lane:
    """A set of devices.  waiting: not launched yet.  flying: the queue of the devices."""

    waiting: deque[Part] = field(default_factory=deque)
    flying: deque[Part] = field(default_factory=deque)


class Host:
    """See the module's docstring."""

    def __init__(self, world: WorldPort, name: str, island: str) -> None:
        self.world = world
        self.name = name
        self.island = island
        machine = world.machine.of(island)
        limit = machine.memory if world.wait_for_memory else None
        self.launcher = Launcher(name, island, limit)
        self.launches: list[tuple[int, int, tuple[int, ...]]] = []
        self.lanes: dict[str, Lane] = {}
        self.local: dict[SliceId, tuple[int, ...]] = {}
        self.forgotten: set[tuple[str, SliceId]] = set()
        self.thread = 0.0
        self.ingress = 0.0
        self.ends = Ends()
        self.resident: list[int] = []
        self.prompt: set[int] = set()
        self.flushing = math.inf
        self.flushed = -math.inf
        self._todo: deque[Action] = deque()
        self._doing = False

    # --- messages ----------------------------------------------------------------

    def program(self, plan: Plan) -> None:
        """A program will be granted, on slices that lie where the world knows."""
        for slice_id in plan.slices:
            self._bind(slice_id)
        self.launcher.program(plan)

    def _bind(self, slice_id: SliceId) -> None:
        world = self.world
        here = self.local[slice_id] = world.local[slice_id].get(self.name, ())
        self.launcher.bind(world.bindings[slice_id], world.lanes[slice_id] if here else "")

    def forget(self, plans: tuple[str, ...], functions: tuple[tuple[str, SliceId], ...]) -> None:
        """Nobody needs these any more."""
        self.launcher.forget(plans, functions)
        self.forgotten.update(functions)

    def compiled(self, function: str, slice_id: SliceId, temporary: int) -> None:
        """It can be launched from now on."""
        self.forgotten.discard((function, slice_id))
        self.launcher.needs(function, slice_id, temporary)

    def grant(self, grant: Grant) -> None:
        """A window of a run."""
        if grant.prompt:
            self.prompt.add(grant.run)
        arguments = {
            position: made_of("argument", grant.run, position)
            for position, buffer in enumerate(grant.inputs)
            if buffer is None
        }
        free = not self.world.keep_order
        self._do(self.launcher.grant(grant, arguments, free=free))

    def unbind(self, slice_id: SliceId) -> None:
        """A slice is gone, with every buffer on it."""
        self._do(self.launcher.unbind(slice_id))

    def free(self, buffers: tuple[int, ...]) -> None:
        """Forget buffers; nothing that was granted reads them any more."""
        self._do(self.launcher.free(buffers))

    def abort(self, run: int) -> None:
        """A run ends early: wait for nothing of it, keep nothing of it."""
        self._do(self.launcher.abort(run, Failure("cancelled", f"run {run} was ended")))
        self.world.carrier.give_up(run)

    def upload(self, buffer: int, where: SliceId, nbytes: int) -> None:
        """A client's bytes have come; they take device memory with their first reader."""
        self._bind(where)
        value = Value((nbytes,), "uint8", where, _BYTES, nbytes)
        self._do(self.launcher.uploaded(buffer, value, made_of("upload", buffer)))
        self.resident.append(buffer)
        self._flush_soon()

    def lacks(self, buffer: int, content: object) -> str:
        """The error in a value that a client was told is here; "" when there is none."""
        slot = self.launcher.buffers.get(buffer)
        if slot is None or not slot.settled or slot.lacking:
            return "no value"
        return "" if slot.payload == content else "a wrong value"

    # --- what the launcher decides -------------------------------------------------

    def _do(self, actions: list[Action]) -> None:
        """In order, also what is decided meanwhile."""
        todo = self._todo
        todo.extend(actions)
        if self._doing:
            return
        self._doing, ended, prompt = True, False, False
        while todo:
            match action := todo.popleft():
                case Segment():
                    self._hand_over(action)
                case Report(run=run, times=times):
                    ended, prompt = True, prompt or run in self.prompt
                    self.ends.add(action)
                    for _ in times:
                        self.world.cores.work(self.world.machine.costs.step_work)
                case Send():
                    self.world.carrier.send(self, action)
                case Receive():
                    self.world.carrier.receive(self, action)
                case RunOver(run=run):
                    self.prompt.discard(run)
                case Serve(fetch=Decision(run=run, value=value), slot=slot, reader=reader):
                    self.world.decided(self, run, value)
                    todo.extend(self.launcher.served(slot, reader))
                case CancelReceive(key=key):
                    self.world.carrier.cancel(self, key)
                case Broken(message=message) if self.world.keep_order:
                    raise AssertionError(message)
        self._doing = False
        if ended:
            self._flush_soon(prompt=prompt)
        self._feed()

    def sent(self, key: Key, failure: Failure | None) -> None:
        """A transfer has taken its bytes from here."""
        self._do(self.launcher.sent(key, failure))

    def received(self, action: Receive, content: int | None, failure: Failure | None) -> None:
        """A transfer's bytes are here, or never will be."""
        self._do(self.launcher.received(action.key, content, failure))

    # --- beginning gangs -------------------------------------------------------------

    def _hand_over(self, segment: Segment) -> None:
        stretch, run, seq = segment.stretch, segment.run.id, segment.seq
        devices, cells = self.local[stretch.first.slice], [None] * len(stretch.sizes)
        self.lanes.setdefault(segment.lane, Lane()).waiting.extend(
            Part(self, segment, run, part.index, part.call, devices, seq + at, at, cells)
            for at, part in enumerate(stretch.parts)
        )

    def _feed(self) -> None:
        """Launch what its devices have room for, in the order of each lane."""
        depth = self.world.machine.depth
        for lane in self.lanes.values():
            while lane.waiting and len(lane.flying) < depth:
                part = lane.waiting.popleft()
                lane.flying.append(part)
                self._begin(part)

    def _begin(self, part: Part) -> None:
        world, now = self.world, self.world.agenda.now
        whole = self._compute(part)
        if self.thread <= now:
            self.thread = now + world.vary(world.machine.costs.wake)
        self.thread += world.vary(world.machine.costs.launch)
        if whole or (world.launch_poisoned and part.segment.together):
            if world.remember:
                self.launches.append((part.run, part.step, part.devices))
            part.gang = gang = world.gang(part, world.machine.cost(part.call.function))
            code = part.call.function, part.call.slice
            assert gang.broken or code not in self.forgotten, f"{self.name} has forgotten {code}"
        world.agenda.at(self.thread, self._launched, part)

    def _compute(self, part: Part) -> bool:
        """Give values their contents; False: an input has none, as far as is known yet."""
        segment, call = part.segment, part.call
        cells, piece = part.cells, segment.stretch.parts[part.at]
        if not part.at:
            for cell, slot in enumerate(segment.inputs):
                cells[cell] = None if cell in segment.lost else slot.payload
        inputs = [cells[cell] for cell in piece.inputs]
        whole = None not in inputs
        for cell, value in zip(piece.outputs, call.outputs, strict=True):
            cells[cell] = made_of(call.function, value, *inputs) if whole else None
        for position, value in piece.exports:
            segment.outputs[value].payload = cells[piece.outputs[position]]
        return whole

    def _launched(self, part: Part) -> None:
        if self.world.alive(self):
            part.launched = True
            if part.gang is not None:
                self.world.memory.launched(part, self.world.agenda.now)
            self._turn(self.lanes[part.segment.lane])

    def _turn(self, lane: Lane) -> None:
        """Give its devices to the next computations, as many as they have streams."""
        streams, left_out = self.world.machine.streams, []
        for part in lane.flying:
            if not part.launched or not streams:
                break
            streams -= not part.over
            if not part.running:
                part.running = True
                if part.gang is not None:
                    self.world.come(part)
                else:
                    left_out.append(part)
        for part in left_out:
            self.part_ended(part, 0.0, None)

    # --- ending gangs ------------------------------------------------------------------

    def part_ended(self, part: Part, seconds: float, failure: Failure | None) -> None:
        """A gang has ended here; the launcher hears of the ends of a lane in their order."""
        part.over, part.seconds, part.failure = True, seconds, failure
        lane = self.lanes[part.segment.lane]
        while lane.flying and lane.flying[0].over:
            self._do(self._tell(lane.flying.popleft()))
        self._turn(lane)

    def _tell(self, part: Part) -> list[Action]:
        segment, failure = part.segment, part.failure
        if failure is not None:
            for cell in segment.stretch.parts[part.at].outputs:
                part.cells[cell] = None
        failures = {} if failure is None else {part.at: failure}
        return self.launcher.done(segment.key, [part.seconds], failures)

    def line(self) -> Iterator[tuple[int, int, SliceId]]:
        """Run, step and slice of gangs that are not over, in the order of their turns."""
        for lane in self.lanes.values():
            entered = [part for part in lane.flying if part.gang is not None]
            for part in (*entered, *lane.waiting):
                yield part.run, part.step, part.call.slice
        for segment in self.launcher.segments():
            for each in segment.stretch.parts if not segment.handed else ():
                yield segment.run.id, each.index, each.call.slice

    # --- reports -------------------------------------------------------------------------

    def _flush_soon(self, *, prompt: bool = False) -> None:
        """Report: at once when idle or long silent, else with what happens meanwhile.

        prompt: grants wait for it.
        """
        agenda, costs = self.world.agenda, self.world.machine.costs
        period = costs.prompt if prompt else costs.report
        if self.launcher.idle or agenda.now - self.flushed >= period:
            agenda.at(agenda.now, self._flush, priority=1)
        elif agenda.now + period < self.flushing:
            self.flushing = agenda.now + self.world.vary(period)
            agenda.at(self.flushing, self._flush)

    def _flush(self) -> None:
        self.flushing = math.inf
        if not (self.ends or self.resident):
            return
        self.flushed = self.world.agenda.now
        ends, self.ends = self.ends, Ends()
        resident, self.resident = self.resident, []
        self.world.report(self, ends, tuple(resident))
