"""One stage of a pipelined model: its forward, backward, weight and update functions.

Problem: what a stage computes backward needs what it had forward.  JAX's own
``vjp`` knows what to keep; here that becomes values which travel from one node
of a program to another, so that forward and backward are compiled, ordered and
freed like everything else.

Rule for maintainers: plain JAX functions of arrays; nothing here knows slices.
Parameters are never kept once per microbatch: what the backward pass needs of
them is taken from the parameters themselves.

Paper: section 5.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

Layer = Callable[[Any, Any], Any]
"""``layer(parameters, x) -> y``, a plain JAX function."""


@dataclass(frozen=True, eq=False)
class Pull:
    """How a backward pass is put together again.  Compared by identity: it belongs to one tracing.

    tree: of the pullback.  own: by leaf of it, which parameter leaf it is, or None.
    """

    tree: Any
    own: tuple[int | None, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Kept:
    """What a forward pass keeps for its backward pass.  values: all but the parameters."""

    values: tuple[Any, ...]
    pull: Pull = field(metadata={"static": True})

    def pullback(self, parameters: Any) -> Callable[[Any], tuple[Any, ...]]:
        """From the gradient of the result to those of the arguments."""
        given = jax.tree.leaves(parameters)
        values = iter(self.values)
        leaves = [next(values) if own is None else given[own] for own in self.pull.own]
        pullback: Callable[[Any], tuple[Any, ...]] = jax.tree.unflatten(self.pull.tree, leaves)
        return pullback


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
        if self.first:
            result, pullback = jax.vjp(lambda p: self._apply(p, x, labels), parameters)
        else:
            result, pullback = jax.vjp(lambda p, v: self._apply(p, v, labels), parameters, x)
        leaves, tree = jax.tree.flatten(pullback)
        places = {id(leaf): n for n, leaf in enumerate(jax.tree.leaves(parameters))}
        own = tuple(places.get(id(leaf)) for leaf in leaves)
        values = tuple(leaf for leaf, n in zip(leaves, own, strict=True) if n is None)
        return result, Kept(values, Pull(tree, own))

    def _apply(self, parameters: Sequence[Any], x: Any, labels: tuple[Any, ...]) -> Any:
        for layer, own in zip(self.layers, parameters, strict=True):
            x = layer(own, x)
        return x if self.loss is None else self.loss(x, *labels)

    def backward(
        self, parameters: Sequence[Any], kept: Kept, gradient: Any, total: Any
    ) -> tuple[Any, Any]:
        """Gradients of the input (None in the first stage), and of the parameters plus *total*.

        gradient: of the stage's result; None in the last.  total: of earlier
        microbatches, or None.
        """
        of_parameters, *of_x = self._pulled(parameters, kept, gradient)
        return (of_x[0] if of_x else None), _add(total, of_parameters)

    def backward_input(self, parameters: Sequence[Any], kept: Kept, gradient: Any) -> Any:
        """The gradient of the input alone."""
        return self._pulled(parameters, kept, gradient)[1]

    def weight(self, parameters: Sequence[Any], kept: Kept, gradient: Any, total: Any) -> Any:
        """The gradient of the parameters alone, plus *total*."""
        return _add(total, self._pulled(parameters, kept, gradient)[0])

    def _pulled(self, parameters: Sequence[Any], kept: Kept, gradient: Any) -> tuple[Any, ...]:
        of_result = jnp.ones(()) if gradient is None else gradient
        return kept.pullback(parameters)(of_result)


def _add(total: Any, more: Any) -> Any:
    return more if total is None else jax.tree.map(jnp.add, total, more)


def update(
    optimizer: Any, microbatches: int, parameters: Any, memory: Any, total: Any
) -> tuple[Any, Any]:
    """One step of an optimizer in optax's form; total: the sum of the microbatches' gradients."""
    mean = jax.tree.map(lambda g: g / microbatches, total)
    changes, memory = optimizer.update(mean, memory, parameters)
    return jax.tree.map(lambda p, c: (p + c).astype(p.dtype), parameters, changes), memory
