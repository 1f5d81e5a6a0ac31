"""The code that travels is what the user's Python came to when it ran, once."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from tests.client.kit import FakeLab

X = np.arange(8, dtype=np.float32)


@pytest.mark.parametrize("fuse", [None, False, True], ids=["call", "plain", "fused"])
def test_python_runs_once_whatever_it_does_and_wherever_its_code_goes(
    fake: FakeLab, fuse: bool | None
) -> None:
    """As with ``jax.jit``: what it counts, draws or prints when it runs is part of the code."""
    ran: list[None] = []

    def count(x: Any) -> Any:
        ran.append(None)
        return x + len(ran)

    f = pw.jit(count)
    call = f if fuse is None else pw.program(lambda x: f(f(x)) - 1, fuse=fuse)
    left, right = fake.slice(2), fake.slice(4)
    for place in (left, right, right.sharding(P("x"))):
        made = call(pw.device_put(X, place))
        np.testing.assert_array_equal(made.result(), X + 1)
    assert len(ran) == 1


@pytest.mark.parametrize("count", [(), (8,), (1 << 17,)], ids=str)
@pytest.mark.filterwarnings("ignore::pathways_lab.client.bodies.LargeConstantWarning")
def test_random_keys_from_outside_are_part_of_the_code(
    fake: FakeLab, count: tuple[int, ...]
) -> None:
    keys = jax.random.split(jax.random.key(3), count)

    def draw(x: Any) -> Any:
        return x + jax.random.uniform(keys.reshape(-1)[-1], x.shape), keys

    for call in (pw.jit(draw, on=fake.slice(4)), pw.program(pw.jit(draw, on=fake.slice(4)))):
        made, back = call(X)
        np.testing.assert_array_equal(made.result(), jax.jit(draw)(X)[0])
        assert (back.result() == keys).all()
