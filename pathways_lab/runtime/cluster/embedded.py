"""A lab on this machine: a Dask cluster and its devices, in seconds, and gone without trace.

Problem: one call must start a dozen processes, show what it is doing, and
leave none of them behind, whatever happens: an interrupt in the middle, a
closed notebook, a killed kernel.

How: every process hangs on a lifeline of its parent (see
:mod:`pathways_lab.runtime.processes.child_process`).  All of them start at once, because keys
and socket paths are decided here; only the Dask scheduler's address has to be
waited for.  Nothing is imported into this process but what it needs, so a
notebook pays nothing for Dask until it asks for a Dask client, and a script
needs no ``__main__`` guard.

Rule for maintainers: every started process is reachable from ``close``
before anything can fail; ``close`` may be called at any time, any number of times,
and waits for its own children only, for seconds at most: Ctrl-C waits that long.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pathways_lab.core.errors import PathwaysError, refused
from pathways_lab.runtime.cluster.attach import ControlAddress
from pathways_lab.runtime.cluster.device_supervisor import MODULE
from pathways_lab.runtime.cluster.lab_spec import Wishes, outline
from pathways_lab.runtime.cluster.start_control_plane import ControlSettings
from pathways_lab.runtime.cluster.worker_spec import (
    Recipe,
    check,
    check_name,
    wait_for_workers,
)
from pathways_lab.runtime.islands.process_group import why_hosts_stay_apart
from pathways_lab.runtime.processes.child_process import REMOVE, Child, ChildDied, spawn
from pathways_lab.runtime.processes.dask_environment import QUIET
from pathways_lab.runtime.processes.memory_budget import Budget, plan_budget
from pathways_lab.runtime.processes.start_progress import Progress, Show
from pathways_lab.transport.addresses import private_folder, remove_folder
from pathways_lab.transport.dask_comms import is_comm
from pathways_lab.transport.deferred_signals import HeldBack
from pathways_lab.transport.machine_share import available_memory

if TYPE_CHECKING:
    import distributed

    from pathways_lab.runtime.cluster.dashboard_socket import Pages

_START_SECONDS = 120.0
_END_SECONDS = 10.0


@dataclass
class EmbeddedCluster:
    """A running lab of this machine.

    address: of the Dask scheduler (``tls://127.0.0.1:…``).
    control: where clients of the lab connect.
    pids: ``scheduler``, ``control``, ``workers``, ``devices``, as they were started.
    budget: the memory that it may take.  seconds: how long the start took.
    note: why islands have one host although nobody said so, or "".
    folder: private; logs of all processes, sockets.  Removed at the end.
    recipe: for more workers like the first ones.
    """

    budget: Budget
    folder: Path
    control: ControlAddress = field(repr=False)
    recipe: Recipe = field(repr=False)
    address: str = ""
    note: str = ""
    seconds: float = 0.0
    pids: dict[str, list[int]] = field(default_factory=dict)
    _children: list[Child] = field(default_factory=list, repr=False)
    _islands: dict[str, Child] = field(default_factory=dict, repr=False)
    """By island: the process of its workers, and perhaps of other islands'."""
    _feeders: list[Child] = field(default_factory=list, repr=False)
    _made_feeders: int = field(default=0, repr=False)
    _pems: dict[str, str] = field(default_factory=dict, repr=False)
    _dashboard: str = field(default="", repr=False)
    _owner: int = field(default_factory=os.getpid, repr=False)

    @property
    def security(self) -> distributed.Security:
        """The temporary credentials: who has them is an owner of this lab."""
        import distributed

        return distributed.Security(
            require_encryption=True,
            tls_ca_file=self._pems["ca"],
            tls_client_cert=self._pems["cert"],
            tls_client_key=self._pems["key"],
        )

    def dask_client(self) -> distributed.Client:
        """A Dask client of this cluster; the caller closes it."""
        import distributed

        return distributed.Client(self.address, security=self.security, set_as_default=False)

    def dashboard(self) -> str:
        """Where Dask's dashboard is, on loopback.  The first call loads it: about a second."""
        if not self._dashboard:
            scheduler = self._children[0]
            scheduler.tell({"wish": "dashboard"})
            self._dashboard = scheduler.hear(_START_SECONDS)["address"]
        return self._dashboard

    def add_island(self, name: str, hosts: int | None = None, devices: int | None = None) -> None:
        """Start the workers of one more island, and wait until their devices are there.

        hosts, devices: of the island, and of each host (None: as the first islands have).
        Raises PathwaysError when memory does not suffice or a process does not start;
        then all is as before.
        """
        recipe = self.recipe
        check_name(name)
        if not recipe.emulated:
            raise refused(
                "this lab has accelerators, and all of this machine's are given out",
                "add workers to its Dask cluster on other machines",
            )
        hosts, devices = hosts or recipe.hosts, devices or recipe.devices
        apart = why_hosts_stay_apart("cpu") if hosts > 1 else None
        if apart is not None:
            raise PathwaysError(apart)
        plan_budget(hosts, devices, recipe.memory, available_memory())
        workers = [recipe.worker(name, host, hosts, devices, {}) for host in range(hosts)]
        with self._starting(f"island {name}") as children:
            with HeldBack():
                children.append(recipe.start(f"workers of {name}", workers))
                self._children += children
            children[0].tell(recipe.meeting)
            made = wait_for_workers(children[0], hosts, _START_SECONDS)
        self._islands[name] = children[0]
        self.pids["workers"] += made[0]
        self.pids["devices"] += made[1]

    def add_feeders(self, count: int) -> None:
        """Have *count* workers without devices, for feeds; those that have ended are replaced.

        Raises PathwaysError when one does not start.
        """
        for dead in [child for child in self._feeders if not child.alive]:
            self._feeders.remove(dead)
            self._end([dead])
        with self._starting("a worker for feeds") as children:
            for _ in range(count - len(self._feeders)):
                self._made_feeders += 1
                with HeldBack():
                    children.append(self.recipe.start_feeder(self._made_feeders))
                    self._children.append(children[-1])
            for child in children:
                child.hear(_START_SECONDS)
        self._feeders += children

    @contextlib.contextmanager
    def _starting(self, name: str) -> Iterator[list[Child]]:
        """A list for children that end if the block fails.  name: of all of them, in words."""
        children: list[Child] = []
        try:
            yield children
        except BaseException as error:
            self._end(children)
            if isinstance(error, ChildDied):
                raise refused(f"{name} did not start: {error}", "") from error
            raise

    def remove_island(self, name: str) -> None:
        """End the workers of an island, if they were started here."""
        child = self._islands.pop(name, None)
        if child is None:
            return
        if child not in self._islands.values():
            self._end([child])
            return
        # The first islands have one process, whose other workers go on.
        left = self.recipe.hosts
        with contextlib.suppress(ChildDied):  # then all have ended
            child.tell({"end": name})
            while left:
                report = child.hear(_END_SECONDS)
                left -= report["stage"] == "ended" and report["host"].startswith(f"{name}/")

    def _end(self, children: list[Child]) -> None:
        with HeldBack():
            for child in children:
                self._children.remove(child)
                child.let_go()
            for child in children:
                child.end()

    @property
    def alive(self) -> bool:
        """Whether all processes that were started here run."""
        return bool(self._children) and all(child.alive for child in self._children)

    def close(self) -> None:
        """End every process and remove the folder; Ctrl-C counts afterwards.  Again is fine."""
        if os.getpid() != self._owner:
            # A fork of the notebook must not close the notebook's lab.
            return
        with HeldBack():
            atexit.unregister(self.close)
            for child in self._children:
                child.let_go()
            for child in self._children:
                child.end()
            remove_folder(self.folder)

    def __enter__(self) -> EmbeddedCluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def start_cluster(
    wishes: Wishes,
    progress: Show | None = None,
    *,
    pages: Pages | None = None,
    host_module: str = MODULE,
    stand_in: bool = False,
    kept: bool = False,
) -> EmbeddedCluster:
    """Start a lab on this machine and wait until its devices are there.

    progress: called with a Progress whenever something is there.
    pages: what to add to Dask's dashboard, see :mod:`.cluster.dashboard_socket`.
    host_module: the module that is a device process, for tests.
    stand_in: CPU devices that start as accelerators do, for tests: all hosts of an
        island as one runtime of JAX's own.
    kept: it outlives its kernels, and is in use as long as a client is connected.

    Raises PathwaysError with the numbers when memory does not suffice, where
    hosts cannot compute together, and with the last lines of its log when a
    process does not start.
    """
    started = time.monotonic()
    plan = outline(wishes)
    folder = private_folder()
    settings = ControlSettings.fresh(folder)
    settings.comms = wishes.transport == "dask"
    settings.idle, settings.kept = float(wishes.idle_close or 0.0), kept
    if wishes.transcript:
        settings.transcript = str(Path(wishes.transcript).absolute())
    control = ControlAddress(settings.listen, settings.key)
    recipe = Recipe(
        folder,
        settings,
        plan.given.platform,
        host_module,
        plan.hosts,
        plan.devices,
        plan.budget.device_memory if plan.emulated else wishes.memory,
        stand_in,
    )
    cluster = EmbeddedCluster(plan.budget, folder, control, recipe, note=plan.note)
    atexit.register(cluster.close)
    try:
        places = [(f"island{i}", h) for i in range(wishes.islands) for h in range(plan.hosts)]
        workers = [
            recipe.worker(*place, plan.hosts, plan.devices, plan.given.environment(number))
            for number, place in enumerate(places)
        ]
        with HeldBack():
            _spawn_all(cluster, pages, workers)
        _Start(cluster, len(places), progress or (lambda progress: None), started).wait()
    except BaseException as error:
        cluster.close()
        if isinstance(error, ChildDied):
            raise refused(
                f"the lab did not start: {error}",
                "`python -m pathways_lab doctor` checks what it needs",
            ) from error
        raise
    return cluster


def _spawn_all(
    cluster: EmbeddedCluster, pages: Pages | None, workers: list[dict[str, Any]]
) -> None:
    """Start the scheduler's process and the workers'."""
    recipe = cluster.recipe
    scheduler = spawn(
        "pathways_lab.runtime.cluster.scheduler_main",
        None,
        name="scheduler",
        folder=cluster.folder,
        environment=QUIET,
    )
    cluster._children.append(scheduler)
    plain = pages.plain() if pages is not None else None
    control = recipe.settings.plain()
    scheduler.tell({"control": control, "pages": plain, REMOVE: [str(cluster.folder)]})
    islands = {worker["device"]["island"] for worker in workers}
    child = recipe.start("workers", workers)
    cluster._children.append(child)
    cluster._islands.update(dict.fromkeys(islands, child))


class _Start:
    """Waits for the reports of all processes, in any order."""

    def __init__(self, cluster: EmbeddedCluster, hosts: int, show: Show, started: float) -> None:
        self.cluster = cluster
        self.show = show
        self.started = started
        self.scheduler, self.workers = cluster._children
        self.done = 0
        self.total = 2 + 2 * hosts
        self.pids: dict[str, list[int]] = {
            "scheduler": [self.scheduler.pid],
            "control": [],
            "workers": [],
            "devices": [],
        }

    def wait(self) -> None:
        """Raises ChildDied."""
        self._tell("starting processes")
        deadline = self.started + _START_SECONDS
        with selectors.DefaultSelector() as selector:
            for child in self.cluster._children:
                selector.register(child, selectors.EVENT_READ, child)
            while self.done < self.total:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    waiting = ", ".join(child.name for child in self.cluster._children)
                    raise ChildDied(f"nothing happened for {_START_SECONDS:g} s in {waiting}")
                for key, _ in ready:
                    for report in key.data.reports():
                        self._take(report)
        self.cluster.pids = self.pids
        self.cluster.seconds = time.monotonic() - self.started

    def _take(self, report: dict[str, Any]) -> None:
        check(report)
        stage = report["stage"]
        self.done += 1
        if stage == "control":
            self.pids["control"].append(report["pid"])
            self._tell("control plane is there")
        elif stage == "scheduler":
            cluster = self.cluster
            cluster.address, cluster._pems = report["address"], report["tls"]
            if is_comm(control := report["control"]):
                cluster.control = ControlAddress(control, cluster.control.key, cluster._pems)
            cluster.recipe.meeting = {
                "address": cluster.address,
                "tls": cluster._pems,
                "control": control,
            }
            self.workers.tell(cluster.recipe.meeting)
            self._tell("Dask scheduler is there")
        elif stage == "device":
            self.pids["devices"].append(report["pid"])
            self._tell(f"devices of {report['host']} are there")
        elif stage == "worker":
            self.pids["workers"].append(report["pid"])
            self._tell(f"worker {report['host']} is there")

    def _tell(self, text: str) -> None:
        if self.done == self.total:
            text = "the lab is ready"
        with contextlib.suppress(Exception):
            self.show(Progress(text, self.done, self.total, time.monotonic() - self.started))
