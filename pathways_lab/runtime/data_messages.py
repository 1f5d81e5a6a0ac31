"""The messages that hosts take over their data links: their fields, types and bounds.

Problem: clients and other hosts send fields of any type and size.  A number that is
infinite, negative or too large, a mesh without devices or a type that a library would
parse must be found before anything acts on them, or one message harms every client.

How: see :mod:`pathways_lab.transport.edge`.  ``__post_init__`` checks rules that type hints
cannot say.  Senders build the same classes.

Rule for maintainers: a new operation is a class here and a line in :data:`DATA`; no handler
sees plain fields.

Paper: section 4.5 (data between hosts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from pathways_lab.core.errors import Failure
from pathways_lab.core.program.array_types import DEVICES, DIMENSIONS, shard_bytes
from pathways_lab.core.program.bundles import is_bundle
from pathways_lab.core.program.layout import Box, Layout
from pathways_lab.core.program.program import Leaf, Value
from pathways_lab.transport.codec import Within, pack_fields
from pathways_lab.transport.edge import Door, Number, Plain, Size

T = TypeVar("T")

PARTS = 64
"""Parts of a transfer that one message holds at most."""
Device = Annotated[int, Within(0, DEVICES - 1)]
"""A row-major device number in a slice."""
_Box = Annotated[tuple[tuple[Size, Size], ...], Within(0, DIMENSIONS)]
"""A box of an array, see :data:`pathways_lab.core.program.layout.Box`."""


@dataclass(frozen=True, slots=True)
class Put(Plain):
    """Shards of an upload, or of a value whose slice moves; the buffers are their bytes.

    devices: whose shards these are, one per buffer; of a bundle those of its arrays, one after
        the other.
    sources: by device, which of the buffers is its shard, where devices have the same one.
    leaves: the arrays of a bundle.
    generation: of the slice's binding for which the devices were chosen.
    """

    parcels: ClassVar[tuple[int, int]] = 0, DEVICES
    buffer: Number
    slice: Number
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    devices: tuple[Device, ...] = ()
    generation: Number = 0
    leaves: tuple[Leaf, ...] = ()
    sources: tuple[Device, ...] = ()

    def __post_init__(self) -> None:
        _check_distinct(self.devices)
        if self.sources and len(self.sources) != len(self.devices):
            raise ValueError(f"{len(self.devices)} devices have {len(self.sources)} sources")
        value = self.value  # raises ValueError for what is no array
        if self.leaves and not is_bundle(value):
            raise ValueError("a bundle is described otherwise than its arrays")

    @property
    def value(self) -> Value:
        """The array that all shards make, or the bundle."""
        described = self.shape, self.dtype, self.slice, self.layout
        arrays = self.leaves or (Leaf(self.shape, self.dtype, self.layout),)
        nbytes = sum([shard_bytes(each.shape, each.dtype, each.layout) for each in arrays])
        return Value(*described, nbytes, leaves=self.leaves)

    def parts(self, buffers: Sequence[T]) -> dict[int, T]:
        """Shards by device.  Raises ValueError when there is not one for each, or one too many."""
        if not self.sources:
            return dict(zip(self.devices, buffers, strict=True))
        if {*self.sources} != {*range(len(buffers))}:
            raise ValueError(f"{len(buffers)} buffers are not the sources {self.sources}")
        return {d: buffers[n] for d, n in zip(self.devices, self.sources, strict=True)}


@dataclass(frozen=True, slots=True)
class Ask(Plain):
    """A client wants shards of a buffer, or without devices to hear when it is there.

    id: goes back with the answer.
    leaf: which array, where the buffer is a bundle.
    ticket: what allows a buffer of another client's.
    slice, generation: where the client believes the buffer to be; 0: not said.
    """

    id: Number
    buffer: Number
    devices: tuple[Device, ...]
    ticket: bytes | None = None
    slice: Number = 0
    generation: Number = 0
    leaf: Number = 0

    def __post_init__(self) -> None:
        _check_distinct(self.devices)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a transfer, in a buffer of its own.

    target: device number.  box: what the buffer holds of the array.
    rows: the buffer holds these rows of the box, from and to, and all others are zeros.
    onward: hosts, and their targets, that the part goes on to from its receiver.
    """

    target: Device
    box: _Box
    rows: tuple[Number, Number] | None = None
    onward: tuple[tuple[str, Device], ...] = ()


@dataclass(frozen=True, slots=True)
class Parts(Plain):
    """Parts of a transfer from another host, one per buffer, or why there will be none.

    sent: seconds on the control plane's clock.
    """

    parcels: ClassVar[tuple[int, int]] = 0, PARTS
    run: Number
    step: Number
    parts: tuple[Part, ...] = ()
    sent: float = 0.0
    failure: Failure | None = None

    def pairs(self, buffers: Sequence[T]) -> list[tuple[Part, T]]:
        """Each part and its buffer.  Raises ValueError when there is not one for each."""
        return list(zip(self.parts, buffers, strict=True))


@dataclass(frozen=True, slots=True)
class Parted(Plain):
    """A client has taken all that came before the host's word ``parting``."""


DATA: Door = {"put": Put, "fetch": Ask, "parts": Parts, "parted": Parted}
"""The messages of clients and other hosts to a host."""


def upload_fields(
    buffer: int,
    slice_id: int,
    shape: Sequence[int],
    dtype: str,
    layout: Layout | None,
    leaves: tuple[Leaf, ...] = (),
) -> dict[str, Any]:
    """The fields of a :class:`Put` of this array, or bundle, for no device yet."""
    assert layout is not None
    return pack_fields(Put(buffer, slice_id, tuple(shape), dtype, layout, leaves=leaves))


def distinct(boxes: Sequence[Box]) -> tuple[list[Box], tuple[int, ...]]:
    """The boxes without those that come again, and the sources: which of them each one is.

    No sources where none comes again.
    """
    found = {box: number for number, box in enumerate(dict.fromkeys(boxes))}
    return list(found), tuple([found[box] for box in boxes]) if len(found) < len(boxes) else ()


def _check_distinct(devices: tuple[int, ...]) -> None:
    if len(set(devices)) != len(devices):
        raise ValueError("a device is named twice")
