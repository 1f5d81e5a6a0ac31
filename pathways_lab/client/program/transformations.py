"""JAX's transformations of programs: ``jax.grad`` and ``jax.vmap`` over compiled functions.

Problem: a call of a compiled function is one node, and JAX cannot look into a node.  But JAX
recorded the function when the call was made, so its backward pass, or the function over a batch,
is one more compiled function.

How: a rule of JAX for each of our primitives.  A call that is differentiated becomes two: the
forward call gives what the function gives, and what its backward pass needs beside the arguments;
the backward call makes the gradients, on the same slice.  The gradient of a value comes back to
the slice of that value.  A call over a batch stays one call.
:mod:`~pathways_lab.client.program.branches` has the rules of decisions.

Rule for maintainers: plain calls and moves come out.  Nothing after the capture knows
that they are gradients.

Paper: section 5.3 (training over several slices).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching
from jax.sharding import NamedSharding, PartitionSpec

from pathways_lab.client.code.layouts import Requested
from pathways_lab.client.functions.array_types import type_of
from pathways_lab.client.functions.pullbacks import Pullback
from pathways_lab.client.functions.traced_function import Body
from pathways_lab.client.program.primitives import Move, Site, beside_p, call_p, move_p
from pathways_lab.client.session import failures

Numbers = tuple[int, ...]
Backward = Callable[[Any, list[Any]], Sequence[Any]]
"""From what the forward pass saved, and the gradient of each result (None: zero), to those of the
arguments (None: zero)."""


# --- calls ----------------------------------------------------------------------------------


class _Halves:
    """The forward and the backward function of a body.

    moving: numbers of the arguments whose gradients are wanted.
    needed: numbers of the arguments that the backward function reads.
    """

    def __init__(self, body: Body, moving: Numbers) -> None:
        self._body = body
        self._moving = moving
        self._backwards: dict[Numbers, Body] = {}
        self.forward = Body(
            _named(self._flat_forward, body.name),
            body.name,
            body.in_types,
            requested=body.requested,
            labels=body.labels,
            line=body.line,
            running=body.running,
        )
        self._kept = self.forward.out_types[len(body.out_types) :]
        self.forward.requested_out = (*body.requested_out, *(None for _ in self._kept))
        self.needed = tuple(sorted({n for n in self._pullback.order if n < len(body.in_types)}))

    def _flat_forward(self, *args: Any) -> list[Any]:
        function = jaxpr_as_fun(self._body.jaxpr)

        def of_moving(*moving: Any) -> list[Any]:
            given = dict(zip(self._moving, moving, strict=True))
            return list(function(*(given.get(n, x) for n, x in enumerate(args))))

        results, pullback = jax.vjp(of_moving, *(args[n] for n in self._moving))
        self._pullback, kept = Pullback.of(pullback, results, args)
        return [*results, *kept]

    def backward(self, given: Numbers) -> Body:
        """A function of needed arguments, kept values, and the gradients of the *given* results."""
        if given not in self._backwards:
            self._backwards[given] = self._made_backward(given)
        return self._backwards[given]

    def _made_backward(self, given: Numbers) -> Body:
        body, needed, kept = self._body, self.needed, self._kept
        name = f"backward {body.name}"

        def flat_backward(*flat: Any) -> list[Any]:
            values = iter(flat)
            args: list[Any] = [None] * len(body.in_types)
            for n in needed:
                args[n] = next(values)
            held = list(itertools.islice(values, len(kept)))
            of_results: dict[int, Any] = dict(zip(given, values, strict=True))
            for n, aval in enumerate(body.jaxpr.out_avals):
                of_results.setdefault(n, jnp.zeros(aval.shape, aval.dtype) if _real(aval) else None)
            pullback = self._pullback.function(args, held)
            return list(pullback([of_results[n] for n in range(len(body.out_types))]))

        made = Body(
            _named(flat_backward, name),
            name,
            (
                *(body.in_types[n] for n in needed),
                *kept,
                *(body.out_types[n] for n in given),
            ),
            requested=(
                *(body.requested[n] for n in needed),
                *(None for _ in kept),
                *(body.requested_out[n] for n in given),
            ),
            labels=(
                *(body.labels[n] for n in needed),
                *(f"kept value {n}" for n in range(len(kept))),
                *(f"gradient of result {n}" for n in given),
            ),
            line=body.line,
            running=body.running,
        )
        made.requested_out = tuple(body.requested[n] for n in self._moving)
        return made


def _halves_of(body: Body, moving: Numbers) -> _Halves:
    if moving not in body.derived:
        body.derived[moving] = _Halves(body, moving)
    halves: _Halves = body.derived[moving]
    return halves


def _of_call(primals: Sequence[Any], tangents: Sequence[Any], *, site: Site) -> Any:
    moving = moving_of(tangents)
    halves = _halves_of(site.body, moving)
    count = len(site.body.out_types)

    def forward(*args: Any) -> Any:
        made = call_p.bind(*args, site=Site(site.function, halves.forward))
        return made[:count], (args, made[count:])

    def backward(saved: Any, of_results: list[Any]) -> list[Any]:
        args, kept = saved
        given = tuple(n for n, value in enumerate(of_results) if value is not None)
        body = halves.backward(given)
        function = site.function.elsewhere(site.function.slice, body.name)
        found = iter(
            call_p.bind(
                *(args[n] for n in halves.needed),
                *kept,
                *(of_results[n] for n in given),
                site=Site(function, body),
            )
        )
        return [next(found) if n in moving else None for n in range(len(args))]

    return derived(functools.partial(call_p.bind, site=site), forward, backward, primals, tangents)


def _call_over_batch(args: Sequence[Any], dims: Sequence[Any], *, site: Site) -> Any:
    body, dims = site.body, tuple(dims)
    kinds = tuple(type_of(jax.typeof(arg)) for arg in args)
    made = body.derived.get((dims, kinds))
    if made is None:
        function = jax.vmap(jaxpr_as_fun(body.jaxpr), in_axes=dims)
        made = body.derived[dims, kinds] = Body(
            _named(function, body.name),
            body.name,
            kinds,
            requested=tuple(map(_with_batch, body.requested, dims)),
            labels=body.labels,
            line=body.line,
            running=body.running,
        )
        made.requested_out = tuple(_with_batch(requested, 0) for requested in body.requested_out)
    results = call_p.bind(*args, site=Site(site.function, made))
    return results, [0] * len(results)


def _with_batch(requested: Requested, dim: int | None) -> Requested:
    """The same of an array that has one dimension more, along which it is not cut."""
    if requested is None or dim is None:
        return requested
    if isinstance(requested, NamedSharding):
        return NamedSharding(requested.mesh, _spec_with_batch(requested.spec, dim))
    return _spec_with_batch(requested, dim)


def _spec_with_batch(spec: PartitionSpec, dim: int) -> PartitionSpec:
    entries = [*spec, *(None for _ in range(dim - len(spec)))]
    return PartitionSpec(*entries[:dim], None, *entries[dim:])


# --- moves ------------------------------------------------------------------------------------


def _of_move(primitive: Primitive) -> Callable[..., Any]:
    def rule(primals: Sequence[Any], tangents: Sequence[Any], **parameters: Any) -> Any:
        bound = functools.partial(primitive.bind, **parameters)

        def backward(args: Any, of_results: list[Any]) -> list[Any]:
            return [of_results[0], *(None for _ in args[1:])]

        return derived(bound, lambda *args: (bound(*args), args), backward, primals, tangents)

    return rule


def _move_over_batch(args: Sequence[Any], dims: Sequence[Any], *, move: Move) -> Any:
    moved = replace(move, requested=_with_batch(move.requested, dims[0]))
    return move_p.bind(args[0], move=moved), dims[0]


# --- for all of them ------------------------------------------------------------------------


def derived(
    function: Callable[..., Any],
    forward: Callable[..., Any],
    backward: Backward,
    primals: Sequence[Any],
    tangents: Sequence[Any],
) -> Any:
    """Results and their tangents, by these passes.

    forward: gives the results, and what it saves.
    """
    call = jax.custom_vjp(function)

    def of_values(*args: Any) -> Any:
        values = [arg.value for arg in args]
        results, saved = forward(*values)
        return results, (saved, values, results)

    def of_cotangents(saved: Any, cotangents: Any) -> tuple[Any, ...]:
        saved, args, results = saved
        flat = zip(jax.tree.leaves(results), _flat(cotangents), strict=True)
        # What comes from another slice is needed where the result was made.
        of_results = [None if ct is None else beside_p.bind(ct, result) for result, ct in flat]
        found = backward(saved, of_results)
        pairs = zip(found, args, strict=True)
        return tuple(None if g is None else beside_p.bind(g, arg) for g, arg in pairs)

    call.defvjp(of_values, of_cotangents, symbolic_zeros=True)
    changes = [
        _no_change(x) if type(change) is ad.Zero else change
        for x, change in zip(primals, tangents, strict=True)
    ]
    return jax.jvp(call, tuple(primals), tuple(changes))


def _flat(cotangents: Any) -> list[Any]:
    leaves = jax.tree.leaves(cotangents, is_leaf=lambda x: isinstance(x, SymbolicZero))
    return [ct if not isinstance(ct, SymbolicZero) and _real(ct) else None for ct in leaves]


def moving_of(tangents: Sequence[Any]) -> Numbers:
    """Numbers of the arguments that change."""
    return tuple(n for n, change in enumerate(tangents) if type(change) is not ad.Zero)


def _no_change(primal: Any) -> Any:
    kind = jax.typeof(primal)
    if _real(kind):
        return jnp.zeros(kind.shape, kind.dtype)
    return np.zeros(kind.shape, jax.dtypes.float0)


def _real(kind: Any) -> bool:
    return bool(jnp.issubdtype(kind.dtype, jnp.inexact))


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """JAX names the compiled module after it."""

    def flat(*args: Any) -> Any:
        return function(*args)

    flat.__name__ = flat.__qualname__ = name
    return flat


def refuses(transformation: str, thing: str) -> Callable[..., NoReturn]:
    """A rule for what this transformation of JAX's cannot look into."""

    def rule(*_: Any, **__: Any) -> NoReturn:
        raise failures.in_transformation(transformation, thing=thing)

    return rule


def register() -> None:
    """From here on JAX transforms the programs that it records."""
    ad.primitive_jvps[call_p] = _of_call
    batching.primitive_batchers[call_p] = _call_over_batch
    for primitive in (move_p, beside_p):
        ad.primitive_jvps[primitive] = _of_move(primitive)
    batching.primitive_batchers[move_p] = _move_over_batch
    batching.primitive_batchers[beside_p] = lambda args, dims, **how: (
        beside_p.bind(*args, **how),
        dims[0],
    )
