"""Experts on slices of their own, to which rows travel where a router sends them.

Problem: how many rows an expert gets is known only when the router has run.  A compiled function
has fixed shapes, so experts behind one get buffers of full capacity, however few rows there are,
or lose rows.

How: the program has each expert for a few numbers of rows, and the rows decide which of these runs:
the smallest one that is large enough, or none.  All of it is nodes and transfers under conditions,
so an expert that no row reaches runs nothing and gets nothing.  All rows leave before the first
ones come back, so experts compute beside each other.

Rule for maintainers: the sum over the experts goes by their numbers, never by who is first.

Paper: section 4.5 (data-dependent, sparse exchange), section 6.3 (mixture of experts).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pathways_lab.client.functions.jit import CompiledFunction, jit
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.program.branches import captured_in, decided, within
from pathways_lab.client.program.primitives import beside_p
from pathways_lab.client.program.program import program
from pathways_lab.client.session import failures

Expert = Callable[[Any, Any], Any]
Router = Callable[..., tuple[Any, Any]]


def experts(
    function: Expert,
    *,
    on: Sequence[Slice],
    route: Router,
    sizes: Sequence[int] | None = None,
) -> Experts:
    """Experts, each on a slice of its own: ``y = moe(parameters, x)`` in a program.

    function(parameters, rows): one expert, plain JAX; rows ``[n, width]`` to ``[n, any]``, each row
        by itself.
    on: the slices; expert *n* is on ``on[n % len(on)]``.
    route(x, \\*more): which experts each row of ``x`` goes to, and with which weights: integers and
        floats of shape ``[rows, k]``; in a program, so plain JAX or a compiled function.
    sizes: numbers of rows for which an expert is compiled; None: powers of two up to all rows.

    ``moe(parameters, x, *more)`` is the weighted sum of the experts' rows, ``[rows, any]``, where
    ``x`` is; ``parameters`` is a list, by expert.  It has gradients by the parameters, ``x``
    and the weights; backward, rows travel again.  An expert's rows are padded to the next of the
    *sizes*; an expert that gets no row runs nothing, forward, and gets nothing.

    Raises PathwaysError for sizes that do not hold all rows, and shapes that do not fit.

    Example::

        moe = pw.experts(ffn, on=[left, right], route=top_two)
        y = moe([params0, params1], x, router)
    """
    return Experts(function, on, route, sizes)


class Experts:
    """The experts of :func:`experts`.  on: their slices."""

    def __init__(
        self, function: Expert, on: Sequence[Slice], route: Router, sizes: Sequence[int] | None
    ) -> None:
        if not on or not all(isinstance(place, Slice) for place in on):
            raise failures.failure(
                "refused", f"on={on!r} of pw.experts is no list of slices", "on=[lab.slice(2), ...]"
            )
        if sizes is not None and (not sizes or min(sizes) < 1):
            raise failures.failure(
                "refused", f"sizes={sizes!r} of pw.experts", "give numbers of rows, from 1 on"
            )
        self.on = tuple(on)
        self._route = route
        self._sizes = None if sizes is None else tuple(sorted({int(n) for n in sizes}))
        self._name = getattr(function, "__name__", "expert")
        self._function = function
        self._forward = jit(function, name=self._name)
        self._backward = jit(_gradients(function), name=f"backward {self._name}")
        self._alone = program(self._mixed, name=self._name)

    def __call__(self, parameters: Sequence[Any], x: Any, *more: Any) -> Any:
        """The weighted sum of the experts' rows: see :func:`experts`."""
        if captured_in("experts") is None:
            return self._alone(parameters, x, *more)
        return self._mixed(parameters, x, *more)

    def __repr__(self) -> str:
        return f"<experts {self._name} on {', '.join(place.name for place in self.on)}>"

    def _mixed(self, *args: Any) -> Any:
        capture = captured_in("experts")
        assert capture is not None
        parameters, x, *more = jax.tree.map(capture.lift, args)
        choice, weights = self._route(x, *more)
        sizes = self._checked(x, choice, weights, len(parameters))
        mix = jax.custom_vjp(lambda *args: self._there(sizes, *args)[0])
        mix.defvjp(functools.partial(self._there, sizes), functools.partial(self._back, sizes))
        # The router's own arrays may have no slice yet.
        beside = [beside_p.bind(jnp.asarray(value), x) for value in (weights, choice)]
        return mix(list(parameters), x, *beside)

    def _checked(self, x: Any, choice: Any, weights: Any, count: int) -> tuple[int, ...]:
        """Numbers of rows for which an expert is compiled.  Raises PathwaysError for shapes."""
        wrong = ""
        if x.ndim != 2:
            wrong = f"x is {jax.typeof(x)}, and rows are an array of shape [rows, width]"
        elif choice.ndim != 2 or choice.shape != weights.shape or choice.shape[0] != x.shape[0]:
            wrong = (
                f"route gives {jax.typeof(choice)} and {jax.typeof(weights)} for {x.shape[0]} rows,"
                " not two arrays of shape [rows, k]"
            )
        elif not jnp.issubdtype(choice.dtype, jnp.integer):
            wrong = f"route gives {jax.typeof(choice)}: numbers of experts are integers"
        elif not count:
            wrong = "there are no parameters, which are a list by expert"
        elif self._sizes is not None and self._sizes[-1] < choice.size:
            wrong = f"sizes end at {self._sizes[-1]}, and one expert may get {choice.size} rows"
        if wrong:
            raise failures.capture_failure(f"pw.experts of {self._name!r}: {wrong}", _REMEDY)
        if self._sizes is not None:
            return self._sizes
        exponents = range((choice.size // (4 * count)).bit_length(), (choice.size - 1).bit_length())
        return (*(1 << n for n in exponents), choice.size)

    def _there(self, sizes: tuple[int, ...], *args: Any) -> Any:
        """The sum, and what the backward pass needs."""
        parameters, x, weights, choice = args
        row = jax.eval_shape(self._function, parameters[0], x)
        order, parts, numbers, total = _arrange(
            choice, count=len(parameters), sizes=sizes, width=row.shape[1], dtype=str(row.dtype)
        )
        sent = _each(numbers, sizes, lambda n, size: _send(x, order, parts[n], size=size))
        came = _each(
            numbers,
            sizes,
            lambda n, size: beside_p.bind(self._on(n)(parameters[n], sent[n, size]), x),
        )
        for n, number in enumerate(numbers):
            added = [
                functools.partial(_added, _add, came[n, size], weights, order, parts[n])
                for size in sizes
            ]
            total = decided(number, [_same, *added], total)
        return total, (parameters, x, weights, order, parts, numbers)

    def _back(self, sizes: tuple[int, ...], saved: Any, of_sum: Any) -> Any:
        """Gradients of parameters, rows and weights: rows travel again, with their gradients."""
        parameters, x, weights, order, parts, numbers = saved
        of_sum = beside_p.bind(of_sum, x)
        sent = _each(
            numbers,
            sizes,
            lambda n, size: _send_back(x, of_sum, weights, order, parts[n], size=size),
        )
        made = _each(
            numbers, sizes, lambda n, size: self._on(n, back=True)(parameters[n], *sent[n, size])
        )
        came = _each(
            numbers,
            sizes,
            lambda n, size: [beside_p.bind(value, x) for value in made[n, size][1:]],
        )
        totals, of_parameters = _nothing(x, weights), []
        for n, number in enumerate(numbers):
            own = [functools.partial(_same, made[n, size][0]) for size in sizes]
            nothing = functools.partial(_on_slice(_zeros, self._place(n)), parameters[n])
            of_parameters.append(decided(number, [nothing, *own]))
            added = [
                functools.partial(_added, _add_back, *came[n, size], order, parts[n])
                for size in sizes
            ]
            totals = decided(number, [_same, *added], totals)
        return of_parameters, *totals, None

    def _place(self, n: int) -> Slice:
        return self.on[n % len(self.on)]

    def _on(self, n: int, *, back: bool = False) -> CompiledFunction:
        return _on_slice(self._backward if back else self._forward, self._place(n))


_REMEDY = "help(pw.experts) says which shapes it takes"


def _on_slice(function: CompiledFunction, place: Slice) -> CompiledFunction:
    return function.elsewhere(place, function.name)


def _each(
    numbers: Sequence[Any], sizes: Sequence[int], part: Callable[[int, int], Any]
) -> dict[tuple[int, int], Any]:
    """A part of every branch of every expert, by expert and size."""
    return {
        (n, size): within(number, case, len(sizes) + 1, functools.partial(part, n, size))
        for n, number in enumerate(numbers)
        for case, size in enumerate(sizes, 1)
    }


def _same(value: Any) -> Any:
    return value


def _added(add: Callable[..., Any], *values_and_total: Any) -> Any:
    *values, total = values_and_total
    return add(total, *values)


# --- compiled functions -------------------------------------------------------------------------


def _arranged(choice: Any, *, count: int, sizes: tuple[int, ...], width: int, dtype: str) -> Any:
    """Pairs of a row and an expert in the order of the experts; by expert, where its pairs begin
    and how many it has; by expert, the number of its size, 0 for no row; and an empty sum.
    """
    flat = choice.reshape(-1)
    counts = jnp.bincount(flat, length=count).astype(jnp.int32)
    begins = jnp.cumsum(counts) - counts
    number = jnp.searchsorted(jnp.asarray((0, *sizes)), counts).astype(jnp.int32)
    return (
        jnp.argsort(flat, stable=True).astype(jnp.int32),
        [jnp.stack([begins[n], counts[n]]) for n in range(count)],
        [number[n] for n in range(count)],
        jnp.zeros((choice.shape[0], width), dtype),
    )


def _pairs(order: Any, part: Any, size: int) -> tuple[Any, Any]:
    """The numbers of an expert's pairs, the last one as often as there is room; and which of them
    count.  So padding is a row that the expert knows, and nothing becomes infinite for it.
    """
    begin, count = part
    at = jnp.arange(size)
    return order[begin + jnp.minimum(at, count - 1)], (at < count)[:, None]


def _sent(x: Any, order: Any, part: Any, *, size: int) -> Any:
    pairs, _ = _pairs(order, part, size)
    return x[pairs // (len(order) // len(x))]


def _sent_back(x: Any, of_sum: Any, weights: Any, order: Any, part: Any, *, size: int) -> Any:
    pairs, counts = _pairs(order, part, size)
    rows = pairs // weights.shape[1]
    return x[rows], of_sum[rows], jnp.where(counts, weights.reshape(-1, 1)[pairs], 0)


def _sum_with(total: Any, came: Any, weights: Any, order: Any, part: Any) -> Any:
    pairs, counts = _pairs(order, part, len(came))
    weighted = came * weights.reshape(-1, 1)[pairs].astype(came.dtype)
    return total.at[pairs // weights.shape[1]].add(jnp.where(counts, weighted, 0))


def _sum_back(totals: Any, of_rows: Any, of_weight: Any, order: Any, part: Any) -> Any:
    of_x, of_weights = totals
    pairs, counts = _pairs(order, part, len(of_rows))
    flat = of_weights.reshape(-1, 1).at[pairs].add(jnp.where(counts, of_weight, 0))
    of_x = of_x.at[pairs // of_weights.shape[1]].add(jnp.where(counts, of_rows, 0))
    return of_x, flat.reshape(of_weights.shape)


def _gradients(function: Expert) -> Callable[..., Any]:
    """Gradients of parameters, rows and weights of one expert."""

    def backward(parameters: Any, rows: Any, of_rows: Any, weight: Any) -> Any:
        made, pullback = jax.vjp(function, parameters, rows)
        of_weight = (made * of_rows).sum(axis=1, keepdims=True).astype(weight.dtype)
        of_made = of_rows * weight.astype(of_rows.dtype)
        return *pullback(of_made), of_weight

    return backward


_arrange = jit(_arranged, static_argnames=("count", "sizes", "width", "dtype"), name="route")
_send = jit(_sent, static_argnames=("size",), name="send rows")
_send_back = jit(_sent_back, static_argnames=("size",), name="send rows back")
_add = jit(_sum_with, name="add rows")
_add_back = jit(_sum_back, name="add gradients")
_zeros = jit(lambda tree: jax.tree.map(jnp.zeros_like, tree), name="no gradient")
_nothing = jit(lambda *arrays: tuple(map(jnp.zeros_like, arrays)), name="no gradients")
