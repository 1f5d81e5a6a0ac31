"""A small mixture of experts: each token goes to one of several, each has a capacity.

Problem: where the experts lie on two islands, what travels is decided by the data, and
a compiled function must know its shapes before.  A capacity per expert makes it so:
tokens that come too late are passed on as they are.

Rule for maintainers: plain JAX, in three functions that know nothing of islands, and a
dense reference which computes every expert for every token and masks.

Paper: section 6.3 (sparse models as a reason for MPMD); capacity as in Fedus et al. 2021
(arXiv 2101.03961).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Experts(NamedTuple):
    """Parameters of some experts.  up: [experts, width, hidden]; down: [experts, hidden, width]."""

    up: jax.Array | np.ndarray
    down: jax.Array | np.ndarray


def init(
    experts: int, width: int = 16, hidden: int = 32, seed: int = 0
) -> tuple[np.ndarray, Experts]:
    """The router's weights [width, experts], and all experts, float32."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(0.0, shape[-2] ** -0.5, shape).astype(np.float32)

    own = Experts(normal(experts, width, hidden), normal(experts, hidden, width))
    return normal(width, experts), own


def route(router: jax.Array, x: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Which token goes where.  x: [tokens, width].

    Returns what each expert gets, [experts, capacity, width] (zeros where it gets less),
    and the weight of each place for each token, [tokens, experts, capacity].
    """
    scores = jax.nn.softmax(x @ router)
    chosen = jax.nn.one_hot(jnp.argmax(scores, axis=-1), router.shape[1], dtype=x.dtype)
    place = jnp.cumsum(chosen, axis=0) * chosen - 1
    places = jax.nn.one_hot(place.astype(jnp.int32), capacity, dtype=x.dtype)
    weights = (scores * chosen)[..., None] * places
    return jnp.einsum("tec,tw->ecw", jnp.sign(weights), x), weights


def compute(own: Experts, given: jax.Array) -> jax.Array:
    """Some experts' results.  given: [experts, capacity, width]; returns the same shape."""
    hidden = jax.nn.relu(jnp.einsum("ecw,ewh->ech", given, own.up))
    return jnp.einsum("ech,ehw->ecw", hidden, own.down)


def combine(x: jax.Array, weights: jax.Array, *results: jax.Array) -> jax.Array:
    """Tokens with what their experts add.  results: in the order of the experts, all together."""
    return x + jnp.einsum("tec,ecw->tw", weights, jnp.concatenate(results))


def dense(router: jax.Array, own: Experts, x: jax.Array, capacity: int) -> jax.Array:
    """The reference: every expert computes every token, and a mask says which count."""
    scores = jax.nn.softmax(x @ router)
    chosen = jax.nn.one_hot(jnp.argmax(scores, axis=-1), router.shape[1], dtype=x.dtype)
    early = jnp.cumsum(chosen, axis=0) <= capacity
    every = compute(own, jnp.broadcast_to(x, (router.shape[1], *x.shape)))
    return x + jnp.einsum("te,etw->tw", scores * chosen * early, every)
