"""Arrays of a client program: whole values of the lab, shards of them, and what shards make.

Problem: JAX takes arrays apart into one for each device and puts them together again, mostly to
look at them.  On a lab each such step would be a gang and a transfer.

How: taking apart and putting together is only written down.  A shard is read out of its array's
value; what all shards of one array make is that array; only a computation that takes a shard has
the lab make it.

Rule for maintainers: nothing here waits.  :meth:`Value.handle` submits at most; :meth:`Value.read`
is awaited in the loop of the door.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from pathways_lab.client.code import layouts
from pathways_lab.client.code.tiles import whole
from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.client.functions.jit import CompiledFunction
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.program import calls
from pathways_lab.client.session.handles import Handle
from pathways_lab.door.shardings import Placing, placing_of_boxes
from pathways_lab.runtime.arrays import index

_SECONDS = 1.0
"""The elements of an array are kept so long once they were read, for its other shards."""


class Places(Protocol):
    """Slices for the devices of the client."""

    def slice_of(self, devices: tuple[int, ...]) -> Slice: ...


class Value:
    """An array.  kind: its type.  placing: its devices, and how it is cut over them.

    stored: the type of the lab's value, which :meth:`handle` and :meth:`read` give.

    shared: more than one array of the client may be it, or be made of it.
    """

    shared = False

    @property
    def given_up(self) -> bool:
        """Whether a call may overwrite it when its array is donated."""
        return False

    def __init__(self, kind: ArrayType, placing: Placing) -> None:
        self.kind = kind
        self.placing = placing
        self.stored = placing.stored(kind)

    def handle(self) -> Handle:
        """The lab's value, made if need be.  Raises Status or PathwaysError when it has none."""
        raise NotImplementedError

    def argument(self) -> Handle | np.ndarray[Any, Any]:
        """The same, or its elements where these go with a call."""
        return self.handle()

    def taken_apart(self) -> list[Value] | None:
        """An array for each device, where this one has its own way."""
        return None

    async def read(self) -> np.ndarray[Any, Any]:
        """Its elements.  Raises Status or PathwaysError when it has none."""
        raise NotImplementedError

    def waits_for(self) -> Sequence[Handle]:
        """It is there when these are.  Raises Status or PathwaysError when it never will be."""
        raise NotImplementedError


class Whole(Value):
    """A value of the lab."""

    def __init__(self, kind: ArrayType, placing: Placing, handle: Handle) -> None:
        super().__init__(kind, placing)
        self._handle = handle
        self._reading: asyncio.Task[Any] | None = None

    def handle(self) -> Handle:
        return self._handle

    async def read(self) -> np.ndarray[Any, Any]:
        if self._reading is None:
            loop = asyncio.get_running_loop()
            self._reading = loop.create_task(self._handle._awaited())
            loop.call_later(_SECONDS, self._forget)
        found: np.ndarray[Any, Any] = await asyncio.shield(self._reading)
        return found

    @property
    def given_up(self) -> bool:
        return not self.shared and self._reading is None

    def _forget(self) -> None:
        reading = self._reading
        if reading is not None and reading.done():
            self._reading = None
        elif reading is not None:
            reading.add_done_callback(lambda _: self._forget())

    def waits_for(self) -> Sequence[Handle]:
        return (self._handle,)


class Sent(Value):
    """Few elements that the client has sent: the first call that takes them takes them along.

    put: makes a value of the lab of them.
    """

    def __init__(
        self,
        kind: ArrayType,
        placing: Placing,
        data: np.ndarray[Any, Any],
        put: Callable[[np.ndarray[Any, Any]], Handle],
    ) -> None:
        super().__init__(kind, placing)
        self._data = data
        self._put = put
        self._called = False
        self._made: Handle | None = None

    def handle(self) -> Handle:
        if self._made is None:
            self._made = self._put(self._data)
        return self._made

    def argument(self) -> Handle | np.ndarray[Any, Any]:
        if self._called:
            return self.handle()
        self._called = True
        return self._data

    async def read(self) -> np.ndarray[Any, Any]:
        return self._data

    def waits_for(self) -> Sequence[Handle]:
        return ()


class Shard(Value):
    """The part of an array that is on one of its devices.  number: of the device, in its order."""

    def __init__(self, of: Value, number: int, places: Places) -> None:
        self.of, self.number = of, number
        self._places = places
        self.box = of.placing.boxes(of.kind)[number]
        shape = tuple(stop - start for start, stop in self.box[of.placing.stacked :])
        placing = Placing((of.placing.devices[number],), whole(1, len(shape)))
        super().__init__(ArrayType(shape, of.kind.dtype), placing)
        self._made: Handle | None = None

    def handle(self) -> Handle:
        if self._made is None:
            parent = self.of.handle()
            if self.kind.shape != self.of.stored.shape:
                parent = _cutting(parent.slice, self.box, self.kind.shape)(parent)
            self._made = moved(parent, self.placing, self._places)
        return self._made

    async def read(self) -> np.ndarray[Any, Any]:
        if self._made is not None:
            found: np.ndarray[Any, Any] = await self._made._awaited()
            return found
        part: np.ndarray[Any, Any] = (await self.of.read())[index(self.box)]
        return part.reshape(self.kind.shape)

    def waits_for(self) -> Sequence[Handle]:
        return self.of.waits_for()


