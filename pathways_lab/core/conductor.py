"""The conductor: takes every run from submission to its end.

Problem: a run passes through four machines (functions, store, lanes, order)
and a change in one of them may let another run go on.  The conductor holds the
runs, asks the machines, and turns their answers into commands.

Rule for maintainers: consequences of one event (a step settles, an output
arrives, a later run is spoiled by it) go through the *todo* queue and never
through recursion, for chains of runs may be thousands long.  Whatever may let
something else begin ends in :meth:`Conductor.advance`.

Paper: section 4.4 (gang scheduling), section 4.5 (parallel asynchronous
dispatch), section 4.6 (ownership, back-pressure).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from pathways_lab.core.admission import Admission, Entry, given, hopeless, stalemate, too_large
from pathways_lab.core.errors import Failure
from pathways_lab.core.functions import FunctionKey, Functions
from pathways_lab.core.gangs import Lanes, Order, Pace
from pathways_lab.core.ledger import Ledger
from pathways_lab.core.liveness import Profile, hasty_profile, profile
from pathways_lab.core.messages import (
    AbortRun,
    Command,
    FreeBuffers,
    Grant,
    Resolved,
    RunEnded,
    RunSubmitted,
    ShareProgram,
)
from pathways_lab.core.plans import PlanIndex
from pathways_lab.core.program import SliceId
from pathways_lab.core.rules import Rules
from pathways_lab.core.runs import RunRecord
from pathways_lab.core.slices import ResourceManager
from pathways_lab.core.store import BufferRecord, Store


class Conductor:
    """Runs, and the machines that they pass through.

    out: commands of the event at hand.  cause: its id.
    clients: the unfinished runs of every connected client.
    queued: runs that are not admitted, in order of submission.
    active, users: by slice, how many admitted, and how many unfinished, runs use it.
    """

    def __init__(self, resources: ResourceManager, rules: Rules) -> None:
        self.rules = rules
        self.resources = resources
        self.functions = Functions(rules.assumed)
        self.store = Store(Ledger(by_gang=not rules.peak))
        self.order = Order()
        self.pace = Pace(round(rules.ahead * 1e6))
        self.lanes = Lanes()
        self.admission = Admission(rules.overtaking)
        self.clients: dict[str, set[int]] = {}
        self.runs: dict[int, RunRecord] = {}
        self.queued: dict[int, RunRecord] = {}
        self.active: dict[SliceId, int] = {}
        self.users: dict[SliceId, int] = {}
        self.out: list[Command] = []
        self.cause = ""
        self._todo: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._resolved: dict[tuple[str, Failure | None], list[int]] = {}
        self._starved: list[RunRecord] = []
        self._submitted = 0
        self._early: dict[int, set[str]] = {}
        self._orphans: dict[int, set[str]] = {}

    # --- beginning -----------------------------------------------------------

    def submit(
        self,
        event: RunSubmitted,
        index: PlanIndex,
        inputs: tuple[BufferRecord | None, ...],
        outputs: tuple[BufferRecord, ...],
    ) -> RunRecord:
        """A legal run whose inputs have not failed."""
        self._submitted += 1
        run = RunRecord(
            id=event.run,
            client=event.client,
            index=index,
            inputs=inputs,
            outputs=outputs,
            priority=event.priority,
            order=self._submitted,
            time=event.time,
            left=list(index.waits),
            reads=list(map(len, index.readers)),
            uses=list(index.uses),
            gangs=["waiting"] * len(index.waits),
        )
        self.runs[run.id] = self.queued[run.id] = run
        self.clients[run.client].add(run.id)
        for slice_id in index.plan.slices:
            self.users[slice_id] = self.users.get(slice_id, 0) + 1
        for p, buffer in enumerate(inputs):
            if buffer is None or buffer.state != "promised":
                for step in index.readers[p]:
                    run.left[step] -= 1
            else:
                buffer.listeners.append((run.id, p))
            if buffer is not None and index.readers[p]:
                self.store.claim(buffer, run.id)
        for p in index.donors:
            buffer = inputs[p]
            if buffer is not None:
                buffer.donor = run.id
        for key in index.functions:
            record = self.functions.records[key]
            if record.failure is not None:
                self.fail(run, self._compile_failure(run, key, record.failure))
                return run
            if record.pending:
                record.waiting.add(run.id)
                run.pending += 1
        self._consider(run)
        return run

    def upload(self, buffer: BufferRecord, hosts: tuple[str, ...]) -> Failure | None:
        """A declared buffer waits for its memory; a Failure when there can be none."""
        self._submitted += 1
        buffer.arriving = set(hosts) - self._early.pop(buffer.id, set())
        lines = {buffer.slice: [buffer.nbytes, buffer.nbytes]}
        need = self.store.ledger.need(lines, upload=True)
        entry = Entry(self._submitted, buffer, None, lines, need)
        failure = too_large(entry, self.store.ledger)
        if failure is None:
            self.admission.put(entry)
            if not buffer.arriving:
                self.arrive(buffer)
        return failure

    def compiled(
        self, key: FunctionKey, host: str, temporary: int, failure: Failure | None
    ) -> None:
        """A host has compiled a function, or could not."""
        waiting = self.functions.compiled(key, host, temporary, failure)
        self.admission.settled = False
        for run in [self.runs[r] for r in sorted(waiting) if r in self.runs]:
            if failure is not None:
                self.fail(run, self._compile_failure(run, key, replace(failure, host=host)))
            else:
                run.pending -= 1
                self._consider(run)

    def _compile_failure(self, run: RunRecord, key: FunctionKey, failure: Failure) -> Failure:
        step = run.index.step_function.index(key)
        return self._explain(run, step, failure, failure.host)

    def _consider(self, run: RunRecord) -> None:
        """A queued run becomes an entry for admission when only memory is missing (rule 6)."""
        if run.id not in self.queued or run.open or run.pending:
            return
        for p, buffer in enumerate(run.inputs):
            if buffer is not None and buffer.failure is not None and run.index.readers[p]:
                self.fail(run, buffer.failure)
                return
        if self.rules.producers:
            for p, buffer in enumerate(run.inputs):
                if buffer is None or not run.index.readers[p]:
                    continue
                earlier = buffer.claims if p in run.index.donors else ()
                if not buffer.admitted or any(r in self.queued for r in earlier if r != run.id):
                    buffer.watched.append(run.id)
                    return
        lines = self._profile(run)
        entry = Entry(run.order, None, run, lines, self.store.ledger.need(lines))
        failure = too_large(entry, self.store.ledger)
        if failure is not None:
            self.fail(run, failure)
            return
        run.open = True
        self.admission.put(entry)

    def _profile(self, run: RunRecord) -> Profile:
        index = run.index
        own = frozenset(
            p for p, buffer in enumerate(run.inputs)
            if index.readers[p] and (buffer is None or p in index.donors)
        )  # fmt: skip
        found = index.profiles.get(own)
        if found is None:
            temporary = [
                self.functions.records[key].temporary if key else 0 for key in index.step_function
            ]
            walk = profile if self.rules.liveness else hasty_profile
            found = walk(index.plan, (index.plan.inputs[p] for p in own), temporary)
            index.profiles[own] = found
        return found

    # --- going on ----------------------------------------------------------------

    def advance(self) -> None:
        """Do everything that can be done now, until nothing moves."""
        while True:
            self._drain()
            if not (self._admit() or self._grant() or self._todo or self._give_up()):
                break
        self._tell_resolved()
        freed, self.store.freed = self.store.freed, {}
        for slice_id, ids in freed.items():
            hosts = self.alive(self.resources.slices[slice_id].hosts)
            if hosts:
                self.out.append(FreeBuffers(self.cause, hosts, tuple(ids)))

    def _drain(self) -> None:
        while self._todo:
            call, arguments = self._todo.popleft()
            call(*arguments)

    def _admit(self) -> bool:
        """Admit one entry; False when none fits."""
        entry = self.admission.next(self.store.ledger, bool(self.active))
        if entry is None:
            return False
        if entry.run is None:
            assert entry.buffer is not None
            entry.buffer.admitted = entry.buffer.granted = True
            self.store.count(entry.buffer)
            self._wake(entry.buffer)
            return True
        run = entry.run
        run.open = False
        del self.queued[run.id]
        run.move("admit")
        for slice_id in run.index.plan.slices:
            self.active[slice_id] = self.active.get(slice_id, 0) + 1
        self.store.ledger.reserve(run.id, entry.lines, entry.need)
        for p, buffer in enumerate(run.inputs):
            if buffer is not None:
                if p in run.index.donors:
                    self.store.take(buffer)
                self._wake(buffer)
        for buffer in run.outputs:
            buffer.admitted = True
            self._wake(buffer)
        self._next_window(run)
        return True

    def _next_window(self, run: RunRecord) -> None:
        if run.position == len(run.gangs):
            run.move("grant")
            for buffer in run.outputs:
                self.store.count(buffer)
            self.store.ledger.release(run.id)
            if run.over:
                self._end(run)
            return
        run.window = run.index.window(run.position, self.functions, self.rules)
        self._gate(run)

    def _gate(self, run: RunRecord) -> None:
        """Put an admitted run into its lane when its next window may be granted (rules 2, 9)."""
        window = run.window
        if run.open or window is None or run.cut is not None:
            return
        for p in window.reads:
            buffer = run.inputs[p]
            if buffer is None or buffer.state != "promised":
                continue
            ready = buffer.granted if buffer.maker else False
            if not ready and (self.rules.predecessors or not buffer.maker):
                buffer.watched.append(run.id)
                return
        for p in window.donates if self.rules.predecessors else ():
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
        self.lanes.put(run)

    def _wake(self, buffer: BufferRecord) -> None:
        """Something of a buffer changed: look at the runs that waited for it."""
        if buffer.watched:
            watched, buffer.watched = buffer.watched, []
            for number in watched:
                run = self.runs.get(number)
                if run is not None:
                    self._todo.append((self._look, (run,)))

    def _look(self, run: RunRecord) -> None:
        if run.state == "queued":
            self._consider(run)
        elif run.state == "admitted":
            self._gate(run)

    def _grant(self) -> bool:
        """Grant one window; False when no run may have its turn now."""
        if self._starved:
            for run in self._starved:
                self.lanes.put(run)
            self._starved = []
        while True:
            first = self.lanes.first(self.pace)
            if first is None:
                return False
            self.lanes.take(first)
            assert first.window is not None
            if self.store.ledger.can_advance(first.id, first.window.last):
                break
            self._starved.append(first)
        self._grant_window(first)
        return True

    def _grant_window(self, run: RunRecord) -> None:
        window, index = run.window, run.index
        assert window is not None
        for slice_id, cost in window.slices:
            self.pace.add(slice_id, cost)
        run.charged.update(zip(range(window.first, window.last), window.costs, strict=True))
        new = [host for host, _ in window.hosts if host not in index.shared]
        if new:
            index.shared.update(new)
            self.out.append(ShareProgram(self.cause, tuple(new), index.plan.key))
        inputs = tuple(None if b is None else b.id for b in run.inputs)
        outputs = tuple(b.id for b in run.outputs)
        for host, epoch, place, previous in self.order.place(window):
            self.out.append(
                Grant(
                    self.cause, host, run.id, index.plan.key, window.first, window.last,
                    epoch, place, previous, inputs, outputs,
                )
            )  # fmt: skip
        run.grant(window.last)
        self.store.ledger.advance(run.id, window.last)
        for step in range(window.first, window.last):
            for p in index.results[step]:
                run.outputs[p].granted = run.outputs[p].stored = True
                self._wake(run.outputs[p])
        for p in window.done:
            buffer = run.inputs[p]
            if buffer is not None:
                self.store.pass_by(buffer, run.id)
                self._wake(buffer)
        run.window = None
        self._next_window(run)

    def _give_up(self) -> bool:
        """Rule 7: when nothing can ever move again, fail the youngest queued holder."""
        if not self.rules.stalemate or not self.admission.entries or self.admission.settled:
            return False
        self.admission.settled = True
        ledger = self.store.ledger
        others = [run for run in self.queued.values() if run.pending]
        stuck = hopeless(self.admission.entries, others, self.active, ledger)
        if not stuck:
            return False
        lacking = {c for e in stuck for c in ledger.lacking(e.need, given(e, ledger))}
        holders = [run for run in self.queued.values() if self._holds(run, lacking)]
        if holders:
            self.fail(holders[-1], stalemate(holders[-1], stuck, self.store))
        elif stuck[-1].run is not None:
            self.fail(stuck[-1].run, stalemate(stuck[-1], stuck, self.store))
        else:
            buffer = stuck[-1].buffer
            assert buffer is not None
            failure = stalemate(stuck[-1], stuck, self.store)
            self.lose_buffer(buffer, failure)
        return True

    def _holds(self, run: RunRecord, cells: set[int]) -> bool:
        """Whether bytes on *cells* would be given back if this queued run were not there."""
        of = self.resources.cells_of
        return any(
            b.counted
            and not b.held
            and list(b.claims) == [run.id]
            and not cells.isdisjoint(of.get(b.slice, ()))
            for b in run.inputs
            if b is not None
        )

    def divide(self) -> None:
        """The slices changed: count bytes and pace over the new cells."""
        resources, ledger = self.resources, self.store.ledger
        ledger.divide(resources.cells, resources.cells_of)
        self.pace.divide(resources.cells, resources.cells_of)
        for entry in self.admission.entries:
            entry.need = ledger.need(entry.lines, upload=entry.run is None)

    # --- what hosts report -----------------------------------------------------------

    def finished(self, run: RunRecord, step: int, host: str, seconds: float) -> None:
        """A step ended on a host."""
        key = run.index.step_function[step] if 0 <= step < len(run.gangs) else None
        if key is not None and step not in run.poison:
            self.functions.measure(key, seconds)
        if run.report(step, host):
            self._todo.append((self._settle, (run, step)))

    def failed(self, run: RunRecord, step: int, host: str, failure: Failure) -> None:
        """A step could not give its value on a host."""
        if run.waiting.get(step) is None or host not in run.index.step_hosts[step]:
            return
        self.poison(run, step, self._explain(run, step, failure, host))
        if run.report(step, host):
            self._todo.append((self._settle, (run, step)))

    def uploaded(self, number: int, host: str) -> None:
        """All parts of an upload for one host are there (perhaps before it was declared)."""
        buffer = self.store.buffers.get(number)
        if buffer is not None and host in buffer.arriving:
            buffer.arriving.remove(host)
            if not buffer.arriving and buffer.state == "promised":
                self.arrive(buffer)
        elif number in self._orphans:
            self._orphans[number].discard(host)
            if not self._orphans[number]:
                del self._orphans[number]
            self.out.append(FreeBuffers(self.cause, (host,), (number,)))
        elif buffer is None:
            self._early.setdefault(number, set()).add(host)

    def reject_upload(self, number: int, hosts: Iterable[str]) -> None:
        """Nobody wants the bytes of an upload that may still be under way to *hosts*."""
        early = self._early.pop(number, set())
        if early:
            self.out.append(FreeBuffers(self.cause, tuple(sorted(early)), (number,)))
        coming = set(hosts) - early
        if coming:
            self._orphans[number] = coming

    def arrive(self, buffer: BufferRecord) -> None:
        """A buffer has its value everywhere."""
        buffer.move("arrive")
        self._resolved.setdefault((buffer.owner, None), []).append(buffer.id)
        self._tell(buffer)
        self._wake(buffer)
        if not buffer.maker:
            self.store.make(buffer)
            self._forget_upload(buffer)

    def drop(self, buffer: BufferRecord) -> None:
        """The client's handle is gone."""
        self.store.drop(buffer)
        self._forget_upload(buffer)

    def _forget_upload(self, buffer: BufferRecord) -> None:
        if buffer.state == "freed" and not buffer.maker and not buffer.admitted:
            self.admission.remove(buffer=buffer)

    def _tell(self, buffer: BufferRecord) -> None:
        listeners, buffer.listeners = buffer.listeners, []
        for number, p in listeners:
            run = self.runs.get(number)
            if run is not None:
                for step in run.index.readers[p]:
                    if run.count_down(step):
                        self._todo.append((self._settle, (run, step)))

    def _settle(self, run: RunRecord, step: int) -> None:
        """All that a gang depends on and all its hosts have ended."""
        index = run.index
        for consumer in run.settle(step):
            self._todo.append((self._settle, (run, consumer)))
        key = index.step_function[step]
        cost = run.charged.pop(step)
        if key is not None:
            self.pace.add(key[1], -cost)
        for p in index.results[step]:
            if run.outputs[p].failure is None:
                self.arrive(run.outputs[p])
        for p in index.touches[step]:
            run.uses[p] -= 1
            if not run.uses[p]:
                self.store.make(run.outputs[p])
        for p in index.reads[step]:
            self._read(run, p, 1, index.donors.get(p) == step)
        if run.over:
            self._end(run)
        elif run.window is not None and run.window.first in index.gates:
            self._todo.append((self._look, (run,)))

    def _read(self, run: RunRecord, p: int, steps: int, donated: bool) -> None:
        """So many reading steps of an input have ended, or never will begin."""
        buffer = run.inputs[p]
        run.reads[p] -= steps
        if buffer is None:
            return
        if donated and buffer.state == "resident":
            buffer.move("donate")
        if not run.reads[p]:
            self.store.read(buffer)

    # --- failing ---------------------------------------------------------------------

    def _explain(self, run: RunRecord, step: int, failure: Failure, host: str) -> Failure:
        """Fill in what the plan knows about a failed step."""
        node = run.index.plan.steps[step].node
        return replace(
            failure,
            program=failure.program or run.index.plan.name,
            node=failure.node or node.name,
            line=failure.line if failure.line.number else node.line,
            host=failure.host or host,
        )

    def poison(self, run: RunRecord, step: int, failure: Failure) -> None:
        """A step's results are worthless, and so is all that depends on it."""
        if step in run.poison:
            return
        if run.failure is None:
            run.failure = failure
        for spoiled in run.spoil(step, failure):
            for p in run.index.results[spoiled]:
                self.fail_buffer(run.outputs[p], failure)
        rest = range(run.position, len(run.gangs))
        if len(rest) and all(s in run.poison for s in rest):
            self.cut(run, failure)

    def fail_buffer(self, buffer: BufferRecord, failure: Failure) -> None:
        """A buffer will never have its value; later runs that read it are spoiled."""
        if buffer.state not in ("promised", "resident"):
            return
        uploaded = not buffer.maker
        self.store.fail(buffer, failure)
        if uploaded:
            self.store.make(buffer)
        self._resolved.setdefault((buffer.owner, failure), []).append(buffer.id)
        listeners, buffer.listeners = buffer.listeners, []
        for number, p in listeners:
            self._todo.append((self._spoil_reader, (number, p, failure)))
        self._wake(buffer)

    def _spoil_reader(self, number: int, p: int, failure: Failure) -> None:
        run = self.runs.get(number)
        if run is None:
            return
        if not run.position:
            self.fail(run, failure)
            return
        for step in run.index.readers[p]:
            self.poison(run, step, failure)
            if run.count_down(step):
                self._todo.append((self._settle, (run, step)))

    def lose_buffer(self, buffer: BufferRecord, failure: Failure) -> None:
        """A buffer's bytes are gone, or will never come."""
        if not buffer.maker:
            self.admission.remove(buffer=buffer)
            self.reject_upload(buffer.id, self.alive(buffer.arriving))
        self.fail_buffer(buffer, failure)

    def forget_slice(self, slice_id: SliceId) -> None:
        """Nothing uses the slice any more."""
        self.users.pop(slice_id, None)
        self.store.by_slice.pop(slice_id, None)

    def fail(self, run: RunRecord, failure: Failure) -> None:
        """The run fails as far as it has no places yet."""
        if run.failure is None:
            run.failure = failure
        self.cut(run, failure)

    def cancel(self, run: RunRecord, failure: Failure) -> None:
        """The client does not want the run any more."""
        self.cut(run, failure)

    def cut(self, run: RunRecord, failure: Failure) -> None:
        """What has no place will never have one; what has one still ends."""
        if run.cut is not None or run.state == "granted":
            return
        if run.state == "queued":
            self.queued.pop(run.id, None)
            self.admission.remove(run=run)
            run.open = False
            for key in run.index.functions:
                record = self.functions.records.get(key)
                if record is not None:
                    record.waiting.discard(run.id)
        else:
            run.move("cut")
            self.lanes.take(run)
            if run in self._starved:
                self._starved.remove(run)
        run.window = None
        for step in run.stop(failure):
            for p in run.index.results[step]:
                self.fail_buffer(run.outputs[p], failure)
        for p, readers in enumerate(run.index.readers):
            buffer = run.inputs[p]
            rest = sum(step >= run.position for step in readers)
            if buffer is not None and rest:
                self.store.pass_by(buffer, run.id)
                self._wake(buffer)
            if rest:
                self._read(run, p, rest, False)
        if run.over:
            self._end(run)

    def lose(self, run: RunRecord, slices: frozenset[SliceId], failure: Failure) -> None:
        """Slices that a run uses are gone: so is all of it that has not ended."""
        index = run.index
        if run.position and not run.aborted:
            run.aborted = True
            self.out.append(AbortRun(self.cause, self.alive(index.hosts), run.id))
        if run.failure is None:
            run.failure = failure
        self.cut(run, failure)
        for step in list(run.waiting):
            self.poison(run, step, self._explain(run, step, failure, failure.host))
            if slices.isdisjoint(index.step_slices[step]) or run.gangs[step] == "lost":
                continue
            if run.lose(step):
                self._todo.append((self._settle, (run, step)))

    # --- ending ----------------------------------------------------------------------

    def _end(self, run: RunRecord) -> None:
        """Everything of a run is over."""
        if self.runs.pop(run.id, None) is None:
            return
        cancelled = run.failure is None and run.cut is not None
        admitted = run.state != "queued"
        outcome = run.failure or run.cut
        run.move("cancel" if cancelled else "fail" if outcome else "finish")
        if run.cut is not None:
            for buffer in run.outputs:
                if buffer.granted:
                    self.store.count(buffer)
                self.store.make(buffer)
            self.store.ledger.release(run.id)
            for p, step in run.index.donors.items():
                donated = run.inputs[p]
                if donated is not None and step >= run.position:
                    self.store.give_back(donated)
            if run.position and not run.aborted:
                self.out.append(AbortRun(self.cause, self.alive(run.index.hosts), run.id))
        for slice_id in run.index.plan.slices:
            self.users[slice_id] -= 1
            if admitted:
                self.active[slice_id] -= 1
                if not self.active[slice_id]:
                    del self.active[slice_id]
        self.admission.settled = False
        self._tell_resolved()
        if run.client in self.clients:
            self.clients[run.client].discard(run.id)
            self.out.append(RunEnded(self.cause, run.client, run.id, run.state, outcome))

    def _tell_resolved(self) -> None:
        for (client, failure), buffers in self._resolved.items():
            if client in self.clients:
                self.out.append(Resolved(self.cause, client, tuple(buffers), failure))
        self._resolved.clear()

    def alive(self, hosts: Iterable[str]) -> tuple[str, ...]:
        """Those of *hosts* that exist."""
        return tuple(h for h in hosts if h in self.resources.hosts)
