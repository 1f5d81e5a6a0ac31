"""Element types: JAX's names, the protocol's numbers, MLIR's words.

Rule for maintainers: plain tables; what is in none of them is refused by name.
"""

from __future__ import annotations

from pathways_lab.client.code.modules import dtype_of_word
from pathways_lab.door.protocol.messages import message

_KINDS = {
    "bool": "PRED", "int2": "S2", "int4": "S4", "int8": "S8", "int16": "S16", "int32": "S32",
    "int64": "S64", "uint2": "U2", "uint4": "U4", "uint8": "U8", "uint16": "U16",
    "uint32": "U32", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32",
    "float64": "F64", "complex64": "C64", "complex128": "C128", "float8_e3m4": "F8E3M4",
    "float8_e4m3": "F8E4M3", "float8_e4m3fn": "F8E4M3FN", "float8_e4m3b11fnuz": "F8E4M3B11FNUZ",
    "float8_e4m3fnuz": "F8E4M3FNUZ", "float8_e5m2": "F8E5M2", "float8_e5m2fnuz": "F8E5M2FNUZ",
    "float8_e8m0fnu": "F8E8M0FNU", "float4_e2m1fn": "F4E2M1FN", "string": "STRING",
}  # fmt: skip


class UnknownType(ValueError):
    """An element type that the door does not carry."""


def of_kind(proto: object) -> str:
    """JAX's name of a ``DTypeProto``."""
    number = getattr(proto, "kind", 0)
    try:
        word = message("DTypeProto").Kind.Name(number).removeprefix("KIND_")
    except ValueError:
        word = str(number)
    for name, kind in _KINDS.items():
        if kind == word:
            return name
    raise UnknownType(f"arrays of the type {word} are not served")


def proto(name: str) -> object:
    """The ``DTypeProto`` of a type by JAX's name."""
    kinds = message("DTypeProto")
    return kinds(kind=kinds.Kind.Value(f"KIND_{_KINDS[name]}"))


def token() -> object:
    """The ``DTypeProto`` of a token."""
    kinds = message("DTypeProto")
    return kinds(kind=kinds.Kind.Value("KIND_TOKEN"))


def of_word(word: str) -> str:
    """JAX's name of an element type as MLIR writes it."""
    name = dtype_of_word(word)
    if name in _KINDS:
        return name
    raise UnknownType(f"arrays of the type {word} are not served")
