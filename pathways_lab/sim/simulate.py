"""Simulate programs on a machine: a timeline like any other.

Problem: "what would this program do on 2,048 devices, under this policy?" must
be one call, give the same answer every time, and the answer must be readable
by everything that reads the timeline of a real cluster.

Rule for maintainers: a :class:`Load` says how a client uses a program; the
program itself is what a real client would have lowered.

Paper: section 5 (experiments that can be repeated here).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pathways_lab.core import messages as m
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.messages import elastic as em
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.legality import donated_of
from pathways_lab.core.program.lowering import lower
from pathways_lab.core.program.program import (
    Call,
    Plan,
    Program,
    Signature,
    SliceId,
    Transfer,
    Value,
)
from pathways_lab.core.scheduling.policies import Policy
from pathways_lab.core.scheduling.rules import Rules
from pathways_lab.core.scheduling.tags import wrong
from pathways_lab.core.slices.topology import Owned, SliceBinding, SliceRequest
from pathways_lab.sim.happens import absent, hosts_of, schedule
from pathways_lab.sim.machine import Machine
from pathways_lab.sim.result import Simulated
from pathways_lab.sim.world import World

SMALL = 64 * 1024
"""Inputs of more bytes per device are uploaded before the first run that needs them."""

ADRIFT = 0.010
"""Mean seconds by which grants are late when nothing orders them."""


class Homed(Protocol):
    """A program that was captured for slices which lie somewhere."""

    @property
    def program(self) -> Program:
        """The program, not lowered yet."""

    @property
    def bindings(self) -> Sequence[SliceBinding]:
        """Where its slices lie."""


@dataclass(frozen=True, slots=True)
class Load:
    """How one client uses one program.

    program: captured, or a core program or plan; then its slices are numbers, and
        their sizes those of its layouts.
    runs: how many.  flight: how many are submitted and not ended, at most.
    arrivals: seconds after *start* at which one run each is submitted, whether others have ended
        or not; then *runs*, *flight* and *warm* say nothing.
    warm: the first run ends before any other is submitted, so that nothing waits
        for compilation and what follows is the steady state.
    feeds: output position to the input position of the next run.
    islands: where a slice shall lie, by its number in the program.  at: on which devices.
    start: seconds at which the client connects.
    priority, data: of its runs, for policies, as of ``pw.program``.
    """

    program: Program | Plan | Homed
    client: str = "kernel-1"
    runs: int = 1
    flight: int = 2
    warm: bool = False
    feeds: Mapping[int, int] = field(default_factory=dict)
    islands: Mapping[SliceId, str] = field(default_factory=dict)
    at: Mapping[SliceId, tuple[Owned, ...]] = field(default_factory=dict)
    start: float = 0.0
    priority: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)
    arrivals: Sequence[float] = ()

    def __post_init__(self) -> None:
        for name in ("runs", "flight"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} of a load is {value!r}: a whole number from 1 on")
        for time in (self.start, *self.arrivals):
            if not isinstance(time, int | float) or not 0 <= time < math.inf:
                raise ValueError(f"start or arrivals of a load: {time!r} is not a time from 0 on")
        if why := wrong(self.priority, tuple(self.data.items())):
            raise ValueError(f"of a load, {why}")


def simulate(
    work: Program | Plan | Homed | Load | Sequence[Load],
    machine: Machine | None = None,
    policy: Policy | None = None,
    seed: int = 0,
    *,
    rules: Rules | None = None,
    runs: int = 1,
    until: float = float("inf"),
    order: bool = True,
    lag: Callable[[m.Grant], float] | None = None,
    world: World | None = None,
    happens: Iterable[Any] = (),
) -> Simulated:
    """Simulates *work* on *machine*.

    work: a program (submitted *runs* times, as by a loop), or how clients use several.
    policy: whose gangs go first; one that raises is an error, as nobody is harmed.
    until: simulated seconds after which to stop looking.
    order: False switches the order off: each grant finds its own way to its host.
    lag: the same, with the seconds that each grant takes longer.
    world: to use instead of a new one for *machine*, *seed* and *rules*.
    happens: hosts and islands that are lost, and that come: see :mod:`.happens`.  Runs that lose
        their devices fail; those after them wait until their slices are bound again.
    Raises PathwaysError when a slice cannot be had, or the policy is none.
    """
    if not isinstance(work, Load | Sequence):
        work = Load(work, runs=runs, flight=runs)
    loads = [work] if isinstance(work, Load) else list(work)
    coming = hosts_of(happens, machine or (world.machine if world is not None else Machine()))
    if world is None:
        world = World(
            machine or Machine(), seed, rules, keep_order=order and lag is None,
            absent=absent(coming),
        )  # fmt: skip
    schedule(world, coming)
    if not world.keep_order:
        chance = world.random
        world.lag = lag or (lambda grant: chance.expovariate(1.0 / ADRIFT))
    watch = _Watch()
    world.observers.append(watch)
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
        world.observers.append(driver.heard)
        world.agenda.at(start + 10 * world.machine.costs.control_latency, driver.begin)
    world.agenda.run(until)
    last = max((time for time, _ in watch.ended.values()), default=watch.first)
    return Simulated(
        tuple(world.memory.records), watch.ended, watch.first, last, watch.events,
        watch.submitted - len(watch.ended) + sum(driver.waiting for driver in drivers), world,
    )  # fmt: skip


class _Watch:
    """The runs as the control plane saw them: how they began and ended."""

    def __init__(self) -> None:
        self.events = self.submitted = 0
        self.first = 0.0
        self.ended: dict[int, tuple[float, Failure | None]] = {}

    def __call__(self, event: m.Event, commands: Sequence[m.Command]) -> None:
        self.events += 1
        if isinstance(event, m.RunSubmitted):
            self.first = self.first if self.submitted else event.time
            self.submitted += 1
        for command in commands:
            if isinstance(command, m.RunEnded):
                self.ended[command.run] = event.time, command.failure


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


def _requests(load: Load, machine: Machine) -> dict[SliceId, SliceRequest]:
    """The request for each slice of a load's program.

    One that has lain on an island goes to the island of that name, if there is one; one that has
    spanned islands spans as many.
    """
    islands = {island for _, island in machine.hosts()}
    if isinstance(load.program, Program | Plan):
        return {
            s: SliceRequest(
                tuple(size for _, size in mesh),
                tuple(a for a, _ in mesh),
                load.islands.get(s),
                at=load.at.get(s, ()),
            )
            for s, mesh in slice_shapes(load.program).items()
        }
    return {
        b.slice: SliceRequest(
            b.shape,
            b.axes,
            load.islands.get(
                b.slice, b.island if b.island in islands and not b.elsewhere else None
            ),
            at=load.at.get(b.slice, ()),
            islands=() if b.slice in load.islands else b.spread,
        )
        for b in load.program.bindings
    }


@dataclass(slots=True)
class _Work:
    """One load, while it runs.

    large: positions of inputs that are uploaded.  donated: those that runs consume.
    kept: uploads that later runs use too, by position.
    away: slices that were lost and are not bound again; refused: of these, the ones for which there
        were no devices.  owed: runs that wait for them.
    """

    load: Load
    program: Program | Plan
    slices: dict[SliceId, SliceId]
    plan: Plan | None = None
    waiting: int = 0
    left: int = 0
    flying: deque[tuple[int, tuple[int, ...]]] = field(default_factory=deque)
    fed: dict[int, int] = field(default_factory=dict)
    large: frozenset[int] = frozenset()
    donated: frozenset[int] = frozenset()
    kept: dict[int, int] = field(default_factory=dict)
    away: set[SliceId] = field(default_factory=set)
    refused: set[SliceId] = field(default_factory=set)
    owed: int = 0


class _Driver:
    """One client with its loads."""

    def __init__(self, world: World, name: str, number: int, loads: list[Load]) -> None:
        self.world = world
        self.name = name
        self.number = number
        self.loads = loads
        self.policy: Policy | None = None
        self._thread = 0.0
        self._ended: set[int] = set()
        self._works: list[_Work] = []
        self._of_slice: dict[SliceId, _Work] = {}
        self._of_run: dict[int, _Work] = {}
        self._next = 0

    def begin(self) -> None:
        """Connect, and ask for the slices of every load."""
        self.world.connect(self)
        if self.policy is not None:
            policy = self.policy
            self._send(lambda t: m.PolicyChosen(t, "policy", self.name, policy))
        for load in self.loads:
            core = load.program
            program = core if isinstance(core, Program | Plan) else core.program
            work = _Work(load, program, {}, left=len(load.arrivals) or load.runs)
            self._works.append(work)
            for theirs, request in _requests(load, self.world.machine).items():
                ours = work.slices[theirs] = self._number()
                self._of_slice[ours] = work
                work.waiting += 1
                self._send(lambda t, o=ours, r=request: m.SliceRequested(t, "ask", self.name, o, r))

    def told(self, command: m.Command) -> None:
        """See :class:`pathways_lab.sim.world.Client`."""
        if isinstance(command, m.SliceBound):
            work = self._of_slice[command.binding.slice]
            if command.binding.slice in work.away:
                work.away.discard(command.binding.slice)
                self._go_on(work)
                return
            work.waiting -= 1
            if not work.waiting:
                self._register(work)
        elif isinstance(command, m.Refused) and self._no_devices(command):
            pass
        elif isinstance(command, m.Refused | m.PolicySet):
            if command.failure is not None:
                raise PathwaysError(command.failure)
        elif isinstance(command, m.RunEnded):
            self._ended.add(command.run)
            work, load = self._of_run[command.run], self._of_run[command.run].load
            if command.failure is not None:
                self._look(work)
            if load.arrivals:
                return
            warmed = load.warm and work.left == load.runs - 1
            for _ in range(load.flight if warmed else 1):
                self._submit(work)

    @property
    def waiting(self) -> int:
        """Runs that are not submitted, for their slices have no devices."""
        return sum(work.left for work in self._works if work.away)

    def heard(self, event: m.Event, commands: Sequence[m.Command]) -> None:
        """Something has happened: where hosts have come, slices without devices may get some."""
        if isinstance(event, m.HostJoined):
            for work in self._works:
                again, work.refused = work.refused, set()
                self._rebind(again)

    def _look(self, work: _Work) -> None:
        """A run has failed: slices that were lost with it are bound again, with new values."""
        known = self.world.control.slices
        lost = {s for s in work.slices.values() if s in known and known[s].state == "lost"}
        lost -= work.away
        if lost:
            self._drop((*work.fed.values(), *work.kept.values()))
            work.fed, work.kept = {}, {}
            work.away |= lost
            self._rebind(lost)

    def _rebind(self, slices: Iterable[SliceId]) -> None:
        for number in sorted(slices):
            self._send(lambda t, s=number: em.RebindRequested(t, "rebind", self.name, s))

    def _no_devices(self, command: m.Refused) -> bool:
        """Whether it is a slice that cannot be bound again now."""
        for work in self._works:
            for number in work.away:
                if command.subject == f"slice {number}":
                    work.refused.add(number)
                    return True
        return False

    def _go_on(self, work: _Work) -> None:
        if not work.away:
            owed, work.owed = work.owed, 0
            for _ in range(owed):
                self._submit(work)

    def _register(self, work: _Work) -> None:
        program = _placed(work.program, work.slices)
        work.plan = plan = lower(program) if isinstance(program, Program) else program
        gone = {v for step in plan.steps for v in donated_of(step.node)}
        work.large = frozenset(
            p for p, v in enumerate(plan.inputs) if plan.values[v].nbytes > SMALL
        )
        work.donated = frozenset(p for p, v in enumerate(plan.inputs) if v in gone)
        for step in plan.steps:
            if isinstance(step.node, Call):
                node = step.node
                self._send(
                    lambda t, n=node: m.FunctionAnnounced(
                        t, "announce", self.name, n.function, n.slice
                    )
                )
        self._send(lambda t: m.ProgramRegistered(t, "register", self.name, plan))
        load = work.load
        for time in sorted(load.arrivals):
            self.world.agenda.at(max(self._thread, load.start + time), self._submit, work)
        for _ in range(0 if load.arrivals else 1 if load.warm else load.flight):
            self._submit(work)

    def _submit(self, work: _Work) -> None:
        plan, load = work.plan, work.load
        assert plan is not None
        while work.flying and work.flying[0][0] in self._ended:
            _, unfed = work.flying.popleft()
            self._drop(unfed)
        if not work.left:
            return
        if work.away:
            work.owed += 1
            return
        work.left -= 1
        costs = self.world.machine.costs
        self._thread = max(self._thread, self.world.agenda.now) + self.world.vary(costs.submit)
        old = list(work.fed.values())
        inputs = [self._input(work, p, old) for p in range(len(plan.inputs))]
        run = self._number()
        outputs = tuple(self._number() for _ in plan.outputs)
        self._of_run[run] = work
        work.fed = {into: outputs[out] for out, into in load.feeds.items()}
        fed = set(work.fed.values())
        work.flying.append((run, tuple(b for b in outputs if b not in fed)))
        given, data = tuple(inputs), tuple(sorted(load.data.items()))
        self._send(
            lambda t: m.RunSubmitted(
                t, "submit", self.name, run, plan.key, given, outputs, load.priority, data
            )
        )
        self._drop(tuple(old))

    def _input(self, work: _Work, position: int, old: list[int]) -> int | None:
        """The buffer of an input, None for a small argument; *old*: those to drop afterwards."""
        found = work.fed.get(position, work.kept.get(position))
        if found is not None or position not in work.large:
            return found
        assert work.plan is not None
        value = work.plan.values[work.plan.inputs[position]]
        assert value.slice is not None
        where, nbytes, buffer = value.slice, value.nbytes, self._number()
        self.world.agenda.at(self._thread, self.world.declare, self.name, buffer, where, nbytes)
        if position in work.donated or position in work.load.feeds.values():
            old.append(buffer)
        else:
            work.kept[position] = buffer
        return buffer

    def _drop(self, buffers: tuple[int, ...]) -> None:
        if buffers:
            self._send(lambda t: m.BuffersDropped(t, "drop", self.name, buffers))

    def _send(self, make: Callable[..., m.Event]) -> None:
        """In the order of the client's own thread."""
        self.world.agenda.at(self._thread, self.world.tell, self.name, make)

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
        return replace(n, slice=slices[n.slice])

    values = tuple(map(value, program.values))
    if isinstance(program, Program):
        nodes = tuple(map(node, program.nodes))
        return replace(program, values=values, nodes=nodes)
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
