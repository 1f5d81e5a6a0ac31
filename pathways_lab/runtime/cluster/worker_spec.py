"""The specification of every worker of an embedded lab, also of later ones.

Problem: islands join a lab that runs; their workers must be like the first
ones, also when the memory of the machine has become short meanwhile, and when
one of them does not start the lab must be as before.

Rule for maintainers: no policy here; the request for an island says how large.

Paper: section 4.1 (resources are added and removed).
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pathways_lab.core.errors import refused
from pathways_lab.runtime.cluster.device_supervisor import DeviceSettings
from pathways_lab.runtime.cluster.start_control_plane import ControlSettings
from pathways_lab.runtime.processes.child_copies import can_fork
from pathways_lab.runtime.processes.child_process import Child, ChildDied, spawn
from pathways_lab.runtime.processes.dask_environment import QUIET
from pathways_lab.runtime.processes.heaps import heaps

WORKERS = "pathways_lab.runtime.cluster.workers_main"
FEEDER = "pathways_lab.runtime.cluster.feed_worker"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,39}")


@dataclass(slots=True)
class Recipe:
    """The settings that the workers of one lab have in common.

    hosts, devices: of an island, and of a host.  memory: bytes per device, or None:
        what accelerators have.
    meeting: what workers are told when the Dask scheduler is there.
    """

    folder: Path
    settings: ControlSettings
    platform: str
    module: str
    hosts: int
    devices: int
    memory: int | None
    stand_in: bool
    meeting: dict[str, Any] = field(default_factory=dict)

    @property
    def emulated(self) -> bool:
        return self.platform == "cpu"

    def worker(
        self, island: str, host: int, hosts: int, devices: int, environment: dict[str, str]
    ) -> dict[str, Any]:
        """The configuration of one worker."""
        settings, name = self.settings, f"{island}/host{host}"
        comms = settings.comms
        return {
            "folder": str(self.folder),
            "module": self.module,
            "environment": environment,
            "device": DeviceSettings(
                # Comms have addresses when the certificates are there.
                control="" if comms else settings.listen,
                key=settings.host_key,
                data_key=settings.data_key,
                name=name,
                island=island,
                devices=devices,
                platform=self.platform,
                memory=self.memory,
                data_listen="dask+tls://127.0.0.1:0"
                if comms
                else f"unix:{self.folder}/data-{island.removeprefix('island')}-{host}",
                worker=name,
                members=1 if self.emulated and not self.stand_in else hosts,
                stand_in=self.stand_in,
            ).configuration(),
        }

    def start(self, name: str, workers: list[dict[str, Any]]) -> Child:
        """The process of some workers; they are told of the scheduler later, with the next line.

        name: for people.
        """
        # Variables that are read at the start of a process, or when JAX is imported.
        environment = {**QUIET, **heaps()}
        if self.emulated:
            environment["JAX_PLATFORMS"] = "cpu"
        return spawn(
            WORKERS,
            {"workers": workers, "copies": can_fork()},
            name=name,
            folder=self.folder,
            environment=environment,
        )

    def start_feeder(self, number: int) -> Child:
        """The process of a worker without devices; it reports when Dask has it."""
        name = f"feed/{number}"
        config = {"name": name, "folder": str(self.folder), "cluster": self.meeting}
        environment = {**QUIET, "JAX_PLATFORMS": "cpu"}
        return spawn(
            FEEDER, config, name=f"worker {name}", folder=self.folder, environment=environment
        )


def check_name(island: str) -> None:
    """Raises PathwaysError for what cannot be the name of an island."""
    if not _NAME.fullmatch(island):
        raise refused(
            f"{island[:60]!r} cannot be an island's name",
            "1 to 40 letters, digits or any of . _ -, and first a letter",
        )


def check(report: dict[str, Any]) -> None:
    """Raises ChildDied for a report of what went wrong."""
    if report["stage"] in ("failed", "ended"):
        raise ChildDied(report["reason"])


def wait_for_workers(child: Child, hosts: int, seconds: float) -> tuple[list[int], list[int]]:
    """Until their devices and workers are there: pids of the workers, and of device processes.

    Raises ChildDied.
    """
    deadline = time.monotonic() + seconds
    pids: dict[str, list[int]] = {"worker": [], "device": []}
    while len(pids["worker"]) < hosts or len(pids["device"]) < hosts:
        report = child.hear(max(0.0, deadline - time.monotonic()))
        check(report)
        pids[report["stage"]].append(report["pid"])
    return pids["worker"], pids["device"]
