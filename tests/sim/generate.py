"""Random workloads: machines, slices, programs and clients that misbehave.

Problem: the rules of order and memory must hold for programs nobody thought
of.  A workload is drawn from one seed: programs that span islands, results of
one run that feed the next, donated and dropped handles, uploads, failing
steps, cancelled runs, dying hosts and clients, and memory that is too small
for comfort.

Rule for maintainers: sizes are units of memory (a few), not real bytes, so
that the interesting cases are likely; everything comes from the given
generator.

Paper: none.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pathways_lab.core.messages import (
    BuffersDropped,
    CancelRequested,
    Command,
    Event,
    FunctionAnnounced,
    HandlePublished,
    HandleTaken,
    LeaseRequested,
    LeaseReturned,
    ProgramRegistered,
    ProgramsDropped,
    QuotaChosen,
    Refused,
    Resolved,
    RunEnded,
    RunSubmitted,
    SliceBound,
    SliceReleased,
    SliceRequested,
    SliceWaiting,
    Taken,
)
from pathways_lab.core.program.program import Call, Plan, SliceId, Value
from pathways_lab.core.scheduling.policies import (
    FIFO,
    PlaceView,
    Policy,
    PolicyView,
    Priority,
    ProportionalShare,
    ShortestFirst,
)
from pathways_lab.core.slices.topology import SliceRequest
from pathways_lab.sim.machine import Costs, FunctionCost, Machine
from pathways_lab.sim.parts import made_of
from pathways_lab.sim.world import World
from tests.sim.drafts import Shape, random_plan


def _functions(plan: Plan) -> dict[tuple[str, SliceId], None]:
    calls = [step.node for step in plan.steps if isinstance(step.node, Call)]
    return dict.fromkeys((call.function, call.slice) for call in calls)


ALONG = 0.3
"""Share of the inputs that a client drops whose drop travels with the run."""


@dataclass(slots=True)
class _Handle:
    slice: SliceId
    nbytes: int
    gone: bool = False


@dataclass(slots=True)
class RandomClient:
    """Asks for slices, submits runs that feed on each other, drops, cancels, leaves.

    asked: slices that are not refused.  ended: by run, how often it ended and how.
    resolved: by buffer, outcomes.  contents: what must be in every buffer of its own.
    taken: by its number for it, the buffer that it has taken of others.
    """

    world: World
    name: str
    number: int
    shape: Shape
    rng: random.Random
    asked: dict[SliceId, SliceRequest] = field(default_factory=dict)
    bound: dict[SliceId, int] = field(default_factory=dict)
    plans: list[Plan] = field(default_factory=list)
    handles: dict[int, _Handle] = field(default_factory=dict)
    runs: list[int] = field(default_factory=list)
    outputs: dict[int, int] = field(default_factory=dict)
    ended: dict[int, list[RunEnded]] = field(default_factory=dict)
    resolved: dict[int, list[Resolved]] = field(default_factory=dict)
    contents: dict[int, int] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)
    registered: set[str] = field(default_factory=set)
    left: bool = False
    _next: int = 0
    _working: bool = False

    def begin(self) -> None:
        """Connect and ask for slices."""
        self.world.connect(self, self.number)
        if self.number == 1 and self.rng.random() < self.shape.limit:
            self._limit()
        machine = self.world.machine
        most = machine.hosts_per_island * machine.devices_per_host
        for _ in range(self.rng.randint(1, self.shape.slices)):
            self._next += 1
            slice_id = (self.number << 32) | self._next
            shape, window = (self.rng.randint(1, most),), self.rng.choice((None, None, 0.0, 0.01))
            request = SliceRequest(shape, ("x",), window=window)
            if self.shape.span and self.rng.random() < self.shape.span:
                count = self.rng.randint(1, machine.islands)
                request = replace(request, shape=(count * shape[0],), islands=("",) * count)
            self.asked[slice_id] = request
            waits = self.rng.random() < 0.7
            self.send(
                lambda t, s=slice_id, r=request, w=waits: SliceRequested(
                    t, "ask", self.name, s, r, w
                )
            )
        if self.rng.random() < self.shape.lease:
            self.world.agenda.after(self.rng.random() * 0.02, self._lease)

    def _limit(self) -> None:
        """Quotas for everybody, so small that they matter."""
        devices = self.rng.choice((None, 2, 4))
        nbytes = self.rng.choice((None, 15, 30, 60))
        self.send(lambda t: QuotaChosen(t, "quota", self.name, "", devices, nbytes))

    def _lease(self) -> None:
        island = self.rng.choice(sorted(h.island for h in self.world.hosts.values()) or ["none"])
        after = self.rng.random() * 0.05
        if not self.left:
            self.send(lambda t: LeaseRequested(t, "lease", self.name, island))
            self.world.agenda.after(
                after, self._unless_left, lambda t: LeaseReturned(t, "return", self.name, island)
            )

    def _unless_left(self, make: Callable[..., Event]) -> None:
        if not self.left:
            self.send(make)

    def send(self, make: Callable[..., Event]) -> None:
        """An event to the control plane."""
        self.world.tell(self.name, make)

    def told(self, command: Command) -> None:
        """Slices first; when all are there, programs and runs."""
        if isinstance(command, SliceBound):
            self.bound[command.binding.slice] = len(command.binding.devices)
            self._begin_to_work()
        elif isinstance(command, SliceWaiting):
            self.world.agenda.after(self.rng.random() * 0.05, self._give_up, command.slice)
        elif isinstance(command, Refused) and command.subject.startswith("slice "):
            self.asked.pop(int(command.subject.split()[1]), None)
            self._begin_to_work()
        elif isinstance(command, Taken):
            for number, stored in zip(command.buffers, command.stored, strict=True):
                self.taken[number] = stored
                if self.rng.random() < self.shape.drop:
                    self.world.agenda.after(self.rng.random() * 0.02, self._drop_taken, number)
        elif isinstance(command, Resolved):
            for buffer in command.buffers:
                self.resolved.setdefault(buffer, []).append(command)
                self._perhaps_keep(buffer)
        elif isinstance(command, RunEnded):
            self.ended.setdefault(command.run, []).append(command)

    def _give_up(self, slice_id: SliceId) -> None:
        """Waiting in line has been long enough."""
        if slice_id in self.asked and slice_id not in self.bound and not self.left:
            del self.asked[slice_id]
            self.send(lambda t: SliceReleased(t, "release", self.name, slice_id))
            self._begin_to_work()

    def _begin_to_work(self) -> None:
        self.bound = {s: n for s, n in self.bound.items() if s in self.asked}
        if self.bound and len(self.bound) == len(self.asked) and not self._working:
            self._working = True
            self._work()

    def _drop_taken(self, number: int) -> None:
        if self.taken.pop(number, None) is not None and not self.left:
            self.send(lambda t: BuffersDropped(t, "drop", self.name, (number,)))

    def _publish_or_take(self, outputs: list[int]) -> None:
        name = f"result {self.rng.randint(1, 2)}"
        if self.rng.random() < 0.5 and outputs:
            buffer = self.rng.choice(outputs)
            self.send(lambda t: HandlePublished(t, "publish", self.name, name, (buffer,)))
        else:
            number = self._number()
            self.send(lambda t: HandleTaken(t, "take", self.name, name, (number,)))

    def _perhaps_keep(self, buffer: int, ahead: bool = False) -> None:
        if self.shape.stay and self.rng.random() < self.shape.stay:
            of = self.name, f"of {self.name}: {self.rng.randint(1, 2)}", (buffer,)
            self._unless_left(lambda t: HandlePublished(t, "keep", *of, keep=True, ahead=ahead))

    def _work(self) -> None:
        for number in range(self.rng.randint(1, self.shape.programs)):
            plan = random_plan(self.rng, self.bound, self.shape, f"{self.name}.p{number}")
            self.plans.append(plan)
            self._register(plan)
        time = 0.0
        for _ in range(self.rng.randint(1, self.shape.runs)):
            time += self.rng.expovariate(1 / 0.002)
            self.world.agenda.after(time, self._submit)
        if self.rng.random() < self.shape.leave:
            self.world.agenda.after(self.rng.random() * 0.1, self._leave)

    def _register(self, plan: Plan) -> None:
        self.registered.add(plan.key)
        for f, w in _functions(plan):
            self.send(lambda t, f=f, w=w: FunctionAnnounced(t, "announce", self.name, f, w))
        self.send(lambda t: ProgramRegistered(t, "register", self.name, plan))

    def _forget(self, plan: Plan) -> None:
        """Its functions are its own; its runs may be anywhere."""
        if plan.key in self.registered and not self.left:
            self.registered.discard(plan.key)
            functions = tuple(_functions(plan))
            self.send(lambda t: ProgramsDropped(t, "forget", self.name, (plan.key,), functions))

    def _submit(self) -> None:
        if self.left:
            return
        plan = self.rng.choice(self.plans)
        if plan.key not in self.registered:
            self._register(plan)
        donated = {
            plan.inputs.index(v)
            for step in plan.steps
            if isinstance(step.node, Call)
            for v in (step.node.inputs[p] for p in step.node.donated)
            if v in plan.inputs
        }
        inputs: list[int | None] = []
        for p, value_id in enumerate(plan.inputs):
            inputs.append(self._input(plan.values[value_id], p in donated, inputs))
        run = self._number()
        outputs = []
        for value_id in plan.outputs:
            value = plan.values[value_id]
            assert value.slice is not None
            outputs.append(self._number())
            self.handles[outputs[-1]] = _Handle(value.slice, value.nbytes)
            self.outputs[outputs[-1]] = run
        self.runs.append(run)
        self._expect(plan, run, inputs, outputs)
        priority = self.rng.randint(1, 3) if self.rng.random() < self.shape.urgent else 0
        along: list[int] = []
        self.send(
            lambda t: RunSubmitted(
                t, "submit", self.name, run, plan.key, tuple(inputs), tuple(outputs), priority,
                dropped=tuple(along),
            )
        )  # fmt: skip
        if self.shape.forget and self.rng.random() < self.shape.forget:
            self.world.agenda.after(self.rng.random() * 0.01, self._forget, plan)
        if self.rng.random() < self.shape.share:
            self._publish_or_take(outputs)
        for buffer in outputs:
            self._perhaps_keep(buffer, ahead=True)
        for buffer in (*inputs, *outputs):
            if buffer is not None and self.rng.random() < self.shape.drop:
                late = self.rng.random()
                if late < ALONG and buffer in inputs and self.handles.pop(buffer, None):
                    along.append(buffer)
                else:
                    self.world.agenda.after(late * 0.02, self._drop, buffer)
        if self.rng.random() < self.shape.cancel:
            self.world.agenda.after(self.rng.random() * 0.01, self._cancel, run, outputs)
        if self.shape.release and self.rng.random() < self.shape.release:
            self.world.agenda.after(self.rng.random() * 0.02, self._release)

    def _cancel(self, run: int, outputs: list[int]) -> None:
        """One run, some of what it makes, or everything."""
        if not self.left:
            runs, buffers = self.rng.choice(
                (
                    ((run,), ()),
                    ((), tuple(self.rng.sample(outputs, self.rng.randint(1, len(outputs))))),
                    (tuple(self.runs), ()),
                )
            )
            number = self._number()
            self.send(lambda t: CancelRequested(t, "cancel", self.name, runs, buffers, number))

    def _release(self) -> None:
        if self.bound and not self.left:
            slice_id = self.rng.choice(sorted(self.bound))
            del self.bound[slice_id]
            self.send(lambda t: SliceReleased(t, "release", self.name, slice_id))

    def _expect(self, plan: Plan, run: int, inputs: list[int | None], outputs: list[int]) -> None:
        """What must come of a run, by another way than through hosts."""
        values: dict[int, int] = {}
        for p, (value, buffer) in enumerate(zip(plan.inputs, inputs, strict=True)):
            values[value] = made_of("argument", run, p) if buffer is None else self.contents[buffer]
        deciding = {step.node.when.value for step in plan.steps if step.node.when is not None}
        decided: dict[int, int] = {}
        for step in plan.steps:
            node = step.node
            if node.when is not None and decided.get(node.when.value) != node.when.case:
                continue
            if isinstance(node, Call):
                for value in deciding.intersection(node.outputs):
                    decided[value] = self.world.choose(run, value)
                parts = [values[v] for v in node.inputs]
                values.update({v: made_of(node.function, v, *parts) for v in node.outputs})
            else:
                values[node.output] = values[node.input]
        self.contents.update(zip(outputs, (values[v] for v in plan.outputs), strict=True))

    def _input(self, value: Value, donated: bool, taken: list[int | None]) -> int | None:
        assert value.slice is not None
        fitting = [
            b
            for b, h in self.handles.items()
            if (h.slice, h.nbytes, h.gone) == (value.slice, value.nbytes, False) and b not in taken
        ]
        if fitting and self.rng.random() < self.shape.reuse:
            buffer = self.rng.choice(fitting)
        elif self.rng.random() < 0.5:
            return None
        else:
            buffer = self._number()
            self.handles[buffer] = _Handle(value.slice, value.nbytes)
            self.contents[buffer] = made_of("upload", buffer)
            killed = self.rng.random() < self.shape.kill
            reached = self.rng.choice((0, 1, None)) if killed else None
            said = not killed or self.rng.random() < 0.5
            self.world.declare(self.name, buffer, value.slice, value.nbytes, reached, said)
            if killed:
                self.world.agenda.after(0.0, self._leave)
        self.handles[buffer].gone = donated
        return buffer

    def _drop(self, buffer: int) -> None:
        handle = self.handles.pop(buffer, None)
        if handle is not None and not self.left:
            self.send(lambda t: BuffersDropped(t, "drop", self.name, (buffer,)))

    def drop_all(self) -> None:
        """Drop every handle that is left."""
        for buffer in list(self.handles):
            self._drop(buffer)
        for number in list(self.taken):
            self._drop_taken(number)

    def _leave(self) -> None:
        if not self.left:
            self.left = True
            self.world.disconnect(self.name, "random")

    def _number(self) -> int:
        self._next += 1
        return (self.number << 32) | self._next


@dataclass(frozen=True, slots=True)
class LastFirst:
    """The unfairest policy."""

    def choose(self, view: PolicyView) -> int:
        """Whoever came last."""
        return view.candidates[-1].run


@dataclass(frozen=True, slots=True)
class Anyhow:
    """A policy that is different every time, and sometimes wrong."""

    rng: random.Random

    def choose(self, view: PolicyView) -> int:
        """Anybody, or nobody."""
        if self.rng.random() < 0.01:
            raise RuntimeError("no idea")
        return self.rng.choice(view.candidates).run

    def place(self, view: PlaceView) -> str:
        """Anywhere, or nowhere."""
        return "nowhere" if self.rng.random() < 0.01 else self.rng.choice(view.candidates).island


def random_policy(rng: random.Random) -> Policy:
    """One of the policies that exist, or a bad one."""
    shares = {f"kernel-{n}": 2.0**n for n in range(3)}
    policies: tuple[Policy, ...] = (
        FIFO(),
        Priority(),
        ShortestFirst(),
        ProportionalShare(shares),
        LastFirst(),
        Anyhow(rng),
    )
    return rng.choice(policies)


def random_machine(rng: random.Random, shape: Shape) -> Machine:
    """A small machine, perhaps with too little memory."""
    functions = {
        f"kernel-{c}.p{p}.f{n}": FunctionCost(
            rng.choice((0.0002, 0.001, 0.01)), rng.random() < 0.8, rng.choice((0, 0, 1, 2)),
            rng.choice((0.0, 0.001, 0.02)),
        )
        for c in range(1, shape.clients + 1)
        for p in range(shape.programs)
        for n in range(shape.nodes)
    }  # fmt: skip
    return Machine(
        islands=rng.randint(1, shape.islands),
        hosts_per_island=rng.randint(1, shape.hosts),
        devices_per_host=rng.randint(1, shape.devices),
        memory=rng.randint(*shape.memory),
        costs=Costs(island=2e4, dcn=1e4, local=1e5, jitter=0.0),
        depth=rng.choice((1, 2, 8)),
        functions=functions,
    )


def uneven(spread: float) -> Callable[[random.Random, float], float]:
    """Durations that are sometimes ten times longer than others."""

    def vary(rng: random.Random, seconds: float) -> float:
        return seconds * float(10 ** (spread * (rng.random() - 0.5)))

    return vary
