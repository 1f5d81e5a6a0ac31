"""Some layers of a model: their forward and backward functions.

Problem: what they compute backward needs what it had forward.  JAX's own
``vjp`` knows what to keep; here that becomes values which travel from one node
of a program to another, so that forward and backward are compiled, ordered and
freed like everything else.

Rule for maintainers: plain JAX functions of arrays; nothing here knows slices.
Parameters are never kept once per microbatch: what the backward pass needs of
them is taken from the parameters themselves.

Paper: section 5.3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Layer = Callable[[Any, Any], Any]
"""``layer(parameters, x) -> y``, a plain JAX function."""

Pullback = Callable[[Any], tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class Pull:
    """How a backward pass is put together again.  Compared by identity: it belongs to one tracing.

    tree: of the pullback.  own: by leaf of it, which parameter leaf it is, or None.
    results: by layer, the types of its result.
    """

    tree: Any
    own: tuple[int | None, ...]
    results: tuple[Any, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Kept:
    """Values that a forward pass keeps for its backward pass.  values: all but the parameters."""

    values: tuple[Any, ...]
    pull: Pull = field(metadata={"static": True})

    def pullbacks(self, parameters: Any) -> list[Pullback]:
        """By layer: from the gradient of its result to those of its arguments."""
        given = jax.tree.leaves(parameters)
        values = iter(self.values)
        leaves = [next(values) if own is None else given[own] for own in self.pull.own]
        pullbacks: list[Pullback] = jax.tree.unflatten(self.pull.tree, leaves)
        pairs = zip(pullbacks, self.pull.results, strict=True)
        return [functools.partial(_pulled, pullback, result) for pullback, result in pairs]


@dataclass(frozen=True)
class StageFunctions:
    """layers: of this stage, in order.  loss: of the last stage, else None.

    first: whether nothing comes before it, so that no gradient of its input is wanted.
    """

    layers: tuple[Layer, ...]
    loss: Callable[[Any, Any], Any] | None
    first: bool

    def forward(self, parameters: Sequence[Any], x: Any, *labels: Any) -> tuple[Any, Kept]:
        """The stage's result (the last one's: the loss), and what its backward pass needs.

        parameters: one pytree per layer.  labels: of the last stage only.
        """
        pullbacks: list[Pullback] = []
        results: list[Any] = []
        for number, (layer, own) in enumerate(zip(self.layers, parameters, strict=True)):
            if self.loss is not None and number == len(self.layers) - 1:
                layer = self._with_loss(layer, labels)
            if self.first and not number:
                x, pullback = jax.vjp(functools.partial(_swapped, layer, x), own)
            else:
                x, pullback = jax.vjp(layer, own, x)
            pullbacks.append(pullback)
            results.append(jax.tree.map(jax.typeof, x))
        leaves, tree = jax.tree.flatten(pullbacks)
        places = {id(leaf): n for n, leaf in enumerate(jax.tree.leaves(parameters))}
        own = tuple(places.get(id(leaf)) for leaf in leaves)
        values = tuple(leaf for leaf, n in zip(leaves, own, strict=True) if n is None)
        return x, Kept(values, Pull(tree, own, tuple(results)))

    def _with_loss(self, layer: Layer, labels: tuple[Any, ...]) -> Layer:
        assert self.loss is not None
        loss = self.loss
        return lambda own, x: loss(layer(own, x), *labels)

    def backward(
        self, parameters: Sequence[Any], kept: Kept, gradient: Any
    ) -> tuple[Any, tuple[Any, ...]]:
        """Gradients of the input (None in the first stage), and of the parameters.

        gradient: of the stage's result; None in the last.
        """
        of_x = gradient if self.loss is None else jnp.ones(())
        found = []
        for pullback in reversed(kept.pullbacks(parameters)):
            of_own, *of_inputs = pullback(of_x)
            of_x = of_inputs[0] if of_inputs else None
            found.append(of_own)
        return of_x, tuple(reversed(found))


def _pulled(pullback: Pullback, result: Any, of_y: Any) -> tuple[Any, ...]:
    """The gradients of a layer's parameters and input.  result: types of the layer's result.

    Integers between layers have no gradient, and None stands for it: JAX has arrays of a dtype of
    their own for that, which no device can hold.
    """
    nothing = jax.dtypes.float0
    given = jax.tree.map(lambda t, g: np.zeros(t.shape, nothing) if g is None else g, result, of_y)
    of_own, *of_inputs = pullback(given)
    real = [jax.tree.map(lambda g: None if g.dtype == nothing else g, x) for x in of_inputs]
    return of_own, *real


def _swapped(layer: Layer, x: Any, own: Any) -> Any:
    return layer(own, x)
