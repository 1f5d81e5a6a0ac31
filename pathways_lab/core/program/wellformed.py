"""Whether the values of a plan are arrays, and the ones that its functions take and give.

Problem: hosts allocate, cut and send by what a plan says of its values.  A type that does
not exist, a mesh of more devices than the slice has or a shard of other bytes would fail on
every host of an island in the middle of its work; so a plan is wrong here, before any host
hears of it.

Rule for maintainers: a check returns a :class:`Failure` or None and never raises on any
input that its types allow; its cost is linear in the plan and never grows with devices.

Paper: section 4.3 (legality of the lowered program).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pathways_lab.core.errors import Failure
from pathways_lab.core.program.array_types import shard_bytes
from pathways_lab.core.program.bundles import is_bundle
from pathways_lab.core.program.functions import FunctionKey
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.legality import inputs_of, outputs_of
from pathways_lab.core.program.program import Call, Node, Plan, SliceId, Value

Leaf = tuple[tuple[int, ...], str, Layout]
"""Shape, type and layout of one array."""


@dataclass(frozen=True, slots=True)
class Types:
    """The arrays that a compiled function takes and gives."""

    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    donated: tuple[int, ...] = ()


def wrong_leaves(leaves: tuple[Leaf, ...], devices: int | None) -> str:
    """Why these are not arrays on a slice of so many devices (None: not known), or ""."""
    for shape, dtype, layout in leaves:
        try:
            shard_bytes(shape, dtype, layout)
        except ValueError as error:
            return str(error)
        if devices not in (None, layout.devices):
            return f"a mesh of {layout.devices} devices is not the slice's, which has {devices}"
    return ""


def check_values(
    plan: Plan, devices: Mapping[SliceId, int], functions: Mapping[FunctionKey, Types]
) -> Failure | None:
    """Values that are arrays, of the bytes that the plan says, and that its functions take.

    devices: of the slices that are known.  functions: those that are announced; others are
    refused elsewhere, as are values and slices that do not exist.
    """
    looked: set[int] = set()
    for number, value in enumerate(plan.values):
        if value.layout is None or id(value) in looked:
            continue
        looked.add(id(value))
        count = devices.get(value.slice) if value.slice is not None else None
        leaves = _leaves(value)
        wrong = wrong_leaves(leaves, count)
        nbytes = 0 if wrong else sum([shard_bytes(*leaf) for leaf in leaves])
        if not wrong and nbytes != value.nbytes:
            wrong = f"a shard has {nbytes:,} bytes, and not {value.nbytes:,}"
        if not wrong and value.leaves and not is_bundle(value):
            wrong = "a bundle is described otherwise than its arrays"
        if wrong:
            return Failure(
                "refused",
                f"value {number} ({value.name or 'unnamed'}) of plan {plan.name!r} is not an array:"
                f" {wrong}",
                "lower the program with pathways_lab.core.program.lowering.lower",
                program=plan.name,
            )
    alike: set[tuple[object, ...]] = set()
    for node in (step.node for step in plan.steps):
        named = inputs_of(node), outputs_of(node)
        if any(not 0 <= v < len(plan.values) for numbers in named for v in numbers):
            continue  # legality says it
        given, made = ([plan.values[v] for v in numbers] for numbers in named)
        called = (node.function, node.slice) if isinstance(node, Call) else ()
        kind = called, len(given), *map(id, given), *map(id, made)
        if kind in alike:
            continue
        alike.add(kind)
        wrong = _wrong_node(node, given, made, functions)
        if wrong:
            return Failure(
                "refused", f"node {node.name!r} {wrong}", program=plan.name, node=node.name,
                line=node.line,
            )  # fmt: skip
    if any(plan.values[v].layout is None for v in plan.inputs if 0 <= v < len(plan.values)):
        return Failure(
            "refused", f"an input of plan {plan.name!r} has no layout", program=plan.name
        )
    return None


def _wrong_node(
    node: Node,
    given: Sequence[Value],
    made: Sequence[Value],
    functions: Mapping[FunctionKey, Types],
) -> str:
    values = [*given, *made]
    if any(value.layout is None for value in values):
        return "has arguments or results without a layout"
    taken, given_back = ([leaf for v in end for leaf in _leaves(v)] for end in (given, made))
    if not isinstance(node, Call):
        if any(value.leaves for value in values):
            return "transfers a bundle"
        alike = {(leaf[0], leaf[1]) for leaf in (*taken, *given_back)}
        return "" if len(alike) == 1 else "changes the shape or type of what it transfers"
    types = functions.get((node.function, node.slice))
    if types is None:
        return ""
    if taken != list(types.inputs) or given_back != list(types.outputs):
        return "has other arguments or results than its compiled function"
    return ""


def _leaves(value: Value) -> tuple[Leaf, ...]:
    """The arrays of a value with a layout; of most there is one."""
    assert value.layout is not None
    if value.leaves:
        return tuple([(leaf.shape, leaf.dtype, leaf.layout) for leaf in value.leaves])
    return ((value.shape, value.dtype, value.layout),)
