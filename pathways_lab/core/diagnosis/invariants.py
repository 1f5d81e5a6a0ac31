"""The invariants of the core: statements that hold after every event.

Problem: a wrong decision shows as a hang or as wrong memory long after it was
made.  :func:`check` looks at the whole state at once and names the broken invariant
while the event that caused it is still at hand.

Rule for maintainers: for tests, the search and the simulator; nothing in the
core calls it.  It may be slow, and it may look into every machine.

Paper: section 4.4 (one order), section 4.6 (memory).
"""

from __future__ import annotations

import math
from collections import Counter

from pathways_lab.core.control import Control
from pathways_lab.core.memory.ledger import Ledger
from pathways_lab.core.scheduling.admission import describe, lacks
from pathways_lab.core.scheduling.runs import RunRecord
from pathways_lab.core.state import State


def check(control: Control) -> None:
    """Raise AssertionError when the state of the core contradicts its rules."""
    state = control.state
    _memory(state.store.ledger, state)
    _waiting(control)
    _pace(state)
    for run in state.runs.values():
        _run(state, run)
    _references(state)
    _registered(control)
    _seats(control)
    for slice_id, count in state.users.items():
        using = sum(slice_id in r.index.plan.slices for r in state.runs.values())
        assert using == count, f"slice {slice_id} counts {count} runs and has {using}"


def _memory(ledger: Ledger, state: State) -> None:
    """Rule 5: the ledger adds up and is never over its limit."""
    recounted = ledger.recount()
    assert ledger.used == recounted, f"ledger says {ledger.used}, its entries {recounted}"
    for cell, used in zip(ledger.cells, ledger.used, strict=True):
        assert 0 <= used <= cell.limit, f"{used} of {cell.limit} bytes used on {set(cell.slices)}"
    held: dict[int, int] = {}
    for buffer in state.store.buffers.values():
        if buffer.counted and buffer.slice in ledger.cells_of:
            held[buffer.slice] = held.get(buffer.slice, 0) + buffer.nbytes
    for slice_id, nbytes in ledger.held.items():
        assert held.get(slice_id, 0) == nbytes, f"slice {slice_id} holds {held}, not {nbytes}"
    counted = {c: row.nbytes for c, row in ledger.accounts.rows.items() if row.nbytes}
    by_client = {c: nbytes for c, nbytes in ledger.by_client().items() if nbytes}
    assert counted == by_client, f"accounts count {counted}, the ledger {by_client}"
    admitted = {r.id for r in state.runs.values() if r.state in ("admitted", "cut")}
    assert admitted == ledger.reserved.keys(), "reservations are not those of admitted runs"


def _waiting(control: Control) -> None:
    """Rules 7 and 8: who waits for memory does not fit, or stands back; and has hope."""
    state, admission, ledger = control.state, control.state.admission, control.state.store.ledger
    entered = {e.run.id for entries in admission.kinds.values() for e in entries if e.run}
    waiting = {run.id for run in state.queued.values() if run.open}
    assert entered == waiting, f"runs {waiting} say that they wait for memory, and {entered} do"
    heads, bound = admission.heads(), admission.overtaking
    passed = [e for e in heads if bound is not None and e.overtaken >= bound]
    first = {cell for entry in passed for cell, _ in entry.need}
    asked = admission.changed or ledger.released  # a policy, and its answer is not there yet
    for entry in heads if not asked else ():
        stands_back = any(cell in first for cell, _ in entry.need)
        assert stands_back or lacks(entry, ledger, state.quotas), f"{describe(entry)} fits"
    patience = state.rules.patience
    if patience is not None:
        stuck = {describe(entry): entry.hopeless + patience for entry in control.grants.stuck()}
        late = [name for name, end in stuck.items() if end <= state.time]
        assert not late, f"nothing will ever make room for {', '.join(late)}"
        unseen = [name for name, end in stuck.items() if not control.due <= end < math.inf]
        assert not unseen, f"nobody will give up {', '.join(unseen)}"


def _pace(state: State) -> None:
    """The sums of work granted ahead are right."""
    ahead: dict[int, tuple[int, int]] = {}
    for run in state.runs.values():
        for step, cost in run.charged.items():
            key = run.index.step_function[step]
            if key is not None:
                before = ahead.get(key[1], (0, 0))
                ahead[key[1]] = before[0] + cost, before[1] + 1
    pace, bound = state.pace, state.resources.cells_of
    ahead = {slice_id: counted for slice_id, counted in ahead.items() if slice_id in bound}
    counted = {slice_id: both for slice_id, both in pace.by_slice.items() if any(both)}
    assert counted == {s: both for s, both in ahead.items() if any(both)}, f"{counted} is ahead"
    cells = [[0, 0] for _ in pace.ahead]
    for slice_id, both in ahead.items():
        for cell in bound[slice_id]:
            cells[cell] = [before + more for before, more in zip(cells[cell], both, strict=True)]
    by_cell = [list(both) for both in zip(pace.ahead, pace.gangs, strict=True)]
    assert by_cell == cells, f"{by_cell} is ahead on cells, by slices {cells}"


