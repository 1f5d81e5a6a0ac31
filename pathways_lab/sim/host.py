"""A simulated host: it launches in the order of its grants, and waits for memory.

Problem: the rules that hosts must keep are half of what makes a cluster free of
deadlock, so they are modelled exactly, and everything else roughly:

* steps begin in the order of the grants; one that must wait holds up all later
  ones that share a device with it, and no others;
* memory is taken in that order too, when a step begins, and a step waits until
  earlier ones have really freed it; uploads and arguments wait in the host's
  own memory for their first reader;
* a device is a FIFO queue that cannot be interrupted; a collective holds its
  devices from its turn on until all its partners have come;
* a missing input becomes zeros: the gang is launched all the same;
* code that it was told to forget is not there until it is compiled again.

Rule for maintainers: this is the specification of a device process; the real
one is tested against it.

Paper: section 4.4, section 4.5 (host-side work of executors).
"""

from __future__ import annotations

import math
from collections import deque

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import Grant
from pathways_lab.core.program.program import Call, SliceId, Transfer
from pathways_lab.sim.parts import HostValue, Part, RunHere, StepInfo, Task, WorldPort, made_of


class Host:
    """See the module's docstring."""

    def __init__(self, world: WorldPort, name: str, island: str) -> None:
        self.world = world
        self.name = name
        self.island = island
        count = world.machine.of(island).devices_per_host
        self.used = [0] * count
        self.most = 0
        self.launches: list[tuple[int, int, tuple[int, ...]]] = []
        self.queues: list[deque[Part]] = [deque() for _ in range(count)]
        self.running: list[list[Part]] = [[] for _ in range(count)]
        self.pending: list[Task] = []
        self.loose: list[Task] = []
        self.runs: dict[int, RunHere] = {}
        self.buffers: dict[int, HostValue] = {}
        self.forgotten: set[tuple[str, SliceId]] = set()
        self.thread = 0.0
        self.ingress = 0.0
        self.last_place: tuple[int, int] = (0, -1)
        self.finished: list[tuple[int, int, float]] = []
        self.failed: list[tuple[int, int, Failure]] = []
        self.resident: list[int] = []
        self.flushing = math.inf
        self.flushed = float("-inf")
        self.open = 0

    # --- messages ----------------------------------------------------------------

    def forget(self, functions: tuple[tuple[str, SliceId], ...]) -> None:
        """Nobody needs these any more."""
        self.forgotten.update(functions)

    def grant(self, grant: Grant) -> None:
        """A window of a run."""
        world = self.world
        if world.keep_order:
            epoch, last = self.last_place
            assert grant.previous == (last if epoch == grant.epoch else -1), f"gap at {self.name}"
            self.last_place = grant.epoch, grant.place
        here = self.runs.get(grant.run)
        if here is None:
            here = self.runs[grant.run] = RunHere(grant, world.plans[grant.plan])
            self._bind(here)
        here.prompt |= grant.prompt
        seq = grant.place - 1
        infos = world.steps(grant.plan)
        for step in range(grant.first, grant.last):
            info = infos[step]
            here_too = False
            for where in info.slices:
                if world.islands[where] == self.island:
                    seq += 1
                    break
            for where in info.slices:
                here_too = here_too or self.name in world.local[where]
            if here_too:
                here.open += 1
                self.open += 1
                task = Task(here, step, info, self._order_devices(info), seq)
                (self.pending if task.devices else self.loose).append(task)
        self.pump()

    def _order_devices(self, info: StepInfo) -> tuple[int, ...]:
        """A gang keeps its place on its devices, a transfer where its receive buffer lies."""
        if isinstance(info.node, Call):
            return self.world.local[info.node.slice][self.name]
        return self.world.local[info.slices[-1]].get(self.name, ())

    def _bind(self, here: RunHere) -> None:
        """Inputs become values of the run; count the readers of all values on this host."""
        plan = here.plan
        fresh: dict[int, HostValue] = {}
        for p, value in enumerate(plan.inputs):
            number = here.grant.inputs[p]
            where = plan.values[value].slice
            if where is None or self.name not in self.world.local[where]:
                continue
            if number is None:
                argument = self._value(plan.values[value].nbytes, where)
                argument.ready = argument.done = True
                argument.content = made_of("argument", here.grant.run, p)
                here.values[value] = argument
            else:
                found = self.buffers.get(number)
                if found is None:
                    found = self.buffers[number] = self._value(plan.values[value].nbytes, where)
                    found.kept = True
                    fresh[number] = found
                here.values[value] = found
        outputs = dict(zip(plan.outputs, here.grant.outputs, strict=True))
        values = here.values
        for info in self.world.steps(plan.key):
            involved = False
            for where in info.slices:
                involved = involved or self.name in self.world.local[where]
            if not involved:
                continue
            here.left += 1
            for value in info.made:
                where = plan.values[value].slice
                assert where is not None
                if self.name in self.world.local[where]:
                    number = outputs.get(value)
                    made = self.buffers.get(number) if number is not None else None
                    if made is None:
                        made = self._value(plan.values[value].nbytes, where)
                    values[value] = made
                    if number is not None:
                        made.kept = True
                        self.buffers[number] = made
            for value in info.used:
                if value in values:
                    values[value].readers += 1
        for number, found in fresh.items():
            if not found.readers:
                del self.buffers[number]  # nothing reads it, so nobody would free it

    def _value(self, nbytes: int, where: SliceId) -> HostValue:
        return HostValue(nbytes, self.world.local[where][self.name], where=where)

    def unbind(self, where: SliceId) -> None:
        """A slice is gone, with every buffer on it."""
        self.free(tuple([b for b, value in self.buffers.items() if value.where == where]))

    def free(self, buffers: tuple[int, ...]) -> None:
        """Forget buffers; nothing that was granted reads them any more."""
        for number in buffers:
            value = self.buffers.pop(number, None)
            if value is not None:
                for task in value.sends:
                    assert task.run.aborted, f"buffer {number} is freed while it is sent"
                value.kept = False
                value.readers = 0
                if not value.sends:
                    self._drop(value)
        self.pump()

    def abort(self, run: int) -> None:
        """A run ends early: wait for nothing of it, keep nothing of it."""
        here = self.runs.get(run)
        if here is None:
            return
        here.aborted = True
        for value in here.values.values():
            if not value.kept and not value.done:
                value.ready = True
        self.world.carrier.give_up(run)
        self._forget(here)
        self.pump()

    def _forget(self, here: RunHere) -> None:
        if here.aborted and not here.open:
            self.runs.pop(here.grant.run, None)
            for value in here.values.values():
                if not value.kept:
                    self._drop(value)

    def upload(self, buffer: int, where: SliceId, nbytes: int) -> None:
        """A client's bytes have come; they take device memory with their first reader."""
        value = self.buffers.get(buffer)
        if value is None:
            value = self.buffers[buffer] = self._value(nbytes, where)
        value.kept = value.ready = value.done = True
        value.content = made_of("upload", buffer)
        self.resident.append(buffer)
        self.flush_soon()

    def lacks(self, buffer: int, content: object) -> str:
        """What is wrong with a value that a client was told is here; "" when nothing is."""
        value = self.buffers.get(buffer)
        if value is None or not value.done or value.bad:
            return "no value"
        return "" if value.content == content else "a wrong value"

    # --- beginning steps -------------------------------------------------------------

    def pump(self) -> None:
        """Begin every step that may begin now."""
        if self.loose:
            loose, self.loose = self.loose, []
            for task in loose:
                self._begin(task)  # it only sends, and keeps nobody's place
        blocked: set[int] = set()
        begun = False
        for task in self.pending:
            if task.begun:
                continue  # by a pump inside this one
            if blocked and not blocked.isdisjoint(task.devices):
                blocked.update(task.devices)
            elif self._may_begin(task):
                task.begun = begun = True
                self._begin(task)
            else:
                blocked.update(task.devices)
            if len(blocked) == len(self.used):
                break
        if begun:
            self.pending = [t for t in self.pending if not t.begun]

    def _may_begin(self, task: Task) -> bool:
        values, info = task.run.values, task.info
        if isinstance(info.node, Transfer):
            output = values[info.made[0]]
            return self._fits(output.devices, output.nbytes)
        depth = self.world.machine.depth
        for d in task.devices:
            if len(self.queues[d]) >= depth:
                return False
        need = info.cost.temporary
        for v in info.used:
            value = values[v]
            if not (value.ready or value.bad):
                return False
            if not value.taken:
                need += value.nbytes
        made = 0
        for v in info.made:
            made += values[v].nbytes
        for v in info.consumed:
            if values[v].sends:
                return False
            made -= values[v].nbytes
        return self._fits(task.devices, need + max(made, 0))

    def _fits(self, devices: tuple[int, ...], nbytes: int) -> bool:
        limit = self.world.machine.of(self.island).memory
        return all(self.used[d] + nbytes <= limit for d in devices)

    def _take(self, value: HostValue) -> None:
        if not value.taken:
            value.taken = True
            self._add(value.devices, value.nbytes)

    def _drop(self, value: HostValue) -> None:
        if value.taken:
            value.taken = False
            self._add(value.devices, -value.nbytes)

    def _add(self, devices: tuple[int, ...], nbytes: int) -> None:
        for d in devices:
            self.used[d] += nbytes
            if self.used[d] > self.most:
                self.most = self.used[d]

    def _release(self, value: HostValue) -> None:
        """Give back a value that no step here will read and no message will free."""
        if value.readers <= 0 and not value.kept and value.done:
            self._drop(value)

    def _begin(self, task: Task) -> None:
        info, values = task.info, task.run.values
        if isinstance(info.node, Transfer):
            self.world.carrier.begin(self, task)
            return
        poisoned = False
        for v in info.used:
            poisoned = poisoned or values[v].bad
        if poisoned and not self.world.launch_poisoned:
            self._skip(task)
            return
        inputs = [values[v].content for v in info.node.inputs]
        for v in info.used:
            self._take(values[v])
        for v in info.consumed:
            self._drop(values[v])
        for v in info.made:
            value = values[v]
            self._take(value)
            value.ready = True
            value.bad = poisoned
            if not poisoned:
                value.content = made_of(info.node.function, v, *inputs)
        if info.cost.temporary:
            self._add(task.devices, info.cost.temporary)
        if self.world.remember:
            self.launches.append((task.run.grant.run, task.step, task.devices))
        world, now = self.world, self.world.agenda.now
        if self.thread <= now:
            self.thread = now + world.vary(world.machine.costs.wake)
        self.thread += world.vary(world.machine.costs.launch)
        gang = self.world.gang(task, info.cost)
        code = info.node.function, info.node.slice
        assert gang.broken or code not in self.forgotten, f"{self.name} has forgotten {code}"
        part = Part(self, task, gang, len(task.devices), info.cost.temporary)
        for d in task.devices:
            self.queues[d].append(part)
        self.world.agenda.at(self.thread, self._launched, part)

    def _launched(self, part: Part) -> None:
        if self.world.alive(self):
            part.launched = True
            self.world.memory.launched(part, self.world.agenda.now)
            for d in part.task.devices:
                self._turn(d)

    def _turn(self, device: int) -> None:
        """Give the device to the next computations in its queue, as many as it has streams."""
        running, queue = self.running[device], self.queues[device]
        while len(running) < self.world.machine.streams and len(running) < len(queue):
            part = queue[len(running)]
            if not part.launched:
                return
            running.append(part)
            part.turns -= 1
            if part.turns == 0:
                self.world.come(part)

    def _skip(self, task: Task) -> None:
        """Without the rule of poisoned gangs: do not enter what others enter."""
        for v in task.info.made:
            value = task.run.values[v]
            value.ready = value.done = value.bad = True
        why = Failure("execute", "an input is missing on this host")
        self.failed.append((task.run.grant.run, task.step, why))
        self.end(task, 0.0)

    # --- ending steps ------------------------------------------------------------------

    def part_ended(self, part: Part, seconds: float, failure: Failure | None) -> None:
        """A gang has ended here."""
        task = part.task
        part.over = True
        for d in task.devices:
            self.running[d].remove(part)
            self.queues[d].remove(part)
        if part.temporary:
            self._add(task.devices, -part.temporary)
        for v in task.info.made:
            value = task.run.values[v]
            value.done = True
            if failure is not None:
                value.bad = True
        if failure is not None:
            self.failed.append((task.run.grant.run, task.step, failure))
        for v in task.info.made:
            if task.run.values[v].sends:
                self._sent(task.run.values[v])
        self.end(task, seconds)
        for d in task.devices:
            self._turn(d)

    def receive(self, value: HostValue) -> None:
        """Room for a transfer's bytes is taken, in the order of the grants."""
        self._take(value)

    def received(self, task: Task, bad: bool) -> None:
        """A transfer's bytes are here; *bad*: they never will be, zeros stand for them."""
        value = task.run.values[task.info.made[0]]
        value.ready = value.done = True
        value.bad = value.bad or bad
        self._sent(value)

    def sent(self, task: Task) -> None:
        """A transfer has taken its bytes from here."""
        value = task.run.values[task.info.used[0]]
        value.sends.remove(task)
        if not value.sends:
            self._release(value)

    def _sent(self, value: HostValue) -> None:
        """The bytes exist: transfers that waited for them go."""
        for task in list(value.sends):
            self.world.carrier.ready(self, task)

    def end(self, task: Task, seconds: float) -> None:
        """A step has ended here: report it, free what it was the last to use."""
        here = task.run
        for v in task.info.used:
            value = here.values.get(v)
            if value is not None:
                value.readers -= 1
                self._release(value)
        for v in task.info.made:
            value = here.values.get(v)
            if value is not None:
                self._release(value)
        here.open -= 1
        here.left -= 1
        self.open -= 1
        self.finished.append((here.grant.run, task.step, seconds))
        self.world.cores.work(self.world.machine.costs.step_work)
        if here.aborted:
            self._forget(here)
        elif not here.left:
            self.runs.pop(here.grant.run, None)
        self.flush_soon(prompt=here.prompt)
        self.pump()

    def flush_soon(self, *, prompt: bool = False) -> None:
        """Report: at once when idle or long silent, else with what happens meanwhile.

        prompt: grants wait for it.
        """
        agenda, costs = self.world.agenda, self.world.machine.costs
        period = costs.prompt if prompt else costs.report
        if not self.open or agenda.now - self.flushed >= period:
            agenda.at(agenda.now, self._flush, priority=1)
        elif agenda.now + period < self.flushing:
            self.flushing = agenda.now + self.world.vary(period)
            agenda.at(self.flushing, self._flush)

    def _flush(self) -> None:
        self.flushing = math.inf
        if not (self.finished or self.failed or self.resident):
            return
        self.flushed = self.world.agenda.now
        finished, self.finished = self.finished, []
        failed, self.failed = self.failed, []
        resident, self.resident = self.resident, []
        self.world.report(self, tuple(finished), tuple(failed), tuple(resident))
