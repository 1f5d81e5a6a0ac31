"""Equal operations on equal types are one function, and unequal ones never are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.client.lab import stats
from pathways_lab.client.program import glue
from tests.client.kit import FakeLab

X = np.linspace(-2, 2, 8, dtype=np.float32)
TURNS = 5


def made(before: Any) -> tuple[int, int]:
    return stats.work.traced - before[0], stats.work.exported - before[1]


@pytest.mark.parametrize(
    "work",
    [
        lambda h: h + 1,
        lambda h: (h * 0.5 - 1, h.sum())[0],
        jax.nn.relu,
        jax.nn.gelu,
        lambda h: jnp.where(h > 0, h, 0.5)[::-1].at[0].set(1),
        lambda h: h + jnp.arange(8, dtype=np.float32) @ h,
    ],
    ids=["add", "two", "relu", "gelu", "indexed", "constant"],
)
def test_a_loop_makes_its_operations_once(fake: FakeLab, work: Callable[[Any], Any]) -> None:
    f = pw.jit(jnp.sin, on=fake.slice(2), name="sin")

    def loop(h: Any) -> Any:
        for _ in range(TURNS):
            h = work(f(h))
        return h

    before = stats.work.traced, stats.work.exported
    program = pw.program(loop)
    got = program(X)
    traced, exported = made(before)
    assert traced == 2, "the function, and what stands between its calls"
    assert exported <= 3, "and once more where nobody says how the last result is cut"
    assert program.last is not None
    assert len(program.last.program.nodes) == 2 * TURNS
    wanted = X
    for _ in range(TURNS):
        wanted = work(jnp.sin(wanted))
    np.testing.assert_allclose(got.result(), wanted, rtol=1e-5)
    assert not glue._bodies, "nothing is kept of captures that are over"


@pytest.mark.parametrize(
    "works",
    [
        (lambda h: h + 1, lambda h: h + 1.5, lambda h: h - 1),
        (lambda h: h + np.int32(1), lambda h: h + np.float32(1), lambda h: h + np.True_),
        (lambda h: jnp.copysign(h, 0.0), lambda h: jnp.copysign(h, -0.0)),
        (lambda h: 2 - h, lambda h: h - 2, lambda h: h - h),
        (lambda h: h**2, lambda h: h**3, lambda h: h**2.0),
        (lambda h: h[1:3].sum() + h, lambda h: h[2:4].sum() + h),
        (lambda h: h.astype(np.int32), lambda h: h.astype(np.int8)),
        (lambda h: jnp.where(h > 0, h, 0.5), lambda h: jnp.where(h > 0, 0.5, h)),
        (lambda h: h + np.arange(8, dtype="f4"), lambda h: h + np.arange(8, dtype="f4")[::-1]),
        (jax.nn.relu, jax.nn.relu6, lambda h: jax.nn.leaky_relu(h, 0.25), jax.nn.leaky_relu),
        (lambda h: jnp.dot(h, h, precision="highest") + h, lambda h: jnp.dot(h, h) + h),
    ],
)
def test_what_differs_is_never_taken_for_the_same(
    fake: FakeLab, works: tuple[Callable[[Any], Any], ...]
) -> None:
    f = pw.jit(jnp.sin, on=fake.slice(2), name="sin")
    got = pw.program(lambda h: [work(f(h)) for work in works])(X)
    for handle, work in zip(got, works, strict=True):
        wanted = np.asarray(work(jnp.sin(X)))
        assert (handle.dtype, handle.weak_type) == (wanted.dtype, work(jnp.sin(X)).weak_type)
        np.testing.assert_allclose(handle.result(), wanted, rtol=1e-5)
        assert np.array_equal(np.signbit(handle.result()), np.signbit(wanted))


def test_a_group_looks_values_up_and_never_at_all_that_a_program_needs() -> None:
    """A loop of 10,000 turns has as many groups, and needs as many values."""

    class Needed:
        def __contains__(self, ref: object) -> bool:
            return False

    assert glue.Group(None).node(Needed()) is None  # type: ignore[arg-type]
