"""Frozen dataclasses as plain data, and back: generic, checked, never pickle.

Problem: the messages, plans and records of the core must travel, and the
process that receives them must not run code of the sender's choice.  The type
hints of the dataclasses are the schema: a dataclass becomes the list of its
field values, preceded by its class name where more than one class is possible
(at the top, and in unions).

How: for each class the few lines that do it are written and compiled once, as
``dataclasses`` does with constructors: a loop over fields takes three times as long, and
every message is packed and unpacked.  Where these find a value wrong, or absent, the loop
does it again and says which.

Rule for maintainers: :func:`unpack` builds only the classes that the expected
type names, and checks every value on the way; an unknown or ill-typed value is
a :class:`CodecError` that names the field.  Numbers are finite, and lie where
``Annotated[int, Within(0, 9)]`` says.  No class is special here.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints, overload

T = TypeVar("T")
_Pack = Callable[[Any], Any]
_Unpack = Callable[[Any], Any]
_SCALARS = (int, float, str, bool, bytes)
_FEW = 4
"""So many entries are as soon checked one by one."""


PACKED = "packed"
"""``Annotated[Plan, PACKED]``: a field that travels as :func:`pack` gives it, its class first."""


class CodecError(ValueError):
    """A value that does not have the expected type."""


@dataclasses.dataclass(frozen=True, slots=True)
class Within:
    """Bounds of a number, or of the length of a text, bytes, sequence or map."""

    least: float
    most: float


def pack(value: Any) -> Any:
    """A dataclass instance as lists, strings, numbers, bytes, dicts, None.

    The class name comes first, so that :func:`unpack` can take a union of classes.
    """
    cls: type = type(value)
    return [cls.__name__, *_class_pack(cls)(value)]


def pack_fields(value: Any) -> dict[str, Any]:
    """The same as a map from field names: for a message that *is* the dataclass."""
    cls: type = type(value)
    packed: dict[str, Any] = _fields_pack(cls)(value)
    return packed


def unpack_fields(cls: type[T], plain: dict[str, Any]) -> T:
    """The inverse of :func:`pack_fields`; absent fields take their defaults, others are ignored.

    Raises CodecError.
    """
    kind: type = cls
    try:
        found: T = _fields_unpack(kind)(plain)
    except (CodecError, KeyError):
        found = _unpack_each(cls, plain)
    return found


def _unpack_each(cls: type[T], plain: dict[str, Any]) -> T:
    """The same, field by field."""
    kind: type = cls
    values = []
    for field in _fields_of(kind):
        if field.name in plain:
            values.append(field.checked(cls, plain[field.name]))
        elif field.default is not dataclasses.MISSING:
            values.append(field.default)
        else:
            raise CodecError(f"{cls.__name__}.{field.name} is missing")
    return cls(*values)


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    """packer: None when a value travels as it is.  default: MISSING when there is none."""

    name: str
    hint: Any
    packer: _Pack | None
    unpacker: _Unpack
    default: Any

    def checked(self, cls: type, plain: Any) -> Any:
        """Raises CodecError, with its name."""
        try:
            return self.unpacker(plain)
        except CodecError as error:
            raise CodecError(f"{cls.__name__}.{self.name}: {error}") from None

    @property
    def packed(self) -> str:
        """The expression that packs it."""
        own = f"value.{self.name}"
        return own if self.packer is None else f"pack_{self.name}({own})"

    @property
    def unpacked(self) -> str:
        """The expression that unpacks what ``own_`` and its name stands for."""
        return _unpacked(self.hint, f"own_{self.name}", f"unpack_{self.name}")


def _unpacked(hint: Any, own: str, unpacker: str) -> str:
    """The expression that unpacks what *own* stands for.

    unpacker: the name of what does it where it is not seen at a glance.
    """
    otherwise = f"{unpacker}({own})"
    origin, args = get_origin(hint), get_args(hint)
    if _is_union(hint) and len(args) == 2 and type(None) in args:
        (inner,) = (arg for arg in args if arg is not type(None))
        return f"None if {own} is None else {_unpacked(inner, own, unpacker)}"
    if _is_sequence(hint):
        return f"() if {own} == [] else {otherwise}"
    if origin in (dict, collections.abc.Mapping):
        return f"{{}} if {own} == {{}} else {otherwise}"
    kind, within = _bounds(hint)
    if kind is float and within is None:
        return f"{own} if type({own}) is float and {own} - {own} == 0.0 else {otherwise}"
    if kind in (int, float) and within is not None:
        known = f"type({own}) is {kind.__name__} and {within.least} <= {own} <= {within.most}"
        return f"{own} if {known} else {otherwise}"
    if kind in _SCALARS and within is None:
        return f"{own} if type({own}) is {kind.__name__} else {otherwise}"
    return otherwise


@functools.cache
def _fields_of(cls: type) -> tuple[_Field, ...]:
    if not dataclasses.is_dataclass(cls):
        raise CodecError(f"{cls.__name__} is not a dataclass")
    hints = get_type_hints(cls, include_extras=True)
    return tuple(
        _Field(f.name, hints[f.name], _packer(hints[f.name]), _unpacker(hints[f.name]), f.default)
        for f in dataclasses.fields(cls)
    )


def _written(parameter: str, lines: list[str], known: dict[str, Any]) -> Callable[[Any], Any]:
    """A function of these lines, which know these names."""
    exec("\n    ".join([f"def written({parameter}):", *lines]), known)
    written: Callable[[Any], Any] = known["written"]
    return written


def _known(cls: type) -> dict[str, Any]:
    """The class and what belongs to its fields, by the names that lines have for them."""
    known: dict[str, Any] = {"cls": cls}
    for field in _fields_of(cls):
        known[f"pack_{field.name}"], known[f"unpack_{field.name}"] = field.packer, field.unpacker
        known[f"default_{field.name}"] = field.default
    return known


@functools.cache
def _fields_pack(cls: type) -> _Pack:
    entries = ", ".join(f"{field.name!r}: {field.packed}" for field in _fields_of(cls))
    return _written("value", [f"return {{{entries}}}"], _known(cls))


@functools.cache
def _fields_unpack(cls: type) -> _Unpack:
    """Raises CodecError or KeyError, neither of which says which field."""
    taken, values = [], []
    for field in _fields_of(cls):
        name, value = field.name, field.unpacked
        if field.default is dataclasses.MISSING:
            taken.append(f"own_{name} = plain[{name!r}]")
        else:
            taken.append(f"own_{name} = plain.get({name!r}, default_{name})")
            value = f"own_{name} if own_{name} is default_{name} else {value}"
        values.append(value)
    return _written("plain", [*taken, f"return cls({', '.join(values)})"], _known(cls))


@overload
def unpack(cls: type[T], plain: Any) -> T: ...
@overload
def unpack(cls: Any, plain: Any) -> Any: ...
def unpack(cls: Any, plain: Any) -> Any:
    """The dataclass instance that :func:`pack` was given; *cls* is its class or a union.

    Raises CodecError when *plain* is anything else.
    """
    return _top_unpack(typing.cast(collections.abc.Hashable, cls))(plain)


@functools.cache
def _top_unpack(cls: collections.abc.Hashable) -> _Unpack:
    members = get_args(cls) if _is_union(cls) else (cls,)
    return _tagged_unpack(members)


def _bounds(hint: Any) -> tuple[Any, Within | None]:
    """The type itself, and what it must be within."""
    if get_origin(hint) is Annotated and isinstance(hint.__metadata__[0], Within):
        return hint.__origin__, hint.__metadata__[0]
    return hint, None


def _is_sequence(hint: Any) -> bool:
    """Whether it has any number of entries, of one type; it is a tuple when it arrives."""
    origin, args = get_origin(hint), get_args(hint)
    return origin is collections.abc.Sequence or (origin is tuple and args[1:] == (Ellipsis,))


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (typing.Union, types.UnionType)


def _tagged_unpack(classes: tuple[type, ...]) -> _Unpack:
    by_name = {cls.__name__: cls for cls in classes}

    def unpack_tagged(plain: Any) -> Any:
        if not (isinstance(plain, list | tuple) and plain and isinstance(plain[0], str)):
            raise CodecError(f"expected one of {sorted(by_name)}, got {_short(plain)}")
        cls = by_name.get(plain[0])
        if cls is None:
            raise CodecError(f"expected one of {sorted(by_name)}, got a {plain[0][:40]!r}")
        return _class_unpack(cls)(plain[1:])

    return unpack_tagged


@functools.cache
def _class_pack(cls: type) -> _Pack:
    entries = ", ".join(field.packed for field in _fields_of(cls))
    return _written("value", [f"return [{entries}]"], _known(cls))


@functools.cache
def _class_unpack(cls: type) -> _Unpack:
    fields = _fields_of(cls)
    names = "".join(f"own_{field.name}, " for field in fields)
    values = ", ".join(field.unpacked for field in fields)
    taken = [f"{names}= plain"] if fields else []
    written = _written("plain", [*taken, f"return cls({values})"], _known(cls))

    def unpack_class(plain: Any) -> Any:
        if not isinstance(plain, list | tuple) or len(plain) != len(fields):
            raise CodecError(f"{cls.__name__} has {len(fields)} fields, got {_short(plain)}")
        try:
            return written(plain)
        except CodecError:
            pairs = zip(fields, plain, strict=True)
            return cls(*[field.checked(cls, item) for field, item in pairs])

    return unpack_class


def _packer(hint: Any) -> _Pack | None:
    """How a value of this type is packed; None when it travels as it is."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return pack if PACKED in args else _packer(args[0])
    if origin is Literal:
        return None
    if dataclasses.is_dataclass(hint):
        return _class_pack(typing.cast(type, hint))
    if _is_union(hint):
        classes = [arg for arg in args if dataclasses.is_dataclass(arg)]
        others = [arg for arg in args if arg is not type(None) and arg not in classes]
        if len(classes) > 1:
            return lambda value: None if value is None else pack(value)
        if classes and not others:
            inner = _class_pack(typing.cast(type, classes[0]))
            return lambda value: None if value is None else inner(value)
        if len(others) == 1 and not classes:
            one = _packer(others[0])
            return one and (lambda value: None if value is None else one(value))
        raise CodecError(f"the codec does not carry {hint}")
    if _is_sequence(hint):
        item = _packer(args[0])
        return list if item is None else (lambda value: [item(entry) for entry in value])
    if origin is tuple:
        items = [_packer(arg) for arg in args]
        return lambda value: [
            entry if each is None else each(entry) for each, entry in zip(items, value, strict=True)
        ]
    if origin in (dict, collections.abc.Mapping):
        entry = _packer(args[1])
        if entry is None:
            return dict
        return lambda value: {key: entry(item) for key, item in value.items()}
    if hint in (*_SCALARS, Any):
        return None
    raise CodecError(f"the codec does not carry {hint}")


