"""Bundles: arrays that are made, passed on and dropped together, under one number.

Problem: a training step takes and gives hundreds of arrays.  An id, a reservation, a place in
a message and a free for each of them cost many times the computation itself, in each process,
although the arrays always go the same way.

How: in the plan of one call, arguments that follow each other, or results, become one value:
a *bundle*, whose leaves are the arrays.  All that counts values (orders, memory, messages,
records) then counts bundles; only the host that launches the call spreads them.  An array that
goes another way needs a number of its own first: a call of :data:`APART` takes a bundle and
gives its arrays, without computing.  In a plan of many calls the readers of all values are known,
so those between its calls that go the same ways are bundles from the start (:func:`gathered`).

Rule for maintainers: a bundle is donated as a whole or not at all, and is never transferred.
Which arguments and results of a call belong together is not decided here
(:mod:`pathways_lab.client.session.habits`).

Paper: section 4.2 (one bookkeeping entry per logical buffer).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from pathways_lab.core.program.array_types import shard_bytes
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.lowering import planned
from pathways_lab.core.program.program import (
    Call,
    Leaf,
    Line,
    Node,
    Plan,
    Program,
    Value,
    ValueId,
)

BUNDLE = "bundle"
"""A bundle has it in the place of a type; no array has it."""
APART: Final = "apart"
"""The kind of the function that gives the arrays of a bundle one by one."""

Range = tuple[int, int]
"""Positions ``first <= p < last`` of arguments, or of results."""
Ranges = tuple[Range, ...]


def bundle(arrays: Sequence[Value]) -> Value:
    """One value for arrays of one slice."""
    first = arrays[0]
    assert first.layout is not None
    leaves = tuple([Leaf(a.shape, a.dtype, a.layout, a.name) for a in arrays if a.layout])
    nbytes = sum(a.nbytes for a in arrays)
    layout = Layout(first.layout.mesh, ((),))
    return Value((len(leaves),), BUNDLE, first.slice, layout, nbytes, first.name, leaves)


def is_bundle(value: Value) -> bool:
    """Whether what is said of all its arrays agrees with them."""
    made = bundle(arrays_of([value]))
    return replace(value, name="") == replace(made, name="")


def leaf(value: Value, position: int) -> Value:
    """One array of a bundle."""
    own = value.leaves[position]
    nbytes = shard_bytes(own.shape, own.dtype, own.layout)
    return Value(own.shape, own.dtype, value.slice, own.layout, nbytes, own.name)


def arrays_of(values: Sequence[Value]) -> list[Value]:
    """The arrays of values: a bundle's in its place, one after the other."""
    found: list[Value] = []
    for value in values:
        if value.leaves:
            found += [leaf(value, position) for position in range(len(value.leaves))]
        else:
            found.append(value)
    return found


def may_have_bundles(plan: Plan) -> bool:
    """Whether it is one call of its inputs, in their order, that makes its outputs."""
    if len(plan.steps) != 1 or not isinstance(call := plan.steps[0].node, Call):
        return False
    return call.inputs == plan.inputs and call.outputs == plan.outputs


def with_bundles(plan: Plan, given: Ranges, made: Ranges) -> Plan:
    """The plan of one call with bundles in place of these arguments and results."""
    call = plan.steps[0].node
    assert isinstance(call, Call)
    values: list[Value] = []

    def gathered(numbers: Sequence[ValueId], ranges: Ranges) -> tuple[ValueId, ...]:
        first, at = len(values), 0
        for begin, end in (*ranges, (len(numbers), len(numbers))):
            values.extend([plan.values[number] for number in numbers[at:begin]])
            if end > begin:
                values.append(bundle([plan.values[number] for number in numbers[begin:end]]))
            at = end
        return tuple(range(first, len(values)))

    consumed = set(call.donated)
    heads = in_ranges(range(len(call.inputs)), given)
    inputs = gathered(call.inputs, given)
    outputs = gathered(call.outputs, made)
    donated = tuple([p for p, head in enumerate(heads) if head in consumed])
    call = replace(call, inputs=inputs, outputs=outputs, donated=donated)
    return planned(Program(plan.name, tuple(values), (call,), inputs, outputs))


def gathered(plan: Plan, least: int) -> Plan:
    """The plan with bundles in place of values between its calls that go the same ways.

    They have one maker and the same readers, side by side in all of them: so their last use is the
    same.  Inputs, outputs and ends of transfers stay as they are.  least: arrays of a bundle.
    """
    uses: dict[ValueId, list[tuple[int, int, bool]]] = {}
    single = {*plan.inputs, *plan.outputs}
    for index, step in enumerate(plan.steps):
        if isinstance(call := step.node, Call):
            for p, value in enumerate(call.inputs):
                uses.setdefault(value, []).append((index, p, p in call.donated))
        else:
            single.update((call.input, call.output))

    def together(one: ValueId, other: ValueId) -> bool:
        beside = [(index, p + 1, donated) for index, p, donated in uses.get(one, ())]
        return single.isdisjoint((one, other)) and beside == uses.get(other, [])

    groups: dict[ValueId, tuple[ValueId, ...]] = {}
    for step in plan.steps:
        made, begin = step.node.outputs if isinstance(step.node, Call) else (), 0
        for end in range(1, len(made) + 1):
            if end == len(made) or not together(made[end - 1], made[end]):
                if end - begin >= least:
                    groups[made[begin]] = made[begin:end]
                begin = end
    if any(step.node.when is not None for step in plan.steps):
        return plan  # values of branches are known one by one
    return _in_groups(plan, groups) if groups else plan


def _in_groups(plan: Plan, groups: Mapping[ValueId, tuple[ValueId, ...]]) -> Plan:
    """The plan with a bundle for each group.  groups: by the first value."""
    inside = {value for group in groups.values() for value in group[1:]}
    new: dict[ValueId, ValueId] = {}
    values: list[Value] = []
    for number, value in enumerate(plan.values):
        if number not in inside:
            new[number] = len(values)
            group = [plan.values[each] for each in groups.get(number, ())]
            values.append(bundle(group) if group else value)
    nodes: list[Node] = []
    for step in plan.steps:
        if not isinstance(node := step.node, Call):
            nodes.append(replace(node, input=new[node.input], output=new[node.output]))
            continue
        heads = [p for p, value in enumerate(node.inputs) if value in new]
        nodes.append(
            replace(
                node,
                inputs=tuple([new[node.inputs[p]] for p in heads]),
                outputs=tuple([new[value] for value in node.outputs if value in new]),
                donated=tuple([n for n, p in enumerate(heads) if p in node.donated]),
            )
        )
    inputs, outputs = (tuple([new[v] for v in end]) for end in (plan.inputs, plan.outputs))
    return planned(Program(plan.name, tuple(values), tuple(nodes), inputs, outputs))


def apart(name: str, function: str, arrays: Sequence[Value], line: Line) -> Plan:
    """The plan that gives the arrays of a bundle one by one."""
    whole = bundle(arrays)
    assert whole.slice is not None
    outputs = tuple(range(1, 1 + len(arrays)))
    call = Call(function, whole.slice, (0,), outputs, (0,), name, line)
    return planned(Program(name, (whole, *arrays), (call,), (0,), outputs))


def in_ranges(items: Sequence[int], ranges: Ranges) -> list[int]:
    """The first item of each range, and all that are in none, in their order."""
    found: list[int] = []
    at = 0
    for begin, end in ranges:
        found += [*items[at:begin], items[begin]]
        at = end
    return [*found, *items[at:]]
