"""Two Dask plugins make a Pathways lab out of a Dask cluster.

Problem: clusters exist already (a queueing system, Kubernetes, SSH, a laptop);
users should not have to start other programs on them.  Dask gives membership,
placement, bootstrap, security and failure detection; everything fast happens in
processes of our own, started from here:

* :class:`ControlPlugin`, on the scheduler, starts the control plane as a child
  and feeds it membership.  The scheduler's own loop stalls for tens of
  milliseconds under load, so nothing is ordered inside it.
* :class:`HostsPlugin`, on every worker now and later, starts the device process
  as a child and replaces it when it dies.

Rule for maintainers: a second registration, also at the same time, finds the
first; nothing here blocks Dask's event loop.  Keys travel only inside plugins
and answers, that is, over Dask's own connections: a holder of the Dask
credentials is an owner of the lab.

Paper: section 4.1; Dask takes the place of the cluster manager below it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import dask
from distributed import SchedulerPlugin, WorkerPlugin

from pathways_lab.runtime.cluster import accelerators, dask_private
from pathways_lab.runtime.cluster.break_process import act
from pathways_lab.runtime.cluster.dashboard_socket import Door, Pages
from pathways_lab.runtime.cluster.death_reports import TOPIC, DeathReports
from pathways_lab.runtime.cluster.device_supervisor import (
    MODULE,
    PATIENCE,
    Change,
    DeviceProcess,
    DeviceSettings,
    prepared,
)
from pathways_lab.runtime.cluster.feed_worker import FEEDS
from pathways_lab.runtime.cluster.membership import Islands, Place, devices_of, place_of
from pathways_lab.runtime.cluster.scheduler_probe import Unreached, reach, unreached_of
from pathways_lab.runtime.cluster.start_control_plane import ANY, ControlProcess, ControlSettings
from pathways_lab.runtime.islands.tls_tunnel import why_clear
from pathways_lab.runtime.processes import job, slurm
from pathways_lab.runtime.processes.child_process import REMOVE, ChildDied
from pathways_lab.transport import dask_comms, versions
from pathways_lab.transport.addresses import machine, port_range, private_folder, remove_folder
from pathways_lab.transport.handshake import SILENCE

log = logging.getLogger("pathways_lab")

_doors: WeakKeyDictionary[Any, Door] = WeakKeyDictionary()
"""Where the pages of the lab of every scheduler are had."""

_planes: WeakKeyDictionary[Any, asyncio.Future[ControlProcess]] = WeakKeyDictionary()
"""The control plane of every scheduler in this process: one each, whoever asks first."""

_plugins: WeakKeyDictionary[Any, ControlPlugin] = WeakKeyDictionary()
"""The plugin of every scheduler that listens to its control plane."""


@dataclass(eq=False, repr=False)
class ControlPlugin(SchedulerPlugin):
    """Runs the control plane beside the Dask scheduler.

    host: where hosts and clients of other machines reach the scheduler's: TCP with the
        cluster's TLS credentials.  None: all are on one machine: Unix sockets.
    pages: what to add to Dask's dashboard; None: nothing.
    plain_collectives: collectives between machines go in the clear.
    silence, ports: see :class:`pathways_lab.runtime.cluster.start_control_plane.ControlSettings`.
    """

    name = "pathways-control"
    idempotent = True

    host: str | None
    pages: Pages | None = None
    plain_collectives: bool = False
    silence: float = SILENCE
    ports: str = ANY
    _names: dict[str, str] = field(default_factory=dict, init=False)
    _workers: dict[str, str] = field(default_factory=dict, init=False)
    _in_use: frozenset[str] = field(default_factory=frozenset, init=False)
    _endings: set[asyncio.Future[None]] = field(default_factory=set, init=False)
    _door: Door | None = field(default=None, init=False)
    _closing: bool = field(default=False, init=False)
    _over: asyncio.Future[None] | None = field(default=None, init=False)

    async def start(self, scheduler: Any) -> None:
        """Start the control plane, or wait for the one that is being started."""
        plane = _planes.get(scheduler)
        if plane is None:
            plane = _planes[scheduler] = asyncio.ensure_future(self._start(scheduler))
        self._plane = await asyncio.shield(plane)
        if self._plane.heard:
            return  # by one that was registered at the same time; Dask keeps that one
        _plugins[scheduler] = self
        loop = asyncio.get_running_loop()

        def soon(function: Callable[..., object], *args: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(function, *args)

        self._plane.listen(
            lambda report: soon(self._wanted, scheduler, report),
            lambda: soon(self._ended, scheduler),
        )
        for address in dask_private.known_workers(scheduler):
            self.add_worker(scheduler, address)
        self._to_workers = dask_private.security_of(scheduler).get_connection_args("scheduler")
        dask_private.answer(scheduler, dask_comms.OPERATION, self._come)
        if self.pages is not None:
            first = scheduler not in _doors
            self._door = _doors[scheduler] = Door(self.pages, self._plane)
            if first and dask_private.has_dashboard():
                publish(scheduler)

    async def _start(self, scheduler: Any) -> ControlProcess:
        try:
            return await asyncio.to_thread(self._launch, scheduler)
        except BaseException:
            # The next one who asks may try again.
            _planes.pop(scheduler, None)
            raise

    def _launch(self, scheduler: Any) -> ControlProcess:
        pems = dask_private.pems_of(dask_private.security_of(scheduler), "scheduler")
        if self.host is not None and pems is None:
            raise PermissionError("; ".join(plain_text(scheduler.address)))
        tls = pems if self.host else None
        settings = ControlSettings.fresh(host=self.host, tls=tls)
        settings.plain_collectives = self.plain_collectives
        settings.silence, settings.ports = self.silence, _ports_here(self.ports)
        process = ControlProcess(settings)
        try:
            process.wait_ready()
        except BaseException:
            process.close()
            raise
        return process

    def add_worker(self, scheduler: Any, worker: str, **kwargs: Any) -> None:
        """Remember its name: when it is removed, Dask tells only the address."""
        name = dask_private.name_of_known_worker(scheduler, worker)
        if name is not None:
            self._names[worker], self._workers[name] = name, worker

    def remove_worker(self, scheduler: Any, worker: str, **kwargs: Any) -> None:
        """Its host is lost, also when the device process only hangs: after a while.

        A worker that retires is removed before it ends, and ends what runs on it first.
        """
        name = self._names.pop(worker, None)
        if name is not None:
            self._workers.pop(name, None)
            with contextlib.suppress(ChildDied):  # the lab has ended before its cluster
                self._plane.worker_removed(name, f"Dask removed its worker ({worker})")

    def valid_workers_downscaling(self, scheduler: Any, workers: list[Any]) -> list[Any]:
        """Workers that adaptive scaling may take: Dask sees no tasks where a lab has slices."""
        return [worker for worker in workers if str(worker.name) not in self._in_use]

    def _wanted(self, scheduler: Any, report: dict[str, Any]) -> None:
        """The control plane says what is in use, or wants a device process ended or started."""
        if "in_use" in report:
            self._in_use = frozenset(report["in_use"])
            return
        if address := self._workers.get(report["worker"]):
            doing = asyncio.ensure_future(
                dask_private.run_on_worker(scheduler, address, act, report["host"], report["wish"])
            )
            self._endings.add(doing)
            doing.add_done_callback(self._endings.discard)

    async def _come(self, comm: Any, door: str) -> str:
        """Somebody whom Dask lets in comes to a door of the lab, which looks at him itself."""
        if door == dask_comms.CONTROL:
            return await dask_comms.bring(comm, self._plane.address)
        if worker := self._workers.get(door):
            return await dask_comms.pass_on(comm, worker, door, self._to_workers)
        return f"no worker is called {door}"

    def log_event(self, topic: str, msg: Any) -> None:
        """A worker says how its device process ended."""
        if topic == TOPIC:
            with contextlib.suppress(ChildDied):
                self._plane.tell({"down": msg})

    def _ended(self, scheduler: Any) -> None:
        if not self._closing:
            log.error("the control plane of the lab has died; %s", self._plane.last_words())
            if not _embedded(scheduler):
                self.over(scheduler)

    def over(self, scheduler: Any) -> asyncio.Future[None]:
        """The control plane has died, and with it the lab; done when the cluster has none any more.

        A later lab is another one, with keys and processes of its own.
        """
        if self._over is None:
            self._over = asyncio.ensure_future(self._leave(scheduler))
        return self._over

    async def _leave(self, scheduler: Any) -> None:
        dask_private.answer(scheduler, dask_comms.OPERATION, None)
        await self.close()
        try:
            await dask_private.remove_plugins(scheduler, self.name, HostsPlugin.name)
        except Exception as error:
            # Its device processes have lost the control plane, and end by themselves.
            log.warning("a worker could not be told that the lab is over: %s", error)
        del _planes[scheduler]

    async def close(self) -> None:
        """The scheduler ends, or the lab: the control plane tells its clients and ends too.

        Again is fine.
        """
        self._closing = True
        door, self._door = self._door, None
        if door is not None:
            door.close()
        try:
            await asyncio.to_thread(self._plane.close)
        except RuntimeError:  # this process ends, and begins no thread any more
            self._plane.close()


def publish(scheduler: Any) -> None:
    """Have the web server of *scheduler*, which asks nobody who he is, serve the lab's pages."""
    from pathways_lab.runtime.cluster.dashboard_proxy import routes

    door = _doors.get(scheduler)
    if door is not None:
        names = door.pages.names
        hosts = dask_private.names_of_this_machine()
        pages = routes(names, lambda: _doors[scheduler].path, hosts)
        dask_private.add_pages(scheduler, pages, names)


