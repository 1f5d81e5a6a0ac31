"""JAX's own settings count where a call stands, also for what was called before without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.client import stats
from pathways_lab.client.cells import CellProgram
from pathways_lab.client.handles import Handle
from tests.client.kit import FakeLab

X = np.arange(8, dtype=np.int32)


def as_handle(fake: FakeLab, function: Any) -> Any:
    return pw.jit(function, on=fake.slice(4)), pw.device_put(X, fake.slice(4))


def as_array(fake: FakeLab, function: Any) -> Any:
    return pw.jit(function, on=fake.slice(4)), X


def as_program(fake: FakeLab, function: Any) -> Any:
    inner = pw.jit(function, on=fake.slice(4))
    return pw.program(lambda x: inner(x)), X


def as_operations(fake: FakeLab, function: Any) -> Any:
    return pw.program(function), pw.device_put(X, fake.slice(4))


def as_cell(fake: FakeLab, function: Any) -> Any:
    names = {"f": pw.jit(function, on=fake.slice(4)), "x": X}
    code = compile("y = f(x)", "<cell>", "exec")
    run = CellProgram(lambda given: exec(code, given))
    return lambda x: run(names)["y"], X


WAYS = [as_handle, as_array, as_program, as_operations, as_cell]
ways = pytest.mark.parametrize("way", WAYS, ids=[way.__name__ for way in WAYS])


@ways
def test_types_of_64_bits(fake: FakeLab, way: Callable[..., Any]) -> None:
    fake.held = True  # types are known at once
    call, x = way(fake, lambda x: x + jnp.arange(8))
    found = []
    for wide in (False, True, False):
        with jax.enable_x64(wide):
            found.append(call(x).dtype)
    assert found == [np.int32, np.int64, np.int32]


@ways
def test_promotion(fake: FakeLab, way: Callable[..., Any]) -> None:
    call, x = way(fake, lambda x: x + jnp.ones(8, jnp.float16))
    call(x)
    with (
        jax.numpy_dtype_promotion("strict"),
        pytest.raises(pw.PathwaysError, match="TypePromotionError"),
    ):
        call(x)


def test_precision_is_part_of_the_code(fake: FakeLab) -> None:
    call = pw.program(pw.jit(lambda x: x @ x, on=fake.slice(4)))
    x = np.ones((8, 8), np.float32)
    assert "HIGHEST" not in call.mlir(x)
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" in call.mlir(x)


def test_methods_of_handles(fake: FakeLab) -> None:
    fake.held = True
    h: Handle = pw.device_put(X, fake.slice(4))
    found = []
    for wide in (False, True, False):
        with jax.enable_x64(wide):
            found.append(h.sum().dtype)
    assert found == [np.int32, np.int64, np.int32]


def test_in_one_context_nothing_is_made_twice(fake: FakeLab) -> None:
    fake.held = True
    call, x = as_handle(fake, lambda x: x + jnp.arange(8))
    before = stats.work.traced
    for _ in range(3):
        for wide in (False, True):
            with jax.enable_x64(wide):
                call(x)
    assert stats.work.traced == before + 2
