"""Operators and array methods on handles: ``h + 1``, ``h[0]``, ``h.mean()``.

Problem: results of programs should feel like arrays.  Outside of a program
each operator is a program of one node on the handle's slice; inside one, the
handle becomes an input of the program and the operator part of it.

Rule for maintainers: the table is the whole list; each entry is a compiled
function made once.  Unknown operands are left to the other side, as in JAX.

Paper: section 3 (without a program every call is one of its own).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import jax
import numpy as np
from jax.core import Tracer

from pathways_lab.client.functions import scopes
from pathways_lab.client.session import in_jax

_BINARY = {
    "divmod": divmod,
    **{
        name: getattr(operator, f"__{name}__")
        for name in (
            *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
            *("and", "or", "xor", "lshift", "rshift"),
        )
    },
}
_COMPARE = {name: getattr(operator, f"__{name}__") for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_UNARY = {name: getattr(operator, f"__{name}__") for name in ("neg", "pos", "abs", "invert")}
_METHODS = (
    *("all", "any", "argmax", "argmin", "argpartition", "argsort", "astype", "clip", "conj"),
    *("conjugate", "cumprod", "cumsum", "diagonal", "dot", "flatten", "max", "mean", "min"),
    *("prod", "ptp", "ravel", "repeat", "reshape", "round", "__round__", "searchsorted", "sort"),
    *("squeeze", "std", "sum", "swapaxes", "take", "trace", "transpose", "var", "copy", "view"),
)
_TAKES_ARRAYS = frozenset(("dot", "searchsorted", "take"))
"""Those to which a list means an array, as in NumPy; to the others it means sizes or axes."""
_PROPERTIES = ("T", "mT", "real", "imag")
_UPDATES = (
    *("add", "apply", "divide", "get", "max", "min", "mul", "multiply", "power", "set"),
    "subtract",
)


class Operators:
    """The operators that a handle inherits."""

    # By identity, although == is elementwise: asyncio keeps awaitables in dicts.
    __hash__ = object.__hash__

    def __getitem__(self, index: Any) -> Any:
        pattern, dynamic = _split(_positions(self, index))
        if not dynamic:
            # One function for all numbers, as in JAX: a loop over rows does not make one for each.
            pattern, dynamic = _split(index, numbers=True)
        return _apply("getitem", _getitem, self, *dynamic, spec=pattern)

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise TypeError("handles do not change in place: handle = handle.at[index].set(value)")

    @property
    def at(self) -> At:
        """As ``jax.Array.at``: ``h.at[0].set(1)`` is another handle; this one stays as it is."""
        return At(self)


class At:
    """Updates of a handle, as of JAX's arrays: ``handle.at[index].set(value)``."""

    def __init__(self, array: Operators) -> None:
        self._array = array

    def __getitem__(self, index: Any) -> Updates:
        return Updates(self._array, index)


class Updates:
    """The object of ``handle.at[index]``: ``set``, ``add``, ``get`` and the others of JAX."""

    def __init__(self, array: Operators, index: Any) -> None:
        self._array = array
        self._index = index


def _apply(name: str, function: Callable[..., Any], *operands: Any, **options: Any) -> Any:
    """*function* of the operands, as a node of whatever the call stands in."""
    scope = scopes.for_handles()
    if scopes.outermost() and any(map(_is_jax, operands)):
        return function(*map(scope.lift, operands), **options)
    return scope.apply(name, function, operands, options)


def _is_jax(value: Any) -> bool:
    """Whether it is a stand-in of JAX's, or an array of its own on the lab."""
    if isinstance(value, Operators):
        return False
    return isinstance(value, Tracer) or (in_jax.door is not None and in_jax.door.holds(value))


def _is_operand(value: Any) -> bool:
    kinds = (Operators, jax.Array, np.ndarray, np.generic, bool, int, float, complex)
    return isinstance(value, kinds)


def _binary(name: str, function: Callable[[Any, Any], Any], swapped: bool) -> Any:
    def method(self: Any, other: Any) -> Any:
        if not _is_operand(other):
            return NotImplemented
        if name == "pow" and isinstance(other, int | np.integer) and not swapped:
            # Part of the code, as in JAX: exact, and refused where there is no such power.
            return _apply(name, _power, self, by=int(other))
        operands = (other, self) if swapped else (self, other)
        return _apply(name, function, *operands)

    return method


def _power(array: Any, *, by: int) -> Any:
    return array**by


def _unary(name: str, function: Callable[[Any], Any]) -> Any:
    return lambda self: _apply(name, function, self)


def _method(name: str) -> Any:
    def call(array: Any, *dynamic: Any, spec: tuple[Any, ...]) -> Any:
        pattern, names = spec
        return _called(getattr(array, name), pattern, names, dynamic)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        # NumPy's functions pass ``out=None`` to methods of this name.
        if kwargs.get("out", ...) is None:
            del kwargs["out"]
        given = (*args, *kwargs.values())
        if name in _TAKES_ARRAYS:
            given = tuple([np.asarray(g) if isinstance(g, list) else g for g in given])
        pattern, dynamic = _split(given)
        return _apply(name, call, self, *dynamic, spec=(pattern, tuple(kwargs)))

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"As ``jax.Array.{name}``, on the handle's slice."
    return method


