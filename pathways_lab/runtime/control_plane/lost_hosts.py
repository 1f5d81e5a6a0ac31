"""Hosts without a device process: why it ended, whether another one comes, and who is told.

Problem: a host whose process has ended may be back in two seconds or never, and only its
worker knows.  A client that asks for devices meanwhile should wait, or read why it waits in vain; a
client that had values there should read the cause, with the line that ran there last.

Rule for maintainers: what becomes of slices, runs and requests is decided by the core; here
is kept what the core is told, and what people are told.  A worker reports on every
incarnation once; what it says of an older one than is there is of no interest.

Paper: section 4.1.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pathways_lab.core import messages as m
from pathways_lab.core.diagnosis.overdue import Overdue
from pathways_lab.core.messages import elastic as em
from pathways_lab.runtime.control_plane.directory import LEFT_OUT, Fallen, Registry
from pathways_lab.runtime.control_plane.outbox import Switchboard
from pathways_lab.runtime.control_plane.record_writer import Diary
from pathways_lab.runtime.host.compile_marks import told as compiling_of
from pathways_lab.timeline.records import Event

_BACK_SECONDS = 30.0
"""For so long it is waited for a process that is being started."""
_OF_ITSELF = {
    -s for s in (signal.SIGABRT, signal.SIGSEGV, signal.SIGILL, signal.SIGFPE, signal.SIGBUS)
}
"""Exit codes of processes that were ended by what they did."""


class Driver(Protocol):
    """The part of the driver that is needed here, and where a standstill is answered.

    print_at(client, run, text): to the client's cell.
    """

    registry: Registry

    def overdue(self, seconds: float, now: float) -> Sequence[Overdue]: ...

    def happened(self, event: m.Event) -> None: ...

    def host_lost(self, name: str, reason: str) -> object: ...

    def restart_host(self, name: str, reason: str) -> None: ...

    def print_at(self, client: str, run: int, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _Left:
    """The slices and values that a host had when it was lost.

    pid: of its process.  clients: who had slices there.
    gang: the oldest one that had not ended there.
    """

    pid: int = 0
    clients: tuple[str, ...] = ()
    gang: Overdue | None = None

    @property
    def where(self) -> str:
        gang = self.gang
        if gang is None:
            return ""
        line = f", at {gang.line.told}" if gang.line.number else ""
        return f", in node {gang.node!r} of program {gang.program!r} of {gang.client}{line}"


@dataclass(eq=False, repr=False)
class Downs:
    """The book of one control plane."""

    _rim: Driver
    _peers: Switchboard
    _diary: Diary
    _wish: Callable[..., object]
    _left: dict[str, _Left] = field(default_factory=dict, init=False)

    def joined(self, host: str) -> None:
        """It has a process again."""
        self._rim.registry.down.pop(host, None)
        self._left.pop(host, None)

    def losing(self, host: str, now: float) -> None:
        """The core is about to be told that a host is gone."""
        bound = [b for b in self._rim.registry.bindings.values() if host in b.hosts]
        gangs = [gang for gang in self._rim.overdue(0.0, now) if host in gang.hosts]
        clients = tuple(dict.fromkeys(b.client for b in bound))
        pid = self._rim.registry.hosts[host].pid
        self._left[host] = _Left(pid, clients, gangs[0] if gangs else None)

    def reported(self, report: dict[str, Any], now: float) -> None:
        """A worker says how its device process ended.  Raises KeyError for what is malformed."""
        name, pid = report["name"], report["pid"]
        there = self._rim.registry.hosts.get(name)
        if there is not None and pid not in (0, there.pid):
            return
        if there is not None:
            self.losing(name, now)
        left, again = self._left.get(name, _Left()), report["state"] == "died"
        remedy = LEFT_OUT if report["state"] == "left out" else ""
        compiling = compiling_of(report["compiling"])
        reason = f"its device process {report['reason']}"
        reason += "".join(f", while it compiled {c.name!r}, at {c.line.told}" for c in compiling)
        # What ran there has nothing to do with the end of those that were to take its place.
        told = reason + (left.where if pid == left.pid else "")
        if report["asked"] or report["code"] not in _OF_ITSELF:
            compiling = ()
        known = self._rim.registry.down.get(name)
        fallen = Fallen(name, report["island"], report["worker_name"], told, again, remedy)
        self._fall(fallen, now, compiling, report["reason"])
        if there is not None:
            self._rim.host_lost(name, reason)
        text = f"{name} is down: {fallen.told}"
        args = {"text": text, "words": report["words"], "again": again}
        self._diary.remember(Event("host-down", now, report["island"], name, args=args))
        repeated = again and known is not None and known.reason == told
        if not report["asked"] and not repeated:
            for client in left.clients:
                mine = left.gang is not None and left.gang.client == client
                self._rim.print_at(client, left.gang.run if mine and left.gang else 0, text)
        self._peers.topology()

    def worker_left(self, worker: str, now: float) -> None:
        """Nobody will start a process for its host any more."""
        down = [d for d in self._rim.registry.down.values() if d.worker == worker]
        for fallen in down:
            self.joined(fallen.name)
            self._rim.happened(em.HostForgotten(now, f"{fallen.name}:forgotten", fallen.name))
        if down:
            self._peers.topology()

    def restart(self, name: str, why: str, now: float) -> dict[str, int]:
        """A host, or all hosts of an island, get new processes; those there were, by host.

        why: what handles on them say.  Empty: nothing is called so.
        """
        registry = self._rim.registry
        there = [h for h in registry.hosts.values() if name in (h.name, h.island)]
        down = [d for d in registry.down.values() if name in (d.name, d.island) and not d.remedy]
        for host in there:
            self._rim.restart_host(host.name, why)
        for fallen in down:
            if not fallen.again:
                self._fall(dataclasses.replace(fallen, again=True), now)
                self._wish("restart", fallen.name, fallen.worker)
        self._peers.topology()
        return {h.name: h.pid for h in there} | {d.name: 0 for d in down}

    def _fall(
        self,
        fallen: Fallen,
        now: float,
        compiling: tuple[em.Compiling, ...] = (),
        how: str = "",
    ) -> None:
        self._rim.registry.down[fallen.name] = fallen
        until = now + _BACK_SECONDS if fallen.again else 0.0
        event = em.HostDown(
            now, f"{fallen.name}:down", fallen.name, fallen.island, fallen.reason, until,
            compiling, how, fallen.remedy,
        )  # fmt: skip
        self._rim.happened(event)