def _unpacker(hint: Any) -> _Unpack:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _top_unpack(args[0]) if PACKED in args else _bounded_unpacker(*args)
    if origin is Literal:
        return _literal_unpacker(args)
    if dataclasses.is_dataclass(hint):
        return _class_unpack(typing.cast(type, hint))
    if _is_union(hint):
        classes = tuple(typing.cast(type, arg) for arg in args if dataclasses.is_dataclass(arg))
        if len(classes) > 1:
            inner = _tagged_unpack(classes)
        else:
            inner = _unpacker(next(arg for arg in args if arg is not type(None)))
        if type(None) not in args:
            return inner
        return lambda plain: None if plain is None else inner(plain)
    if _is_sequence(hint):
        return _sequence_unpacker(args[0])
    if origin is tuple:
        return _record_unpacker(args)
    if origin in (dict, collections.abc.Mapping):
        return _mapping_unpacker(_unpacker(args[0]), _unpacker(args[1]))
    if hint is Any:
        return lambda plain: plain
    if hint is float:
        return _float
    if hint in _SCALARS:
        return _scalar_unpacker(hint)
    raise CodecError(f"the codec does not carry {hint}")


def _sequence_unpacker(hint: Any) -> _Unpack:
    each = f"tuple([{_unpacked(hint, 'entry', 'unpack')} for entry in plain])"
    known = {"unpack": _unpacker(hint), "right": _all_right(*_bounds(hint)), "wrong": _no_list}
    lines = [
        "if not isinstance(plain, (list, tuple)): wrong(plain)",
        f"return tuple(plain) if len(plain) > {_FEW} and right(plain) else {each}",
    ]
    return _written("plain", lines, known)


