"""Leaves of arguments: their types, and their bytes on the wire.

Problem: a leaf may be a handle, a NumPy or JAX array, a NumPy or Python scalar.
Programs know only its :class:`ArrayType`; the wire carries plain bytes.  JAX's
rules decide: 64-bit types shrink unless ``jax_enable_x64`` is on, Python
scalars are weakly typed, and random keys are arrays of their own dtype that
travel as their key data.

Rule for maintainers: JAX itself is asked (``jax.typeof``); no table of dtypes.

Paper: section 4.2 (buffers are logical and typed).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pathways_lab.client.functions.flat import Narrow
from pathways_lab.client.session import failures
from pathways_lab.core.program import array_types
from pathways_lab.core.program.layout import Layout
from pathways_lab.runtime import arrays as made
from pathways_lab.runtime.arrays import dtype_of, element_of, is_key, key_implementation

SMALL = 64 * 1024
"""Arguments up to this many bytes ride in the message that submits the run."""


FLOAT0 = "of float0, JAX's gradient of an integer, of which there are no bytes"


@dataclass(frozen=True, slots=True)
class ArrayType:
    """The type of an array, which is known before the array exists.  dtype: JAX's name of it."""

    shape: tuple[int, ...]
    dtype: str
    weak: bool = False

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """The same for JAX."""
        return jax.ShapeDtypeStruct(self.shape, dtype_of(self.dtype), weak_type=self.weak)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return nbytes(self.shape, self.dtype)


def type_of(aval: Any) -> ArrayType:
    """The type of anything with shape and dtype: an aval, a struct, an array."""
    return ArrayType(tuple(aval.shape), str(aval.dtype), bool(getattr(aval, "weak_type", False)))


def wide(kinds: Iterable[ArrayType]) -> AbstractContextManager[Any]:
    """While active, JAX takes arguments of these types as they are, also outside of x64."""
    return made.wide(*(dtype_of(kind.dtype) for kind in kinds))


def as_here(call: Callable[..., Any], kinds: Iterable[ArrayType]) -> Callable[..., Any]:
    """A flat function, to be traced under :func:`wide`, which changes nothing in it."""
    shrinks = any(host_type(kind.struct) != kind for kind in kinds)
    return Narrow(call) if shrinks else call


def host_type(leaf: Any) -> ArrayType | None:
    """The type that JAX gives to a host leaf; None when it is no array or number of JAX's."""
    try:
        aval = jax.typeof(leaf)
    except (TypeError, OverflowError):
        return None
    return None if aval.dtype == jax.dtypes.float0 else type_of(aval)


def host_bytes(leaf: Any, kind: ArrayType, what: str = "") -> np.ndarray[Any, Any]:
    """A host leaf as a C-ordered NumPy array of the dtype that travels.

    Raises PathwaysError, which calls the leaf *what*, for what has a type and no value.
    """
    try:
        if is_key(kind.dtype):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf, dtype=element_of(kind.dtype).dtype, order="C")
    except TypeError:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            raise
        raise failures.refused(
            f"{what or 'an argument'} is a ShapeDtypeStruct, {kind}: a type without a value",
            "pass an array; program.capture(...) and pw.simulate take types",
        ) from None


def from_bytes(data: np.ndarray[Any, Any], dtype: str) -> Any:
    """The array of fetched bytes for users: a NumPy array, or a JAX array of random keys."""
    if not is_key(dtype):
        return data
    return jax.random.wrap_key_data(jnp.asarray(data), impl=key_implementation(dtype))


# --- bytes ------------------------------------------------------------------------


def nbytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of an array."""
    return math.prod(shape) * element_of(dtype).itemsize


def shard_bytes(kind: ArrayType, layout: Layout) -> int:
    """Bytes of one device's shard.  Raises PathwaysError for more than any machine has."""
    try:
        return array_types.shard_bytes(kind.shape, kind.dtype, layout)
    except ValueError as error:
        raise failures.capture_failure(
            f"{kind} is no array of a lab: {error}", "make smaller arrays, or cut them over devices"
        ) from None


def not_put(leaf: Any) -> Exception:
    """The error for what ``device_put`` cannot put: nothing of it can be static."""
    return no_array(leaf, "a leaf given to device_put", "leave it out of the tree")


def no_array(
    leaf: Any,
    what: str,
    otherwise: str = "declare it static (static_argnums, static_argnames)",
) -> Exception:
    """The error for a leaf that is neither array nor number of JAX's.  otherwise: what to do."""
    if isinstance(leaf, int):
        return failures.capture_failure(
            f"{what} is {leaf}, which does not fit into {jax.dtypes.canonicalize_dtype(int)}",
            f"pass a float, an array of a wider type (64 bits need jax_enable_x64), or {otherwise}",
        )
    if getattr(leaf, "dtype", None) == jax.dtypes.float0:
        return failures.capture_failure(f"{what} is {FLOAT0}", "leave it out")
    if (dtype := getattr(leaf, "dtype", None)) is not None:
        return failures.capture_failure(
            f"{what} is an array of dtype {dtype}, which JAX does not have",
            "convert it before the call: x.astype(np.float32), or another dtype of jax.numpy",
        )
    return failures.capture_failure(
        f"{what} is of type {type(leaf).__name__}, and a program computes on arrays and numbers",
        f"{otherwise}, or read it from outside",
    )
