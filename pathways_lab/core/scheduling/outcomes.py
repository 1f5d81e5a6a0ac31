"""Outcomes: reports of hosts, the failures that follow, and the ends of runs.

Problem: outputs resolve one by one as soon as they are final; a failure spoils
exactly what depends on it, in its run and in later ones, always with the first
cause; and every run ends once, whatever happens to its hosts and its client.

Rule for maintainers: nothing here admits or grants.  An outcome wakes the runs that
it lets go on; :mod:`pathways_lab.core.scheduling.grants` looks at them.

Paper: section 4.3 (progress tracking), section 4.6 (ownership, errors).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pathways_lab.core.errors import Failure
from pathways_lab.core.memory.store import BufferRecord
from pathways_lab.core.messages import AbortRun, RunEnded
from pathways_lab.core.program.functions import FunctionKey
from pathways_lab.core.program.program import SliceId, ValueId
from pathways_lab.core.scheduling.runs import RunRecord
from pathways_lab.core.state import State


class Outcomes:
    """See the module's docstring."""

    def __init__(self, state: State) -> None:
        self.state = state

    def work(self) -> None:
        """Follow up what has settled or failed, to the end."""
        state = self.state
        while state.settled or state.spoiled or state.store.unread:
            while state.settled:
                run, step = state.settled.popleft()
                steps = [step]
                while state.settled and state.settled[0][0] is run:
                    steps.append(state.settled.popleft()[1])
                self._settle(run, steps)
            while state.spoiled:
                self._spoil_reader(*state.spoiled.popleft())
            while state.store.unread:
                self._unread(state.store.unread.pop())

    # --- what hosts report -----------------------------------------------------------

    def ended(self, run: RunRecord, first: int, host: str, times: Sequence[float]) -> None:
        """Steps from *first* on ended on a host, one after the other."""
        bit = run.index.bits.get(host, 0)
        for step, seconds in enumerate(times, first):
            if run.waiting.get(step, 0) & bit:
                if seconds > run.took.get(step, 0.0):
                    run.took[step] = seconds
                if run.report(step, bit):
                    self.state.settled.append((run, step))

    def failed(self, run: RunRecord, step: int, host: str, failure: Failure) -> None:
        """A step could not give its value on a host."""
        bit = run.index.bits.get(host, 0)
        if step in run.waiting and run.index.masks[step] & bit:
            self.poison(run, step, explain(run, step, failure, host))
            if run.report(step, bit):
                self.state.settled.append((run, step))

    def decided(self, run: RunRecord, value: ValueId, host: str, case: int) -> None:
        """A host has read a value that decides; repeats change nothing."""
        if value not in run.index.deciders:
            return
        step, cases = run.index.deciders[value]
        if not run.index.bits.get(host, 0) & run.index.masks[step]:
            return
        if run.gangs[step] != "waiting" and value not in run.decided:
            run.decided[value] = min(case, cases - 1)
            self.state.woken.append(run.id)

    def skipped(self, run: RunRecord, steps: Iterable[int]) -> None:
        """Decisions were against these: they need nothing, and nobody waits for them."""
        state, index = self.state, run.index
        for step in steps:
            state.settled += [(run, c) for c in index.consumers[step] if run.count_down(c)]
            for p in index.touches[step]:
                run.uses[p] -= 1
                if not run.uses[p]:
                    state.store.make(run.outputs[p])
            for p in index.reads[step]:
                self._read(run, p, 1, False)

    def arrive(self, buffer: BufferRecord) -> None:
        """A buffer has its value everywhere."""
        state = self.state
        buffer.move("arrive")
        state.resolve(buffer, None)
        listeners, buffer.listeners = buffer.listeners, []
        for number, p in listeners:
            run = state.runs.get(number)
            if run is not None:
                for step in run.index.readers[p]:
                    if run.count_down(step):
                        state.settled.append((run, step))
        state.wake(buffer)

    def _settle(self, run: RunRecord, steps: list[int]) -> None:
        """All that these gangs depend on and all their hosts have ended; others may follow."""
        state, index = self.state, run.index
        by_key: dict[FunctionKey, list[int]] = {}
        for step in steps:
            steps += run.settle(step)  # those are next
            key = index.step_function[step]
            if key is not None:
                by_key.setdefault(key, []).append(step)
                continue
            del run.charged[step]
            if run.gangs[step] == "finished" and index.crossing(step):
                state.accounts.moved(run.client, index.crossing(step))
        for key, alike in by_key.items():
            self._account(run, key, alike)
        for step in steps:
            if not index.inner[step]:
                self._give_back(run, step)
        if run.over:
            self.end(run)
        elif run.window is not None and run.window.first in index.gates:
            state.woken.append(run.id)  # perhaps its next step need not wait any more

    def _account(self, run: RunRecord, key: FunctionKey, steps: Sequence[int]) -> None:
        """Gangs of one function are over: their places and their time."""
        state, gangs = self.state, run.gangs
        devices = run.index.devices[key[1]]
        cost = sum([run.charged.pop(step) for step in steps])
        # One that was over at once counts too; one that nobody timed because it failed does not.
        times = {
            step: run.took.pop(step, 0.0)
            for step in steps
            if step in run.took or gangs[step] == "finished"
        }
        seconds = sum(times.values())
        state.pace.add(key[1], -cost, -len(steps))
        if times:
            state.accounts.gang(run.client, seconds * devices, len(times))
        if good := [took for step, took in times.items() if gangs[step] == "finished"]:
            state.functions.measure(key, good)
        if crossing := state.functions.crossing(key):
            state.accounts.moved(run.client, crossing * len(good))
        state.turns.charge(run, (seconds - cost / 1e6) * devices, state.time)

    def _give_back(self, run: RunRecord, step: int) -> None:
        """A settled gang needs its inputs no more, and its results are what they will be."""
        index = run.index
        for p in index.results[step]:
            if run.outputs[p].failure is None:
                self.arrive(run.outputs[p])
        for p in index.touches[step]:
            run.uses[p] -= 1
            if not run.uses[p]:
                self.state.store.make(run.outputs[p])
        for p in index.reads[step]:
            self._read(run, p, 1, index.donors.get(p) == step)

    def _read(self, run: RunRecord, p: int, steps: int, donated: bool) -> None:
        """So many reading steps of an input have ended, or never will begin."""
        buffer = run.inputs[p]
        run.reads[p] -= steps
        if buffer is None:
            return
        if donated and buffer.state == "resident":
            buffer.move("donate")
        if not run.reads[p]:
            self.state.store.read(buffer)

    # --- failing ---------------------------------------------------------------------

    def poison(self, run: RunRecord, step: int, failure: Failure) -> None:
        """A step's results are worthless, and so is all that depends on it."""
        if step in run.poison or run.gangs[step] == "skipped":
            return
        self._blame(run, failure)
        for spoiled in run.spoil(step, failure):
            for p in run.index.results[spoiled]:
                self.fail_buffer(run.outputs[p], failure)
            if any(v not in run.decided for v in run.index.decides.get(spoiled, ())):
                self.cut(run, failure)  # nobody will ever decide
        rest = range(run.position, len(run.gangs))
        if len(rest) and all(s in run.poison for s in rest):
            self.cut(run, failure)

    def fail_buffer(self, buffer: BufferRecord, failure: Failure) -> None:
        """A buffer will never have its value (any more); later readers are spoiled."""
        if buffer.state not in ("promised", "resident"):
            return
        state = self.state
        state.store.fail(buffer, failure)
        if not buffer.maker:
            state.store.make(buffer)
        state.resolve(buffer, failure)
        listeners, buffer.listeners = buffer.listeners, []
        state.spoiled.extend((number, p, failure) for number, p in listeners)
        state.wake(buffer)

    def _spoil_reader(self, number: int, p: int, failure: Failure) -> None:
        run = self.state.runs.get(number)
        if run is None:
            return
        buffer = run.inputs[p]
        if not run.position or (buffer is not None and not buffer.granted):
            self.fail(run, failure)  # hosts could wait for it, and would in vain
        for step in run.index.readers[p]:
            self.poison(run, step, failure)
            if run.count_down(step):
                self.state.settled.append((run, step))

    def fail(self, run: RunRecord, failure: Failure) -> None:
        """The run fails as far as it has no places yet."""
        self._blame(run, failure)
        self.cut(run, failure)

    def _blame(self, run: RunRecord, failure: Failure) -> None:
        """The first failure is the run's; what somebody cancelled is none."""
        if run.failure is None and failure.kind != "cancelled":
            run.failure = failure

    def _unread(self, buffer: BufferRecord) -> None:
        """Nobody will read a result: a run that makes no other, and has not begun, ends.

        One with a node that is *kept* (it calls back into Python, or its author wants it for
        what else it does) goes on: its results are not all that it is for.
        """
        run = self.state.runs.get(buffer.maker)
        if run is None or run.cut is not None or run.position or run.index.kept:
            return
        run.unread += 1
        if run.unread == len(run.outputs):
            name = run.index.plan.name
            why = Failure(
                "cancelled",
                f"a run of {name!r} ended before it had begun: nobody can read its results any"
                " more, for their handles are gone",
                "keep the handles of what shall be computed, or pw.jit(f, keep=True)",
                program=name,
            )
            self.cut(run, why)

    def cut(self, run: RunRecord, failure: Failure) -> None:
        """A gang without a place will never have one; a gang with a place still ends.

        A run that has not failed (its client does not want it) is cancelled.
        """
        state, index = self.state, run.index
        if run.cut is not None or run.state == "granted":
            return
        if run.state == "queued":
            state.queued.pop(run.id, None)
            state.admission.remove(run=run)
            run.open = False
            for key in index.functions:
                record = state.functions.records.get(key)
                if record is not None:
                    record.waiting.discard(run.id)
        else:
            run.move("cut")
            state.lanes.take(run)
        run.window = None
        for step in run.stop(failure):
            for p in index.results[step]:
                self.fail_buffer(run.outputs[p], failure)
        for p, readers in enumerate(index.readers):
            buffer = run.inputs[p]
            rest = sum(step >= run.position for step in readers)
            if buffer is not None and rest:
                state.store.pass_by(buffer, run.id)
                state.wake(buffer)
            if rest:
                self._read(run, p, rest, False)
        if run.over:
            self.end(run)

    def give_up(self, run: RunRecord, failure: Failure) -> None:
        """Nothing of a run that has not ended shall be waited for; what is on devices ends."""
        state, index = self.state, run.index
        if run.position and not run.aborted:
            run.aborted = True
            state.out.append(AbortRun(state.cause, state.alive(index.hosts), run.id))
        if run.failure is None:
            run.failure = failure
        self.cut(run, failure)
        for step in list(run.waiting):
            self.poison(run, step, explain(run, step, failure, failure.host))

    def lose(self, run: RunRecord, slices: frozenset[SliceId], failure: Failure) -> None:
        """Slices that a run uses are gone: so is all of it that has not ended."""
        self.give_up(run, failure)
        index = run.index
        for step in list(run.waiting):
            if slices.isdisjoint(index.step_slices[step]) or run.gangs[step] == "lost":
                continue
            if run.lose(step):
                self.state.settled.append((run, step))

    # --- ending ----------------------------------------------------------------------

    def end(self, run: RunRecord) -> None:
        """Everything of a run is over."""
        state, index = self.state, run.index
        if state.runs.pop(run.id, None) is None:
            return
        admitted = run.state != "queued"
        cancelled = run.failure is None and run.cut is not None
        failure = run.failure or run.cut
        run.move("cancel" if cancelled else "fail" if failure else "finish")
        if run.cut is not None:
            for buffer in run.outputs:
                if buffer.granted:
                    state.store.count(buffer)
                state.store.make(buffer)
            state.store.ledger.release(run.id)
            for p, step in index.donors.items():
                donated = run.inputs[p]
                if donated is not None and step >= run.position:
                    state.store.give_back(donated)
            if run.position and not run.aborted:
                state.out.append(AbortRun(state.cause, state.alive(index.hosts), run.id))
        for slice_id in index.plan.slices:
            state.users[slice_id] -= 1
            if admitted:
                state.active[slice_id] -= 1
                if not state.active[slice_id]:
                    del state.active[slice_id]
        state.turns.went(run, state.time)
        state.admission.settled = False
        state.admission.changed = True
        state.tell_resolved()
        if run.client in state.clients:
            state.clients[run.client].discard(run.id)
            state.out.append(RunEnded(state.cause, run.client, run.id, run.state, failure))


def explain(run: RunRecord, step: int, failure: Failure, host: str) -> Failure:
    """Fill in what the plan knows about a failed step."""
    node = run.index.plan.steps[step].node
    return replace(
        failure,
        program=failure.program or run.index.plan.name,
        node=failure.node or node.name,
        line=failure.line if failure.line.number else node.line,
        host=failure.host or host,
    )
