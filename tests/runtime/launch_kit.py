"""Plans in a few words, for tests of the pure part of a host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import Grant
from pathways_lab.core.program.array_types import shard_bytes
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.program import Call, Node, Plan, SliceId, Step, Transfer, Value
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.executor.actions import Action, Receive, Report, Send
from pathways_lab.executor.launcher import Launcher
from pathways_lab.executor.steps import Key, Segment

HOST = "island0/host0"
BYTES = 10
"""Bytes of every value on every device."""


def binding(slice_id: int, *devices: int, host: str = HOST) -> SliceBinding:
    """A row of devices of one host."""
    return SliceBinding(
        slice_id,
        "kernel-1",
        host.partition("/")[0],
        (len(devices),),
        ("x",),
        tuple((host, d) for d in devices),
        "cpu",
    )


def value(slice_id: int, name: str) -> Value:
    return Value((4,), "float32", slice_id, Layout((("x", 1),), ((),)), BYTES, name)


def with_bytes(shape: tuple[int, ...], dtype: str, slice_id: SliceId, layout: Layout) -> Value:
    """A value with the bytes of its shards worked out."""
    return Value(shape, dtype, slice_id, layout, shard_bytes(shape, dtype, layout))


def plan_of(
    key: str,
    values: Sequence[Value],
    nodes: Sequence[Node],
    inputs: Sequence[int],
    outputs: Sequence[int],
) -> Plan:
    """A plan in which every value is freed by the last step that uses or makes it."""
    last: dict[int, int] = {}
    for index, node in enumerate(nodes):
        ends = (
            (*node.inputs, *node.outputs) if isinstance(node, Call) else (node.input, node.output)
        )
        last.update(dict.fromkeys(ends, index))
    steps = tuple(
        Step(node, tuple(v for v, at in last.items() if at == index))
        for index, node in enumerate(nodes)
    )
    slices = tuple(sorted({v.slice for v in values if v.slice is not None}))
    return Plan(key, key, tuple(values), steps, tuple(inputs), tuple(outputs), slices)


@dataclass
class Draft:
    """A plan in the making: values by name."""

    key: str = "plan"
    names: dict[str, int] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)

    def plan(self, inputs: Sequence[str], outputs: Sequence[str]) -> Plan:
        ins, outs = ([self.names[name] for name in named] for named in (inputs, outputs))
        return plan_of(self.key, self.values, self.nodes, ins, outs)


class PlanBuilder(Draft):
    """Names become values: ``p.call(1, "f", ["a"], ["b"])``."""

    def add(self, slice_id: int, name: str) -> int:
        if name not in self.names:
            self.names[name] = len(self.values)
            self.values.append(value(slice_id, name))
        return self.names[name]

    def call(
        self,
        slice_id: int,
        function: str,
        inputs: list[str],
        outputs: list[str],
        donated: tuple[int, ...] = (),
    ) -> PlanBuilder:
        self.nodes.append(
            Call(
                function,
                slice_id,
                tuple(self.add(slice_id, n) for n in inputs),
                tuple(self.add(slice_id, n) for n in outputs),
                donated,
                function,
            )
        )
        return self

    def move(self, name: str, slice_id: int, output: str) -> PlanBuilder:
        self.nodes.append(Transfer(self.names[name], self.add(slice_id, output)))
        return self


def grant(
    run: int,
    plan: Plan,
    *,
    place: int = 0,
    previous: int = -1,
    first: int = 0,
    last: int | None = None,
    inputs: tuple[int | None, ...] = (),
    outputs: tuple[int, ...] = (),
    epoch: int = 0,
    host: str = HOST,
) -> Grant:
    return Grant(
        f"run {run}",
        host,
        run,
        plan.key,
        first,
        len(plan.steps) if last is None else last,
        epoch,
        place,
        previous,
        inputs,
        outputs,
    )


class OneByOne(Launcher):
    """Each gang is a segment of its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        in_window = self._segments.in_window
        self._segments.in_window = lambda plan, first, last: (  # type: ignore[method-assign]
            in_window(plan, first, last) if last == first + 1 else {}
        )


class Bench:
    """A launcher whose rim is this object: it notes actions and finishes things on demand."""

    def __init__(self, *bindings: SliceBinding, host: str = HOST) -> None:
        self.launcher: Launcher = OneByOne(host, host.partition("/")[0])
        self.host = host
        for b in bindings:
            # A lane is named after the device set, as in the real runtime.
            local = sorted(d for h, d in b.devices if h == host)
            self.launcher.bind(b, ",".join(map(str, local)))
        self.actions: list[Action] = []
        self.place = -1

    def take(self, actions: list[Action]) -> list[Action]:
        self.actions += actions
        for action in actions:
            if isinstance(action, Segment):
                for slot in action.outputs.values():
                    slot.payload = None if slot.state == "failed" else object()
        return actions

    def grant(self, made: Grant, **arguments: object) -> list[Action]:
        made = replace(made, place=self.place + 1, previous=self.place, host=self.host)
        self.place += 1
        given = {int(k[1:]): v for k, v in arguments.items()}
        return self.take(self.launcher.grant(made, given))

    def launched(self) -> list[str]:
        """Names of the functions handed over so far, in order."""
        return [a.stretch.first.function for a in self.actions if isinstance(a, Segment)]

    def launch(self, function: str) -> Segment:
        (found,) = [
            a
            for a in self.actions
            if isinstance(a, Segment) and a.stretch.first.function == function
        ]
        return found

    def poison(self, function: str) -> Failure | None:
        """Why a gang that was handed over has no results."""
        segment = self.launch(function)
        (part,) = segment.stretch.parts
        return segment.cause(part)

    def done(self, function: str, failure: Failure | None = None) -> list[Action]:
        failures = {} if failure is None else {0: failure}
        return self.take(self.launcher.done(self.launch(function).key, [0.5], failures))

    def sends(self) -> list[Send]:
        return [a for a in self.actions if isinstance(a, Send)]

    def receives(self) -> list[Receive]:
        return [a for a in self.actions if isinstance(a, Receive)]

    def reports(self) -> list[tuple[Key, Failure | None]]:
        """Steps that are over, and why they have no results."""
        return [
            ((report.run, step), report.failures.get(step))
            for report in self.actions
            if isinstance(report, Report)
            for step, _ in enumerate(report.times, report.first)
        ]

    def memory(self) -> int:
        return sum(self.launcher.memory.used.values())
