"""Training steps written for one device, for tests of what makes them programs over slices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pathways_lab as pw
from pathways_lab.client.lab.devices import Slice
from tests.client.kit import a_slice

Loss = Callable[..., Any]
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
"""Compiling takes most of the time of these tests."""
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
named = pw.mpmd.named


def weights(*shape: int, seed: int = 0) -> Any:
    found = np.random.default_rng([seed, *shape]).normal(0, 0.4, shape)
    return found.astype(np.float32)


def dense(own: Any, x: Any) -> Any:
    return jnp.tanh(x @ own["w"] + own["b"])


def layer(inputs: int, outputs: int, seed: int = 0) -> Any:
    return {"w": weights(inputs, outputs, seed=seed), "b": np.zeros(outputs, np.float32)}


X, Y = weights(8, 6, seed=1), weights(8, 6, seed=2)
PARAMETERS = {"a": layer(6, 8), "b": layer(8, 8), "c": layer(8, 6)}
first, second, third = (named(part, dense) for part in "abc")


def loss(parameters: Any, x: Any, y: Any) -> Any:
    """Three parts, and a skip over the one in the middle."""
    h = first(parameters["a"], x)
    return jnp.mean((third(parameters["c"], second(parameters["b"], h) + h) - y) ** 2)


def updated(parameters: Any, memory: Any, slopes: Any) -> tuple[Any, Any]:
    changes, memory = OPTIMIZER.update(slopes, memory, parameters)
    return optax.apply_updates(parameters, changes), memory


def _rows(batch: Any, m: int, count: int) -> Any:
    return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:])[m], batch)


def turns(loss: Loss, microbatches: int = 1) -> Callable[..., Any]:
    """The gradient inside of a Python loop."""

    def train_step(parameters: Any, memory: Any, *batch: Any) -> Any:
        value, slopes = jax.value_and_grad(loss)(parameters, *_rows(batch, 0, microbatches))
        for m in range(1, microbatches):
            more, further = jax.value_and_grad(loss)(parameters, *_rows(batch, m, microbatches))
            value, slopes = value + more, jax.tree.map(jnp.add, slopes, further)
        value, slopes = jax.tree.map(lambda x: x / microbatches, (value, slopes))
        return *updated(parameters, memory, slopes), value

    return train_step


def scan(loss: Loss, microbatches: int = 1) -> Callable[..., Any]:
    """The gradient inside of a scan."""

    def train_step(parameters: Any, memory: Any, *batch: Any) -> Any:
        cut = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)

        def turn(total: Any, rows: Any) -> Any:
            found = jax.value_and_grad(loss)(parameters, *rows)
            return jax.tree.map(jnp.add, total, found), None

        zero = jnp.float32(0), jax.tree.map(jnp.zeros_like, parameters)
        total, _ = jax.lax.scan(turn, zero, cut)
        value, slopes = jax.tree.map(lambda x: x / microbatches, total)
        return *updated(parameters, memory, slopes), value

    return train_step


def around(loss: Loss, microbatches: int = 1) -> Callable[..., Any]:
    """The gradient around a scan."""

    def train_step(parameters: Any, memory: Any, *batch: Any) -> Any:
        cut = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)

        def whole(parameters: Any) -> Any:
            losses = jax.lax.map(lambda rows: loss(parameters, *rows), cut)
            return jnp.mean(losses)

        value, slopes = jax.value_and_grad(whole)(parameters)
        return *updated(parameters, memory, slopes), value

    return train_step


LOOPS: dict[str, Callable[..., Callable[..., Any]]] = {
    "python loop": turns,
    "scan": scan,
    "gradient around a scan": around,
}


def parts_of(*parts: str) -> dict[str, Slice]:
    """Slices without a lab."""
    return {part: a_slice(1, island=f"island{n % 2}") for n, part in enumerate(parts)}


def composed(step: Any) -> Callable[..., Any]:
    """The fragments of a step, one after the other, as one function of one device.

    Each fragment reads only what those before it, and no more than a slice's, have made.
    """

    def walk(*args: Any) -> Any:
        found = step.partition(*args)
        values = dict(zip(found.inputs, jax.tree.leaves(args), strict=True))
        values.update(found.constants)
        for node in found.nodes:
            made = node.function.function(*(values[ref] for ref in node.inputs))
            assert {ref.slice for ref in node.outputs} == {node.function.slice}
            values.update(zip(node.outputs, made, strict=True))
        results = [values.get(x, x) for x in found.results]
        return jax.tree.unflatten(found.tree, results)

    return compiled(walk)


def train(step: Any, parameters: Any, batch: Sequence[Any], steps: int) -> tuple[Any, list[Any]]:
    """Parameters and losses after some steps."""
    memory, losses = OPTIMIZER.init(parameters), []
    for _ in range(steps):
        parameters, memory, loss = step(parameters, memory, *batch)
        losses.append(loss)
    return jax.device_get(parameters), [float(loss) for loss in losses]


def check_equal(got: tuple[Any, list[Any]], expected: tuple[Any, list[Any]]) -> None:
    """Up to the last places: what one computation joins, two round apart."""
    np.testing.assert_allclose(got[1], expected[1], rtol=2e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), got[0], expected[0]
    )


def check_steps(
    train_step: Callable[..., Any],
    parameters: Any,
    batch: Sequence[Any],
    on: dict[str, Slice],
    schedules: Sequence[Any] = (None,),
    steps: int = 2,
) -> list[Any]:
    """Each schedule trains as one device does; the steps."""
    expected = train(compiled(train_step), parameters, batch, steps)
    found = [pw.mpmd.jit(train_step, on=on, schedule=schedule) for schedule in schedules]
    for step in found:
        check_equal(train(composed(step), parameters, batch, steps), expected)
    return found
