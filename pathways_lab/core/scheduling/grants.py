"""Grants: from a submitted run to the places of all its gangs.

Problem: a run begins when its functions are compiled, the runs that make its
inputs have begun, and its whole memory is there; a window of it is granted
when the gangs that it depends on have their places and it is its turn.  This
order of questions is what makes every wait in the cluster point to an earlier
grant.

Rule for maintainers: rules 1 to 3 and 5 to 9 of the design meet here; each
method names the rule that it keeps.  Nothing here waits or fails silently: a
run that cannot go on is watched for by a buffer, a function, the admission or
its lane.

Paper: section 4.4 (gang scheduling), section 4.5 (parallel asynchronous
dispatch), section 4.6 (back-pressure).
"""

from __future__ import annotations

import math
from dataclasses import replace

from pathways_lab.core.errors import Failure
from pathways_lab.core.memory.liveness import Profile, profile, thrifty_profile
from pathways_lab.core.memory.store import BufferRecord
from pathways_lab.core.memory.uploads import Uploads
from pathways_lab.core.messages import Grant, RunSubmitted, RunWaited, ShareProgram
from pathways_lab.core.program.functions import FunctionKey
from pathways_lab.core.program.plans import PlanIndex, Window
from pathways_lab.core.program.program import SliceId
from pathways_lab.core.scheduling.admission import (
    Entry,
    beyond_quota,
    hopeless,
    lacks,
    stalemate,
    too_large,
)
from pathways_lab.core.scheduling.outcomes import Outcomes, explain
from pathways_lab.core.scheduling.runs import RunRecord
from pathways_lab.core.state import State

FAR = 10**12
"""Device microseconds ahead that nobody reaches."""
PROMPT = 100_000
"""Device microseconds ahead: with less, devices may have nothing to do before a report comes."""


