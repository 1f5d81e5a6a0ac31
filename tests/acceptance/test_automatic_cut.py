"""A step whose parts find their slices themselves, by measured time and by memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.pipeline.mpmd import front

pytestmark = pytest.mark.cluster
LARGE = 1 << 20


def part(w: Any, x: Any) -> Any:
    """Little work, however large its weights are."""
    return jnp.tanh(x * w["scale"] + w["table"][0])


def train_step(layers: Any, weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        y = x
        for own, w in zip(layers, weights, strict=True):
            y = own(w, y)
        return y.mean()

    value, slopes = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, d: w - 0.1 * d, weights, slopes), value


def weights(*sizes: int) -> list[dict[str, Any]]:
    return [{"scale": np.float32(1), "table": np.zeros(n, np.float32)} for n in sizes]


def test_parts_go_where_they_are_fast_and_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "SECONDS", 3.0)
    x = np.ones((8, 4), np.float32)

    layers = [pw.mpmd.named(name, pw.pipeline.held(part, forward=1.0)) for name in "abcd"]  # type: ignore[attr-defined]
    with pw.start(
        islands=2, hosts_per_island=1, devices_per_host=1, memory="15 MB", progress=False
    ) as lab:
        # Parts of equal work: half of them on each island, but for two whose weights, their
        # gradients and what replaces them are too large for one.
        fits = pw.mpmd.jit(lambda w, x: train_step(layers, w, x), on="auto", donate_argnums=0)
        given = weights(LARGE, LARGE, 8, 8)
        placed = fits.place(given, x)
        assert fits.on["a"] is not fits.on["b"]
        assert len(lab.slices) == 2
        _, value = fits(*placed)
        _, wanted = train_step([part] * 4, given, x)
        np.testing.assert_allclose(value.result(), wanted, rtol=1e-5)
        assert {on.axes for on in fits.on.values()} == {("data",)}
        assert {on.island for on in fits.on.values()} == {"island0", "island1"}


def test_a_word_that_is_none_is_refused() -> None:
    with pytest.raises(pw.PathwaysError, match="on='automatic' does not say"):
        pw.mpmd.jit(lambda w: w, on="automatic")
