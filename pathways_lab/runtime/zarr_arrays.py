"""Arrays on disk as Orbax keeps them: Zarr, which processes write and read part by part.

Problem: many processes write parts of one array, and many read parts that were cut in another
way; other systems read such arrays, and write them.

How: an array is a folder with a description and a file for each chunk, and a chunk is the part
of one device.  Such folders need NumPy only.  Compressed chunks, and databases of chunks (OCDBT),
which Orbax writes by default, are read through TensorStore, where it is installed.

Rule for maintainers: the place of an array is a spec of TensorStore's, which says all that a
reader must know.  Only plain chunks are written, each as a whole and by one process.

Paper: section 4.2 (sharded buffers).
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pathways_lab.core.program.array_types import ELEMENT_BYTES
from pathways_lab.core.program.layout import Box, intersect
from pathways_lab.runtime import arrays

READER = "tensorstore"
"""The package that reads what is no plain chunk."""
_DESCRIPTION = ".zarray"

Array = np.ndarray[Any, Any]
Spec = Mapping[str, Any]


def spec_of(folder: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """The place of all arrays of a folder.  about: the metadata that Orbax keeps beside them."""
    files = {"driver": "file", "path": f"{folder}/"}
    database = {"driver": "ocdbt", "base": files, "path": ""}
    spec = {
        "driver": "zarr3" if about.get("use_zarr3") else "zarr",
        "kvstore": database if (folder / "manifest.ocdbt").exists() else files,
    }
    # Earlier versions of Orbax left out chunks of zeros.
    complete = about.get("store_array_data_equal_to_fill_value", False)
    return spec | ({"fill_missing_data_reads": False} if complete else {})


def within(spec: Spec, name: str) -> dict[str, Any]:
    """The place of one of these arrays."""
    store = spec["kvstore"]
    return {**spec, "kvstore": {**store, "path": store["path"] + (f"{name}/" if name else "")}}


def folder_of(spec: Spec) -> Path:
    """The folder of an array, or where it would be if there were no database."""
    store = spec["kvstore"]
    return Path(store.get("base", {}).get("path", "") + store["path"])


def make(folder: Path, shape: Sequence[int], dtype: str, chunk: Sequence[int]) -> None:
    """The folder of an array of this JAX type name, still without chunks.  Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "zarr_format": 2,
        "shape": [*shape],
        "chunks": [max(extent, 1) for extent in chunk],
        "dtype": _zarr_name(dtype),
        "compressor": None,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "dimension_separator": ".",
    }
    with (folder / _DESCRIPTION).open("x") as opened:
        json.dump(about, opened)


def write(folder: Path, box: Box, part: Array) -> None:
    """Write the chunk that is this box; an empty one has no file.  Raises OSError."""
    if part.size:
        numbers = [start // (stop - start) for start, stop in box]
        with _file(folder, numbers).open("wb") as opened:
            opened.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
            opened.flush()
            os.fsync(opened.fileno())


def described(spec: Spec) -> tuple[tuple[int, ...], str]:
    """Shape and JAX type name of an array.

    Raises OSError, ValueError, and ModuleNotFoundError where TensorStore is missing.
    """
    plain = _plain(spec)
    if plain is not None:
        return plain.shape, plain.dtype
    store = _opened(spec)
    return tuple(store.shape), str(store.dtype.name)


def read(spec: Spec, box: Box) -> Array:
    """One part of an array.  Raises as :func:`described`."""
    plain = _plain(spec)
    if plain is None:
        return np.asarray(_opened(spec)[arrays.index(box)].read().result())
    part: Array = np.empty([stop - start for start, stop in box], arrays.dtype_of(plain.dtype))
    touched = [
        range(start // extent, -(-stop // extent))
        for (start, stop), extent in zip(box, plain.chunks, strict=True)
    ]
    for numbers in itertools.product(*touched):
        chunk = tuple((n * e, (n + 1) * e) for n, e in zip(numbers, plain.chunks, strict=True))
        common = intersect(box, chunk)
        if common is not None:
            file = _file(plain.folder, numbers)
            stored = np.memmap(file, part.dtype, "r", shape=plain.chunks)
            part[arrays.index(common, box)] = stored[arrays.index(common, chunk)]
    return part


@dataclass(frozen=True, slots=True)
class _Plain:
    """An array whose chunks are files of its elements."""

    folder: Path
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...]


def _plain(spec: Spec) -> _Plain | None:
    """The array of a place; None when it is kept in any other way."""
    if spec["driver"] != "zarr" or spec["kvstore"]["driver"] != "file":
        return None
    folder = folder_of(spec)
    about = json.loads((folder / _DESCRIPTION).read_text())
    form = [about.get(key) for key in ("zarr_format", "compressor", "filters", "order")]
    separator, dtype = about.get("dimension_separator", "."), _jax_names().get(str(about["dtype"]))
    if form != [2, None, None, "C"] or separator != "." or dtype is None:
        return None
    return _Plain(folder, tuple(about["shape"]), dtype, tuple(about["chunks"]))


def _opened(spec: Spec) -> Any:
    try:
        tensorstore = importlib.import_module(READER)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{folder_of(spec)} is not plain Zarr, and {READER!r}, which reads it, is not"
            f" installed here: pip install {READER}",
            name=READER,
        ) from error
    return tensorstore.open(spec, open=True, read=True).result()


def _file(folder: Path, numbers: Sequence[int]) -> Path:
    return folder / (".".join(map(str, numbers)) or "0")


def _zarr_name(dtype: str) -> str:
    """Zarr's name of a JAX type name: NumPy's, where NumPy has the type."""
    there = arrays.element_of(dtype).dtype
    return there.newbyteorder("<").str if there.isbuiltin == 1 else there.name


@functools.cache
def _jax_names() -> dict[str, str]:
    """The inverse; random keys have the name of their data."""
    return {_zarr_name(name): name for name in ELEMENT_BYTES if not arrays.is_key(name)}
