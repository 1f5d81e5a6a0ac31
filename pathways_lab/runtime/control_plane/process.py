"""The control plane's process: ``python -m pathways_lab.runtime.control_plane.process``.

Problem: what orders all islands for all clients must answer in microseconds,
so it shares a process with nobody: not with a notebook kernel, whose cells
keep the interpreter busy, and not with the Dask scheduler, whose event loop
stalls for tens of milliseconds under load.

It has one door for clients and hosts, told apart by the keys that they prove, so that no
client can pass as a host, and another one for the processes of users' own policies.  Its
life hangs on the process that started it.

Rule for maintainers: this module only connects the reactor with the rim.

Paper: section 4 (the resource manager and the schedulers of all islands), here
in one place on purpose: the order of gangs must be one.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathways_lab.core.control import Control
from pathways_lab.core.diagnosis.stall_detector import PERIOD
from pathways_lab.runtime.cluster.device_supervisor import PATIENCE
from pathways_lab.runtime.cluster.start_control_plane import IDLE
from pathways_lab.runtime.control_plane.directory import ClientSeen, HostSeen, ObserverSeen
from pathways_lab.runtime.control_plane.driver import Rim, Wish
from pathways_lab.runtime.control_plane.policy_supervisor import PolicyDesk, Processes
from pathways_lab.runtime.control_plane.record_stream import BATCH_SECONDS
from pathways_lab.runtime.control_plane.transcript import LastEvents, Transcript
from pathways_lab.runtime.fault_injection import Troubles
from pathways_lab.runtime.host_messages import NOBODY
from pathways_lab.runtime.islands.accelerator_groups import Assemblies, HostWaiting
from pathways_lab.runtime.islands.coordination_service import Coordination
from pathways_lab.runtime.processes import child_process, slurm
from pathways_lab.transport import auth
from pathways_lab.transport.codec import unpack_fields
from pathways_lab.transport.dask_comms import is_comm
from pathways_lab.transport.edge import Malformed, parsed
from pathways_lab.transport.framing import TO_CONTROL
from pathways_lab.transport.handshake import SILENCE, STREAM, Refused
from pathways_lab.transport.link import Link, LinkClosed
from pathways_lab.transport.reactor import Reactor
from pathways_lab.transport.tls import server_context

_WORD_SECONDS = 1.0
"""When a host's link closes, its worker soon says why; for so long it is waited for that."""
_NOTE_SECONDS = 0.2
"""A host whose worker Dask has removed may be about to say why it leaves; Dask does not know.  One
in a job has asked Slurm first, and may take as long as above."""


@dataclass(frozen=True, slots=True)
class Keys:
    """door: to connect as an owner; others are made of it.  data: for data links to hosts."""

    door: bytes
    data: bytes


