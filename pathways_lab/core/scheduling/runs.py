"""Runs: which gangs have their place, which have ended, and what failed.

Problem: outputs must resolve one by one, as soon as they are final; a step
that failed on one host must spoil exactly what depends on it, in this run and
in later ones.  A gang is *settled* when all its hosts have reported it and
everything that it depends on is settled; only then is it certain whether its
results are good, whatever the order in which reports arrive.

Rule for maintainers: a run counts down per step (hosts, producers, unresolved
inputs); nothing here scans a plan after submission.  Runs of other clients are
none of this module's business: the control composes.

Paper: section 4.3 (progress tracking), section 4.5.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pathways_lab.core.errors import Failure
from pathways_lab.core.memory.store import BufferRecord
from pathways_lab.core.program.plans import PlanIndex, Window
from pathways_lab.core.program.program import ValueId
from pathways_lab.core.scheduling.lifecycles import GANG, RUN
from pathways_lab.core.scheduling.tags import Data

NEVER = -1
"""The case of a decision that nobody makes any more."""


@dataclass(slots=True, eq=False)
class RunRecord:
    """One run.

    order: its number in the order of submission.  priority: its own or that of
        whoever waits for it.  data: see :mod:`.tags`.  position: steps before it have their places.
    waiting: per granted step, a mask of the hosts that have not reported it.
    left: per step, how many things it still waits for: its hosts (one thing
        together), each producer, each input.
    reads: per input position, how many of its steps have not ended.
    uses: per output position, how many steps that make or read it have not.
    poison: per step whose results are worthless, why.
    cut: why the steps from *position* on will never be granted.
    granted: per window, the step behind it and when it was granted.
    unsettled: granted steps that are not settled.
    aborted: hosts were told that it ends early.
    overtaken: how often, since it got its last window.
    unread: how many of its results nobody will read, before anything of it is granted.
    pending: functions that are not compiled; open: whether it lies in a lane.
    charged: per granted step, the device microseconds that the pace counts.
    took: per step that is not settled, the device seconds that hosts measured.
    decided: by value that decides, its case; NEVER where the step that makes it was skipped.
    """

    id: int
    client: str
    index: PlanIndex
    inputs: tuple[BufferRecord | None, ...]
    outputs: tuple[BufferRecord, ...]
    priority: int
    order: int
    time: float
    left: list[int]
    reads: list[int]
    uses: list[int]
    state: str = RUN.start
    position: int = 0
    gangs: list[str] = field(default_factory=list)
    waiting: dict[int, int] = field(default_factory=dict)
    poison: dict[int, Failure] = field(default_factory=dict)
    cut: Failure | None = None
    failure: Failure | None = None
    unsettled: int = 0
    unread: int = 0
    pending: int = 0
    window: Window | None = None
    open: bool = False
    granted: list[tuple[int, float]] = field(default_factory=list)
    aborted: bool = False
    overtaken: int = 0
    charged: dict[int, int] = field(default_factory=dict)
    took: dict[int, float] = field(default_factory=dict)
    data: Data = ()
    decided: dict[ValueId, int] = field(default_factory=dict)

    def move(self, move: str) -> None:
        """Go to the next state of the life cycle."""
        self.state = RUN.next(self.state, move, self.id)

    def grant(self, last: int, time: float) -> None:
        """The steps up to *last* have their places."""
        self.granted.append((last, time))
        self.overtaken = 0  # it waits for its next window, and not for this one any more
        steps = range(self.position, last)
        for step in steps:
            self.gangs[step] = GANG.next(self.gangs[step], "grant", self.id)
        self.waiting.update(zip(steps, self.index.masks[self.position : last], strict=True))
        self.unsettled += last - self.position
        self.position = last

    def taken(self, step: int) -> bool | None:
        """Whether a step's condition holds; None: that is not decided yet."""
        when = self.index.whens[step]
        if when is None:
            return True
        case = self.decided.get(when.value)
        return None if case is None else case == when.case

    def skip(self) -> range:
        """Pass over the next steps, whose conditions do not hold; returns them."""
        first, index = self.position, self.index
        while self.position < len(self.gangs) and self.taken(self.position) is False:
            step = self.position
            self.gangs[step] = GANG.next(self.gangs[step], "skip", (self.id, step))
            self.decided.update(dict.fromkeys(index.decides.get(step, ()), NEVER))
            self.position += 1
        return range(first, self.position)

    def report(self, step: int, bit: int) -> bool:
        """A host has ended a step; True when that settles it.  Repeats change nothing."""
        mask = self.waiting.get(step, 0)
        if not mask & bit:
            return False
        self.waiting[step] = mask = mask ^ bit
        return not mask and self.count_down(step)

    def lose(self, step: int) -> bool:
        """Wait for no host of a granted step any more; True when that settles it."""
        self.gangs[step] = GANG.next(self.gangs[step], "lose", (self.id, step))
        waits, self.waiting[step] = self.waiting[step], 0
        return bool(waits) and self.count_down(step)

    def count_down(self, step: int) -> bool:
        """One thing less to wait for; True when the step is settled."""
        self.left[step] -= 1
        return self.left[step] == 0

    def settle(self, step: int) -> list[int]:
        """A step is settled; returns the consumers that this settles too."""
        del self.waiting[step]
        self.unsettled -= 1
        if self.gangs[step] != "lost":
            move = "fail" if step in self.poison else "finish"
            self.gangs[step] = GANG.next(self.gangs[step], move, (self.id, step))
        return [c for c in self.index.consumers[step] if self.count_down(c)]

    def spoil(self, step: int, failure: Failure) -> list[int]:
        """A step's results are worthless; returns it and all consumers newly so."""
        spoiled: list[int] = []
        found = [step]
        while found:
            at = found.pop()
            if at not in self.poison and self.gangs[at] != "skipped":
                self.poison[at] = failure
                spoiled.append(at)
                found.extend(self.index.consumers[at])
        return spoiled

    def stop(self, failure: Failure) -> list[int]:
        """Cut what has no place yet; returns those steps."""
        self.cut = failure
        rest = list(range(self.position, len(self.gangs)))
        for step in rest:
            self.gangs[step] = GANG.next(self.gangs[step], "cancel", (self.id, step))
        return rest

    @property
    def over(self) -> bool:
        """Nothing is left to grant and nothing to wait for."""
        return not self.unsettled and (self.cut is not None or self.position == len(self.gangs))

    @property
    def resident(self) -> bool:
        """Whether the inputs of the next step are there (for steps that may not run ahead)."""
        step = self.position
        if any(self.gangs[p] == "granted" for p in self.index.producers[step]):
            return False
        return all(
            buffer is None or buffer.state != "promised"
            for buffer in (self.inputs[p] for p in self.index.reads[step])
        )
