"""The index of a checkpoint: which values it has, by name, as Orbax writes it.

Problem: a checkpoint outlives the code that made it, so it says all that readers must know of its
values, in files that Orbax writes and reads too.

How: ``_METADATA`` has an entry for each leaf of the pytree, and for each empty node, with the keys
that lead there.  The keys joined by points are the name of the value and the folder of its array.
Shapes and types are kept with the arrays; a file of its own has the kinds of random keys.

Rule for maintainers: others have written an index that is read; an entry that nobody here knows
is an array until its folder says otherwise.

Paper: none; Orbax's format of checkpoints.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pathways_lab.client.functions.array_types import ArrayType, host_type
from pathways_lab.client.session import failures
from pathways_lab.client.session.handles import Handle
from pathways_lab.runtime import arrays, zarr_arrays

INDEX = "_METADATA"
NUMBERS = (bool, int, float, complex)
_TEXTS, _RANDOM_KEYS = "_strings.json", "array_metadatas/process_0"
FILES = (
    *(INDEX, "_CHECKPOINT_METADATA", "_sharding", _TEXTS),
    *("array_metadatas", "manifest.ocdbt", "commit_success.txt"),
)
"""Names of files beside the arrays, here or in Orbax's own checkpoints."""
_TEXT, _NUMBER, _ARRAY = "string", "scalar", "np.ndarray"
_EMPTY: dict[str, Callable[[], Any]] = {
    "None": lambda: None, "NamedTuple": lambda: None, "Dict": dict, "List": list, "Tuple": tuple,
}  # fmt: skip
_PLACE, _NAME = 1, 2

Key = tuple[str, int]
"""One step of the way to a value: its text, and whether it is a place or a name."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A leaf or an empty node.

    keys: the way to it.  kind: Orbax's word for it.  type: of an array or a number.
    constant: the value of what is kept in the index itself.
    """

    keys: tuple[Key, ...]
    kind: str
    type: ArrayType | None = None
    constant: Any = None

    @property
    def name(self) -> str:
        """No other value of the checkpoint has it."""
        return ".".join(text for text, _ in self.keys)

    @property
    def is_empty(self) -> bool:
        return self.kind in _EMPTY

    @property
    def is_number(self) -> bool:
        """Whether it comes back as a Python number."""
        return self.kind == _NUMBER


@dataclass(frozen=True, slots=True)
class Index:
    """place: of all arrays, a spec of TensorStore's."""

    folder: Path
    entries: tuple[Entry, ...]
    place: dict[str, Any]


def flatten(values: Any) -> list[tuple[Entry, Any]]:
    """The entries of a pytree, and what is there."""
    paths = jax.tree.leaves_with_path(values, is_leaf=_is_empty)
    return [(_entry(path, leaf), leaf) for path, leaf in paths]


def nested(found: Iterable[tuple[Sequence[Key], Any]]) -> Any:
    """A pytree of dicts and lists with these values."""
    below: dict[Key, list[tuple[Sequence[Key], Any]]] = collections.defaultdict(list)
    for keys, value in found:
        if not keys:
            return value
        below[keys[0]].append((keys[1:], value))
    if below and all(kind == _PLACE for _, kind in below):
        return [nested(below[key]) for key in sorted(below, key=lambda key: int(key[0]))]
    return {text: nested(values) for (text, _), values in below.items()}


def type_of(leaf: Any) -> ArrayType | None:
    """The type of a value, or of a description of one; None for anything else."""
    if isinstance(leaf, NUMBERS):
        leaf = np.asarray(leaf)
    if isinstance(leaf, Handle) or host_type(leaf) is not None:
        return ArrayType(tuple(leaf.shape), str(leaf.dtype), False)
    return None


def _entry(path: Sequence[Any], leaf: Any) -> Entry:
    places = jax.tree_util.SequenceKey | jax.tree_util.FlattenedIndexKey
    keys = tuple(
        (jax.tree_util.keystr((key,), simple=True), _PLACE if isinstance(key, places) else _NAME)
        for key in path
    )
    if _is_empty(leaf):
        known: dict[type, str] = {dict: "Dict", list: "List", tuple: "Tuple"}
        return Entry(keys, known.get(type(leaf), "None"))
    kind = _NUMBER if isinstance(leaf, bool | int | float) else _ARRAY
    return Entry(keys, kind, type_of(leaf))


