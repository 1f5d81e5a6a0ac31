"""The mixture of experts equals its dense masked reference, whatever the capacity."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.workloads import experts
from tests.client.kit import FakeLab

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 16)).astype(np.float32)
ROUTER, OWN = experts.init(4)


@pytest.mark.parametrize("capacity", [1, 4, 24])
def test_it_equals_the_dense_masked_reference(capacity: int) -> None:
    given, weights = experts.route(ROUTER, X, capacity)
    assert given.shape == (4, capacity, 16)
    got = experts.combine(X, weights, experts.compute(OWN, given))
    wanted = experts.dense(ROUTER, OWN, X, capacity)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    passed = np.isclose(got, X).all(axis=1).sum()
    assert (passed == 0) == (capacity == 24), "with room for all nobody is passed on"


def test_experts_on_two_islands_and_bytes_that_do_not_depend_on_the_tokens(fake: FakeLab) -> None:
    left, right = (fake.slice(1, island=f"island{n}") for n in range(2))
    route = pw.jit(functools.partial(experts.route, capacity=8), on=left, name="route")
    ours, theirs = (pw.jit(experts.compute, on=on, name="compute") for on in (left, right))
    join = pw.jit(experts.combine, on=left)
    halves = [jax.tree.map(lambda w, n=n: w[2 * n : 2 * n + 2], OWN) for n in range(2)]

    @pw.program
    def layer(router, first, second, x):  # type: ignore[no-untyped-def]
        given, weights = route(router, x)
        return join(x, weights, ours(first, given[:2]), theirs(second, given[2:]))

    y = layer(ROUTER, *halves, X)
    wanted = experts.dense(ROUTER, OWN, X, 8)
    np.testing.assert_allclose(np.asarray(y), wanted, rtol=1e-5, atol=1e-5)
