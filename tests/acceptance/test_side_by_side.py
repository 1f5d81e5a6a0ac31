"""Ways of training end with the parameters of plain JAX on one device.

The notebooks 03 to 05 compare the others, and a comparison demands equal parameters.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pathways_lab as pw
from pathways_lab.core.errors import PathwaysError
from pathways_lab.pipeline.measured import CLIENT
from pathways_lab.pipeline.ways import Work

pytestmark = pytest.mark.cluster

RNG = np.random.default_rng(0)
WEIGHTS = [RNG.normal(0, 0.4, (8, 8)).astype(np.float32) for _ in range(4)]
X = RNG.normal(size=(16, 8)).astype(np.float32)
LABELS = RNG.normal(size=(16, 8)).astype(np.float32)
STEPS = 3


def dense(weights: Any, x: Any) -> Any:
    return jnp.tanh(x @ weights)


def loss(y: Any, labels: Any) -> Any:
    return jnp.mean((y - labels) ** 2)


LAYERS = [(dense, w) for w in WEIGHTS]
ADAM = optax.adam(1e-2)
SAME = {"loss": loss, "optimizer": ADAM, "batch": (X, LABELS), "steps": STEPS, "microbatches": 4}
WAYS = ["spmd", "multi-controller", "pipeline-1f1b-barrier", "pipeline-zero-bubble-islands"]


def plain() -> float:
    """The last loss of the same steps in plain JAX."""
    work = Work(LAYERS, loss, ADAM, (X, LABELS), STEPS)
    state, value = (WEIGHTS, ADAM.init(WEIGHTS)), 0.0
    for _ in range(STEPS):
        state, value = jax.jit(work.step)(state, X, LABELS)
    return float(value)


def test_all_ways_train_the_same(lab: pw.Lab) -> None:
    found = pw.compare(LAYERS, WAYS, lab=lab, stages=2, tolerance=1e-5, **SAME)
    for way in WAYS:
        assert found[way].loss == pytest.approx(plain(), rel=1e-5)
        assert 0 < found[way].busy <= 1
        assert found[way].seconds > 0
    # The loops of the hosts need one run for all steps; the controllers one for each. Bytes
    # say so: how many runs go in one message depends on the moment.
    loops, steps = found["multi-controller"].bytes, found["spmd"].bytes
    assert 0 < loops[CLIENT] < steps[CLIENT]
    # What goes between islands is counted as such, and only there.
    islands = "pipeline-zero-bubble-islands"
    assert [w for w in WAYS if found[w].bytes["islands (DCN)"]] == [islands]
    assert "pipeline-1f1b-barrier" in repr(found)
    html = found._repr_mimebundle_()[0]["text/html"]
    assert html.count("<tr") == 3 * (1 + len(WAYS))
    assert "data:image/svg+xml" in html
    assert not lab.slices, "slices are given back"
    assert not lab.leases


def test_ways_that_differ_are_refused(lab: pw.Lab) -> None:
    """The check can fail: the order of sums is a difference if none is allowed."""
    with pytest.raises(PathwaysError, match="parameters of pipeline-1f1b differ"):
        pw.compare(LAYERS, ["spmd", "pipeline-1f1b"], lab=lab, stages=2, tolerance=0, **SAME)