def adopt(scheduler: Any, process: ControlProcess) -> None:
    """Let the plugin of *scheduler* use a control plane that was started before it."""
    future: asyncio.Future[ControlProcess] = asyncio.get_running_loop().create_future()
    future.set_result(process)
    _planes[scheduler] = future


async def control_of(dask_scheduler: Any = None) -> dict[str, Any] | None:
    """For ``Client.run_on_scheduler``: addresses and keys of the lab, None when there is none.

    One whose control plane has died is none, and gone from the cluster when this returns.
    """
    plane = _planes.get(dask_scheduler)
    if plane is None:
        return None
    process = await asyncio.shield(plane)
    if not process.alive and not _embedded(dask_scheduler):
        await asyncio.shield(_plugins[dask_scheduler].over(dask_scheduler))
        return None
    return {
        **process.settings.plain(),
        "address": process.address,
        "machine": machine(),
        versions.FIELD: versions.here(),
        "pid": process.pid,
        "alive": process.alive,
        "hosts_are_there": _embedded(dask_scheduler),
        "hosts_come": dask_private.has_worker_plugin(dask_scheduler, HostsPlugin.name),
    }


async def hosts_up(patience: float, dask_scheduler: Any = None) -> None:
    """For ``Client.run_on_scheduler``: wait until the device processes have come that somebody
    else has begun to start on the workers; *patience* seconds at most."""
    workers = dask_private.known_workers(dask_scheduler)
    told = [dask_private.run_on_worker(dask_scheduler, w, _host_up, patience) for w in workers]
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.gather(*told, return_exceptions=True), patience)


