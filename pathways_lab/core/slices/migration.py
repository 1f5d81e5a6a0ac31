"""Slices that outlive their devices: bound again, suspended, resumed, taken away.

Problem: devices are lost, come back, leave on purpose, or are wanted by
somebody else for a while; clients go on with the same virtual devices, the
same programs and the same values, and need not help.

How: a slice keeps its number.  A *lost* one gets new devices when its client
asks; its values are gone.  A *suspended* one gives its devices away: its admitted
runs end, its values go into the memory of its hosts, its later runs
wait; resumed, on the same devices or on others, everything is as before.
Hosts that *leave* take nothing new, end the admitted runs, and go.

When a slice has other devices, every program that uses it is worked out again
for them, once, and its functions are prepared on their hosts.  Plans name
slices and never devices, so clients neither lower nor export anything again.

Rule for maintainers: nothing here decides order or memory.  A waiting run is
*withheld* from admission (:attr:`State.withheld`); every wait here is for runs that
are admitted already, so it ends.

Paper: section 4.1 (resources are added and removed), section 4.2 (suspend,
resume, migration of a client's slices).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pathways_lab.core import messages as m
from pathways_lab.core.checks import ClientRecord, not_an_owner
from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import elastic as em
from pathways_lab.core.program.plans import index_plan
from pathways_lab.core.program.program import SliceId, slice_name
from pathways_lab.core.slices.slice_queue import too_many_now
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.core.state import State


@dataclass(slots=True)
class _Wish:
    """A suspension or a resumption that is under way.  open: slices that are not there yet."""

    client: str
    request: int
    open: set[SliceId]
    lines: tuple[str, ...]


@dataclass(slots=True)
class _Move:
    """Values on their way to a slice's new hosts.

    silent: hosts that it leaves and that have not sent everything on; what they
        say of arrivals is still about their old devices.
    missing: ``(buffer, host)`` that have not arrived.
    """

    silent: set[str]
    missing: set[tuple[int, str]]


@dataclass(slots=True)
class _Departure:
    """Hosts that leave.  lines: what goes with them, once they have been told to go."""

    event: em.HostsLeaving
    lines: tuple[str, ...] | None = None


@dataclass(slots=True)
class Elastic:
    """See the module's docstring."""

    state: State
    clients: Mapping[str, ClientRecord]
    _rebinds: dict[SliceId, em.RebindRequested] = field(default_factory=dict)
    _tried: dict[SliceId, int] = field(default_factory=dict)
    """Slices for which there were no devices, of those: the version of the machine then."""
    _wishes: list[_Wish] = field(default_factory=list)
    _parking: dict[SliceId, set[str] | None] = field(default_factory=dict)
    """Slices that are being suspended: hosts that have not parked them (None: not asked)."""
    _moves: dict[SliceId, _Move] = field(default_factory=dict)
    _departures: list[_Departure] = field(default_factory=list)

    # --- what is wished ----------------------------------------------------------------

    def rebind(self, event: em.RebindRequested) -> None:
        """Other devices for a lost slice, as soon as nothing hangs on the old ones."""
        record = self.state.resources.slices.get(event.slice)
        why, remedy = f"{event.client} has no such slice", ""
        if record is not None and event.slice in self.clients[event.client].slices:
            if record.state == "lost":
                self._rebinds[event.slice] = event
                return
            why = f"it is {record.state}, and only lost slices are bound again"
            remedy = "nothing needs to be done"
        failure = Failure("refused", f"slice {slice_name(event.slice)}: {why}", remedy)
        self.state.refuse(event, f"slice {event.slice}", failure)

    def suspend(self, event: em.SuspendRequested) -> None:
        """All slices of a client leave their devices, as soon as what is admitted has ended."""
        state = self.state
        if self._not_theirs(event):
            return
        owner = self.clients.get(event.whose)
        if owner is None:
            known = ", ".join(self.clients)
            self._deny(event, f"there is no client {event.whose!r}; there is {known}")
            return
        slices = {s for s in owner.slices if state.resources.slices[s].state == "bound"}
        slices -= self._moves.keys()
        if not slices:
            self._deny(event, f"{event.whose} has no slice that holds devices")
            return
        lines = tuple(self._described(s) for s in sorted(slices))
        self._wishes.append(_Wish(event.client, event.request, set(slices), lines))
        for slice_id in slices:
            self._parking.setdefault(slice_id, None)
        self._withhold(slices)

    def resume(self, event: em.ResumeRequested) -> None:
        """They have devices again, all of them or none."""
        state, resources = self.state, self.state.resources
        if self._not_theirs(event):
            return
        owner = self.clients.get(event.whose)
        slices = sorted(owner.slices) if owner is not None else []
        slices = [s for s in slices if resources.slices[s].state == "suspended"]
        if not slices:
            self._deny(event, f"{event.whose} has no suspended slice")
            return
        before: dict[SliceId, SliceBinding] = {}
        failure: Failure | None = None
        for slice_id in slices:
            old = resources.slices[slice_id].binding
            found = resources.bind_again(slice_id, event.island)
            if isinstance(found, Failure):
                failure = found
                break
            before[slice_id] = old
        state.divide()
        if failure is None:
            failure = self._too_full(slices)
        if failure is not None:
            for slice_id, old in before.items():
                resources.unbind_again(slice_id, old)
            state.divide()
            state.refuse(event, "slices", failure)
            return
        for slice_id, old in before.items():
            self._move(slice_id, old)
        lines = tuple(self._described(s) for s in slices)
        moving = {s for s in slices if s in self._moves}
        self._wishes.append(_Wish(event.client, event.request, moving, lines))

    def _not_theirs(self, event: em.SuspendRequested | em.ResumeRequested) -> bool:
        """Whether it is about another client's slices, and not asked by an owner of the lab."""
        if event.whose == event.client or self.clients[event.client].owner:
            return False
        self._deny(event, *not_an_owner(event.client, "suspend others"))
        return True

    def leave(self, event: em.HostsLeaving) -> None:
        """Hosts will be taken away as soon as what is admitted on them has ended."""
        resources = self.state.resources
        if event.client is not None and not self.clients[event.client].owner:
            self._deny(event, *not_an_owner(event.client, "take hosts away"))
            return
        hosts = tuple(sorted(h for h in event.hosts if h in resources.hosts))
        slices = self._on(hosts)
        if not hosts:
            self._deny(event, f"{' and '.join(event.hosts) or 'no host'} is not in the lab")
            return
        if slices and not event.anyway:
            there = "; ".join(self._described(s) for s in slices)
            self._deny(
                event,
                f"{' and '.join(hosts)} cannot be taken away: there are {there}",
                "release them, suspend and resume their client elsewhere, or insist: anyway=True",
            )
            return
        resources.leaving.update(hosts)
        self._withhold(slices)
        self._departures.append(_Departure(event))

    # --- what hosts report ---------------------------------------------------------------

    def reported(self, report: m.HostReport) -> tuple[int, ...]:
        """Take what concerns slices on the move; returns the arrivals that are news for others."""
        state, host = self.state, report.host
        for slice_id in report.moved:
            move = self._moves.get(slice_id)
            if move is not None:
                move.silent.discard(host)
        for slice_id in report.parked:
            waiting = self._parking.get(slice_id)
            if waiting is not None:
                waiting.discard(host)
        if not self._moves:
            return report.resident
        others = []
        for number in report.resident:
            buffer = state.store.buffers.get(number)
            if buffer is not None and host in self._silent(buffer.slice):
                continue
            moved = [move for move in self._moves.values() if (number, host) in move.missing]
            for move in moved:
                move.missing.discard((number, host))
            if not moved:
                others.append(number)
        return tuple(others)

    def _silent(self, slice_id: SliceId) -> set[str]:
        move = self._moves.get(slice_id)
        return set() if move is None else move.silent

    # --- what can be done now --------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(
            self._wishes
            or self._parking
            or self._moves
            or self._departures
            or self._rebinds
            or self.state.withheld
        )

    def work(self) -> bool:
        """Go on with everything that waited for what has happened; whether anything did."""
        if not self.busy:
            return False
        moved = self._forget_lost()
        for slice_id, waiting in list(self._parking.items()):
            if waiting is None and not self.state.active.get(slice_id):
                hosts = self.state.resources.slices[slice_id].hosts
                self._parking[slice_id] = set(hosts)
                self.state.out.append(em.Park(self.state.cause, hosts, slice_id))
                moved = True
            elif waiting is not None and not waiting:
                self._parked(slice_id)
                moved = True
        for slice_id, move in list(self._moves.items()):
            if not move.silent and not move.missing:
                self._moved(slice_id)
                moved = True
        for departure in list(self._departures):
            moved |= self._depart(departure)
        for wish in [w for w in self._wishes if not w.open]:
            self._wishes.remove(wish)
            self.state.out.append(
                em.Answer(self.state.cause, wish.client, wish.request, wish.lines)
            )
            moved = True
        return self._bind_drained() or moved

    # --- steps -----------------------------------------------------------------------------

    def _bind_drained(self) -> bool:
        """Lost slices of which nothing is left, and that are wanted again; whether one was bound,
        or never will be."""
        state, wanted = self.state, len(self._rebinds)
        for slice_id, event in list(self._rebinds.items()):
            record = state.resources.slices.get(slice_id)
            if record is None or record.state != "lost" or event.client not in self.clients:
                self._ended(slice_id)
            elif record.told and self._tried.get(slice_id) != state.resources.version:
                count = len(record.binding.devices)
                failure = too_many_now(state, event.client, count)[0]
                found: SliceBinding | Failure
                found = failure or state.resources.bind_again(slice_id, event.island)
                if isinstance(found, Failure):
                    if failure is None and state.resources.coming_back(event.island):
                        self._tried[slice_id] = state.resources.version
                        continue
                    self._ended(slice_id)
                    state.refuse(event, f"slice {slice_id}", found)
                    continue
                self._ended(slice_id)
                state.divide()
                state.out.append(m.SliceBound(state.cause, event.client, found))
                self._work_out_again(slice_id, found.hosts)
        return len(self._rebinds) < wanted

    def _ended(self, slice_id: SliceId) -> None:
        """Nobody waits any more for other devices for this slice."""
        del self._rebinds[slice_id]
        self._tried.pop(slice_id, None)

    def _forget_lost(self) -> bool:
        """Slices that were lost, or are no more, keep nobody waiting; whether there were any."""
        slices = self.state.resources.slices
        withheld = self.state.withheld
        gone = {s for s in (*self._parking, *self._moves, *withheld) if s not in slices}
        ended = {s for s in (*self._parking, *self._moves) if s not in gone}
        gone |= {s for s in ended if slices[s].state != "bound"}
        gone |= {s for s in withheld - gone if slices[s].state == "lost"}
        for slice_id in gone:
            self._parking.pop(slice_id, None)
            self._moves.pop(slice_id, None)
            self._release(slice_id)
        for wish in self._wishes:
            wish.open -= gone
        return bool(gone)

    def _withhold(self, slices: Iterable[SliceId]) -> None:
        """Runs that are not admitted yet wait from now on."""
        state = self.state
        state.withheld.update(slices)
        for run in state.queued.values():
            if run.open and not state.withheld.isdisjoint(run.index.plan.slices):
                state.admission.remove(run=run)
                run.open = False

    def _release(self, slice_id: SliceId) -> None:
        """They need not wait for this slice any more."""
        state = self.state
        state.withheld.discard(slice_id)
        state.woken.extend(n for n, r in state.queued.items() if slice_id in r.index.plan.slices)
        state.admission.settled = False

    def _parked(self, slice_id: SliceId) -> None:
        """All values of a slice are in its hosts' memory: its devices are free."""
        del self._parking[slice_id]
        state = self.state
        state.resources.suspend(slice_id)
        state.divide()
        state.out.append(em.SliceSuspended(state.cause, slice_id))
        for wish in self._wishes:
            wish.open.discard(slice_id)

    def _too_full(self, slices: Iterable[SliceId]) -> Failure | None:
        """Why the values of resumed slices find no room on their devices."""
        ledger = self.state.store.ledger
        for slice_id in slices:
            for cell in ledger.cells_of[slice_id]:
                limit, used = ledger.cells[cell].limit, ledger.used[cell]
                if used > limit:
                    held = ledger.held.get(slice_id, 0)
                    return Failure(
                        "memory",
                        f"slice {slice_name(slice_id)} cannot be resumed on"
                        f" {ledger.cells[cell].island}: its values take {held:,} bytes per device,"
                        f" and with what is there {used:,} of {limit:,} would be in use",
                        "suspend or end somebody else first, or resume on another island",
                    )
        return None

    def _move(self, slice_id: SliceId, old: SliceBinding) -> None:
        """A suspended slice has devices; its values go there if they are others."""
        state = self.state
        new = state.resources.slices[slice_id].binding
        if new.devices == old.devices:
            state.out.append(em.SliceMoved(state.cause, (), new))
            self._release(slice_id)
            return
        move = self._moves[slice_id] = _Move(set(old.hosts), set())
        for number in state.store.by_slice.get(slice_id, ()):
            buffer = state.store.buffers[number]
            if buffer.failure is not None or buffer.state == "donated":
                continue
            if buffer.maker and buffer.state == "promised":
                continue  # of a run that waits: it is nowhere yet
            if buffer.state == "promised":
                buffer.arriving = set(new.hosts)
            else:
                move.missing.update((number, host) for host in new.hosts)
        state.out.append(em.SliceMoved(state.cause, old.hosts, new))
        self._work_out_again(slice_id, new.hosts)

    def _moved(self, slice_id: SliceId) -> None:
        """Every value of a slice is where the slice is."""
        del self._moves[slice_id]
        record = self.state.resources.slices[slice_id]
        record.hosts = record.binding.hosts
        self._release(slice_id)
        for wish in self._wishes:
            wish.open.discard(slice_id)

    def _work_out_again(self, slice_id: SliceId, hosts: tuple[str, ...]) -> None:
        """Plans and functions depend on devices: those of all programs that use the slice."""
        state = self.state
        for client in self.clients.values():
            for key, index in client.plans.items():
                if slice_id in index.plan.slices:
                    known = state.resources.slices
                    bindings = {s: known[s].binding for s in index.plan.slices}
                    client.plans[key] = index_plan(index.plan, index.client, bindings)
        for run in state.queued.values():
            if slice_id in run.index.plan.slices and run.client in self.clients:
                run.index = self.clients[run.client].plans.get(run.index.plan.key, run.index)
        for function, record in state.functions.records.items():
            if function[1] == slice_id:
                record.pending, record.failure = set(hosts), None
                if state.functions.wanted(function):
                    state.out.append(m.Prepare(state.cause, hosts, *function))
                for run in state.queued.values():
                    if function in run.index.functions and run.id not in record.waiting:
                        record.waiting.add(run.id)
                        run.pending += 1

    def _depart(self, departure: _Departure) -> bool:
        """Hosts that leave are told to go when nothing runs on them; whether something was done.

        They hand over what somebody waits for, so their slices are lost when they are gone.
        """
        state, event = self.state, departure.event
        hosts = tuple(h for h in event.hosts if h in state.resources.hosts)
        news = departure.lines is None
        if departure.lines is None:
            slices = self._on(hosts)
            if any(state.active.get(s) for s in slices) or any(s in self._moves for s in slices):
                return False
            told = {h for d in self._departures if d.lines is not None for h in d.event.hosts}
            departure.lines = tuple(self._described(s) for s in slices)
            if more := tuple(h for h in hosts if h not in told):
                state.out.append(em.HostsLeft(state.cause, more, event.reason))
        if hosts:
            return news
        self._departures.remove(departure)
        if event.client is not None:
            state.out.append(em.Answer(state.cause, event.client, event.request, departure.lines))
        return True

    # --- words -----------------------------------------------------------------------------

    def _on(self, hosts: Iterable[str]) -> list[SliceId]:
        """Slices with anything on these hosts."""
        there = set(hosts)
        found = self.state.resources.slices.items()
        return sorted(s for s, r in found if r.state != "lost" and not there.isdisjoint(r.hosts))

    def _described(self, slice_id: SliceId) -> str:
        record = self.state.resources.slices[slice_id]
        handles = len(self.state.store.by_slice.get(slice_id, ()))
        where, count = record.binding, len(record.binding.devices)
        text = f"slice {slice_name(slice_id)} of {where.client} ({count} devices on"
        return f"{text} {' and '.join(where.islands)}, {handles} handle{'s' * (handles != 1)})"

    def _deny(
        self,
        event: em.SuspendRequested | em.ResumeRequested | em.HostsLeaving,
        why: str,
        remedy: str = "",
    ) -> None:
        if event.client is not None:
            self.state.refuse(event, "slices", Failure("refused", why, remedy))
