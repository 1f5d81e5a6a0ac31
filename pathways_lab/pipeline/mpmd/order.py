"""The order of marked calls: as they were written, or as a schedule says.

Problem: a loop over microbatches that does one after the other leaves all slices but one idle.

How: a schedule is a table of tasks (stage, microbatch, direction); here stages are the parts, as
``on`` lists them.  The step itself says what a task needs: so a part may skip over stages, or be
a tower of its own, and a table that would hang on the step's own dependencies is refused before
anything runs.

Rule for maintainers: tables come from :mod:`pathways_lab.pipeline.schedules`, one's own included.

Paper: section 5.3.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pathways_lab.client.lab.devices import Slice
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.pipeline.mpmd.work import Work, Works
from pathways_lab.pipeline.schedule import Schedule, Task
from pathways_lab.pipeline.schedules import for_stages


@dataclass(frozen=True, slots=True, repr=False)
class StepSchedule(Schedule):
    """A schedule of a training step.  reads: by task, those whose results it reads."""

    reads: Mapping[Task, tuple[Task, ...]]

    def needs(self, task: Task) -> tuple[Task, ...]:
        return self.reads.get(task, ())


def scheduled(works: Works, on: Mapping[str, Slice], schedule: str | Schedule) -> StepSchedule:
    """A schedule for the works of a step.

    Raises PathwaysError for one that does not fit the parts.
    """
    tasks = _tasks(works, on)
    reads: dict[Task, dict[Task, None]] = {}
    for work, task in tasks.items():
        needs = (tasks[need] for need in _needs(work, works))
        reads.setdefault(task, {}).update((need, None) for need in needs if need != task)
    table = _table(schedule, works, on)
    needed = {task: tuple(needs) for task, needs in reads.items()}
    return StepSchedule(table.name, table.microbatches, table.slices, table.order, needed)


def ordered(works: Works, on: Mapping[str, Slice], schedule: StepSchedule) -> list[Work]:
    """The works in the order of a schedule; those without a task as early as they are needed.

    Raises PathwaysError for a schedule that would hang.
    """
    by_task: dict[Task, list[Work]] = {}
    for work, task in _tasks(works, on).items():
        by_task.setdefault(task, []).append(work)
    found: dict[Work, None] = {}
    for task in schedule.linear():
        for work in by_task.get(task, ()):
            _add(work, works, found)
    for work in works.all:
        _add(work, works, found)
    return list(found)


def _tasks(works: Works, on: Mapping[str, Slice]) -> dict[Work, Task]:
    stages = {part: stage for stage, part in enumerate(on)}
    return {
        work: Task(work.kind, stages[work.part], work.microbatch)
        for work in works.all
        if work.microbatch is not None
    }


def _needs(work: Work, works: Works) -> Iterator[Work]:
    """The works with a microbatch that a work needs, also by way of those without one."""
    todo, seen = work.needs, 0
    while todo:
        low = todo & -todo
        seen |= low
        (need,) = works.members(low)
        if need.microbatch is None:
            todo |= need.needs & ~seen
        else:
            yield need
        todo &= ~seen


def _add(work: Work, works: Works, found: dict[Work, None]) -> None:
    """A work, behind all that it needs."""
    todo = [work]
    while todo:
        missing = [need for need in works.members(todo[-1].needs) if need not in found]
        if missing:
            todo += missing
        else:
            found[todo.pop()] = None


def _table(schedule: str | Schedule, works: Works, on: Mapping[str, Slice]) -> Schedule:
    """The table for as many stages as there are parts; it fits their slices.

    In a known schedule neighbours on one slice are a stage; where it has a task of the stage, the
    parts have one each.
    """
    slices = list(dict.fromkeys(on.values()))
    if isinstance(schedule, Schedule):
        table = schedule
    else:
        groups = [len(list(group)) for _, group in itertools.groupby(on.values())]
        table = for_stages(schedule, len(groups), len(slices), works.microbatches)
        if table.stages == len(groups):
            table = spread(table, groups)
    if (table.stages, table.microbatches) != (len(on), works.microbatches):
        raise _refused(
            f"schedule {table.name!r} is for {table.stages} stages and {table.microbatches}"
            f" microbatches, and the step has {len(on)} parts ({', '.join(on)}) and"
            f" {works.microbatches} microbatches",
            "parts are those that `on` lists; microbatches are the turns of the loop around them",
        )
    rows: dict[int, tuple[str, Slice]] = {}
    for stage, (part, place) in enumerate(on.items()):
        other, there = rows.setdefault(table.slices[stage], (part, place))
        if there is not place:
            raise _refused(
                f"schedule {table.name!r} has parts {other!r} and {part!r} on one slice, and `on`"
                f" puts them on {there.name} and {place.name}",
                "list the parts of `on` in the order of the stages",
            )
    return table


def spread(schedule: Schedule, sizes: Sequence[int]) -> Schedule:
    """The schedule of stages as one of their parts.  sizes: how many parts each stage has."""
    firsts = list(itertools.accumulate(sizes, initial=0))

    def tasks(task: Task) -> Iterator[Task]:
        parts = range(firsts[task.stage], firsts[task.stage + 1])
        for part in parts if task.kind == "forward" else reversed(parts):
            yield Task(task.kind, part, task.microbatch)

    where = [at for at, size in zip(schedule.slices, sizes, strict=True) for _ in range(size)]
    order = tuple(tuple(t for task in row for t in tasks(task)) for row in schedule.order)
    return Schedule(schedule.name, schedule.microbatches, tuple(where), order)


def _refused(message: str, remedy: str) -> PathwaysError:
    return PathwaysError(Failure("refused", message, remedy))
