"""Descriptions of published values, which their takers read.

Problem: a handle, or a tree of them, goes to another client, which must know types, layouts and
structure, and must not run anything that the publisher wrote: a description is data.  So a tree
is made of dicts, lists, tuples, named tuples, None, numbers and text; classes of users' own are
not sent.  A named tuple (optimizers keep their memory in such) is sent by its name, and the taker
has its class: one that is no tuple, or that this process has not imported, is refused.

Rule for maintainers: a description comes from another client: all of it is checked, and an error
in it is a ValueError, TypeError, KeyError or RecursionError; no code is run for it.

Paper: section 4.2 (opaque handles), section 4.6 (ownership).
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.client.session import failures
from pathways_lab.client.session.handles import Handle
from pathways_lab.core.program.layout import Layout
from pathways_lab.transport.codec import pack, unpack

Kind = tuple[ArrayType, Layout]


@dataclass(frozen=True, slots=True)
class Place:
    """Where handle *number* of a published tree stands."""

    number: int


def describe(tree: Any) -> tuple[list[Handle], bytes]:
    """The handles of a tree, and the words for all of it.

    Raises TypeError for what is no handle and no plain container of them.
    """
    handles: list[Handle] = []
    shape = _shape(tree, handles)
    kinds: dict[Kind, int] = {}
    leaves = [kinds.setdefault((h.type, h.layout), len(kinds)) for h in handles]
    packed = [[kind.shape, kind.dtype, kind.weak, pack(layout)] for kind, layout in kinds]
    return handles, json.dumps({"kinds": packed, "leaves": leaves, "shape": shape}).encode()


def _shape(tree: Any, handles: list[Handle]) -> Any:
    if isinstance(tree, Handle):
        handles.append(tree)
        return len(handles) - 1
    if tree is None:
        return None
    if type(tree) in (bool, int, float, str):
        return ["value", tree]
    if type(tree) in (list, tuple):
        return [type(tree).__name__, [_shape(each, handles) for each in tree]]
    if _is_named_tuple(type(tree)) and _imported(_name(type(tree))) is type(tree):
        return [_name(type(tree)), [_shape(each, handles) for each in tree]]
    if type(tree) is dict and {type(key) for key in tree} in (set(), {str}, {int}):
        return ["dict", [[key, _shape(each, handles)] for key, each in tree.items()]]
    raise TypeError(
        "handles can be published, numbers and text, and dicts (with text or whole numbers as"
        f" keys), lists, tuples and named tuples of them, not {type(tree).__name__}: put arrays on"
        " a slice (pw.device_put); of other containers publish jax.tree.leaves(tree), and whoever"
        " takes them calls jax.tree.unflatten with the structure"
    )


def _is_named_tuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _imported(name: str) -> Any:
    """The thing of this name in a module of this process, without running any code; else None."""
    module, _, word = name.partition(":")
    return vars(sys.modules[module]).get(word) if module in sys.modules else None


def read(written: bytes, count: int) -> tuple[list[Kind], Any]:
    """Type and layout of each of *count* handles, and the tree, with their places as leaves.

    Raises what the module's docstring names.
    """
    told = json.loads(written)
    kinds = [_kind(*each) for each in told["kinds"]]
    leaves = [kinds[_below(number, len(kinds))] for number in told["leaves"]]
    if len(leaves) != count:
        raise ValueError(f"{count} handles have {len(leaves)} descriptions")
    return leaves, _tree(told["shape"], count)


def _kind(shape: Any, dtype: Any, weak: Any, layout: Any) -> Kind:
    sizes = tuple(int(size) for size in shape)
    return ArrayType(sizes, str(dtype), bool(weak)), unpack(Layout, layout)


def _below(number: Any, count: int) -> int:
    if type(number) is not int or not 0 <= number < count:
        raise ValueError(f"{number!r} is none of {count}")
    return number


def _tree(shape: Any, count: int) -> Any:
    if shape is None:
        return None
    if type(shape) is int:
        return Place(_below(shape, count))
    kind, entries = shape
    if kind == "value":
        if type(entries) not in (bool, int, float, str):
            raise TypeError(f"{entries!r} is no number and no text")
        return entries
    if kind == "dict":
        return {_key(key): _tree(each, count) for key, each in entries}
    made = [_tree(each, count) for each in entries]
    if kind == "list":
        return made
    if kind == "tuple":
        return tuple(made)
    if ":" not in str(kind):
        raise ValueError(f"there is no {kind!r}")
    return _named(str(kind), made)


def _named(name: str, fields: list[Any]) -> Any:
    """A named tuple.  Raises PathwaysError when its class is not there."""
    kind = _imported(name)
    module, _, word = name.partition(":")
    if kind is None:
        raise failures.refused(
            f"a part of it is a {word} of {module}, which is not imported here",
            f"import {module.partition('.')[0]} (or define {word} as before), and take it again",
        )
    if not _is_named_tuple(kind) or len(kind._fields) != len(fields):
        raise ValueError(f"{name!r} is no named tuple of {len(fields)} fields")
    return tuple.__new__(kind, fields)


def _key(key: Any) -> str | int:
    if isinstance(key, str | int):
        return key
    raise TypeError(f"{key!r} is not a key")
