"""The state of one client program: its numbers, and what they mean on the lab.

Problem: JAX's client numbers its own arrays and goes on without an answer; on the lab the same
numbers mean handles.

Rule for maintainers: the thread of requests never waits for the work of the lab.  Values are
awaited in the loop, and answers go out from there.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Container, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from google.protobuf.message import DecodeError

from pathways_lab.client.code.tiles import Inexpressible
from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.client.functions.jit import CompiledFunction
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.lab import Lab
from pathways_lab.client.program.graph import Prepared
from pathways_lab.client.program.ifrt import LoadedProgram
from pathways_lab.client.session.handles import Handle
from pathways_lab.core.errors import PathwaysError
from pathways_lab.core.program.array_types import shard_bytes
from pathways_lab.core.program.program import Line
from pathways_lab.core.slices.topology import SliceRequest
from pathways_lab.door import dtypes, shardings, strings
from pathways_lab.door.colocated import Beside, Colocated
from pathways_lab.door.over_meshes import OverMeshes
from pathways_lab.door.programs import Loaded, Remotely
from pathways_lab.door.protocol.buffers import Buffers
from pathways_lab.door.protocol.http2 import log
from pathways_lab.door.protocol.server import Reply
from pathways_lab.door.protocol.status import (
    CANCELLED,
    EXHAUSTED,
    INTERNAL,
    INVALID,
    NOT_FOUND,
    UNAVAILABLE,
    UNIMPLEMENTED,
    Status,
)
from pathways_lab.door.shardings import Placing
from pathways_lab.door.values import Value

_OWN = 1 << 60
"""From here on numbers are the server's; the client counts from one."""
_MOST = 1 << 20
"""Most numbers that mean something to a client."""
_SLICES = 1 << 12
"""Most sequences of devices that a client computes on."""
DONATE = 3
"""ARRAY_COPY_SEMANTICS_DONATE_INPUT."""

Function = Loaded | Colocated | OverMeshes


