"""StableHLO that others have lowered, as ``jax.export`` would have written it.

Problem: hosts compile ``jax.export`` artefacts for named layouts, and some code comes as a module
of StableHLO: from a program whose devices are a lab, or from a partitioner.

How: the module becomes an export as it is, unread.

Rule for maintainers: the types and layouts are the caller's to find out; nothing is changed here.

Paper: section 4.2 (registering computations).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import jax
import ml_dtypes
from jax import export as jax_export
from jax.core import ShapedArray
from jax.sharding import AbstractMesh, NamedSharding

from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.core.program.layout import Layout
from pathways_lab.runtime.arrays import dtype_of
from pathways_lab.runtime.devices import spec_of

_EXPORTED = jax_export.Exported
_WORDS = {
    "i1": "bool", "i2": "int2", "i4": "int4", "i8": "int8", "i16": "int16", "i32": "int32",
    "i64": "int64", "ui2": "uint2", "ui4": "uint4", "ui8": "uint8", "ui16": "uint16",
    "ui32": "uint32", "ui64": "uint64", "f16": "float16", "bf16": "bfloat16", "f32": "float32",
    "f64": "float64", "complex<f32>": "complex64", "complex<f64>": "complex128",
}  # fmt: skip
_NARROW = {
    name.replace("float", "f", 1).replace("_", ""): name
    for name in vars(ml_dtypes)
    if name.startswith("float")
}


def dtype_of_word(word: str) -> str | None:
    """JAX's name of an element type as MLIR writes it; None for one that JAX does not have."""
    return _WORDS.get(word) or _NARROW.get(word.lower())


def exported(
    module: bytes,
    name: str,
    ins: Sequence[ArrayType],
    outs: Sequence[ArrayType],
    placed: Sequence[Layout | None],
    devices: int,
    platform: str,
) -> jax_export.Exported:
    """The module as ``jax.export`` would have made it, a function of flat arguments to a list.

    module: a portable artefact.  placed: how each argument and result lies on the devices; None
    leaves it to the compiler.
    """
    kinds = (*ins, *outs)
    shardings: list[Any] = [None if layout is None else _named(layout) for layout in placed]
    assert len(shardings) == len(kinds)
    # JAX before 0.11 has a field that says that these are no older kind of shardings.
    older: Any = dict.fromkeys({"_has_named_shardings"} & {f.name for f in fields(_EXPORTED)}, True)
    return _EXPORTED(
        fun_name=name,
        in_tree=jax.tree.structure((tuple(ins), {}), is_leaf=lambda x: isinstance(x, ArrayType)),
        in_avals=tuple(map(_aval, ins)),
        out_tree=jax.tree.structure(list(outs), is_leaf=lambda x: isinstance(x, ArrayType)),
        out_avals=tuple(map(_aval, outs)),
        **older,
        _in_named_shardings=tuple(shardings[: len(ins)]),
        _out_named_shardings=tuple(shardings[len(ins) :]),
        in_shardings_hlo=(None,) * len(ins),
        out_shardings_hlo=(None,) * len(outs),
        nr_devices=devices,
        platforms=(platform,),
        ordered_effects=(),
        unordered_effects=(),
        disabled_safety_checks=(),
        mlir_module_serialized=module,
        calling_convention_version=jax_export.maximum_supported_calling_convention_version,
        module_kept_var_idx=tuple(range(len(ins))),
        uses_global_constants=False,
        _get_vjp=None,
    )


def _aval(kind: ArrayType) -> ShapedArray:
    return ShapedArray(kind.shape, dtype_of(kind.dtype))


def _named(layout: Layout) -> NamedSharding:
    sizes, names = [size for _, size in layout.mesh], [name for name, _ in layout.mesh]
    return NamedSharding(AbstractMesh(tuple(sizes), tuple(names)), spec_of(layout))
