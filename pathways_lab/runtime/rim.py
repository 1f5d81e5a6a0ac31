"""The rim of the core: messages in, events; commands out, messages.

Problem: the core knows neither sockets nor bytes nor clocks, and must not be
disturbed by whoever is at the other end of a wire.  This is the adapter: it
checks and translates what arrives, hands it to the core with the time, and
carries out what the core commands.

Rule for maintainers: nothing is decided here.  Every event goes through
:meth:`Rim.happened`, and nowhere else.  No sockets here either: peers are
anything with ``send`` and ``pending``, so that tests need none.

Paper: section 4.5; :mod:`pathways_lab.core.messages` has the vocabulary.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pathways_lab.core import messages as m
from pathways_lab.core.errors import Failure
from pathways_lab.core.overdue import Overdue
from pathways_lab.core.story import Stuck
from pathways_lab.runtime import chronicle
from pathways_lab.runtime.broadcast import Broadcast, Watcher
from pathways_lab.runtime.codec import CodecError, pack, pack_fields, unpack
from pathways_lab.runtime.formations import Formations, Services
from pathways_lab.runtime.intake import Rejected, client_event, host_report
from pathways_lab.runtime.policy_desk import PolicyDesk
from pathways_lab.runtime.races import Races
from pathways_lab.runtime.registry import ClientSeen, HostSeen, Registry
from pathways_lab.runtime.standstill import Standstill
from pathways_lab.timeline.records import Event
from pathways_lab.timeline.records_of import policy_told, records_of

if TYPE_CHECKING:
    from typing_extensions import Buffer


_LETTERS = 4096
"""Wire messages that are remembered as one record at most."""


class Core(Protocol):
    """What is driven from here: :class:`pathways_lab.core.control.Control`."""

    def handle(self, event: m.Event) -> list[m.Command]: ...

    def overdue(self, seconds: float, now: float) -> Sequence[Overdue]: ...


class Peer(Watcher, Protocol):
    """The other end of a link."""

    def send(
        self, op: str, fields: dict[str, Any] | None = None, buffers: Sequence[Buffer] = ()
    ) -> int: ...


class Rim:
    """Drives one core.

    clock: seconds, monotonic; the time of every event and record.
    flush_due: called when records wait for :meth:`flush`.
    services: where the hosts of slices over several hosts meet.
    ticket(buffer, client): shows hosts that a client, by number, may read a buffer.
    policies: policies of users' own; :attr:`PolicyDesk.told` is this rim.
    formations: the book of what such hosts were told.
    rejected: messages refused because they were malformed or not allowed.
    """

    def __init__(
        self,
        core: Core,
        clock: Callable[[], float],
        flush_due: Callable[[], None],
        services: Services,
        policies: Callable[[Rim], PolicyDesk],
        ticket: Callable[[int, int], bytes],
    ) -> None:
        self.registry = Registry()
        self.broadcast = Broadcast()
        self.rejected = 0
        self._core = core
        self._clock = clock
        self._flush_due = flush_due
        self._ticket = ticket
        self._clients: dict[str, Peer] = {}
        self._hosts: dict[str, Peer] = {}
        self._numbers = 0
        self._letters: list[chronicle.Letter] = []
        self._epochs: dict[str, int] = {}
        self.formations = Formations(services, self._tell_host, self._slices_lost)
        self.policies = policies(self)
        self.races = Races(self._send_host)
        self.standstill = Standstill(
            self.registry,
            self.formations,
            self.races,
            core.overdue,
            self.happened,
            self._tell_host,
            lambda event: self._remember([chronicle.write(event)]),
        )

    # --- who is there ------------------------------------------------------------

    def new_client(self, name: str, pid: int) -> ClientSeen:
        """Number and name for a client that is about to join.  name: what it asks for, or "".

        Raises ValueError when it cannot be called so.
        """
        wrong = self.registry.check_name(name) if name else ""
        if wrong:
            raise ValueError(wrong)
        self._numbers += 1
        return ClientSeen(name or f"kernel-{self._numbers}", self._numbers, pid)

    def client_joined(self, client: ClientSeen, peer: Peer) -> None:
        self.registry.clients[client.name] = client
        self._clients[client.name] = peer
        cause = f"{client.name}:joined"
        self.happened(m.ClientJoined(self._clock(), cause, client.name, client.number))
        self._tell_clients(*self._hosts)
        self._tell_topology()

    def client_left(self, name: str, reason: str) -> None:
        if self._clients.pop(name, None) is None:
            return
        self.broadcast.unwatch(name)
        for island in [i for i, client in self.registry.leases.items() if client == name]:
            self._end_races(island, name)
        self.happened(m.ClientLeft(self._clock(), f"{name}:left", name, reason))
        self.registry.forget_client(name)
        self._tell_clients(*self._hosts)
        self._tell_topology()

    def host_joined(self, host: HostSeen, peer: Peer) -> None:
        """A device process is there.  One of the same name before it counts as lost."""
        self.host_lost(host.name, f"{host.name} was replaced by a new device process")
        self.registry.hosts[host.name] = host
        self._hosts[host.name] = peer
        addresses = {h.name: h.data_address for h in self.registry.hosts.values()}
        for name in self._hosts:
            self._post(self._hosts, name, "peers", {"peers": addresses})
        self._tell_clients(host.name)
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
        self._tell_topology()

    def host_lost(self, name: str, reason: str, peer: Peer | None = None) -> None:
        """A host is gone.  peer: only if this is still its link."""
        if name not in self._hosts or peer not in (None, self._hosts[name]):
            return
        del self._hosts[name]
        island = self.registry.hosts[name].island
        self._epochs[island] = self._epochs.get(island, 0) + 1
        # First: the other hosts may be waiting for this one, in the middle of a computation.
        self.formations.host_lost(name, reason)
        self.standstill.host_lost(name, self._clock())
        self.happened(m.HostLost(self._clock(), f"{name}:lost", name, reason))
        del self.registry.hosts[name]
        # Of slices that have no host left the core has nobody to tell that they are gone.
        for slice_id, binding in tuple(self.registry.bindings.items()):
            if self._hosts.keys().isdisjoint(binding.hosts):
                self.registry.forget_slice(slice_id)
        self._tell_topology()

    def restart_host(self, name: str, reason: str) -> None:
        """End a device process, and with it what it holds; its worker starts another.

        For one that lives and does not come to an end: handles on it fail with
        *reason* now, whether or not it is still able to hear.
        """
        self._post(self._hosts, name, "restart", {"reason": reason})
        self.host_lost(name, f"it was restarted: {reason}")

    def _slices_lost(self, slices: tuple[int, ...], reason: str) -> None:
        self.happened(m.SlicesLost(self._clock(), "formation:broken", slices, reason))

    def closing(self, reason: str) -> None:
        """Tell every client that the lab ends."""
        for name in tuple(self._clients):
            self._post(self._clients, name, "closing", {"reason": reason})

    # --- what they say -------------------------------------------------------------

    def from_client(
        self, name: str, op: str, fields: dict[str, Any], buffers: list[memoryview], size: int
    ) -> None:
        """A message of a client.  A wrong one is refused and changes nothing."""
        client = self.registry.clients[name]
        if op == "watch":
            if fields.get("on", True):
                self.broadcast.watch(name, self._clients[name], self._clock())
            else:
                self.broadcast.unwatch(name)
        elif op == "topology":
            self._post(self._clients, name, "topology", self.registry.topology())
        elif op == "policy" and buffers:
            self._try_policy(name, fields, buffers[0])
        elif op == "stuck":
            self._wonder(name, fields)
        elif op == "race":
            self._race(name, fields)
        elif op == "race-go":
            self.races.close(int(fields["race"]), self._clock())
        else:
            try:
                event = client_event(self.registry, client, op, fields, buffers, self._clock())
            except Rejected as rejected:
                self.rejected += 1
                failure = Failure("refused", str(rejected), rejected.remedy)
                self._refuse(name, rejected.subject, failure)
                return
            if isinstance(event, m.RunSubmitted):
                self._count("submit", name, "control", size, event.run)
                if "race" in fields:
                    number, controller = fields["race"]
                    self.races.entered(number, event.run, controller)
            elif isinstance(event, m.LeaseReturned):
                self._end_races(event.island, name)
            self.happened(event)

    def is_current(self, name: str, peer: Peer) -> bool:
        """Whether *peer* is the link of the client or host of this name."""
        return peer in (self._clients.get(name), self._hosts.get(name))

    def from_host(
        self, name: str, op: str, fields: dict[str, Any], buffers: list[memoryview], size: int
    ) -> None:
        """A message of a host.  Raises ValueError for one that is malformed."""
        host = self.registry.hosts[name]
        if op == "report":
            records = fields.get("records", [])
            if not (isinstance(records, list) and all(type(r) is bytes for r in records)):
                raise CodecError("records must be a list of bytes")
            self._remember(records)
            cause = f"{name}:report"
            report = host_report(host, fields, self._clock(), cause)
            runs = {entry[0] for entry in (*report.finished, *report.failed)}
            if runs:
                self._count("report", name, "control", size, runs.pop() if len(runs) == 1 else 0)
            if runs or report.resident or report.compiled or report.finished or report.failed:
                self.happened(report)
        elif op == "output":
            self._output(host, int(fields["run"]), fields.get("device"), str(fields["text"]))
        elif op == "joined":
            why = fields["failure"]
            text = None if why is None else unpack(Failure, why).message
            self.formations.formed(int(fields["number"]), name, text)
        elif op == "broken":
            self.formations.broken(int(fields["number"]), str(fields["reason"])[:2000])
        elif op == "progress":
            self.standstill.answered(name, fields, self._clock())
        elif op == "rejected":
            self._rejected_by(host, int(fields["client"]), str(fields["reason"])[:500])
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
        self._remember([chronicle.write(event)])

    def _output(self, host: HostSeen, run: int, device: object, text: str) -> None:
        """Text that user code printed goes to the client of its run."""
        args = {"text": text[:1000], "device": device}
        event = Event("output", self._clock(), host.island, host.name, run=run, args=args)
        self._remember([chronicle.write(event)])
        client = self.registry.client_of(run)
        if client is not None:
            fields = {"host": host.name, "run": run, "device": device, "text": text}
            self._post(self._clients, client.name, "output", fields)

    # --- standstill and disorder -----------------------------------------------------

    def look(self) -> None:
        """Now and then: is anything stuck?"""
        now = self._clock()
        self.races.settle(now)
        self.standstill.look(now)

    def _wonder(self, client: str, fields: dict[str, Any]) -> None:
        """A client asks what is late; hosts are asked first."""

        def told(story: Stuck | None) -> None:
            plain = None if story is None else pack(story)
            self._post(self._clients, client, "stuck", {"id": fields["id"], "story": plain})

        self.standstill.wonder(self._clock(), float(fields["seconds"]), told)

    def _race(self, client: str, fields: dict[str, Any]) -> None:
        """Runs that follow are launched in orders of the client's choice."""
        island = fields["island"]
        if island in self.registry.disorder and self.registry.leases.get(island) == client:
            orders = {str(host): tuple(order) for host, order in fields["orders"].items()}
            ours = {h: order for h, order in orders.items() if self._island_of(h) == island}
            self.races.open(int(fields["race"]), client, island, ours)

    def _island_of(self, host: str) -> str:
        seen = self.registry.hosts.get(host)
        return seen.island if seen is not None else ""

    def _end_races(self, island: str, client: str) -> None:
        self.races.abandon(client, island)
        self.standstill.lease_ends(island, client, self._clock())

    def flush(self) -> None:
        """Send new records to the watchers."""
        if self._letters:
            letters, self._letters = self._letters, []
            self.broadcast.add([chronicle.messages(letters)])
        self.broadcast.flush(self._clock())

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
                self._refuse(client, _subject(event), _internal(event, details))
            return
        for command in commands:
            if isinstance(command, m.SliceBound):
                self.registry.bindings[command.binding.slice] = command.binding
        self._remember([chronicle.write(r) for r in records_of(event, commands, self.registry)])
        resolved: list[m.Resolved] = []
        for command in commands:
            if isinstance(command, m.Resolved):
                resolved.append(command)
            elif isinstance(command, m.RunEnded):
                self._run_ended(command, resolved)
                resolved = []
            else:
                self._carry_out(command)
        self._tell_resolved(resolved)
        if self.races:
            self.races.settle(event.time)

    def _tell_resolved(self, resolved: Sequence[m.Resolved]) -> None:
        by_client: dict[str, list[list[Any]]] = {}
        for command in resolved:
            by_client.setdefault(command.client, []).append(_resolved(command))
        for client, entries in by_client.items():
            self._post(self._clients, client, "resolved", {"resolved": entries})

    def _run_ended(self, ended: m.RunEnded, resolved: Sequence[m.Resolved]) -> None:
        """The end of a run, in one message with what its client learns at the same time."""
        self._tell_resolved([r for r in resolved if r.client != ended.client])
        fields = {
            "run": ended.run,
            "outcome": ended.outcome,
            "failure": pack(ended.failure) if ended.failure else None,
            "resolved": [_resolved(r) for r in resolved if r.client == ended.client],
        }
        size = self._post(self._clients, ended.client, "run-ended", fields)
        self._count("run-ended", "control", ended.client, size, ended.run)
        self.registry.forget_run(ended.run)
        self.races.ended(ended.run)

    def _carry_out(self, command: m.Command) -> None:
        match command:
            case m.Grant():
                self._grant(command)
            case m.SliceBound(client=client, binding=binding):
                fields = {"binding": pack(binding)}
                if not any(self.registry.hosts[host].assembled for host in binding.hosts):
                    self.formations.bind(binding, self._epochs.get(binding.island, 0))
                self._post_hosts(binding.hosts, "bind", fields)
                self._post(self._clients, client, "slice-bound", fields)
                self._tell_topology()
            case m.SliceFreed(hosts=hosts, slice=slice_id):
                self._post_hosts(hosts, "unbind", {"slice": slice_id})
                self.formations.unbind(slice_id)
                self.registry.forget_slice(slice_id)
                self._tell_topology()
            case m.Refused(client=client, subject=subject, failure=failure):
                self._refuse(client, subject, failure)
                kind, _, number = subject.partition(" ")
                if kind == "run" and number.isdecimal():
                    self.registry.forget_run(int(number))
            case m.Prepare(hosts=hosts, function=function, slice=slice_id):
                fields = self.registry.functions[function, slice_id]
                blob = self.registry.blobs[slice_id >> 32, function]
                self._post_hosts(hosts, "prepare", fields, [blob])
            case m.ShareProgram(hosts=hosts, plan=plan):
                self._post_hosts(hosts, "program", self._program(plan))
            case m.FreeBuffers(hosts=hosts, buffers=buffers):
                self._post_hosts(hosts, "free", {"buffers": buffers})
            case m.AbortRun(hosts=hosts, run=run):
                self._post_hosts(hosts, "abort", {"run": run})
            case m.Leased(client=client, island=island, order=order, patience=patience):
                self.registry.leases[island] = client
                if not order:
                    self.registry.disorder[island] = patience
                self._post(self._clients, client, "leased", {"island": island})
            case m.LeaseEnded(client=client, island=island):
                del self.registry.leases[island]
                self.registry.disorder.pop(island, None)
                self._post(self._clients, client, "lease-ended", {"island": island})
            case m.Published(client=client, name=name):
                self.registry.published[name] = client
                self._tell_topology()
                self._post(self._clients, client, "shared", {"name": name})
            case m.Unpublished(client=client, name=name):
                self.registry.published.pop(name, None)
                self._tell_topology()
                self._post(self._clients, client, "shared", {"name": name})
            case m.Taken():
                self._taken(command)
            case m.AskPolicy():
                self.policies.ask(command)
            case m.PolicySet():
                self._policy_set(command)

    def _program(self, key: str) -> dict[str, Any]:
        """A plan with the bindings of all its slices: hosts must know both ends of a transfer."""
        _, plan, packed = self.registry.plans[key]
        known = self.registry.bindings
        return {"plan": packed, "bindings": [pack(known[s]) for s in plan.slices if s in known]}

    def _grant(self, grant: m.Grant) -> None:
        fields = pack_fields(grant)
        buffers: list[memoryview] = []
        arguments = self.registry.arguments.get(grant.run)
        if arguments is not None and grant.host not in arguments.sent:
            arguments.sent.add(grant.host)
            fields["arguments"] = arguments.places
            buffers = arguments.buffers
        if self.races.hold(grant.host, "grant", fields, buffers):
            return
        size = self._post(self._hosts, grant.host, "grant", fields, buffers)
        self._count("grant", "control", grant.host, size, grant.run)

    def _taken(self, taken: m.Taken) -> None:
        """The client reads from hosts by itself, and shows them that it may."""
        number = self.registry.clients[taken.client].number
        self.registry.taken.add((number, taken.slice))
        fields = {
            "name": taken.name,
            "stored": taken.stored,
            "binding": pack(self.registry.bindings[taken.slice]),
            "ticket": self._ticket(taken.stored, number),
        }
        self._post(self._clients, taken.client, "taken", fields, [taken.about])

    # --- the policy ----------------------------------------------------------------

    def _try_policy(self, name: str, fields: dict[str, Any], code: memoryview) -> None:
        """Code of a client's own; the core hears of it when it has been tried."""
        request, called = fields.get("request"), fields.get("name")
        if type(request) is int and type(called) is str:
            self.policies.try_out(name, request, called[:100], code)
        else:
            self._refuse(name, "policy", Failure("refused", "malformed message 'policy'"))

    def _policy_set(self, told: m.PolicySet) -> None:
        """Everybody hears of a change, who asked of any answer."""
        registry = self.registry
        self.policies.keep(told.policy)
        changed = (registry.policy, registry.policy_owner) != (told.policy, told.owner)
        registry.policy, registry.policy_owner = told.policy, told.owner
        fields = {
            **registry.policy_in_force(),
            "client": told.client,
            "request": told.request,
            "failure": pack(told.failure) if told.failure else None,
        }
        for name in tuple(self._clients) if changed else (told.client,):
            self._post(self._clients, name, "policy", fields)

    def policy_refused(self, client: str, request: int, failure: Failure) -> None:
        """A policy of a client's own did not get as far as the core."""
        registry = self.registry
        told = m.PolicySet(
            "policy", client, registry.policy, registry.policy_owner, failure, request
        )
        self._remember([chronicle.write(policy_told(told, self._clock(), registry))])
        self._policy_set(told)

    def policy_printed(self, client: str, name: str, text: str) -> None:
        """What a policy prints goes to the client that set it."""
        self._post(self._clients, client, "policy-printed", {"name": name, "text": text})

    # --- sending ---------------------------------------------------------------------

    def _refuse(self, client: str, subject: str, failure: Failure) -> None:
        self._post(self._clients, client, "refused", {"subject": subject, "failure": pack(failure)})

    def _tell_topology(self) -> None:
        topology = self.registry.topology()
        for name in tuple(self._clients):
            self._post(self._clients, name, "topology", topology)

    def _tell_clients(self, *hosts: str) -> None:
        """Hosts take nothing from clients that have left."""
        present = [client.number for client in self.registry.clients.values()]
        for name in hosts:
            fields = {"newest": self._numbers, "present": present}
            self._post(self._hosts, name, "clients", fields)

    def _tell_host(self, host: str, op: str, fields: dict[str, Any]) -> None:
        self._send_host(host, op, fields)

    def _send_host(
        self, host: str, op: str, fields: dict[str, Any], buffers: Sequence[Buffer] = ()
    ) -> None:
        """What does not wait for anything, not even for the end of a race."""
        self._post(self._hosts, host, op, fields, buffers)

    def _post_hosts(
        self,
        hosts: Sequence[str],
        op: str,
        fields: dict[str, Any],
        buffers: Sequence[Buffer] = (),
    ) -> None:
        for host in hosts:
            if not self.races.hold(host, op, fields, buffers):
                self._post(self._hosts, host, op, fields, buffers)

    def _post(
        self,
        peers: dict[str, Peer],
        name: str,
        op: str,
        fields: dict[str, Any],
        buffers: Sequence[Buffer] = (),
    ) -> int:
        """Send to a peer that may be gone: its end is then on the way as an event."""
        peer = peers.get(name)
        if peer is None:
            return 0
        try:
            return peer.send(op, fields, buffers)
        except ConnectionError:
            return 0

    # --- the timeline ----------------------------------------------------------------

    def _count(self, kind: str, source: str, target: str, size: int, run: int) -> None:
        known = self.registry.plans.get(self.registry.programs.get(run, ("", ""))[1])
        program = known[1].name if known else ""
        self._letters.append((self._clock(), kind, source, target, size, run, program))
        if len(self._letters) == _LETTERS:
            self.flush()

    def _remember(self, records: Sequence[bytes]) -> None:
        if self.broadcast.add(records):
            self._flush_due()


def _resolved(command: m.Resolved) -> list[Any]:
    return [command.buffers, pack(command.failure) if command.failure else None]


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
