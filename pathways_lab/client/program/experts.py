"""Experts on slices of their own, to which rows travel where a router sends them.

Problem: how many rows an expert gets is known only when the router has run.  A compiled function
has fixed shapes, so experts behind one get buffers of full capacity, however few rows there are,
or lose rows.

How: the program has each expert for a few numbers of rows, and the rows decide which of these runs:
the smallest one that is large enough, or none.  All of it is nodes and transfers under conditions,
so an expert that no row reaches runs nothing and gets nothing.  All rows leave before the first
ones come back, so experts compute beside each other.  Each sender puts its rows at their own places
among zeros, which a trimmed transfer leaves out: so only rows travel, and the end of the transfer
says that no more will come.

Rule for maintainers: the sum over the experts goes by their numbers, never by who is first.

Paper: section 4.5 (data-dependent, sparse exchange), section 6.3 (mixture of experts).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from pathways_lab.client.functions.jit import CompiledFunction, jit
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.program.branches import captured_in, decided, within
from pathways_lab.client.program.primitives import Move, beside_p, move_p
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
        floats of shape ``[rows, k]``; in a program, so plain JAX or a compiled function.  A number
        that is no expert's, such as -1, sends the row nowhere, and adds nothing.
    sizes: numbers of rows for which an expert is compiled; None: powers of two up to all rows.

    ``moe(parameters, x, *more)`` is the weighted sum of the experts' rows, ``[rows, any]``, where
    ``x`` is; ``parameters`` is a list, by expert.  Rows on several slices are a list, and so are
    the sums and each of *more*: ``moe(parameters, [x0, x1], [router0, router1])``.  An expert
    begins when all rows for it are there.  It has gradients by the parameters, ``x`` and the
    weights; backward, rows travel again.  Only rows travel; where an expert computes, they are
    padded to the next of the *sizes*.  An expert that gets no row runs nothing, forward, and gets
    nothing.

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
            raise failures.refused(
                f"on={on!r} of pw.experts is no list of slices", "on=[lab.slice(2), ...]"
            )
        if sizes is not None and (not sizes or min(sizes) < 1):
            raise failures.refused(
                f"sizes={sizes!r} of pw.experts", "give numbers of rows, from 1 on"
            )
        self.on = tuple(on)
        self._route = route
        self._sizes = None if sizes is None else tuple(sorted({int(n) for n in sizes}))
        self._name = getattr(function, "__name__", "expert")
        self._function = function
        self._forward = jit(_forwards(function), name=self._name)
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
        several = isinstance(x, list | tuple)
        xs = list(x) if several else [x]
        routed = self._routed(xs, more if several else [[value] for value in more])
        sizes = self._checked(xs, routed, len(parameters))
        mix = jax.custom_vjp(lambda *args: self._there(sizes, *args)[0])
        mix.defvjp(functools.partial(self._there, sizes), functools.partial(self._back, sizes))
        # The router's own arrays may have no slice yet.
        choices, weights = (
            [beside_p.bind(jnp.asarray(own), x) for own, x in zip(values, xs, strict=True)]
            for values in zip(*routed, strict=True)
        )
        totals = mix(list(parameters), xs, weights, choices)
        return totals if several else totals[0]

    def _routed(self, xs: Sequence[Any], more: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Choices and weights by sender.  more: by argument of the router and sender."""
        for value in more:
            if not isinstance(value, list | tuple) or len(value) != len(xs):
                self._refuse(f"x is a list of {len(xs)} arrays, and an argument behind it is not")
        if not xs:
            self._refuse("x is an empty list, and a sender has rows")
        return [self._route(x, *[value[s] for value in more]) for s, x in enumerate(xs)]

    def _checked(
        self, xs: Sequence[Any], routed: Sequence[tuple[Any, Any]], count: int
    ) -> tuple[int, ...]:
        """Numbers of rows for which an expert is compiled.  Raises PathwaysError for shapes."""
        if not count:
            self._refuse("there are no parameters, which are a list by expert")
        pairs = 0
        for x, (choice, weights) in zip(xs, routed, strict=True):
            wrong = ""
            if x.ndim != 2:
                wrong = f"x is {jax.typeof(x)}, and rows are an array of shape [rows, width]"
            elif not len(x):
                wrong = f"x is {jax.typeof(x)}: there is at least one row"
            elif (x.shape[1], x.dtype) != (xs[0].shape[1], xs[0].dtype):
                wrong = f"rows of {jax.typeof(xs[0])} and {jax.typeof(x)} are of different types"
            elif choice.ndim != 2 or choice.shape != weights.shape or len(choice) != len(x):
                wrong = (
                    f"route gives {jax.typeof(choice)} and {jax.typeof(weights)} for {len(x)} rows,"
                    " not two arrays of shape [rows, k]"
                )
            elif not jnp.issubdtype(choice.dtype, jnp.integer):
                wrong = f"route gives {jax.typeof(choice)}: numbers of experts are integers"
            if wrong:
                self._refuse(wrong)
            pairs += choice.size
        if self._sizes is None:
            exponents = range((pairs // (4 * count)).bit_length(), (pairs - 1).bit_length())
            return (*(1 << n for n in exponents), pairs)
        if self._sizes[-1] < pairs:
            self._refuse(f"sizes end at {self._sizes[-1]}, and one expert may get {pairs} rows")
        return self._sizes

    def _refuse(self, wrong: str) -> NoReturn:
        remedy = "help(pw.experts) says which shapes it takes"
        raise failures.capture_failure(f"pw.experts of {self._name!r}: {wrong}", remedy)

    def _there(self, sizes: tuple[int, ...], *args: Any) -> Any:
        """The sums, by sender, and what the backward pass needs."""
        parameters, xs, weights, choices = args
        row = jax.eval_shape(self._function, parameters[0], xs[0])
        kind = {"count": len(parameters), "width": row.shape[1], "dtype": str(row.dtype)}
        orders, counts, empty = zip(*[_count(choice, **kind) for choice in choices], strict=True)
        # Each sender hears how many rows all of them have, and so where its own ones go.
        share = _share.elsewhere(None, f"rows of {self._name}")
        shared = [share([beside_p.bind(own, x) for own in counts], sizes=sizes) for x in xs]
        numbers, shares = shared[0][0], [own for _, own in shared]
        senders = [_Sender(*own) for own in zip(xs, weights, orders, shares, strict=True)]
        sent = _each(
            numbers,
            sizes,
            lambda n, size: [
                self._to(n, _send(own.x, own.order, own.shares[n], sender=s, size=size))
                for s, own in enumerate(senders)
            ],
        )
        came = _each(
            numbers,
            sizes,
            lambda n, size: _home(xs, self._on(n)(parameters[n], shares[0][n], sent[n, size])),
        )
        totals = _summed(_add, numbers, sizes, senders, came, list(empty))
        return totals, (parameters, numbers, senders)

    def _back(self, sizes: tuple[int, ...], saved: Any, of_sums: Any) -> Any:
        """Gradients of parameters, rows and weights: rows travel again, with their gradients."""
        parameters, numbers, senders = saved
        xs, shares = [own.x for own in senders], senders[0].shares
        of_sums = [beside_p.bind(own, x) for own, x in zip(of_sums, xs, strict=True)]
        sent = _each(
            numbers,
            sizes,
            lambda n, size: [
                self._to(n, _send_back(*own[:3], own.shares[n], of_sum, sender=s, size=size))
                for s, (own, of_sum) in enumerate(zip(senders, of_sums, strict=True))
            ],
        )
        made = _each(
            numbers,
            sizes,
            lambda n, size: self._on(n, back=True)(parameters[n], shares[n], sent[n, size]),
        )
        came = _each(numbers, sizes, lambda n, size: _home(xs, made[n, size][1]))
        of_parameters = []
        for n, number in enumerate(numbers):
            own = [functools.partial(_same, made[n, size][0]) for size in sizes]
            nothing = functools.partial(_on_slice(_zeros, self._place(n)), parameters[n])
            of_parameters.append(decided(number, [nothing, *own]))
        totals = [_nothing(own.x, own.weights) for own in senders]
        totals = _summed(_add_back, numbers, sizes, senders, came, totals)
        of_xs, of_weights = zip(*totals, strict=True)
        return of_parameters, list(of_xs), list(of_weights), None

    def _place(self, n: int) -> Slice:
        return self.on[n % len(self.on)]

    def _to(self, n: int, rows: Any) -> Any:
        """Arrays of an expert's size, on its slice: only rows with values travel."""
        move = Move(self._place(n), trimmed=True)
        return jax.tree.map(lambda array: move_p.bind(array, move=move), rows)

    def _on(self, n: int, *, back: bool = False) -> CompiledFunction:
        return _on_slice(self._backward if back else self._forward, self._place(n))


class _Sender(NamedTuple):
    """A slice with rows.  order: its pairs of a row and an expert, in the order of the experts.

    shares: by expert, for each sender: where its pairs begin in its order, where they begin among
        the expert's rows, and how many there are.
    """

    x: Any
    weights: Any
    order: Any
    shares: Sequence[Any]


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


def _home(xs: Sequence[Any], made: Sequence[Any]) -> list[Any]:
    """Results of an expert, by sender, on its slice."""
    return [
        jax.tree.map(lambda array, x=x: beside_p.bind(array, x, trimmed=True), own)
        for x, own in zip(xs, made, strict=True)
    ]


def _summed(
    add: CompiledFunction,
    numbers: Sequence[Any],
    sizes: Sequence[int],
    senders: Sequence[_Sender],
    came: dict[tuple[int, int], Any],
    totals: list[Any],
) -> list[Any]:
    """The totals by sender, with all that came; expert after expert."""

    def added(n: int, size: int, totals: list[Any]) -> list[Any]:
        return [
            add(total, came[n, size][s], own.weights, own.order, own.shares[n], sender=s)
            for s, (own, total) in enumerate(zip(senders, totals, strict=True))
        ]

    for n, number in enumerate(numbers):
        branches = [functools.partial(added, n, size) for size in sizes]
        totals = decided(number, [_same, *branches], totals)
    return totals


def _same(value: Any) -> Any:
    return value


# --- compiled functions -------------------------------------------------------------------------


def _counted(choice: Any, *, count: int, width: int, dtype: str) -> Any:
    """Pairs of a row and an expert in the order of the experts; how many each has; an empty sum."""
    flat = choice.reshape(-1).astype(jnp.int32)
    flat = jnp.where(flat < 0, count, flat)  # behind all experts: else counted for the first
    return (
        jnp.argsort(flat, stable=True).astype(jnp.int32),
        jnp.bincount(flat, length=count).astype(jnp.int32),
        jnp.zeros((choice.shape[0], width), dtype),
    )


def _shared(counts: Any, *, sizes: tuple[int, ...]) -> Any:
    """By expert the number of its size, 0 for no row, and its rows for the timeline; and the shares
    of all senders in it.
    """
    table = jnp.stack(counts)
    begins, offsets = (jnp.cumsum(table, axis=axis) - table for axis in (1, 0))
    rows = table.sum(axis=0)
    case = jnp.searchsorted(jnp.asarray((0, *sizes)), rows)
    number = (case + (len(sizes) + 1) * (1 + rows)).astype(jnp.int32)
    shares = jnp.stack([begins, offsets, table], axis=-1).astype(jnp.int32)
    experts = range(table.shape[1])
    return [number[n] for n in experts], [shares[:, n] for n in experts]


def _pairs(order: Any, share: Any, sender: int, size: int) -> tuple[Any, Any]:
    """A sender's pairs at the places of an expert's rows, and which of these are its own."""
    begin, offset, count = share[sender]
    at = jnp.arange(size) - offset
    own = (at >= 0) & (at < count)
    return order[begin + jnp.clip(at, 0, jnp.maximum(count - 1, 0))], own[:, None]


def _sent(x: Any, order: Any, share: Any, *, sender: int, size: int) -> Any:
    pairs, own = _pairs(order, share, sender, size)
    return jnp.where(own, x[pairs // (len(order) // len(x))], 0)


def _sent_back(
    x: Any, weights: Any, order: Any, share: Any, of_sum: Any, *, sender: int, size: int
) -> Any:
    pairs, own = _pairs(order, share, sender, size)
    rows = pairs // weights.shape[1]
    sent = x[rows], of_sum[rows], weights.reshape(-1, 1)[pairs]
    return tuple(jnp.where(own, value, 0) for value in sent)


def _joined(share: Any, sent: Sequence[Any]) -> Any:
    """An expert's rows, of all senders, the last one as often as there is room: so padding is a
    row that the expert knows, and nothing becomes infinite for it.
    """
    _, begins, counts = share.T
    at = jnp.minimum(jnp.arange(len(sent[0])), counts.sum() - 1)
    return jnp.stack(sent)[jnp.searchsorted(begins, at, side="right") - 1, at]


def _apart(share: Any, made: Any) -> list[Any]:
    """Rows by sender, each at its place among zeros."""
    at = jnp.arange(len(made))
    return [
        jnp.where(((begin <= at) & (at < begin + count))[:, None], made, 0)
        for _, begin, count in share
    ]


def _forwards(function: Expert) -> Callable[..., Any]:
    """One expert: rows of all senders in, rows for each of them out."""

    def forward(parameters: Any, share: Any, sent: Sequence[Any]) -> list[Any]:
        return _apart(share, function(parameters, _joined(share, sent)))

    return forward


def _gradients(function: Expert) -> Callable[..., Any]:
    """Gradients of one expert: of its parameters, and by sender of rows and weights."""

    def backward(parameters: Any, share: Any, sent: Sequence[Any]) -> tuple[Any, list[Any]]:
        rows, of_rows, weight = (_joined(share, own) for own in zip(*sent, strict=True))
        weight = jnp.where(jnp.arange(len(rows))[:, None] < share[:, 2].sum(), weight, 0)
        made, pullback = jax.vjp(function, parameters, rows)
        of_weight = (made * of_rows).sum(axis=1, keepdims=True).astype(weight.dtype)
        of_parameters, of_x = pullback(of_rows * weight.astype(of_rows.dtype))
        by_sender = zip(_apart(share, of_x), _apart(share, of_weight), strict=True)
        return of_parameters, list(by_sender)

    return backward


def _sum_with(total: Any, came: Any, weights: Any, order: Any, share: Any, *, sender: int) -> Any:
    pairs, own = _pairs(order, share, sender, len(came))
    weighted = came * weights.reshape(-1, 1)[pairs].astype(came.dtype)
    return total.at[pairs // weights.shape[1]].add(jnp.where(own, weighted, 0))


def _sum_back(totals: Any, came: Any, weights: Any, order: Any, share: Any, *, sender: int) -> Any:
    (of_x, of_weights), (of_rows, of_weight) = totals, came
    pairs, own = _pairs(order, share, sender, len(of_rows))
    flat = of_weights.reshape(-1, 1).at[pairs].add(jnp.where(own, of_weight, 0))
    of_x = of_x.at[pairs // weights.shape[1]].add(jnp.where(own, of_rows, 0))
    return of_x, flat.reshape(of_weights.shape)


_count = jit(_counted, static_argnames=("count", "width", "dtype"), name="count rows")
_share = jit(_shared, static_argnames=("sizes",), name="rows of experts")
_send = jit(_sent, static_argnames=("sender", "size"), name="send rows")
_send_back = jit(_sent_back, static_argnames=("sender", "size"), name="send rows back")
_add = jit(_sum_with, static_argnames=("sender",), name="add rows")
_add_back = jit(_sum_back, static_argnames=("sender",), name="add gradients")
_zeros = jit(lambda tree: jax.tree.map(jnp.zeros_like, tree), name="no gradient")
_nothing = jit(lambda *arrays: tuple(map(jnp.zeros_like, arrays)), name="no gradients")
