"""The memory of a simulation: records like those of a real cluster.

Problem: figures, questions and tests read the timeline; they must not care
where it comes from, and whoever looks at it must see that it is simulated.

Rule for maintainers: what the control plane decides is recorded by the same
function as on a real cluster (:mod:`pathways_lab.timeline.records_of`), what
hosts do in the same form as theirs; every record says ``simulated``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pathways_lab.core import messages as m
from pathways_lab.core.messages import elastic as em
from pathways_lab.core.program.program import Call, Plan, SliceId, Transfer
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.executor.actions import Receive
from pathways_lab.sim.parts import HostPort, Part
from pathways_lab.timeline import records
from pathways_lab.timeline.records_of import records_of


@dataclass(frozen=True, slots=True)
class HostSeen:
    """A simulated host, as records speak of it."""

    island: str
    emulated: bool = False
    pid: int = 0


@dataclass(slots=True)
class Memory:
    """Records, and what must be known to make them (see ``records_of.Registry``).

    on: whether anything is remembered.
    """

    on: bool = True
    records: list[records.Record] = field(default_factory=list)
    hosts: dict[str, HostSeen] = field(default_factory=dict)
    bindings: dict[SliceId, SliceBinding] = field(default_factory=dict)
    plans: dict[str, tuple[str, Plan]] = field(default_factory=dict)
    programs: dict[int, tuple[str, str]] = field(default_factory=dict)

    def happened(self, event: m.Event, commands: Sequence[m.Command]) -> None:
        """The core has answered an event."""
        if not self.on:
            return
        if isinstance(event, m.HostJoined):
            self.hosts[event.host] = HostSeen(event.island)
        elif isinstance(event, m.ProgramRegistered):
            self.plans[event.plan.key] = event.client, event.plan
        elif isinstance(event, m.RunSubmitted):
            self.programs[event.run] = event.client, event.plan
        for command in commands:
            if isinstance(command, m.SliceBound | em.SliceMoved):
                self.bindings[command.binding.slice] = command.binding
        for record in records_of(event, commands, self):
            assert isinstance(record, records.Event)
            self.records.append(replace(record, args={**record.args, "simulated": True}))
        if isinstance(event, m.HostLost):
            self.hosts.pop(event.host, None)
        for command in commands:
            if isinstance(command, m.RunEnded):
                self.programs.pop(command.run, None)
            elif isinstance(command, m.SliceFreed | em.SliceWithdrawn):
                self.bindings.pop(command.slice, None)

    def launched(self, part: Part, time: float) -> None:
        """A gang was handed to the devices of one host."""
        if self.on:
            call, plan = part.call, part.segment.plan
            args = {"devices": part.devices, "line": _line(call), **_args(part.seq, call.slice)}
            self.records.append(
                records.Event(
                    "launched", time, part.host.island, part.host.name, part.run, part.step,
                    plan.name, call.name, self._client(plan), args,
                )
            )  # fmt: skip

    def gang(self, part: Part, start: float, end: float, failed: bool) -> None:
        """A gang has ended on one host."""
        if self.on:
            call, plan = part.call, part.segment.plan
            self.records.append(
                records.Span(
                    "gang", start, end, part.host.island, part.host.name, part.devices, part.run,
                    part.step, plan.name, call.name, self._client(plan), _line(call),
                    {**_args(part.seq, call.slice), "poisoned": failed},
                )
            )  # fmt: skip

    def transfer(
        self, host: HostPort, action: Receive, sources: Iterable[str], start: float, end: float
    ) -> None:
        """A transfer has ended on a host."""
        if self.on:
            node, plan, (run, step) = action.node, action.plan, action.key
            made, devices = action.target.value, tuple(sorted(action.target.locals))
            assert made.slice is not None
            more = {
                "nbytes": made.nbytes * len(devices),
                "source": ", ".join(sources),
                "target": host.name,
            }
            self.records.append(
                records.Span(
                    "transfer", start, end, host.island, host.name, devices, run, step, plan.name,
                    node.name, self._client(plan), _line(node),
                    {**_args(action.seq, made.slice), **more},
                )
            )  # fmt: skip

    def compiled(self, host: str, function: str, where: SliceId, start: float, end: float) -> None:
        """A function was compiled on a host."""
        if self.on and end > start:
            args = {"function": function, "slice": where, "simulated": True}
            island = host.partition("/")[0]
            self.records.append(
                records.Span("compile", start, end, island, host, node=function, args=args)
            )

    def _client(self, plan: Plan) -> str:
        known = self.plans.get(plan.key)
        return known[0] if known is not None else ""


def _args(seq: int, where: SliceId) -> dict[str, Any]:
    return {"seq": seq, "slice": where, "simulated": True}


def _line(node: Call | Transfer) -> str:
    return str(node.line) if node.line.number else ""
