"""Questions to a policy in another process, and the turns that wait for its answers.

Problem: a user's own policy answers from another process, late or never, and
the control plane never waits.  So a choice is a question that leaves as a
command, and an answer that comes back as an event.  Only runs that compete with
those in an open question wait for it; everything else goes on.

    open   --answered-->  named: that run has its turn now
    open   --late------>  late:  first submitted, first granted, and nothing new
                                 is asked until the policy has caught up
    late   --answered-->  (nothing: the turn is over)

The island of a slice is asked in the same way, and only that slice waits.

Rule for maintainers: no time here.  The driver says when an answer is late, and when
the policy has had its chance.

Paper: section 4.4.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pathways_lab.core.program.program import SliceId
from pathways_lab.core.scheduling.policies import PlaceView, PolicyView
from pathways_lab.core.scheduling.runs import RunRecord


@dataclass(slots=True)
class Questions:
    """Those of one policy.

    new: asked in this step, to be sent.  open: by question, the runs to choose from.
    late: questions whose turn is over.  named: runs chosen by an answer in this step.
    places: questions where a slice shall lie: it, and the islands.  placed: slices of which that
        has been answered ("": nobody waits for the answer any more).
    """

    new: list[tuple[int, PolicyView | PlaceView]] = field(default_factory=list)
    open: dict[int, tuple[int, ...]] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    named: set[int] = field(default_factory=set)
    places: dict[int, tuple[SliceId, tuple[str, ...]]] = field(default_factory=dict)
    placed: dict[SliceId, str] = field(default_factory=dict)
    _asked: dict[int, int] = field(default_factory=dict)
    _last: int = 0

    def ask(self, view: PolicyView) -> None:
        """A new question."""
        self._last += 1
        runs = tuple(candidate.run for candidate in view.candidates)
        self.open[self._last] = runs
        self._asked.update(dict.fromkeys(runs, self._last))
        self.new.append((self._last, view))

    def ask_place(self, slice_id: SliceId, view: PlaceView) -> None:
        """Where a slice shall lie, if that was not asked already."""
        if all(slice_id != asked for asked, _ in self.places.values()):
            self._last += 1
            self.places[self._last] = slice_id, tuple(c.island for c in view.candidates)
            self.new.append((self._last, view))

    def forget_place(self, slice_id: SliceId) -> None:
        """Nobody waits to hear where a slice shall lie."""
        self.placed.pop(slice_id, None)
        for question in [q for q, (asked, _) in self.places.items() if asked == slice_id]:
            del self.places[question]
            self.late.add(question)

    def waits(self, runs: Iterable[RunRecord]) -> bool:
        """Whether any of *runs* is in an open question."""
        return any(run.id in self._asked for run in runs)

    def chosen(self, runs: Iterable[RunRecord]) -> RunRecord | None:
        """The one of *runs* that an answer named."""
        if self.named:
            for run in runs:
                if run.id in self.named:
                    return run
        return None

    def answered(self, question: int, run: int) -> Sequence[int] | None:
        """An answer came.  The runs to choose from when *run* is none of them, else None."""
        if question in self.late:
            self.late.discard(question)
            return None
        if question in self.places:
            slice_id, islands = self.places.pop(question)
            if not 0 <= run < len(islands):
                return range(len(islands))
            self.placed[slice_id] = islands[run]
            return None
        runs = self.open.get(question)
        if runs is None or run not in runs:
            return runs or ()
        self._close(question)
        self.named.add(run)
        return None

    def overdue(self) -> None:
        """Nobody waits for the open questions any more."""
        self.late.update(self.open)
        self.late.update(self.places)
        self.placed.update({slice_id: "" for slice_id, _ in self.places.values()})
        self.places.clear()
        for question in tuple(self.open):
            self._close(question)

    def _close(self, question: int) -> None:
        for run in self.open.pop(question):
            if self._asked.get(run) == question:
                del self._asked[run]