def _is_empty(node: Any) -> bool:
    return not jax.tree.leaves(node, is_leaf=lambda each: each is not node)


# --- files ----------------------------------------------------------------------------------


def write(folder: Path, entries: Iterable[Entry]) -> None:
    """The files of an index.  Raises OSError."""
    tree, random_keys = {}, []
    for each in entries:
        value = {"value_type": each.kind, "skip_deserialize": each.is_empty}
        keys = [{"key": text, "key_type": kind} for text, kind in each.keys]
        path = str(tuple(text for text, _ in each.keys))
        tree[path] = {"key_metadata": keys, "value_metadata": value}
        if each.type is not None and arrays.is_key(each.type.dtype):
            shape = each.type.shape + arrays.element_of(each.type.dtype).trailing
            about = {"param_name": each.name, "write_shape": shape, "chunk_shape": shape}
            how = {"random_key_impl": arrays.key_implementation(each.type.dtype)}
            random_keys.append({"array_metadata": about | {"ext_metadata": how}})
    index = {
        "tree_metadata": tree,
        "use_ocdbt": False,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    (folder / INDEX).write_text(json.dumps(index, indent=1))
    if random_keys:
        file = folder / _RANDOM_KEYS
        file.parent.mkdir()
        file.write_text(json.dumps({"array_metadatas": random_keys}, indent=1))


def read(folder: Path) -> Index:
    """The index of a checkpoint, or of the only item of one that has items.

    Raises PathwaysError when there is none that can be read.
    """
    items = sorted(file.parent for file in folder.glob(f"*/{INDEX}"))
    if len(items) == 1 and not (folder / INDEX).exists():
        folder = items[0]
    try:
        about = json.loads((folder / INDEX).read_text())
        texts = _loaded(folder / _TEXTS)
        random_keys = {
            each["array_metadata"]["param_name"]: each["array_metadata"]["ext_metadata"]
            for each in _loaded(folder / _RANDOM_KEYS).get("array_metadatas", ())
        }
        place = zarr_arrays.spec_of(folder, about)
        entries = []
        for given in about["tree_metadata"].values():
            keys = tuple((str(key["key"]), key["key_type"]) for key in given["key_metadata"])
            entry = Entry(keys, given["value_metadata"]["value_type"])
            how = (random_keys.get(entry.name) or {}).get("random_key_impl")
            entries.append(_described(entry, place, texts, how))
    except ModuleNotFoundError as error:
        remedy = f"pip install {zarr_arrays.READER}, here and where the hosts of a lab run"
        raise failures.refused(str(error), remedy) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise failures.refused(
            f"{str(folder)!r} is not a checkpoint: {error}", _elsewhere(folder, items)
        ) from error
    return Index(folder, tuple(entries), place)


def _described(entry: Entry, place: Any, texts: Any, random_keys: str | None) -> Entry:
    """With the type or the value that is elsewhere."""
    if entry.is_empty:
        return Entry(entry.keys, entry.kind, constant=_EMPTY[entry.kind]())
    if entry.kind == _TEXT:
        return Entry(entry.keys, entry.kind, constant=texts[entry.name])
    shape, dtype = zarr_arrays.described(zarr_arrays.within(place, entry.name))
    if random_keys is not None:
        dtype = arrays.key_name(random_keys)
        shape = shape[: len(shape) - len(arrays.element_of(dtype).trailing)]
    return Entry(entry.keys, entry.kind, ArrayType(shape, dtype))


def _loaded(file: Path) -> Any:
    return json.loads(file.read_text()) if file.exists() else {}


def _elsewhere(folder: Path, items: Sequence[Path]) -> str:
    """The remedy where there is no index."""
    if items:
        return f"give the folder of one item, for example {str(items[0])!r}"
    if (folder / "checkpoint.json").exists():
        return (
            "an earlier release wrote it: its 'checkpoint.json' names its arrays, which numpy.load"
            " reads"
        )
    return "give the folder that pw.save or Orbax was given"
