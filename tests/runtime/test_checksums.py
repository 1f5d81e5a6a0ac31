"""Law: a checksum tells of every bit of a part, whatever its type, and of nothing else."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pathways_lab.runtime import checksums, jax_private

TYPES = (
    *("float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn", "bool", "complex64"),
    *("int4", "uint4", "int8", "uint16", "int32", "float64", "int64", "complex128"),
)


@functools.cache
def mesh() -> Mesh:
    devices = jax_private.make_cpu_client(4).local_devices()
    return Mesh(np.array(devices).reshape(2, 2), ("x", "y"))


@functools.cache
def summing(spec: P) -> Any:
    return jax.jit(functools.partial(checksums.of_parts, mesh=mesh(), spec=spec))


def sums(array: Any, spec: P) -> np.ndarray[Any, Any]:
    """Of each device's part."""
    with jax.enable_x64(True):
        there = jax.device_put(array, NamedSharding(mesh(), spec))
        return np.asarray(summing(spec)(there, np.uint32(0)))


def flipped(array: np.ndarray[Any, Any], byte: int, bit: int) -> np.ndarray[Any, Any]:
    data = array.copy()
    data.reshape(-1).view(np.uint8)[byte] ^= 1 << bit
    return data


@pytest.mark.parametrize("dtype", TYPES)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_any_bit_of_any_type_counts(dtype: str, data: st.DataObject) -> None:
    array = np.arange(8).astype(jnp.dtype(dtype))
    bits = {"bool": 1, "int4": 4, "uint4": 4}.get(dtype, 8)
    byte = data.draw(st.integers(0, array.nbytes - 1))
    other = flipped(array, byte, data.draw(st.integers(0, bits - 1)))
    same = (sums(array, P("x")) == sums(other, P("x"))).all(axis=1)
    half = byte // (array.nbytes // 2)
    assert same.tolist() == [half == 1, half == 1, half == 0, half == 0]


def test_what_is_the_same_has_the_same_and_places_count() -> None:
    array = np.array([1, 2, 2, 1], np.int32)
    found = sums(array, P("x"))
    assert found.shape == (4, checksums.WORDS)
    assert (found[0] == found[1]).all()
    assert (found[0] != found[2]).all(), "the same numbers in another order"
    assert (sums(array, P()) == sums(array, P())[0]).all()


def test_keys_and_nothing_have_one() -> None:
    keys = [jax.random.split(jax.random.key(seed), 2) for seed in (3, 4)]
    one, other = (sums(key, P()) for key in keys)
    assert (one != other).all()
    assert (sums(np.zeros((0, 4), np.float32), P()) == 0).all()


def test_every_device_computes_the_same_and_every_round_something_else() -> None:
    body = functools.partial(checksums.scan, mesh=mesh(), size=32)
    scan = jax.jit(body)
    first, second = (np.asarray(scan(np.uint32(number))) for number in (0, 1))
    assert first.shape == (4, len(checksums.UNITS) * checksums.WORDS)
    assert (first == first[0]).all()
    assert (second == second[0]).all()
    assert (first != second).all()
