"""How many bytes a plan needs, step by step, along its linear order.

Problem: to admit a run one must know its peak before it runs.  Devices see
gangs in the order of their grants, so the peak is that of the plan's linear
order and of no other; receive buffers count from their transfer on, sources
until their last reader, temporary bytes of a function during its gang.

Rule for maintainers: bytes are those of ONE device of a slice; what a device
holds is the sum over the slices that cover it.

Paper: section 4.6 (data management, back-pressure).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pathways_lab.core.program.legality import donated_of, inputs_of, last_uses, outputs_of
from pathways_lab.core.program.program import Call, Node, Plan, SliceId, ValueId

Profile = dict[SliceId, list[int]]
"""Per slice: bytes while step i runs, and as last entry what remains afterwards."""

Need = tuple[tuple[int, Sequence[int]], ...]
"""Per cell (its number): the most that is needed there from every position on."""


def profile(plan: Plan, own: Iterable[ValueId], temporary: Sequence[int]) -> Profile:
    """Bytes that a run of *plan* adds.

    own: inputs that the run accounts for itself: arguments of its message, and
        buffers that it donates.  All others belong to handles.
    temporary: bytes per device that each step needs beside inputs and outputs;
        outputs are made in donated inputs as far as these reach.
    """
    return _walk(plan, tuple(step.node for step in plan.steps), own, temporary)


def thrifty_profile(plan: Plan, own: Iterable[ValueId], temporary: Sequence[int]) -> Profile:
    """The peak along *another* legal order: always the step that adds the fewest bytes.

    Wrong on purpose, since it is not the order of the grants: for showing what
    the rule is for.
    """
    nodes = [step.node for step in plan.steps]
    readers: dict[ValueId, int] = {}
    for node in nodes:
        for value in dict.fromkeys(inputs_of(node)):
            readers[value] = readers.get(value, 0) + 1
    known = set(plan.inputs)
    order: list[int] = []
    rest = list(range(len(nodes)))

    def growth(index: int) -> int:
        made = sum(plan.values[v].nbytes for v in outputs_of(nodes[index]))
        used = dict.fromkeys(inputs_of(nodes[index]))
        return made - sum(plan.values[v].nbytes for v in used if readers[v] == 1)

    while rest:
        ready = [i for i in rest if known.issuperset(inputs_of(nodes[i]))]
        chosen = min(ready, key=growth)
        rest.remove(chosen)
        order.append(chosen)
        known.update(outputs_of(nodes[chosen]))
        for value in dict.fromkeys(inputs_of(nodes[chosen])):
            readers[value] -= 1
    found = _walk(plan, tuple(nodes[i] for i in order), own, [temporary[i] for i in order])
    return {s: [max(line)] * (len(line) - 1) + line[-1:] for s, line in found.items()}


def _walk(
    plan: Plan, nodes: tuple[Node, ...], own: Iterable[ValueId], temporary: Sequence[int]
) -> Profile:
    counted = set(own)
    live = dict.fromkeys(plan.slices, 0)
    lines: Profile = {s: [0] * (len(nodes) + 1) for s in plan.slices}
    freed = last_uses(nodes, plan.outputs)

    def size(value: ValueId) -> tuple[SliceId, int]:
        where = plan.values[value].slice
        assert where is not None  # check_plan saw to it
        return where, plan.values[value].nbytes

    for value in counted & {v for node in nodes for v in inputs_of(node)}:
        where, nbytes = size(value)
        live[where] += nbytes
    for index, node in enumerate(nodes):
        extra: dict[SliceId, int] = {}
        for value in outputs_of(node):
            if value in counted:
                continue  # another branch makes it too: it counts from the first one on
            where, nbytes = size(value)
            extra[where] = extra.get(where, 0) + nbytes
            counted.add(value)
        if isinstance(node, Call):
            made = extra.get(node.slice, 0)
            reused = sum(size(v)[1] for v in donated_of(node) if v in counted)
            during = live[node.slice] + made - min(made, reused) + temporary[index]
        for where, now in live.items():
            lines[where][index] = now + extra.get(where, 0)
        if isinstance(node, Call):
            lines[node.slice][index] = during
        for where, nbytes in extra.items():
            live[where] += nbytes
        for value in freed.get(index, ()):
            if value in counted:
                where, nbytes = size(value)
                live[where] -= nbytes
    for where, now in live.items():
        lines[where][-1] = now
    return lines


def peaks(lines: Sequence[Sequence[int]]) -> list[int]:
    """For every position, the most that is needed from there on, summed over *lines*."""
    found = [sum(column) for column in zip(*lines, strict=True)]
    for index in range(len(found) - 2, -1, -1):
        found[index] = max(found[index], found[index + 1])
    return found
