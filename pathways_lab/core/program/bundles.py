"""Bundles: arrays that are made, passed on and dropped together, under one number.

Problem: a training step takes and gives hundreds of arrays.  An id, a reservation, a place in
a message and a free for each of them cost many times the computation itself, in each process,
although the arrays always go the same way.

How: in the plan of one call, arguments that follow each other, or results, become one value:
a *bundle*, whose leaves are the arrays.  All that counts values (orders, memory, messages,
records) then counts bundles; only the host that launches the call spreads them.  An array that
goes another way needs a number of its own first: a call of :data:`APART` takes a bundle and
gives its arrays, without computing.

Rule for maintainers: a bundle is donated as a whole or not at all, and is never transferred.
Which arrays belong together is not decided here (:mod:`pathways_lab.client.session.habits`).

Paper: section 4.2 (one bookkeeping entry per logical buffer).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pathways_lab.core.program.array_types import shard_bytes
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.lowering import planned
from pathways_lab.core.program.program import Call, Leaf, Line, Plan, Program, Value, ValueId

BUNDLE = "bundle"
"""A bundle has it in the place of a type; no array has it."""
APART = "apart"
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
