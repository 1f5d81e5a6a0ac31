"""Layers that take their time: real results, emulated seconds.

Problem: bubbles, overlap and the cost of controllers show only where layers take
milliseconds on every device at once, and eight devices on two cores cannot
compute at once.  They can be held at once.

Rule for maintainers: results and gradients are the layer's own, to the bit.  The
arrays that the batch cuts are held, so that devices share the time as they share the
work; and the two halves of a backward pass can be had one without the other.

Paper: section 5 (computations of known length).
"""

from __future__ import annotations

from typing import Any

import jax

from pathways_lab.pipeline.modules import Layer
from pathways_lab.runtime.emulated import emulated


def held(layer: Layer, forward: float, backward: float | None = None) -> Layer:
    """The same layer, whose devices are held for a time (CPU devices only).

    forward, backward: milliseconds of one device for each example (each row of the
        layer's result); devices that share a batch share the time.  backward: half of
        it is for the gradient of the input, half for that of the parameters; default:
        twice *forward*.

    >>> slow = pw.pipeline.held(layer, forward=0.5)          # doctest: +SKIP
    """
    back_half = (2 * forward if backward is None else backward) / 2

    def there(y: Any) -> Any:
        return emulated(forward * _examples(y), shared=True)(y)

    def half(y: Any, number: int) -> Any:
        # Two equal calls would be made one by the compiler.
        return emulated(back_half * _examples(y) * (1 + 1e-6 * number), shared=True)(y)

    @jax.custom_vjp
    def run(parameters: Any, x: Any) -> Any:
        return there(layer(parameters, x))

    def kept(parameters: Any, x: Any) -> Any:
        return run(parameters, x), (parameters, x)

    def back(given: tuple[Any, Any], gradient: Any) -> tuple[Any, Any]:
        _, pull = jax.vjp(layer, *given)
        first = half(gradient, 0)
        # One half after the other where both are wanted; a barrier is no need for the first.
        second = half(jax.lax.optimization_barrier((first, gradient))[1], 1)
        return pull(second)[0], pull(first)[1]

    run.defvjp(kept, back)
    return run


def _examples(y: Any) -> int:
    return int(jax.tree.leaves(y)[0].shape[0])
