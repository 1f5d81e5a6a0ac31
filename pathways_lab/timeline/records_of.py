"""The records of one step of the core: a pure function of event and commands.

Problem: the timeline must hold the decisions of the control plane without the core
knowing that anybody looks, and must hold them alike whether a real cluster or a
simulated one carries them out.  Everything worth remembering is in the event
that went in and the commands that came out.

Rule for maintainers: no state, no clock; the registry is read, never changed.
Times measured on hosts come from their own records, not from here.

Paper: section 4.4 (the order on each island is what these records show).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pathways_lab.core import messages as m
from pathways_lab.core.messages import elastic as em
from pathways_lab.core.program.program import Call, Plan, SliceId, Step
from pathways_lab.core.scheduling.policies import BuiltIn
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.timeline import flow
from pathways_lab.timeline.records import Event, Record


class HostKnown(Protocol):
    """A host as its driver knows it.  emulated: its devices stand in for accelerators."""

    @property
    def island(self) -> str: ...
    @property
    def emulated(self) -> bool: ...
    @property
    def pid(self) -> int: ...


class Registry(Protocol):
    """The knowledge of a driver beside the core.

    plans: by key, the client that registered it, and the plan.
    programs: by run, the client and the plan's key.
    """

    @property
    def hosts(self) -> Mapping[str, HostKnown]: ...
    @property
    def bindings(self) -> Mapping[SliceId, SliceBinding]: ...
    @property
    def plans(self) -> Mapping[str, tuple[str, Plan]]: ...
    @property
    def programs(self) -> Mapping[m.Run, tuple[str, str]]: ...


def records_of(
    event: m.Event, commands: Sequence[m.Command], registry: Registry
) -> Iterator[Record]:
    """The records of *event* and of the *commands* that it caused.

    registry: as it is after the commands' bindings are known and before their
        runs are forgotten.
    """

    def granted(grant: m.Grant, island: str) -> Iterator[Record]:
        found = Placing.of(grant, island, registry)
        return iter(()) if found is None else found.events(*window_of(grant, event.time))

    return told(event, commands, registry, granted)


Told = TypeVar("Told")


def told(
    event: m.Event,
    commands: Sequence[m.Command],
    registry: Registry,
    granted: Callable[[m.Grant, str], Iterable[Told]],
) -> Iterator[Record | Told]:
    """The same.  granted(grant, island): what the places of a window are remembered as."""
    before = _EVENTS.get(type(event))
    # A plan that was refused may be anything.
    wrong = isinstance(event, m.ProgramRegistered) and any(
        isinstance(command, m.Refused) for command in commands
    )
    if before is not None and not wrong:
        yield before(event, registry)
    windows: set[tuple[int, str, int]] = set()
    for command in commands:
        if isinstance(command, m.Grant) and command.skipped:
            continue  # no gang of it has a bar
        if isinstance(command, m.Grant):
            island = registry.hosts[command.host].island if command.host in registry.hosts else ""
            window = (command.run, island, command.place)
            if window not in windows:
                windows.add(window)
                yield from granted(command, island)
            continue
        after = _COMMANDS.get(type(command))
        if after is not None:
            yield after(command, event.time, registry)


def message(
    time: float, kind: str, source: str, target: str, size: int, run: int, program: str
) -> Event:
    """One wire message that belongs to a run.  size: bytes on the wire."""
    return Event(
        "message",
        time,
        run=run,
        program=program,
        args={"kind": kind, "source": source, "target": target, "bytes": size},
    )


Window = tuple[float, int, int, int]
"""When, run, epoch, and the first place."""


def window_of(grant: m.Grant, time: float) -> Window:
    """The fields that differ between two runs of one program."""
    return time, grant.run, grant.epoch, grant.place


@dataclass(frozen=True, slots=True)
class Placing:
    """The gangs that a window of a program places on one island, whatever the run.

    gangs: of each, its place after the first one, step, node, slice, line and hosts there.
    again: steps of gangs that have a place on another island too, which counts them.
    """

    island: str
    program: str
    client: str
    gangs: tuple[tuple[int, int, str, SliceId, str, tuple[str, ...]], ...]
    again: tuple[int, ...] = ()

    @classmethod
    def of(cls, grant: m.Grant, island: str, registry: Registry) -> Placing | None:
        """Numbered as the core numbers them; None when the program is not known."""
        known = registry.plans.get(grant.plan)
        if known is None:
            return None
        client, plan = known
        gangs: list[tuple[int, int, str, SliceId, str, tuple[str, ...]]] = []
        again: list[int] = []
        place = 0
        for number in range(grant.first, grant.last):
            node = plan.steps[number].node
            slices = _slices_of(plan.steps[number], plan)
            if not any(island in _islands(slice_id, registry) for slice_id in slices):
                continue
            if isinstance(node, Call):
                binding = registry.bindings.get(node.slice)
                home = binding.home if binding is not None else {}
                hosts = tuple(host for host, at in home.items() if at == island)
                gangs.append((place, number, node.name, node.slice, str(node.line), hosts))
                if binding is not None and binding.island != island:
                    again.append(number)
            place += 1
        return cls(island, plan.name, client, tuple(gangs), tuple(again))

    def events(self, time: float, run: int, epoch: int, place: int) -> Iterator[Event]:
        """Each in a run that is granted these places."""
        for after, step, node, slice_id, line, hosts in self.gangs:
            yield Event(
                "granted",
                time,
                self.island,
                run=run,
                step=step,
                program=self.program,
                node=node,
                client=self.client,
                args={
                    "seq": place + after,
                    "epoch": epoch,
                    "slice": slice_id,
                    "line": line,
                    "hosts": hosts,
                    **({"again": True} if step in self.again else {}),
                },
            )


def _slices_of(step: Step, plan: Plan) -> tuple[SliceId | None, ...]:
    if isinstance(step.node, Call):
        return (step.node.slice,)
    return plan.values[step.node.input].slice, plan.values[step.node.output].slice


def _islands(slice_id: SliceId | None, registry: Registry) -> tuple[str, ...]:
    binding = registry.bindings.get(slice_id) if slice_id is not None else None
    return binding.islands if binding is not None else ("",)


def _program_of(run: m.Run, registry: Registry) -> dict[str, Any]:
    client, key = registry.programs.get(run, ("", ""))
    known = registry.plans.get(key)
    return {"run": run, "program": known[1].name if known else "", "client": client}


def _host_joined(event: m.HostJoined, registry: Registry) -> Event:
    seen = registry.hosts.get(event.host)
    return Event(
        "host-joined",
        event.time,
        event.island,
        event.host,
        args={
            "devices": event.devices,
            "kind": event.kind,
            "memory": event.memory,
            "emulated": seen.emulated if seen else False,
            "pid": seen.pid if seen else 0,
        },
    )


def _host_lost(event: m.HostLost, registry: Registry) -> Event:
    seen = registry.hosts.get(event.host)
    island = seen.island if seen else ""
    return Event("host-lost", event.time, island, event.host, args={"reason": event.reason})


def _slices_lost(event: m.SlicesLost, registry: Registry) -> Event:
    island = _islands(event.slices[0], registry)[0]
    args = {"slices": list(event.slices), "reason": event.reason}
    return Event("slices-lost", event.time, island, args=args)


def _client_joined(event: m.ClientJoined, registry: Registry) -> Event:
    return Event("client-joined", event.time, client=event.client)


def _client_left(event: m.ClientLeft, registry: Registry) -> Event:
    return Event("client-left", event.time, client=event.client, args={"reason": event.reason})


def _submitted(event: m.RunSubmitted, registry: Registry) -> Event:
    reads = event.inputs[: flow.FEW]
    return Event(
        "submitted",
        event.time,
        **_program_of(event.run, registry),
        args={
            "priority": event.priority,
            "plan": event.plan,
            **({"reads": reads} if any(buffer is not None for buffer in reads) else {}),
            "makes": event.outputs[: flow.FEW],
            **({"data": dict(event.data)} if event.data else {}),
            **({"waited": str(event.waited)} if event.waited.number else {}),
            **({"worked": str(event.worked)} if event.worked.number else {}),
        },
    )


def _plan(event: m.ProgramRegistered, registry: Registry) -> Event:
    plan = event.plan
    args = {"plan": plan.key, "steps": flow.described(plan)}
    return Event("plan", event.time, program=plan.name, client=event.client, args=args)


def bound(binding: SliceBinding, time: float) -> Event:
    """A slice has devices."""
    return Event(
        "slice-bound",
        time,
        binding.island,
        client=binding.client,
        args={
            "slice": binding.slice,
            "shape": binding.shape,
            "axes": binding.axes,
            "devices": binding.devices,
            "generation": binding.generation,
            **({"elsewhere": binding.elsewhere} if binding.elsewhere else {}),
        },
    )


def _slice_bound(command: m.SliceBound, time: float, registry: Registry) -> Event:
    return bound(command.binding, time)


def _slice_freed(command: m.SliceFreed, time: float, registry: Registry) -> Event:
    return Event(
        "slice-freed", time, _islands(command.slice, registry)[0], args={"slice": command.slice}
    )


def _slice_moved(command: em.SliceMoved, time: float, registry: Registry) -> Event:
    """It is bound again."""
    return _slice_bound(m.SliceBound("", "", command.binding), time, registry)


def _slice_away(command: Any, time: float, registry: Registry) -> Event:
    """It has no devices any more, for a while or until its client asks for others."""
    kind = "slice-suspended" if isinstance(command, em.SliceSuspended) else "slice-withdrawn"
    return Event(kind, time, _islands(command.slice, registry)[0], args={"slice": command.slice})


def _hosts_left(command: em.HostsLeft, time: float, registry: Registry) -> Event:
    args = {"hosts": command.hosts, "reason": command.reason}
    return Event("hosts-left", time, args=args)


def _resolved(command: m.Resolved, time: float, registry: Registry) -> Event:
    return Event(
        "resolved",
        time,
        client=command.client,
        args={
            "buffers": command.buffers,
            "failure": command.failure.message if command.failure else "",
        },
    )


def _run_ended(command: m.RunEnded, time: float, registry: Registry) -> Event:
    failure = command.failure
    return Event(
        command.outcome,
        time,
        **_program_of(command.run, registry),
        args={"message": failure.message, "line": str(failure.line)} if failure else {},
    )


def _run_waited(command: m.RunWaited, time: float, registry: Registry) -> Event:
    args = {"since": command.since, "waited_for": command.waited_for}
    return Event("admitted", time, **_program_of(command.run, registry), args=args)


def _leased(command: m.Leased, time: float, registry: Registry) -> Event:
    args = {"order": command.order}
    return Event("leased", time, command.island, client=command.client, args=args)


def _lease_ended(command: m.LeaseEnded, time: float, registry: Registry) -> Event:
    return Event("lease-ended", time, command.island, client=command.client)


def policy_told(command: m.PolicySet, time: float, registry: Registry) -> Event:
    """A policy was set, refused or removed.  client: who set it, or would have."""
    failure = command.failure
    # One of a user's own, also in a simulation, is called by its name.
    known = isinstance(command.policy, BuiltIn)
    return Event(
        "policy",
        time,
        client=command.client,
        args={
            "policy": repr(command.policy) if known else command.name,
            "owner": command.owner,
            "message": failure.message if failure else "",
            "line": str(failure.line) if failure and failure.line.number else "",
        },
    )


def _policy_late(event: m.PolicyLate, registry: Registry) -> Event:
    """The policy in force did not answer in time: the order of submission decides until it does."""
    return Event("policy-late", event.time, args={"number": event.policy})


_EVENTS: dict[type, Callable[[Any, Registry], Event]] = {
    m.HostJoined: _host_joined,
    m.HostLost: _host_lost,
    m.SlicesLost: _slices_lost,
    m.ClientJoined: _client_joined,
    m.ClientLeft: _client_left,
    m.ProgramRegistered: _plan,
    m.RunSubmitted: _submitted,
    m.PolicyLate: _policy_late,
}

_COMMANDS: dict[type, Callable[[Any, float, Registry], Event]] = {
    m.SliceBound: _slice_bound,
    m.SliceFreed: _slice_freed,
    em.SliceMoved: _slice_moved,
    em.SliceSuspended: _slice_away,
    em.SliceWithdrawn: _slice_away,
    em.HostsLeft: _hosts_left,
    m.Resolved: _resolved,
    m.RunEnded: _run_ended,
    m.RunWaited: _run_waited,
    m.Leased: _leased,
    m.LeaseEnded: _lease_ended,
    m.PolicySet: policy_told,
}
