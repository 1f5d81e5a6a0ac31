"""The rim of the core: messages in, events.

Problem: the core knows neither sockets nor bytes nor clocks, and must not be
disturbed by whoever is at the other end of a wire.  This is the adapter: it
checks and translates what arrives and hands it to the core with the time; what
the core commands is carried out in :mod:`pathways_lab.runtime.commands`.

Rule for maintainers: nothing is decided here.  Every event goes through
:meth:`Rim.happened`, and nowhere else.  No sockets here either.

Paper: section 4.5; :mod:`pathways_lab.core.messages` has the vocabulary.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pathways_lab.core import elastic_messages as em
from pathways_lab.core import messages as m
from pathways_lab.core.accounts import Account
from pathways_lab.core.errors import Failure
from pathways_lab.core.holdings import Holdings
from pathways_lab.core.overdue import Overdue
from pathways_lab.core.quotas import Quota
from pathways_lab.core.requests import not_an_owner
from pathways_lab.core.story import Stuck
from pathways_lab.core.upload_messages import PatienceEnded
from pathways_lab.runtime.acts import OnStuck
from pathways_lab.runtime.broadcast import Peer
from pathways_lab.runtime.codec import CodecError, pack, unpack
from pathways_lab.runtime.commands import Commands
from pathways_lab.runtime.diary import Diary
from pathways_lab.runtime.formations import Formations, Services
from pathways_lab.runtime.intake import Rejected, client_event, host_report, race_of
from pathways_lab.runtime.policy_desk import PolicyDesk
from pathways_lab.runtime.races import Races
from pathways_lab.runtime.registry import ClientSeen, HostSeen, Registry
from pathways_lab.runtime.standstill import Standstill
from pathways_lab.runtime.switchboard import Switchboard
from pathways_lab.timeline.records import Event
from pathways_lab.timeline.records_of import policy_told

_HERE = ("control",)
"""Whom messages reach that come here."""
_LAUNCHING = {m.ShareProgram, m.Grant}
"""Commands that hosts wait for, and that change nothing of what the diary looks up."""


class Core(Protocol):
    """What is driven from here: :class:`pathways_lab.core.control.Control`."""

    @property
    def due(self) -> float: ...

    def handle(self, event: m.Event) -> list[m.Command]: ...

    def overdue(self, seconds: float, now: float) -> Sequence[Overdue]: ...

    def accounts(self, now: float) -> Mapping[str, tuple[Account, Quota]]: ...

    def why_not_donated(self, client: str, number: int) -> tuple[str, str] | None: ...

    def count_published(self, name: str) -> int: ...

    def holdings(self, client: str) -> Holdings: ...


class Rim:
    """Drives one core.

    clock: seconds, monotonic; the time of every event and record.
    flush_due: called when records wait for :meth:`flush`.
    services: where the hosts of slices over several hosts meet.
    ticket(buffer, client): shows hosts that a client, by number, may read a buffer.
    end_process(host): have it ended by its parent, whatever it does.
    policies: policies of users' own; :attr:`PolicyDesk.told` is this rim.
    formations: the book of what such hosts were told.
    rejected: messages refused because they were malformed or not allowed.
    heard: when a client last came, said something or had work under way (None: none ever came).
    """

    def __init__(
        self,
        core: Core,
        clock: Callable[[], float],
        flush_due: Callable[[], None],
        services: Services,
        policies: Callable[[Rim], PolicyDesk],
        ticket: Callable[[int, int], bytes],
        end_process: Callable[[HostSeen], object] = lambda host: None,
    ) -> None:
        self.registry = Registry()
        self.rejected = 0
        self.heard: float | None = None
        self._core = core
        self._clock = clock
        self.peers = Switchboard(self.registry)
        self.diary = Diary(self.registry, clock, flush_due)
        self._numbers = 0
        self._epochs: dict[str, int] = {}
        self._end_process = end_process
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
            ticket,
        )
        self.standstill = Standstill(
            self.registry,
            self.formations,
            self.races,
            core.overdue,
            self.happened,
            self.peers.host,
            self.diary.remember,
            self._print_at,
            self.restart_host,
        )

    # --- who is there ------------------------------------------------------------

    def new_client(self, name: str, pid: int, owner: bool = False) -> ClientSeen:
        """Number and name for a client that is about to join.  name: what it asks for, or "".

        owner: it came with the lab's own key, and may decide for all.

        Raises ValueError when it cannot be called so.
        """
        wrong = self.registry.check_name(name) if name else ""
        if wrong:
            raise ValueError(wrong)
        self._numbers += 1
        return ClientSeen(name or f"kernel-{self._numbers}", self._numbers, pid, owner)

    def client_joined(self, client: ClientSeen, peer: Peer) -> None:
        self.registry.clients[client.name] = client
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
        self.diary.broadcast.unwatch(name)
        for island in [i for i, client in self.registry.leases.items() if client == name]:
            self._end_races(island, name)
        self.happened(m.ClientLeft(self._clock(), f"{name}:left", name, reason))
        self.registry.forget_client(name)
        self.peers.clients_present(self._numbers, tuple(self.peers.hosts))
        self.peers.topology()

    def host_joined(self, host: HostSeen, peer: Peer) -> None:
        """A device process is there.  One of the same name before it counts as lost."""
        self.host_lost(host.name, f"{host.name} was replaced by a new device process")
        self.registry.hosts[host.name] = host
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
            )
        )
        self.peers.topology()

    def host_lost(self, name: str, reason: str, peer: Peer | None = None) -> None:
        """A host is gone.  peer: only if this is still its link."""
        if name not in self.peers.hosts or peer not in (None, self.peers.hosts[name]):
            return
        del self.peers.hosts[name]
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
        if name in self.registry.hosts:
            self._end_process(self.registry.hosts[name])
        self.peers.host(name, "restart", {"reason": reason})
        self.host_lost(name, f"it was restarted: {reason}")

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
        """A message of a client.  A wrong one is refused, counted, and changes nothing."""
        self.heard = self._clock()
        try:
            self._from_client(self.registry.clients[name], op, fields, buffers, size)
        except Rejected as rejected:
            self.rejected += 1
            failure = Failure("refused", str(rejected), rejected.remedy)
            self.peers.refuse(name, rejected.subject, failure)
        if op == "submit" and "dropped" in fields:
            # After the run: its inputs may be among them.  Also when the run was refused.
            self.from_client(name, "drop", {"buffers": fields["dropped"]}, [], 0)

    def _from_client(
        self, client: ClientSeen, op: str, fields: dict[str, Any], buffers: list[memoryview],
        size: int,
    ) -> None:  # fmt: skip
        """Raises Rejected."""
        name = client.name
        if op == "watch":
            if fields.get("on", True):
                self.diary.broadcast.watch(name, self.peers.clients[name], self._clock())
            else:
                self.diary.broadcast.unwatch(name)
        elif op == "topology":
            self.peers.client(name, "topology", self.registry.topology())
        elif op == "policy" and buffers:
            self._try_policy(client, fields, buffers[0])
        elif op in _QUESTIONS:
            try:
                _QUESTIONS[op](self, name, fields)
            except Rejected:
                raise
            except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
                subject = f"question {fields['id']}" if type(fields.get("id")) is int else op
                raise Rejected(subject, f"malformed message {op!r}: {error!r:.200}") from error
        else:
            event = client_event(self.registry, client, op, fields, buffers, self._clock())
            if isinstance(event, m.RunSubmitted):
                self.diary.count("submit", name, _HERE, size, event.run)
                race = race_of(fields)
                if race is not None and self._own(name, race[0]):
                    self.races.entered(race[0], event.run, race[1])
            elif isinstance(event, m.LeaseReturned):
                self._end_races(event.island, name)
            self.happened(event)

    def from_host(
        self, name: str, op: str, fields: dict[str, Any], buffers: list[memoryview], size: int
    ) -> None:
        """A message of a host.  Raises ValueError for one that is malformed."""
        host = self.registry.hosts[name]
        self.standstill.heard(name, self._clock())
        if op == "report":
            records = fields.get("records", [])
            if not (isinstance(records, list) and all(type(r) is bytes for r in records)):
                raise CodecError("records must be a list of bytes")
            self.diary.remember_packed(records)
            cause = f"{name}:report"
            report = host_report(host, fields, self._clock(), cause)
            runs = {entry[0] for entry in (*report.finished, *report.rows, *report.failed)}
            if runs:
                only = next(iter(runs)) if len(runs) == 1 else 0
                self.diary.count("report", name, _HERE, size, only)
            said = report.resident or report.compiled or report.parked or report.moved
            if said or runs:
                self.happened(report)
        elif op == "output":
            self._output(host, int(fields["run"]), fields.get("device"), str(fields["text"]))
        elif op == "joined":
            why = fields["failure"]
            text = None if why is None else unpack(Failure, why).message
            self.formations.formed(int(fields["number"]), name, text)
        elif op == "leaving":
            self.host_leaves(name, f"{name} leaves: {str(fields['reason'])[:500]}")
        elif op == "unmoved":
            self._slices_lost((int(fields["slice"]),), str(fields["reason"])[:2000])
        elif op == "broken":
            self.formations.broken(int(fields["number"]), str(fields["reason"])[:2000])
        elif op == "progress":
            self.standstill.answered(name, fields, self._clock())
        elif op == "rejected":
            self._rejected_by(host, int(fields["client"]), str(fields["reason"])[:500])
        elif op == "pulse":
            return  # it was heard
        elif op == "closing":
            self.host_lost(name, f"the device process ended: {str(fields.get('reason'))[:2000]}")
        else:
            raise ValueError(f"no message of hosts is called {op[:40]!r}")

    def _rejected_by(self, host: HostSeen, number: int, reason: str) -> None:
        """A host has closed somebody's data link because of what came over it."""
        self.rejected += 1
        client = self.registry.client_of(number << 32)
        name = "" if client is None else client.name
        args = {"message": reason}
        event = Event("rejected", self._clock(), host.island, host.name, client=name, args=args)
        self.diary.remember(event)

    def _output(self, host: HostSeen, run: int, device: object, text: str) -> None:
        """Text that user code printed goes to the client of its run."""
        args = {"text": text[:1000], "device": device}
        event = Event("output", self._clock(), host.island, host.name, run=run, args=args)
        self.diary.remember(event)
        client = self.registry.client_of(run)
        if client is not None:
            fields = {"host": host.name, "run": run, "device": device, "text": text}
            self.peers.client(client.name, "output", fields)

    def _print_at(self, client: str, run: int, text: str) -> None:
        """For people: where a run was started."""
        fields = {"host": "watchdog", "run": run, "device": None, "text": text}
        self.peers.client(client, "output", fields)

    # --- standstill and disorder -----------------------------------------------------

    def look(self) -> None:
        """Now and then: is anything stuck, or due?"""
        now = self._clock()
        if self._core.due <= now:
            self.happened(PatienceEnded(now, "clock"))
        if self.registry.programs:
            self.heard = now  # idle from its end, and not since it was submitted
        self.races.settle(now)
        self.standstill.look(now)

    def _wonder(self, client: str, fields: dict[str, Any]) -> None:
        """A client asks what is late; hosts are asked first."""

        def told(story: Stuck | None) -> None:
            plain = None if story is None else pack(story)
            self.peers.client(client, "stuck", {"id": fields["id"], "story": plain})

        self.standstill.wonder(self._clock(), float(fields["seconds"]), told)

    def _on_stuck(self, client: str, fields: dict[str, Any]) -> None:
        """What shall be done about what is stuck; without a rule, what is in force."""
        acts = self.standstill.acts
        if fields.get("told") is not None:
            told = OnStuck(**fields["told"], owner=client)
            subject = f"question {fields['id']}"
            if not self.registry.clients[client].owner:
                raise Rejected(subject, *not_an_owner(client, "say what the watchdog does"))
            if told.wrong():
                raise Rejected(subject, told.wrong())
            acts.told = told
        answer = {"id": fields["id"], "told": pack(acts.told)}
        self.peers.client(client, "watchdog", answer)

    def _race(self, client: str, fields: dict[str, Any]) -> None:
        """Runs that follow are launched in orders of the client's choice."""
        island = fields["island"]
        leased = self.registry.leases.get(island) == client
        if island in self.registry.disorder and leased and self._own(client, int(fields["race"])):
            orders = {str(host): tuple(order) for host, order in fields["orders"].items()}
            ours = {h: order for h, order in orders.items() if self._island_of(h) == island}
            self.races.open(int(fields["race"]), client, island, ours)

    def _race_go(self, client: str, fields: dict[str, Any]) -> None:
        if self._own(client, int(fields["race"])):
            self.races.close(int(fields["race"]), self._clock())

    def _own(self, client: str, race: int) -> bool:
        """Whether a client has made a number: of others' races it can say nothing."""
        return race >> 32 == self.registry.clients[client].number

    def _account(self, client: str, fields: dict[str, Any]) -> None:
        """What everybody has used, for whoever asks."""
        rows = [
            [name, pack(used), pack(quota)]
            for name, (used, quota) in self._core.accounts(self._clock()).items()
        ]
        self.peers.client(client, "accounts", {"id": fields["id"], "rows": rows})

    def _named(self, client: str, fields: dict[str, Any]) -> None:
        """How many buffers a name stands for: who takes them needs as many numbers."""
        count = self._core.count_published(str(fields["name"]))
        self.peers.client(client, "named", {"id": fields["id"], "count": count})

    def _donation(self, client: str, fields: dict[str, Any]) -> None:
        """Which of some buffers a client may not donate: asked for those that it has shared."""
        wrong = ((int(n), self._core.why_not_donated(client, int(n))) for n in fields["buffers"])
        refused = next(([number, *why] for number, why in wrong if why is not None), None)
        self.peers.client(client, "donation", {"id": fields["id"], "refused": refused})

    def _memory(self, client: str, fields: dict[str, Any]) -> None:
        """What lies on devices, as far as the client may read it."""
        found = pack(self._core.holdings(client))
        self.peers.client(client, "memory", {"id": fields["id"], "holdings": found})

    def _island_of(self, host: str) -> str:
        seen = self.registry.hosts.get(host)
        return seen.island if seen is not None else ""

    def _end_races(self, island: str, client: str) -> None:
        self.races.abandon(client, island)
        self.standstill.lease_ends(island, client, self._clock())

    # --- the core ------------------------------------------------------------------

    def happened(self, event: m.Event) -> None:
        """Give one event to the core, remember it, and do what the core commands."""
        try:
            commands = self._core.handle(event)
        except Exception:
            # A bug in the core.  Whoever asked must not wait for ever; the rest goes on.
            details = traceback.format_exc()
            print(f"the core failed on {event!r}\n{details}", file=sys.stderr, flush=True)
            client = getattr(event, "client", None)
            if client is not None:
                self.peers.refuse(client, _subject(event), _internal(event, details))
            return
        for command in commands:
            if isinstance(command, m.SliceBound | em.SliceMoved):
                self.registry.bindings[command.binding.slice] = command.binding
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

    def _try_policy(self, client: ClientSeen, fields: dict[str, Any], code: memoryview) -> None:
        """Code of an owner's own; the core hears of it when it has been tried."""
        name = client.name
        if not client.owner:
            raise Rejected("policy", *not_an_owner(name, "set policies"))
        request, called = fields.get("request"), fields.get("name")
        if type(request) is int and type(called) is str:
            self.policies.try_out(name, request, called[:100], code)
        else:
            self.peers.refuse(name, "policy", Failure("refused", "malformed message 'policy'"))

    def policy_refused(self, client: str, request: int, failure: Failure) -> None:
        """A policy of a client's own did not get as far as the core."""
        registry = self.registry
        told = m.PolicySet(
            "policy", client, registry.policy, registry.policy_owner, failure, request
        )
        self.diary.remember(policy_told(told, self._clock(), registry))
        self._commands.policy_set(told)

    def policy_printed(self, client: str, name: str, text: str) -> None:
        """What a policy prints goes to the client that set it."""
        self.peers.client(client, "policy-printed", {"name": name, "text": text})


_QUESTIONS: dict[str, Callable[[Rim, str, dict[str, Any]], None]] = {
    "stuck": Rim._wonder,
    "race": Rim._race,
    "race-go": Rim._race_go,
    "accounts": Rim._account,
    "donation": Rim._donation,
    "named": Rim._named,
    "memory": Rim._memory,
    "watchdog": Rim._on_stuck,
}


def _subject(event: m.Event) -> str:
    if isinstance(event, m.LeaseRequested | m.LeaseReturned):
        return f"lease {event.island}"
    if isinstance(event, m.HandlePublished | m.HandleUnpublished | m.HandleTaken):
        return f"name {event.name}"
    for name in ("run", "slice", "buffer", "function"):
        value = getattr(event, name, None)
        if value is not None:
            return f"{name} {value}"
    return type(event).__name__


def _internal(event: m.Event, details: str) -> Failure:
    return Failure(
        "internal",
        f"the control plane failed on {type(event).__name__}: this is a bug in pathways_lab",
        "report it with the details; other programs are not affected",
        details=details,
    )
