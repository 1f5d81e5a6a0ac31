"""Models of libraries, and experts, train in parts as on one device: five steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.pipeline.mpmd_kit import X, Y, check_steps, dense, layer, named, parts_of, scan, weights

STEPS = 5
SCHEDULES = ("1f1b", "zero-bubble")


def test_a_linen_model() -> None:
    """A module of several parts, each with its own call; the second one has dropout."""
    nn = pytest.importorskip("flax.linen", reason="Flax is not installed")

    class Encoder(nn.Module):  # type: ignore[misc, name-defined]
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.LayerNorm()(nn.relu(nn.Dense(8)(x)))

    class Decoder(nn.Module):  # type: ignore[misc, name-defined]
        @nn.compact
        def __call__(self, h: Any) -> Any:
            return nn.Dense(6)(nn.Dropout(0.5, deterministic=False)(h))

    encoder, decoder = Encoder(), Decoder()
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    h, first = encoder.init_with_output(rngs, X)
    parameters = {"encoder": first, "decoder": decoder.init(rngs, h)}
    encode, decode = named("encoder", encoder.apply), named("decoder", decoder.apply)

    def loss(parameters: Any, x: Any, y: Any) -> Any:
        h = encode(parameters["encoder"], x)
        got = decode(parameters["decoder"], h, rngs={"dropout": jax.random.key(2)})
        return jnp.mean((got - y) ** 2)

    on = parts_of("encoder", "decoder")
    check_steps(scan(loss, 4), parameters, (X, Y), on, SCHEDULES, STEPS)


def test_an_nnx_model() -> None:
    """Its parts are what ``nnx.split`` gives, merged where they are called."""
    nnx = pytest.importorskip("flax.nnx", reason="Flax is not installed")
    rngs = nnx.Rngs(0)
    halves = [nnx.split(nnx.Linear(*size, rngs=rngs)) for size in ((6, 8), (8, 6))]
    graphs, parameters = [graph for graph, _ in halves], [state for _, state in halves]
    calls = [
        named(part, lambda state, x, graph=graph: nnx.merge(graph, state)(x))
        for part, graph in zip("ab", graphs, strict=True)
    ]

    def loss(parameters: Any, x: Any, y: Any) -> Any:
        h = jnp.tanh(calls[0](parameters[0], x))
        return jnp.mean((calls[1](parameters[1], h) - y) ** 2)

    check_steps(scan(loss, 4), parameters, (X, Y), parts_of("a", "b"), SCHEDULES, STEPS)


def test_a_mixture_of_experts_with_a_slice_for_each() -> None:
    """The gate weighs what each expert makes of all rows, and is kept even by a loss of its own."""
    count = 3
    parameters = {
        "gate": {"w": weights(6, count, seed=9), "in": layer(6, 8)},
        "experts": [layer(8, 8, seed) for seed in range(1, count + 1)],
        "head": layer(8, 6, 4),
    }

    def choose(own: Any, x: Any) -> Any:
        """The two best, and their shares."""
        shares = jax.nn.softmax(x @ own["w"])
        best, _ = jax.lax.top_k(shares, 2)
        return dense(own["in"], x), jnp.where(shares >= best[:, 1:], shares, 0), shares.mean(0)

    gate, head = named("gate", choose), named("head", dense)
    experts = [named(f"expert{n}", dense) for n in range(count)]

    def loss(parameters: Any, x: Any, y: Any) -> Any:
        h, chosen, shares = gate(parameters["gate"], x)
        pairs = zip(experts, parameters["experts"], strict=True)
        made = [chosen[:, n : n + 1] * call(own, h) for n, (call, own) in enumerate(pairs)]
        got = head(parameters["head"], sum(made[1:], made[0]))
        return jnp.mean((got - y) ** 2) + 0.01 * count * jnp.sum(shares**2)

    on = parts_of("gate", "expert0", "expert1", "expert2", "head")
    steps = check_steps(scan(loss, 4), parameters, (X, Y), on, (None, *SCHEDULES), STEPS)
    for step in steps:
        where = {f.slice for f in step.fragments if f.part == "expert1" and f.kind == "forward"}
        assert where == {on["expert1"]}