class ControlPlane:
    """A reactor, a rim and a core, connected.

    folder: where hosts that compute together meet, see
        :class:`pathways_lab.runtime.islands.coordination_service.Coordination`.
    wish: see :class:`pathways_lab.runtime.control_plane.driver.Rim`.
    address: the real one of its door.
    idle, kept: see :class:`pathways_lab.runtime.cluster.start_control_plane.ControlSettings`.
    record: is given every event, with what the core answered.
    silence: seconds without a sign of a machine after which it counts as lost.
    why_ended(job): why a job has ended, or "", after a moment.
    """

    def __init__(
        self,
        core: Control,
        keys: Keys,
        listen: str,
        folder: Path,
        context: ssl.SSLContext | None = None,
        idle: float = 0.0,
        kept: bool = False,
        wish: Wish = lambda do, host, worker, pid=0: None,
        record: LastEvents | None = None,
        silence: float = SILENCE,
        why_ended: Callable[[str], str] = slurm.explain,
    ) -> None:
        self._keys = keys
        self._why_ended = why_ended
        self._silence = silence
        self._observers = itertools.count(1)
        self._idle, self._kept = idle, kept
        self._closing: dict[str, Link] = {}
        """Links of hosts that have closed, and for whose worker's word is waited."""
        self.reactor = Reactor(
            "control", self._message, self._closed, self._opened, limits=TO_CONTROL, awake=True
        )
        self.coordination = Coordination(folder, self.reactor.call_soon)
        self.assemblies = Assemblies(self.coordination, self._tell_waiting, self._end_host)
        policy_key = auth.new_key()
        policy_address = self.reactor.listen(
            f"unix:{folder}/policies.sock", policy_key, self._meet_policy
        )
        processes = Processes(policy_address, policy_key, folder, self.reactor.call_soon)
        self.rim = Rim(
            core,
            time.monotonic,
            self._flush_later,
            self.coordination,
            lambda rim: PolicyDesk(rim, processes, time.monotonic, self.reactor.call_later),
            keys.data,
            wish,
            record,
            self._close_soon,
        )
        self._certified = context is not None and not is_comm(listen)
        self.address = self.reactor.listen(listen, keys.door, self._meet, context=context)
        self.reactor.call_later(PERIOD, self._look)

    def close(self, reason: str) -> None:
        """Tell the clients, close everything, wait at most a moment."""
        told = threading.Event()
        self.reactor.call_soon(self.rim.closing, reason)
        self.reactor.call_soon(told.set)
        told.wait(0.2)
        self.coordination.end()
        self.reactor.close(reason)

    def _close_soon(self, reason: str) -> None:
        """The same in the reactor's own thread."""
        threading.Thread(target=self.close, args=(reason,), name="end", daemon=True).start()

    def worker_removed(self, worker: str, reason: str) -> None:
        """Dask gave up a worker: its host takes nothing new, and ends what it has begun.

        It is lost at last, also if its process only hangs.  Any thread.
        """
        self.reactor.call_soon(self._worker_leaves, worker, reason)

    def host_down(self, report: dict[str, Any]) -> None:
        """Its worker says how a device process ended, see :mod:`.death_reports`.  Any thread."""
        self.reactor.call_soon(self.rim.host_down, report)

    def restart_host(self, name: str, reason: str) -> None:
        """End a device process that does not come to an end; another takes its place.  Any thread.

        Every handle on it fails, naming *reason*.
        """
        self.reactor.call_soon(self.rim.restart_host, name, reason)

    def _worker_leaves(self, worker: str, reason: str) -> None:
        for link in self.reactor.links:
            if isinstance(link.tag, HostSeen) and link.tag.worker == worker:
                note = _WORD_SECONDS if link.tag.job else _NOTE_SECONDS
                self.reactor.call_later(note, self._leaves, link, link.tag.name, reason)
                self.reactor.call_later(PATIENCE, link.close, reason)
        for host, link in self._closing.items():
            if link.tag.worker == worker and not link.tag.job:
                self.rim.host_lost(host, reason, link)
        self.rim.worker_left(worker)

    def _leaves(self, link: Link, host: str, reason: str) -> None:
        if self.rim.peers.is_current(host, link):
            self.rim.host_leaves(host, reason)

    def _look(self) -> None:
        self.rim.look()
        used = self._kept and self.rim.registry.clients
        if self._idle and not used and self.rim.idle() > self._idle:
            self._idle = 0.0
            self._close_soon(f"it closed itself: nobody used it for {self.rim.idle():.0f} s {IDLE}")
        self.reactor.call_later(PERIOD, self._look)

    def _flush_later(self) -> None:
        self.reactor.call_later(BATCH_SECONDS, self.rim.diary.flush)

    def _tell_waiting(self, host: str, op: str, fields: dict[str, Any]) -> None:
        for link in self.reactor.links:
            if isinstance(link.tag, HostWaiting) and link.tag.name == host:
                with contextlib.suppress(LinkClosed):
                    link.send(op, fields)

    def _end_host(self, host: str, reason: str) -> None:
        """A device process whose links to here are closed ends itself."""
        for link in self.reactor.links:
            if isinstance(link.tag, HostSeen | HostWaiting) and link.tag.name == host:
                link.close(reason)

    # --- links -------------------------------------------------------------------

    def _meet(self, link: Link, hello: dict[str, Any]) -> dict[str, Any]:
        meet = self._meet_host if link.holder == auth.HOSTS else self._meet_client
        return meet(link, hello)

    def _meet_client(self, link: Link, hello: dict[str, Any]) -> dict[str, Any]:
        if hello.get("role") == "observer":
            return self._meet_observer(link)
        if hello.get("role") != "client":
            raise Refused("this key is for clients")
        pid = hello.get("pid")
        try:
            # Who has been invited comes with a key of his own (see attach.invitation).
            number = pid if type(pid) is int else 0
            client = self.rim.new_client(str(hello["name"]), number, link.holder)
        except (KeyError, ValueError) as error:
            raise Refused(str(error)) from error
        link.name, link.tag = client.name, client
        topology = self.rim.registry.topology()
        topology["clients"].append(client.name)
        return {
            "role": "control",
            "name": "control",
            "client": client.name,
            "number": client.number,
            "owner": client.owner,
            "kept": self.rim.registry.bindings_of(client.inherited),
            "topology": topology,
            "policy": self.rim.registry.policy_in_force(),
            "silence": self._silence,
            "data_key": auth.key_of(self._keys.data, client.number),
            "emulated": any(host.emulated for host in self.rim.registry.hosts.values()),
        }

    def _meet_observer(self, link: Link) -> dict[str, Any]:
        """It is told what clients who watch are told, and is none of them."""
        link.name = f"observer {next(self._observers)}"
        link.tag = ObserverSeen(link.name)
        return {"role": "control", "name": "control", "topology": self.rim.registry.topology()}

    def _meet_host(self, link: Link, hello: dict[str, Any]) -> dict[str, Any]:
        # Invited clients come to this door, too, who have none.
        if self._certified and not link.certified:
            raise Refused("a host shows a certificate")
        if hello.get("role") == STREAM and link.certified:
            link.taker = functools.partial(self.coordination.bring, hello.get("number"))
            return {"role": "control", "name": "control"}
        if hello.get("role") not in ("host", "waiting"):
            raise Refused("this key is for hosts")
        try:
            waits = hello["role"] == "waiting"
            link.tag = HostWaiting.seen(hello) if waits else unpack_fields(HostSeen, hello)
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(f"the hello of a host is malformed: {error}") from error
        if isinstance(link.tag, HostSeen) and (wrong := self.rim.registry.check_host(link.tag)):
            raise Refused(wrong)
        link.name = link.tag.name
        return {"role": "control", "name": "control", "silence": self._silence}

    def _meet_policy(self, link: Link, hello: dict[str, Any]) -> dict[str, Any]:
        link.tag = token = hello.get("token")
        if type(token) is not str or not self.rim.policies.knows(token):
            raise Refused("this address is for policies that the control plane has started")
        return {"role": "control", "name": "control"}

    def _opened(self, link: Link, hello: dict[str, Any]) -> None:
        link.bear(self._silence)
        if self.rim.failed:
            link.close(self.rim.failed)
        elif isinstance(link.tag, str):
            self.rim.policies.joined(link.tag, link)
        elif isinstance(link.tag, ClientSeen):
            self.rim.client_joined(link.tag, link)
        elif isinstance(link.tag, ObserverSeen):
            self.rim.diary.broadcast.watch(link.name, link, time.monotonic())
        elif isinstance(link.tag, HostWaiting):
            for other in self.reactor.links:
                if other is not link and other.name == link.name:
                    other.close(f"{link.name} was replaced by a new device process")
            self.assemblies.waits(*link.tag)
        else:
            for other in self.reactor.links:
                same = isinstance(other.tag, HostSeen) and other.name == link.name
                if same and other is not link:
                    other.close(f"{link.name} was replaced by a new device process")
            self.rim.host_joined(link.tag, link)

    def _closed(self, link: Link, reason: str) -> None:
        if isinstance(link.tag, str):
            self.rim.policies.left(link.tag, reason)
        elif isinstance(link.tag, ClientSeen):
            self.rim.client_left(link.tag.name, reason)
        elif isinstance(link.tag, ObserverSeen):
            self.rim.diary.broadcast.unwatch(link.name)
        elif isinstance(link.tag, HostSeen):
            if link.tag.worker:
                self._closing[link.tag.name] = link
                self.reactor.call_later(_WORD_SECONDS, self._lost, link, reason)
                if link.tag.job:
                    threading.Thread(target=self._ask_why, args=(link,), daemon=True).start()
            else:
                self.rim.host_lost(link.tag.name, reason, link)
        elif not any(other is not link and other.tag == link.tag for other in self.reactor.links):
            self.assemblies.lost(link.tag.name, reason)

    def _ask_why(self, link: Link) -> None:
        """A host whose whole job is gone has nobody else to say why."""
        if why := self._why_ended(link.tag.job):
            self.reactor.call_soon(self._lost, link, why)

    def _lost(self, link: Link, reason: str) -> None:
        """Its worker has said nothing: it may be gone with the whole machine."""
        if self._closing.get(link.tag.name) is link:
            del self._closing[link.tag.name]
        self.rim.host_lost(link.tag.name, reason, link)

    def _message(
        self, link: Link, op: str, fields: dict[str, Any], buffers: list[memoryview]
    ) -> None:
        size = self.reactor.message_bytes
        if isinstance(link.tag, str):
            self.rim.policies.said(link.tag, op, fields)
            return
        seen: ClientSeen | ObserverSeen | HostSeen | HostWaiting = link.tag
        try:
            if isinstance(seen, HostWaiting | ObserverSeen):
                parsed(NOBODY, op, fields, buffers)
            elif self.rim.peers.is_current(seen.name, link):
                said = self.rim.from_client if isinstance(seen, ClientSeen) else self.rim.from_host
                said(seen.name, op, fields, buffers, size)
        except Malformed as error:
            # A host that talks nonsense is no host; its island must know.
            link.close(f"{seen.name} sent a malformed message {error}")


