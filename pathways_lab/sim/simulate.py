"""Simulate programs on a machine: a timeline like any other.

Problem: "what would this program do on 2,048 devices, under this policy?" must
be one call, give the same answer every time, and the answer must be readable
by everything that reads the timeline of a real cluster.

Rule for maintainers: a :class:`Load` says how a client uses a program; the
program itself is what a real client would have lowered.

Paper: section 5 (experiments that can be repeated here).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.layout import Layout
from pathways_lab.core.lowering import lower
from pathways_lab.core.messages import (
    BuffersDropped,
    Command,
    Event,
    FunctionAnnounced,
    Grant,
    PolicyChosen,
    ProgramRegistered,
    Refused,
    RunEnded,
    RunSubmitted,
    SliceBound,
    SliceRequested,
)
from pathways_lab.core.policies import Policy
from pathways_lab.core.program import Call, Plan, Program, Signature, SliceId, Transfer, Value
from pathways_lab.core.rules import Rules
from pathways_lab.core.topology import SliceRequest
from pathways_lab.sim.machine import Machine
from pathways_lab.sim.world import World
from pathways_lab.timeline.records import Record, Span


@dataclass(frozen=True, slots=True)
class Load:
    """How one client runs one program.

    program: its slices are numbers, and their sizes those of its layouts.
    runs: how many.  flight: how many are submitted and not ended, at most.
    feeds: output position to the input position of the next run.
    islands: where a slice shall lie, by its number in the program.
    start: seconds at which the client connects.  priority: of its runs.
    """

    program: Program | Plan
    client: str = "kernel-1"
    runs: int = 1
    flight: int = 2
    feeds: Mapping[int, int] = field(default_factory=dict)
    islands: Mapping[SliceId, str] = field(default_factory=dict)
    start: float = 0.0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Simulated:
    """records: the timeline.  ended: by run, when, and why it failed if it did.

    seconds: from the first submission to the end of the last run.
    events: how many the control plane handled.
    world: everything, for whoever wants to look closer.
    """

    records: tuple[Record, ...]
    ended: Mapping[int, tuple[float, Failure | None]]
    seconds: float
    events: int
    world: World

    def busy(self, kind: str = "gang") -> dict[str, float]:
        """Device seconds by client."""
        found: dict[str, float] = {}
        for r in self.records:
            if isinstance(r, Span) and r.kind == kind:
                found[r.client] = found.get(r.client, 0.0) + (r.end - r.start) * len(r.devices)
        return found


def simulate(
    work: Program | Plan | Load | Sequence[Load],
    machine: Machine | None = None,
    policy: Policy | None = None,
    seed: int = 0,
    *,
    rules: Rules | None = None,
    runs: int = 1,
    until: float = float("inf"),
    lag: Callable[[Grant], float] | None = None,
    world: World | None = None,
) -> Simulated:
    """What *work* does on *machine*.

    work: a program (run *runs* times by one client), or how clients use several.
    until: simulated seconds after which to stop looking.
    lag: switches the order off (for showing what it is for): every grant goes
        its own way to its host, and takes so many seconds longer.
    world: to use instead of a new one for *machine*, *seed* and *rules*.
    Raises PathwaysError when a slice cannot be had.
    """
    if isinstance(work, Program | Plan):
        work = Load(work, runs=runs)
    loads = [work] if isinstance(work, Load) else list(work)
    if world is None:
        world = World(machine or Machine(), seed, rules, keep_order=lag is None)
    if lag is not None:
        world.lag = lag
    events = [0]
    world.observers.append(lambda event, commands: events.__setitem__(0, events[0] + 1))
    numbers: dict[str, int] = {}
    for load in loads:
        numbers.setdefault(load.client, len(numbers) + 1)
    drivers = [
        _Driver(world, name, number, [load for load in loads if load.client == name])
        for name, number in numbers.items()
    ]
    for driver in drivers:
        driver.policy = policy if driver is drivers[0] else None
        start = min(load.start for load in driver.loads)
        world.agenda.at(start + 10 * world.machine.costs.control_latency, driver.begin)
    world.agenda.run(until)
    ended = {run: end for driver in drivers for run, end in driver.ended.items()}
    first = min((d.first for d in drivers if d.first >= 0.0), default=0.0)
    last = max((time for time, _ in ended.values()), default=first)
    return Simulated(tuple(world.records), ended, last - first, events[0], world)


def slice_shapes(program: Program | Plan) -> dict[SliceId, tuple[tuple[str, int], ...]]:
    """The mesh of every slice, as the layouts on it say."""
    found: dict[SliceId, tuple[tuple[str, int], ...]] = {}
    if isinstance(program, Program):
        for node in program.nodes:
            if isinstance(node, Call):
                signature = program.signatures[node.function]
                for layout in (*signature.inputs, *signature.outputs):
                    found.setdefault(node.slice, layout.mesh)
    for value in program.values:
        if value.slice is not None and value.layout is not None:
            found.setdefault(value.slice, value.layout.mesh)
    return found


@dataclass(slots=True)
class _Work:
    """One load, while it runs."""

    load: Load
    slices: dict[SliceId, SliceId]
    plan: Plan | None = None
    waiting: int = 0
    left: int = 0
    flying: deque[tuple[int, tuple[int, ...]]] = field(default_factory=deque)
    fed: dict[int, int] = field(default_factory=dict)


class _Driver:
    """One client with its loads."""

    def __init__(self, world: World, name: str, number: int, loads: list[Load]) -> None:
        self.world = world
        self.name = name
        self.number = number
        self.loads = loads
        self.policy: Policy | None = None
        self.first = -1.0
        self.ended: dict[int, tuple[float, Failure | None]] = {}
        self._works: list[_Work] = []
        self._of_slice: dict[SliceId, _Work] = {}
        self._of_run: dict[int, _Work] = {}
        self._next = 0

    def begin(self) -> None:
        """Connect, and ask for the slices of every load."""
        self.world.connect(self)
        if self.policy is not None:
            policy = self.policy
            self._send(lambda t: PolicyChosen(t, "policy", self.name, policy))
        for load in self.loads:
            work = _Work(load, {}, left=load.runs)
            self._works.append(work)
            for theirs, mesh in slice_shapes(load.program).items():
                ours = work.slices[theirs] = self._number()
                self._of_slice[ours] = work
                work.waiting += 1
                request = SliceRequest(
                    tuple(size for _, size in mesh),
                    tuple(axis for axis, _ in mesh),
                    load.islands.get(theirs),
                )
                self._send(lambda t, o=ours, r=request: SliceRequested(t, "ask", self.name, o, r))

    def told(self, command: Command) -> None:
        """See :class:`pathways_lab.sim.world.Client`."""
        if isinstance(command, SliceBound):
            work = self._of_slice[command.binding.slice]
            work.waiting -= 1
            if not work.waiting:
                self._register(work)
        elif isinstance(command, Refused):
            raise PathwaysError(command.failure)
        elif isinstance(command, RunEnded):
            work = self._of_run[command.run]
            self.ended[command.run] = self.world.agenda.now, command.failure
            self._submit(work)

    def _register(self, work: _Work) -> None:
        program = _placed(work.load.program, work.slices)
        work.plan = plan = lower(program) if isinstance(program, Program) else program
        for step in plan.steps:
            if isinstance(step.node, Call):
                node = step.node
                self._send(
                    lambda t, n=node: FunctionAnnounced(
                        t, "announce", self.name, n.function, n.slice
                    )
                )
        self._send(lambda t: ProgramRegistered(t, "register", self.name, plan))
        for _ in range(work.load.flight):
            self._submit(work)

    def _submit(self, work: _Work) -> None:
        plan, load = work.plan, work.load
        assert plan is not None
        while work.flying and work.flying[0][0] in self.ended:
            _, unfed = work.flying.popleft()
            self._drop(unfed)
        if not work.left:
            return
        work.left -= 1
        if self.first < 0.0:
            self.first = self.world.agenda.now
        inputs: list[int | None] = [work.fed.get(p) for p in range(len(plan.inputs))]
        run = self._number()
        outputs = tuple(self._number() for _ in plan.outputs)
        self._of_run[run] = work
        old = tuple(work.fed.values())
        work.fed = {into: outputs[out] for out, into in load.feeds.items()}
        fed = set(work.fed.values())
        work.flying.append((run, tuple(b for b in outputs if b not in fed)))
        given = tuple(inputs)
        self._send(
            lambda t: RunSubmitted(
                t, "submit", self.name, run, plan.key, given, outputs, load.priority
            )
        )
        self._drop(old)

    def _drop(self, buffers: tuple[int, ...]) -> None:
        if buffers:
            self._send(lambda t: BuffersDropped(t, "drop", self.name, buffers))

    def _send(self, make: Callable[..., Event]) -> None:
        self.world.tell(self.name, make)

    def _number(self) -> int:
        self._next += 1
        return (self.number << 32) | self._next


def _placed(program: Program | Plan, slices: Mapping[SliceId, SliceId]) -> Program | Plan:
    """The same program on the slices that were got."""

    def value(v: Value) -> Value:
        where = None if v.slice is None else slices[v.slice]
        return Value(v.shape, v.dtype, where, v.layout, v.nbytes, v.name)

    def node(n: Call | Transfer) -> Call | Transfer:
        if isinstance(n, Transfer):
            return n
        return Call(
            n.function, slices[n.slice], n.inputs, n.outputs, n.donated, n.name, n.line, n.ahead
        )

    values = tuple(map(value, program.values))
    if isinstance(program, Program):
        nodes = tuple(map(node, program.nodes))
        return Program(
            program.name, values, nodes, program.inputs, program.outputs, program.signatures
        )
    steps = tuple(type(s)(node(s.node), s.frees) for s in program.steps)
    places = ",".join(str(s) for s in slices.values())
    return Plan(
        f"{program.key}@{places}", program.name, values, steps, program.inputs, program.outputs,
        tuple(sorted(slices[s] for s in program.slices)),
    )  # fmt: skip


def chain(name: str, devices: int, functions: Sequence[str], nbytes: int = 4) -> Program:
    """A program of functions one after the other on one slice, the result fed by the last."""
    row = Layout((("x", devices),), ((),))
    values = tuple(
        Value((nbytes,), "uint8", 0, row, nbytes, f"v{n}") for n in range(len(functions) + 1)
    )
    nodes = tuple(Call(f, 0, (n,), (n + 1,), name=f) for n, f in enumerate(functions))
    signatures = {f: Signature(f, 0, (row,), (row,)) for f in functions}
    return Program(name, values, nodes, (0,), (len(functions),), signatures)
