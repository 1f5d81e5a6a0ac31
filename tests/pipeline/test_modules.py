"""Modules of Flax NNX and Equinox are layers; what would lose its state is refused."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from pathways_lab.core.errors import PathwaysError
from pathways_lab.pipeline.modules import as_layers

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_pairs_stay_and_other_things_are_refused() -> None:
    pair = (lambda own, x: x + own, np.ones(3, np.float32))
    assert as_layers([pair, pair]) == [pair, pair]
    with pytest.raises(PathwaysError, match="int is not a layer"):
        as_layers([3])
    with pytest.raises(PathwaysError, match="layers=3 is not a list of layers"):
        as_layers(3)  # type: ignore[arg-type]


def test_an_equinox_module_is_a_layer() -> None:
    equinox = pytest.importorskip("equinox", reason="Equinox is not installed")
    module = equinox.nn.Linear(3, 4, key=jax.random.key(0))
    ((layer, parameters),) = as_layers([module])
    np.testing.assert_allclose(layer(parameters, X), jax.vmap(module)(X), rtol=1e-6)
    assert len(jax.tree.leaves(parameters)) == 2
    gradient = jax.grad(lambda own: layer(own, X).sum())(parameters)
    assert jax.tree.structure(gradient) == jax.tree.structure(parameters)


def test_an_nnx_module_is_a_layer_unless_its_call_changes_it() -> None:
    nnx = pytest.importorskip("flax.nnx", reason="Flax is not installed")
    module = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    ((layer, parameters),) = as_layers([module])
    np.testing.assert_allclose(layer(parameters, X), module(X), rtol=1e-6)
    gradient = jax.grad(lambda own: layer(own, X).sum())(parameters)
    assert jax.tree.structure(gradient) == jax.tree.structure(parameters)
    with pytest.raises(PathwaysError, match="has state beside its parameters"):
        as_layers([nnx.BatchNorm(3, rngs=nnx.Rngs(0))])
