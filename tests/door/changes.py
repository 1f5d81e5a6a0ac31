"""Protobuf messages with one thing changed, found by their descriptors.

Rule for maintainers: nothing here knows a message or a field, but for those whose bytes are
messages themselves; a new one of the protocol is changed without a word about it here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from pathways_lab.door.protocol.messages import message
from tests.runtime.mutate import FLOATS, NUMBERS, TEXTS, Mutator

INSIDE = {
    "xla::ifrt::HloSharding": "HloShardingProto",
    "xla::ifrt::SingleDeviceSharding": "SingleDeviceShardingProto",
    "xla::ifrt::ConcreteEvenSharding": "ConcreteEvenShardingProto",
    "xla::ifrt::XlaCompileOptions": "XlaCompileOptionsProto",
}
"""Messages that travel as bytes of a ``Serialized``, by its type's name."""
_MANY = (2, 2, 2, 2, 2, 50, 50, 50, 3000)
_LONGEST = 9000
_LARGEST = 32 << 20
"""Bytes of a message: it is in a process several times, as objects of many times its size."""
_FEW, _MOST, _DEEP = 0.85, 4, 3
"""How often a field that is set is taken; so many are set in what was empty, and so deep."""


class Changes:
    """Changes messages.  foreign: numbers that mean something somewhere."""

    def __init__(self, rng: random.Random, foreign: Callable[[], Sequence[int]]) -> None:
        self._rng = rng
        self._foreign = foreign
        self._bytes = Mutator(rng)
        self._depth = 0

    def changed(self, given: Any) -> Any:
        """A copy with one thing changed, at any depth; the same where that is too large."""
        made = type(given)()
        made.CopyFrom(given)
        self._change(made)
        return given if made.ByteSize() > _LARGEST else made

    def damaged(self, data: bytes) -> bytes:
        """Bytes, some of them others, or cut off."""
        return self._bytes.damaged(data)

    def fill(self, made: Any) -> None:
        """Set some fields of a message to anything."""
        if self._depth >= _DEEP:
            return
        self._depth += 1
        fields = list(made.DESCRIPTOR.fields)
        for field in self._rng.sample(fields, min(len(fields), _MOST)):
            self._change_field(made, field)
        self._depth -= 1

    def _change(self, made: Any) -> None:
        rng, name = self._rng, getattr(made, "type_name", "")
        if name in INSIDE and rng.random() < 0.8:
            made.data = self._change_bytes(INSIDE[name], made.data)
            return
        there = [field for field, _ in made.ListFields()]
        # Where most is, most can be wrong.
        if there and rng.random() < _FEW:
            sizes = [_size(made, field) for field in there]
            self._change_field(made, rng.choices(there, sizes)[0])
        elif made.DESCRIPTOR.fields:
            self._change_field(made, rng.choice(made.DESCRIPTOR.fields))

    def _change_bytes(self, kind: str, data: bytes) -> bytes:
        try:
            inside = message(kind).FromString(data)
        except DecodeError:
            return self.damaged(data)
        self._change(inside)
        return bytes(inside.SerializeToString())

    def _change_field(self, made: Any, field: Any) -> None:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            self._change_map(getattr(made, field.name), field.message_type)
        elif field.is_repeated:
            self._change_list(getattr(made, field.name), field)
        elif field.message_type is not None:
            self._change_inside(made, field)
        elif self._rng.random() < 0.1:
            made.ClearField(field.name)
        else:
            setattr(made, field.name, self._scalar(field, getattr(made, field.name)))

    def _change_inside(self, made: Any, field: Any) -> None:
        chance = self._rng.random()
        if chance < 0.06:
            made.ClearField(field.name)
            return
        inside = getattr(made, field.name)
        inside.SetInParent()
        if chance < 0.85 and inside.ByteSize():
            self._change(inside)
        else:
            self.fill(inside)

    def _change_map(self, entries: Any, entry: Any) -> None:
        rng, (key, value) = self._rng, entry.fields
        if entries and rng.random() < 0.3:
            del entries[rng.choice(list(entries))]
            return
        name = rng.choice(list(entries)) if entries and rng.random() < 0.6 else None
        if name is None:
            name = self._scalar(key, "x")
        if value.message_type is not None:
            self._change(entries[name])
        else:
            entries[name] = self._scalar(value, entries[name])

    def _change_list(self, entries: Any, field: Any) -> None:
        rng, chance = self._rng, self._rng.random()
        if not entries or chance < 0.1:
            self._add(entries, field)
            return
        place = rng.randrange(len(entries))
        if chance < 0.2:
            del entries[place]
        elif chance < 0.25:
            del entries[:]
        elif chance < 0.35:
            entries.extend((list(entries) * rng.choice(_MANY))[:_LONGEST])
        elif chance < 0.4:
            other = rng.sample(list(entries), len(entries))
            del entries[:]
            entries.extend(other)
        elif chance < 0.45:
            entries.extend([entries[place]])
        elif field.message_type is not None:
            self._change(entries[place])
        else:
            entries[place] = self._scalar(field, entries[place])

    def _add(self, entries: Any, field: Any) -> None:
        if field.message_type is not None:
            self.fill(entries.add())
        else:
            entries.append(self._scalar(field, 0))

    def _scalar(self, field: Any, old: Any) -> Any:
        rng, kind = self._rng, field.cpp_type
        if kind == field.CPPTYPE_BOOL:
            return not old
        if kind == field.CPPTYPE_STRING and field.type == field.TYPE_BYTES:
            return self.damaged(old) if old and rng.random() < 0.7 else rng.choice(_BYTES)
        if kind == field.CPPTYPE_STRING:
            return rng.choice((f"{old}x", str(old)[:-1], *TEXTS))
        if kind in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
            return rng.choice(FLOATS)
        if kind == field.CPPTYPE_ENUM:
            known = [value.number for value in field.enum_type.values]
            return rng.choice((*known, max(known) + 1, 1000, -1))
        chance, foreign = rng.random(), self._foreign()
        if chance < 0.3 and foreign:
            number = rng.choice(foreign)
        elif chance < 0.6:
            number = int(old or 0) + rng.choice((-2, -1, 1, 2))
        else:
            number = rng.choice((*NUMBERS, rng.randrange(9)))
        least, most = _RANGES[kind]
        return number if least <= number <= most else most


def _size(made: Any, field: Any) -> int:
    """How much of a message is in a field."""
    value = getattr(made, field.name)
    if field.is_repeated:
        return 1 + 3 * len(value)
    return 1 + (value.ByteSize() if field.message_type is not None else 3)


_BYTES = (b"", b"\0", b"\xff" * 9, b"ML\xefR", b"x" * 70_000)
_RANGES = {
    1: (-(1 << 31), (1 << 31) - 1),
    2: (-(1 << 63), (1 << 63) - 1),
    3: (0, (1 << 32) - 1),
    4: (0, (1 << 64) - 1),
}
"""Of int32, int64, uint32 and uint64, by their number as ``cpp_type``."""