def _no_list(plain: Any) -> None:
    raise CodecError(f"expected a list, got {_short(plain)}")


def _all_right(kind: Any, within: Within | None) -> Callable[[Any], bool]:
    """Whether all entries are surely right as they are, at the pace of C."""
    types = {kind}

    def right(plain: Any) -> bool:
        if {*map(type, plain)} != types:
            return False
        # A sum is finite only of finite numbers, and of positive ones none is larger than it.
        if within is not None:
            return bool(0 <= within.least <= min(plain) and sum(plain) <= within.most)
        return kind is not float or math.isfinite(sum(plain))

    numbers = kind in (int, float)
    return right if numbers or (kind in _SCALARS and within is None) else lambda plain: False


def _record_unpacker(hints: Sequence[Any]) -> _Unpack:
    def wrong(plain: Any) -> None:
        raise CodecError(f"expected {len(hints)} values, got {_short(plain)}")

    known = {f"unpack_{at}": _unpacker(hint) for at, hint in enumerate(hints)} | {"wrong": wrong}
    names = "".join(f"own_{at}, " for at in range(len(hints)))
    values = "".join(f"{_unpacked(h, f'own_{at}', f'unpack_{at}')}, " for at, h in enumerate(hints))
    lines = [
        f"if not isinstance(plain, (list, tuple)) or len(plain) != {len(hints)}: wrong(plain)",
        f"{names}= plain",
        f"return ({values})",
    ]
    return _written("plain", lines, known)


