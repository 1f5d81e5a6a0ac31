"""The rim of the core: messages in, events.

Problem: the core knows neither sockets nor bytes nor clocks, and must not be
disturbed by whoever is at the other end of a wire.  This is the adapter: it
checks and translates what arrives and hands it to the core with the time; what
the core commands is carried out in :mod:`pathways_lab.runtime.control_plane.effects`.

Rule for maintainers: nothing is decided here.  Every event goes through
:meth:`Rim.happened`, and nowhere else; an exception there ends the lab, before
anything more leaves.  No sockets here either.

Paper: section 4.5; :mod:`pathways_lab.core.messages` has the vocabulary.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pathways_lab.core import messages as m
from pathways_lab.core.checks import not_an_owner
from pathways_lab.core.control import Control
from pathways_lab.core.diagnosis.overdue import Overdue
from pathways_lab.core.diagnosis.stall_story import Stuck
from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import elastic as em
from pathways_lab.core.scheduling.unordered_launch import Races
from pathways_lab.runtime import client_messages as said
from pathways_lab.runtime import host_messages as told
from pathways_lab.runtime.client_messages import CLIENTS
from pathways_lab.runtime.control_plane.directory import ClientSeen, HostSeen, Registry
from pathways_lab.runtime.control_plane.effects import Commands
from pathways_lab.runtime.control_plane.fail_stop import last_words
from pathways_lab.runtime.control_plane.lost_hosts import Downs
from pathways_lab.runtime.control_plane.outbox import Switchboard
from pathways_lab.runtime.control_plane.policy_supervisor import PolicyDesk
from pathways_lab.runtime.control_plane.record_writer import Diary
from pathways_lab.runtime.control_plane.requests import Rejected, client_event, own, use
from pathways_lab.runtime.control_plane.stall_response import Standstill
from pathways_lab.runtime.control_plane.transcript import LastEvents
from pathways_lab.runtime.host_messages import HOSTS
from pathways_lab.runtime.islands.process_groups import Formations, Services
from pathways_lab.timeline.records import Event
from pathways_lab.timeline.records_of import policy_told
from pathways_lab.transport import record_encoding
from pathways_lab.transport.codec import pack
from pathways_lab.transport.edge import Malformed, parsed
from pathways_lab.transport.link import Link

Wish = Callable[..., object]
"""``(do, host, worker, pid=0)``, see :class:`Rim`."""
_HERE = ("control",)
"""Whom messages reach that come here."""
_LAUNCHING = {m.ShareProgram, m.Grant, m.FreeBuffers}
"""Commands that hosts wait for, and what comes with them, that change nothing of what the diary
looks up."""


class Rim:
    """Drives one core.

    clock: seconds, monotonic; the time of every event and record.
    flush_due: called when records wait for :meth:`flush`.
    services: where the hosts of slices over several hosts meet.
    data_key: of the doors of hosts: a ticket made with it shows them that a client may read.
    wish(do, host, worker, pid): have the worker ``"kill"`` the device process of a host,
        whatever that does, or ``"restart"`` one for a host that was given up.
    record: is given every event, with what the core answered.
    ended(reason): called once when the core has failed; nothing leaves any more.
    policies: policies of users' own; :attr:`PolicyDesk.told` is this rim.
    formations: the book of what such hosts were told.
    rejected: messages refused because they were malformed or not allowed.
    heard: when a client last came, said something or had work under way (None: none ever came).
    failed: why the lab is over; "" while it goes on.
    """

    def __init__(
        self,
        core: Control,
        clock: Callable[[], float],
        flush_due: Callable[[], None],
        services: Services,
        policies: Callable[[Rim], PolicyDesk],
        data_key: bytes,
        wish: Wish = lambda do, host, worker, pid=0: None,
        record: LastEvents | None = None,
        ended: Callable[[str], object] = lambda reason: None,
    ) -> None:
        self.registry = Registry()
        self.failed = ""
        self._record = record or LastEvents()
        self._ended = ended
        self.rejected = 0
        self.heard: float | None = None
        self._core = core
        self._clock = clock
        self.peers = Switchboard(self.registry)
        self.diary = Diary(self.registry, clock, flush_due)
        self._numbers = 0
        self._epochs: dict[str, int] = {}
        self._wish = wish
        self.formations = Formations(services, self.peers.host, self._slices_lost)
        self.policies = policies(self)
        self.races = Races(self.peers.host)
        self._commands = Commands(
            self.registry,
            self.peers,
            self.diary,
            self.formations,
            self.races,
            self.policies,
            self._epochs,
            data_key,
        )
        self.standstill = Standstill(self, self.formations, self.races, self.peers, self.diary)
        self.downs = Downs(self, self.peers, self.diary, wish)

    # --- who is there ------------------------------------------------------------

    def new_client(self, name: str, pid: int, holder: int = 0) -> ClientSeen:
        """Number and name for a client that is about to join.  name: what it asks for, or "".

        holder: of its invitation; 0: it came with the lab's own key, and may decide for all.

        Raises ValueError when it cannot be called so.
        """
        self._numbers += 1
        return self.registry.newcomer(name, self._numbers, pid, holder)

    def client_joined(self, client: ClientSeen, peer: Link) -> None:
        self.registry.clients[client.name] = client
        self.registry.seats.pop(client.name, None)
        self.peers.clients[client.name] = peer
        self.heard = self._clock()
        cause = f"{client.name}:joined"
        self.happened(
            m.ClientJoined(self._clock(), cause, client.name, client.number, client.owner)
        )
        self.peers.clients_present(self._numbers, tuple(self.peers.hosts))
        self.peers.topology()

    def client_left(self, name: str, reason: str) -> None:
        if self.peers.clients.pop(name, None) is None:
            return
        self.heard = self._clock()
        self.diary.broadcast.unwatch(name)
        for island in [i for i, client in self.registry.leases.items() if client == name]:
            self._end_races(island, name)
        self.happened(m.ClientLeft(self._clock(), f"{name}:left", name, reason))
        self.registry.forget_client(name)
        self.peers.clients_present(self._numbers, tuple(self.peers.hosts))
        self.peers.topology()

    def host_joined(self, host: HostSeen, peer: Link) -> None:
        """A device process is there.  One of the same name before it counts as lost."""
        self.host_lost(host.name, f"{host.name} was replaced by a new device process")
        self.registry.hosts[host.name] = host
        self.downs.joined(host.name)
        self.peers.hosts[host.name] = peer
        self.standstill.heard(host.name, self._clock())
        self.peers.data_addresses()
        self.peers.clients_present(self._numbers, [host.name])
        self.happened(
            m.HostJoined(
                self._clock(),
                f"{host.name}:joined",
                host.name,
                host.island,
                host.devices,
                host.kind,
                host.memory,
                host.block,
                self.registry.site_of(host),
            )
        )
        self.peers.topology()

    def host_lost(self, name: str, reason: str, peer: Link | None = None) -> None:
        """A host is gone.  peer: only if this is still its link."""
        if name not in self.peers.hosts or peer not in (None, self.peers.hosts[name]):
            return
        del self.peers.hosts[name]
        self.downs.losing(name, self._clock())
        island = self.registry.hosts[name].island
        self._epochs[island] = self._epochs.get(island, 0) + 1
        # First: the other hosts may be waiting for this one, in the middle of a computation.
        self.formations.host_lost(name, reason)
        self.standstill.host_lost(name, self._clock())
        self.happened(m.HostLost(self._clock(), f"{name}:lost", name, reason))
        del self.registry.hosts[name]
        # Of slices that have no host left the core has nobody to tell that they are gone.
        for slice_id, binding in tuple(self.registry.bindings.items()):
            if self.peers.hosts.keys().isdisjoint(binding.hosts):
                self.registry.withdraw_slice(slice_id)
        self.peers.topology()

    def host_leaves(self, name: str, reason: str) -> None:
        """A host takes nothing new, and goes when it has ended what is admitted there."""
        if name in self.peers.hosts:
            self.happened(em.HostsLeaving(self._clock(), f"{name}:leaving", (name,), reason))

    def restart_host(self, name: str, reason: str) -> None:
        """End a device process, and with it what it holds; its worker starts another.

        For one that lives and does not come to an end: handles on it fail with
        *reason* now, whether or not it is still able to hear.
        """
        if host := self.registry.hosts.get(name):
            self._wish("kill", name, host.worker, host.pid)
        self.peers.host(name, "restart", {"reason": reason})
        self.host_lost(name, f"it was restarted: {reason}")

    def overdue(self, seconds: float, now: float) -> Sequence[Overdue]:
        """See :meth:`Control.overdue`."""
        return self._core.overdue(seconds, now)

    def host_down(self, report: dict[str, Any]) -> None:
        """The worker of a host says how its device process ended."""
        self.downs.reported(report, self._clock())

    def worker_left(self, worker: str) -> None:
        """A worker is gone, or will be, and starts no process any more."""
        self.downs.worker_left(worker, self._clock())

    def _slices_lost(self, slices: tuple[int, ...], reason: str) -> None:
        self.happened(m.SlicesLost(self._clock(), "formation:broken", slices, reason))

    def idle(self) -> float:
        """Seconds for which no run was under way and no client said anything."""
        if self.heard is None or self.registry.programs:
            return 0.0
        return self._clock() - self.heard

    def closing(self, reason: str) -> None:
        """Tell every client that the lab ends."""
        self.peers.every_client("closing", {"reason": reason})

    # --- what they say -------------------------------------------------------------

    def from_client(
        self, name: str, op: str, fields: dict[str, Any], buffers: list[memoryview], size: int
    ) -> None:
        """A message of a client.  One that may not be is refused, counted, and changes nothing.

        Raises Malformed for what is no message at all; it is counted too.
        """
        self.heard = self._clock()
        try:
            message = parsed(CLIENTS, op, fields, buffers)
        except Malformed as error:
            self._remember_rejected(str(error), client=name)
            raise
        asked = self._ask(name, message, buffers, size)
        if not asked and isinstance(message, said.Submit) and message.dropped:
            self._ask(name, said.Drop(message.dropped), [], 0)

    def _ask(self, name: str, message: Any, buffers: list[memoryview], size: int) -> bool:
        """A refusal goes to the client that asked, and False here; everything else goes on."""
        try:
            self._from_client(self.registry.clients[name], message, buffers, size)
            return True
        except Rejected as rejected:
            self.rejected += 1
            self._refuse(name, message, rejected.subject, rejected.failure)
        except Exception:
            failure = _internal(type(message).__name__, traceback.format_exc())
            self._refuse(name, message, type(message).__name__, failure)
        return False

    def _refuse(self, client: str, message: Any, subject: str, failure: Failure) -> None:
        number = getattr(message, "id", 0)
        if number:
            self.peers.answer(client, number, failure)
        else:
            self.peers.refuse(client, subject, failure)

    def _from_client(
        self, client: ClientSeen, message: Any, buffers: list[memoryview], size: int
    ) -> None:
        """Raises Rejected."""
        name = client.name
        if type(message) in _OWN:
            _OWN[type(message)](self, client, message)
        elif isinstance(message, said.Policy) and buffers:
            self._try_policy(client, message, buffers[0])
        else:
            event = client_event(self.registry, client, message, buffers, self._clock())
            if isinstance(event, m.RunSubmitted):
                self.diary.count("submit", name, _HERE, size, event.run)
                if message.race is not None:
                    number, controller = message.race
                    self.races.entered(number, event.run, controller)
            elif isinstance(event, m.LeaseReturned):
                self._end_races(event.island, name)
            self.happened(event)

    def from_host(
        self, name: str, op: str, fields: dict[str, Any], buffers: list[memoryview], size: int
    ) -> None:
        """A message of a host.  Raises Malformed; it is counted too."""
        host = self.registry.hosts[name]
        self.standstill.heard(name, self._clock())
        try:
            message = parsed(HOSTS, op, fields, buffers)
            if isinstance(message, told.Report):
                record_encoding.check(message.records)
        except ValueError as error:
            self._remember_rejected(str(error), host)
            raise Malformed(str(error)) from None
        match message:
            case told.Report():
                self._reported(name, message, size)
            case told.Output(run=run, device=device, text=words):
                self._output(host, run, device, words)
            case told.Joined(number=number, failure=failure):
                why = None if failure is None else failure.message
                self.formations.formed(number, name, why)
            case told.Leaving(reason=reason):
                self.host_leaves(name, f"{name} leaves: {reason[:500]}")
            case told.Unmoved(slice=slice_id, reason=reason):
                lost = m.SlicesLost(
                    self._clock(), f"{name}:unmoved", (slice_id,), reason[:2000], name
                )
                self.happened(lost)
            case told.Left(number=number):
                self.formations.left(number, name)
            case told.Broken(number=number, reason=reason):
                self.formations.broken(number, reason[:2000], name)
            case told.Progress(number=number, gangs=gangs):
                self.standstill.answered(name, number, gangs, self._clock())
            case told.RejectedClient(client=number, reason=reason):
                client = self.registry.client_of(number << 32)
                self._remember_rejected(reason, host, "" if client is None else client.name)
            case told.Closing(reason=reason):
                self.host_lost(name, f"the device process ended: {reason[:2000]}")

    def _reported(self, name: str, report: told.Report, size: int) -> None:
        self.diary.remember_packed(report.records)
        runs = {entry[0] for entry in (*report.ended, *report.failed)}
        if runs:
            only = next(iter(runs)) if len(runs) == 1 else 0
            self.diary.count("report", name, _HERE, size, only)
        if (
            runs or report.resident or report.compiled or report.parked or report.moved
            or report.decided
        ):  # fmt: skip
            event = m.HostReport(
                self._clock(), f"{name}:report", name, report.ended, report.failed,
                report.resident, report.compiled, report.parked, report.moved, report.decided,
                report.crossing,
            )  # fmt: skip
            self.happened(event)

    def _remember_rejected(
        self, reason: str, host: HostSeen | None = None, client: str = ""
    ) -> None:
        """Somebody's link was closed, here or at *host*, because of what came over it."""
        self.rejected += 1
        where = ("", "") if host is None else (host.island, host.name)
        args = {"message": reason[:500]}
        self.diary.remember(Event("rejected", self._clock(), *where, client=client, args=args))

    def _output(self, host: HostSeen, run: int, device: int | None, text: str) -> None:
        """Text that user code printed goes to the client of its run."""
        args = {"text": text[:1000], "device": device}
        event = Event("output", self._clock(), host.island, host.name, run=run, args=args)
        self.diary.remember(event)
        client = self.registry.client_of(run)
        if client is not None:
            fields = {"host": host.name, "run": run, "device": device, "text": text}
            self.peers.client(client.name, "output", fields)

    def print_at(self, client: str, run: int, text: str) -> None:
        """For people: where a run was started."""
        fields = {"host": "watchdog", "run": run, "device": None, "text": text}
        self.peers.client(client, "output", fields)

    # --- standstill and disorder -----------------------------------------------------

    def look(self) -> None:
        """Now and then: is anything stuck, or due?"""
        now = self._clock()
        if self.failed:
            return
        if self._core.due <= now:
            self.happened(m.PatienceEnded(now, "clock"))
        if self.registry.programs:
            self.heard = now  # idle from its end, and not since it was submitted
        self.races.settle(now)
        self.standstill.look(now)

    def _wonder(self, client: ClientSeen, message: said.Wonder) -> None:
        """A client asks what is late; hosts are asked first."""

        def tell(story: Stuck | None) -> None:
            plain = None if story is None else pack(story)
            self.peers.answer(client.name, message.id, None, {"story": plain})

        self.standstill.wonder(self._clock(), message.seconds, tell)

    def _on_stuck(self, client: ClientSeen, message: said.Watchdog) -> None:
        """Sets the rule for stuck runs; without one, tells the rule in force."""
        acts = self.standstill.acts
        if message.told is not None:
            rule = replace(message.told, owner=client.name)
            if not client.owner:
                raise Rejected("watchdog", *not_an_owner(client.name, "say what the watchdog does"))
            if rule.wrong():
                raise Rejected("watchdog", rule.wrong())
            acts.told = rule
        self.peers.answer(client.name, message.id, None, {"told": pack(acts.told)})

    def _race(self, client: ClientSeen, message: said.Race) -> None:
        """Runs that follow are launched in orders of the client's choice."""
        island = message.island
        leased = self.registry.leases.get(island) == client.name
        # A number is used once: else what waits for the start of a race could be lost.
        if island in self.registry.disorder and leased and use(client, race=(message.race,)):
            orders = message.orders.items()
            ours = {h: order for h, order in orders if self._island_of(h) == island}
            self.races.open(message.race, client.name, island, ours)

    def _race_go(self, client: ClientSeen, message: said.RaceGo) -> None:
        own(client, [message.race], "race")
        self.races.close(message.race, self._clock())

    def _restart(self, client: ClientSeen, message: said.Restart) -> None:
        """An owner wants new device processes."""
        if not client.owner:
            raise Rejected("restart", *not_an_owner(client.name, "restart hosts"))
        hosts = self.downs.restart(message.name, f"{client.name} wanted it", self._clock())
        if not hosts:
            name = message.name[:64]
            raise Rejected("restart", f"there is no island and no host {name!r} to restart")
        self.peers.answer(client.name, message.id, None, {"hosts": hosts})

    def _account(self, client: ClientSeen, message: said.Accounts) -> None:
        """The accounts of all clients, for the client that asks."""
        rows = [
            [name, pack(used), pack(quota)]
            for name, (used, quota) in self._core.accounts(self._clock()).items()
        ]
        self.peers.answer(client.name, message.id, None, {"rows": rows})

    def _watch(self, client: ClientSeen, message: said.Watch) -> None:
        if message.on:
            self.diary.broadcast.watch(client.name, self.peers.clients[client.name], self._clock())
        else:
            self.diary.broadcast.unwatch(client.name)

    def _topology(self, client: ClientSeen, _: said.Topology) -> None:
        self.peers.client(client.name, "topology", self.registry.topology())

    def _named(self, client: ClientSeen, message: said.Named) -> None:
        """How many buffers a name stands for: who takes them needs as many numbers."""
        count = self._core.count_published(message.name)
        self.peers.answer(client.name, message.id, None, {"count": count})

    def _donation(self, client: ClientSeen, message: said.Donation) -> None:
        """Which of some buffers a client may not donate: asked for those that it has shared."""
        wrong = ((n, self._core.why_not_donated(client.name, n)) for n in message.buffers)
        refused = next(([number, *why] for number, why in wrong if why is not None), None)
        self.peers.answer(client.name, message.id, None, {"refused": refused})

    def _memory(self, client: ClientSeen, message: said.Memory) -> None:
        """The values on devices, as far as the client may read of them."""
        found = pack(self._core.holdings(client.name, message.most))
        self.peers.answer(client.name, message.id, None, {"holdings": found})

    def _island_of(self, host: str) -> str:
        seen = self.registry.hosts.get(host)
        return seen.island if seen is not None else ""

    def _end_races(self, island: str, client: str) -> None:
        self.races.abandon(client, island)
        self.standstill.lease_ends(island, client, self._clock())

    # --- the core ------------------------------------------------------------------

    def happened(self, event: m.Event) -> None:
        """Give one event to the core, remember it, and do what the core commands.

        An exception ends the lab: nobody can say any more what the core believes, or which of
        its commands hosts have heard.
        """
        if self.failed:
            return
        commands = None
        try:
            commands = self._core.handle(event)
            self._record.decided(event, commands)
            self._obey(event, commands)
        except Exception as error:
            if commands is None:
                self._record.decided(event, None)
            told = last_words(event, error, self._record)
            self.failed = told["reason"]
            self.peers.end(told)
            self._ended(self.failed)

    def _obey(self, event: m.Event, commands: list[m.Command]) -> None:
        for command in commands:
            if isinstance(command, m.SliceBound | em.SliceMoved):
                self.registry.bind_slice(command.binding)
            if isinstance(command, em.SliceMoved):
                self.diary.moved()
        first = {*map(type, commands)} <= _LAUNCHING
        if first:
            self._commands.carry_out(commands)
        try:
            self.diary.decided(event, commands)
        except Exception:
            # What cannot be told is done all the same: others may wait for it.
            details = traceback.format_exc()
            print(f"no record of {event!r:.500}\n{details}", file=sys.stderr, flush=True)
        if not first:
            self._commands.carry_out(commands)
        if self.races:
            self.races.settle(event.time)

    # --- the policy ----------------------------------------------------------------

    def _try_policy(self, client: ClientSeen, message: said.Policy, code: memoryview) -> None:
        """Code of an owner's own; the core hears of it when it has been tried."""
        if not client.owner:
            raise Rejected("policy", *not_an_owner(client.name, "set policies"))
        self.policies.try_out(client.name, message.id, message.name[:100], code)

    def policy_refused(self, client: str, request: int, failure: Failure) -> None:
        """A policy of a client's own did not get as far as the core."""
        registry = self.registry
        kept = m.PolicySet(
            "policy", client, registry.policy, registry.policy_owner, failure, request
        )
        self.diary.remember(policy_told(kept, self._clock(), registry))
        self._commands.policy_set(kept)

    def policy_printed(self, client: str, name: str, text: str) -> None:
        """The output of a policy goes to the client that set it."""
        self.peers.client(client, "policy-printed", {"name": name, "text": text})


_OWN: dict[type, Callable[[Rim, ClientSeen, Any], None]] = {
    said.Watch: Rim._watch,
    said.Topology: Rim._topology,
    said.Wonder: Rim._wonder,
    said.Race: Rim._race,
    said.RaceGo: Rim._race_go,
    said.Accounts: Rim._account,
    said.Named: Rim._named,
    said.Donation: Rim._donation,
    said.Memory: Rim._memory,
    said.Watchdog: Rim._on_stuck,
    said.Restart: Rim._restart,
}
"""Messages of clients of which the core hears nothing."""


def _internal(what: str, details: str) -> Failure:
    print(f"the control plane failed on {what}\n{details}", file=sys.stderr, flush=True)
    return Failure(
        "internal",
        f"the control plane failed on {what}: this is a bug in pathways_lab",
        "report it with the details; other programs are not affected",
        details=details,
    )
