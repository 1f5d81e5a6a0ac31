"""Outcomes: reports of hosts, the failures that follow, and the ends of runs.

Problem: outputs resolve one by one as soon as they are final; a failure spoils
exactly what depends on it, in its run and in later ones, always with the first
cause; and every run ends once, whatever happens to its hosts and its client.

Rule for maintainers: nothing here admits or grants.  An outcome wakes the runs that
it lets go on; :mod:`pathways_lab.core.scheduling.grants` looks at them.

Paper: section 4.3 (progress tracking), section 4.6 (ownership, errors).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pathways_lab.core.errors import Failure
from pathways_lab.core.memory.store import BufferRecord
from pathways_lab.core.messages import AbortRun, RunEnded
from pathways_lab.core.program.functions import FunctionKey
from pathways_lab.core.program.program import SliceId
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
                self._settle(*state.settled.popleft())
            while state.spoiled:
                self._spoil_reader(*state.spoiled.popleft())
            while state.store.unread:
                self._unread(state.store.unread.pop())

    # --- what hosts report -----------------------------------------------------------

    def finished(self, run: RunRecord, step: int, host: str, seconds: float) -> None:
        """A step ended on a host."""
        bit = run.index.bits.get(host, 0)
        if run.waiting.get(step, 0) & bit:
            if seconds > run.took.get(step, 0.0):
                run.took[step] = seconds
            if run.report(step, bit):
                self.state.settled.append((run, step))

    def ended(self, run: RunRecord, first: int, host: str, times: Sequence[float]) -> None:
        """Steps from *first* on ended on a host, one after the other, and are good there."""
        state, index = self.state, run.index
        bit, inner = index.bits.get(host, 0), []
        for step, seconds in enumerate(times, first):
            if not run.waiting.get(step, 0) & bit:
                continue
            if seconds > run.took.get(step, 0.0):
                run.took[step] = seconds
            if not run.report(step, bit):
                continue
            if not index.inner[step] or step in run.poison:
                self._settle(run, step)
                continue
            inner.append(step)
            for consumer in index.consumers[step]:
                if run.count_down(consumer):
                    state.settled.append((run, consumer))
        if inner:
            self._settle_inner(run, inner)

    def _settle_inner(self, run: RunRecord, steps: Sequence[int]) -> None:
        """The work of :meth:`_settle`, for good steps that nothing outside of their run touches."""
        state, index = self.state, run.index
        run.settle_inner(steps)
        by_key: dict[FunctionKey, list[int]] = {}
        for step in steps:
            key = index.step_function[step]
            assert key is not None
            by_key.setdefault(key, []).append(step)
        for key, alike in by_key.items():
            costs = [run.charged.pop(step) for step in alike]
            state.pace.add(key[1], -sum(costs), -len(costs))
            took = [run.took.pop(step, 0.0) for step in alike]
            devices = index.devices[key[1]]
            state.accounts.gang(run.client, sum(took) * devices, len(took))
            state.functions.measure(key, took)
            spent = (sum(took) - sum(costs) / 1e6) * devices
            state.turns.charge(run, spent, state.time)
        self._go_on(run)

    def failed(self, run: RunRecord, step: int, host: str, failure: Failure) -> None:
        """A step could not give its value on a host."""
        bit = run.index.bits.get(host, 0)
        if step in run.waiting and run.index.masks[step] & bit:
            self.poison(run, step, explain(run, step, failure, host))
            if run.report(step, bit):
                self.state.settled.append((run, step))

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

    def _settle(self, run: RunRecord, step: int) -> None:
        """All that a gang depends on and all its hosts have ended."""
        state, index = self.state, run.index
        for consumer in run.settle(step):
            state.settled.append((run, consumer))
        key, cost = index.step_function[step], run.charged.pop(step)
        if key is not None:
            state.pace.add(key[1], -cost, -1)
            devices, known = index.devices[key[1]], step in run.took
            took = run.took.pop(step, 0.0)
            if known or run.gangs[step] == "finished":
                # One that was over at once counts too.
                state.accounts.gang(run.client, took * devices)
            if run.gangs[step] == "finished":
                state.functions.measure(key, (took,))
            state.turns.charge(run, (took - cost / 1e6) * devices, state.time)
        elif run.gangs[step] == "finished" and step not in run.poison:
            crossed = index.crossing(step)
            if crossed:
                state.accounts.moved(run.client, crossed)
        for p in index.results[step]:
            if run.outputs[p].failure is None:
                self.arrive(run.outputs[p])
        for p in index.touches[step]:
            run.uses[p] -= 1
            if not run.uses[p]:
                state.store.make(run.outputs[p])
        for p in index.reads[step]:
            self._read(run, p, 1, index.donors.get(p) == step)
        self._go_on(run)

    def _go_on(self, run: RunRecord) -> None:
        """Some steps have settled: perhaps it is over, or the next one need not wait any more."""
        if run.over:
            self.end(run)
        elif run.window is not None and run.window.first in run.index.gates:
            self.state.woken.append(run.id)

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
        if step in run.poison:
            return
        self._blame(run, failure)
        for spoiled in run.spoil(step, failure):
            for p in run.index.results[spoiled]:
                self.fail_buffer(run.outputs[p], failure)
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
