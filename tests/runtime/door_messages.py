"""Right messages of every operation of a door, made from the types of their fields.

Rule for maintainers: an operation of the table is generated without a word about it here;
pools say only which values make sense, so that a message gets further than the first check.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

from pathways_lab.transport.codec import PACKED, Within, pack
from pathways_lab.transport.edge import Door
from tests.runtime.mutate import Said

Pools = Mapping[Any, Callable[[], Any]]
"""Values that make sense, by the name of a message's field, or instances by their dataclass."""


class Messages:
    """Makes the messages of a door.

    makers: of operations whose fields hang together: the fields that they set.
    parcels: the buffers of an operation that has some, by its fields.
    """

    def __init__(
        self,
        rng: random.Random,
        door: Door,
        pools: Pools,
        makers: Mapping[str, Callable[[], dict[str, Any]]],
        parcels: Mapping[str, Callable[[dict[str, Any]], Sequence[bytes]]],
    ) -> None:
        self._rng = rng
        self._door = door
        self._pools = pools
        self._makers = makers
        self._parcels = parcels

    def one(self, op: str) -> Said:
        """A right message."""
        hints = _hints(self._door[op]).items()
        fields = {name: self._field(name, hint) for name, hint in hints}
        fields |= self._makers[op]() if op in self._makers else {}
        if op in self._parcels:
            return op, fields, list(self._parcels[op](fields))
        least, most = self._door[op].parcels
        return op, fields, [b"parcel"] * self._rng.randint(least, min(most, 1))

    def _field(self, name: str, hint: Any) -> Any:
        if name in self._pools and self._rng.random() < 0.9:
            return self._pools[name]()
        return self._value(hint)

    def _value(self, hint: Any) -> Any:
        rng, origin, args = self._rng, get_origin(hint), get_args(hint)
        if origin is Annotated:
            return self._instance(args[0], True) if PACKED in args else self._within(*args)
        if origin is Literal:
            return rng.choice(args)
        if origin in (typing.Union, types.UnionType):
            chosen = rng.choice(args)
            if dataclasses.is_dataclass(chosen):
                several = sum(map(dataclasses.is_dataclass, args)) > 1
                return self._instance(chosen, several)
            return None if chosen is type(None) else self._value(chosen)
        if origin is tuple and args[-1] is Ellipsis:
            return [self._value(args[0]) for _ in range(rng.choice((0, 1, 1, 2)))]
        if origin is tuple:
            return [self._value(each) for each in args]
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return {self._value(args[0]): self._value(args[1]) for _ in range(rng.randrange(3))}
        if dataclasses.is_dataclass(hint):
            return self._instance(hint, False)
        plain: dict[Any, Sequence[Any]] = {
            int: range(100),
            float: (0.0, 0.5, 2.0),
            str: ("a", "b", "a longer text"),
            bool: (False, True),
            bytes: (b"", b"bytes"),
            Any: (True, None, "x", 1),
        }
        return rng.choice(plain[hint])

    def _within(self, hint: Any, within: Within) -> Any:
        if hint not in (int, float):
            return self._value(hint)
        some = (within.least, within.least + 1, within.least + 7, within.most)
        return hint(min(self._rng.choice(some), within.most))

    def _instance(self, cls: Any, tagged: bool) -> Any:
        """Of a dataclass, as it travels.  tagged: its name comes first."""
        if cls in self._pools:
            packed: list[Any] = pack(self._pools[cls]())
            return packed if tagged else packed[1:]
        fields = [self._value(hint) for hint in _hints(cls).values()]
        return [cls.__name__, *fields] if tagged else fields


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """The type of each field."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}
