"""A sharded array on disk: every device writes its part, or reads the part that it wants.

Problem: what lies on many devices must not pass through one process on its way to disk, and
comes back on other devices, cut in another way.

How: bodies of compiled functions, each a callback under ``shard_map``.  The files are those of
:mod:`pathways_lab.runtime.zarr_arrays`; what is written lies in a folder made beforehand.  A device
only waits until its part is copied, and a body of its own tells whether the files are there.

Rule for maintainers: what changes from save to save (folder, name of the array) is an argument
and no part of the code: a loop that saves compiles once.  Callbacks run on hosts and touch NumPy
only, so they see integers in place of types that NumPy lacks.

Paper: section 4.2 (sharded buffers), section 4.3 (host computations).
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jax.experimental import io_callback
from jax.sharding import Mesh, PartitionSpec

from pathways_lab.core.program.layout import Box, Layout
from pathways_lab.runtime import arrays, zarr_arrays
from pathways_lab.runtime.devices import spec_of
from pathways_lab.runtime.write_behind import WriteBehind

_SHARE = 8
"""Copies that are still to be written take one part in so many of a machine's memory."""
_LONGEST = 4096
"""Bytes of the place of an array."""

Array = np.ndarray[Any, Any]


def placed(spec: Mapping[str, Any]) -> Array:
    """The place of an array as an array, always of the same shape.

    Raises ValueError for too long a name.
    """
    text = os.fsencode(json.dumps(spec, ensure_ascii=False))
    if len(text) > _LONGEST:
        raise ValueError(f"the place of an array has at most {_LONGEST} bytes, {len(text)} here")
    return np.frombuffer(text.ljust(_LONGEST), np.uint8)


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


def write(array: Any, place: Any, *, mesh: Mesh, layout: Layout) -> Any:
    """Body of a compiled function: every device hands over its part; a true from each."""
    kind = arrays.physical(tuple(array.shape), str(array.dtype), layout)
    put = functools.partial(_put, kind.boxes())

    def part(shard: Any, place: Any) -> Any:
        done = jax.ShapeDtypeStruct((1,), bool)
        return io_callback(put, done, shard, place, jax.lax.axis_index(mesh.axis_names))

    everywhere, anywhere = PartitionSpec(mesh.axis_names), PartitionSpec()
    return jax.shard_map(
        part,
        mesh=mesh,
        in_specs=(spec_of(kind.layout), anywhere),
        out_specs=everywhere,
        check_vma=False,
    )(plain(array), place)


def written(handed: Any, place: Any, *, mesh: Mesh) -> Any:
    """Body of a compiled function: whether a host has written all that lies in a folder.

    handed: results of :func:`write`.  place: of the folder.  A bool from each device.
    """

    def part(handed: Any, place: Any) -> Any:
        return io_callback(_written, jax.ShapeDtypeStruct((1,), bool), place)

    everywhere, anywhere = PartitionSpec(mesh.axis_names), PartitionSpec()
    return jax.shard_map(
        part, mesh=mesh, in_specs=(everywhere, anywhere), out_specs=everywhere, check_vma=False
    )(handed, place)


def read(place: Any, *, mesh: Mesh, layout: Layout, shape: tuple[int, ...], dtype: str) -> Any:
    """Body of a compiled function: an array of which every device reads its part."""
    kind = arrays.physical(shape, dtype, layout)
    stored = jax.eval_shape(plain, jax.ShapeDtypeStruct(shape, arrays.dtype_of(dtype)))
    block = jax.ShapeDtypeStruct(kind.shard, stored.dtype)
    get = functools.partial(_get, kind.boxes(), block)

    def part(place: Any) -> Any:
        return io_callback(get, block, place, jax.lax.axis_index(mesh.axis_names))

    parts = jax.shard_map(
        part, mesh=mesh, in_specs=PartitionSpec(), out_specs=spec_of(kind.layout), check_vma=False
    )
    return typed(parts(place), dtype)


def _bits(dtype: Any) -> int:
    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return int(info(dtype).bits)


# --- on hosts -------------------------------------------------------------------------------


def _put(boxes: tuple[Box, ...], shard: Any, place: Any, device: Any) -> Array:
    box, spec = boxes[device], _spec(place)
    if boxes.index(box) == device:  # the first of those that have it
        part = np.array(shard)

        def write() -> None:
            try:
                zarr_arrays.write(zarr_arrays.folder_of(spec), box, part)
            except OSError as error:
                raise _unseen(spec, "written", error) from error

        _behind().add(zarr_arrays.folder_of(spec), part.nbytes, write)
    return np.ones(1, bool)


def _written(place: Any) -> Array:
    return np.array([_behind().done(zarr_arrays.folder_of(_spec(place)))])


@functools.cache
def _behind() -> WriteBehind:
    """This process's."""
    return WriteBehind(psutil.virtual_memory().total // _SHARE)


def _get(boxes: tuple[Box, ...], block: Any, place: Any, device: Any) -> Array:
    if not block.size:
        return np.zeros(block.shape, block.dtype)
    spec = _spec(place)
    try:
        return zarr_arrays.read(spec, boxes[device]).view(block.dtype)
    except (OSError, ValueError) as error:
        raise _unseen(spec, "read", error) from error


def _spec(place: Any) -> Any:
    return json.loads(os.fsdecode(bytes(np.asarray(place))))


def _unseen(spec: Mapping[str, Any], what: str, error: Exception) -> OSError:
    """An error that says which files a host needs."""
    return OSError(
        f"{zarr_arrays.folder_of(spec)} cannot be {what} on this host ({error}): a checkpoint lies"
        " on a file system that all hosts of its slices see"
    )
