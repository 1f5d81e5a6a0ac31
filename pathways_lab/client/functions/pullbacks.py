"""Backward passes as values: what ``jax.vjp`` keeps, taken apart and put together again.

Problem: a backward pass that is a node of its own gets what it needs from the forward pass as
arrays, and JAX keeps it in a function.  Parameters and other arguments are among it: those are
there anyway, and would be kept a second time.

Rule for maintainers: an array is kept once, however often the function holds it.

Paper: section 5.3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

Function = Callable[[Any], tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class Pullback:
    """Functions of ``jax.vjp`` without their arrays.  Compared by identity: it belongs to one
    tracing.

    tree: of the functions.  order: by leaf, its number among what was given and then what is kept.
    results: by function, the types of what it was made of.
    """

    tree: Any
    order: tuple[int, ...]
    results: tuple[Any, ...]

    @classmethod
    def of(
        cls, functions: Sequence[Any], results: Sequence[Any], given: Sequence[Any]
    ) -> tuple[Pullback, tuple[Any, ...]]:
        """And the arrays that it keeps: all but those that are *given* again.

        functions, results: as ``jax.vjp`` gave them, one or several.
        """
        leaves, tree = jax.tree.flatten(list(functions))
        types = tuple(jax.tree.map(jax.typeof, result) for result in results)
        numbers = {id(leaf): n for n, leaf in enumerate(given)}
        kept: list[Any] = []
        for leaf in leaves:
            if id(leaf) not in numbers:
                numbers[id(leaf)] = len(given) + len(kept)
                kept.append(leaf)
        return cls(tree, tuple(numbers[id(leaf)] for leaf in leaves), types), tuple(kept)

    def functions(self, given: Sequence[Any], kept: Sequence[Any]) -> list[Function]:
        """The functions, over arrays: from the gradient of a result to those of the arguments."""
        arrays = (*given, *kept)
        made = jax.tree.unflatten(self.tree, [arrays[n] for n in self.order])
        pairs = zip(made, self.results, strict=True)
        return [functools.partial(_pulled, function, result) for function, result in pairs]


def _pulled(function: Function, result: Any, of_y: Any) -> tuple[Any, ...]:
    """The gradients of the arguments.  result: types of the function's result.

    Integers have no gradient, and None stands for it: JAX has arrays of a dtype of their own for
    that, which no device can hold.
    """
    nothing = jax.dtypes.float0
    given = jax.tree.map(lambda t, g: np.zeros(t.shape, nothing) if g is None else g, result, of_y)
    return tuple(
        jax.tree.map(lambda g: None if g.dtype == nothing else g, x) for x in function(given)
    )
