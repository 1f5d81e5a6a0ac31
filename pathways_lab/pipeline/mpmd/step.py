"""A training step written for one device, as one program over slices.

Problem: a model in parts on many slices should be the code that people have: a loss, JAX's
``value_and_grad``, an optimizer over all parameters, a loop over microbatches.

How: JAX records the step, for types.  Its equations are taken apart into fragments, each of which
is a compiled function on a slice (:mod:`~pathways_lab.pipeline.mpmd.partition`); a program that
calls them in order is captured from that.

Rule for maintainers: the results are those of the step on one device, up to roundings that the
compiler joins; places and schedules change times and memory.

Paper: sections 3 and 5.3.
"""

from __future__ import annotations

import functools
import html
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from pathways_lab.client.functions.arguments import Names, Numbers, Roles, Split, broadcast
from pathways_lab.client.functions.array_types import host_type
from pathways_lab.client.functions.flat import FlatFunction, with_static
from pathways_lab.client.functions.traced_function import Body
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.program.calls import put_leaf
from pathways_lab.client.program.graph import Ref
from pathways_lab.client.program.program import ProgramFunction, device_put
from pathways_lab.client.session import failures
from pathways_lab.client.session.handles import Handle
from pathways_lab.pipeline.mpmd.cutting import cut
from pathways_lab.pipeline.mpmd.flat import Flat, flattened
from pathways_lab.pipeline.mpmd.order import Schedules
from pathways_lab.pipeline.mpmd.partition import (
    Fragment,
    Functions,
    Given,
    Node,
    Partition,
    partition,
)
from pathways_lab.pipeline.schedule import Costs, Table
from pathways_lab.runtime import jax_private
from pathways_lab.runtime.jax_private import trace_context
from pathways_lab.timeline.text_table import TextTable

