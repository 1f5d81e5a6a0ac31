"""The state of one client program: its numbers, and what they mean on the lab.

Problem: JAX's client numbers its own arrays and goes on without an answer; on the lab the same
numbers mean handles.

Rule for maintainers: the thread of requests never waits for the work of the lab.  Values are
awaited in the loop, and answers go out from there.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.lab import Lab
from pathways_lab.client.program.graph import Prepared
from pathways_lab.core.errors import PathwaysError
from pathways_lab.core.program.program import Line
from pathways_lab.core.slices.topology import SliceRequest
from pathways_lab.door import dtypes
from pathways_lab.door.programs import Loaded, Remotely
from pathways_lab.door.server import (
    INTERNAL,
    INVALID,
    NOT_FOUND,
    UNAVAILABLE,
    UNIMPLEMENTED,
    Buffers,
    Reply,
    Status,
)
from pathways_lab.door.shardings import Inexpressible
from pathways_lab.door.values import Value

_OWN = 1 << 60
"""From here on numbers are the server's; the client counts from one."""
DONATE = 3
"""ARRAY_COPY_SEMANTICS_DONATE_INPUT."""


class State:
    """One client program.  loop: of the door's process, in which values are awaited.

    remote: makes what calls a function of the client.
    """

    def __init__(
        self,
        lab: Lab,
        buffers: Buffers,
        loop: asyncio.AbstractEventLoop,
        remote: Remotely,
    ) -> None:
        self._lab = lab
        self._buffers = buffers
        self._loop = loop
        self._remote = remote
        self._owned = [
            (island.name, host.name, number)
            for island in lab.islands
            for host in island.hosts
            for number in range(host.devices)
        ]
        self._kind = lab.islands[0].hosts[0].kind
        self._arrays: dict[int, Value] = {}
        self._unmade: dict[int, Status] = {}
        self._deleted: set[int] = set()
        self._futures: dict[int, Coroutine[Any, Any, Any] | None] = {}
        self._programs: dict[int, Loaded] = {}
        self._slices: dict[tuple[int, ...], Slice] = {}
        self._prepared: dict[Any, Prepared] = {}
        self._numbers = itertools.count(_OWN)

    def slice_of(self, devices: tuple[int, ...]) -> Slice:
        """The slice of exactly these devices, in this order.  Raises Status when none can be."""
        known = self._slices.get(devices)
        if known is not None and known.state != "lost" and not known.released:
            return known
        if not devices or any(not 0 <= d < len(self._owned) for d in devices):
            raise Status(INVALID, f"devices {devices}: the lab has {len(self._owned)}")
        islands = dict.fromkeys(self._owned[d][0] for d in devices)
        if len(islands) > 1:
            raise Status(
                UNIMPLEMENTED,
                f"one computation or array on {len(devices)} devices of the islands"
                f" {' and '.join(islands)}: an island's devices compute together, those of two"
                " do not. Make a mesh of jax.devices() of one island (device.island)",
            )
        request = SliceRequest(
            (len(devices),),
            ("d",),
            next(iter(islands)),
            at=tuple(self._owned[d][1:] for d in devices),
        )
        made = self._slices[devices] = self._lab._bound(request, True)
        return made

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

    def _future(self, work: Coroutine[Any, Any, Any] | None, number: int = 0) -> int:
        number = number or next(self._numbers)
        self._futures[number] = work
        return number

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
        number = number or next(self._numbers)
        self._arrays[number] = value
        return number

    def _consume(self, semantics: int, numbers: Sequence[int]) -> None:
        if semantics == DONATE:
            for number in numbers:
                self._arrays.pop(number, None)
                self._deleted.add(number)


async def all_ended(waited: Sequence[Value]) -> None:
    """Wait until all are there, or will never be; then raise for the first that will not."""
    failure: Exception | None = None
    for value in waited:
        try:
            await value.ended()
        except (PathwaysError, Status) as error:
            failure = failure or error
    if failure is not None:
        raise failure


def status_of(kind: str, error: Exception) -> Status:
    """Any error as a status that names the request or the reason."""
    if isinstance(error, Status):
        return error
    if isinstance(error, PathwaysError):
        return Status(UNAVAILABLE if error.failure.kind == "lost" else INTERNAL, _told(error))
    if isinstance(error, Inexpressible | dtypes.UnknownType):
        return Status(UNIMPLEMENTED, f"{kind}: {error}")
    return Status(INTERNAL, f"{kind}: {type(error).__name__}: {error}")


def _told(error: PathwaysError) -> str:
    """The text of an error, without a line: those that are known here are the door's own."""
    return str(PathwaysError(replace(error.failure, line=Line())))
