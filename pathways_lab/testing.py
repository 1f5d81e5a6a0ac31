"""A kit for testing what you plug into the lab: policies, and the core itself.

Problem: whoever writes a policy, or changes the core, wants to say "these runs
wait, this one finishes: who is next?" without devices, processes or waiting.
:class:`Script` is a whole cluster of null devices: hosts do nothing until the
test says that a gang has ended, time passes only when the test says so, and
the invariants of the core are checked after every event.

    script = Script(devices=4, policy=MyPolicy())
    where = script.slice(4)
    work = script.register(Sketch("work").chain(where, "f", "g"))
    first, second = script.submit(work), script.submit(work)
    assert script.order == [first.run]          # what was granted, in order
    script.finish_all()
    print(script.story(first.run))

``MyPolicy()`` is the same object that ``lab.policy = ...`` and ``pw.simulate``
take; here it is asked in this process, so a debugger stops in its ``choose``.
``Rules(ahead=0.001, least=1)`` has one gang granted at a time, so that every turn
is contested.  ``script.policies`` has what was said about policies: the last one
names ``ProportionalShare``, and why, when yours was removed.

Rule for maintainers: only what a user's own test needs; helpers of our own
tests live beside them.

Paper: section 4.4 (policies).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pathways_lab.core import messages as m
from pathways_lab.core.control import Control
from pathways_lab.core.diagnosis.invariants import check
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.messages import elastic as em
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.lowering import lower
from pathways_lab.core.program.program import (
    Call,
    Line,
    Plan,
    Program,
    Signature,
    SliceId,
    Value,
    ValueId,
)
from pathways_lab.core.scheduling.policies import Policy
from pathways_lab.core.scheduling.rules import Rules
from pathways_lab.core.slices.topology import SliceBinding, SliceRequest


def replicated(devices: int) -> Layout:
    """The layout of a vector that every device of a row holds whole."""
    return Layout((("x", devices),), ((),))


@dataclass(slots=True)
class Sketch:
    """A program drawn by hand: values are vectors of bytes, whole on every device.

    devices: by slice, how many it has (filled in by :meth:`Script.register`).
    """

    name: str
    values: list[Value] = field(default_factory=list)
    nodes: list[Call] = field(default_factory=list)
    inputs: list[ValueId] = field(default_factory=list)
    outputs: list[ValueId] = field(default_factory=list)

    def input(self, where: SliceId | None, nbytes: int, name: str = "") -> ValueId:
        """A value that each run is given."""
        self.inputs.append(self._value(where, nbytes, name))
        return self.inputs[-1]

    def call(
        self,
        function: str,
        where: SliceId,
        inputs: Sequence[ValueId],
        outputs: Sequence[int],
        *,
        donated: tuple[int, ...] = (),
        ahead: bool = True,
    ) -> tuple[ValueId, ...]:
        """A gang; *outputs* are sizes in bytes per device.  Returns the values that it makes."""
        made = tuple(
            self._value(where, nbytes, f"{function}.{n}") for n, nbytes in enumerate(outputs)
        )
        line = Line("sketch.py", len(self.nodes) + 1, f"{function}(...)")
        self.nodes.append(
            Call(function, where, tuple(inputs), made, donated, function, line, ahead)
        )
        return made

    def output(self, *values: ValueId) -> Sketch:
        """Values that a run returns."""
        self.outputs += values
        return self

    def chain(self, where: SliceId, *functions: str, nbytes: int = 1) -> Sketch:
        """An argument, the functions one after the other, the last result."""
        value = self.input(where, nbytes)
        for function in functions:
            (value,) = self.call(function, where, [value], [nbytes])
        return self.output(value)

    def program(self, devices: dict[SliceId, int]) -> Program:
        """The program, for slices of so many devices."""

        def layout(where: SliceId | None) -> Layout | None:
            return None if where is None else replicated(devices[where])

        values = tuple(
            Value(v.shape, v.dtype, v.slice, layout(v.slice), v.nbytes, v.name) for v in self.values
        )
        signatures = {
            call.function: Signature(
                call.function,
                call.slice,
                (replicated(devices[call.slice]),) * len(call.inputs),
                (replicated(devices[call.slice]),) * len(call.outputs),
            )
            for call in self.nodes
        }
        return Program(
            self.name, values, tuple(self.nodes), tuple(self.inputs), tuple(self.outputs),
            signatures,
        )  # fmt: skip

    def _value(self, where: SliceId | None, nbytes: int, name: str) -> ValueId:
        self.values.append(Value((nbytes,), "uint8", where, None, nbytes, name))
        return len(self.values) - 1


@dataclass(frozen=True, slots=True)
class Submitted:
    """A run with the buffers that its outputs become."""

    run: int
    outputs: tuple[int, ...]


class Script:
    """A cluster of null devices in which only the test lets anything happen.

    order: runs in the order in which their windows were granted.
    waiting: per host, the granted steps ``(run, step)`` that have not ended.
    resolved: per buffer, None or the failure.  ended: per run, how it ended.
    refused: failures of requests that could not be met.
    """

    def __init__(
        self,
        islands: int = 1,
        hosts: int = 1,
        devices: int = 4,
        memory: int = 2**30,
        *,
        rules: Rules | None = None,
        policy: Policy | None = None,
        compile: bool = True,
        moving: bool = True,
    ) -> None:
        self.control = Control(rules)
        self.time = 0.0
        self.compile = compile
        self.moving = moving
        self.log: list[tuple[m.Event, list[m.Command]]] = []
        self.grants: list[m.Grant] = []
        self.order: list[int] = []
        self.waiting: dict[str, list[tuple[int, int]]] = {}
        self.resolved: dict[int, Failure | None] = {}
        self.ended: dict[int, m.RunEnded] = {}
        self.refused: list[m.Refused] = []
        self.policies: list[m.PolicySet] = []
        self.compiling: list[m.Prepare] = []
        self.plans: dict[str, Plan] = {}
        self._numbers = 0
        self._windows: set[tuple[int, int]] = set()
        for i in range(islands):
            for h in range(hosts):
                self.join(f"island{i}/host{h}", devices, memory)
        self.client("kernel-1")
        if policy is not None:
            self.send(m.PolicyChosen(self.time, "policy", "kernel-1", policy))

    # --- saying what happens -----------------------------------------------------

    def send(self, event: m.Event) -> list[m.Command]:
        """Hand an event to the core, check its invariants, remember what it answers."""
        commands = self.control.handle(event)
        check(self.control)
        self.log.append((event, commands))
        for command in commands:
            self._carry_out(command)
        return commands

    def _carry_out(self, command: m.Command) -> None:
        match command:
            case m.Grant():
                self.grants.append(command)
                if (command.run, command.first) not in self._windows:
                    self._windows.add((command.run, command.first))
                    self.order.append(command.run)
                steps = self._steps(command)
                self.waiting[command.host] += [(command.run, step) for step in steps]
            case m.Resolved():
                self.resolved.update(dict.fromkeys(command.buffers, command.failure))
            case m.RunEnded():
                assert command.run not in self.ended, f"run {command.run} ended twice"
                self.ended[command.run] = command
            case m.Refused():
                self.refused.append(command)
            case m.PolicySet():
                self.policies.append(command)
            case m.Prepare():
                self.compiling.append(command)
                if self.compile:
                    self.compiled()
            case em.Park():
                for host in command.hosts:
                    self.send(m.HostReport(self.time, "parked", host, parked=(command.slice,)))
            case em.SliceMoved() if self.moving:
                self.arrive_moved(command)
            case _:
                pass

    def arrive_moved(self, moved: em.SliceMoved) -> None:
        """The values of a slice reach its new hosts, whatever they are."""
        slice_id = moved.binding.slice
        for host in moved.hosts:
            self.send(m.HostReport(self.time, "moved", host, moved=(slice_id,)))
        store = self.control.state.store
        for host in moved.binding.hosts if moved.hosts else ():
            there = tuple(store.by_slice.get(slice_id, ()))
            self.send(m.HostReport(self.time, "arrived", host, resident=there))

    def _steps(self, grant: m.Grant) -> list[int]:
        plan = self.plans[grant.plan]
        found: list[int] = []
        if grant.skipped:
            return found
        for step in range(grant.first, grant.last):
            node = plan.steps[step].node
            touched = (node.slice,) if isinstance(node, Call) else (
                plan.values[node.input].slice, plan.values[node.output].slice
            )  # fmt: skip
            if any(grant.host in self.binding(s).hosts for s in touched if s is not None):
                found.append(step)
        return found

    def pass_time(self, seconds: float) -> None:
        """Let time pass; nothing else happens."""
        self.time += seconds
        if self.control.due <= self.time:
            self.send(m.PatienceEnded(self.time, "clock"))

    def join(self, host: str, devices: int = 4, memory: int = 2**30) -> None:
        """A host appears."""
        island = host.partition("/")[0]
        self.waiting[host] = []
        self.send(m.HostJoined(self.time, "join", host, island, devices, "null", memory))

    def client(self, name: str) -> None:
        """A client connects."""
        self.send(m.ClientJoined(self.time, "join", name))

    def slice(
        self,
        devices: int,
        *,
        client: str = "kernel-1",
        island: str | None = None,
        islands: tuple[str, ...] = (),
    ) -> SliceId:
        """A row of devices; raises what the core answers when there is none."""
        number = self._number()
        request = SliceRequest((devices,), ("x",), island, islands=islands)
        for command in self.send(m.SliceRequested(self.time, "slice", client, number, request)):
            if isinstance(command, m.Refused):
                raise PathwaysError(command.failure)
        return number

    def binding(self, where: SliceId) -> SliceBinding:
        """Where a slice lies."""
        return self.control.slices[where].binding

    def register(self, sketch: Sketch, *, client: str = "kernel-1") -> Plan:
        """Lower a sketch, announce its functions, register the plan."""
        devices = {s: len(r.binding.devices) for s, r in self.control.slices.items()}
        plan = lower(sketch.program(devices))
        self.plans[plan.key] = plan
        for step in plan.steps:
            if isinstance(step.node, Call):
                self.send(
                    m.FunctionAnnounced(
                        self.time, "function", client, step.node.function, step.node.slice
                    )
                )
        self.send(m.ProgramRegistered(self.time, "program", client, plan))
        return plan

    def compiled(self, failure: Failure | None = None, temporary: int = 0) -> None:
        """All hosts have compiled what they were told to."""
        prepared, self.compiling = self.compiling, []
        for p in prepared:
            for host in p.hosts:
                done = ((p.function, p.slice, temporary, failure),)
                self.send(m.HostReport(self.time, "compiled", host, compiled=done))

    def submit(
        self,
        plan: Plan,
        inputs: Sequence[int | None] | None = None,
        *,
        client: str = "kernel-1",
        priority: int = 0,
        data: Mapping[str, Any] | None = None,
        dropped: tuple[int, ...] = (),
    ) -> Submitted:
        """Run a plan; inputs are buffers, None for small arguments.  data: for policies.

        dropped: handles that the client drops with it.
        """
        run = self._number()
        outputs = tuple(self._number() for _ in plan.outputs)
        given = tuple(inputs) if inputs is not None else (None,) * len(plan.inputs)
        self.send(
            m.RunSubmitted(
                self.time, "submit", client, run, plan.key, given, outputs, priority,
                tuple(sorted((data or {}).items())), dropped=dropped,
            )
        )  # fmt: skip
        return Submitted(run, outputs)

    def upload(
        self, where: SliceId, nbytes: int, *, client: str = "kernel-1", arrive: bool = True
    ) -> int:
        """A client uploads a buffer; its bytes arrive at once or never."""
        number = self._number()
        self.send(m.BufferDeclared(self.time, "upload", client, number, where, nbytes))
        if arrive:
            self.arrive(number, where)
        return number

    def arrive(self, buffer: int, where: SliceId) -> None:
        """The bytes of an upload are on all hosts."""
        for host in self.binding(where).hosts:
            self.send(m.HostReport(self.time, "resident", host, resident=(buffer,)))

    def drop(self, *buffers: int, client: str = "kernel-1") -> None:
        """A client drops handles."""
        self.send(m.BuffersDropped(self.time, "drop", client, buffers))

    def finish(
        self,
        run: int,
        step: int | None = None,
        host: str | None = None,
        *,
        seconds: float = 0.001,
        failure: Failure | None = None,
    ) -> None:
        """Granted steps of a run end on a host, or on all: *step*, or all of them."""
        for name, waiting in self.waiting.items():
            if host not in (None, name):
                continue
            ended = [(r, s) for r, s in waiting if r == run and step in (None, s)]
            self.waiting[name] = [w for w in waiting if w not in ended]
            if ended:
                ends = tuple((r, s, (seconds,)) for r, s in ended)
                failed = tuple((r, s, failure) for r, s in ended if failure is not None)
                self.send(m.HostReport(self.time, "report", name, ends, failed))

    def finish_next(self, seconds: float = 0.001) -> bool:
        """The oldest granted step ends on every host; False when there is none."""
        for waiting in self.waiting.values():
            if waiting:
                self.finish(*waiting[0], seconds=seconds)
                return True
        return False

    def finish_all(self, seconds: float = 0.001) -> None:
        """Everything that is or will be granted ends, in order."""
        while self.finish_next(seconds):
            pass

    # --- looking at it ---------------------------------------------------------------

    def story(self, number: int) -> str:
        """Every event and command that names a run (or its outputs), buffer or slice."""
        numbers = {number}
        lines = []
        for event, commands in self.log:
            if isinstance(event, m.RunSubmitted) and event.run == number:
                numbers.update(event.outputs)
            told = [c for c in commands if _names(c, numbers)]
            if told or _names(event, numbers):
                lines.append(f"{event.time:.6f} {event}")
                lines += [f"    {command}" for command in told]
        return "\n".join(lines)

    def used(self) -> list[int]:
        """Bytes that the ledger counts, by cell."""
        return list(self.control.state.store.ledger.used)

    def _number(self) -> int:
        self._numbers += 1
        return (1 << 32) | self._numbers


def replay(events: Iterable[m.Event], rules: Rules | None = None) -> list[list[m.Command]]:
    """The answers of a fresh core to recorded events: for a real run, the same as then."""
    control = Control(rules)
    return [control.handle(event) for event in events]


def _names(message: m.Event | m.Command, numbers: set[int]) -> bool:
    for name in ("run", "slice", "buffer"):
        if getattr(message, name, None) in numbers:
            return True
    for name in ("buffers", "inputs", "outputs", "resident"):
        if not numbers.isdisjoint(getattr(message, name, ())):
            return True
    return any(
        entry[0] in numbers for name in ("ended", "failed") for entry in getattr(message, name, ())
    )
