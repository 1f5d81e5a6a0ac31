"""A training step in fragments, run: one message a step, state in place, nodes at user's lines."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec

import pathways_lab as pw
from pathways_lab.core.errors import PathwaysError
from pathways_lab.core.program.program import Call
from tests.client.kit import FakeLab
from tests.pipeline import mpmd_kit
from tests.pipeline.mpmd_kit import OPTIMIZER, PARAMETERS, X, Y, check_equal, loss, train, turns


def test_a_step_is_one_message_and_its_state_stays_in_place(fake: FakeLab) -> None:
    """On slices of two devices: rows of a batch are cut as the batch is."""
    train_step = turns(loss, 2)
    expected = train(jax.jit(train_step), PARAMETERS, (X, Y), 2)
    on = {part: fake.slice(2, axes=("data",), island=f"island{n % 2}")
          for n, part in enumerate("abc")}  # fmt: skip
    cut = PartitionSpec("data")
    step = pw.mpmd.jit(
        train_step, on=on, schedule="1f1b", in_shardings=(None, None, cut, cut),
        donate_argnums=(0, 1),
    )  # fmt: skip
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (X, Y))
    state = step.place(PARAMETERS, OPTIMIZER.init(PARAMETERS), *types)
    assert state[2:] == types
    before = fake.count("submit")
    again = step(*state[:2], X, Y)
    captured = step.last
    last = step(*again[:2], X, Y)
    check_equal((jax.device_get(last[0]), [float(again[2]), float(last[2])]), expected)
    assert fake.count("submit") == before + 2
    # A program of the same types and places is there already.
    assert step.last is captured
    assert captured is not None
    assert captured.prepared is not None
    rows = {v.layout.spec for v in captured.prepared.plan.values if v.shape == (4, 8)}
    assert rows == {(("data",), ())}

    for old, new in zip(jax.tree.leaves(state[:2]), jax.tree.leaves(again[:2]), strict=True):
        assert old.slice is new.slice
        if old.shape:  # the optimizer's count is read on other slices too
            with pytest.raises(PathwaysError, match="donated"):
                old.result()
    for part, place in on.items():
        moments = again[1][1][0]
        for own in (again[0], moments.mu, moments.nu):
            assert {leaf.slice for leaf in jax.tree.leaves(own[part])} == {place}

    calls = [s.node for s in captured.prepared.plan.steps if isinstance(s.node, Call)]
    lines = {call.line.file for call in calls if call.name == "forward_a"}
    assert lines == {mpmd_kit.__file__}
    assert "forward_a" in step.ir()
    assert "backward_c  s3" in str(step.table)
    assert step.table.caption.startswith("<step train_step: a on s1, b on s2, c on s3>: ")