async def _host_up(patience: float, dask_worker: Any = None) -> None:
    """On a worker: the plugin may still be on its way to it."""
    seen, end = False, time.monotonic() + patience
    while time.monotonic() < end:
        plugin = dask_private.plugin_of(dask_worker, HostsPlugin.name)
        if plugin.failure is not None if plugin else seen:
            return  # or it could not be set up, and was taken back
        seen = plugin is not None
        await asyncio.sleep(0.02)


def machine_of_scheduler(dask_scheduler: Any = None) -> str:
    """For ``Client.run_on_scheduler``: where the scheduler really is."""
    return machine()


def machine_of_worker(
    islands: Islands, joined: bool, dask_worker: Any = None
) -> tuple[str, str, str, bool]:
    """For ``Client.run``: a worker's machine, where it reaches the scheduler, its island, and
    whether its host computes together with others in the clear.

    joined: accelerators of an island start as one runtime.
    """
    return (
        machine(),
        dask_private.host_of_scheduler(dask_worker),
        place_of_worker(dask_worker, islands).island,
        bool(why_clear()) or (joined and accelerators.find() != accelerators.Found()),
    )


def door_of_host(dask_worker: Any = None) -> tuple[str, str] | None:
    """For ``Client.run``: the host of a worker, and where others reach it; None: it has none."""
    plugin = dask_private.plugin_of(dask_worker, HostsPlugin.name)
    process = None if plugin is None else plugin.process
    if process is None or not process.data_address:
        return None
    return process.name, process.data_address


async def closed_ways(doors: dict[str, str]) -> list[str]:
    """For ``Client.run``: the hosts that this machine does not reach, each in a sentence."""
    return [str(error) for error in await asyncio.to_thread(unreached_of, doors)]


def trouble_at_control(rule: dict[str, Any], dask_scheduler: Any = None) -> None:
    """For ``Client.run_on_scheduler``: trouble for what comes to the control plane.

    rule: see :class:`pathways_lab.runtime.fault_injection.Rule`.
    """
    _planes[dask_scheduler].result().tell({"trouble": rule})


_EMBEDDED = "pathways_lab_embedded"


