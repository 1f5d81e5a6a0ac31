"""Capturing: the user's Python runs once, with stand-ins for arrays.

Problem: a program is ordinary Python that calls compiled functions and does a
little arithmetic between them.  JAX itself is the capturing machine: the code
runs under ``jax.make_jaxpr``, each call of a compiled function becomes one
equation of our own primitive, everything else that touches a stand-in becomes
an ordinary equation.  :mod:`~pathways_lab.client.program.placement` turns the equations
into a graph.

Rule for maintainers: nothing is decided here about places or layouts; a
capture records.  Code that cannot be captured ends with an error that names the
remedy.

Paper: section 3 (the program tracer), section 4.2.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import Tracer

from pathways_lab.client.code import source_lines
from pathways_lab.client.functions import scopes
from pathways_lab.client.functions.array_types import ArrayType, as_here, host_type, not_put, wide
from pathways_lab.client.functions.jit import CompiledFunction
from pathways_lab.client.lab import stats
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.program import transformations
from pathways_lab.client.program.primitives import Move, Outside, Site, call_p, handle_p, move_p
from pathways_lab.client.session import failures
from pathways_lab.client.session.handles import Handle
from pathways_lab.runtime import jax_private

transformations.register()


@dataclass(frozen=True)
class Captured:
    """The record of a capture.

    jaxpr: JAX's closed jaxpr; its arguments are the stand-ins in order.
    leaves: the flat result; a :class:`Standin` for each value that the program makes.
    tree: structure of the result.
    handles: those that it reads from outside, kept until the program holds them.
    """

    name: str
    jaxpr: Any
    leaves: tuple[Any, ...]
    tree: Any
    handles: tuple[Handle, ...]


@dataclass(frozen=True)
class Standin:
    """Result *index* of the captured code, in place of a leaf."""

    index: int


class Capture:
    """The scope in which a program is captured.  name: of the program."""

    def __init__(self, name: str) -> None:
        self.name = name
        # Keeps the stand-ins alive, so that their ids stay theirs.
        self._places: dict[int, tuple[Any, Slice | None]] = {}
        self._handles: list[Handle] = []

    def run(
        self,
        program: Callable[[list[Any]], Any],
        kinds: Sequence[ArrayType],
        places: Sequence[Slice | None],
    ) -> Captured:
        """Run *program* once with stand-ins of these types and places.

        Raises PathwaysError for what cannot be captured.
        """
        recorded: list[Any] = []

        def flat(*standins: Any) -> list[Any]:
            for standin, place in zip(standins, places, strict=True):
                self._places[id(standin)] = (standin, place)
            with scopes.entered(self), jax_private.standins_described_by(self._describe):
                try:
                    result = program(list(standins))
                finally:
                    self._places.clear()
            if inspect.iscoroutine(result):
                result.close()
                raise failures.capture_failure(
                    f"program {self.name!r} is an async function, and a program cannot wait",
                    "write it with def, and await the handles that it returns",
                )
            leaves, tree = jax.tree.flatten(result)
            made = [leaf for leaf in leaves if isinstance(leaf, Tracer)]
            numbers = iter(range(len(made)))
            recorded.append(
                tuple(Standin(next(numbers)) if isinstance(x, Tracer) else x for x in leaves)
            )
            recorded.append(tree)
            return made

        stats.work.captured += 1
        body = as_here(flat, kinds)
        try:
            with jax_private.whole_tracebacks(), wide(kinds):
                jaxpr = jax.make_jaxpr(body)(*(kind.struct for kind in kinds))
        except Exception as error:
            failures.reraise(error, program=self.name)
        leaves, tree = recorded
        return Captured(self.name, jaxpr, leaves, tree, tuple(self._handles))

    # --- what calls inside of it do -----------------------------------------------------

    def call(
        self, function: CompiledFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of a compiled function: one node."""
        call = function.bind(args, kwargs)
        leaves = [self.lift(leaf) for leaf in call.leaves]
        made = call_p.bind(*leaves, site=Site(call.function, call.body))
        return jax.tree.unflatten(call.body.out_tree, made)

    def record_move(self, leaf: Any, move: Move, name: str) -> Any:
        """An explicit ``device_put`` of one leaf; what it becomes is called as what it was."""
        if not isinstance(leaf, Handle | Tracer) and host_type(leaf) is None:
            raise not_put(leaf)
        return move_p.bind(self.lift(leaf), move=move)

    def apply(
        self,
        name: str,
        function: Callable[..., Any],
        operands: Sequence[Any],
        options: dict[str, Any],
    ) -> Any:
        """An operator on a handle that the program reads from outside."""
        return function(*map(self.lift, operands), **options)

    def lift(self, leaf: Any) -> Any:
        """A handle becomes an input of the program; anything else stays."""
        if not isinstance(leaf, Handle):
            return leaf
        self._handles.append(leaf)
        return handle_p.bind(outside=Outside(leaf))

    # --- how stand-ins look ----------------------------------------------------------------

    def _describe(self, standin: Any) -> str | None:
        if scopes.current() is not self:
            return None
        kind = host_type(standin)
        place = self._place_of(standin)
        on = f" on {place.name}" if place is not None else ""
        return f"<{kind}{on}: the value comes after the run>"

    def _place_of(self, standin: Any) -> Slice | None:
        """Where a stand-in's value will be, as far as its origin tells."""
        todo, seen = [standin], set()
        while todo:
            current = todo.pop()
            if id(current) in seen:
                continue
            seen.add(id(current))
            known = self._places.get(id(current))
            if known is not None and known[1] is not None:
                return known[1]
            origin = jax_private.standin_origin(current)
            if origin is None:
                continue
            equation, operands = origin
            place = _place_named(equation.params)
            if place is not None:
                return place
            todo += [operand for operand in operands if isinstance(operand, Tracer)]
        return None


def _place_named(parameters: dict[str, Any]) -> Slice | None:
    place: Slice | None = None
    if "site" in parameters:
        place = parameters["site"].function.slice
    elif "move" in parameters:
        place = parameters["move"].slice
    elif "outside" in parameters:
        place = parameters["outside"].handle.slice
    return place


def current() -> Capture | None:
    """The capture that the calling code stands in, or None.

    Raises PathwaysError inside the body of a compiled function.
    """
    scope = scopes.current()
    if isinstance(scope, scopes.Body):
        raise failures.capture_failure(
            f"a program is called inside compiled function {scope.name!r}",
            "call compiled functions from programs, not the other way round",
            line=source_lines.of_caller(),
            node=scope.name,
        )
    return scope if isinstance(scope, Capture) else None
