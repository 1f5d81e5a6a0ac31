"""Labs behind a door: a real one, and one without processes, which believes nothing.

The latter takes what a door gives to its lab, and raises :class:`Impossible` where a real lab
would compute on what is no array, or with arguments of other types than the function's.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import pathways_lab as pw
from pathways_lab.client.code.layouts import replicated
from pathways_lab.client.functions import array_types
from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.client.lab.devices import Placed, Slice
from pathways_lab.client.program.graph import Prepared
from pathways_lab.client.session.handles import Handle, end
from pathways_lab.client.session.pending import Buffer
from pathways_lab.core.errors import Failure
from pathways_lab.core.program.array_types import shard_bytes
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.slices.topology import SliceBinding, SliceRequest
from pathways_lab.runtime.arrays import element_of


class Impossible(AssertionError):
    """The door has told its lab what no lab can do."""


@dataclass
class Behind:
    """What is behind the doors.  evil, other: the labs as two clients have them.

    kept: values of the first.  pids: of the processes of hosts.
    """

    evil: Any
    other: Any
    kept: Callable[[], Sequence[Any]]
    pids: Callable[[], Sequence[int]]


@contextlib.contextmanager
def real() -> Iterator[Behind]:
    """A lab of two islands with two devices each, and its two clients."""
    with (
        tempfile.TemporaryDirectory() as folder,
        pw.start(islands=2, hosts_per_island=1, devices_per_host=2, progress=False) as lab,
    ):
        file = Path(folder) / "lab.json"
        lab.invite(file)
        with pw.connect(file, name="evil") as evil:
            yield Behind(
                evil,
                lab,
                lambda: [value for value in lab.memory().values if value.owner == "evil"],
                lambda: [host.pid for island in lab.islands for host in island.hosts],
            )


@contextlib.contextmanager
def made_up() -> Iterator[Behind]:
    """The same without processes."""
    evil, other = MadeUp(1), MadeUp(2)
    yield Behind(evil, other, lambda: [*evil.session.held], list)


class MadeUp:
    """A lab as a door uses it."""

    closed = False

    def __init__(self, client: int) -> None:
        self.session = _Session(client)
        self.islands = [
            SimpleNamespace(
                name=f"island{n}", hosts=[SimpleNamespace(name=f"host{n}", devices=2, kind="cpu")]
            )
            for n in range(2)
        ]
        self.slices: dict[int, Slice] = {}
        self._numbers = itertools.count(client << 32 | 1)

    def _bound(self, request: SliceRequest, wait: bool) -> Slice:
        assert request.at is not None
        known = {(host.name, n) for island in self.islands for host in island.hosts for n in (0, 1)}
        if not known.issuperset(request.at) or len({*request.at}) != len(request.at):
            raise Impossible(f"a slice of {request.at}")
        made = SliceBinding(
            next(self._numbers), "client", str(request.island), request.shape,
            tuple(request.axes or ()), tuple(request.at), "cpu",
        )  # fmt: skip
        self.slices[made.slice] = Slice(made, self)  # type: ignore[arg-type]
        return self.slices[made.slice]

    def slice_state(self, number: int) -> str:
        return "bound"

    def release_slice(self, number: int) -> None:
        del self.slices[number]


class _Session:
    """Values are there at once; what is not the function ``halves`` makes zeros."""

    def __init__(self, client: int) -> None:
        self.held: dict[int, Buffer] = {}
        self._numbers = itertools.count(client << 32 | 1)
        self.connection = SimpleNamespace(
            closed=None,
            gone=lambda watch: self.held.pop(watch.id, None),
            drop=lambda *numbers: [self.held.pop(number, None) for number in numbers],
        )

    def put(self, leaf: Any, kind: ArrayType, on: Slice, layout: Layout, name: str = "") -> Handle:
        on.check()
        data = array_types.host_bytes(leaf, kind, name)
        if data.shape != kind.shape:
            raise Impossible(f"an array of {data.shape} as {kind}")
        return self._made(on.placed(kind, layout), name, data)

    def call(self, prepared: Prepared, given_leaves: Sequence[Any]) -> list[Handle]:
        prepared.check()
        leaves = [
            leaf
            if isinstance(leaf, Handle)
            else self.put(leaf, ref.type, ref.slice, replicated(ref.slice, len(ref.type.shape)))
            for leaf, ref in zip(given_leaves, prepared.inputs, strict=True)
        ]
        wanted, given = [ref.type for ref in prepared.inputs], [leaf.type for leaf in leaves]
        if wanted != given:
            raise Impossible(f"{prepared.name} of {wanted} is called with {given}")
        made = []
        failed = [leaf.failure for leaf in leaves if leaf.failure is not None]
        failed += [Failure("execute", "nobody answers")] * (prepared.name == "asks")
        for placed, name in prepared.made:
            data = np.zeros(placed.type.shape, element_of(placed.type.dtype).dtype)
            if prepared.name == "halves" and not failed:
                data = leaves[0]._value * 2 + 1
            made.append(handle := self._made(placed, name, data))
            if failed:
                handle._value, handle._buffer.failure = None, failed[0]
        for number, why in prepared.donated.items():
            end([leaves[number]], why)
        return made

    run = call

    def repeat(
        self, prepared: Prepared, order: Sequence[int], leaves: Sequence[Handle]
    ) -> list[Handle]:
        return self.call(prepared, [leaves[index] for index in order])

    async def ended(self, entry: Buffer) -> None:
        """It has."""

    def when_ended(self, handles: Sequence[Handle], call: Callable[[], None]) -> None:
        """They have."""
        call()

    def _made(self, placed: Placed, name: str, data: np.ndarray[Any, Any]) -> Handle:
        try:
            shard_bytes(placed.type.shape, placed.type.dtype, placed.layout)
        except ValueError as error:
            raise Impossible(f"{placed}: {error}") from None
        if placed.layout.devices != len(placed.slice.devices):
            raise Impossible(f"{placed.layout} on {len(placed.slice.devices)} devices")
        buffer = Buffer(next(self._numbers), 0)
        buffer.done = True
        handle = Handle(self, buffer, placed, name)  # type: ignore[arg-type]
        handle._value = data
        self.held[buffer.id] = buffer
        return handle
