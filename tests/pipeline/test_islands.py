"""Data parallel over two islands computes what the model computes, and the same on both."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.core.errors import PathwaysError
from pathways_lab.core.program.program import Call, Transfer
from tests.client.kit import FakeLab
from tests.pipeline.test_automatic import LABELS, LAYERS, Descent, X, layer, loss, plain


def make(fake: FakeLab, **options: Any) -> Any:
    slices = [fake.slice(2, axes=("data",), island=f"island{n}") for n in range(2)]
    given = {"loss": loss, "optimizer": Descent(), "example": X, "chunks": 2} | options
    return pw.data_parallel(LAYERS, slices, **given)


def test_two_islands_equal_one_device_and_each_other(fake: FakeLab) -> None:
    expected, curve = plain(steps=2)
    for shares in ((1, 1), (3, 1)):
        both = make(fake, shares=shares)
        state, losses = both.init(), []
        for _ in curve:
            state, value = both.step(state, X, LABELS)
            losses.append(float(value))
        np.testing.assert_allclose(losses, curve, rtol=1e-5)
        got = [jax.device_get(both.parameters(state, n)) for n in range(2)]
        jax.tree.map(np.testing.assert_array_equal, *got)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
                     got[0], expected)  # fmt: skip


def test_gradients_travel_while_the_backward_pass_goes_on(fake: FakeLab) -> None:
    """In the order of each island: all backward tasks first, whatever waits for others after."""
    both = make(fake)
    prepared = both.program.capture(both.init(), X, LABELS).prepared
    assert prepared is not None
    names = [s.node.name for s in prepared.plan.steps]
    last = max(n for n, name in enumerate(names) if name.startswith("backward"))
    assert not any(name.startswith("update") for name in names[:last])
    nodes = [s.node for s in prepared.plan.steps]
    made = {v: node.name for node in nodes if isinstance(node, Call) for v in node.outputs}
    sent = [made[n.input] for n in nodes[:last] if isinstance(n, Transfer) and n.input in made]
    assert {"backward forward1"} <= set(sent), (
        "the first chunk is sent before the second is computed"
    )


def test_it_is_captured_from_types_alone(fake: FakeLab) -> None:
    """As for machines that one does not have."""
    both = make(fake)
    real, typed = (both.program.capture(s, X, LABELS).program for s in (both.init(), both.types()))
    assert typed.values == real.values
    assert [type(node) for node in typed.nodes] == [type(node) for node in real.nodes]


@pytest.mark.parametrize(("layers", "chunks"), [(1, 1), (3, 3), (4, 4), (5, 4)])
def test_gradients_go_in_four_parts_where_there_are_so_many_layers(
    fake: FakeLab, layers: int, chunks: int
) -> None:
    on = [fake.slice(2, axes=("data",), island="island0")]
    alike = [layer(8, 8) for _ in range(layers)]
    x = np.ones((8, 8), np.float32)
    both = pw.data_parallel(alike, on, loss=loss, optimizer=Descent(), example=x)
    assert len(both.chunks) == chunks


def test_what_cannot_be_is_refused(fake: FakeLab) -> None:
    with pytest.raises(PathwaysError, match=r"shares \(1,\) for 2 slices"):
        make(fake, shares=(1,))
    with pytest.raises(PathwaysError, match="chunks=5 of 4 layers: each chunk has a layer"):
        make(fake, chunks=5)
    with pytest.raises(PathwaysError, match="2 costs for 4 layers"):
        make(fake, costs=(1.0, 1.0), chunks=2)
    both = make(fake, shares=(2, 1))
    with pytest.raises(PathwaysError, match="cannot be cut into shares of 2, 1"):
        both.step(both.init(), X, LABELS)
    assert "2 of 3 on" in repr(both)
