"""A notebook cell as one program.

Problem: a cell is not a function: it reads and assigns names, and changes
lists and dicts in place.  The arrays and handles that it reads become inputs,
also inside of containers; what it assigns becomes handles; containers that it
changed are changed only once the program has been captured and submitted, so
that a cell that fails leaves nothing behind.  Attributes and names that the user's
own objects and functions read are part of the program as Python values are: when one
has changed, the cell is captured again.

Rule for maintainers: knows nothing of IPython: names and values come in as a
dict.  The walks over values are deterministic, so that a captured cell can be
run again on other values of the same types.

Paper: section 3 (the program tracer).
"""

from __future__ import annotations

import marshal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from types import FunctionType, SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from pathways_lab.client.code.source_lines import is_own
from pathways_lab.client.functions import array_types
from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.client.functions.traced_function import read_from_outside
from pathways_lab.client.lab.devices import OnSlices, Slice
from pathways_lab.client.program.capture import Capture
from pathways_lab.client.program.graph import Prepared, Ref
from pathways_lab.client.program.program import AHEAD, CapturedProgram, How, input_item
from pathways_lab.client.session.handles import Handle
from pathways_lab.runtime.jax_private import trace_context

Names = dict[str, Any]
_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))
_WRITTEN = {bool, int, float, complex, str, bytes, type(None)}
"""Types of which whole containers are taken in at once."""


@dataclass(frozen=True)
class _Known:
    """Container *index* among those that the cell could reach."""

    index: int


@dataclass(frozen=True)
class _Given:
    """Input leaf *index*, returned untouched."""

    index: int


class _Reads:
    """The values that a cell reads, walked once: array leaves, containers, and the rest as a key.

    state: what is reached through objects and functions; it changes without a new object.
    """

    def __init__(self, values: Names) -> None:
        self.leaves: list[Any] = []
        self.labels: list[str] = []
        self.containers: list[Any] = []
        self.pattern: list[Any] = []
        self.state: list[Any] = []
        self.kept: list[Any] = []
        self._seen: dict[int, int] = {}
        self._reached: set[int] = set()
        for name in sorted(values):
            self._walk(values[name], name)

    def _walk(self, value: Any, label: str) -> None:
        if id(value) in self._seen and not isinstance(value, _PLAIN):
            self.pattern.append(("again", self._seen[id(value)]))
            return
        self._seen[id(value)] = len(self._seen)
        kind = type(value)
        if is_array(value):
            self.leaves.append(value)
            self.labels.append(label)
            self.pattern.append("array")
        elif kind in (list, dict):
            self.containers.append(value)
            self.pattern.append((kind, len(value), written := _written(value)))
            if written is not None:
                return
            entries = enumerate(value) if kind is list else value.items()
            for key, entry in tuple(entries):
                self.pattern.append(key if kind is dict else None)
                self._walk(entry, f"{label}[{key!r}]")
        elif kind is tuple and (written := _written(value)) is not None:
            self.pattern.append((kind, written))
        else:
            parts = _parts(value)
            if parts is not None:
                self.pattern.append((kind, parts[1]))
                for number, entry in enumerate(parts[0]):
                    self._walk(entry, f"{label}.{number}")
            elif isinstance(value, _PLAIN):
                self.pattern.append((kind, value))
            else:
                # Known by identity; kept, so that the identity stays its own.
                self.kept.append(value)
                self.pattern.append((kind, id(value)))
                self._reach(value)

    def _reach(self, value: Any) -> None:
        """Values that the user's own code may read through *value*; arrays count by identity."""
        todo = [value]
        while todo:
            each = todo.pop()
            if id(each) in self._reached:
                continue
            self._reached.add(id(each))
            if (written := _written(each)) is not None:
                self.state.append(written)
                continue
            for name, part in _reachable(each):
                if isinstance(part, _PLAIN):
                    self.state.append((name, type(part), repr(part)))
                else:
                    self.kept.append(part)
                    self.state.append((name, type(part), id(part)))
                    todo.append(part)

    @property
    def key(self) -> Any:
        """Equal keys: the cell can be run again without capturing it anew."""
        kinds = [
            (leaf.type, leaf.slice, leaf.layout) if isinstance(leaf, Handle) else _type(leaf)
            for leaf in self.leaves
        ]
        return repr(self.pattern), tuple(kinds), trace_context()


