"""A pipeline schedule as data: who does what in which order.

Problem: GPipe, 1F1B, zero-bubble differ in nothing but the order in which each
slice does its tasks.  Written as programs that is hard to see, to compare and
to change; written as a table it can be timed, drawn and checked before anything
runs.

Rule for maintainers: a schedule is orders only; times follow from costs, by
:meth:`Schedule.timed`, and nothing here knows JAX or a cluster.

Paper: section 5.3 (pipelines, Table 2, Figure 10).
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, get_args

from pathways_lab.core.diagnosis.wait_cycles import Launch, Wait, find_cycle
from pathways_lab.core.errors import Failure, PathwaysError, refused
from pathways_lab.pipeline import drawing

Kind = Literal["forward", "backward", "weight"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_LETTERS: dict[str, Kind] = {"F": "forward", "B": "backward", "W": "weight"}


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """One stage's work on one microbatch.

    ``"backward"`` makes the gradient of the stage's input, and that of its
    parameters too unless the schedule has ``"weight"`` tasks for these.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.microbatch}/{self.stage}"


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, or any unit of time.  One number for all stages, or one per stage.

    backward: of both gradients; a schedule with weight tasks takes *weight* of
    it for these.  transfer: between two stages on different slices.
    """

    forward: float | Sequence[float] = 1
    backward: float | Sequence[float] = 2
    weight: float | Sequence[float] = 1
    transfer: float = 0

    def of(self, task: Task, split: bool) -> float:
        """How long a task takes; split: whether gradients of parameters are tasks of their own."""
        seconds = _at(getattr(self, task.kind), task.stage)
        if task.kind == "backward" and split:
            seconds -= _at(self.weight, task.stage)
        return seconds


@dataclass(frozen=True, slots=True)
class Slot:
    """A task with its time.  slice: its number, in the order of the schedule."""

    slice: int
    start: float
    end: float
    task: Task


@dataclass(frozen=True, slots=True, repr=False)
class Table:
    """A schedule with times.  slots: by start.  steps: of training, one after the other."""

    schedule: Schedule
    costs: Costs
    slots: tuple[Slot, ...]
    steps: int = 1

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return max((slot.end for slot in self.slots), default=0)

    @property
    def bubble(self) -> float:
        """The part of all slices' time in which they do nothing: 0 to 1."""
        whole = self.seconds * len(self.schedule.order)
        busy = sum(slot.end - slot.start for slot in self.slots)
        return 1 - busy / whole if whole else 0.0

    def text(self, width: int = 120) -> str:
        """A drawing in letters: a line per slice, a column per unit of time.

        Cells say the kind and the microbatch.  width: columns of text at most.
        """
        unit = min((s.end - s.start for s in self.slots if s.end > s.start), default=1)
        columns = round(self.seconds / unit)
        cell = max((len(_cell(slot.task)) for slot in self.slots), default=1) + 1
        shown = min(columns, max(1, (width - 10) // cell))
        lines = []
        for number in range(len(self.schedule.order)):
            row = ["."] * columns
            for slot in self.slots:
                if slot.slice == number:
                    for at in range(round(slot.start / unit), round(slot.end / unit)):
                        row[at] = _cell(slot.task)
            cells = "".join(entry.ljust(cell) for entry in row[:shown])
            lines.append(f"slice {number:<3} {cells}{'…' if shown < columns else ''}".rstrip())
        return "\n".join(lines)

    @property
    def title(self) -> str:
        """Its name, its bubble, its memory."""
        peak = max(self.schedule.peak, default=0)
        steps = f" over {self.steps} steps" if self.steps > 1 else ""
        bubble = f"bubble {self.bubble:.1%}{steps}"
        return f"{self.schedule.name}: {bubble}, {peak} microbatches kept at most"

    def __repr__(self) -> str:
        return f"{self.title}\n{self.text()}"

    def _repr_html_(self) -> str:
        boxes = [
            drawing.Box(s.slice, s.start, s.end, s.task.kind, str(s.task.microbatch), str(s.task))
            for s in self.slots
        ]
        drawn = drawing.svg(self.title, len(self.schedule.order), boxes)
        return f"<div>{html.escape(self.title)}</div>{drawn}"


@dataclass(frozen=True, slots=True, repr=False)
class Schedule:
    """Orders of tasks.

    name: for people.  microbatches: how many a batch is cut into.
    slices: by stage of the model, the number of the slice that it is on.
    order: by slice, its tasks in the order in which it does them.
    """

    name: str
    microbatches: int
    slices: tuple[int, ...]
    order: tuple[tuple[Task, ...], ...]
    split: bool = field(init=False)

    def __post_init__(self) -> None:
        split = any(task.kind == "weight" for tasks in self.order for task in tasks)
        object.__setattr__(self, "split", split)

    @staticmethod
    def read(name: str, text: str) -> Schedule:
        """A schedule from a drawing: a line per slice, words like ``F0``, ``B0``, ``W0``.

        A stage that is not the line's own is written behind the microbatch, as
        in ``F0/3``; dots are for the eye.  Raises PathwaysError for other words.

        >>> print(Schedule.read("mine", '''
        ...     F0 F1 .  B0 B1
        ...     .  F0 B0 F1 B1
        ... ''').problem())
        None
        """
        lines = [line.split() for line in text.strip().splitlines()]
        order = tuple(
            tuple(_task(name, word, number) for word in words if word.strip("."))
            for number, words in enumerate(lines)
        )
        tasks = [task for row in order for task in row]
        where = {task.stage: number for number, row in enumerate(order) for task in row}
        stages = range(max(where, default=-1) + 1)
        count = max((task.microbatch for task in tasks), default=-1) + 1
        return Schedule(name, count, tuple(where.get(s, s) for s in stages), order)

    def text(self) -> str:
        """The text that :meth:`read` reads, without the dots."""
        return "\n".join(
            " ".join(str(task).removesuffix(f"/{number}") for task in tasks)
            for number, tasks in enumerate(self.order)
        )

    def __repr__(self) -> str:
        return f"schedule {self.name}, a line per slice:\n{self.text()}"

    @property
    def stages(self) -> int:
        """Stages of the model."""
        return len(self.slices)

    @property
    def peak(self) -> tuple[int, ...]:
        """By slice: microbatches of a stage whose activations are kept at the same time, at most.

        Kept from a forward task to the last task that reads them.
        """
        last: Kind = "weight" if self.split else "backward"
        found = []
        for tasks in self.order:
            kept = most = 0
            for task in tasks:
                kept += (task.kind == "forward") - (task.kind == last)
                most = max(most, kept)
            found.append(most)
        return tuple(found)

    def needs(self, task: Task) -> tuple[Task, ...]:
        """The tasks whose results *task* reads."""
        stage, microbatch = task.stage, task.microbatch
        if task.kind == "forward":
            return (Task("forward", stage - 1, microbatch),) if stage else ()
        if task.kind == "weight":
            return (Task("backward", stage, microbatch),)
        own = Task("forward", stage, microbatch)
        last = stage == self.stages - 1
        return (own,) if last else (own, Task("backward", stage + 1, microbatch))

    def problem(self) -> Failure | None:
        """Why this is no schedule, or would hang; None when it is right."""
        wanted = {
            Task(kind, stage, microbatch)
            for kind in KINDS[: 3 if self.split else 2]
            for stage in range(self.stages)
            for microbatch in range(self.microbatches)
        }
        seen: set[Task] = set()
        for number, tasks in enumerate(self.order):
            for task in tasks:
                if task not in wanted:
                    return self._refused(
                        f"task {task} on slice {number} is not of its {self.stages} stages and "
                        f"{self.microbatches} microbatches",
                        "stages and microbatches count from 0",
                    )
                if self.slices[task.stage] != number:
                    return self._refused(
                        f"task {task} is on slice {number}, but stage {task.stage} is on slice "
                        f"{self.slices[task.stage]}: a stage has its parameters in one place",
                        "move it there",
                    )
                if task in seen:
                    return self._refused(f"task {task} is done twice", "do each task once")
                seen.add(task)
        if missing := sorted(wanted - seen):
            some = ", ".join(map(str, missing[:5])) + (" …" if len(missing) > 5 else "")
            return self._refused(
                f"{len(missing)} tasks are missing: {some}",
                "every stage does every microbatch forward and backward"
                + (", and its weights, when any weight task is there" if self.split else ""),
            )
        if cycle := self.cycle():
            return self._refused(
                "it would hang: " + "; ".join(_told(wait) for wait in cycle),
                "let each slice do first what others wait for",
            )
        return None

    def cycle(self) -> tuple[Wait, ...]:
        """The cycle of waits in which this schedule would hang, or ()."""
        launches = [
            Launch(task, (f"slice {number}",), self.needs(task))
            for number, tasks in enumerate(self.order)
            for task in tasks
        ]
        return find_cycle(launches, {f"slice {n}": tasks for n, tasks in enumerate(self.order)})

    def timed(self, costs: Costs | None = None, steps: int = 1) -> Table:
        """When each task runs if all start as early as the orders allow.

        steps: so many training steps, one after the other.  A slice begins the next one when it
            has ended its own part of the one before: no slice waits for all others.

        Raises PathwaysError for what :meth:`problem` finds.
        """
        problem = self.problem()
        if problem is not None:
            raise PathwaysError(problem)
        costs = costs or Costs()
        ends: dict[tuple[int, Task], float] = {}
        free = [0.0] * len(self.order)
        at = [0] * len(self.order)
        slots: list[Slot] = []
        count = steps * sum(map(len, self.order))
        while len(slots) < count:
            for number, tasks in enumerate(self.order):
                while at[number] < steps * len(tasks):
                    step, place = divmod(at[number], len(tasks))
                    task = tasks[place]
                    needs = self.needs(task)
                    if not all((step, need) in ends for need in needs):
                        break
                    ready = [
                        ends[step, n] + (costs.transfer if self.slices[n.stage] != number else 0)
                        for n in needs
                    ]
                    start = max((free[number], *ready))
                    end = start + costs.of(task, self.split)
                    slots.append(Slot(number, start, end, task))
                    ends[step, task] = free[number] = end
                    at[number] += 1
        slots.sort(key=lambda slot: (slot.start, slot.slice))
        return Table(self, costs, tuple(slots), steps)

    def linear(self) -> tuple[Task, ...]:
        """All tasks in one order that keeps every slice's own and puts producers first.

        Raises PathwaysError for what :meth:`problem` finds.
        """
        return tuple(slot.task for slot in self.timed(Costs(1, 2, 1)).slots)

    def _refused(self, what: str, remedy: str) -> Failure:
        return Failure("refused", f"schedule {self.name!r}: {what}", remedy)


def tasks(kind: Kind, stage: int, microbatches: Iterable[int]) -> tuple[Task, ...]:
    """The same kind of task of one stage for several microbatches."""
    return tuple(Task(kind, stage, microbatch) for microbatch in microbatches)


def ideal_bubble(stages: int, microbatches: int) -> Fraction:
    """The bubble of GPipe and 1F1B when all stages cost the same: (S-1)/(M+S-1)."""
    return Fraction(stages - 1, microbatches + stages - 1)


def _at(cost: float | Sequence[float], stage: int) -> float:
    return cost[stage] if isinstance(cost, Sequence) else cost


def _cell(task: Task) -> str:
    return f"{task.kind[0].upper()}{task.microbatch}"


def _told(wait: Wait) -> str:
    if wait.at is None:
        return f"{wait.gang} needs the result of {wait.behind}"
    return f"{wait.gang} comes behind {wait.behind} on {wait.at}"


def _task(name: str, word: str, line: int) -> Task:
    microbatch, _, stage = word[1:].partition("/")
    kind = _LETTERS.get(word[0].upper())
    if kind is None or not microbatch.isdecimal() or not (stage or "0").isdecimal():
        raise refused(
            f"schedule {name!r}: {word!r} on line {line + 1} is not a task",
            "write F, B or W and the microbatch, as in F0, or F0/3 for stage 3",
        )
    return Task(kind, int(stage) if stage else line, int(microbatch))
