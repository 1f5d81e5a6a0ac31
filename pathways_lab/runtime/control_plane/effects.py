"""Commands of the core, carried out: messages to clients and hosts.

Problem: the core says what shall be so (a grant, a bound slice, the end of a
run) in words without bytes or sockets.  Here each becomes messages, few of them
and to the right ones, and the registry keeps in step.

Rule for maintainers: nothing is decided here, and nothing here gives events to
the core: that is the rim's.

Paper: section 4.5; :mod:`pathways_lab.core.messages` has the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pathways_lab.core import messages as m
from pathways_lab.core.messages import elastic as em
from pathways_lab.core.program.folding import folded
from pathways_lab.core.scheduling.unordered_launch import Races
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.runtime.control_plane.directory import Registry
from pathways_lab.runtime.control_plane.outbox import Switchboard
from pathways_lab.runtime.control_plane.policy_supervisor import PolicyDesk
from pathways_lab.runtime.control_plane.record_writer import Diary
from pathways_lab.runtime.islands.process_groups import Formations
from pathways_lab.transport.auth import ticket_of
from pathways_lab.transport.codec import pack, pack_fields
from pathways_lab.transport.framing import Letter

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(eq=False, repr=False)
class Commands:
    """epochs: by island, how many hosts it has lost.  data_key: see :class:`.driver.Rim`."""

    _registry: Registry
    _tell: Switchboard
    _diary: Diary
    _formations: Formations
    _races: Races
    _policies: PolicyDesk
    _epochs: Mapping[str, int]
    _data_key: bytes

    def carry_out(self, commands: Sequence[m.Command]) -> None:
        """Carries out the commands of one event, in order."""
        resolved: list[m.Resolved] = []
        grants: list[m.Grant] = []
        for command in commands:
            if isinstance(command, m.Grant):
                grants.append(command)
                continue
            if grants:
                self._grant(grants)
                grants = []
            if isinstance(command, m.Resolved):
                resolved.append(command)
            elif isinstance(command, m.RunEnded):
                self._run_ended(command, resolved)
                resolved = []
            else:
                if isinstance(command, em.Answer):
                    self._tell_resolved(resolved)  # who asked looks at them
                    resolved = []
                self._carry_out(command)
        self._grant(grants)
        self._tell_resolved(resolved)

    # --- runs ------------------------------------------------------------------------

    def _tell_resolved(self, resolved: Sequence[m.Resolved]) -> None:
        by_client: dict[str, list[list[Any]]] = {}
        for command in resolved:
            by_client.setdefault(command.client, []).append(_resolved(command))
        for client, entries in by_client.items():
            self._tell.client(client, "resolved", {"resolved": entries})

    def _run_ended(self, ended: m.RunEnded, resolved: Sequence[m.Resolved]) -> None:
        """The end of a run, in one message with what its client learns at the same time."""
        self._tell_resolved([r for r in resolved if r.client != ended.client])
        fields = {
            "run": ended.run,
            "outcome": ended.outcome,
            "failure": pack(ended.failure) if ended.failure else None,
            "resolved": [_resolved(r) for r in resolved if r.client == ended.client],
        }
        size = self._tell.client(ended.client, "run-ended", fields)
        self._diary.count("run-ended", "control", (ended.client,), size, ended.run)
        self._registry.forget_run(ended.run)
        self._races.ended(ended.run)

    def _grant(self, grants: Sequence[m.Grant]) -> None:
        """Windows for hosts, in order; hosts that are told the same get the same letter."""
        alike: dict[tuple[int, int, int, int, int, bool], list[m.Grant]] = {}
        for grant in grants:
            arguments = self._registry.arguments.get(grant.run)
            along = arguments is not None and grant.host not in arguments.sent
            if arguments is not None:
                arguments.sent.add(grant.host)
            same = grant.run, grant.first, grant.epoch, grant.place, grant.previous, along
            alike.setdefault(same, []).append(grant)
        for (run, *_, along), some in alike.items():
            hosts = [grant.host for grant in some]
            fields = pack_fields(some[0])
            del fields["host"]
            buffers: list[memoryview] = []
            if along:
                given = self._registry.arguments[run]
                fields["arguments"], buffers = given.places, given.buffers
                if given.hear:
                    fields["hear"] = given.hear
            told, size = self._in_turn(hosts, "grant", fields, buffers)
            self._diary.count("grant", "control", told, size, run)

    # --- all others ------------------------------------------------------------------

    def _carry_out(self, command: m.Command) -> None:
        match command:
            case m.SliceBound(binding=binding):
                fields = {"binding": pack(binding)}
                if not any(self._registry.hosts[host].assembled for host in binding.hosts):
                    self._formations.bind(binding, self._epochs.get(binding.island, 0))
                self._in_turn(binding.hosts, "bind", fields)
                self._tell_where(binding, fields)
            case em.SliceMoved():
                self._moved(command)
            case em.SliceWithdrawn(hosts=hosts, slice=slice_id):
                self._in_turn(hosts, "unbind", {"slice": slice_id})
                self._formations.unbind(slice_id)
                self._registry.withdraw_slice(slice_id)
                self._tell.topology()
            case em.Park(hosts=hosts, slice=slice_id):
                self._in_turn(hosts, "park", {"slice": slice_id})
            case em.SliceSuspended(slice=slice_id):
                self._registry.away[slice_id] = "suspended"
                self._tell.topology()
            case em.HostsLeft(hosts=hosts, reason=reason):
                self._in_turn(hosts, "retire", {"reason": reason})
            case em.Answer(client=client, request=request, failure=failure):
                said = {"lines": command.lines, **(command.numbers or {})}
                self._tell.answer(client, request, failure, said)
            case m.SliceWaiting(client=client):
                self._tell.client(client, "slice-waiting", pack_fields(command))
            case m.SliceFreed(hosts=hosts, slice=slice_id):
                others = self._registry.told.get(slice_id, set()).difference(hosts)
                self._in_turn((*hosts, *sorted(others)), "unbind", {"slice": slice_id})
                self._formations.unbind(slice_id)
                self._registry.forget_slice(slice_id)
                self._diary.moved()
                self._tell.topology()
            case m.Refused(client=client, subject=subject, failure=failure):
                self._tell.refuse(client, subject, failure)
                kind, _, number = subject.partition(" ")
                if kind == "run" and number.isdecimal():
                    self._registry.forget_run(int(number))
            case m.Prepare(hosts=hosts, function=function, slice=slice_id):
                fields = self._registry.functions[function, slice_id].fields
                blob = self._registry.blobs[slice_id >> 32, function]
                self._in_turn(hosts, "prepare", fields, [blob])
            case m.ShareProgram(hosts=hosts, plan=plan):
                self._in_turn(hosts, "program", self._program(plan, hosts))
            case m.ProgramsForgotten(hosts=hosts, plans=plans, functions=functions):
                self._in_turn(hosts, "forget", {"plans": plans, "functions": functions})
                self._registry.forget_programs(plans, functions)
                self._diary.moved()
            case m.FreeBuffers(hosts=hosts, buffers=buffers):
                self._in_turn(hosts, "free", {"buffers": buffers})
            case m.AbortRun(hosts=hosts, run=run):
                self._in_turn(hosts, "abort", {"run": run})
            case m.Leased(client=client, island=island, order=order, patience=patience):
                self._registry.leases[island] = client
                if not order:
                    self._registry.disorder[island] = patience
            case m.LeaseEnded(island=island):
                del self._registry.leases[island]
                self._registry.disorder.pop(island, None)
            case m.Given(client=client, name=name, to=to):
                fields = {"name": name, "client": client, **self._to_read(to, command)}
                self._tell.client(to, "given", fields, [command.about])
            case m.Published(client=client, name=name, kept=kept):
                self._registry.published[name] = client
                (self._registry.kept.add if kept else self._registry.kept.discard)(name)
                self._tell.topology()
            case m.SlicesKept(client=client, slices=slices, runs=runs):
                self._registry.seat(client, slices, runs)
            case m.Unpublished(name=name):
                self._registry.published.pop(name, None)
                self._registry.kept.discard(name)
                self._tell.topology()
            case m.Taken():
                self._taken(command)
            case m.AskPolicy():
                self._policies.ask(command)
            case m.PolicySet():
                self.policy_set(command)

    def _in_turn(
        self,
        hosts: Sequence[str],
        op: str,
        fields: dict[str, Any],
        buffers: Sequence[Buffer] = (),
    ) -> tuple[list[str], int]:
        """Hosts get this after what waits for the start of a race: who was told, its bytes."""
        told = [host for host in hosts if not self._races.hold(host, op, fields, buffers)]
        letter, size = Letter(op, fields, buffers), 0
        for host in told:
            size = self._tell.forward(host, letter) or size
        return told, size

    def _program(self, key: str, hosts: Sequence[str]) -> dict[str, Any]:
        """A plan with the bindings of all its slices: hosts must know both ends of a transfer."""
        _, plan = self._registry.plans[key]
        known = self._registry.bindings
        if len(plan.slices) > 1:
            for slice_id in plan.slices:
                self._registry.told.setdefault(slice_id, set()).update(hosts)
        return {
            "plan": pack(folded(plan)),
            "bindings": [pack(known[s]) for s in plan.slices if s in known],
        }

    def _moved(self, moved: em.SliceMoved) -> None:
        """A suspended slice has devices again: first its old hosts hear it, then the new ones."""
        binding = moved.binding
        fields = {"binding": pack(binding)}
        if moved.hosts:
            self._in_turn(moved.hosts, "move", fields)
            self._formations.unbind(binding.slice)
            if not any(self._registry.hosts[host].assembled for host in binding.hosts):
                self._formations.bind(binding, self._epochs.get(binding.island, 0))
            self._in_turn(binding.hosts, "bind", fields)
        self._tell_where(binding, fields)

    def _tell_where(self, binding: SliceBinding, fields: dict[str, Any]) -> None:
        """Everybody hears that a slice has devices; its client, and who reads there, which."""
        self._registry.away.pop(binding.slice, None)
        self._tell.topology()
        self._tell.client(binding.client, "slice-bound", fields)
        numbers = {number for number, taken in self._registry.taken if taken == binding.slice}
        for client in self._registry.clients.values():
            if client.number in numbers:
                self._tell.client(client.name, "slice-bound", fields)

    def _taken(self, taken: m.Taken) -> None:
        fields = self._to_read(taken.client, taken)
        self._tell.answer(taken.client, taken.request, None, fields, [taken.about])

    def _to_read(self, client: str, taken: m.Taken | m.Given) -> dict[str, Any]:
        """A client reads from hosts by itself, and shows them that it may."""
        number = self._registry.clients[client].number
        places = dict.fromkeys(taken.slices)
        self._registry.taken.update([(number, on) for on in places])
        return {
            "stored": taken.stored,
            "slices": taken.slices,
            "bindings": [pack(self._registry.bindings[on]) for on in places],
            "tickets": [ticket_of(self._data_key, stored, number) for stored in taken.stored],
        }

    def policy_set(self, told: m.PolicySet) -> None:
        """Everybody hears of a change, and who asked is answered."""
        registry = self._registry
        self._policies.keep(told.policy)
        changed = (registry.policy, registry.policy_owner) != (told.policy, told.owner)
        registry.policy, registry.policy_owner = told.policy, told.owner
        if changed:
            why = pack(told.failure) if told.failure else None
            fields = {**registry.policy_in_force(), "client": told.client, "failure": why}
            self._tell.every_client("policy", fields)
        if told.request:
            self._tell.answer(told.client, told.request, told.failure)


def _resolved(command: m.Resolved) -> list[Any]:
    return [command.buffers, pack(command.failure) if command.failure else None]
