"""A sharded array in a file: every device writes its part, or reads the part that it wants.

Problem: what lies on many devices must not pass through one process on its way to a file, and
comes back on other devices, cut in another way.

How: two bodies of compiled functions, each a callback under ``shard_map``.  The file is NumPy's
``.npy``, made beforehand in its full size, so that parts of any cut are written and read in
any order; what NumPy has no dtype for is kept as integers of its size.

Rule for maintainers: what changes from save to save (folder, number of the file) is an argument
and no part of the code: a loop that saves compiles once.  Callbacks run on hosts and touch NumPy
only.

Paper: section 4.2 (sharded buffers), section 4.3 (host computations).
"""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import Mesh, PartitionSpec

from pathways_lab.core.program.layout import Box, Layout
from pathways_lab.runtime import arrays
from pathways_lab.runtime.devices import spec_of

_LONGEST = 4096
"""Bytes of a folder's name."""

Array = np.ndarray[Any, Any]


def named(folder: Path) -> Array:
    """A folder as an array, always of the same shape.  Raises ValueError for too long a name."""
    name = os.fsencode(folder)
    if len(name) > _LONGEST:
        raise ValueError(f"the name of a folder has at most {_LONGEST} bytes")
    return np.frombuffer(name.ljust(_LONGEST, b"\0"), np.uint8)


def file_of(folder: Path, number: int) -> Path:
    """Where value *number* of a folder is."""
    return folder / f"{number}.npy"


def make(file: Path, shape: tuple[int, ...], dtype: str) -> None:
    """The file of a value of this shape and JAX type name, in its full size."""
    stored = _stored(shape, dtype)
    header = {
        "descr": np.lib.format.dtype_to_descr(np.dtype(stored.dtype)),
        "fortran_order": False,
        "shape": tuple(stored.shape),
    }
    with file.open("wb") as opened:
        np.lib.format.write_array_header_1_0(opened, header)
        opened.truncate(opened.tell() + math.prod(stored.shape) * stored.dtype.itemsize)


def _stored(shape: tuple[int, ...], dtype: str) -> Any:
    """Shape and dtype of a value in its file."""
    return jax.eval_shape(plain, jax.ShapeDtypeStruct(shape, arrays.dtype_of(dtype)))


def plain(array: Any) -> Any:
    """An array in a dtype that NumPy has of its own."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(array)
    if np.dtype(array.dtype).isbuiltin == 1:
        return array
    bits = jax.lax.bitcast_convert_type(array, f"uint{_bits(array.dtype)}")
    return bits.astype("uint8") if _bits(array.dtype) < 8 else bits


def typed(stored: Any, dtype: str) -> Any:
    """The inverse of :func:`plain`."""
    if arrays.is_key(dtype):
        return jax.random.wrap_key_data(stored, impl=arrays.key_implementation(dtype))
    wanted = jnp.dtype(dtype)
    if wanted.isbuiltin == 1:
        return stored
    return jax.lax.bitcast_convert_type(stored.astype(f"uint{_bits(wanted)}"), wanted)


def write(array: Any, folder: Any, number: Any, *, mesh: Mesh, layout: Layout) -> Any:
    """Body of a compiled function: every device writes its part of *array*; a true from each."""
    kind = arrays.physical(tuple(array.shape), str(array.dtype), layout)
    put = functools.partial(_put, kind.boxes())

    def part(shard: Any, folder: Any, number: Any) -> Any:
        done = jax.ShapeDtypeStruct((1,), bool)
        return io_callback(put, done, shard, folder, number, jax.lax.axis_index(mesh.axis_names))

    everywhere, anywhere = PartitionSpec(mesh.axis_names), PartitionSpec()
    return jax.shard_map(
        part,
        mesh=mesh,
        in_specs=(spec_of(kind.layout), anywhere, anywhere),
        out_specs=everywhere,
        check_vma=False,
    )(plain(array), folder, number)


def read(
    folder: Any, number: Any, *, mesh: Mesh, layout: Layout, shape: tuple[int, ...], dtype: str
) -> Any:
    """Body of a compiled function: an array of which every device reads its part."""
    kind = arrays.physical(shape, dtype, layout)
    block = jax.ShapeDtypeStruct(kind.shard, _stored(shape, dtype).dtype)
    get = functools.partial(_get, kind.boxes(), block)

    def part(folder: Any, number: Any) -> Any:
        return io_callback(get, block, folder, number, jax.lax.axis_index(mesh.axis_names))

    anywhere, cut = PartitionSpec(), spec_of(kind.layout)
    parts = jax.shard_map(
        part, mesh=mesh, in_specs=(anywhere, anywhere), out_specs=cut, check_vma=False
    )
    return typed(parts(folder, number), dtype)


def _bits(dtype: Any) -> int:
    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return int(info(dtype).bits)


# --- on hosts -------------------------------------------------------------------------------


def _put(boxes: tuple[Box, ...], shard: Any, folder: Any, number: Any, device: Any) -> Array:
    box = boxes[device]
    if boxes.index(box) == device and shard.size:  # the first of those that have it
        file = _opened(folder, number, "r+")
        file[arrays.index(box)] = shard
        file.flush()
    return np.ones(1, bool)


def _get(boxes: tuple[Box, ...], block: Any, folder: Any, number: Any, device: Any) -> Array:
    if not block.size:
        return np.zeros(block.shape, block.dtype)
    return np.array(_opened(folder, number, "r")[arrays.index(boxes[device])])


def _opened(folder: Any, number: Any, mode: Any) -> np.memmap[Any, Any]:
    """The file of a value.  Raises OSError that says what a host needs."""
    path = file_of(Path(os.fsdecode(bytes(np.asarray(folder)).rstrip(b"\0"))), int(number))
    try:
        file: np.memmap[Any, Any] = np.lib.format.open_memmap(path, mode)
    except (OSError, ValueError) as error:
        raise OSError(
            f"{path} cannot be opened on this host ({error}): a checkpoint lies on a file system"
            " that all hosts of its slices see"
        ) from error
    return file