def mark_embedded(scheduler: Any) -> None:
    """Its workers brought their device processes along: never install them again."""
    setattr(scheduler, _EMBEDDED, True)


def _embedded(scheduler: Any) -> bool:
    return getattr(scheduler, _EMBEDDED, False)


@dataclass(eq=False, repr=False)
class HostsPlugin(WorkerPlugin):
    """Runs a device process beside every Dask worker.

    control: what :func:`control_of` answers.
    devices_per_host, memory, platform, host_module, members, islands: see
        :func:`pathways_lab.runtime.cluster.attach.attach`; members are its hosts_per_island.
    by_dask: a host that does not reach the control plane goes through Dask's scheduler.
    failure: why it could not start the device process, or "" where it did; None: it is at it.
    process: the device process, once it was started.
    """

    name = "pathways-hosts"
    idempotent = True

    control: dict[str, Any]
    devices_per_host: int | None
    memory: int | None
    platform: str
    host_module: str
    members: int = 1
    islands: Islands = "machine"
    by_dask: bool = False
    failure: str | None = field(default=None, init=False)
    process: DeviceProcess | None = field(default=None, init=False)
    _notice: str = field(default="", init=False)
    _ending: bool = field(default=False, init=False)

    async def setup(self, worker: Any) -> None:
        """Start the device process and wait until the control plane knows it.

        A failure (no such device, no memory) is raised with the end of its log.
        A worker for feeds owns no devices.
        """
        try:
            await self._set_up(worker)
        except BaseException as error:
            self.failure = str(error) or repr(error)
            raise
        self.failure = ""

    async def _set_up(self, worker: Any) -> None:
        if FEEDS in dask_private.resources_of(worker):
            return
        first = None
        if prepared and self.host_module == MODULE:
            first, self._folder = prepared.pop()
        else:
            self._folder = private_folder()
        try:
            configuration = self._configuration(worker)
            way = await asyncio.to_thread(self._way_to_control, worker, configuration["control"])
            configuration["control"] = way
        except Exception as error:
            if first is not None:
                await asyncio.to_thread(first.end)
            remove_folder(self._folder)
            self._left_out(worker, error)
            raise
        self._reports = DeathReports(configuration)
        self._reports.attach(worker)
        dask_private.answer(worker, dask_comms.OPERATION, self._come)
        self._hear_notice(worker)
        self.process = await asyncio.to_thread(
            DeviceProcess,
            {**configuration, REMOVE: [str(self._folder)]},
            self._folder,
            self._changed,
            self.host_module,
            first=first,
        )
        try:
            await asyncio.to_thread(self.process.wait_ready)
        except BaseException:
            await self.teardown(worker)
            raise

    async def _come(self, comm: Any, door: str) -> str:
        """As at the scheduler; the only door here is the host's."""
        listens = "" if self.process is None else self.process.listens
        return await dask_comms.bring(comm, listens) if listens else "it is not there"

    async def teardown(self, worker: Any) -> None:
        """The worker ends, and with it the device process, which ends what it has begun first."""
        if self.process is None:
            return
        dask_private.answer(worker, dask_comms.OPERATION, None)
        self._ending = True
        try:
            lost = not await asyncio.to_thread(dask_private.has_scheduler, worker)
            why = self._notice and await asyncio.to_thread(_why_told, self._notice)
            await asyncio.to_thread(self.process.retire, PATIENCE, lab_lost=lost, why=why)
        except RuntimeError:  # as above; the scheduler may be in this process, and waits for us
            self.process.close()
        remove_folder(self._folder)

    def _hear_notice(self, worker: Any) -> None:
        """Have the worker leave in order when its process is told to end.

        A scheduler of jobs tells every process of a job, and kills them some time later.  Dask's
        command minds that; a worker below a nanny would die of it at once, and all runs with it.
        """
        before = signal.getsignal(signal.SIGTERM)
        alone = before is signal.SIG_DFL and not dask_private.has_nanny(worker)
        if alone or threading.current_thread() is not threading.main_thread():
            return
        loop = asyncio.get_running_loop()

        def hear(number: int, frame: FrameType | None) -> None:
            self._notice = job.notice(os.environ, time.time())
            if self._ending:
                return  # Dask's command would cancel that, and wait for ever
            if callable(before):
                before(number, frame)
            else:
                loop.call_soon_threadsafe(self._leave, worker)

        signal.signal(signal.SIGTERM, hear)

    def _leave(self, worker: Any) -> None:
        # The nanny is told, too, and would wait for this worker while that waits for its answer.
        self._leaving = asyncio.ensure_future(worker.close(nanny=False, reason=self._notice))

    def _configuration(self, worker: Any) -> dict[str, Any]:
        # Else its hello would be refused, seconds later.
        if wrong := versions.apart(self.control[versions.FIELD], "the lab", "this worker"):
            raise RuntimeError(f"{wrong}; {versions.REMEDY}")
        resources = dask_private.resources_of(worker)
        place = place_of_worker(worker, self.islands)
        threads, limit = dask_private.limits_of(worker)
        settings = ControlSettings.from_plain(self.control)
        contact = dask.config.get("pathways.contact", "")
        if settings.host is None:
            if self.control["machine"] != machine():
                raise PermissionError("; ".join(beyond(worker.address)))
            if not dask_private.is_loopback(worker.address):
                _pems_of(worker)
            pems, data_listen = None, f"unix:{self._folder}/data"
        else:
            pems = _pems_of(worker)
            ports = _ports_here(settings.ports)
            # Others may reach this machine at an address that is none of its own.
            here = "0.0.0.0" if contact else dask_private.host_of(worker.address)
            data_listen = f"tcp://{here}:{ports}"
        return DeviceSettings(
            control=self.control["address"],
            key=settings.host_key,
            data_key=settings.data_key,
            name=place.host,
            island=place.island,
            devices=devices_of(resources, self.devices_per_host),
            platform=self.platform,
            memory=self.memory,
            data_listen=data_listen,
            worker=str(worker.name),
            tls=pems,
            members=self.members,
            processors=job.processors_of(os.environ, threads),
            room=job.room_of(os.environ, limit),
            plain_collectives=settings.plain_collectives,
            contact=contact,
        ).configuration()

    def _way_to_control(self, worker: Any, address: str) -> str:
        """The address at which the control plane is reached from here.

        Raises ConnectionError; the device process would try for longer, and not say it so well.
        """
        try:
            reach(address, "the lab's control plane")
        except Unreached as error:
            if not self.by_dask:
                raise ConnectionError(f"{error}; {error.remedy}") from None
            return dask_comms.through(dask_private.scheduler_of(worker), dask_comms.CONTROL)
        return address

    def _left_out(self, worker: Any, error: Exception) -> None:
        """Clients of a lab that runs hear of it too."""
        try:
            place = place_of_worker(worker, self.islands)
        except Exception:  # which may be why it is left out
            place = place_of_worker(worker)
        reports = DeathReports(
            {"name": place.host, "island": place.island, "worker": str(worker.name)}
        )
        reports.attach(worker)
        reason = f"was not started on {socket.gethostname()}: {error}"
        # The worker's own number: there may be a host of that name, and it is none of its.
        reports.changed(Change("left out", os.getpid(), reason=reason))

    def _changed(self, change: Change) -> None:
        self._reports.changed(change)
        if change.state != "ready":
            words = f"; {change.words}" if change.words else ""
            log.warning("device process %s: it %s%s", change.state, change.reason, words)