class State:
    """One client program.  loop: of the door's process, in which values are awaited.

    remote: makes what calls a function of the client.  beside: where its colocated ones run.
    slice_index: each device has the number of its island, by which JAX makes hybrid meshes.
    """

    def __init__(
        self,
        lab: Lab,
        buffers: Buffers,
        loop: asyncio.AbstractEventLoop,
        remote: Remotely,
        beside: Beside,
        slice_index: bool = False,
    ) -> None:
        self._lab = lab
        self._buffers = buffers
        self._loop = loop
        self._remote = remote
        self._beside = beside
        self._owned = [
            (island.name, host.name, number)
            for island in lab.islands
            for host in island.hosts
            for number in range(host.devices)
        ]
        islands = [island.name for island in lab.islands]
        self._slice_index = {name: n for n, name in enumerate(islands)} if slice_index else {}
        self._kind = lab.islands[0].hosts[0].kind
        self._arrays: dict[int, Value] = {}
        self._unmade: dict[int, Status] = {}
        self._deleted: set[int] = set()
        self._futures: dict[int, Sequence[Value]] = {}
        self._programs: dict[int, Function] = {}
        self._over: dict[tuple[int, tuple[int, ...]], LoadedProgram] = {}
        self._slices: dict[tuple[int, ...], Slice] = {}
        self._prepared: dict[Any, Prepared] = {}
        self._beside_on: dict[tuple[int, str, int], CompiledFunction] = {}
        self._turns: dict[tuple[int, ...], Handle] = {}
        self._numbers = itertools.count(_OWN)

    def slice_of(self, devices: tuple[int, ...]) -> Slice:
        """The slice of exactly these devices, in this order.  Raises Status when none can be."""
        known = self._slices.get(devices)
        if known is not None and known.state != "lost" and not known.released:
            return known
        self._check_devices(devices)
        if len(self._slices) >= _SLICES:
            raise Status(EXHAUSTED, f"{_SLICES:,} sequences of devices are in use")
        at = tuple(self._owned[d][1:] for d in devices)
        request = SliceRequest((len(devices),), ("d",), at=at)
        made = self._slices[devices] = self._lab._bound(request, True)
        return made

    def _typed(self, dtype: Any, shape: Any, sharding: Any) -> tuple[ArrayType, Placing]:
        """Raises Status for what is no array on devices of the lab."""
        kind = ArrayType(tuple(shape.dims), dtypes.of_kind(dtype))
        placing = shardings.placing_of(sharding, len(kind.shape))
        self._check_devices(placing.devices)
        if kind.dtype == strings.NAME:
            return kind, placing
        try:
            shard_bytes(kind.shape, kind.dtype, placing.layout)
        except ValueError as error:
            raise Status(INVALID, str(error)) from None
        return kind, placing

    def _check_devices(self, devices: Sequence[int]) -> None:
        """Raises Status unless the lab has them, and each is named once."""
        count = len(self._owned)
        if not devices or any(not 0 <= d < count for d in devices):
            raise Status(INVALID, f"devices {str(devices)[:200]}: the lab has {count}")
        if len({*devices}) != len(devices):
            raise Status(INVALID, f"devices {str(devices)[:200]}: one is named twice")

    def _status(self, kind: str, error: Exception) -> Status:
        gone = self._lab.session.connection.closed
        return status_of(kind, error) if gone is None else Status(UNAVAILABLE, gone.message)

    def _later(self, kind: str, reply: Reply, work: Coroutine[Any, Any, Any]) -> None:
        """Answer when *work* is done."""

        async def answering() -> None:
            try:
                answer = await work
            except Exception as error:
                answer = self._status(kind, error)
            reply(answer)

        asyncio.run_coroutine_threadsafe(answering(), self._loop)

    def _when_there(self, kind: str, reply: Reply, waited: Sequence[Value], answer: Any) -> None:
        """Answer when all are there, or will never be; with the first that will not."""
        needed: list[Handle | Exception] = []
        for value in waited:
            try:
                needed += value.waits_for()
            except (PathwaysError, Status) as error:
                needed.append(error)

        def over() -> None:
            for each in needed:
                if isinstance(each, Exception):
                    return reply(self._status(kind, each))
                if each.failure is not None:
                    return reply(self._status(kind, PathwaysError(each.failure)))
            reply(answer)

        handles = [each for each in needed if isinstance(each, Handle)]
        self._lab.session.when_ended(handles, over)

    def _future(self, waited: Sequence[Value] = (), number: int = 0) -> int:
        """The number of what is there when these are."""
        number = self._new(number, self._futures)
        self._futures[number] = waited
        return number

    def _futured(self, number: int) -> Sequence[Value]:
        """The same, once.  Raises Status."""
        if number not in self._futures:
            raise Status(NOT_FOUND, f"there is no future {number}")
        return self._futures.pop(number)

    def _new(self, number: int, *known: Container[int]) -> int:
        """A number that the client has chosen, or one of the server's.  Raises Status."""
        if number >= _OWN or any(number in each for each in known):
            raise Status(INVALID, f"the number {number} means something already")
        if self._full():
            raise Status(EXHAUSTED, f"this program has {_MOST:,} arrays, functions and futures")
        return number or next(self._numbers)

    def _full(self) -> bool:
        numbers = len(self._arrays) + len(self._unmade) + len(self._deleted)
        return numbers + len(self._futures) + len(self._programs) >= _MOST

    def _make_none(self, numbers: Sequence[int], why: Status) -> None:
        """The client goes on with arrays of these numbers, which will never be there."""
        for number in numbers:
            if self._full():
                return
            if number < _OWN and number not in self._arrays:
                self._unmade[number] = why

    def _value(self, number: int) -> Value:
        if number in self._unmade:
            raise self._unmade[number]
        if number in self._deleted:
            raise Status(INVALID, "this array was deleted or donated")
        value = self._arrays.get(number)
        if value is None:
            raise Status(NOT_FOUND, f"there is no array {number}")
        return value

    def _keep(self, number: int, value: Value) -> int:
        """Under the client's number, or one of the server's."""
        number = self._new(number, self._arrays, self._unmade, self._deleted)
        self._arrays[number] = value
        return number

    def _delete(self, number: int) -> None:
        """An array's memory is given up; its number goes on to say so."""
        if self._arrays.pop(number, None) is not None or number in self._unmade:
            self._deleted.add(number)

    def _consume(self, semantics: int, numbers: Sequence[int]) -> None:
        if semantics == DONATE:
            for number in numbers:
                self._delete(number)


_CODES = {
    "lost": UNAVAILABLE,
    "memory": EXHAUSTED,
    "stalemate": EXHAUSTED,
    "cancelled": CANCELLED,
}
"""By the kind of a failure; JAX's own errors of these kinds begin with the same words."""


def status_of(kind: str, error: Exception) -> Status:
    """Any error as a status that names the request or the reason."""
    if isinstance(error, Status):
        return error
    if isinstance(error, PathwaysError):
        return Status(_CODES.get(error.failure.kind, INTERNAL), _told(error))
    if isinstance(error, MemoryError):
        return Status(EXHAUSTED, f"{kind}: the door has no memory for it: {error}")
    if isinstance(error, DecodeError):
        return Status(INVALID, f"{kind}: bytes that are no message of the protocol: {error}")
    if isinstance(error, Inexpressible | dtypes.UnknownType):
        return Status(UNIMPLEMENTED, f"{kind}: {error}")
    log.error("%s", kind, exc_info=error)
    return Status(INTERNAL, f"{kind}: {type(error).__name__}: {error}")


def _told(error: PathwaysError) -> str:
    """The text of an error, without a line: those that are known here are the door's own."""
    return str(PathwaysError(replace(error.failure, line=Line())))