def _run(state: State, run: RunRecord) -> None:
    """Rules 2 and 6, and the counters of one run."""
    rules, index = state.rules, run.index
    granted = {s for s, state in enumerate(run.gangs) if state not in ("waiting", "cancelled")}
    assert granted == set(range(run.position)), f"run {run.id} was granted out of its order"
    settled = {s for s in granted if run.gangs[s] != "granted" and s not in run.waiting}
    assert run.unsettled == len(granted) - len(settled), f"run {run.id} miscounts"
    if rules.predecessors:
        for step in granted:
            if run.gangs[step] == "skipped":
                continue  # it needs nothing
            for p in index.reads[step]:
                buffer = run.inputs[p]
                assert buffer is None or buffer.granted or buffer.state != "promised", (
                    f"step {step} of run {run.id} was granted before buffer {buffer.id} was"
                )
    if run.state != "queued" and rules.producers:
        for p, buffer in enumerate(run.inputs):
            assert buffer is None or not index.readers[p] or buffer.admitted or buffer.failure, (
                f"run {run.id} was admitted before the maker of buffer {buffer.id}"
            )
    assert (run.state == "queued") == (run.id in state.queued)
    if run.cut is None and run.state != "granted":
        slices = {s: state.resources.slices[s].state for s in index.plan.slices}
        assert "released" not in slices.values(), f"run {run.id} waits for a released slice"
    if not (run.position or run.cut or index.kept) and run.outputs:
        unread = sum(b.failure is not None or not b.readable for b in run.outputs)
        assert run.unread == unread, f"run {run.id} counts {run.unread} of {unread} unread results"
        assert unread < len(run.outputs), f"run {run.id} waits, and nobody can read its results"


def _references(state: State) -> None:
    """Claims and readings of buffers are those of runs that exist."""
    for buffer in state.store.buffers.values():
        for number in buffer.claims:
            assert number in state.runs, f"buffer {buffer.id} is claimed by run {number}"
        assert not buffer.donor or buffer.state == "donated" or buffer.reads >= 0
        assert buffer.reads >= 0, f"buffer {buffer.id} was read too often"


def _registered(control: Control) -> None:
    """Programs of runs, and functions of programs, are known."""
    known = control.state.functions.records
    for name, client in control.clients.items():
        for key, index in client.plans.items():
            missing = [function for function in index.functions if function not in known]
            assert not missing, f"program {key} calls {missing}, which nobody knows"
        for number in control.state.clients[name]:
            key = control.state.runs[number].index.plan.key
            assert key in client.plans, f"run {number} is of {key}, which nobody knows"


def _seats(control: Control) -> None:
    """Slices in use have a client, or are kept for one that has left; so are names."""
    sharing, seats = control.sharing, control.keeping.seats
    held = {s for c in control.clients.values() for s in c.slices}
    held |= {s for seat in seats.values() for s in seat.slices}
    for slice_id, record in control.slices.items():
        assert slice_id in held or record.state in ("released", "lost"), f"{slice_id} is nobody's"
    for name, (client, buffers, _) in sharing.names.items():
        assert client in control.clients or name in sharing.kept, f"{name!r} of {client} is left"
        if client not in control.clients:
            states = {buffer.state for buffer in buffers}
            fine = {"resident", "promised", "failed"} if name in sharing.ahead else {"resident"}
            assert states <= fine, f"{name!r} is kept, and its values are {states}"
    given: Counter[tuple[int, str]] = Counter()
    for to, gifts in sharing.gifts.items():
        for (giver, name), (client, buffers, _) in gifts.items():
            assert giver == client, f"{name!r} of {client} is noted as of {giver}"
            assert {client, to} <= control.clients.keys(), f"{name!r}: one of its clients has left"
            given.update((buffer.id, to) for buffer in buffers)
    noted = Counter((b.id, to) for b in control.state.store.buffers.values() for to in b.gifts)
    assert given == noted, f"buffers are kept for {noted - given}, and given to {given - noted}"
    runs, going = control.state.runs, control.keeping.going.keys()
    assert control.state.clients.keys() == control.clients.keys() | going
    assert going <= seats.keys(), f"runs of {going - seats.keys()} go on, which has no seat"
    for client, seat in seats.items():
        assert client not in control.clients, f"{client} is there, and has a seat"
        names = sharing.names_of(client)
        assert names or client in going, f"nothing is kept for {client}"
        used = {buffer.slice for name in names for buffer in sharing.buffers(name)}
        used.update(*[runs[r].index.plan.slices for r in control.state.clients.get(client, ())])
        idle = seat.slices - used
        assert not idle, f"slices {idle} are kept for {client}, and nothing is or runs there"
    for run in runs.values():
        ends = run.cut is not None or run.state == "granted"
        assert ends or run.client in control.state.clients, f"run {run.id} has no client"