def place_of_worker(worker: Any, islands: Islands = "machine") -> Place:
    """Host and island of a Dask worker; in its process."""
    resources = dask_private.resources_of(worker)
    return place_of(worker.name, resources, os.environ, socket.gethostname(), islands)


def _ports_here(asked: str) -> str:
    """The ports of doors of this machine: its own Dask configuration knows its firewall."""
    own = dask.config.get("pathways.ports", None)
    return asked if own is None else port_range(own)


def _why_told(notice: str) -> str:
    """Why this worker was told to end: its scheduler of jobs knows, and it can only guess."""
    number = job.number_of(os.environ)
    return (number and slurm.explain(number)) or notice


def _pems_of(worker: Any) -> dict[str, str]:
    """Raises PermissionError where others could listen, and come to the worker."""
    pems = dask_private.pems_of(dask_private.security_of(worker), "worker")
    if pems is None:
        raise PermissionError("; ".join(plain_text(worker.address)))
    return pems


def beyond(address: str) -> tuple[str, str]:
    """The error and the remedy where one of another machine comes to a lab of one machine."""
    return (
        f"this lab was made for the machine of the Dask scheduler alone, and {address} is on "
        "another one",
        "close the lab, and make it anew when a worker of another machine is there, or from there",
    )


def plain_text(address: str) -> tuple[str, str]:
    """The error and the remedy where others could listen."""
    return (
        f"the Dask cluster at {address} is reachable from other machines and sends in the clear: "
        "anybody on the network could run code in the lab",
        "start it with TLS credentials (security=distributed.Security.temporary() makes a set), or "
        "on loopback",
    )
