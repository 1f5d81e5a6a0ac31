"""A decoder-only language model in plain JAX, as a list of layers.

Problem: what pipelines are for is language models, from one that trains on a
laptop while one watches to the shape that the paper measured.  The same code
serves both: layers are functions of their own parameters and activations, and
know nothing of slices, stages or each other.

Rule for maintainers: plain functions of plain arrays, no library of models.
Parameters are made lazily (:func:`shapes` makes none), so that the largest
size can be described, counted and simulated anywhere.

Paper: section 5.3 and Table 2 (the 3B model: 62 layers, width 2048, hidden 8192).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BYTES = 256
"""The vocabulary: text is bytes."""


@dataclass(frozen=True)
class Size:
    """blocks: of attention and a feed-forward part.  width: of activations.

    hidden: of the feed-forward part.  heads: of attention; divides *width*.
    context: the longest sequence, in bytes.
    """

    blocks: int
    width: int
    hidden: int
    heads: int
    context: int

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"a width of {self.width} cannot be cut into {self.heads} heads")


SIZES = {
    "toy": Size(blocks=2, width=32, hidden=64, heads=2, context=32),
    "small": Size(blocks=8, width=128, hidden=512, heads=4, context=128),
    # The paper states layers, width and hidden; heads of 128 and the context are assumed.
    "paper-3b": Size(blocks=62, width=2048, hidden=8192, heads=16, context=512),
}

Layer = Callable[[Any, Any], Any]


class Embedding(NamedTuple):
    """symbols: [256, width]; positions: [context, width]."""

    symbols: jax.Array
    positions: jax.Array


class Block(NamedTuple):
    """norm1, norm2: [width]; qkv: [width, 3 * width]; out: [width, width];
    up: [width, hidden]; down: [hidden, width]."""

    norm1: jax.Array
    qkv: jax.Array
    out: jax.Array
    norm2: jax.Array
    up: jax.Array
    down: jax.Array


class Head(NamedTuple):
    """norm: [width]; scores: [width, 256]."""

    norm: jax.Array
    scores: jax.Array


def embed(own: Embedding, symbols: jax.Array) -> jax.Array:
    """symbols: [batch, time] int32.  Returns [batch, time, width]."""
    return own.symbols[symbols] + own.positions[: symbols.shape[1]]


def block(heads: int, own: Block, x: jax.Array) -> jax.Array:
    """x: [batch, time, width].  Causal attention, then the feed-forward part, both residual."""
    batch, time, width = x.shape
    q, k, v = jnp.split(_normal(x, own.norm1) @ own.qkv, 3, axis=-1)
    q, k, v = (part.reshape(batch, time, heads, width // heads) for part in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(width // heads)
    earlier = jnp.tril(jnp.ones((time, time), bool))
    weights = jax.nn.softmax(jnp.where(earlier, scores, -1e9), axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, time, width)
    x = x + mixed @ own.out
    return x + jax.nn.gelu(_normal(x, own.norm2) @ own.up) @ own.down


def head(own: Head, x: jax.Array) -> jax.Array:
    """x: [batch, time, width].  Returns scores of the next byte, [batch, time, 256]."""
    return _normal(x, own.norm) @ own.scores


def loss(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy in nats per byte.  scores: [batch, time, 256]; labels: [batch, time]."""
    logs = jax.nn.log_softmax(scores)
    return -jnp.mean(jnp.take_along_axis(logs, labels[..., None], axis=-1))


def _normal(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def functions(size: Size) -> list[Layer]:
    """The layers' functions: embedding, blocks, head; each ``f(parameters, x)``."""

    def attend(own: Block, x: jax.Array) -> jax.Array:
        return block(size.heads, own, x)

    return [embed, *[attend] * size.blocks, head]


def parameters(size: Size, seed: int = 0) -> list[Any]:
    """The layers' parameters, float32: :class:`Embedding`, :class:`Block` s, :class:`Head`."""
    rng = np.random.default_rng(seed)

    def filled(shape: jax.ShapeDtypeStruct) -> np.ndarray:
        if len(shape.shape) == 1:
            return np.ones(shape.shape, np.float32)
        scale = 1.0 / math.sqrt(shape.shape[0])
        values: np.ndarray = rng.normal(0.0, scale, shape.shape).astype(np.float32)
        return values

    return [jax.tree.map(filled, layer) for layer in shapes(size)]


def shapes(size: Size) -> list[Any]:
    """The types of :func:`parameters`; nothing is allocated."""
    width, hidden = size.width, size.hidden

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    one = Block(
        array(width), array(width, 3 * width), array(width, width),
        array(width), array(width, hidden), array(hidden, width),
    )  # fmt: skip
    return [
        Embedding(array(BYTES, width), array(size.context, width)),
        *[one] * size.blocks,
        Head(array(width), array(width, BYTES)),
    ]


def count(size: Size) -> int:
    """How many parameters a model of this size has."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes(size)))


def text() -> np.ndarray:
    """Some 700 kB of English: the topics of Python's own help, as bytes (int32)."""
    from pydoc_data import topics

    return np.frombuffer("\n".join(topics.topics.values()).encode(), np.uint8).astype(np.int32)


def batches(size: Size, examples: int, seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Endless pairs of symbols and the bytes that follow them, [examples, context] int32 each."""
    symbols = text()
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(symbols) - size.context - 1, examples)
        cut = np.stack([symbols[s : s + size.context + 1] for s in starts])
        yield cut[:, :-1], cut[:, 1:]


def plain_loss(size: Size, own: list[Any], symbols: jax.Array, labels: jax.Array) -> jax.Array:
    """The whole model on one device, as the reference."""
    x: Any = symbols
    for layer, parameters in zip(functions(size), own, strict=True):
        x = layer(parameters, x)
    return loss(x, labels)
