"""A small classifier of handwritten digits, cut into two pipeline stages.

Problem: the quickstart needs real data that ship with a library, a loss that
falls within seconds on a laptop, and a model whose two halves can live on two
islands.  Everything here is plain JAX on plain arrays: the stages know nothing
of slices, programs or each other's devices, so that the very same functions
run on one device (:func:`plain_step`) as the reference.

Paper: section 2 and Figure 1 (pipelining as MPMD), Appendix A.
"""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CLASSES = 10
PIXELS = 64


class Layer(NamedTuple):
    """A dense layer.  weights: [inputs, outputs] float32; bias: [outputs] float32."""

    weights: jax.Array | np.ndarray
    bias: jax.Array | np.ndarray


Stage = tuple[Layer, ...]
"""The parameters of one pipeline stage."""


class Batch(NamedTuple):
    """images: [examples, 64] float32 in 0..1; labels: [examples] int32 in 0..9."""

    images: np.ndarray
    labels: np.ndarray

    def split(self, parts: int) -> list[Batch]:
        """Equal parts, in order: the microbatches of a pipeline."""
        return [
            Batch(images, labels)
            for images, labels in zip(
                np.split(self.images, parts), np.split(self.labels, parts), strict=True
            )
        ]


def load(examples: int = 1536) -> Batch:
    """The first *examples* of scikit-learn's 1,797 digit images (8 x 8 pixels).

    Source: UCI "Optical Recognition of Handwritten Digits", shipped with
    scikit-learn; nothing is downloaded.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    # Its file is all that is wanted: to import scikit-learn takes two seconds.
    file = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(file, "rt") as text:
        rows = np.loadtxt(text, np.float32, delimiter=",", max_rows=examples)
    return Batch(rows[:, :PIXELS] / 16.0, rows[:, PIXELS].astype(np.int32))


def init(seed: int = 0, width: int = 512) -> tuple[Stage, Stage]:
    """Parameters of both stages: 64 -> width -> width, then width -> width -> 10."""
    rng = np.random.default_rng(seed)

    def layer(inputs: int, outputs: int) -> Layer:
        weights = rng.normal(0.0, np.sqrt(2.0 / inputs), (inputs, outputs))
        return Layer(weights.astype(np.float32), np.zeros(outputs, np.float32))

    return (layer(PIXELS, width), layer(width, width)), (layer(width, width), layer(width, CLASSES))


def forward(stage: Stage, x: jax.Array) -> jax.Array:
    """First stage.  x: [examples, 64]; returns activations [examples, width]."""
    for layer in stage:
        x = jax.nn.relu(x @ layer.weights + layer.bias)
    return x


def loss(stage: Stage, x: jax.Array, labels: jax.Array) -> jax.Array:
    """Second stage.  x: [examples, width]; returns the mean cross entropy, a scalar."""
    hidden, last = stage
    x = jax.nn.relu(x @ hidden.weights + hidden.bias)
    scores = jax.nn.log_softmax(x @ last.weights + last.bias)
    return -jnp.mean(jnp.sum(jax.nn.one_hot(labels, CLASSES) * scores, axis=-1))


def head(stage: Stage, x: jax.Array, labels: jax.Array) -> tuple[jax.Array, Stage, jax.Array]:
    """Second stage, there and back: loss, gradient of *stage*, gradient of *x*."""
    value, (of_stage, of_x) = jax.value_and_grad(loss, argnums=(0, 1))(stage, x, labels)
    return value, of_stage, of_x


def backward(stage: Stage, x: jax.Array, of_y: jax.Array) -> Stage:
    """First stage, back: its gradient from that of its activations (recomputed)."""
    _, pull = jax.vjp(lambda s: forward(s, x), stage)
    of_stage: Stage
    (of_stage,) = pull(of_y)
    return of_stage


def add(a: Stage, b: Stage) -> Stage:
    """The sum of two gradients."""
    total: Stage = jax.tree.map(jnp.add, a, b)
    return total


def update(stage: Stage, gradient: Stage, rate: float, microbatches: int) -> Stage:
    """One step of gradient descent with the mean over the microbatches."""
    updated: Stage = jax.tree.map(lambda p, g: p - (rate / microbatches) * g, stage, gradient)
    return updated


def plain_step(
    left: Stage, right: Stage, batch: Batch, rate: float, microbatches: int
) -> tuple[Stage, Stage, jax.Array]:
    """The same training step in plain JAX, microbatch after microbatch: the reference.

    Returns both stages, updated, and the mean loss over the microbatches.
    """
    losses, of_left, of_right = [], None, None
    images = jnp.split(batch.images, microbatches)
    labels = jnp.split(batch.labels, microbatches)
    for x, y in zip(images, labels, strict=True):
        value, g_right, of_h = head(right, forward(left, x), y)
        g_left = backward(left, x, of_h)
        losses.append(value)
        of_left = g_left if of_left is None else add(of_left, g_left)
        of_right = g_right if of_right is None else add(of_right, g_right)
    assert of_left is not None and of_right is not None
    mean = jnp.mean(jnp.stack(losses))
    return (
        update(left, of_left, rate, microbatches),
        update(right, of_right, rate, microbatches),
        mean,
    )