def _update(name: str) -> Any:
    def call(array: Any, *dynamic: Any, spec: tuple[Any, ...]) -> Any:
        place, pattern, names = spec
        rest = iter(dynamic)
        index = tuple(_joined(place, rest))
        return _called(getattr(array.at[index], name), pattern, names, rest)

    def method(self: Updates, *args: Any, **kwargs: Any) -> Any:
        place, where = _split(_positions(self._array, self._index), numbers=True)
        values, arrays = _split(args, numbers=True)
        named, more = _split(tuple(kwargs.values()))
        spec = place, (*values, *named), tuple(kwargs)
        return _apply(f"at.{name}", call, self._array, *where, *arrays, *more, spec=spec)

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"As ``jax.Array.at[index].{name}``, on the handle's slice."
    return method


def _called(
    method: Callable[..., Any],
    pattern: tuple[Any, ...],
    names: tuple[str, ...],
    dynamic: Iterable[Any],
) -> Any:
    """*method* of what was split; the last arguments have *names*."""
    given = _joined(pattern, dynamic)
    named = len(given) - len(names)
    return method(*given[:named], **dict(zip(names, given[named:], strict=True)))


def _property(name: str) -> Any:
    def get(array: Any) -> Any:
        return getattr(array, name)

    return property(lambda self: _apply(name, get, self), doc=f"As ``jax.Array.{name}``.")


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


for _name, _function in _BINARY.items():
    setattr(Operators, f"__{_name}__", _binary(_name, _function, swapped=False))
    setattr(Operators, f"__r{_name}__", _binary(_name, _function, swapped=True))
for _name, _function in _COMPARE.items():
    setattr(Operators, f"__{_name}__", _binary(_name, _function, swapped=False))
for _name, _one in _UNARY.items():
    setattr(Operators, f"__{_name}__", _unary(_name, _one))
for _name in _METHODS:
    setattr(Operators, _name, _method(_name))
for _name in _PROPERTIES:
    setattr(Operators, _name, _property(_name))
for _name in _UPDATES:
    setattr(Updates, _name, _update(_name))


# --- patterns: what is static and what is an array --------------------------------------

_ARRAY = "array"
_SLICE = "slice"


def _positions(array: Any, index: Any) -> tuple[Any, ...]:
    """An index whose masks are the places where they are true.

    How many those are decides the result's shape: outside of programs a mask that is a handle is
    waited for, as JAX waits for its arrays.
    """
    entries = index if isinstance(index, tuple) else (index,)
    entries = tuple(np.asarray(each) if isinstance(each, list) else each for each in entries)
    if scopes.outermost():
        entries = tuple(
            np.asarray(each) if isinstance(each, Operators) and _is_mask(each) else each
            for each in entries
        )
    axes = [_axes(each) for each in entries]
    found: list[Any] = []
    for number, each in enumerate(entries):
        if not (isinstance(each, jax.Array | np.ndarray) and _is_mask(each)):
            found.append(each)
            continue
        after = any(other is Ellipsis for other in entries[:number])
        first = array.ndim - sum(axes[number:]) if after else sum(axes[:number])
        sizes = array.shape[first : first + each.ndim]
        if each.shape != sizes:
            raise IndexError(
                f"a mask of shape {each.shape} does not fit: it stands for axes of sizes {sizes}"
            )
        found += np.nonzero(each)
    return tuple(found)


def _is_mask(entry: Any) -> bool:
    return bool(entry.dtype == bool and entry.ndim)


def _axes(entry: Any) -> int:
    """How many axes of the array an entry of an index stands for, besides an ellipsis."""
    if entry is None or entry is Ellipsis:
        return 0
    array = isinstance(entry, Operators | jax.Array | np.ndarray)
    return entry.ndim if array and _is_mask(entry) else 1


def _split(given: Any, numbers: bool = False) -> tuple[tuple[Any, ...], list[Any]]:
    """Arguments or an index as a hashable pattern, and the arrays (and *numbers*) in it."""
    pattern: list[Any] = []
    dynamic: list[Any] = []
    for entry in given if isinstance(given, tuple) else (given,):
        if isinstance(entry, slice):
            pattern.append((_SLICE, entry.start, entry.stop, entry.step))
        elif isinstance(entry, Operators | jax.Array | np.ndarray):
            pattern.append((_ARRAY,))
            dynamic.append(entry)
        elif numbers and isinstance(entry, int | np.integer) and not isinstance(entry, bool):
            pattern.append((_ARRAY,))
            dynamic.append(int(entry))
        elif numbers and isinstance(entry, float | complex | np.inexact):
            pattern.append((_ARRAY,))
            dynamic.append(entry)
        else:
            pattern.append(_hashable(entry))
    return tuple(pattern), dynamic


def _joined(pattern: tuple[Any, ...], dynamic: Iterable[Any]) -> list[Any]:
    """The inverse of :func:`_split`."""
    rest = iter(dynamic)
    joined: list[Any] = []
    for entry in pattern:
        if isinstance(entry, tuple) and entry[:1] == (_SLICE,):
            joined.append(slice(*entry[1:]))
        elif entry == (_ARRAY,):
            joined.append(next(rest))
        else:
            joined.append(entry)
    return joined


def _getitem(array: Any, *dynamic: Any, spec: tuple[Any, ...]) -> Any:
    return array[tuple(_joined(spec, dynamic))]
