"""One gang for several calls of a trunk: stacked, computed under ``vmap``, and taken apart.

Problem: rows of several clients go through the same weights at once, and nobody shall see a row of
somebody else.  ``vmap`` keeps that promise whatever the function does: a call is one example of the
batch, and JAX makes one matrix product of all products with the same weights.

How: a gang has 1, 2, 4, 8 ... places, so that few shapes are compiled; places that are left over
compute the first call once more.  Adapters of one structure are as large as the largest that has
come, filled up with zeros: a product through rows of zeros adds nothing.

Rule for maintainers: nothing of one call reaches another one but time.

Paper: section 2 (fine-tunes that share the layers of a foundation model).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pathways_lab.client.functions.jit import CompiledFunction
from pathways_lab.client.lab.devices import Slice

CALL, PULL = "call", "pull"
"""``fn(params, x, adapter)``, and what ``jax.vjp`` of it makes of a cotangent, for the adapter."""

Shapes = tuple[tuple[int, ...], ...]


class Joined:
    """The compiled functions of a trunk."""

    def __init__(self, function: Callable[..., Any], params: Any, on: Slice, name: str) -> None:
        self._function, self._params = function, params
        self.on, self._name = on, name
        self._largest: dict[Any, Shapes] = {}
        self._compiled: dict[Any, CompiledFunction] = {}

    @staticmethod
    def kind(what: str, args: Sequence[Any]) -> Any:
        """Calls of one kind can go together: adapters differ in sizes only."""
        x, adapter, *rest = args
        leaves, tree = jax.tree.flatten(adapter)
        exact, outer = jax.tree.flatten((x, rest))
        return (
            *(what, outer, tuple([(leaf.shape, str(leaf.dtype)) for leaf in exact])),
            *(tree, tuple([(leaf.ndim, str(leaf.dtype)) for leaf in leaves])),
        )

    def __call__(self, what: str, calls: Sequence[Sequence[Any]]) -> list[Any]:
        """The results of calls of one kind, one gang for all."""
        places = 1 << (len(calls) - 1).bit_length()
        same = self._same_sizes([call[1] for call in calls])
        grown = [(x, adapter, *rest) for (x, _, *rest), adapter in zip(calls, same, strict=True)]
        grown += grown[:1] * (places - len(grown))
        made = self._of(what, places)(self._params, tuple(grown))[: len(calls)]
        if what == CALL:
            return [*made]
        return [self._cut(grads, call[1]) for grads, call in zip(made, calls, strict=True)]

    def _of(self, what: str, places: int) -> CompiledFunction:
        known = self._compiled.get((what, places))
        if known is None:
            one = _pull(self._function) if what == PULL else _call(self._function)
            name = f"{self._name}{' backward' * (what == PULL)} x{places}"
            known = CompiledFunction(_together(one, places), on=self.on, name=name)
            self._compiled[what, places] = known
        return known

    def _same_sizes(self, adapters: list[Any]) -> list[Any]:
        tree = jax.tree.structure(adapters[0])
        sizes = [_shapes(adapter) for adapter in adapters]
        known = self._largest.get(tree, sizes[0])
        most = tuple([_largest(shapes) for shapes in zip(known, *sizes, strict=True)])
        self._largest[tree] = most
        return [
            adapter if own == most else self._resized("grow", _grow, most)(adapter)
            for adapter, own in zip(adapters, sizes, strict=True)
        ]

    def _cut(self, grads: Any, adapter: Any) -> Any:
        own = _shapes(adapter)
        return grads if _shapes(grads) == own else self._resized("cut", _cut, own)(grads)

    def _resized(
        self, verb: str, function: Callable[[Any, tuple[int, ...]], Any], to: Shapes
    ) -> CompiledFunction:
        known = self._compiled.get((verb, to))
        if known is None:

            def resize(tree: Any) -> Any:
                leaves, structure = jax.tree.flatten(tree)
                made = [function(leaf, shape) for leaf, shape in zip(leaves, to, strict=True)]
                return jax.tree.unflatten(structure, made)

            known = CompiledFunction(resize, on=self.on, name=f"{self._name}: {verb} adapter")
            self._compiled[verb, to] = known
        return known


def _call(function: Callable[..., Any]) -> Callable[..., Any]:
    def one(params: Any, x: Any, adapter: Any) -> Any:
        return function(params, x) if adapter is None else function(params, x, adapter)

    return one


def _pull(function: Callable[..., Any]) -> Callable[..., Any]:
    def one(params: Any, x: Any, adapter: Any, cotangent: Any) -> Any:
        return jax.vjp(lambda a: function(params, x, a), adapter)[1](cotangent)[0]

    return one


def _together(one: Callable[..., Any], places: int) -> Callable[..., Any]:
    def together(params: Any, calls: tuple[Any, ...]) -> tuple[Any, ...]:
        if places == 1:
            return (one(params, *calls[0]),)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *calls)
        made = jax.vmap(lambda call: one(params, *call))(stacked)
        return tuple([jax.tree.map(lambda leaf, n=n: leaf[n], made) for n in range(places)])

    return together


def _grow(leaf: Any, shape: tuple[int, ...]) -> Any:
    return jnp.pad(leaf, [(0, to - size) for size, to in zip(leaf.shape, shape, strict=True)])


def _cut(leaf: Any, shape: tuple[int, ...]) -> Any:
    return leaf[tuple([slice(size) for size in shape])]


def _shapes(tree: Any) -> Shapes:
    return tuple([tuple(leaf.shape) for leaf in jax.tree.leaves(tree)])


def _largest(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple([max(sizes) for sizes in zip(*shapes, strict=True)])
