"""Stages: as even as neighbouring layers allow."""

from __future__ import annotations

from itertools import combinations, pairwise

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_lab.core.errors import PathwaysError
from pathways_lab.pipeline.balance import operations, partition
from pathways_lab.pipeline.layered import estimated


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.data())
def test_no_other_cut_has_a_cheaper_dearest_stage(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    found = partition(costs, stages)
    assert [n for stage in found for n in stage] == list(range(len(costs)))
    assert all(len(stage) for stage in found)

    def dearest(cuts: tuple[int, ...]) -> int:
        return max(sum(costs[a:b]) for a, b in pairwise((0, *cuts, len(costs))))

    best = min(dearest(cuts) for cuts in combinations(range(1, len(costs)), stages - 1))
    assert max(sum(costs[n] for n in stage) for stage in found) == best


def test_too_few_layers_are_refused() -> None:
    with pytest.raises(PathwaysError, match="2 layers cannot be cut into 3 stages"):
        partition([1, 1], 3)


def test_products_count_what_they_multiply() -> None:
    a, b = jax.ShapeDtypeStruct((4, 8), jnp.float32), jax.ShapeDtypeStruct((8, 16), jnp.float32)
    assert operations(jnp.matmul, a, b)[0] == 2 * 4 * 8 * 16
    assert operations(jax.jit(jnp.matmul), a, b)[0] == 2 * 4 * 8 * 16


def test_the_user_s_python_runs_once_for_its_cost_and_its_result() -> None:
    ran: list[None] = []

    def layer(own: jax.Array, x: jax.Array) -> jax.Array:
        ran.append(None)
        return x @ own

    a, x = jax.ShapeDtypeStruct((4, 8), jnp.float32), jax.ShapeDtypeStruct((2, 4), jnp.float32)
    assert estimated([(layer, a)], x) == [128]
    assert len(ran) == 1


def test_loops_count_every_turn() -> None:
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)

    def twice(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (c @ x, None), x, length=5)[0]

    assert operations(twice, x)[0] == 5 * 2 * 8**3
