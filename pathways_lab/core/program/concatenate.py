"""Several plans in a row as one plan.

Problem: a client that calls many small compiled functions, one after the other,
pays for a run each time.  The calls that wait to be sent are one plan just as
well: a result that the next call takes is a value between two steps, and a value
that no handle names any more dies with its last use.

Rule for maintainers: the steps keep their order; nothing is merged, moved or
left out, so the same gangs run as if the plans had been run one by one.

Paper: section 4.2 (small programs are sent together).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pathways_lab.core.program.lowering import planned
from pathways_lab.core.program.program import Call, Node, Plan, Program, Value, ValueId

Source = tuple[int, int]
"""Plan and output that it makes; or -1 and the number of an input of the whole."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of the plans.  sources: of its inputs.  kept: outputs that the whole returns."""

    plan: Plan
    sources: tuple[Source, ...]
    kept: tuple[int, ...]


def in_series(name: str, parts: Sequence[Part]) -> Plan:
    """The plans one after the other.

    Its inputs are numbered by the parts' sources, its outputs follow each other
    in the order of the parts and of what they keep.
    """
    values: list[Value] = []
    nodes: list[Node] = []
    inputs: dict[int, ValueId] = {}
    made: list[tuple[ValueId, ...]] = []
    outputs: list[ValueId] = []
    for part in parts:
        plan = part.plan
        new: dict[ValueId, ValueId] = {}
        for value, (earlier, number) in zip(plan.inputs, part.sources, strict=True):
            if earlier >= 0:
                new[value] = made[earlier][number]
            elif number in inputs:
                new[value] = inputs[number]
            else:
                new[value] = inputs[number] = len(values)
                values.append(plan.values[value])
        for value, description in enumerate(plan.values):
            if value not in new:
                new[value] = len(values)
                values.append(description)
        for step in plan.steps:
            node = step.node
            if node.when is not None:
                when = replace(node.when, value=new[node.when.value])
                node = replace(node, when=when)
            if isinstance(node, Call):
                taken = tuple([new[v] for v in node.inputs])
                nodes.append(
                    replace(node, inputs=taken, outputs=tuple([new[v] for v in node.outputs]))
                )
            else:
                nodes.append(replace(node, input=new[node.input], output=new[node.output]))
        made.append(tuple([new[v] for v in plan.outputs]))
        outputs += [made[-1][number] for number in part.kept]
    whole = Program(
        name, tuple(values), tuple(nodes), tuple(inputs[n] for n in sorted(inputs)), tuple(outputs)
    )
    return planned(whole)
