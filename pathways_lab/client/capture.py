"""Capturing: the user's Python runs once, with stand-ins for arrays.

Problem: a program is ordinary Python that calls compiled functions and does a
little arithmetic between them.  JAX itself is the capturing machine: the code
runs under ``jax.make_jaxpr``, each call of a compiled function becomes one
equation of our own primitive, everything else that touches a stand-in becomes
an ordinary equation.  :mod:`~pathways_lab.client.placing` turns the equations
into a graph.

Rule for maintainers: nothing is decided here about places or layouts; a
capture records.  What cannot be captured ends with an error that says what to
do instead.

Paper: section 3 (the program tracer), section 4.2.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
from jax.core import ShapedArray, Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from pathways_lab.client import failures, lines, scopes, stats
from pathways_lab.client.arrays import ArrayType, dtype_of, host_type, no_array
from pathways_lab.client.bodies import Body
from pathways_lab.client.devices import Slice
from pathways_lab.client.functions import BoundCall, CompiledFunction
from pathways_lab.client.handles import Handle
from pathways_lab.client.layouts import Requested
from pathways_lab.runtime import jax_private


@dataclass(frozen=True, eq=False)
class Move:
    """An explicit ``device_put``: to a slice, under a sharding or the nearest layout."""

    slice: Slice
    requested: Requested


# --- the primitives ----------------------------------------------------------------------
#
# JAX caches by the parameters of equations and so keeps them alive: they are
# plain numbers, texts and types, and what they stand for is in the capture.

call_p = Primitive("pw_call")
"""A call of a compiled function: ``number`` of the call, ``name``, ``kinds`` of its results."""
call_p.multiple_results = True
handle_p = Primitive("pw_handle")
"""A handle that the program reads from outside: ``number`` of it, its ``kind``."""
move_p = Primitive("pw_move")
"""An explicit transfer: ``number`` of it."""

OWN = frozenset((call_p.name, handle_p.name, move_p.name))
"""Names of the primitives that only a program may contain."""


def _aval(kind: ArrayType) -> ShapedArray:
    return ShapedArray(kind.shape, dtype_of(kind.dtype), weak_type=kind.weak)


call_p.def_abstract_eval(lambda *_, kinds, **__: [_aval(kind) for kind in kinds])
handle_p.def_abstract_eval(lambda *, kind, **_: _aval(kind))
move_p.def_abstract_eval(lambda value, **_: value)


def _refuses(transformation: str) -> Callable[..., NoReturn]:
    def rule(*_: Any, name: str = "device_put", **__: Any) -> NoReturn:
        raise failures.in_transformation(name, transformation)

    return rule


for _primitive in (call_p, move_p):
    ad.primitive_jvps[_primitive] = _refuses("jax.grad")
    batching.primitive_batchers[_primitive] = _refuses("jax.vmap")


# --- a capture ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Captured:
    """What a capture recorded.

    jaxpr: JAX's closed jaxpr; its arguments are the stand-ins in order.
    calls, handles, moves: what the numbers in its equations stand for.
    leaves: the flat result; a :class:`Standin` for each value that the program makes.
    tree: structure of the result.
    """

    name: str
    jaxpr: Any
    calls: tuple[Site, ...]
    handles: tuple[Handle, ...]
    moves: tuple[Move, ...]
    leaves: tuple[Any, ...]
    tree: Any


@dataclass(frozen=True)
class Site:
    """A call of a compiled function, without its arguments."""

    function: CompiledFunction
    body: Body


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
        self._calls: list[Site] = []
        self._handles: list[Handle] = []
        self._moves: list[Move] = []

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
                result = program(list(standins))
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
        try:
            with jax_private.whole_tracebacks():
                jaxpr = jax.make_jaxpr(flat)(*(kind.struct for kind in kinds))
        except Exception as error:
            failures.reraise(error, program=self.name)
        finally:
            self._places.clear()
        known = tuple(self._calls), tuple(self._handles), tuple(self._moves)
        return Captured(self.name, jaxpr, *known, *recorded)

    # --- what calls inside of it do -----------------------------------------------------

    def record_call(self, call: BoundCall) -> Any:
        """A call of a compiled function: one node."""
        leaves = [self.lift(leaf) for leaf in call.leaves]
        self._calls.append(Site(call.function, call.body))
        made = call_p.bind(
            *leaves, number=len(self._calls) - 1, name=call.function.name, kinds=call.body.out_types
        )
        return jax.tree.unflatten(call.body.out_tree, made)

    def record_move(self, leaf: Any, move: Move) -> Any:
        """An explicit ``device_put`` of one leaf."""
        if not isinstance(leaf, Handle | Tracer) and host_type(leaf) is None:
            raise no_array(leaf, "a leaf given to device_put")
        self._moves.append(move)
        return move_p.bind(self.lift(leaf), number=len(self._moves) - 1)

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
        return handle_p.bind(number=len(self._handles) - 1, kind=leaf.type)

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
            place = self._place_named(equation)
            if place is not None:
                return place
            todo += [operand for operand in operands if isinstance(operand, Tracer)]
        return None

    def _place_named(self, equation: Any) -> Slice | None:
        name, number = equation.primitive.name, int(equation.params.get("number", 0))
        if name == call_p.name:
            return self._calls[number].function.slice
        if name == move_p.name:
            return self._moves[number].slice
        return self._handles[number].slice if name == handle_p.name else None


def current() -> Capture | None:
    """The capture that the calling code stands in, or None.

    Raises PathwaysError inside the body of a compiled function.
    """
    scope = scopes.current()
    if isinstance(scope, scopes.Body):
        raise failures.capture_failure(
            f"a program is called inside compiled function {scope.name!r}",
            "call compiled functions from programs, not the other way round",
            line=lines.of_caller(),
            node=scope.name,
        )
    return scope if isinstance(scope, Capture) else None
