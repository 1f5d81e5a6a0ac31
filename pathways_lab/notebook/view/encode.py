"""Changes of plots as one message: text as JSON, numbers as one block of bytes.

Problem: Bokeh's own patches pass every value through its property system, some
20 ms for an update of four panels; ten of them a second would cost a quarter of
a kernel.  A change is a name and columns, so it is sent as that.

Rule for maintainers: ``live.js`` reads exactly this.  Numbers are little-endian,
each column aligned to 8 bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pathways_lab.notebook.scene.plot import Append, Assign, Change, Columns

TYPES = {"float64", "float32", "uint8", "uint16", "int32"}
"""Types of numeric columns that a page has arrays for."""


def encode(changes: Iterable[Change]) -> tuple[list[dict[str, Any]], bytes]:
    """Plain descriptions of *changes*, and the bytes that they refer to.

    A column is either a list, or ``{"type", "offset", "length"}``.
    """
    block = bytearray()
    out: list[dict[str, Any]] = []
    for change in changes:
        if isinstance(change, Assign):
            value = change.value
            if isinstance(value, Mapping):
                value = list(value.items())
            out.append({"set": change.name, "attribute": change.attribute, "value": value})
            continue
        entry: dict[str, Any] = {"name": change.name, "columns": _columns(change.columns, block)}
        if isinstance(change, Append):
            entry["keep"] = change.keep
        out.append(entry)
    return out, bytes(block)


def _columns(columns: Columns, block: bytearray) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, column in columns.items():
        if not isinstance(column, np.ndarray):
            out[name] = column
            continue
        kind = column.dtype.name
        if kind not in TYPES:
            raise TypeError(f"the column {name!r} is {kind}; a page knows {sorted(TYPES)}")
        block.extend(bytes(-len(block) % 8))
        out[name] = {"type": kind, "offset": len(block), "length": len(column)}
        block.extend(np.ascontiguousarray(column).astype(column.dtype.newbyteorder("<")).tobytes())
    return out


def framed(message: Mapping[str, Any]) -> bytes:
    """A message as bytes: lengths of both parts (32 bits each, little-endian), text, its block."""
    fields = dict(message)
    block = fields.pop("block", b"")
    text = json.dumps(fields).encode()
    lengths = len(text).to_bytes(4, "little") + len(block).to_bytes(4, "little")
    return lengths + text + bytes(block)
