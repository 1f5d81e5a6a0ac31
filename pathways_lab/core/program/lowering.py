"""From a location-free program to a plan: one linear order over all islands.

Problem: users write calls on slices; hosts need every movement of data, every
free and one order that is fixed before any data exist.  The passes:

1. ``live``      nodes whose results nobody needs are dropped,
2. ``placed``    inputs without a place get that of their first consumer,
3. ``moved``     transfers are inserted where a value's slice or layout is not
                 what a call expects (one per distinct target, shared), and a
                 copy where the program returns an input or a value twice, so
                 that every output is a buffer of its own,
4. ``ordered``   each transfer goes right behind the value's producer, so that
                 bytes travel while other gangs compute,
5. ``abreast``   slices take turns, as they could compute, so that none gets its
                 places only when another one has worked off its own,
6. ``ahead``     what depends on a decision goes behind what does not, so that
                 only the former waits for it,
7. ``planned``   the last use of every value frees it; the content is hashed.

Rule for maintainers: a pass takes a program and returns a program (the last
one a plan); all of them print with :func:`show` and :func:`show_plan`.  Frees
belong to the linear order: moving a step after pass 7 would make the memory
that was reserved a lie.

Paper: section 4.2 (lowering by passes), section 4.3 (transfers in the graph).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace

from pathways_lab.core.errors import PathwaysError, refused
from pathways_lab.core.program.folding import numbered
from pathways_lab.core.program.layout import Layout, shard_shape
from pathways_lab.core.program.legality import (
    check_plan,
    check_program,
    donated_of,
    inputs_of,
    last_uses,
    outputs_of,
)
from pathways_lab.core.program.program import (
    Call,
    Node,
    Plan,
    Program,
    SliceId,
    Step,
    Transfer,
    Value,
    ValueId,
    When,
    slice_name,
)


def lower(program: Program, *, sequential: bool = False) -> Plan:
    """All passes.  Raises PathwaysError with the user's line when a program is illegal.

    sequential: nothing runs ahead of its data (see :func:`behind`).
    """
    failure = check_program(program)
    if failure:
        raise PathwaysError(failure)
    moves = ahead(abreast(ordered(moved(placed(live(program))))))
    result = planned(behind(moves) if sequential else moves)
    failure = check_plan(result)
    if failure:
        raise PathwaysError(replace(failure, kind="internal"))
    return result


def live(program: Program) -> Program:
    """Drop nodes whose results nobody needs; a node without results is kept for its effect."""
    needed = set(program.outputs)
    kept: list[Node] = []
    for node in reversed(program.nodes):
        made = outputs_of(node)
        if not made or needed.intersection(made):
            needed.update(inputs_of(node))
            if node.when is not None:
                needed.add(node.when.value)
            kept.append(node)
    return replace(program, nodes=tuple(reversed(kept)))


def placed(program: Program) -> Program:
    """Inputs without a place take that of their first consumer."""
    values = list(program.values)
    for node in program.nodes:
        if not isinstance(node, Call):
            continue
        wanted = program.signatures[node.function].inputs
        for value_id, layout in zip(node.inputs, wanted, strict=True):
            value = values[value_id]
            if value.slice is None:
                values[value_id] = _on(value, node.slice, layout)
    for value_id in {v for node in program.nodes for v in inputs_of(node)} | set(program.outputs):
        value = values[value_id]
        if value.slice is None or value.layout is None:
            raise refused(
                f"value {value_id} ({value.name or 'unnamed'}) of {program.name!r} has no"
                " place: no call on a slice uses it",
                "put it on a slice, or use it in a compiled function",
                program=program.name,
            )
    return replace(program, values=tuple(values))


def moved(program: Program) -> Program:
    """Insert transfers for calls whose inputs lie elsewhere, and copies for outputs."""
    values = list(program.values)
    nodes: list[Node] = []
    copies: dict[tuple[ValueId, SliceId, Layout, When | None], ValueId] = {}
    for node in program.nodes:
        if isinstance(node, Call):
            inputs = []
            wanted = program.signatures[node.function].inputs
            for value_id, layout in zip(node.inputs, wanted, strict=True):
                value = values[value_id]
                if (value.slice, value.layout) == (node.slice, layout):
                    inputs.append(value_id)
                    continue
                key = (value_id, node.slice, layout, node.when)
                key = key if key in copies else (*key[:3], None)
                if key not in copies:
                    key = (*key[:3], node.when)
                    copies[key] = len(values)
                    values.append(_on(value, node.slice, layout))
                    name = f"{value.name or value_id} to {slice_name(node.slice)}"
                    nodes.append(Transfer(value_id, copies[key], name, node.line, node.when))
                inputs.append(copies[key])
            node = replace(node, inputs=tuple(inputs))
        nodes.append(node)
    outputs: list[ValueId] = []
    for value_id in program.outputs:
        if value_id in program.inputs or value_id in outputs:
            nodes.append(Transfer(value_id, len(values), f"copy of {values[value_id].name}"))
            outputs.append(len(values))
            values.append(values[value_id])
        else:
            outputs.append(value_id)
    return replace(program, values=tuple(values), nodes=tuple(nodes), outputs=tuple(outputs))


def ordered(program: Program) -> Program:
    """Transfers right behind what they wait for (behind each other in order of use)."""
    after: dict[ValueId, list[Transfer]] = {}
    makers: dict[ValueId, int] = dict.fromkeys(program.inputs, 1)
    for node in program.nodes:
        for value_id in outputs_of(node):
            makers[value_id] = makers.get(value_id, 0) + 1
        if isinstance(node, Transfer):
            after.setdefault(node.input, []).append(node)
            if node.when is not None:
                after.setdefault(node.when.value, []).append(node)
    nodes: list[Node] = []

    def follow(made: tuple[ValueId, ...]) -> None:
        for value_id in made:
            makers[value_id] -= 1
            for transfer in after.get(value_id, ()) if not makers[value_id] else ():
                if not makers[transfer.input] and not (
                    transfer.when is not None and makers[transfer.when.value]
                ):
                    nodes.append(transfer)
                    follow((transfer.output,))

    follow(program.inputs)
    for node in program.nodes:
        if isinstance(node, Call):
            nodes.append(node)
            follow(node.outputs)
    return replace(program, nodes=tuple(nodes))


def abreast(program: Program) -> Program:
    """Nodes in the order in which they could begin, if all calls took the same time.

    Grants follow the linear order and stop where a slice has enough ahead, so an order in which
    one microbatch after the other goes through a pipeline would leave most of its slices
    without places.  Calls on a slice and transfers from it keep their order, and no transfer
    comes to a slice earlier among its calls, so no slice holds more than in the order as
    written.  Nodes of different conditions do not change places.
    """
    if program.written:
        return program
    free: dict[SliceId, int] = {}
    made: dict[ValueId, int] = {}
    keys: list[tuple[int, int]] = []
    stretch, before = 0, None
    for node in program.nodes:
        stretch += node.when != before
        before = node.when
        used = (*inputs_of(node), node.when.value) if node.when else inputs_of(node)
        if isinstance(node, Call):
            here = there = node.slice
        else:
            here, there = (_slice(program.values[v]) for v in (node.input, node.output))
        begin = max([free.get(here, 0), free.get(there, 0), *(made.get(v, 0) for v in used)])
        end = begin + isinstance(node, Call)
        free[here] = end
        made.update({v: max(end, made.get(v, 0)) for v in outputs_of(node)})
        keys.append((stretch, begin))
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return replace(program, nodes=tuple(program.nodes[index] for index in order))


def ahead(program: Program) -> Program:
    """Nodes in the order of how many decisions they wait for, one after the other."""
    waits: dict[ValueId, int] = {}
    read: dict[ValueId, int] = {}
    depth: list[int] = []
    for node in program.nodes:
        least = 0 if node.when is None else waits[node.when.value] + 1
        used = [waits.get(v, 0) for v in inputs_of(node)]
        depth.append(max([least, *used, *[read.get(v, 0) for v in donated_of(node)]]))
        for value in inputs_of(node):
            read[value] = max(read.get(value, 0), depth[-1])
        for value in outputs_of(node):
            waits[value] = max(waits.get(value, 0), depth[-1])
    order = sorted(range(len(depth)), key=depth.__getitem__)
    return replace(program, nodes=tuple(program.nodes[index] for index in order))


def behind(program: Program) -> Program:
    """Every call is granted only when what it reads is there: dispatch node after node.

    For comparison with dispatch ahead of the data, and what a single call does
    by itself when its needs depend on data.
    """
    nodes = [replace(n, ahead=False) if isinstance(n, Call) else n for n in program.nodes]
    return replace(program, nodes=tuple(nodes))


def planned(program: Program) -> Plan:
    """Fix the frees and the key."""
    last = last_uses(program.nodes, program.outputs)
    steps = tuple(
        Step(node, tuple(sorted(last.get(index, ())))) for index, node in enumerate(program.nodes)
    )
    touched: set[SliceId] = set()
    for node in program.nodes:
        for value_id in (*inputs_of(node), *outputs_of(node)):
            where = program.values[value_id].slice
            if where is not None:
                touched.add(where)
        if isinstance(node, Call):
            touched.add(node.slice)
    plan = Plan(
        "", program.name, program.values, steps, program.inputs, program.outputs,
        tuple(sorted(touched)),
    )  # fmt: skip
    content = replace(plan, values=()), *numbered(plan.values)
    return replace(plan, key=hashlib.sha256(repr(content).encode()).hexdigest()[:32])


def _slice(value: Value) -> SliceId:
    assert value.slice is not None, "values have places by now"
    return value.slice


def _on(value: Value, slice_id: SliceId, layout: Layout) -> Value:
    """The same array on another slice: only the bytes of a shard change."""
    elements = math.prod(shard_shape(layout, value.shape))
    held = value.shape if value.layout is None else shard_shape(value.layout, value.shape)
    own = math.prod(held)
    nbytes = value.nbytes * elements // own if own else 0
    return replace(value, slice=slice_id, layout=layout, nbytes=nbytes)


def show(program: Program) -> str:
    """The program as text, one node per line."""
    lines = [f"program {program.name}"]
    lines += [f"  input  {_value(program.values, v)}" for v in program.inputs]
    lines += [f"  {_node(program.values, node)}" for node in program.nodes]
    lines += [f"  output {_value(program.values, v)}" for v in program.outputs]
    return "\n".join(lines)


def show_plan(plan: Plan) -> str:
    """The plan as text: one step per line with its frees and source line."""
    lines = [
        f"plan {plan.name} ({plan.key[:8]}) on slices {', '.join(map(slice_name, plan.slices))}"
    ]
    lines += [f"  input  {_value(plan.values, v)}" for v in plan.inputs]
    for index, step in enumerate(plan.steps):
        freed = f"  frees {', '.join(f'%{v}' for v in step.frees)}" if step.frees else ""
        lines.append(f"  {index:3d} {_node(plan.values, step.node)}{freed}")
    lines += [f"  output {_value(plan.values, v)}" for v in plan.outputs]
    return "\n".join(lines)


def _value(values: Sequence[Value], value_id: ValueId) -> str:
    value = values[value_id]
    shape = ",".join(map(str, value.shape))
    where = "anywhere" if value.slice is None else f"slice {slice_name(value.slice)} {value.layout}"
    name = f" {value.name}" if value.name else ""
    return f"%{value_id}{name}: {value.dtype}[{shape}] on {where}, {value.nbytes:,} B/device"


def _node(values: Sequence[Value], node: Node) -> str:
    line = f"  # {node.line}" if node.line.number else ""
    if node.when is not None:
        line = f"  when %{node.when.value} is {node.when.case}{line}"
    if isinstance(node, Transfer):
        return f"{_value(values, node.output)} = transfer %{node.input}{line}"
    given = [f"%{v}{' (donated)' if p in node.donated else ''}" for p, v in enumerate(node.inputs)]
    made = "; ".join(_value(values, v) for v in node.outputs) or "()"
    name = node.name or node.function[:8]
    line = line if node.ahead else f"  when its inputs are there{line}"
    return f"{made} = call {name} on slice {slice_name(node.slice)} ({', '.join(given)}){line}"
