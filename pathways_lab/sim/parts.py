"""Records that hosts, network and world of a simulation hand each other.

Problem: a host begins its parts of gangs, the world lets gangs run, the network
carries bytes; each must be understood (and tested) without the others.

Rule for maintainers: records without behaviour, and the ports through which
the three see each other; no module of the simulation imports one that imports
it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from pathways_lab.core.errors import Failure
from pathways_lab.core.program.program import Call, SliceId, ValueId
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.executor.actions import Receive, Send
from pathways_lab.executor.ends import Ends
from pathways_lab.executor.steps import Key, Segment
from pathways_lab.sim.agenda import Agenda
from pathways_lab.sim.cores import Cores
from pathways_lab.sim.machine import FunctionCost, Machine


def made_of(what: str, *parts: int) -> int:
    """A number for a value: the same for the same maker and the same parts, and no other's."""
    return zlib.crc32(repr((what, parts)).encode()) + 1


@dataclass(slots=True, eq=False)
class Gang:
    """One computation on all hosts of a slice.

    cores: that it keeps busy on each device.
    come: parts whose devices have its turn.  broken: a host of it is dead.
    """

    run: int
    step: int
    hosts: tuple[str, ...]
    seconds: float
    cores: float
    collective: bool
    come: list[Part] = field(default_factory=list)
    start: float = -1.0
    broken: bool = False


@dataclass(slots=True, eq=False)
class Part:
    """A gang on one host.

    segment: of which it is a part.  at: its position there.
    cells: contents of the segment's values.
    gang: None where the host leaves it out.
    launched: it left the launch thread.  running: its devices have come to it.
    over: it has ended, as *seconds* and *failure* say.
    """

    host: HostPort
    segment: Segment
    run: int
    step: int
    call: Call
    devices: tuple[int, ...]
    seq: int
    at: int
    cells: list[Any]
    gang: Gang | None = None
    launched: bool = False
    running: bool = False
    over: bool = False
    seconds: float = 0.0
    failure: Failure | None = None


class HostPort(Protocol):
    """A host, as world and network see it."""

    name: str
    island: str
    ingress: float

    def part_ended(self, part: Part, seconds: float, failure: Failure | None) -> None:
        """A gang has ended on the host."""

    def sent(self, key: Key, failure: Failure | None) -> None:
        """A transfer has taken its bytes."""

    def received(self, action: Receive, content: int | None, failure: Failure | None) -> None:
        """A transfer's bytes are there, or never will be."""


class NetworkPort(Protocol):
    """The network, as a host sees it."""

    def send(self, host: HostPort, action: Send) -> None:
        """A host's bytes for a transfer exist, or never will."""

    def receive(self, host: HostPort, action: Receive) -> None:
        """A host has room for a transfer's bytes."""

    def cancel(self, host: HostPort, key: Key) -> None:
        """A host does not wait for them any more."""

    def give_up(self, run: int) -> None:
        """None of a run's transfers is sent any more."""


class MemoryPort(Protocol):
    """The records of hosts and network."""

    def launched(self, part: Part, time: float) -> None:
        """A gang was handed to the devices of one host."""

    def transfer(
        self, host: HostPort, action: Receive, sources: Iterable[str], start: float, end: float
    ) -> None:
        """A transfer has ended on a host."""


class WorldPort(Protocol):
    """The world, as a host or the network sees it."""

    machine: Machine
    agenda: Agenda
    keep_order: bool
    launch_poisoned: bool
    wait_for_memory: bool
    remember: bool
    cores: Cores
    bindings: dict[SliceId, SliceBinding]
    lanes: dict[SliceId, str]
    local: dict[SliceId, dict[str, tuple[int, ...]]]

    @property
    def memory(self) -> MemoryPort:
        """Records for the timeline."""

    @property
    def carrier(self) -> NetworkPort:
        """The network."""

    def host(self, name: str) -> HostPort | None:
        """A living host."""

    def vary(self, seconds: float) -> float:
        """A duration with the machine's jitter."""

    def alive(self, host: HostPort | None) -> bool:
        """Whether this very device process still runs."""

    def gang(self, part: Part, cost: FunctionCost) -> Gang:
        """The gang that this is a part of."""

    def come(self, part: Part) -> None:
        """All devices of a gang on one host have its turn."""

    def decided(self, host: HostPort, run: int, value: ValueId) -> None:
        """Tells the control plane what a value decides."""

    def report(self, host: HostPort, ends: Ends, resident: tuple[int, ...]) -> None:
        """Takes the report that a host has gathered."""