Types = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments with types for arrays."""


class Step(ProgramFunction):
    """A training step on slices; made by ``pw.mpmd.jit``.  Called like the function itself.

    on: by part, its slice; where only slices were given, from the first call (``place``,
    ``capture``) on.  schedule: the order of the parts' work; None: as written.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        on: Mapping[str, Slice] | Sequence[Slice],
        schedule: Schedules | None,
        in_shardings: Any,
        donate: tuple[Numbers, Names],
        **options: Any,
    ) -> None:
        static = options.get("static_argnums"), options.get("static_argnames")
        self._step = function
        self._shardings = in_shardings
        self._options = donate, options
        self._flat_roles = Roles(function, *static, *donate)
        self._partitions: dict[Any, Partition] = {}
        self._functions = Functions()
        self._types: Types | None = None
        self._constants: dict[Ref, Handle] = {}
        self._shown: Partition | None = None
        self._among = () if isinstance(on, Mapping) else tuple(on)
        self.on = dict(on) if isinstance(on, Mapping) else {}
        self.schedule = schedule

        @functools.wraps(function)
        def walk(*args: Any, **kwargs: Any) -> Any:
            return self._walk(args, kwargs)

        # A schedule knows better than lowering how long its parts take.
        super().__init__(walk, order="turns" if schedule is None else "written", **options)

    def place(self, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The positional arguments, each array where the step reads it first.

        Types (``jax.ShapeDtypeStruct``) stay types: for a batch that is not there yet.  Without
        it host arrays are sent with each call that gets them.

        >>> params, memory, _ = step.place(params, memory, batch)        # doctest: +SKIP
        """
        split = self._flat_roles.split(args, kwargs)
        found = self._cut(split)
        specs = self._specs(split)
        leaves, tree = jax.tree.flatten((split.args, split.kwargs))
        placed = [
            leaf
            if isinstance(leaf, jax.ShapeDtypeStruct)
            else put_leaf(leaf, home.slice, home.slice.sharding(spec) if spec else None, home.name)
            for leaf, home, spec in zip(leaves, found.inputs, specs, strict=True)
        ]
        dynamic = iter(jax.tree.unflatten(tree, placed)[0])
        kept = dict(split.static)
        return tuple(kept[n] if n in kept else next(dynamic) for n in range(len(args)))

    def partition(self, /, *args: Any, **kwargs: Any) -> Partition:
        """The step in fragments for these arguments or types, before anything is compiled."""
        return self._cut(self._flat_roles.split(args, kwargs))

    def otherwise(
        self,
        *,
        on: Mapping[str, Slice] | None = None,
        schedule: Schedules | None = None,
        microbatches: int | None = None,
    ) -> Step:
        """The same step on other slices, with another schedule or another number of microbatches.

        microbatches: for the parameter of this name of the step's function.
        Functions that both steps have are compiled once.
        """
        donate, options = self._options
        function = self._step
        if microbatches is not None:
            function = functools.partial(function, microbatches=microbatches)
        made = Step(
            function,
            (self.on or self._among) if on is None else on,
            self.schedule if schedule is None else schedule,
            self._shardings,
            donate,
            **{**options, "name": self.name},
        )
        made._functions = self._functions
        return made

    @property
    def microbatches(self) -> int | None:
        """The default of the parameter ``microbatches`` of the step's function, if it has one."""
        known = inspect.signature(self._step).parameters.get("microbatches")
        return known.default if known is not None and isinstance(known.default, int) else None

    @property
    def types(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the last call, with a ``jax.ShapeDtypeStruct`` for each array."""
        if self._types is None:
            raise failures.refused(
                f"step {self.name!r} was never called: the types of its arguments are not known",
                "call it, or step.place(...) or step.capture(...) with arguments or their types",
            )
        return self._types

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """The computations of the last call (``place``, ``partition``, ``capture``), in order."""
        return tuple(node.fragment for node in self.nodes)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The same with their functions."""
        return () if self._shown is None else self._shown.nodes

    def planned(self, costs: Costs | None = None) -> Table:
        """The schedule of the last call with times, as the step's own dependencies allow them.

        costs: of forward, backward and weight work, by part, in the order of ``on``.
        """
        table = None if self._shown is None else self._shown.schedule
        if table is None:
            raise failures.refused(
                f"step {self.name!r} has no schedule yet: it follows from the types of a call",
                'pw.mpmd.jit(..., schedule="1f1b"), and a call, place or capture',
            )
        return table.timed(costs)

    # --- the program ---------------------------------------------------------------------

    def _walk(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Captured: the fragments, one after the other."""
        split = self._flat_roles.split(args, kwargs)
        found = self._cut(split)
        leaves = jax.tree.leaves((split.args, split.kwargs))
        values: dict[Any, Any] = dict(zip(found.inputs, leaves, strict=True))
        values.update({ref: self._held(ref, value) for ref, value in found.constants.items()})
        for node in found.nodes:
            with jax_private.at_equation(node.equation):
                made = node.function(*(values[ref] for ref in node.inputs))
            values.update(zip(node.outputs, made, strict=True))
        results = [values.get(x, x) for x in found.results]
        for number, home in found.moves.items():
            results[number] = device_put(results[number], home)
        return jax.tree.unflatten(found.tree, results)

    def _held(self, ref: Ref, value: Any) -> Handle:
        """An array that the step closes over, sent to its slice once."""
        known = self._constants.get(ref)
        if known is None:
            with jax.ensure_compile_time_eval():
                known = self._constants[ref] = put_leaf(value, ref.slice, None, ref.name)
        return known

    def _cut(self, split: Split) -> Partition:
        leaves, tree = jax.tree.flatten((split.args, split.kwargs))
        kinds = tuple([x.type if isinstance(x, Handle) else host_type(x) for x in leaves])
        structs = [
            kind.struct if kind is not None else x for x, kind in zip(leaves, kinds, strict=True)
        ]
        dynamic, keywords = jax.tree.unflatten(tree, structs)
        full, kwargs = with_static(dynamic, keywords, split.static)
        args = tuple(full)
        key = (tree, kinds, split.static_key, trace_context())
        known = self._partitions.get(key)
        if known is None:
            labels = self._flat_roles.labels(split)
            flat = FlatFunction(self._step, tree, split.static, self.name)
            body = Body(flat, self.name, [k for k in kinds if k is not None], labels=labels)
            donated = self._flat_roles.donated(split)
            replaced = _replaced(split, body, donated)
            specs = self._specs(split)
            given = Given(labels, specs, frozenset(donated), replaced, body.out_tree)
            step = flattened(body.jaxpr)
            if not self.on:
                self.on = self._chosen(step, (args, kwargs))
            known = partition(step, given, self.on, self.schedule, self._functions)
            self._partitions[key] = known
        self._shown = known
        self._types = args, kwargs
        return known

    def _chosen(self, step: Flat, types: Types) -> dict[str, Slice]:
        """Where each part goes, when only slices were given.  types: of the first call."""
        return cut(step, self._among)

    def _specs(self, split: Split) -> list[Any]:
        specs = broadcast(self._shardings, split.args, "in_shardings")
        for spec in specs:
            if not (spec is None or isinstance(spec, PartitionSpec)):
                raise failures.refused(
                    f"in_shardings has {spec!r:.80}, and places of arguments follow from marks",
                    "give PartitionSpecs: each holds on the slice where its argument is",
                )
        return specs + [None] * len(jax.tree.leaves(split.kwargs))

    # --- how it looks ----------------------------------------------------------------------

    @property
    def table(self) -> TextTable:
        """The fragments: what each is, where, and the bytes that it reads and gives."""
        rows = [
            (
                fragment.name,
                fragment.slice.name,
                "" if fragment.microbatch is None else str(fragment.microbatch),
                f"{fragment.bytes_in:,}",
                f"{fragment.bytes_out:,}",
            )
            for fragment in self.fragments
        ]
        heads = ("fragment", "slice", "microbatch", "bytes in", "bytes out")
        count = len({node.function for node in self.nodes})
        caption = f"{self!r}: {len(rows)} fragments of {count} functions"
        return TextTable(rows, heads, "<<>", caption)

    def __repr__(self) -> str:
        parts = ", ".join(f"{part} on {on.name}" for part, on in self.on.items())
        parts = parts or f"parts on {', '.join(on.name for on in self._among)}"
        return f"<step {self.name}: {parts}>"

    def _repr_html_(self) -> str:
        return (
            self.table._repr_html_() if self.fragments else f"<pre>{html.escape(repr(self))}</pre>"
        )


def _replaced(split: Split, body: Body, donated: Sequence[int]) -> list[tuple[int, int]]:
    """(argument, result) by flat number: results that come instead of an argument.

    A result, or an entry of the result, with the structure and the types of an argument is its
    next state; of one array that goes only for arguments that are donated.
    """
    states = []
    first = 0
    for argument in split.args:
        leaves, tree = jax.tree.flatten(argument)
        numbers = range(first, first + len(leaves))
        first += len(leaves)
        own = len(leaves) > 1 or not set(numbers).isdisjoint(donated)
        states.append((tree, [body.in_types[n] for n in numbers], numbers) if own else None)
    shape = jax.tree.unflatten(body.out_tree, body.out_types)
    found = _matched([shape], states)
    if not found and isinstance(shape, tuple | list):
        found = _matched(shape, states)
    return found


def _matched(entries: Sequence[Any], states: Sequence[Any]) -> list[tuple[int, int]]:
    """The numbers of arguments and results that are of one structure.  states: by argument."""
    left = [state for state in states if state is not None]
    found: list[tuple[int, int]] = []
    made = 0
    for entry in entries:
        kinds, tree = jax.tree.flatten(entry)
        state = next((s for s in left if _same(s[:2], (tree, kinds))), None)
        if state is not None:
            left.remove(state)
            found += zip(state[2], range(made, made + len(kinds)), strict=True)
        made += len(kinds)
    return found


def _same(one: tuple[Any, list[Any]], other: tuple[Any, list[Any]]) -> bool:
    def plain(kinds: list[Any]) -> list[Any]:
        return [(kind.shape, kind.dtype) for kind in kinds]

    return one[0] == other[0] and plain(one[1]) == plain(other[1])
