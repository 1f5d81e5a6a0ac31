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


@dataclass(frozen=True)
class Pullback:
    """The function of ``jax.vjp`` without its arrays.

    tree: of the function.  order: by leaf, its number among what was given and then what is kept.
    result: the types of what it was made of.
    """

    tree: Any
    order: tuple[int, ...]
    result: Any

    @classmethod
    def of(
        cls, function: Any, result: Any, given: Sequence[Any]
    ) -> tuple[Pullback, tuple[Any, ...]]:
        """And the arrays that it keeps: all but those that are *given* again.

        function, result: as ``jax.vjp`` gave them.
        """
        leaves, tree = jax.tree.flatten(function)
        numbers = {id(leaf): n for n, leaf in enumerate(given)}
        kept: list[Any] = []
        for leaf in leaves:
            if id(leaf) not in numbers:
                numbers[id(leaf)] = len(given) + len(kept)
                kept.append(leaf)
        order = tuple(numbers[id(leaf)] for leaf in leaves)
        return cls(tree, order, jax.tree.map(jax.typeof, result)), tuple(kept)

    def function(self, given: Sequence[Any], kept: Sequence[Any]) -> Function:
        """The function, over arrays: from the gradient of the result to those of the arguments."""
        arrays = (*given, *kept)
        made = jax.tree.unflatten(self.tree, [arrays[n] for n in self.order])
        return functools.partial(_pulled, made, self.result)


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
