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

from pathways_lab.client.functions.pullbacks import Function, Pullback

Layer = Callable[[Any, Any], Any]
"""``layer(parameters, x) -> y``, a plain JAX function."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Kept:
    """Values that a forward pass keeps for its backward pass.  values: all but the parameters."""

    values: tuple[Any, ...]
    pullback: Pullback = field(metadata={"static": True})


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
        layers: list[Function] = []
        results: list[Any] = []
        for number, (layer, own) in enumerate(zip(self.layers, parameters, strict=True)):
            if self.loss is not None and number == len(self.layers) - 1:
                layer = self._with_loss(layer, labels)
            if self.first and not number:
                x, pullback = jax.vjp(functools.partial(_swapped, layer, x), own)
            else:
                x, pullback = jax.vjp(layer, own, x)
            layers.append(pullback)
            results.append(x)
        together, values = Pullback.of(layers, results, jax.tree.leaves(parameters))
        return x, Kept(values, together)

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
        layers = kept.pullback.functions(jax.tree.leaves(parameters), kept.values)
        for layer in reversed(layers):
            of_own, *of_inputs = layer(of_x)
            of_x = of_inputs[0] if of_inputs else None
            found.append(of_own)
        return of_x, tuple(reversed(found))


def _swapped(layer: Layer, x: Any, own: Any) -> Any:
    return layer(own, x)
