"""Ordinary operations between calls, made into compiled functions of their own.

Problem: arithmetic between the nodes of a program (a learning-rate step, a sum
of gradients, a slice of a batch) must run on devices too, in as few launches
as possible and in the user's order.  Consecutive operations on one slice
become one function; where equal operations on equal types come again, the same one: a loop
does not trace and export ``h + 1`` in each of its turns.

Rule for maintainers: operations are replayed exactly as JAX recorded them.

Paper: section 4.2 (nodes of a program are compiled functions).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pathways_lab.client.code import source_lines
from pathways_lab.client.functions import array_types
from pathways_lab.client.functions.traced_function import Body
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.program.graph import Branch, CallNode, Ref
from pathways_lab.runtime import jax_private


@dataclass(frozen=True, eq=False)
class Operation:
    """One recorded operation.  operands: values of the graph, or plain constants."""

    equation: Any
    operands: tuple[Any, ...]
    results: tuple[Ref, ...]


class Group:
    """Consecutive operations on one slice."""

    def __init__(self, on: Slice, when: Branch | None = None) -> None:
        self.slice = on
        self.when = when
        self.operations: list[Operation] = []
        self.made: set[Ref] = set()

    def add(self, operation: Operation) -> None:
        self.operations.append(operation)
        self.made.update(operation.results)

    def node(self, needed: Container[Ref]) -> CallNode | None:
        """The group as a node that gives the *needed* values; None when nobody needs any."""
        outputs = tuple(r for op in self.operations for r in op.results if r in needed)
        if not outputs:
            return None
        operations = self._live(outputs)
        read = (x for op in operations for x in op.operands if isinstance(x, Ref))
        inputs = tuple(dict.fromkeys(ref for ref in read if ref not in self.made))
        name, line = _name(operations), source_lines.of_node(operations[-1].equation)
        key = key_of(operations, inputs, outputs)
        body = None if key is None else _bodies.get(key)
        if body is None:
            body = Body(
                Replay(operations, inputs, outputs, name),
                name,
                [ref.type for ref in inputs],
                labels=[ref.name or str(ref.type) for ref in inputs],
                line=line,
            )
        if key is not None:
            _bodies[key] = body
        return CallNode(body, self.slice, inputs, outputs, name, line, glue=True, when=self.when)

    def _live(self, wanted: Iterable[Ref]) -> list[Operation]:
        """The operations that the *wanted* values are made of."""
        live, kept = set(wanted), []
        for operation in reversed(self.operations):
            if live.intersection(operation.results):
                kept.append(operation)
                live.update(x for x in operation.operands if isinstance(x, Ref))
        return kept[::-1]


_bodies: weakref.WeakValueDictionary[Any, Body] = weakref.WeakValueDictionary()
"""By what they compute, those that nodes have: of the captures that are going on."""


def key_of(
    operations: Sequence[Operation],
    inputs: Sequence[Ref],
    outputs: Sequence[Ref],
    alike: Callable[[Any], Any] = jax_private.replayed_like,
) -> tuple[Any, ...] | None:
    """Equal for groups that are one function; None where that cannot be told.

    alike: equal for equations that compute the same; raises TypeError where it cannot tell.
    """
    numbers = {ref: number for number, ref in enumerate(inputs)}
    steps: list[Any] = []
    try:
        for operation in operations:
            steps.append(alike(operation.equation))
            steps += [
                numbers[x] if isinstance(x, Ref) else _constant(x) for x in operation.operands
            ]
            for ref in operation.results:
                numbers[ref] = len(numbers)
                steps.append(ref.type)
        key = (
            tuple([ref.type for ref in inputs]), tuple([numbers[ref] for ref in outputs]),
            jax_private.trace_context(), *steps,
        )  # fmt: skip
        hash(key)
    except TypeError:
        return None
    return key


def _constant(value: Any) -> tuple[Any, ...]:
    data = np.asarray(value)
    return type(value), array_types.host_type(value), data.tobytes()


def _name(operations: Sequence[Operation]) -> str:
    """Up to three different operations, in parentheses: no function of the user's has the name."""
    names = list(dict.fromkeys(_called(op.equation) for op in operations))
    return f"({'+'.join(names[:3])}{'+…' if len(names) > 3 else ''})"


def _called(equation: Any) -> str:
    """The name of an operation; of ``jnp`` functions that JAX records as a whole, theirs."""
    return str(equation.params.get("name") or equation.primitive.name).strip("_")


class Replay:
    """A function of arrays that repeats what was recorded: *steps*."""

    def __init__(
        self, steps: Sequence[Any], inputs: Sequence[Ref], outputs: Sequence[Ref], name: str
    ) -> None:
        self.steps = tuple(steps)
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.out_tree = jax.tree.structure(list(range(len(outputs))))
        self.__name__ = self.__qualname__ = "".join(c if c.isalnum() else "_" for c in name)

    def __call__(self, *arrays: Any) -> list[Any]:
        values = dict(zip(self.inputs, arrays, strict=True))
        self.repeat(values)
        return [values[ref] for ref in self.outputs]

    def repeat(self, values: dict[Ref, Any]) -> None:
        """Add the results of all steps.  Steps are operations."""
        for operation in self.steps:
            operands = [values[x] if isinstance(x, Ref) else x for x in operation.operands]
            results = jax_private.replay(operation.equation, operands)
            values.update(zip(operation.results, results, strict=True))
