"""Turns: the choice of the next run among those that could go on.

Problem: the policy is a user's; the promises are ours.  An invalid choice removes
the policy.  No run is overtaken for ever, whatever the policy and however the
devices of the run happen to be busy.

A policy is asked about runs that *compete*: those that could go on and share
devices, directly or through others.  A run that is alone on its devices needs
no answer, and a policy that is slow holds up nobody else.

Rule for maintainers: cost may grow with the number of programs that wait, not
with their runs.  A run is overtaken when a later one that shares devices with
it is granted while it could be, or while it waits for its devices to come near
the end of their work.

Paper: section 4.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from pathways_lab.core.errors import Failure
from pathways_lab.core.program.functions import Functions
from pathways_lab.core.program.program import SliceId
from pathways_lab.core.scheduling.order import Asker, Lanes, Pace
from pathways_lab.core.scheduling.policies import (
    FIFO,
    INITIAL,
    Candidate,
    PlaceView,
    Policy,
    PolicyView,
    ProportionalShare,
    RemotePolicy,
    ask,
    ineligible,
    name_of,
    places,
    rank,
)
from pathways_lab.core.scheduling.remote_policy import Questions
from pathways_lab.core.scheduling.runs import RunRecord

HALF_LIFE = 10.0
"""Seconds after which device time counts half in shares."""
TICK = 0.25
"""Seconds between two discounts of what was used."""
AWAY = 1.0
"""Seconds without a run after which somebody who comes back is new."""

TRACE = 1e-6
"""Device seconds that somebody who had devices has used at least: a newcomer goes first."""


@dataclass(slots=True)
class Usage:
    """Device seconds by name, discounted with age.

    A newcomer starts level with the others and goes first: of earlier use only a trace counts.
    Else the newcomer would have the devices for itself until it had used as much as
    those that were alone before it.

    used: what policies see.  runs: how many are not over.  left: when the last
    one was, of names without.
    """

    used: dict[str, float] = field(default_factory=dict)
    runs: dict[str, int] = field(default_factory=dict)
    left: dict[str, float] = field(default_factory=dict)

    def came(self, name: str, time: float) -> None:
        """A run was submitted."""
        runs = self.runs.get(name, 0)
        if not runs and time - self.left.pop(name, -AWAY) >= AWAY:
            self.used = dict.fromkeys(self.runs, TRACE)
        self.runs[name] = runs + 1

    def went(self, name: str, time: float) -> None:
        """A run is over."""
        self.runs[name] -= 1
        if not self.runs[name]:
            del self.runs[name]
            self.left[name] = time

    def add(self, name: str, seconds: float) -> None:
        """Somebody used devices; or less than was said, perhaps before all was forgotten."""
        self.used[name] = max(TRACE, self.used.get(name, 0.0) + seconds)

    def discount(self, factor: float, time: float) -> None:
        """Earlier use counts less; use that counts nothing is forgotten."""
        self.used = {n: s * factor for n, s in self.used.items() if s * factor > 1e-9}
        self.left = {n: t for n, t in self.left.items() if time - t < AWAY}


@dataclass(slots=True)
class Turns:
    """policy: in force, chosen by *owner*.  removed: whose went, and why, until taken.

    questions: to a policy that runs elsewhere.
    """

    overtaking: int | None
    functions: Functions
    policy: Policy | RemotePolicy = INITIAL
    owner: str = ""
    removed: tuple[str, Failure] | None = None
    questions: Questions = field(default_factory=Questions)
    clients: Usage = field(default_factory=Usage)
    programs: Usage = field(default_factory=Usage)
    _discounted: float = 0.0

    @property
    def in_order(self) -> bool:
        """Whether the order of submission decides, as with a single client: nobody is asked."""
        policy = self.policy
        if type(policy) is ProportionalShare and policy.by == "client":
            return len(self.clients.runs) + len(self.clients.left) < 2
        return type(policy) is FIFO

    def asker(self, run: RunRecord) -> Asker:
        """The asker of a run: the policy has no choice between runs of one asker."""
        policy, client, program = self.policy, run.client, run.index.plan.name
        if type(policy) is ProportionalShare:
            return (client, "", 0) if policy.by == "client" else ("", program, 0)
        return client, program, run.priority

    def install(self, policy: Policy | RemotePolicy, owner: str) -> None:
        """From now on this policy is asked, and nobody has used anything yet."""
        self.policy, self.owner = policy, owner
        self.questions = Questions()
        self.clients.used.clear()
        self.programs.used.clear()

    def remove(self, failure: Failure) -> None:
        """The policy in force is none: that with which labs begin takes over."""
        self.removed = self.owner, failure
        self.install(INITIAL, "")

    def answered(self, question: int, run: int) -> None:
        """The policy that runs elsewhere has chosen."""
        wrong = self.questions.answered(question, run)
        if wrong is not None:
            self.remove(ineligible(name_of(self.policy), run, wrong))

    def came(self, run: RunRecord) -> None:
        """A run was submitted."""
        self.clients.came(run.client, run.time)
        self.programs.came(run.index.plan.name, run.time)

    def went(self, run: RunRecord, time: float) -> None:
        """A run is over."""
        self.clients.went(run.client, time)
        self.programs.went(run.index.plan.name, time)

    def charge(self, run: RunRecord, seconds: float, time: float) -> None:
        """*run* has got (or gives back) device seconds."""
        self._age(time)
        self.clients.add(run.client, seconds)
        self.programs.add(run.index.plan.name, seconds)

    def choose(self, lanes: Lanes, pace: Pace, time: float) -> RunRecord | None:
        """The run whose next window is granted now; None when the pace allows none."""
        heads = lanes.heads()
        if len(heads) == 1:
            (only,) = heads
            return only if only.window is not None and pace.allows(only.window, time) else None
        barred = self._barred(heads, pace.cells_of)
        allowed = [
            r
            for r in heads
            if r.window is not None
            and pace.allows(r.window, time)
            and (not barred or not self._waits_for(r, barred, pace.cells_of))
        ]
        if not allowed:
            return None
        chosen = self.pick(allowed, pace.cells_of, time)
        if chosen is None:
            return None
        earlier = [run for run in heads if run.order < chosen.order]
        if earlier:
            cells = {c for s in chosen.index.plan.slices for c in pace.cells_of[s]}
            # A client's later runs wait behind its own first one, which is the one overtaken.
            first: dict[str, RunRecord] = {}
            for run in sorted(earlier, key=_by_order):
                if run.client not in first and _shares(run, cells, pace.cells_of):
                    first[run.client] = run
                    run.overtaken += 1
        return chosen

    def pick(
        self, runs: list[RunRecord], cells_of: Mapping[SliceId, tuple[int, ...]], time: float
    ) -> RunRecord | None:
        """The policy's choice among *runs*; None while all of them wait for it."""
        if self.in_order or len(runs) == 1:
            return min(runs, key=_by_order)
        policy = self.policy
        if type(policy) is ProportionalShare:  # The least rank of all is the least of its group.
            used = (self.clients if policy.by == "client" else self.programs).used
            self._age(time)
            return min(runs, key=lambda r: rank(policy, r.client, r.index.plan.name, r.order, used))
        for group in competing(runs, cells_of):
            chosen = group[0] if len(group) == 1 else self._decide(group, time)
            if chosen is not None:
                return chosen
        return None

    def _decide(self, group: list[RunRecord], time: float) -> RunRecord | None:
        """The run of a competing group that goes first; None while the policy is being asked."""
        if isinstance(self.policy, RemotePolicy):
            chosen = self.questions.chosen(group)
            if chosen is None and not self.questions.late:
                if not self.questions.waits(group):
                    self.questions.ask(self._view(group, time))
                return None
            return chosen or group[0]
        answer = ask(self.policy, self._view(group, time))
        if isinstance(answer, int):
            return next(r for r in group if r.id == answer)
        self.remove(answer)
        return group[0]

    def place(self, slice_id: SliceId, view: PlaceView) -> str | None:
        """The island that the policy chooses for a slice, "" when it does not; None while it is
        being asked."""
        policy, questions = self.policy, self.questions
        if len(view.candidates) < 2 or not places(policy):
            return ""
        if isinstance(policy, RemotePolicy):
            known = questions.placed.get(slice_id)
            if known is None and not questions.late:
                questions.ask_place(slice_id, view)
                return None
            return known or ""
        answer = ask(policy, view)
        if isinstance(answer, int):
            return view.candidates[answer].island
        self.remove(answer)
        return ""

    def _age(self, time: float) -> None:
        """Earlier use counts less as time goes on."""
        if time - self._discounted > TICK:
            factor = 0.5 ** ((time - self._discounted) / HALF_LIFE)
            self.clients.discount(factor, time)
            self.programs.discount(factor, time)
            self._discounted = time

    def _view(self, group: list[RunRecord], time: float) -> PolicyView:
        self._age(time)
        return PolicyView(
            time,
            tuple(self._candidate(run, time) for run in group),
            MappingProxyType(dict(self.clients.used)),
            MappingProxyType(dict(self.programs.used)),
        )

    def _candidate(self, run: RunRecord, time: float) -> Candidate:
        return Candidate(
            run.id,
            run.client,
            run.index.plan.name,
            run.priority,
            run.order,
            time - run.time,
            run.window.seconds if run.window is not None else 0.0,
            run.index.remaining(run.position, self.functions),
            sum(run.index.devices.values()),
            run.position > 0,
            run.overtaken,
            MappingProxyType(dict(run.data)),
        )

    def _barred(
        self, heads: list[RunRecord], cells_of: Mapping[SliceId, tuple[int, ...]]
    ) -> dict[int, int]:
        """By cell, the order of the first run on it that must not be overtaken again."""
        barred: dict[int, int] = {}
        if self.overtaking is not None:
            for run in heads:
                if run.overtaken >= self.overtaking:
                    for slice_id in run.index.plan.slices:
                        for cell in cells_of[slice_id]:
                            barred[cell] = min(run.order, barred.get(cell, run.order))
        return barred

    def _waits_for(
        self, run: RunRecord, barred: dict[int, int], cells_of: Mapping[SliceId, tuple[int, ...]]
    ) -> bool:
        """Whether an earlier run that shares devices must go first."""
        return any(
            barred.get(cell, run.order) < run.order
            for slice_id in run.index.plan.slices
            for cell in cells_of[slice_id]
        )


def competing(
    runs: list[RunRecord], cells_of: Mapping[SliceId, tuple[int, ...]]
) -> list[list[RunRecord]]:
    """Groups of *runs* that share devices, directly or through others; first submitted first."""
    groups: list[tuple[set[int], list[RunRecord]]] = []
    for run in sorted(runs, key=_by_order):
        cells = {c for s in run.index.plan.slices for c in cells_of[s]}
        members = [run]
        apart = []
        for group in groups:
            if cells.isdisjoint(group[0]):
                apart.append(group)
            else:
                cells |= group[0]
                members += group[1]
        groups = [*apart, (cells, members)]
    found = [sorted(members, key=_by_order) for _, members in groups]
    return sorted(found, key=lambda group: group[0].order)


def _by_order(run: RunRecord) -> int:
    return run.order


def _shares(run: RunRecord, cells: set[int], cells_of: Mapping[SliceId, tuple[int, ...]]) -> bool:
    return any(not cells.isdisjoint(cells_of[s]) for s in run.index.plan.slices)