def _written(value: Any) -> bytes | None:
    """The content of a container of plain values, in short; None for anything else.

    Equal for equal values of equal types in the same order.  A million of them takes some
    50 ms, and one by one a hundred times as long, at every run of a cell that reads them.
    """
    if isinstance(value, dict):
        parts = [*value, *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        parts = list(value)
    else:
        return None
    if not _WRITTEN.issuperset(map(type, parts)):
        return None
    # Version 2 does not look at how often a value is referred to.
    return blake2b(marshal.dumps(parts, 2), digest_size=16).digest()


def _reachable(value: Any) -> Iterable[tuple[str, Any]]:
    """Named parts of a container, or of an object or a function of the user's own."""
    if isinstance(value, dict):
        return [(repr(key), part) for key, part in tuple(value.items())]
    if isinstance(value, list | tuple | set | frozenset):
        return [("", part) for part in value]
    if isinstance(value, partial):
        return [("", value.func), ("", value.args), ("", value.keywords)]
    if isinstance(value, FunctionType):
        return read_from_outside(value).items() if is_own(value.__code__.co_filename) else ()
    kind = value if isinstance(value, type) else type(value)
    return [*getattr(value, "__dict__", {}).items(), ("", kind)] if _is_own(kind) else ()


def _is_own(kind: type) -> bool:
    """Whether the user has written a class, or fills its objects."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind is SimpleNamespace or kind.__module__ == "__main__" or is_own(file or "<frozen")


def is_array(value: Any) -> bool:
    """Whether a value becomes an input of a program: a handle or an array, not a number."""
    return isinstance(value, Handle | jax.Array) or (
        isinstance(value, np.ndarray) and array_types.host_type(value) is not None
    )


def _type(leaf: Any) -> ArrayType:
    kind = leaf.type if isinstance(leaf, Handle) else array_types.host_type(leaf)
    assert kind is not None, "only arrays are leaves"
    return kind


def _parts(value: Any) -> tuple[list[Any], Any] | None:
    """The children of a pytree of any other kind, one level deep; None for a leaf."""
    try:
        children, tree = jax.tree.flatten(value, is_leaf=lambda x: x is not value)
    except (TypeError, ValueError):
        return None
    return None if jax.tree_util.treedef_is_leaf(tree) else (children, tree)


def _rebuilt(value: Any, change: Callable[[Any], Any | None], memo: dict[int, Any]) -> Any:
    """A copy of *value* with some parts replaced: *change* answers None to descend."""
    changed = change(value)
    if changed is not None:
        return changed
    if id(value) in memo:
        return memo[id(value)]
    kind = type(value)
    if kind is list:
        copy: Any = memo.setdefault(id(value), [])
        copy += [_rebuilt(entry, change, memo) for entry in value]
        return copy
    if kind is dict:
        copy = memo.setdefault(id(value), {})
        copy.update((key, _rebuilt(entry, change, memo)) for key, entry in value.items())
        return copy
    parts = _parts(value)
    if parts is None:
        return value
    children = [_rebuilt(entry, change, memo) for entry in parts[0]]
    if all(new is old for new, old in zip(children, parts[0], strict=True)):
        return value
    return jax.tree.unflatten(parts[1], children)


class CapturedCell:
    """A captured cell, for the types of what it read."""

    def __init__(
        self,
        run: Callable[[Names], None],
        values: Names,
        reads: _Reads,
        name: str,
        on: Slice | None,
        how: How,
    ) -> None:
        self.name = name
        self.inputs = tuple(reads.labels)
        self.state = reads.state
        # Objects that the key knows by identity.
        self._kept = reads.kept
        inputs = [
            input_item(index, leaf, _type(leaf), label)
            for index, (leaf, label) in enumerate(zip(reads.leaves, reads.labels, strict=True))
        ]

        def body(standins: list[Any]) -> Any:
            given = dict(zip(map(id, reads.leaves), standins, strict=True))
            memo: dict[int, Any] = {}
            names: Names = {
                key: _rebuilt(value, lambda x: given.get(id(x)), memo)
                for key, value in values.items()
            }
            copies = [memo[id(container)] for container in reads.containers]
            before = [_entries(copy) for copy in copies]
            bound = dict(names)
            run(names)
            numbers = {id(standin): index for index, standin in enumerate(standins)}
            places = {id(copy): index for index, copy in enumerate(copies)}

            def mark(value: Any) -> Any | None:
                if isinstance(value, Tracer) and id(value) in numbers:
                    return _Given(numbers[id(value)])
                return _Known(places[id(value)]) if id(value) in places else None

            marks: dict[int, Any] = {}
            assigned = {
                key: _rebuilt(value, mark, marks)
                for key, value in names.items()
                if not key.startswith("__") and (key not in bound or value is not bound[key])
            }
            changed = {
                index: _rebuilt(_shallow(copy), mark, marks)
                for index, copy in enumerate(copies)
                if not _same(before[index], _entries(copy))
            }
            return assigned, changed

        captured = Capture(name).run(
            body,
            [item.type for item in inputs],
            [item.slice if isinstance(item, Ref) else None for item in inputs],
        )
        self.program = CapturedProgram(captured, inputs, on, how)

    @property
    def released(self) -> bool:
        """Whether a slice that it uses was released."""
        return self.program.released

    def run(self, reads: _Reads) -> Names:
        """Submit one run; what the cell assigns, and the changes of its containers."""
        assigned, changed = self.program.run(reads.leaves)

        def restore(value: Any) -> Any | None:
            if isinstance(value, _Given):
                return reads.leaves[value.index]
            return reads.containers[value.index] if isinstance(value, _Known) else None

        memo: dict[int, Any] = {}
        for index, content in changed.items():
            container, new = reads.containers[index], _rebuilt(content, restore, memo)
            if isinstance(container, list):
                container[:] = new
            else:
                container.clear()
                container.update(new)
        return {key: _rebuilt(value, restore, memo) for key, value in assigned.items()}


def _entries(container: Any) -> list[Any]:
    if isinstance(container, list):
        return list(container)
    return [part for pair in container.items() for part in pair]


def _same(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True))


def _shallow(container: Any) -> Any:
    """The same entries in another container, which is not known as the cell's."""
    return list(container) if isinstance(container, list) else dict(container)


@dataclass(eq=False, repr=False)
class CellProgram:
    """A cell that can be run again and again: captured once per set of types it reads.

    run: executes the cell's code in the namespace that it is given: a dict that
        begins with what the cell reads, stand-ins in place of arrays, and ends
        with what it assigned besides.
    on: where operations run that nothing else gives a place.
    how: options of its lowering.
    """

    _run: Callable[[Names], None]
    name: str = "cell"
    _on: Slice | None = None
    _how: How = AHEAD
    _captured: OnSlices[Any, CapturedCell] = field(default_factory=OnSlices, init=False)
    last: CapturedCell | None = field(default=None, init=False)

    def capture(self, values: Names) -> CapturedCell:
        """The captured cell for what it reads now, without running it."""
        return self._find(values)[0]

    @property
    def ready(self) -> tuple[Prepared, ...]:
        """The programs that runs of the cell have come to."""
        return tuple(ready for cell in [*self._captured.values()] for ready in cell.program.ready)

    def __call__(self, values: Names) -> Names:
        """Run the cell as one program.

        values: every name that it reads, with its value.
        Returns every name that it assigns, with handles in place of arrays, at
        once; lists and dicts that it changed in place are changed.

        Raises PathwaysError with the cell's own line; then nothing has changed.
        """
        cell, reads = self._find(values)
        return cell.run(reads)

    def _find(self, values: Names) -> tuple[CapturedCell, _Reads]:
        reads = _Reads(values)
        cell = self._captured.get(reads.key)
        if cell is None or cell.state != reads.state:
            cell = CapturedCell(self._run, values, reads, self.name, self._on, self._how)
            self._captured.add(reads.key, cell)
        self.last = cell
        return cell, reads

    def ir(self) -> str:
        """Every stage of the program as text, as it was captured last."""
        return "(not captured yet)" if self.last is None else self.last.program.ir()

    def __repr__(self) -> str:
        return f"<cell program {self.name}>"
