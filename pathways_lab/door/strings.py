"""Arrays of strings, which colocated Python takes and returns.

Problem: no device holds strings.  On the lab an array of them is bytes, and a result has so many
as it may have at most, since its type is known before it is.

Rule for maintainers: only colocated functions take such arrays; all else refuses them by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from google.protobuf.field_mask_pb2 import FieldMask

from pathways_lab.client.code.tiles import whole
from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.client.session.handles import Handle
from pathways_lab.door.protocol.status import INVALID, UNIMPLEMENTED, Status
from pathways_lab.door.shardings import Placing
from pathways_lab.door.values import Value
from pathways_lab.runtime.arrays import index

NAME = "string"
"""The name of the type here, as NumPy's type has none that is short."""
MOST = 1 << 18
"""Bytes of an array of strings that a function returns, as JSON."""

Texts = np.ndarray[Any, Any]


def packed(texts: Texts) -> np.ndarray[Any, Any]:
    """Strings as bytes that a device can hold."""
    return np.frombuffer(json.dumps(texts.tolist()).encode(), np.uint8)


def padded(texts: Texts) -> np.ndarray[Any, Any]:
    """The same, as long as every result is.  Raises ValueError for more."""
    data = packed(texts)
    if len(data) > MOST:
        raise ValueError(f"an array of strings of {len(data):,} bytes: {MOST:,} are the most")
    return np.pad(data, (0, MOST - len(data)), constant_values=ord(" "))


def unpacked(data: np.ndarray[Any, Any], shape: tuple[int, ...]) -> Texts:
    """The strings again."""
    found = json.loads(np.asarray(data).tobytes())
    return np.array(found, np.dtypes.StringDType()).reshape(shape)


def from_wire(data: bytes, shape: tuple[int, ...]) -> Texts:
    """Strings as JAX's client sends them.  Raises Status."""
    try:
        found = list(FieldMask.FromString(data).paths)  # it has the fields of StringArrayContents
        return np.array(found, np.dtypes.StringDType()).reshape(shape)
    except Exception as error:
        raise Status(INVALID, f"no strings of the shape {shape!s:.200}: {error}") from None


def to_wire(texts: Texts) -> bytes:
    """Strings as JAX's client reads them."""
    return bytes(FieldMask(paths=[str(text) for text in texts.ravel()]).SerializeToString())


class Strings(Value):
    """An array of strings: of which the door has the elements, or the lab the bytes."""

    def __init__(
        self, kind: ArrayType, placing: Placing, texts: Texts | None, on_lab: Handle | None = None
    ) -> None:
        super().__init__(kind, placing)
        self.texts = texts
        self._on_lab = on_lab

    def handle(self) -> Handle:
        raise Status(UNIMPLEMENTED, "only colocated Python computes with strings")

    def bytes_on(self, put: Callable[[np.ndarray[Any, Any]], Handle]) -> Handle:
        """The lab's value of its bytes; put: makes one."""
        if self._on_lab is None:
            if self.texts is None:
                text = "strings that were taken apart, or put together, and that nobody has read"
                raise Status(UNIMPLEMENTED, text)
            self._on_lab = put(packed(self.texts))
        return self._on_lab

    async def read(self) -> Texts:
        if self.texts is None:
            assert self._on_lab is not None
            self.texts = unpacked(await self._on_lab._awaited(), self.kind.shape)
        return self.texts

    def waits_for(self) -> Sequence[Handle]:
        return () if self._on_lab is None else (self._on_lab,)

    def taken_apart(self) -> list[Value]:
        return [_Part(self, number) for number in range(len(self.placing.devices))]


class _Part(Strings):
    """The strings on one device."""

    def __init__(self, of: Strings, number: int) -> None:
        box = of.placing.boxes(of.kind)[number]
        shape = tuple(stop - start for start, stop in box)
        placing = Placing((of.placing.devices[number],), whole(1, len(shape)))
        super().__init__(ArrayType(shape, NAME), placing, None)
        self._of, self._box = of, box
        if of.texts is not None:
            self.texts = self._cut(of.texts)

    def _cut(self, texts: Texts) -> Texts:
        return np.asarray(texts[index(self._box)], texts.dtype).reshape(self.kind.shape)

    async def read(self) -> Texts:
        if self.texts is None:
            self.texts = self._cut(await self._of.read())
        return self.texts

    def waits_for(self) -> Sequence[Handle]:
        return self._of.waits_for()


class _Joined(Strings):
    """Strings of which the client named the parts, one for each device."""

    def __init__(self, kind: ArrayType, placing: Placing, parts: Sequence[Strings]) -> None:
        super().__init__(kind, placing, None)
        self._parts = tuple(parts)
        known = [part.texts for part in parts]
        if all(each is not None for each in known):
            self.texts = self._put(known)

    def _put(self, texts: Sequence[Texts | None]) -> Texts:
        made = np.empty(self.kind.shape, np.dtypes.StringDType())
        for box, part in zip(self.placing.boxes(self.kind), texts, strict=True):
            made[index(box)] = part
        return made

    async def read(self) -> Texts:
        if self.texts is None:
            self.texts = self._put([await part.read() for part in self._parts])
        return self.texts

    def waits_for(self) -> Sequence[Handle]:
        return [handle for part in self._parts for handle in part.waits_for()]


def joined(kind: ArrayType, placing: Placing, parts: Sequence[Value]) -> Value:
    """The array of strings that these shards are."""
    if len(parts) == 1 and parts[0].kind == kind:
        return parts[0]
    return _Joined(kind, placing, [part for part in parts if isinstance(part, Strings)])
