"""Which shape, type and layout make an array, and how many bytes a shard of it takes.

Problem: what an array is arrives as text and numbers from processes that may be wrong
or hostile, in plans and in uploads.  Parsed by a library it could raise anything, and a
few digits could make the receiver allocate all memory or count for hours.

Rule for maintainers: a type is looked up by its name and never parsed; the table equals
JAX's types (a test compares them).  :func:`shard_bytes` is the only judge, and whatever
its arguments hold it answers or raises ValueError, in time that grows with the number
of dimensions and mesh axes only.

Paper: section 4.2 (sharded logical buffers).
"""

from __future__ import annotations

import functools
import math
from types import MappingProxyType

from pathways_lab.core.program.layout import Layout

ELEMENT_BYTES = MappingProxyType(
    dict.fromkeys(("bool", "int1", "int2", "int4", "int8", "uint1", "uint2", "uint4", "uint8"), 1)
    | dict.fromkeys(("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"), 1)
    | dict.fromkeys(("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"), 1)
    | dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1)
    | dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2)
    | dict.fromkeys(("int32", "uint32", "float32"), 4)
    | dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8)
    | {"complex128": 16, "key<fry>": 8, "key<rbg>": 16, "key<urbg>": 16}
    | {"key<fry4>": 16, "key<phx2>": 4, "key<phx4>": 8}
)
"""Bytes of one element in memory, by JAX's name of its type; a random key is its key data."""

DIMENSIONS = 64
"""Most dimensions of an array, and most axes of a mesh.  NumPy has no more."""
DEVICES = 1 << 20
"""Most devices of a mesh."""
SHARD_BYTES = 1 << 48
"""Most bytes of one shard: more than any machine has."""


@functools.lru_cache(maxsize=4096)
def shard_bytes(shape: tuple[int, ...], dtype: str, layout: Layout) -> int:
    """Bytes of one device's shard.  Raises ValueError, naming it, for what is not an array."""
    size = ELEMENT_BYTES.get(dtype)
    if size is None:
        raise ValueError(f"{dtype[:40]!r} is not a type of arrays")
    if len(shape) > DIMENSIONS or len(layout.mesh) > DIMENSIONS:
        most = max(len(shape), len(layout.mesh))
        raise ValueError(f"{most} dimensions are too many: an array and a mesh have {DIMENSIONS}")
    sizes = dict(layout.mesh)
    if len(sizes) != len(layout.mesh):
        raise ValueError("two axes of the mesh have one name")
    if any(axis < 1 for axis in sizes.values()) or math.prod(sizes.values()) > DEVICES:
        raise ValueError(f"a mesh of {[*sizes.values()]} devices: it has 1 to {DEVICES:,}")
    if len(layout.spec) != len(shape):
        raise ValueError(f"{len(shape)} dimensions, and {len(layout.spec)} in the layout")
    cuts = [axis for axes in layout.spec for axis in axes]
    if len(cuts) != len(set(cuts)) or not sizes.keys() >= set(cuts):
        raise ValueError(f"{layout} names an axis twice, or one that the mesh does not have")
    for length, axes in zip(shape, layout.spec, strict=True):
        parts = math.prod([sizes[axis] for axis in axes])
        if not 0 <= length <= SHARD_BYTES:
            raise ValueError(f"a dimension of {length} elements: {SHARD_BYTES} are the most")
        if length % parts:
            raise ValueError(f"a dimension of {length} cannot be cut into {parts} equal parts")
        if size and (size := size * (length // parts)) > SHARD_BYTES:
            raise ValueError(f"a shard of more than {SHARD_BYTES:,} bytes")
    return size
