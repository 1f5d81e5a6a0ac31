"""What would be trained otherwise in parts than in one piece is refused, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.core.errors import PathwaysError
from pathways_lab.pipeline.apart import check_optimizer
from pathways_lab.pipeline.modules import as_layers
from tests.client.kit import FakeLab
from tests.pipeline.test_automatic import LAYERS, Descent, X, loss

OWN = [own for _, own in LAYERS]
PARTS = (range(2), range(2, 3), range(3, 4))
optax = pytest.importorskip("optax")


class Normed(Descent):
    """Divides by the norm of all gradients."""

    def update(self, gradient: Any, memory: Any, parameters: Any) -> tuple[Any, Any]:
        norm = sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradient))
        return super().update(jax.tree.map(lambda g: g / norm, gradient), memory, parameters)


class Later(Descent):
    """By the norm of the gradients of the step before, which it keeps."""

    def init(self, parameters: Any) -> Any:
        return super().init(parameters), jnp.ones(())

    def update(self, gradient: Any, memory: Any, parameters: Any) -> tuple[Any, Any]:
        own, norm = memory
        changes, own = super().update(jax.tree.map(lambda g: g / norm, gradient), own, parameters)
        return changes, (own, sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradient)))


class Watching(Descent):
    """Keeps that norm for people to look at."""

    def init(self, parameters: Any) -> Any:
        return super().init(parameters), jnp.ones(())

    def update(self, gradient: Any, memory: Any, parameters: Any) -> tuple[Any, Any]:
        changes, own = super().update(gradient, memory[0], parameters)
        return changes, (own, sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradient)))


@pytest.mark.parametrize(
    "optimizer",
    [
        Normed(),
        Later(),
        optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3)),
        optax.apply_if_finite(optax.sgd(0.1), 3),
        optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), 2),
    ],
    ids=["norm", "later", "clip", "finite", "steps"],
)
def test_an_optimizer_that_looks_at_all_parameters_is_refused(optimizer: Any) -> None:
    with pytest.raises(PathwaysError, match=r"\(up to 1\) depends on layer 2\.") as caught:
        check_optimizer(optimizer, OWN, PARTS)
    assert "optax.clip in place of" in caught.value.failure.remedy
    check_optimizer(optimizer, OWN, PARTS[:1])


@pytest.mark.parametrize(
    "optimizer",
    [
        Descent(),
        Watching(),
        optax.chain(optax.clip(0.1), optax.adamw(optax.cosine_decay_schedule(1e-3, 100))),
        optax.chain(optax.adaptive_grad_clip(0.1), optax.lamb(1e-3)),
        optax.MultiSteps(optax.adam(1e-3), 2),
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
        optax.adafactor(1e-3),
        object(),
    ],
    ids=["descent", "watching", "adamw", "lamb", "steps", "injected", "adafactor", "none"],
)
def test_one_that_treats_every_array_by_itself_is_not(optimizer: Any) -> None:
    check_optimizer(optimizer, OWN, PARTS)


def test_pipelines_and_data_parallel_ask_before_anything_runs(fake: FakeLab) -> None:
    slices = [fake.slice(1, axes=("data",)) for _ in range(2)]
    twice = [*LAYERS, LAYERS[-2], LAYERS[-1]]
    for make in (pw.pipeline, pw.data_parallel):
        given: dict[str, Any] = {"loss": loss, "example": X[:2]}
        with pytest.raises(PathwaysError, match="looks at all parameters together") as caught:
            make(LAYERS, slices, optimizer=Normed(), **given)
        assert caught.value.failure.line.file == __file__
        with pytest.raises(PathwaysError, match="layers 2 and 4 have the same array"):
            make(twice, slices, optimizer=Descent(), **given)
    assert not fake.count("submit")


def dense(own: Any, x: Any) -> Any:
    return x @ own["w"] + own["b"]


def test_shared_weights_are_refused_and_shared_beginnings_are_not() -> None:
    w, zeros = np.eye(4, dtype=np.float32), np.zeros(4, np.float32)
    kinds: list[Callable[[Any], Any]] = [lambda a: a, jnp.asarray]
    for kind in kinds:
        shared = kind(w)
        with pytest.raises(PathwaysError, match=r"\(parameters\['w'\]\).*drift apart"):
            as_layers([(dense, {"w": shared, "b": kind(w[0].copy())}), (dense, {"w": shared})])
        begun = kind(zeros)
        layers = as_layers([(dense, {"w": kind(w.copy()), "b": begun}) for _ in range(3)])
        assert len(layers) == 3
    as_layers([(dense, {"w": w, "again": w})])


def test_a_module_that_stands_twice_is_refused() -> None:
    equinox = pytest.importorskip("equinox", reason="Equinox is not installed")
    module = equinox.nn.Linear(4, 4, key=jax.random.key(0))
    with pytest.raises(PathwaysError, match="layers 0 and 1 have the same array"):
        as_layers([module, module])
