"""Cancelling: an unwanted run ends as far as it has not begun.

Problem: runs wait for seconds behind others, and meanwhile a client changes its mind, loses
the last handle, or gives the slice back.  Devices cannot be interrupted, and hosts that were
told of a gang launch it; so a gang that has its place ends, and a gang without one never gets one.

A client cancels whole runs, or single results.  Then the gangs that make them, and all gangs that
depend on them, in their run and in later ones, are worthless for the same reason.  A run without
another wanted result ends.  A value that only a cancelled run would have read has no reader, so
its makers end too, by the rule of :meth:`.scheduling.outcomes.Outcomes.unread`.

Rule for maintainers: nothing here waits or is retried; a client that comes too late is told so.

Paper: section 4.6 (ownership).
"""

from __future__ import annotations

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import CancelRequested, Refused
from pathways_lab.core.messages.elastic import Answer
from pathways_lab.core.program.program import Call, SliceId, slice_name
from pathways_lab.core.scheduling.outcomes import Outcomes
from pathways_lab.core.scheduling.runs import RunRecord
from pathways_lab.core.state import State


class Cancelling:
    """See the module's docstring."""

    def __init__(self, state: State, outcomes: Outcomes) -> None:
        self.state = state
        self.outcomes = outcomes

    def requested(self, event: CancelRequested) -> None:
        """Runs that are over, and buffers that are there, are passed over in silence."""
        state = self.state
        meant: dict[int, set[int]] = {}
        for number in event.buffers:
            buffer = state.store.find(number, event.client)
            if buffer is not None and buffer.owner == event.client and buffer.state == "promised":
                meant.setdefault(buffer.maker, set()).add(buffer.id)
        whole, parts = {*event.runs}, dict(event.steps)
        ended = {"cancelled": 0, "begun": 0, "going": 0}
        for number in dict.fromkeys((*event.runs, *parts, *meant)):
            run = state.runs.get(number)
            if run is None:
                continue
            if run.client != event.client:
                text = f"run {number}: it belongs to another client"
                why = Failure("refused", text)
                state.out.append(Refused(event.cause, event.client, f"run {number}", why))
                continue
            why = _cancelled(run)
            steps = frozenset(parts.get(number, ()))
            if number not in whole and self._goes_on(run, steps, meant.get(number, set()), why):
                ended["going"] += 1
            else:
                ended[self._end(run, why)] += 1
        if event.request:
            state.tell_resolved()  # before the answer
            state.out.append(Answer(event.cause, event.client, event.request, numbers=ended))

    def _goes_on(
        self, run: RunRecord, steps: frozenset[int], wanted: set[int], why: Failure
    ) -> bool:
        """Cancel steps of a run, and what makes these results; whether others of it go on."""
        index, ahead = run.index, range(run.position, len(run.gangs))
        for step in ahead:
            if step in steps or any(run.outputs[p].id in wanted for p in index.results[step]):
                self.outcomes.poison(run, step, why)
        if any(b.failure is None and not b.granted and b.readable for b in run.outputs):
            return True
        # Calls that travel as one: each goes on for its effects beside its results.
        left = [index.plan.steps[step].node for step in ahead if step not in run.poison]
        return bool(steps) and any(isinstance(node, Call) and node.keep for node in left)

    def _end(self, run: RunRecord, why: Failure) -> str:
        """Cancel what has no place of a run; what has become of it."""
        begun = run.position
        self.outcomes.cut(run, why)
        if run.cut is None:
            return "going"
        return "begun" if begun else "cancelled"

    def released(self, slice_id: SliceId, client: str) -> None:
        """Gangs that wait for a slice that was given back never get a place on it."""
        for run in [r for r in self.state.runs.values() if slice_id in r.index.plan.slices]:
            name = run.index.plan.name
            why = Failure(
                "cancelled",
                f"slice {slice_name(slice_id)} was released by {client} while a run of {name!r}"
                " waited for it",
                "wait for results (handle.block_until_ready()) before slice.release(), or before"
                " the end of its block",
                program=name,
            )
            self.outcomes.cut(run, why)


def _cancelled(run: RunRecord) -> Failure:
    name = run.index.plan.name
    return Failure(
        "cancelled",
        f"the run of {name!r} was cancelled by {run.client}: by handle.cancel(), lab.cancel(),"
        " Ctrl-C in a wait for what it makes, or a view's button",
        "call it again; handle.result(timeout=10) ends by itself and cancels nothing",
        program=name,
    )
