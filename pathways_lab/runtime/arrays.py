"""Shards between NumPy and JAX, without copies where that is safe.

Problem: bytes come from links and other clients' devices as plain memory, and
become JAX arrays of exactly one layout.  JAX's CPU devices take NumPy memory
as it is when it is aligned to 64 bytes, and give theirs as NumPy views; both
are then read-only on both sides, and a donation of such an array copies
instead of overwriting (tested).  Random keys live as their key data.

Rule for maintainers: the last write into memory comes before it becomes a JAX
array.  Only shards are ever made here, never a whole sharded array.

Paper: section 4.2 (sharded buffers), section 4.6.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from pathways_lab.core.program import bundles
from pathways_lab.core.program.array_types import ELEMENT_BYTES
from pathways_lab.core.program.layout import Box, Layout, boxes, shard_shape
from pathways_lab.core.program.program import Value
from pathways_lab.runtime import jax_private
from pathways_lab.runtime.devices import Place
from pathways_lab.transport.buffer_pool import Pages

Array = np.ndarray[Any, Any]
ALIGNMENT = 64
_POOLED = 64 * 1024
"""Memory from this size on is kept for the next array of its size."""

_WIDE = frozenset(map(np.dtype, ("float64", "int64", "uint64", "complex128")))
_KEY_IMPLEMENTATIONS = (
    "threefry2x32", "rbg", "unsafe_rbg", "threefry4x32", "philox2x32", "philox4x32",
)  # fmt: skip


# --- types --------------------------------------------------------------------------


def is_key(dtype: str) -> bool:
    """Whether this is JAX's name of a random key type, like ``key<fry>``."""
    return dtype.startswith("key<")


@functools.cache
def _key_types() -> dict[str, tuple[str, Any]]:
    """JAX's names of random key types: the implementation, and the type object."""
    known = {}
    for name in _KEY_IMPLEMENTATIONS:
        # An older JAX has fewer of them.
        with suppress(ValueError):
            made = jax.eval_shape(functools.partial(jax.random.key, 0, impl=name)).dtype
            known[str(made)] = (name, made)
    return known


def key_implementation(dtype: str) -> str:
    """The name of a random key type in ``jax.random.key(impl=...)``.  Raises KeyError."""
    return _key_types()[dtype][0]


def key_name(implementation: str) -> str:
    """JAX's name of the random key type of an implementation.  Raises KeyError."""
    return {known: name for name, (known, _) in _key_types().items()}[implementation]


def key_type(dtype: str) -> Any:
    """JAX's type object of a random key type.  Raises KeyError."""
    return _key_types()[dtype][1]


@functools.cache
def dtype_of(name: str) -> Any:
    """JAX's dtype of this name, random key types among them.  Raises KeyError."""
    if name not in ELEMENT_BYTES:
        raise KeyError(name)  # NumPy would parse it, as Python if need be
    return key_type(name) if is_key(name) else jnp.dtype(name)


@dataclass(frozen=True, slots=True)
class Element:
    """How one element lies in memory, and travels: a random key is a few integers."""

    dtype: np.dtype[Any]
    trailing: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize * math.prod(self.trailing)


@functools.cache
def element_of(dtype: str) -> Element:
    """How elements of this JAX type name lie in memory.  Raises KeyError."""
    if not is_key(dtype):
        return Element(np.dtype(dtype_of(dtype)), ())
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), key_type(dtype)))
    return Element(np.dtype(data.dtype), tuple(data.shape))


@dataclass(frozen=True, slots=True)
class Physical:
    """How a value lies in memory: random keys have trailing dimensions."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    layout: Layout

    @property
    def shard(self) -> tuple[int, ...]:
        return shard_shape(self.layout, self.shape)

    def boxes(self) -> tuple[Box, ...]:
        return boxes(self.layout, self.shape)


@functools.lru_cache(maxsize=4096)
def physical(shape: tuple[int, ...], dtype: str, layout: Layout) -> Physical:
    """The memory of a value of this shape, JAX type name and layout."""
    element = element_of(dtype)
    spec = layout.spec + ((),) * len(element.trailing)
    return Physical(shape + element.trailing, element.dtype, replace(layout, spec=spec))


def physical_of(value: Value) -> Physical:
    assert value.layout is not None
    return physical(value.shape, value.dtype, value.layout)


def logical_shard(value: Value) -> tuple[int, ...]:
    """The shape of one shard, random keys being single elements."""
    assert value.layout is not None
    return shard_shape(value.layout, value.shape)


# --- memory -------------------------------------------------------------------------


class Memory:
    """Aligned memory that is used again when the arrays in it are gone."""

    def __init__(self) -> None:
        self._pages = Pages()

    @property
    def allocated(self) -> int:
        """Bytes ever asked of the system: for tests and statistics."""
        return self._pages.allocated

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An uninitialised array, aligned; its memory comes back when nobody holds it."""
        size = math.prod(shape) * dtype.itemsize
        if size < _POOLED:
            return _aligned(size).view(dtype).reshape(shape)
        return np.frombuffer(self._pages.take(size), np.uint8).view(dtype).reshape(shape)