class Joined(Value):
    """An array of which the client named the shards, one for each device."""

    def __init__(
        self, kind: ArrayType, placing: Placing, parts: Sequence[Value], places: Places
    ) -> None:
        super().__init__(kind, placing)
        self.parts = tuple(parts)
        self._places = places
        self._made: Handle | None = None

    def handle(self) -> Handle:
        if self._made is None:
            place = self._places.slice_of(self.placing.on)
            found = self.placing.boxes(self.kind)
            distinct = dict(zip(found, self.parts, strict=True))
            join = _joining(place, self.stored, self.placing.layout, tuple(distinct))
            self._made = join(*[part.handle() for part in distinct.values()])
        return self._made

    async def read(self) -> np.ndarray[Any, Any]:
        first = await self.parts[0].read()
        whole_array = np.empty(self.stored.shape, first.dtype)
        for box, part in zip(self.placing.boxes(self.kind), self.parts, strict=True):
            whole_array[index(box)] = await part.read()
        return whole_array

    def waits_for(self) -> Sequence[Handle]:
        return [handle for part in self.parts for handle in part.waits_for()]


class Failed(Value):
    """An array that will never be there."""

    def __init__(self, kind: ArrayType, placing: Placing, why: Exception) -> None:
        super().__init__(kind, placing)
        self.why = why

    def handle(self) -> Handle:
        raise self.why

    async def read(self) -> np.ndarray[Any, Any]:
        raise self.why

    def waits_for(self) -> Sequence[Handle]:
        raise self.why


def joined(kind: ArrayType, placing: Placing, parts: Sequence[Value], places: Places) -> Value:
    """The array of these shards: the one that they were taken from, if they are all of it."""
    for part in parts:
        if isinstance(part, Failed):
            return Failed(kind, placing, part.why)
    first = parts[0]
    for part in parts:
        part.shared = True
    if len(parts) == 1 and first.kind.shape == kind.shape:
        return first
    if isinstance(first, Shard) and first.of.kind.shape == kind.shape:
        same = [
            isinstance(part, Shard) and part.of is first.of and part.number == number
            for number, part in enumerate(parts)
        ]
        if all(same) and first.of.placing == placing:
            return first.of
    return Joined(kind, placing, parts, places)


def rearranged(of: Value, numbers: Sequence[int], placing: Placing, places: Places) -> Value:
    """An array of the same elements for devices in another order.

    The client says of it only how large its shards are, so where each belongs is read from the
    array that it was in.  numbers: of that array's shards.
    """
    boxes = of.placing.boxes(of.kind)
    stacked = of.placing.stacked
    placing = placing_of_boxes(placing.devices, [boxes[n] for n in numbers], stacked)
    parts = shards(of, places)
    return joined(of.kind, placing, [parts[n] for n in numbers], places)


def shards(of: Value, places: Places) -> list[Value]:
    """An array for each device."""
    of.shared = True
    count = len(of.placing.devices)
    if count == 1:
        return [of]
    if (own := of.taken_apart()) is not None:
        return own
    if isinstance(of, Joined):
        return list(of.parts)
    if isinstance(of, Failed):
        made = [Shard(of, number, places) for number in range(count)]
        return [Failed(each.kind, each.placing, of.why) for each in made]
    return [Shard(of, number, places) for number in range(count)]


def moved(handle: Handle, placing: Placing, places: Places) -> Handle:
    """A value elsewhere, or cut otherwise."""
    place = places.slice_of(placing.on)
    if handle.slice is place and handle.layout == placing.layout:
        return handle
    return calls.put_leaf(handle, place, layouts.sharding_of(placing.layout, place))


@functools.lru_cache(maxsize=4096)
def _cutting(place: Slice, box: Any, shape: tuple[int, ...]) -> CompiledFunction:
    def shard(x: Any) -> Any:
        return x[index(box)].reshape(shape)

    out = jax.sharding.NamedSharding(place.mesh, jax.sharding.PartitionSpec())
    return CompiledFunction(shard, on=place, out_shardings=out)


@functools.lru_cache(maxsize=4096)
def _joining(place: Slice, kind: ArrayType, layout: Any, found: Any) -> CompiledFunction:
    def join(*parts: Any) -> Any:
        made = jnp.zeros(kind.shape, parts[0].dtype)
        for box, part in zip(found, parts, strict=True):
            part = part.reshape([stop - start for start, stop in box])
            made = jax.lax.dynamic_update_slice(made, part, [start for start, _ in box])
        return made

    return CompiledFunction(join, on=place, out_shardings=layouts.sharding_of(layout, place))
