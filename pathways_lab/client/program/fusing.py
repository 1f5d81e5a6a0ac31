"""Neighbouring nodes on one slice, made into one compiled function.

Problem: a gang that computes for microseconds is dearer to launch than to run.
Calls that follow each other on one slice can be one gang: the compiler then
sees all of them, and what only they pass on never becomes an array.

How: a group is a stretch of calls on one slice with nothing between them; what
it reads from outside is there before its first call, so no order changes.
Values that somebody else needs are its results; what a call of it consumes, it
consumes.

Rule for maintainers: the same operations on the same types; only where the
compiler may then join roundings (a multiplication and an addition, say) may
results differ in the last place.  Functions that call back into Python stay
alone, as do those whose shardings are part of their types.

Paper: section 5.1 (Fused), section 4.2 (lowering).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from pathways_lab.client.code import layouts
from pathways_lab.client.code.layouts import Requested
from pathways_lab.client.functions.traced_function import Body
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.run_options import Running
from pathways_lab.client.program.glue import Replay
from pathways_lab.client.program.graph import CallNode, GraphNode, Ref, uses


def fused(nodes: Sequence[GraphNode], outputs: Iterable[Ref]) -> tuple[list[GraphNode], str]:
    """The nodes with groups of calls as one each, and what was done, as text."""
    groups = _groups(nodes)
    wanted = set(outputs)
    made: list[GraphNode] = []
    said: list[str] = []
    for group in groups:
        if len(group) == 1:
            made += group
            continue
        calls = [node for node in group if isinstance(node, CallNode)]
        inside = set(map(id, calls))
        read = {ref for node, ref in uses(nodes) if id(node) not in inside}
        node = _fuse(calls, wanted | read)
        if not node.outputs:  # nobody needs anything of it
            continue
        made.append(node)
        lines = dict.fromkeys(f"\n    {call.name}  # {call.line}" for call in calls)
        said.append(
            f"  {len(calls)} calls on {node.slice.name} are one, {node.name}:" + "".join(lines)
        )
    return made, "\n".join(said) or "  no two calls on one slice follow each other"


def _groups(nodes: Sequence[GraphNode]) -> list[list[GraphNode]]:
    groups: list[list[GraphNode]] = []
    for node in nodes:
        last = groups[-1][-1] if groups else None
        if _may(node) and _may(last) and node.slice is last.slice:
            groups[-1].append(node)
        else:
            groups.append([node])
    return groups


def _may(node: GraphNode | None) -> TypeGuard[CallNode]:
    if not isinstance(node, CallNode) or node.body.calls_python:
        return False
    return not any(map(layouts.is_explicit, (*node.body.requested, *node.body.requested_out)))


def _fuse(calls: Sequence[CallNode], needed: set[Ref]) -> CallNode:
    on, first = calls[0].slice, calls[0]
    made = {ref for call in calls for ref in call.outputs}
    inputs = tuple(dict.fromkeys(ref for call in calls for ref in call.inputs if ref not in made))
    outputs = tuple(ref for call in calls for ref in call.outputs if ref in needed)
    asked: dict[Ref, Requested] = {}
    given: dict[Ref, Requested] = {}
    consumed: set[Ref] = set()
    for call in calls:
        for ref, requested in zip(call.inputs, call.body.requested, strict=True):
            if requested is not None:
                asked.setdefault(ref, requested)
        given.update(zip(call.outputs, call.body.requested_out, strict=True))
        consumed.update(call.inputs[position] for position in call.body.donated)
    name = _name([call.name for call in calls])
    body = Body(
        Chain(calls, inputs, outputs, on, name),
        name,
        [ref.type for ref in inputs],
        requested=[asked.get(ref) for ref in inputs],
        donated=tuple(n for n, ref in enumerate(inputs) if ref in consumed),
        labels=[ref.name or str(ref.type) for ref in inputs],
        line=first.line,
        running=functools.reduce(Running.beside, [call.body.running for call in calls]),
    )
    body.requested_out = tuple(given.get(ref) for ref in outputs)
    glue = all(call.glue for call in calls)
    return CallNode(body, on, inputs, outputs, name, first.line, glue)


def _name(names: Sequence[str]) -> str:
    """The name of a group: the different functions in it, and the number of calls."""
    known = list(dict.fromkeys(names))
    text = "+".join(known[:3]) + ("+…" if len(known) > 3 else "")
    return text if len(known) == len(names) else f"{text} ×{len(names)}"


class Chain(Replay):
    """A function of arrays that makes the calls of a group on a slice, each as it was traced."""

    def __init__(
        self,
        calls: Sequence[CallNode],
        inputs: Sequence[Ref],
        outputs: Sequence[Ref],
        on: Slice,
        name: str,
    ) -> None:
        super().__init__(calls, inputs, outputs, name)
        self.on = on

    def repeat(self, values: dict[Ref, Any]) -> None:
        """Steps are calls."""
        functions: dict[Body, Callable[..., Any]] = {}
        for call in self.steps:
            body = call.body
            if body not in functions:
                # Once per function, however often it is called.
                functions[body] = jax.jit(jaxpr_as_fun(body.jaxpr))
            taken = [
                self._as_asked(values[ref], requested)
                for ref, requested in zip(call.inputs, body.requested, strict=True)
            ]
            results = functions[body](*taken)
            for ref, result, requested in zip(
                call.outputs, results, body.requested_out, strict=True
            ):
                values[ref] = self._as_asked(result, requested)

    def _as_asked(self, array: Any, requested: Requested) -> Any:
        if requested is None:
            return array
        if isinstance(requested, PartitionSpec):
            requested = NamedSharding(self.on.mesh, requested)
        return jax.lax.with_sharding_constraint(array, requested)
