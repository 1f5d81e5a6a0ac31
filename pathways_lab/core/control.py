"""The control plane's core: events in, commands out.

Problem: what must be one for all clients, the order on each island and the
memory of its devices, is decided in one place; and that place must be easy to
test, replay and simulate.  So it is a plain object without clock, randomness
or I/O: :meth:`Control.handle` takes an event with its time and returns what is
to be done.

Rule for maintainers: composition only.  This module looks up who asks for
what, has it checked by :mod:`pathways_lab.core.checks`, and passes it on:
devices to the resource manager, runs to grants, reports to outcomes.  A
request of a client can never raise: it is met, or answered with Refused.

Paper: section 4 (system architecture).
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable
from typing import Any

from pathways_lab.core import messages as m
from pathways_lab.core.admin import Decisions
from pathways_lab.core.checks import (
    ClientRecord,
    check_functions,
    check_numbers,
    check_program,
    check_run,
    spoiled,
    usable,
    waits_for_devices,
    why_not_donated,
)
from pathways_lab.core.diagnosis.overdue import Overdue, overdue
from pathways_lab.core.errors import Failure
from pathways_lab.core.memory.accounts import Account
from pathways_lab.core.memory.holdings import MOST, Holdings, holdings
from pathways_lab.core.memory.quotas import Quota
from pathways_lab.core.memory.store import BufferRecord
from pathways_lab.core.memory.uploads import Uploads
from pathways_lab.core.messages import elastic as em
from pathways_lab.core.program.code_gc import Forgetting
from pathways_lab.core.program.plans import index_plan
from pathways_lab.core.program.program import SliceId, slice_name
from pathways_lab.core.scheduling.cancelling import Cancelling
from pathways_lab.core.scheduling.grants import Grants
from pathways_lab.core.scheduling.order import IslandOrder
from pathways_lab.core.scheduling.outcomes import Outcomes
from pathways_lab.core.scheduling.rules import Rules
from pathways_lab.core.slices.keeping import Keeping
from pathways_lab.core.slices.migration import Elastic
from pathways_lab.core.slices.sharing import Sharing
from pathways_lab.core.slices.slice_queue import Bookings
from pathways_lab.core.slices.slices import AGAIN, SliceRecord
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.core.state import State

NOWHERE: SliceId = -1
"""The slice of buffers that never were anywhere."""


class Control:
    """Everything that one control plane knows.  rules: see :class:`Rules`.

    known: clients that are connected, and those that have left and keep something.
    """

    def __init__(self, rules: Rules | None = None) -> None:
        self.state = State(rules or Rules())
        self.outcomes = Outcomes(self.state)
        self.uploads = Uploads(self.state, self.outcomes)
        self.grants = Grants(self.state, self.outcomes, self.uploads)
        self.cancelling = Cancelling(self.state, self.outcomes)
        self.sharing = Sharing(self.state, self.uploads)
        self.bookings = Bookings(self.state, self._slice_bound)
        self.clients: dict[str, ClientRecord] = {}
        self.keeping = Keeping(self.state, self.sharing, self.clients, self._release)
        self.decisions = Decisions(
            self.state, self.clients, self.bookings, self.outcomes, self.uploads
        )
        self.known = ChainMap(self.clients, self.keeping.seats)
        self.elastic = Elastic(self.state, self.known)
        self.forgetting = Forgetting(self.state, self.known)
        self._draining: set[SliceId] = set()
        self._parts: tuple[Callable[[], bool], ...] = (
            self.elastic.work,
            self._drain_slices,
            self._refuse_condemned,
            self.bookings.work,
            self.forgetting.work,
            self.keeping.work,
        )
        self._handlers: dict[type, Callable[[Any], None]] = {
            m.HostJoined: self._host_joined,
            m.HostLost: self._host_lost,
            em.HostDown: self._host_down,
            em.HostForgotten: self._host_forgotten,
            m.SlicesLost: self._slices_lost,
            m.ClientJoined: self._client_joined,
            m.ClientLeft: self._client_left,
            m.SliceRequested: self._slice_requested,
            m.SliceReleased: self._slice_released,
            m.FunctionAnnounced: self._function_announced,
            m.ProgramRegistered: self._program_registered,
            m.ProgramsDropped: self.forgetting.drop,
            m.BufferDeclared: self._buffer_declared,
            m.UploadLost: self._upload_lost,
            m.PatienceEnded: lambda event: None,  # what is late is looked for at every event
            m.RunSubmitted: self._run_submitted,
            m.CancelRequested: self.cancelling.requested,
            m.BuffersDropped: self._buffers_dropped,
            m.HostReport: self._host_report,
            m.PolicyChosen: self.decisions.policy_chosen,
            m.PolicyAnswered: self.decisions.policy_answered,
            m.PolicyLate: self.decisions.policy_late,
            m.PolicyFailed: self.decisions.policy_failed,
            m.QuotaChosen: self.decisions.quota_chosen,
            m.WindowChosen: self.decisions.window_chosen,
            m.LeaseRequested: self.decisions.lease_requested,
            m.LeaseReturned: self.decisions.lease_returned,
            m.GivenUp: self._given_up,
            m.HandlePublished: self.keeping.publish,
            m.HandleUnpublished: self.keeping.unpublish,
            m.HandleTaken: self.keeping.take,
            em.RebindRequested: self.elastic.rebind,
            em.SuspendRequested: self.elastic.suspend,
            em.ResumeRequested: self.elastic.resume,
            em.HostsLeaving: self.elastic.leave,
        }

    def handle(self, event: m.Event) -> list[m.Command]:
        """The commands that answer *event*, in this order."""
        state = self.state
        state.out = []
        state.cause = event.cause
        state.time = state.accounts.time = event.time
        if self.uploads.since:
            self.uploads.abandon()
        if state.resources.down and state.resources.expect_no_more(event.time):
            self.bookings.moved = True
        client = getattr(event, "client", None)
        if client is None or client in self.clients or isinstance(event, m.ClientJoined):
            self._handlers[type(event)](event)
            self.settle()
            self.decisions.tell_policy()
        else:
            failure = Failure("refused", f"client {client!r} is not connected", "connect first")
            state.refuse(event, f"client {client}", failure)
        return state.out

    def settle(self) -> None:
        """Let whatever has work do it, until nothing has.

        Runs go first, and again after each part that did something; of the other parts the first
        in their order.
        """
        self.grants.work()
        while any(work() for work in self._parts):
            self.grants.work()

    @property
    def due(self) -> float:
        """When it wants to hear the time (PatienceEnded); infinity: never."""
        return min(self.uploads.due, self.grants.due, self.state.resources.due)

    def overdue(self, seconds: float, now: float) -> tuple[Overdue, ...]:
        """Gangs granted so long before *now* that have not ended, the first ones first."""
        return overdue(self.state, seconds, now)

    def accounts(self, now: float) -> dict[str, tuple[Account, Quota]]:
        """The use of every client up to *now*, and its quota."""
        state = self.state
        for client in self.clients:
            state.accounts.of(client)
        return {c: (a, state.quotas.of(c)) for c, a in state.accounts.statement(now).items()}

    def why_not_donated(self, client: str, number: int) -> tuple[str, str] | None:
        """Message and remedy where others keep what a client calls so, too."""
        buffer = self.state.store.find(number, client)
        return None if buffer is None else why_not_donated(buffer)

    def count_published(self, name: str) -> int:
        """How many buffers are published together under a name; 0 if none are."""
        return self.sharing.count(name)

    def holdings(self, client: str, most: int = MOST) -> Holdings:
        """The values on devices, as far as *client* may read of them; see :func:`holdings`."""
        return holdings(self.state, client, self.clients[client].owner, most)

    @property
    def slices(self) -> dict[SliceId, SliceRecord]:
        """All slices that exist, lost ones included."""
        return self.state.resources.slices

    # --- hosts -----------------------------------------------------------------------

    def _host_joined(self, event: m.HostJoined) -> None:
        state = self.state
        self.bookings.moved = True
        if event.host in state.resources.hosts:
            self._lose_host(event.host, "its device process was replaced")
        state.resources.join(event)
        island = state.order.islands.setdefault(event.island, IslandOrder())
        island.last.pop(event.host, None)

    def _host_lost(self, event: m.HostLost) -> None:
        if event.host in self.state.resources.hosts:
            self._lose_host(event.host, event.reason)

    def _refuse_condemned(self) -> bool:
        """Fail the functions that no host will compile, as if their hosts had said so."""
        functions = self.state.functions
        refused, functions.refused = functions.refused, []
        for key in refused:
            failure = functions.condemned[key[0]]
            self.grants.compiled(key, failure.host, 0, failure)
        return bool(refused)

    def _host_down(self, event: em.HostDown) -> None:
        if event.compiling:
            gangs = any(event.host in gang.hosts for gang in self.overdue(0.0, event.time))
            surely = len(event.compiling) == 1 and not gangs
            blame = self.state.functions.blame
            blame(event.compiling, event.host, event.how, surely=surely)
        self.state.resources.fall(event)
        self.bookings.moved = True

    def _host_forgotten(self, event: em.HostForgotten) -> None:
        self.state.resources.forget_down(event.host)
        self.bookings.moved = True

    def _lose_host(self, host: str, reason: str) -> None:
        """Slices, runs and buffers of a dead host fail; everything else goes on."""
        state = self.state
        # Reasons often begin with the host's name.
        why = reason.replace(f"{host} ", "it ", 1)
        remedy = state.resources.remedy(host)
        failure = Failure("lost", f"host {host} was lost: {why}", remedy, host=host)
        self.uploads.lose_host(host)
        state.order.end_epoch(state.resources.hosts[host].info.island)
        self._lose_slices(state.resources.lose(host, failure), failure)

    def _slices_lost(self, event: m.SlicesLost) -> None:
        failure = Failure("lost", f"the slice was lost: {event.reason}", AGAIN)
        known = self.state.resources.slices
        slices = [s for s in event.slices if s in known and event.host in ("", *known[s].hosts)]
        self._lose_slices(self.state.resources.lose_slices(slices, failure), failure)

    def _lose_slices(self, lost: list[SliceRecord], failure: Failure) -> None:
        """Whatever is on lost slices fails; everything else goes on."""
        state = self.state
        self.bookings.moved = True
        gone = frozenset(record.binding.slice for record in lost)
        state.divide()
        for run in [r for r in state.runs.values() if gone.intersection(r.index.plan.slices)]:
            self.outcomes.lose(run, gone, failure)
        for slice_id in sorted(gone):
            for number in sorted(state.store.by_slice.get(slice_id, ())):
                buffer = state.store.buffers[number]
                if buffer.maker:
                    self.outcomes.fail_buffer(buffer, failure)
                else:
                    self.uploads.lose(buffer, failure)
        self._draining |= gone
        self.keeping.lost()

    def _host_report(self, event: m.HostReport) -> None:
        state, host = self.state, event.host
        if host not in state.resources.hosts:
            return
        for function, slice_id, nbytes in event.crossing:
            state.functions.crosses((function, slice_id), host, nbytes)
        for function, slice_id, temporary, failure in event.compiled:
            self.grants.compiled((function, slice_id), host, temporary, failure)
        for number, step, why in event.failed:
            run = state.runs.get(number)
            if run is not None:
                self.outcomes.failed(run, step, host, why)
        for number, first, times in event.ended:
            run = state.runs.get(number)
            if run is not None:
                self.outcomes.ended(run, first, host, times)
        for number, value, case in event.decided:
            run = state.runs.get(number)
            if run is not None:
                self.outcomes.decided(run, value, host, case)
        for number in self.elastic.reported(event):
            self.uploads.came(number, host)

    # --- clients ---------------------------------------------------------------------

    def _client_joined(self, event: m.ClientJoined) -> None:
        if event.client in self.clients:
            self.state.refuse(event, f"client {event.client}", "a client of this name is connected")
            return
        self.clients[event.client] = self.keeping.back(event)
        self.uploads.join(event.number)

    def _client_left(self, event: m.ClientLeft) -> None:
        """Everything of a client is freed but what it keeps; what was granted still ends."""
        state = self.state
        going = self.keeping.runs(event.client)
        client = self.clients.pop(event.client)
        self.forgetting.leave(event.client)
        failure = Failure("cancelled", f"client {event.client} left: {event.reason}")
        for number in sorted(state.clients.pop(event.client) - going, reverse=True):
            run = state.runs.get(number)
            if run is not None:
                self.outcomes.cut(run, failure)
        kept = self.keeping.leave(event, client, going)
        for number in sorted(client.references):
            self.uploads.dropped(state.store.end_reference(number))
        for buffer in state.store.owned(event.client):
            if not buffer.maker and buffer.state == "promised":
                self.uploads.lose(buffer, failure)
            self._drop(buffer)
        self.uploads.leave(client.number)
        for slice_id in client.slices - kept:
            self._release(slice_id)
        self.bookings.withdraw(event.client)
        for island in tuple(state.resources.leases):
            if state.resources.end_lease(island, event.client):
                state.out.append(m.LeaseEnded(event.cause, event.client, island))
                self.bookings.moved = True

    # --- what clients decide for all ---------------------------------------------------

    def _given_up(self, event: m.GivenUp) -> None:
        """Gangs only where order is off; elsewhere a cycle of waits is impossible."""
        state = self.state
        for number, step in event.gangs:
            run = state.runs.get(number)
            key = run.index.step_function[step] if run is not None else None
            if run is None or key is None:
                continue
            lease = state.resources.unordered(key[1])
            if lease is not None and lease.client == run.client:
                self.outcomes.poison(run, step, event.failure)
        for number in event.runs:
            run = state.runs.get(number)
            if run is not None:
                self.outcomes.give_up(run, event.failure)

    # --- slices, functions, programs -------------------------------------------------

    def _slice_requested(self, event: m.SliceRequested) -> None:
        self.bookings.ask(event)

    def _slice_bound(self, binding: SliceBinding) -> None:
        self.clients[binding.client].slices.add(binding.slice)
        window = self.slices[binding.slice].request.window
        if window is not None:
            self.state.pace.limits[binding.slice] = round(window * 1e6)
        self.state.divide()

    def _slice_released(self, event: m.SliceReleased) -> None:
        if self.bookings.withdraw(event.client, event.slice):
            return
        if event.slice not in self.clients[event.client].slices:
            self.state.refuse(event, f"slice {event.slice}", f"{event.client} has no such slice")
            return
        self.clients[event.client].slices.discard(event.slice)
        self._release(event.slice)

    def _release(self, slice_id: SliceId) -> None:
        self.bookings.moved = True
        resources = self.state.resources
        if resources.slices[slice_id].state == "suspended":
            # Nobody would ever bring its values and runs back to devices.
            why = Failure(
                "lost", f"slice {slice_name(slice_id)} was released while it was suspended"
            )
            self._lose_slices(resources.lose_slices([slice_id], why), why)
        resources.release(slice_id)
        self.cancelling.released(slice_id, resources.slices[slice_id].binding.client)
        self._draining.add(slice_id)

    def _drain_slices(self) -> bool:
        """Released and lost slices end with their last run and buffer; whether one did."""
        state, ended = self.state, False
        for slice_id in sorted(self._draining):
            record = state.resources.slices[slice_id]
            if record.state == "bound":  # again
                self._draining.discard(slice_id)
                continue
            named = bool(state.store.by_slice.get(slice_id))
            if state.users.get(slice_id) or (named and record.state != "lost"):
                continue
            if record.state == "lost" and not record.told:
                record.told = ended = True
                hosts = state.alive(record.hosts)
                state.out.append(em.SliceWithdrawn(state.cause, hosts, slice_id))
            owner = self.clients.get(record.binding.client)
            if not named and (owner is None or slice_id not in owner.slices):
                self._draining.discard(slice_id)
                ended = True
                hosts = () if record.told else state.alive(record.hosts)
                state.out.append(m.SliceFreed(state.cause, hosts, slice_id))
                state.resources.free(slice_id)
                state.forget_slice(slice_id)
                released = Failure(
                    "refused", f"slice {slice_name(slice_id)} was released", "ask for a new slice"
                )
                for client in self.known.values():
                    for key in [k for k, i in client.plans.items() if slice_id in i.plan.slices]:
                        client.refuse(key, record.failure or released)
        state.divide()
        return ended

    def _function_announced(self, event: m.FunctionAnnounced) -> None:
        failure = usable(self.state, event.client, self.clients[event.client], event.slice)
        if failure is not None and not waits_for_devices(failure):
            self.state.refuse(event, f"function {event.function}", failure)
            return
        key = event.function, event.slice
        self.forgetting.announced(key)
        hosts = self.state.resources.slices[event.slice].binding.hosts if failure is None else ()
        if self.state.functions.announce(key, hosts) and hosts:
            self.state.out.append(m.Prepare(event.cause, hosts, event.function, event.slice))

    def _program_registered(self, event: m.ProgramRegistered) -> None:
        plan, client, state = event.plan, self.clients[event.client], self.state
        if plan.key in client.plans:
            self.forgetting.keep(event.client, plan.key)
            return
        failure = check_program(state, event.client, client, plan)
        if failure is None:
            bindings = {s: state.resources.slices[s].binding for s in plan.slices}
            index = index_plan(plan, event.client, bindings)
            failure = check_functions(index, state.functions.records)
            if failure is None:
                client.register(plan.key, index)
                return
        client.refuse(plan.key, failure)
        self.state.refuse(event, f"program {plan.key}", failure)

    # --- buffers and runs ------------------------------------------------------------

    def _buffer_declared(self, event: m.BufferDeclared) -> None:
        state, subject = self.state, f"buffer {event.buffer}"
        if state.store.in_use(event.buffer) or event.buffer < 1 or event.nbytes < 0:
            self.state.refuse(event, subject, "its number is in use, or its size is negative")
            return
        failure = usable(state, event.client, self.clients[event.client], event.slice)
        record = state.resources.slices.get(event.slice)
        if failure is not None or record is None:
            self.uploads.reject(event.buffer, record.hosts if record else ())
            self.state.refuse(event, subject, failure or "its slice is unknown")
            return
        name, where = event.name or "upload", event.slice
        buffer = state.store.create(
            event.buffer, event.client, where, event.nbytes, name, line=event.line
        )
        self.uploads.declare(buffer, record.binding.hosts, event.ahead)

    def _upload_lost(self, event: m.UploadLost) -> None:
        buffer = self.state.store.find(event.buffer, event.client)
        if buffer is None:
            self.uploads.orphans.pop(event.buffer, None)
        elif not buffer.maker and buffer.owner == event.client:
            self.uploads.give_up(buffer, event.failure)

    def _run_submitted(self, event: m.RunSubmitted) -> None:
        """Every submitted run ends once and resolves its outputs, refused ones too.

        Whether it has room is asked when the handles that came with it are gone.
        """
        self._submitted(event)
        self._let_go(event, event.dropped)

    def _submitted(self, event: m.RunSubmitted) -> None:
        state, client = self.state, self.clients[event.client]
        subject = f"run {event.run}"
        wrong = check_numbers(state, event)
        if wrong:
            self.state.refuse(event, subject, wrong)
            return
        dropped = (event.client, event.plan) in self.forgetting.plans
        index = None if dropped else client.plans.get(event.plan)
        failure = check_run(state, event, client, index)
        if failure is not None or index is None:
            self.state.refuse(event, subject, failure or "its program is unknown")
            self._still_born(event, failure or Failure("refused", "its program is unknown"))
            return
        find = state.store.find
        inputs = tuple([None if b is None else find(b, event.client) for b in event.inputs])
        failure = spoiled(state, index, inputs)
        if failure is not None:
            self._still_born(event, failure)
            return
        outputs = []
        made = zip(event.outputs, index.plan.outputs, index.lines, strict=True)
        for number, value_id, line in made:
            value = index.plan.values[value_id]
            assert value.slice is not None  # check_plan saw to it
            outputs.append(
                state.store.create(
                    number,
                    event.client,
                    value.slice,
                    value.nbytes,
                    value.name,
                    event.run,
                    index.plan.name,
                    line,
                )
            )
        self.grants.submit(event, index, inputs, tuple(outputs))

    def _still_born(self, event: m.RunSubmitted, failure: Failure) -> None:
        """The run ends at once, and its outputs carry the reason to later runs."""
        state = self.state
        for number in event.outputs:
            buffer = state.store.create(number, event.client, NOWHERE, 0, "", event.run)
            buffer.made = True
            state.store.fail(buffer, failure)
        if event.outputs:
            state.out.append(m.Resolved(event.cause, event.client, event.outputs, failure))
        state.out.append(m.RunEnded(event.cause, event.client, event.run, "failed", failure))

    def _buffers_dropped(self, event: m.BuffersDropped) -> None:
        self._let_go(event, event.buffers)

    def _let_go(self, event: m.RunSubmitted | m.BuffersDropped, buffers: tuple[int, ...]) -> None:
        for number in buffers:
            buffer = self.state.store.find(number, event.client)
            references = self.clients[event.client].references
            if number in references:
                references.discard(number)
                self.uploads.dropped(self.state.store.end_reference(number))
            elif buffer is None or not buffer.kept:
                why = "it is unknown, dropped already, or belongs to another client"
                self.state.refuse(event, f"buffer {number}", why)
            else:
                self._drop(buffer)

    def _drop(self, buffer: BufferRecord) -> None:
        self.state.store.drop(buffer)
        self.uploads.dropped(buffer)
