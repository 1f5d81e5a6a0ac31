"""The language model: its sizes, its text, that it looks back only, and that it learns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.workloads import language
from pathways_lab.workloads.language import SIZES, Size
from tests.client.kit import FakeLab

TINY = Size(blocks=1, width=16, hidden=32, heads=2, context=8)


def test_the_papers_size_has_three_billion_parameters() -> None:
    assert language.count(SIZES["paper-3b"]) == pytest.approx(3e9, rel=0.1)


def test_shapes_are_those_of_the_parameters() -> None:
    made, told = language.parameters(TINY), language.shapes(TINY)
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(lambda s: s.shape, told)


def test_the_text_ships_with_python() -> None:
    symbols = language.text()
    assert len(symbols) > 100_000
    assert b"exception" in symbols.astype(np.uint8).tobytes()
    x, y = next(language.batches(TINY, 3))
    assert x.shape == y.shape == (3, 8)
    np.testing.assert_array_equal(x[:, 1:], y[:, :-1])


def test_no_position_sees_a_later_one() -> None:
    own = language.parameters(TINY)
    symbols = np.arange(8, dtype=np.int32)[None]
    changed = symbols.copy()
    changed[0, 5] = 200

    def scores(symbols: np.ndarray) -> jax.Array:
        x = symbols
        for layer, parameters in zip(language.functions(TINY), own, strict=True):
            x = layer(parameters, x)
        return x

    before, after = scores(symbols), scores(changed)
    np.testing.assert_array_equal(before[0, :5], after[0, :5])
    assert not np.array_equal(before[0, 5:], after[0, 5:])


def test_it_learns_as_a_pipeline_what_it_learns_in_one_piece(fake: FakeLab) -> None:
    optax = pytest.importorskip("optax")
    slices = [fake.slice(1, axes=("data",), island=f"island{n}") for n in range(2)]
    own, optimizer = language.parameters(TINY), optax.sgd(0.5)
    x, labels = next(language.batches(TINY, 8))
    pipe = pw.pipeline(
        list(zip(language.functions(TINY), own, strict=True)),
        slices,
        loss=language.loss,
        optimizer=optimizer,
        example=x[:4],
        schedule="1f1b",
        microbatches=2,
    )
    state, memory, losses = pipe.init(), optimizer.init(own), []
    whole = jax.jit(jax.value_and_grad(lambda p: language.plain_loss(TINY, p, x, labels)))
    for _ in range(3):
        state, value = pipe.step(state, x, labels)
        expected, gradient = whole(own)
        changes, memory = optimizer.update(gradient, memory, own)
        own = optax.apply_updates(own, changes)
        np.testing.assert_allclose(float(value), expected, rtol=1e-4)
        losses.append(float(value))
    assert losses[-1] < losses[0] - 0.1


def test_a_size_whose_heads_do_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="16 cannot be cut into 3 heads"):
        Size(blocks=1, width=16, hidden=16, heads=3, context=8)
