"""JAX's own settings count where a call stands, also for what was called before without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.client.lab import stats
from pathways_lab.client.program.cell_program import CellProgram
from pathways_lab.client.session.handles import Handle
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
    return pw.program(function, on=fake.slice(4)), pw.device_put(X, fake.slice(4))


def as_cell(fake: FakeLab, function: Any) -> Any:
    names = {"f": pw.jit(function, on=fake.slice(4)), "x": X}
    code = compile("y = f(x)", "<cell>", "exec")
    run = CellProgram(lambda given: exec(code, given))
    return lambda x: run({**names, "x": x})["y"], X


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


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
@ways
@pytest.mark.parametrize("given", ["float64", "int64"])
def test_values_of_64_bits_from_elsewhere_are_what_they_are_to_jax(
    fake: FakeLab, way: Callable[..., Any], given: str
) -> None:
    """Outside of x64 JAX keeps the type, until an operation that promotes makes 32 bits of it."""
    fake.held = True

    def function(x: Any) -> Any:
        return x, -x, x * 2, jnp.sin(x), x.sum()

    call, _ = way(fake, function)
    with jax.enable_x64(True):
        array = jnp.arange(8, dtype=given)
        handle = pw.device_put(array, fake.slice(4))
    wanted = [str(value.dtype) for value in jax.jit(function)(array)]
    assert len(set(wanted)) > 1
    for x in (handle, array):
        assert [str(value.dtype) for value in call(x)] == wanted
    fake.settle()
    for sent in fake.of("function"):
        code = jax.export.deserialize(bytearray(fake._blobs[sent["function"]]))
        assert [str(aval.dtype) for aval in code.in_avals] == [t for _, t in sent["in_types"]]
        assert [str(aval.dtype) for aval in code.out_avals] == [t for _, t in sent["out_types"]]


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


def narrow(x: Any) -> Any:
    wide = x.astype(float) + 1e-9
    return ((wide - x) * 1e9).astype(jnp.float32)


def draw(x: Any) -> Any:
    return x + jax.random.normal(jax.random.key(7), x.shape)


@pytest.mark.parametrize(
    ("function", "setting"),
    [
        (narrow, lambda: jax.enable_x64(True)),
        (draw, lambda: jax.default_prng_impl("rbg")),
        (draw, lambda: jax.threefry_partitionable(False)),
    ],
    ids=["64 bits", "generator", "partitionable"],
)
def test_what_calls_back_into_python_is_traced_on_hosts_under_them(
    fake: FakeLab, function: Any, setting: Callable[[], Any]
) -> None:
    def noted(x: Any) -> Any:
        jax.debug.callback(lambda: None)
        return function(x)

    with setting():
        made = pw.jit(noted, on=fake.slice(4))(X)
        np.testing.assert_allclose(made.result(), jax.jit(lambda x: function(x))(X), rtol=1e-6)


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


def test_jax_finds_no_leak_in_a_capture(fake: FakeLab) -> None:
    double = pw.jit(lambda x: x * 2, on=fake.slice(4))
    with jax.checking_leaks():
        made = pw.program(lambda x: double(x) + 1)(X)
    np.testing.assert_array_equal(made.result(), X * 2 + 1)
