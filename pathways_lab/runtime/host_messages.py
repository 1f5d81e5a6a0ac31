"""The messages of hosts to the control plane: their fields, types and bounds.

Problem and rule: see :mod:`pathways_lab.transport.edge`.  A host is a process of the lab and
runs the code of clients: a fault in it reaches the control plane here, and costs that host its
link, and no other process anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pathways_lab.core.diagnosis.stall import Seen
from pathways_lab.core.errors import Failure
from pathways_lab.transport.codec import PACKED
from pathways_lab.transport.edge import Count, Door, Id, Number, Plain, Seconds, Size


@dataclass(frozen=True, slots=True)
class Report(Plain):
    """See :class:`pathways_lab.core.messages.HostReport`.

    records: for the timeline, as :mod:`pathways_lab.transport.record_encoding` writes them.
    """

    ended: tuple[tuple[Id, Count, tuple[Seconds, ...]], ...] = ()
    failed: tuple[tuple[Id, Count, Failure], ...] = ()
    resident: tuple[Id, ...] = ()
    compiled: tuple[tuple[str, Id, Size, Failure | None], ...] = ()
    parked: tuple[Id, ...] = ()
    moved: tuple[Id, ...] = ()
    decided: tuple[tuple[Id, Count, Count], ...] = ()
    crossing: tuple[tuple[str, Id, Size], ...] = ()
    records: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Output(Plain):
    """Text that user code printed.  run: 0 where none is known.  device: -1 likewise."""

    run: Number
    device: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Joined(Plain):
    """The host has met the others of a formation, or could not."""

    number: Count
    failure: Annotated[Failure, PACKED] | None


@dataclass(frozen=True, slots=True)
class Left(Plain):
    """The host has left a formation, and minds the end of its services no more."""

    number: Count


@dataclass(frozen=True, slots=True)
class Leaving(Plain):
    """The host takes nothing new, and goes."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unmoved(Plain):
    """Values of a suspended slice could not be sent to its present host."""

    slice: Id
    reason: str


@dataclass(frozen=True, slots=True)
class Broken(Plain):
    """The hosts of a formation cannot compute together any more."""

    number: Count
    reason: str


@dataclass(frozen=True, slots=True)
class Progress(Plain):
    """The answer to a question: gangs that were granted and have not ended."""

    number: Count
    gangs: tuple[Annotated[Seen, PACKED], ...]


@dataclass(frozen=True, slots=True)
class RejectedClient(Plain):
    """A data link was closed because of what came over it.  client: number of who had it."""

    client: Number
    reason: str


@dataclass(frozen=True, slots=True)
class Pulse(Plain):
    """The host lives."""


@dataclass(frozen=True, slots=True)
class Closing(Plain):
    """The last words of a process that ends."""

    reason: str = ""


HOSTS: Door = {
    "report": Report,
    "output": Output,
    "joined": Joined,
    "left": Left,
    "leaving": Leaving,
    "unmoved": Unmoved,
    "broken": Broken,
    "progress": Progress,
    "rejected": RejectedClient,
    "pulse": Pulse,
    "closing": Closing,
}
"""The messages of hosts."""
NOBODY: Door = {}
"""Messages of observers, and of device processes that wait for the others of their island."""