def _aligned(size: int) -> Array:
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


def as_bytes(array: Array) -> memoryview:
    """The memory of a C-ordered array, of any type, without a copy."""
    return array.reshape(-1).view(np.uint8).data


def rows_with_values(array: Array) -> tuple[int, int] | None:
    """The first rows and the last ones are zeros, to the bit; None: it has no rows.

    Returns where the others begin and end.
    """
    if not array.ndim or not array.size:
        return None
    bits = array.reshape(len(array), -1).view(np.uint8)
    found = np.flatnonzero(bits.any(axis=1))
    return (int(found[0]), int(found[-1]) + 1) if len(found) else (0, 0)


def from_bytes(data: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An array over received bytes.  Raises ValueError when their number is wrong."""
    wanted = math.prod(shape) * dtype.itemsize
    size = memoryview(data).nbytes
    if size != wanted:
        raise ValueError(f"{size} bytes for a shard {dtype}{list(shape)} of {wanted} bytes")
    return np.ndarray(shape, dtype, data) if size else np.empty(shape, dtype)


# --- arrays -------------------------------------------------------------------------


def wide(*dtypes: np.dtype[Any]) -> AbstractContextManager[Any]:
    """While active, this thread may make arrays of these types: JAX shrinks 64 bits else."""
    if not _WIDE.isdisjoint(dtypes):
        enabled: AbstractContextManager[Any] = jax.enable_x64(True)
        return enabled
    return nullcontext()


def join(value: Value, place: Place, shards: Mapping[int, Any]) -> jax.Array:
    """The value from its shards on this host: NumPy or one-device JAX arrays by device number."""
    kind = physical_of(value)
    with wide(kind.dtype):
        if all(type(shard) is np.ndarray for shard in shards.values()):
            made: jax.Array = jax_private.put_shards(
                kind.shape,
                kind.dtype,
                place.sharding(kind.layout),
                [shards[number] for number in place.numbers],
                [place.devices[number] for number in place.numbers],
            )
            return made
        parts = [jax.device_put(shards[number], place.devices[number]) for number in place.numbers]
        return jax.make_array_from_single_device_arrays(
            kind.shape, place.sharding(kind.layout), parts, dtype=kind.dtype
        )


def shards_of(payload: jax.Array | OnDemand, place: Place) -> Mapping[int, Any]:
    """Shards by device number, of this host's devices: one-device arrays.

    NumPy arrays where the bytes are on no device yet: reading does not put them there.
    """
    if isinstance(payload, OnDemand):
        shards = payload.shards()
        if shards is not None:
            return shards
        payload = payload.array()
    by_device = {shard.device: shard.data for shard in payload.addressable_shards}
    devices = _devices(payload) if place.renewed else place.devices
    return {number: by_device[devices[number]] for number in place.numbers}


def _devices(array: jax.Array) -> tuple[Any, ...]:
    """The devices of the slice that an array was made for, row-major."""
    assert isinstance(array.sharding, NamedSharding)
    return tuple(array.sharding.mesh.devices.flat)


def here(value: Value, array: jax.Array, place: Place) -> jax.Array:
    """The array on the devices that its slice has now; in the same memory where possible."""
    if not place.renewed or _devices(array)[0] is place.devices[0]:
        return array
    return join(value, place, shards_of(array, place))


def zeros(value: Value, place: Place) -> Any:
    """Zeros in the shape of a value that is missing; of a bundle a list of them."""
    if value.leaves:
        return [zeros(each, place) for each in bundles.arrays_of([value])]
    kind = physical_of(value)
    blank = np.zeros(kind.shard, kind.dtype)
    return join(value, place, dict.fromkeys(place.numbers, blank))


def copied(value: Value, array: Any, place: Place) -> Any:
    """The same array, or the same ones of a bundle, in memory of its own."""
    if value.leaves:
        own = zip(bundles.arrays_of([value]), array, strict=True)
        return [copied(leaf, each, place) for leaf, each in own]
    shards = {number: jnp.copy(shard) for number, shard in shards_of(array, place).items()}
    return join(value, place, shards)


class OnDemand:
    """An array whose bytes lie in the host's own memory until a computation needs it.

    cut(): its shards by device number, of this host's devices.
    place(): the devices, which may not be open before the array is needed.
    """

    def __init__(
        self, value: Value, cut: Callable[[Place], Mapping[int, Array]], place: Callable[[], Place]
    ) -> None:
        self._value = value
        self._cut: Callable[[Place], Mapping[int, Array]] | None = cut
        self._place = place
        self._lock = threading.Lock()
        self._array: jax.Array | None = None

    def shards(self) -> Mapping[int, Array] | None:
        """The shards in the host's memory; None when they are on their devices."""
        with self._lock:
            return None if self._cut is None else self._cut(self._place())

    def array(self) -> jax.Array:
        """The array on its devices, from now on."""
        with self._lock:
            if self._array is None:
                assert self._cut is not None
                place = self._place()
                self._array = join(self._value, place, self._cut(place))
                self._cut = None
            return self._array


def argument(data: Any, value: Value, place: Callable[[], Place]) -> OnDemand:
    """A small array that came whole with a grant.  Raises ValueError when bytes are missing."""
    kind = physical_of(value)
    whole = from_bytes(data, kind.shape, kind.dtype)

    def cut(place: Place) -> Mapping[int, Array]:
        cuts = kind.boxes()
        return {n: np.asarray(whole[index(cuts[n])], order="C") for n in place.numbers}

    return OnDemand(value, cut, place)


def upload(parts: Mapping[int, Any], value: Value, place: Place) -> OnDemand | list[OnDemand]:
    """An array whose shards a client sent, by device number.  Raises ValueError as well.

    A part of a bundle holds the shards of all its arrays, one after the other.
    """
    if value.leaves:
        made, at = [], 0
        for leaf in bundles.arrays_of([value]):
            own = {n: memoryview(data)[at : at + leaf.nbytes] for n, data in parts.items()}
            made.append(_uploaded(own, leaf, place))
            at += leaf.nbytes
        if any(memoryview(data).nbytes != at for data in parts.values()):
            raise ValueError(f"a part of a bundle of {at} bytes has more of them")
        return made
    return _uploaded(parts, value, place)


def _uploaded(parts: Mapping[int, Any], value: Value, place: Place) -> OnDemand:
    kind = physical_of(value)
    shards = {n: from_bytes(data, kind.shard, kind.dtype) for n, data in parts.items()}
    return OnDemand(value, lambda place: shards, lambda: place)


def at_home(payload: Any) -> dict[int, Any] | None:
    """The bytes of shards in the host's own memory, as :func:`upload` takes them.

    None when they are on their devices.
    """
    own = [x.shards() if isinstance(x, OnDemand) else None for x in spread([payload])]
    if any(shards is None for shards in own):
        return None
    parts = [shards for shards in own if shards is not None]
    if len(parts) == 1:
        return {n: as_bytes(shard) for n, shard in parts[0].items()}
    return {n: b"".join([as_bytes(shards[n]) for shards in parts]) for n in parts[0]}


def resolved(payload: Any) -> jax.Array | None:
    """The array behind a slot's payload, on its devices; None when it has none."""
    return payload.array() if isinstance(payload, OnDemand) else payload


def spread(payloads: Sequence[Any]) -> list[Any]:
    """The arrays of payloads: a bundle's is a list of them."""
    found: list[Any] = []
    for payload in payloads:
        if isinstance(payload, list):
            found += payload
        else:
            found.append(payload)
    return found


def gathered(arrays: list[Any], values: Sequence[Value]) -> list[Any]:
    """The inverse: payloads of these values."""
    found: list[Any] = []
    at = 0
    for value in values:
        if value.leaves:
            found.append(arrays[at : at + len(value.leaves)])
            at += len(value.leaves)
        else:
            found.append(arrays[at])
            at += 1
    return found


def index(box: Box, origin: Box | None = None) -> tuple[slice, ...]:
    """A box as a NumPy index, of the whole array or of a part that begins at *origin*."""
    starts = tuple(start for start, _ in origin) if origin is not None else (0,) * len(box)
    return tuple(slice(a - o, b - o) for (a, b), o in zip(box, starts, strict=True))
