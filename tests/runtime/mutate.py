"""Messages that are almost right: what a door must survive, made from what it expects.

Problem: random bytes get no further than the decoder, and random values no further than
the first check.  A message that is right but for one thing reaches everything behind them.

Rule for maintainers: nothing here knows an operation or a field; a value is changed by
its type and place alone, so a new operation is covered without a change here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

Said = tuple[str, dict[str, Any], list[bytes]]
"""A message: operation, fields, buffers."""

NUMBERS = (
    0, -1, 1, 2, 7, 255, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 32) | 1, 1 << 53,
    (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 31), -(1 << 63),
)  # fmt: skip
FLOATS = (math.inf, -math.inf, math.nan, 0.0, -0.0, -1.0, 0.5, 5e-324, 1e308, 1e19, 3.0)
TEXTS = (
    "", "x", " ", "\0", "x" * 300, "größe", "\u202e", "0", "-1", "nan", "None", "float32",
    "f4,(2,3)", "S8", "O", "key<none>", "../..", "<b>", "{0}", "%s", "name 1",
)  # fmt: skip
OTHERS: tuple[Any, ...] = (
    None, True, False, b"", b"\xff", b"\x93\xa5Event", [], {}, [[]], [None], {"": 1}, {0: 0},
    [[[[1]]]], [0] * 1000,
)  # fmt: skip
STRANGE: tuple[Any, ...] = (*NUMBERS, *FLOATS, *TEXTS, *OTHERS)
"""Values of every type that a message can carry, most of them wrong in most places."""


class Mutator:
    """Changes plain values: what msgpack carries.

    foreign: values that belong to somebody else (ids, names), tried in any place.
    """

    def __init__(self, rng: random.Random, foreign: Sequence[Any] = ()) -> None:
        self.rng = rng
        self._foreign = tuple(foreign)

    def value(self, old: Any) -> Any:
        """*old* with one change somewhere in it, at any depth."""
        rng = self.rng
        if isinstance(old, list | tuple | dict) and old and rng.random() < 0.9:
            return self._inside(old)
        return self._another(old)

    def fields(self, old: dict[str, Any]) -> dict[str, Any]:
        """A map with one field changed, missing, more, or with another's value."""
        rng, found = self.rng, dict(old)
        chance = rng.random()
        if not found or chance < 0.05:
            found[rng.choice((*TEXTS, "time", "cause", "client", "host"))] = rng.choice(STRANGE)
            return found
        name = rng.choice(list(found))
        if chance < 0.15:
            del found[name]
        elif chance < 0.25:
            found[name] = found[rng.choice(list(found))]
        else:
            found[name] = self.value(found[name])
        return found

    def said(self, message: Said, operations: Sequence[str] = ()) -> Said:
        """A message with one thing changed, now and then two.

        operations: of the door; one of them may stand over the fields of another.
        """
        op, fields, buffers = message
        rng = self.rng
        for _ in range(rng.choice((1, 1, 1, 1, 2))):
            chance = rng.random()
            if chance < 0.04:
                op = rng.choice((*TEXTS, *operations, op.upper()))
            elif chance < 0.1:
                some = [b"z" * rng.choice((0, 1, 3, 70_000)) for _ in range(rng.choice((1, 3)))]
                buffers = rng.choice(([], some, [*buffers, *some], buffers[:-1]))
            elif chance < 0.15 and buffers:
                buffers = [self.damaged(data) for data in buffers]
            else:
                fields = self.fields(fields)
        return op, fields, buffers

    def damaged(self, data: bytes) -> bytes:
        """Bytes, some of them others, or cut off."""
        rng, found = self.rng, bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            if found:
                found[rng.randrange(len(found))] = rng.randrange(256)
        if rng.random() < 0.3:
            del found[rng.randrange(len(found) + 1) :]
        return bytes(found)

    def _inside(self, old: Any) -> Any:
        if isinstance(old, dict):
            return self._entry(old)
        rng, found = self.rng, list(old)
        # Where most is, most can be wrong.
        (place,) = rng.choices(range(len(found)), [_size(entry) for entry in found])
        chance = rng.random()
        if chance < 0.06:
            del found[place]
        elif chance < 0.12:
            found.insert(place, rng.choice((found[place], *STRANGE)))
        elif chance < 0.15:
            found *= rng.choice((2, 50))
        elif chance < 0.2:
            rng.shuffle(found)
        else:
            found[place] = self.value(found[place])
        return found

    def _entry(self, old: dict[Any, Any]) -> dict[Any, Any]:
        rng, found = self.rng, dict(old)
        key, chance = rng.choice(list(found)), rng.random()
        if chance < 0.1:
            del found[key]
        elif chance < 0.3:
            other = self._another(key)
            found[other if isinstance(other, int | float | str | bytes) else ""] = found.pop(key)
        else:
            found[key] = self.value(found[key])
        return found

    def _another(self, old: Any) -> Any:
        rng, chance = self.rng, self.rng.random()
        if self._foreign and chance < 0.2:
            return rng.choice(self._foreign)
        if type(old) is int and chance < 0.5:
            return old + rng.choice((-2, -1, 1, 2, 1 << 31, 1 << 32, -(1 << 32), -2 * old))
        if type(old) is float and chance < 0.6:
            return rng.choice((*FLOATS, -old, old * 1e300))
        if type(old) is str and chance < 0.5:
            return rng.choice((old + "x", old[:-1], old.upper(), *TEXTS))
        if type(old) is bytes and chance < 0.5:
            return self.damaged(old)
        return rng.choice(STRANGE)


def _size(value: Any) -> int:
    """How many values are in it."""
    if isinstance(value, dict):
        return 1 + sum(map(_size, value.values()))
    return 1 + sum(map(_size, value)) if isinstance(value, list | tuple) else 1
