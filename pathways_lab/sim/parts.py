"""What hosts, network and world of a simulation hand each other.

Problem: a host launches parts of gangs, the world lets gangs run, the network
carries bytes; each must be understood (and tested) without the others.

Rule for maintainers: records without behaviour, and the ports through which
the three see each other; no module of the simulation imports one that imports
it.

Paper: none.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import Grant
from pathways_lab.core.program.program import Call, Plan, SliceId, Transfer
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.sim.agenda import Agenda
from pathways_lab.sim.cores import Cores
from pathways_lab.sim.machine import FunctionCost, Machine


@dataclass(slots=True, eq=False)
class HostValue:
    """One value's shards on one host.

    ready: a reader may be queued behind its maker.  done: its bytes exist.
    taken: it occupies device memory.  readers: steps here that have not ended.
    kept: a buffer, freed by message.  bad: no value came about here.
    where: its slice.
    content: stands for what the bytes are, see :func:`made_of`; 0: nothing (yet).
    """

    nbytes: int
    devices: tuple[int, ...]
    readers: int = 0
    kept: bool = False
    ready: bool = False
    done: bool = False
    taken: bool = False
    bad: bool = False
    where: SliceId = 0
    content: int = 0
    sends: list[Task] = field(default_factory=list)


def made_of(what: str, *parts: int) -> int:
    """A number for a value: the same for the same maker and the same parts, and no other's."""
    return zlib.crc32(repr((what, parts)).encode()) + 1


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What every host looks up about a step of a plan.

    used: inputs, each once.  consumed: those that it donates.  cost: of a call.
    """

    node: Call | Transfer
    slices: tuple[SliceId, ...]
    used: tuple[int, ...]
    made: tuple[int, ...]
    consumed: tuple[int, ...]
    cost: FunctionCost


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
    """A gang on one host.  turns: devices that have not come to it yet.

    launched: it left the launch thread.  over: it has ended.
    """

    host: HostPort
    task: Task
    gang: Gang
    turns: int
    temporary: int
    launched: bool = False
    over: bool = False


@dataclass(slots=True, eq=False)
class Movement:
    """A transfer on all its hosts.

    origins: all sending hosts.  sources: those whose part does not exist yet.
    targets: receiving hosts, and how many different shards each needs.
    sent: tasks of those whose part does.  arrived: hosts that have their bytes;
    waiting: tasks of hosts that have room for them.  dead: it will never be
    complete.  roles: sends and receives that have not ended.
    content: of the value that moves (see HostValue).
    """

    run: int
    step: int
    origins: tuple[str, ...]
    targets: Mapping[str, int]
    sources: set[str]
    start: float = -1.0
    sent: list[tuple[HostPort, Task]] = field(default_factory=list)
    arrived: set[str] = field(default_factory=set)
    waiting: dict[str, Task] = field(default_factory=dict)
    dead: bool = False
    roles: int = 0
    content: int = 0


@dataclass(slots=True, eq=False)
class RunHere:
    """What one host knows of one run.

    open: its granted steps that have not ended.  left: all that have not.
    prompt: grants wait for their ends.
    """

    grant: Grant
    plan: Plan
    values: dict[int, HostValue] = field(default_factory=dict)
    open: int = 0
    left: int = 0
    prompt: bool = False
    aborted: bool = False


@dataclass(slots=True, eq=False)
class Task:
    """A step of a run on this host.  devices: those whose order it must keep.

    roles: of a transfer, what this host still has to do (send, receive).
    """

    run: RunHere
    step: int
    info: StepInfo
    devices: tuple[int, ...]
    seq: int
    begun: bool = False
    roles: int = 0


class HostPort(Protocol):
    """A host, as world and network see it."""

    name: str
    island: str
    ingress: float

    def part_ended(self, part: Part, seconds: float, failure: Failure | None) -> None:
        """A gang has ended on the host."""

    def receive(self, value: HostValue) -> None:
        """Take room for a transfer's bytes."""

    def received(self, task: Task, bad: bool) -> None:
        """A transfer's bytes are there, or never will be."""

    def sent(self, task: Task) -> None:
        """A transfer has taken its bytes."""

    def end(self, task: Task, seconds: float) -> None:
        """A step has ended."""


class NetworkPort(Protocol):
    """The network, as a host sees it."""

    def begin(self, host: HostPort, task: Task) -> None:
        """A host has come to a transfer."""

    def ready(self, host: HostPort, task: Task) -> None:
        """A host's bytes for a transfer exist."""

    def give_up(self, run: int) -> None:
        """None of a run's transfers is waited for any more."""


class MemoryPort(Protocol):
    """What hosts and network have remembered."""

    def launched(self, part: Part, time: float) -> None:
        """A gang was handed to the devices of one host."""

    def transfer(self, movement: Movement, host: HostPort, task: Task, end: float) -> None:
        """A transfer has ended on a host."""


class WorldPort(Protocol):
    """The world, as a host or the network sees it."""

    machine: Machine
    agenda: Agenda
    keep_order: bool
    launch_poisoned: bool
    remember: bool
    cores: Cores
    plans: dict[str, Plan]
    bindings: dict[SliceId, SliceBinding]
    islands: dict[SliceId, str]
    local: dict[SliceId, dict[str, tuple[int, ...]]]

    @property
    def memory(self) -> MemoryPort:
        """What happened, for the timeline."""
        ...

    @property
    def carrier(self) -> NetworkPort:
        """The network."""
        ...

    def host(self, name: str) -> HostPort | None:
        """A living host."""

    def vary(self, seconds: float) -> float:
        """A duration with the machine's jitter."""
        ...

    def steps(self, key: str) -> tuple[StepInfo, ...]:
        """What there is to know about the steps of a plan."""
        ...

    def alive(self, host: HostPort | None) -> bool:
        """Whether this very device process still runs."""
        ...

    def gang(self, task: Task, cost: FunctionCost) -> Gang:
        """The gang that a task is a part of."""
        ...

    def come(self, part: Part) -> None:
        """All devices of a gang on one host have its turn."""

    def report(
        self,
        host: HostPort,
        finished: tuple[tuple[int, int, float], ...],
        failed: tuple[tuple[int, int, Failure], ...],
        resident: tuple[int, ...],
    ) -> None:
        """What a host has gathered."""