def main() -> None:
    """The process: configuration in, addresses out, then serve until the parent is gone."""
    child_process.begin()
    config = child_process.configuration()
    keys = Keys(*(bytes.fromhex(config[name]) for name in ("key", "data_key")))
    plane = ControlPlane(
        Control(),
        keys,
        config["listen"],
        Path(config["folder"]),
        # Dask's comms unpickle what comes, so nobody comes to them without a certificate.
        server_context(config["tls"], invited=not is_comm(config["listen"])),
        idle=config["idle"],
        kept=config["kept"],
        wish=_wish,
        record=Transcript(config["transcript"]) if config["transcript"] else LastEvents(),
        silence=config["silence"],
    )
    plane.rim.registry.plain_collectives = config["plain_collectives"]
    plane.rim.peers.used = lambda workers: child_process.report(in_use=workers)
    child_process.at_end(lambda: plane.close("the lab was closed (the Dask scheduler ended)"))
    child_process.report(address=plane.address)
    threading.Thread(target=_obey, args=(plane,), name="membership", daemon=True).start()
    # What start-up allocated stays: the collector need not walk it again.
    gc.collect()
    gc.freeze()
    plane.reactor.run_forever()


def _wish(do: str, host: str, worker: str, pid: int = 0) -> None:
    """Have a worker do something to its device process, see :mod:`.break_process`."""
    child_process.report(worker=worker, host=host, wish={"do": do, "pid": pid})


def _obey(plane: ControlPlane) -> None:
    """Later words of the parent: about workers, their processes, and faults on purpose."""
    troubles = Troubles(plane.reactor)
    while True:
        news = child_process.configuration()
        if "trouble" in news:
            plane.reactor.call_soon(troubles.begin, news["trouble"])
        elif "down" in news:
            plane.host_down(news["down"])
        else:
            plane.worker_removed(news["removed"], news["reason"])


if __name__ == "__main__":
    main()