def _mapping_unpacker(key: _Unpack, value: _Unpack) -> _Unpack:
    def unpack_mapping(plain: Any) -> dict[Any, Any]:
        if not isinstance(plain, dict):
            raise CodecError(f"expected a map, got {_short(plain)}")
        return {key(name): value(entry) for name, entry in plain.items()}

    return unpack_mapping


def _float(plain: Any) -> float:
    if type(plain) in (float, int):
        try:
            found = float(plain)
        except OverflowError:
            found = math.inf
        if math.isfinite(found):
            return found
    raise CodecError(f"expected a finite number, got {_short(plain)}")


def _bounded_unpacker(hint: Any, within: Within) -> _Unpack:
    inner = _unpacker(hint)

    def unpack_bounded(plain: Any) -> Any:
        value = inner(plain)
        size = value if isinstance(value, int | float) else len(value)
        if not within.least <= size <= within.most:
            what = "a number" if size is value else "a length"
            raise CodecError(
                f"expected {what} from {within.least:,} to {within.most:,}, got {_short(plain)}"
            )
        return value

    return unpack_bounded


def _literal_unpacker(choices: tuple[Any, ...]) -> _Unpack:
    def unpack_literal(plain: Any) -> Any:
        if type(plain) is not str or plain not in choices:
            raise CodecError(f"expected one of {choices}, got {_short(plain)}")
        return plain

    return unpack_literal


def _scalar_unpacker(kind: type) -> _Unpack:
    def unpack_scalar(plain: Any) -> Any:
        if type(plain) is not kind:
            raise CodecError(f"expected {kind.__name__}, got {_short(plain)}")
        return plain

    return unpack_scalar


def _short(plain: Any) -> str:
    text = repr(plain)
    return text if len(text) <= 60 else text[:57] + "..."
