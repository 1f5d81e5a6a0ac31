"""The specification of a lab on this machine, decided before anything starts.

Problem: an impossible lab must be refused at once, with the numbers; and a kernel whose
old lab would have to end for the new one keeps the old one then.

Rule for maintainers: looks at this machine and changes nothing.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Literal, get_args

from pathways_lab.core.errors import PathwaysError, refused
from pathways_lab.runtime.cluster import accelerators
from pathways_lab.runtime.cluster.accelerators import Assignment
from pathways_lab.runtime.islands.process_group import why_hosts_stay_apart
from pathways_lab.runtime.processes.memory_budget import Budget, plan_budget, usual_hosts
from pathways_lab.transport.machine_share import available_memory

Transport = Literal["sockets", "dask"]


@dataclass(frozen=True, slots=True)
class Wishes:
    """The wishes for a lab.

    hosts_per_island, devices_per_host: None means two; but one host with its share of the
        accelerators, and one with four devices where two hosts cannot compute together or
        leave too little memory.
    memory: bytes per device that programs may use (None: see ``Outline.budget``).
    platform: ``"cpu"``, ``"gpu"``, ``"tpu"``, or ``"auto"``: accelerators when there are enough
        of them, see :mod:`pathways_lab.runtime.cluster.accelerators`.
    transcript: a file for what the core is told and answers (see
        :mod:`pathways_lab.runtime.control_plane.transcript`).
    idle_close: seconds without use after which it ends by itself; None: never.
    transport: ``"sockets"``, or ``"dask"`` for all links over Dask's comms (slower).
    """

    islands: int = 2
    hosts_per_island: int | None = None
    devices_per_host: int | None = None
    memory: int | None = None
    platform: str = "auto"
    transcript: str | Path = ""
    idle_close: float | None = None
    transport: Transport = "sockets"

    def __post_init__(self) -> None:
        """Counts as plain integers, whatever library's they are."""
        for name in ("islands", "hosts_per_island", "devices_per_host"):
            if isinstance(number := getattr(self, name), Integral):
                object.__setattr__(self, name, int(number))

    def check(self) -> None:
        """Raises PathwaysError for what cannot be on any machine."""
        for name in ("islands", "hosts_per_island", "devices_per_host"):
            number = getattr(self, name)
            if number is None and name != "islands":
                continue
            if not isinstance(number, int) or number < 1:
                raise refused(f"{name} is {number!r}", f"{name} is a whole number from 1 on")
        if self.memory is not None and self.memory < 1:
            raise refused(
                f"memory is {self.memory} bytes per device", "memory is a size from 1 byte on"
            )
        if self.transport not in get_args(Transport):
            raise refused(f"transport is {self.transport!r}", 'transport is "sockets" or "dask"')
        idle = self.idle_close or 0
        if not isinstance(idle, int | float) or not 0 <= idle < math.inf:
            raise refused(f"idle_close is {idle!r}", "idle_close is a number of seconds, or None")
        if not isinstance(self.transcript, str | os.PathLike):
            raise refused(f"transcript is {self.transcript!r}", "transcript is the path of a file")
        if self.transcript and not Path(self.transcript).absolute().parent.is_dir():
            raise refused(
                f"transcript is {str(self.transcript)!r}, and there is no such folder",
                "make the folder first, or name a file in another one",
            )


@dataclass(frozen=True, slots=True)
class Outline:
    """The lab that is started.

    hosts: of an island.  devices: of a host.  given: which devices each host gets.
    note: why islands have one host although nobody said so, or "".
    """

    hosts: int
    devices: int
    given: Assignment
    budget: Budget
    note: str

    @property
    def emulated(self) -> bool:
        return self.given.platform == "cpu"


def outline(wishes: Wishes, freed: int = 0) -> Outline:
    """The lab that was asked for, on this machine.

    freed: bytes that will be free besides, when it starts.
    Raises PathwaysError, with the numbers when memory does not suffice.
    """
    wishes.check()
    islands, memory, platform = wishes.islands, wishes.memory, wishes.platform
    hosts, devices = wishes.hosts_per_island, wishes.devices_per_host
    found, available = accelerators.find(), available_memory() + freed
    apart = why_hosts_stay_apart("cpu")
    note = ""
    if hosts is None:
        alone = devices or (len(found.gpus) or found.tpus) // islands or 4
        if accelerators.assign(islands, alone, platform, found).platform != "cpu":
            hosts, devices = 1, alone
        else:
            why = apart.message if apart else ""
            hosts, devices, why = usual_hosts(islands, devices, memory, available, why)
            note = f"islands have one host each: {why}" if why else ""
    devices = devices or 2
    given = accelerators.assign(islands * hosts, devices, platform, found)
    emulated = given.platform == "cpu"
    if emulated and hosts > 1 and apart is not None:
        raise PathwaysError(apart)
    if emulated and platform == "auto" and found != accelerators.Found():
        note = note or (
            f"devices are emulated, for {islands * hosts * devices} are asked for and this machine"
            f" has {found}: pw.start(islands=1) computes on what there is, platform='cpu' says"
            " that this is meant"
        )
    budget = plan_budget(islands * hosts, devices, memory, available, emulated)
    return Outline(hosts, devices, given, budget, note)
