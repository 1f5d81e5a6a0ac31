"""Descriptions of published values, which their takers read.

Problem: a handle, or a tree of them, goes to another client, which must know types, layouts and
structure, and must not run anything that the publisher wrote: a description is data.  So a tree
is made of dicts, lists, tuples and None; classes of users' own are not sent.

Rule for maintainers: a description comes from another client: all of it is checked, and an error
in it is a ValueError, TypeError, KeyError or RecursionError.

Paper: section 4.2 (opaque handles), section 4.6 (ownership).
"""

from __future__ import annotations

import json
from typing import Any

from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.client.session.handles import Handle
from pathways_lab.core.program.layout import Layout
from pathways_lab.transport.codec import pack, unpack

Kind = tuple[ArrayType, Layout]


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
    if type(tree) in (list, tuple):
        return [type(tree).__name__, [_shape(each, handles) for each in tree]]
    if type(tree) is dict and {type(key) for key in tree} in (set(), {str}, {int}):
        return ["dict", [[key, _shape(each, handles)] for key, each in tree.items()]]
    raise TypeError(
        "handles can be published, and dicts (with text or whole numbers as keys), lists and tuples"
        f" of them, not {type(tree).__name__}: publish jax.tree.leaves(tree), and whoever takes"
        " them calls jax.tree.unflatten with the structure"
    )


def read(written: bytes, count: int) -> tuple[list[Kind], Any]:
    """Type and layout of each of *count* handles, and the tree, with their numbers as leaves.

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
        return _below(shape, count)
    kind, entries = shape
    if kind == "dict":
        return {_key(key): _tree(each, count) for key, each in entries}
    if kind not in ("list", "tuple"):
        raise ValueError(f"there is no {kind!r}")
    made = [_tree(each, count) for each in entries]
    return made if kind == "list" else tuple(made)


def _key(key: Any) -> str | int:
    if isinstance(key, str | int):
        return key
    raise TypeError(f"{key!r} is not a key")
