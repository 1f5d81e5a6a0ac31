"""Law: a file that was written in any cut is the array, and is read in any other; once a part."""

from __future__ import annotations

import functools
import math
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding

from pathways_lab.core.program.layout import Layout
from pathways_lab.runtime import array_files, arrays, jax_private, zarr_arrays
from pathways_lab.runtime.devices import spec_of
from tests.runtime.processes import until


@functools.cache
def mesh() -> Mesh:
    devices = jax_private.make_cpu_client(4).local_devices()
    return Mesh(np.array(devices).reshape(2, 2), ("x", "y"))


def cut(*spec: tuple[str, ...]) -> Layout:
    return Layout((("x", 2), ("y", 2)), spec)


def cuts(ndim: int) -> st.SearchStrategy[Layout]:
    """Ways to cut an array over axes x and y."""
    apart = st.permutations([("x",), ("y",), *[()] * ndim]).map(lambda p: cut(*p[:ndim]))
    joined = st.sampled_from([(), ("x", "y"), ("y", "x")]).map(lambda n: cut(n, *[()] * (ndim - 1)))
    return st.one_of(apart, joined)


def place(folder: Path) -> Any:
    return zarr_arrays.within(zarr_arrays.spec_of(folder, {}), "array")


def written(folder: Path, array: Any, layout: Layout) -> None:
    kind = arrays.physical(array.shape, str(array.dtype), layout)
    shutil.rmtree(folder / "array", ignore_errors=True)
    zarr_arrays.make(folder / "array", kind.shape, str(array.dtype), kind.shard)
    there = jax.device_put(array, NamedSharding(mesh(), spec_of(layout)))
    write = jax.jit(functools.partial(array_files.write, mesh=mesh(), layout=layout))
    handed = write(there, array_files.placed(place(folder)))
    there_yet = jax.jit(functools.partial(array_files.written, mesh=mesh()))
    until(lambda: there_yet(handed, array_files.placed(zarr_arrays.spec_of(folder, {}))).all())


def read(folder: Path, array: Any, layout: Layout) -> Any:
    how = {"mesh": mesh(), "layout": layout, "shape": array.shape, "dtype": str(array.dtype)}
    made = jax.jit(functools.partial(array_files.read, **how))(array_files.placed(place(folder)))
    wanted = NamedSharding(mesh(), spec_of(layout))
    assert not array.size or made.sharding.is_equivalent_to(wanted, array.ndim)
    return made


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_cut_is_read_in_any_other(tmp_path: Path, data: Any) -> None:
    shape = data.draw(st.sampled_from([(4,), (4, 8), (8, 4, 4), (0, 4)]))
    array = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    written(tmp_path, array, data.draw(cuts(len(shape))))
    chunks = [file.stat().st_size for file in (tmp_path / "array").glob("[0-9]*")]
    assert sum(chunks) == array.nbytes, "every element once, whoever has copies"
    assert zarr_arrays.described(place(tmp_path)) == (shape, "int32")
    whole = zarr_arrays.read(place(tmp_path), tuple((0, extent) for extent in shape))
    np.testing.assert_array_equal(whole, array)
    made = read(tmp_path, array, data.draw(cuts(len(shape))))
    np.testing.assert_array_equal(made, array)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float8_e5m2", "int4", "uint4", "int2", "bool", "complex64"]
)
def test_dtypes_that_numpy_lacks_are_kept_to_the_bit(tmp_path: Path, dtype: str) -> None:
    array = jnp.array([1, 0, 3, 7], dtype)
    written(tmp_path, array, cut(("y",)))
    assert zarr_arrays.described(place(tmp_path)) == ((4,), dtype)
    made = read(tmp_path, array, cut(("x",)))
    assert (made.dtype, made.tolist()) == (array.dtype, array.tolist())


def test_random_keys_are_kept(tmp_path: Path) -> None:
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 4)
    written(tmp_path, keys, cut(("y",)))
    made = read(tmp_path, keys, cut(("x", "y")))
    assert made.dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(made), jax.random.key_data(keys))
