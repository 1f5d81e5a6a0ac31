"""The control plane's core: events in, commands out.

Problem: what must be one for all clients, the order on each island and the
memory of its devices, is decided in one place; and that place must be easy to
test, replay and simulate.  So it is a plain object without clock, randomness
or I/O: :meth:`Control.handle` takes an event with its time and returns what is
to be done.

Rule for maintainers: composition only.  This module checks who may ask for
what and passes it on: devices to the resource manager, everything about runs
to the conductor with its machines.  A request of a client can never raise: it
is met, or answered with Refused.

Paper: section 4 (system architecture).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pathways_lab.core.conductor import Conductor
from pathways_lab.core.errors import Failure
from pathways_lab.core.gangs import IslandOrder
from pathways_lab.core.legality import check_plan
from pathways_lab.core.messages import (
    BufferDeclared,
    BuffersDropped,
    ClientJoined,
    ClientLeft,
    Command,
    Event,
    FunctionAnnounced,
    HostJoined,
    HostLost,
    HostReport,
    Prepare,
    ProgramRegistered,
    Refused,
    Resolved,
    RunCancelled,
    RunEnded,
    RunSubmitted,
    SliceBound,
    SliceFreed,
    SliceReleased,
    SliceRequested,
)
from pathways_lab.core.plans import PlanIndex, index_plan
from pathways_lab.core.program import SliceId
from pathways_lab.core.rules import Rules
from pathways_lab.core.slices import ResourceManager, SliceRecord
from pathways_lab.core.store import BufferRecord
from pathways_lab.core.topology import Topology


@dataclass(slots=True)
class _Client:
    plans: dict[str, PlanIndex] = field(default_factory=dict)
    slices: set[SliceId] = field(default_factory=set)


class Control:
    """Everything that one control plane knows.  rules: see :class:`Rules`."""

    def __init__(self, rules: Rules | None = None) -> None:
        self.resources = ResourceManager()
        self.conductor = Conductor(self.resources, rules or Rules())
        self.clients: dict[str, _Client] = {}
        self.time = 0.0
        self._draining: set[SliceId] = set()
        self._divided = 0
        self._handlers: dict[type, Callable[[Any], None]] = {
            HostJoined: self._host_joined,
            HostLost: self._host_lost,
            ClientJoined: self._client_joined,
            ClientLeft: self._client_left,
            SliceRequested: self._slice_requested,
            SliceReleased: self._slice_released,
            FunctionAnnounced: self._function_announced,
            ProgramRegistered: self._program_registered,
            BufferDeclared: self._buffer_declared,
            RunSubmitted: self._run_submitted,
            RunCancelled: self._run_cancelled,
            BuffersDropped: self._buffers_dropped,
            HostReport: self._host_report,
        }

    def handle(self, event: Event) -> list[Command]:
        """What is to be done about *event*, in this order."""
        conductor = self.conductor
        conductor.out = []
        conductor.cause = event.cause
        self.time = event.time
        client = getattr(event, "client", None)
        if client is None or client in self.clients or isinstance(event, ClientJoined):
            self._handlers[type(event)](event)
            conductor.advance()
            if self._draining:
                self._drain_slices()
        else:
            failure = Failure("refused", f"client {client!r} is not connected", "connect first")
            conductor.out.append(Refused(event.cause, client, f"client {client}", failure))
        return conductor.out

    def topology(self) -> Topology:
        """The machine, and the slices that are bound to it."""
        return self.resources.topology()

    @property
    def slices(self) -> dict[SliceId, SliceRecord]:
        """All slices that exist, lost ones included."""
        return self.resources.slices

    # --- hosts -----------------------------------------------------------------------

    def _host_joined(self, event: HostJoined) -> None:
        if event.host in self.resources.hosts:
            self._lose_host(event.host, "its device process was replaced")
        self.resources.join(event)
        self.conductor.order.islands.setdefault(event.island, IslandOrder()).last.pop(
            event.host, None
        )

    def _host_lost(self, event: HostLost) -> None:
        if event.host in self.resources.hosts:
            self._lose_host(event.host, event.reason)

    def _lose_host(self, host: str, reason: str) -> None:
        """Slices, runs and buffers of a dead host fail; everything else goes on."""
        conductor = self.conductor
        failure = Failure(
            "lost",
            f"host {host} was lost: {reason}",
            "ask for a new slice and compute the values again",
            host=host,
        )
        conductor.order.end_epoch(self.resources.hosts[host].info.island)
        lost = self.resources.lose(host, failure)
        self._divide()
        gone = frozenset(record.binding.slice for record in lost)
        for run in [r for r in conductor.runs.values() if gone.intersection(r.index.plan.slices)]:
            conductor.lose(run, gone, failure)
        for slice_id in gone:
            for number in sorted(conductor.store.by_slice.get(slice_id, ())):
                conductor.lose_buffer(conductor.store.buffers[number], failure)
        self._draining |= gone

    def _host_report(self, event: HostReport) -> None:
        conductor, host = self.conductor, event.host
        if host not in self.resources.hosts:
            return
        for function, slice_id, temporary, failure in event.compiled:
            conductor.compiled((function, slice_id), host, temporary, failure)
        for number, step, why in event.failed:
            run = conductor.runs.get(number)
            if run is not None:
                conductor.failed(run, step, host, why)
        for number, step, seconds in event.finished:
            run = conductor.runs.get(number)
            if run is not None:
                conductor.finished(run, step, host, seconds)
        for number in event.resident:
            conductor.uploaded(number, host)

    # --- clients ---------------------------------------------------------------------

    def _client_joined(self, event: ClientJoined) -> None:
        if event.client in self.clients:
            self._refuse(event, f"client {event.client}", "a client of this name is connected")
            return
        self.clients[event.client] = _Client()
        self.conductor.clients[event.client] = set()

    def _client_left(self, event: ClientLeft) -> None:
        """Everything of a client is freed; what was granted still ends."""
        conductor = self.conductor
        client = self.clients.pop(event.client)
        failure = Failure("cancelled", f"client {event.client} left: {event.reason}")
        for number in sorted(conductor.clients.pop(event.client), reverse=True):
            run = conductor.runs.get(number)
            if run is not None:
                conductor.cancel(run, failure)
        for buffer in conductor.store.owned(event.client):
            if not buffer.maker and buffer.state == "promised":
                conductor.lose_buffer(buffer, failure)
            conductor.drop(buffer)
        for slice_id in client.slices:
            self._release(slice_id)

    # --- slices, functions, programs -------------------------------------------------

    def _slice_requested(self, event: SliceRequested) -> None:
        result = self.resources.bind(event.slice, event.client, event.request)
        if isinstance(result, Failure):
            self._refuse(event, f"slice {event.slice}", result)
            return
        self.clients[event.client].slices.add(event.slice)
        self._divide()
        self.conductor.out.append(SliceBound(event.cause, event.client, result))

    def _slice_released(self, event: SliceReleased) -> None:
        if event.slice not in self.clients[event.client].slices:
            self._refuse(event, f"slice {event.slice}", f"{event.client} has no such slice")
            return
        self.clients[event.client].slices.discard(event.slice)
        self._release(event.slice)

    def _release(self, slice_id: SliceId) -> None:
        self.resources.release(slice_id)
        self._draining.add(slice_id)

    def _drain_slices(self) -> None:
        """Released and lost slices end with their last run and buffer."""
        conductor = self.conductor
        for slice_id in sorted(self._draining):
            record = self.resources.slices[slice_id]
            named = bool(conductor.store.by_slice.get(slice_id))
            if conductor.users.get(slice_id) or (named and record.state != "lost"):
                continue
            if not record.told:
                record.told = True
                hosts = conductor.alive(record.hosts)
                if hosts:
                    conductor.out.append(SliceFreed(conductor.cause, hosts, slice_id))
            owner = self.clients.get(record.binding.client)
            if not named and (owner is None or slice_id not in owner.slices):
                self._draining.discard(slice_id)
                self.resources.free(slice_id)
                conductor.functions.forget(slice_id)
                conductor.forget_slice(slice_id)
                if owner is not None:
                    for key in [k for k, i in owner.plans.items() if slice_id in i.plan.slices]:
                        del owner.plans[key]
        self._divide()

    def _divide(self) -> None:
        if self._divided != self.resources.version:
            self._divided = self.resources.version
            self.conductor.divide()

    def _usable(self, client: str, slice_id: SliceId) -> Failure | None:
        """Why a client may not use a slice for anything new."""
        record = self.resources.slices.get(slice_id)
        if record is None or slice_id not in self.clients[client].slices:
            if record is not None and record.binding.client == client:
                return Failure("refused", f"slice {slice_id} was released", "ask for a new slice")
            return Failure(
                "refused",
                f"slice {slice_id} is unknown or belongs to another client",
                "use a slice that this client asked for",
            )
        return record.failure

    def _function_announced(self, event: FunctionAnnounced) -> None:
        failure = self._usable(event.client, event.slice)
        if failure is not None:
            self._refuse(event, f"function {event.function}", failure)
            return
        hosts = self.resources.slices[event.slice].hosts
        if self.conductor.functions.announce((event.function, event.slice), hosts):
            self.conductor.out.append(Prepare(event.cause, hosts, event.function, event.slice))

    def _program_registered(self, event: ProgramRegistered) -> None:
        plan, client = event.plan, self.clients[event.client]
        if plan.key in client.plans:
            return
        failure = check_plan(plan)
        for slice_id in plan.slices:
            failure = failure or self._usable(event.client, slice_id)
        if failure is None:
            bindings = {s: self.resources.slices[s].binding for s in plan.slices}
            index = index_plan(plan, event.client, bindings)
            known = self.conductor.functions.records
            missing = [
                f"{name} on slice {s}" for name, s in index.functions if (name, s) not in known
            ]
            if not missing:
                client.plans[plan.key] = index
                return
            failure = Failure(
                "refused",
                f"program {plan.name!r} calls unannounced functions: {', '.join(missing)}",
                "announce every compiled function for its slice first",
                program=plan.name,
            )
        self._refuse(event, f"program {plan.key}", failure)

    # --- buffers and runs --------------------------------------------------------------

    def _buffer_declared(self, event: BufferDeclared) -> None:
        subject = f"buffer {event.buffer}"
        store = self.conductor.store
        if event.buffer in store.buffers or event.nbytes < 0:
            self._refuse(event, subject, "its number is in use, or its size is negative")
            return
        failure = self._usable(event.client, event.slice)
        if failure is not None:
            record = self.resources.slices.get(event.slice)
            self.conductor.reject_upload(event.buffer, record.hosts if record else ())
            self._refuse(event, subject, failure)
            return
        buffer = store.create(event.buffer, event.client, event.slice, event.nbytes, "upload")
        buffer.stored = True
        failure = self.conductor.upload(buffer, self.resources.slices[event.slice].hosts)
        if failure is not None:
            self.conductor.lose_buffer(buffer, failure)

    def _run_submitted(self, event: RunSubmitted) -> None:
        """Every submitted run ends once and resolves its outputs, refused ones too."""
        conductor, store = self.conductor, self.conductor.store
        subject = f"run {event.run}"
        if (
            event.run in conductor.runs
            or event.run < 1
            or len(set(event.outputs)) != len(event.outputs)
            or any(number in store.buffers for number in event.outputs)
        ):
            self._refuse(event, subject, "the numbers of the run or its outputs are in use")
            return
        index = self.clients[event.client].plans.get(event.plan)
        failure = self._check_run(event, index)
        outputs = []
        for p, number in enumerate(event.outputs):
            value = index.plan.values[index.plan.outputs[p]] if index and failure is None else None
            outputs.append(
                store.create(
                    number, event.client, -1 if value is None else value.slice or 0,
                    value.nbytes if value else 0, value.name if value else "", event.run,
                )
            )  # fmt: skip
        if failure is not None:
            self._refuse(event, subject, failure)
        elif index is not None:
            inputs = tuple(None if b is None else store.buffers[b] for b in event.inputs)
            failure = self._spoiled(index, inputs)
            if failure is None:
                conductor.submit(event, index, inputs, tuple(outputs))
                return
        for buffer in outputs:
            buffer.made = True
            store.fail(buffer, failure or Failure("internal", "no reason"))
        if outputs:
            conductor.out.append(Resolved(event.cause, event.client, event.outputs, failure))
        conductor.out.append(RunEnded(event.cause, event.client, event.run, "failed", failure))

    def _check_run(self, event: RunSubmitted, index: PlanIndex | None) -> Failure | None:
        """Why a run is not legal."""

        def refusal(message: str, remedy: str = "") -> Failure:
            name = index.plan.name if index is not None else ""
            return Failure("refused", message, remedy, program=name)

        if index is None:
            return refusal(f"plan {event.plan!r} is unknown", "register the program first")
        plan = index.plan
        if (len(event.inputs), len(event.outputs)) != (len(plan.inputs), len(plan.outputs)):
            return refusal(
                f"program {plan.name!r} takes {len(plan.inputs)} inputs and returns"
                f" {len(plan.outputs)}, the run has {len(event.inputs)} and {len(event.outputs)}"
            )
        for slice_id in plan.slices:
            failure = self._usable(event.client, slice_id)
            if failure is not None and failure.kind == "refused":
                return failure
        for p, number in enumerate(event.inputs):
            if number is None:
                continue
            buffer = self.conductor.store.buffers.get(number)
            if buffer is None or buffer.owner != event.client:
                return refusal(f"buffer {number} is unknown or belongs to another client")
            if not index.readers[p] or buffer.failure is not None:
                continue
            value = plan.values[plan.inputs[p]]
            if (buffer.slice, buffer.nbytes) != (value.slice, value.nbytes):
                return refusal(
                    f"input {p} of {plan.name!r} is on slice {value.slice} with {value.nbytes:,}"
                    f" bytes per device, buffer {number} is on slice {buffer.slice} with"
                    f" {buffer.nbytes:,}"
                )
            if buffer.donor or (p in index.donors and event.inputs.count(number) > 1):
                return refusal(
                    f"buffer {number} ({buffer.name or 'unnamed'}) was donated",
                    "use the result of the call that it was donated to",
                )
        return None

    def _spoiled(self, index: PlanIndex, inputs: tuple[BufferRecord | None, ...]) -> Failure | None:
        """Why a legal run cannot have results: lost slices, failed inputs."""
        for slice_id in index.plan.slices:
            failure = self.resources.slices[slice_id].failure
            if failure is not None:
                return failure
        return next((b.failure for b in inputs if b is not None and b.failure is not None), None)

    def _run_cancelled(self, event: RunCancelled) -> None:
        run = self.conductor.runs.get(event.run)
        if run is None:
            return
        if run.client != event.client:
            self._refuse(event, f"run {event.run}", "it belongs to another client")
            return
        name = run.index.plan.name
        failure = Failure("cancelled", f"the run of {name!r} was cancelled", program=name)
        self.conductor.cancel(run, failure)

    def _buffers_dropped(self, event: BuffersDropped) -> None:
        for number in event.buffers:
            buffer = self.conductor.store.buffers.get(number)
            if buffer is None or buffer.owner != event.client or not buffer.held:
                why = "it is unknown, dropped already, or belongs to another client"
                self._refuse(event, f"buffer {number}", why)
            else:
                self.conductor.drop(buffer)

    def _refuse(self, event: Any, subject: str, why: str | Failure) -> None:
        failure = Failure("refused", f"{subject}: {why}") if isinstance(why, str) else why
        self.conductor.out.append(Refused(event.cause, event.client, subject, failure))