class Grants:
    """See the module's docstring."""

    def __init__(self, state: State, outcomes: Outcomes, uploads: Uploads) -> None:
        self.state = state
        self.outcomes = outcomes
        self.uploads = uploads
        self._starved: list[RunRecord] = []
        self._apart: list[tuple[RunRecord, Window, bool]] = []
        self._prompt = False
        self.due = math.inf
        """When the first of what is hopeless is given up."""

    def work(self) -> None:
        """Do everything that can be done now, until nothing moves."""
        state = self.state
        while True:
            if state.settled or state.spoiled or state.store.unread:
                self.outcomes.work()
            if state.store.unwanted:
                self.uploads.let_go()
            if state.woken:
                self._look(state.woken.popleft())
            elif not (self._admit() or self._grant() or self._give_up()):
                break
        while self._apart:  # only where that rule is off
            self._place(*self._apart.pop(0))
        state.tell_resolved()
        state.tell_freed()

    def _look(self, number: int) -> None:
        """Something that a run waited for has changed."""
        run = self.state.runs.get(number)
        if run is not None:
            if run.state == "queued":
                self._consider(run)
            elif run.state == "admitted":
                self._gate(run)

    # --- queued ----------------------------------------------------------------------

    def submit(
        self,
        event: RunSubmitted,
        index: PlanIndex,
        inputs: tuple[BufferRecord | None, ...],
        outputs: tuple[BufferRecord, ...],
    ) -> None:
        """A legal run whose inputs have not failed."""
        state = self.state
        if self.uploads.ahead:
            for p, buffer in enumerate(inputs):
                if buffer is not None and index.readers[p]:
                    self.uploads.read(buffer)
        state.submitted += 1
        run = RunRecord(
            id=event.run,
            client=event.client,
            index=index,
            inputs=inputs,
            outputs=outputs,
            priority=event.priority,
            order=state.submitted,
            time=event.time,
            left=list(index.waits),
            reads=list(map(len, index.readers)),
            uses=list(index.uses),
            gangs=["waiting"] * len(index.waits),
            data=event.data,
        )
        state.runs[run.id] = state.queued[run.id] = run
        state.clients[run.client].add(run.id)
        state.turns.came(run)
        self._ask(run)
        for slice_id in index.plan.slices:
            state.users[slice_id] = state.users.get(slice_id, 0) + 1
        for p, buffer in enumerate(inputs):
            if buffer is None or buffer.state != "promised":
                for step in index.readers[p]:
                    run.left[step] -= 1
            else:
                buffer.listeners.append((run.id, p))
            if buffer is not None and index.readers[p]:
                state.store.claim(buffer, run.id)
        for p in index.donors:
            donated = inputs[p]
            if donated is not None:
                donated.donor = run.id
        if run.priority:
            self._inherit(run)
        for key in index.functions:
            record = state.functions.records[key]
            if record.failure is not None:
                self.outcomes.fail(run, _compile_failure(run, key, record.failure))
                return
            if record.pending:
                record.waiting.add(run.id)
                run.pending += 1
        self._consider(run)

    def _inherit(self, run: RunRecord) -> None:
        """Rule 8: whoever a run waits for has at least its priority."""
        state = self.state
        found = [run]
        while found:
            at = found.pop()
            for p, buffer in enumerate(at.inputs):
                if buffer is None:
                    continue
                earlier = [buffer.maker]
                earlier += buffer.claims if p in at.index.donors else ()
                for number in earlier:
                    other = state.runs.get(number)
                    if other is not None and other.priority < at.priority:
                        state.lanes.promote(other, at.priority)
                        found.append(other)

    def compiled(
        self, key: FunctionKey, host: str, temporary: int, failure: Failure | None
    ) -> None:
        """A host has compiled a function, or could not."""
        state = self.state
        waiting = state.functions.compiled(key, host, temporary, failure)
        state.admission.settled = False
        for run in [state.runs[r] for r in sorted(waiting) if r in state.runs]:
            if failure is not None:
                why = _compile_failure(run, key, replace(failure, host=host))
                self.outcomes.fail(run, why)
            else:
                run.pending -= 1
                self._consider(run)

    def _consider(self, run: RunRecord) -> None:
        """Rule 6: a queued run waits for memory once its producers have theirs."""
        state, index = self.state, run.index
        if run.id not in state.queued or run.open or run.pending:
            return
        if state.withheld and not state.withheld.isdisjoint(index.plan.slices):
            return  # it is looked at again when its slices are there again
        for p, buffer in enumerate(run.inputs):
            if buffer is not None and buffer.failure is not None and index.readers[p]:
                self.outcomes.fail(run, buffer.failure)
                return
        if state.rules.producers:
            for p, buffer in enumerate(run.inputs):
                if buffer is None or not index.readers[p]:
                    continue
                earlier = buffer.claims if p in index.donors else ()
                if not buffer.admitted or any(r in state.queued for r in earlier if r != run.id):
                    buffer.watched.append(run.id)
                    return
        own = frozenset(
            [
                p
                for p, buffer in enumerate(run.inputs)
                if index.readers[p] and (buffer is None or p in index.donors)
            ]
        )
        version, need, fits = index.needs.get(own, (-1, (), False))
        if version != state.resources.version:
            need = state.store.ledger.need(self._profile(run, own))
        kind = index.plan.key, own
        entry = Entry(run.order, kind, None, run, index.profiles[own], need, state.time)
        if version != state.resources.version or not fits:
            failure = too_large(entry, state.store.ledger)
            if failure is not None:
                self.outcomes.fail(run, replace(failure, program=index.plan.name))
                return
            alike = len({b.id for b in run.inputs if b is not None}) < len(run.inputs)
            index.needs[own] = state.resources.version, need, not alike
        failure = (
            beyond_quota(entry, state.store.ledger, state.quotas) if state.quotas.on_bytes else None
        )
        if failure is not None:
            self.outcomes.fail(run, replace(failure, program=index.plan.name))
            return
        run.open = True
        state.admission.put(entry)

    def _profile(self, run: RunRecord, own: frozenset[int]) -> Profile:
        """Rule 5: bytes along the order of the grants.  own: inputs that they include."""
        index = run.index
        found = index.profiles.get(own)
        if found is None:
            records = self.state.functions.records
            temporary = [records[key].temporary if key else 0 for key in index.step_function]
            walk = profile if self.state.rules.liveness else thrifty_profile
            found = walk(index.plan, (index.plan.inputs[p] for p in own), temporary)
            index.profiles[own] = found
        return found

    # --- admitted --------------------------------------------------------------------

    def _admit(self) -> bool:
        """Rule 5: admit one entry with its whole peak; False when none fits."""
        state = self.state
        if not (state.admission.kinds and (state.admission.changed or state.store.ledger.released)):
            return False
        pick = None if state.turns.in_order else self._pick
        quotas = state.quotas if state.quotas.on_bytes else None
        entry = state.admission.next(state.store.ledger, state.active, pick, quotas)
        if entry is None:
            return False
        if entry.run is None:
            assert entry.buffer is not None
            self.uploads.admitted(entry.buffer)
            state.admission.settled = False  # no end of it will make room for others
            return True
        run = entry.run
        if entry.since < state.time:
            waited_for = "memory" if entry.lacked else "turn"
            state.out.append(RunWaited(state.cause, run.id, entry.since, waited_for))
        run.open = False
        del state.queued[run.id]
        run.move("admit")
        for slice_id in run.index.plan.slices:
            state.active[slice_id] = state.active.get(slice_id, 0) + 1
        state.store.ledger.reserve(run.id, run.client, entry.lines, entry.need)
        for p, buffer in enumerate(run.inputs):
            if buffer is not None:
                if p in run.index.donors:
                    state.store.take(buffer)
                state.wake(buffer)
        for made in run.outputs:
            made.admitted = True
            state.wake(made)
        self._next_window(run)
        return True

    def _pick(self, runs: list[RunRecord]) -> RunRecord | None:
        state = self.state
        return state.turns.pick(runs, state.resources.cells_of, state.time)

    def _next_window(self, run: RunRecord) -> None:
        """Rule 9: what the next grant of an admitted run covers."""
        state = self.state
        if run.position == len(run.gangs):
            run.move("grant")
            for buffer in run.outputs:
                state.store.count(buffer)
            state.store.ledger.release(run.id)
            if run.over:
                self.outcomes.end(run)
            return
        run.window = self._window(run)
        self._gate(run)

    def _window(self, run: RunRecord) -> Window:
        state = self.state
        functions, shared = state.functions, self._shared(run)
        return run.index.window(run.position, functions, state.rules, self._limit, shared)

    def _ask(self, run: RunRecord, window: Window | None = None) -> None:
        """The run wants its devices, or gets them for a window.

        Where the order of submission decides, nothing is noted.
        """
        state, index = self.state, run.index
        if not state.turns.in_order:
            asker = state.turns.asker(run)
            each = {s: cost // gangs for s, cost, gangs in window.slices} if window else {}
            for slice_id in index.plan.slices:
                state.pace.ask(slice_id, asker, state.time, each.get(slice_id, 0))

    def _shared(self, run: RunRecord) -> bool:
        """Whether a policy has lately chosen, or could have, between this run and others."""
        slices = run.index.plan.slices
        return self.state.pace.shared(slices, self.state.time) and not any(
            map(self._unordered, slices)
        )

    def _limit(self, slice_id: SliceId) -> int:
        """The work that may be ahead on a slice: without limit where order is switched off."""
        return FAR if self._unordered(slice_id) else self.state.pace.limit_of(slice_id)

    def _unordered(self, slice_id: SliceId) -> bool:
        return self.state.resources.unordered(slice_id) is not None

    def _measure_again(self) -> None:
        """Waiting windows are cut anew when the times of gangs are known better."""
        state = self.state
        version = state.functions.version
        self._prompt = False
        for run in state.lanes.heads():
            if run.window is None:
                continue
            self._prompt |= _prompt(run.window)
            if run.window.version != version or run.window.shared != self._shared(run):
                state.lanes.take(run)
                run.window = self._window(run)
                self._gate(run)

    def _gate(self, run: RunRecord) -> None:
        """Rules 2 and 9: a window is granted after what it depends on."""
        state, window = self.state, run.window
        if run.open or window is None:
            return
        taken = run.taken(window.first)
        if not taken:
            if taken is False:
                self._skip(run)
            return  # the decision wakes it
        ordered = state.rules.predecessors
        for p in window.reads:
            buffer = run.inputs[p]
            if buffer is None or buffer.state != "promised":
                continue
            if not buffer.maker or (ordered and not buffer.granted):
                buffer.watched.append(run.id)
                return
        for p in window.donates if ordered else ():
            buffer = run.inputs[p]
            if buffer is not None and any(r != run.id for r in buffer.claims):
                buffer.watched.append(run.id)
                return
        if window.first in run.index.gates and not run.resident:
            for p in run.index.reads[window.first]:
                buffer = run.inputs[p]
                if buffer is not None and buffer.state == "promised":
                    buffer.watched.append(run.id)
            return
        state.lanes.put(run)

    def _skip(self, run: RunRecord) -> None:
        """A decision is against the next steps: hosts pass over them, and their bytes are free."""
        state, index, steps = self.state, run.index, run.skip()
        window = index.skipping(steps.start, steps.stop)
        self._tell(run, window, skipped=True)
        state.store.ledger.advance(run.id, window.last)
        self._leave(run, window)
        self.outcomes.skipped(run, steps)
        run.window = None
        self._next_window(run)

    def _grant(self) -> bool:
        """Grant one window; False when no run may have its turn now."""
        state = self.state
        if not (state.lanes.lanes or self._starved):
            return False
        for run in self._starved:
            if run.cut is None:
                state.lanes.put(run)
        self._starved.clear()
        while True:
            self._measure_again()
            first = state.turns.choose(state.lanes, state.pace, state.time)
            if first is None:
                return False
            state.lanes.take(first)
            assert first.window is not None
            if state.store.ledger.can_advance(first.id, first.window.last):
                break
            self._starved.append(first)
        self._grant_window(first)
        return True

    def _grant_window(self, run: RunRecord) -> None:
        """Rules 1 and 3: the next window of a run gets its places, on all islands at once."""
        state, window, index = self.state, run.window, run.index
        assert window is not None
        self._ask(run, window)
        for slice_id, cost, gangs in window.slices:
            state.pace.add(slice_id, cost, gangs)
            state.turns.charge(run, cost / 1e6 * index.devices[slice_id], state.time)
        run.charged.update(zip(range(window.first, window.last), window.costs, strict=True))
        self._tell(run, window)
        run.grant(window.last, state.time)
        state.store.ledger.advance(run.id, window.last)
        for p in window.makes:
            run.outputs[p].granted = run.outputs[p].stored = True
            state.wake(run.outputs[p])
        self._leave(run, window)
        run.window = None
        self._next_window(run)

    def _leave(self, run: RunRecord, window: Window) -> None:
        """Nothing behind the window reads these inputs."""
        for p in window.done:
            buffer = run.inputs[p]
            if buffer is not None:
                self.state.store.pass_by(buffer, run.id)
                self.state.wake(buffer)

    def _tell(self, run: RunRecord, window: Window, *, skipped: bool = False) -> None:
        """The window gets its places: on all its islands at once, as long as the rule holds."""
        if not self.state.rules.together and len(window.islands) > 1:
            first, *others = [island for island, _ in window.islands][:: (-1) ** run.id]
            self._apart += [(run, window.on(island), skipped) for island in others]
            window = window.on(first)
        self._place(run, window, skipped)

    def _place(self, run: RunRecord, window: Window, skipped: bool) -> None:
        """Hosts hear of their places."""
        state, index = self.state, run.index
        new = [host for host, _ in window.hosts if host not in index.shared]
        if new:
            index.shared.update(new)
            state.out.append(ShareProgram(state.cause, tuple(new), index.plan.key))
        inputs = tuple([None if b is None else b.id for b in run.inputs])
        outputs = tuple([b.id for b in run.outputs])
        key, first, last = index.plan.key, window.first, window.last
        prompt = self._prompt or _prompt(window) or not window.known
        for host, epoch, place, previous in state.order.place(window):
            state.out.append(
                Grant(
                    state.cause, host, run.id, key, first, last, epoch, place, previous,
                    inputs, outputs, prompt, skipped,
                )
            )  # fmt: skip

    def _give_up(self) -> bool:
        """Rule 7: when nothing can move any more for so long, fail the youngest queued holder."""
        state, patience = self.state, self.state.rules.patience
        if state.admission.settled and state.time < self.due:
            return False
        state.admission.settled = True
        self.due = math.inf
        if not state.admission.kinds or patience is None:
            return False
        stuck: list[Entry] = []
        without_hope = set(self.stuck())
        for entry in state.admission.heads():
            if entry not in without_hope:
                entry.hopeless = math.inf
                continue
            entry.hopeless = min(entry.hopeless, state.time)
            if entry.hopeless + patience <= state.time:
                stuck.append(entry)
            self.due = min(self.due, entry.hopeless + patience)
        if not stuck:
            return False
        ledger, quotas = state.store.ledger, state.quotas
        lacking = {c for e in stuck for c in lacks(e, ledger, quotas)}
        holders = [run for run in state.queued.values() if self._holds(run, lacking)]
        if holders:
            self.outcomes.fail(holders[-1], stalemate(holders[-1], stuck, state.store, quotas))
        elif stuck[-1].run is not None:
            self.outcomes.fail(stuck[-1].run, stalemate(stuck[-1], stuck, state.store, quotas))
        elif stuck[-1].buffer is not None:
            self.uploads.lose(stuck[-1].buffer, stalemate(stuck[-1], stuck, state.store, quotas))
        return True

    def stuck(self) -> list[Entry]:
        """Entries for which nothing that runs or waits will ever make room."""
        state, away = self.state, self.state.withheld
        others = [
            run
            for run in state.queued.values()
            if run.pending or (away and not away.isdisjoint(run.index.plan.slices))
        ]
        quotas = state.quotas
        bounded = quotas.on_bytes
        running = [r for r in state.runs.values() if r.state != "queued"] if bounded else ()
        heads = state.admission.heads()
        moving = (*state.active, *away)  # a slice that is put aside leaves its bytes to others
        return hopeless(heads, others, running, moving, state.store.ledger, quotas)

    def _holds(self, run: RunRecord, lacking: set[int | str]) -> bool:
        """Whether bytes that are lacking would be given back if this queued run were not there."""
        of = self.state.resources.cells_of
        return any(
            b.counted
            and not b.held
            and list(b.claims) == [run.id]
            and not lacking.isdisjoint((*of.get(b.slice, ()), b.owner))
            for b in run.inputs
            if b is not None
        )


def _prompt(window: Window) -> bool:
    """Whether the next grant on the same devices waits for its ends."""
    return window.shared or window.limit < PROMPT


def _compile_failure(run: RunRecord, key: FunctionKey, failure: Failure) -> Failure:
    return explain(run, run.index.step_function.index(key), failure, failure.host)
