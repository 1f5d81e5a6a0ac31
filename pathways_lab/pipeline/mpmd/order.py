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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pathways_lab.client.lab.devices import Slice
from pathways_lab.core.errors import refused
from pathways_lab.pipeline.mpmd.work import Work, Works
from pathways_lab.pipeline.schedule import Schedule, Task
from pathways_lab.pipeline.schedules import Comparison, Named, compared, for_stages, splits

Schedules = Named | Mapping[str | tuple[str, ...], Named]
"""How the schedule of a step is given: one for all parts, or one for each tower of them."""
Reads = Mapping[Task, tuple[Task, ...]]


def split(schedule: Schedules) -> bool:
    """Whether gradients of parameters are tasks of their own.

    Raises PathwaysError where they are in one tower and not in another.
    """
    if not isinstance(schedule, Mapping):
        return splits(schedule)
    found = {names: splits(own) for names, own in schedule.items()}
    if len({*found.values()}) > 1:
        some, others = ([n for n in found if found[n] is each] for each in (True, False))
        raise refused(
            f"the schedules of {_all(some)} have tasks for gradients of parameters, and those of"
            f" {_all(others)} have not: a step has them in all towers or in none",
            "for example 'zero-bubble' for all, or '1f1b'",
        )
    return any(found.values())


@dataclass(frozen=True, slots=True, repr=False)
class StepSchedule(Schedule):
    """A schedule of a training step.  reads: by task, those whose results it reads."""

    reads: Reads

    def needs(self, task: Task) -> tuple[Task, ...]:
        return self.reads.get(task, ())


def scheduled(works: Works, on: Mapping[str, Slice], schedule: Schedules) -> StepSchedule:
    """A schedule for the works of a step.

    Raises PathwaysError for one that does not fit the parts.
    """
    tasks = _tasks(works, on)
    reads: dict[Task, dict[Task, None]] = {}
    for work, task in tasks.items():
        needs = (tasks[need] for need in _needs(work, works))
        reads.setdefault(task, {}).update((need, None) for need in needs if need != task)
    needed = {task: tuple(needs) for task, needs in reads.items()}
    if isinstance(schedule, Mapping):
        table = _towers(schedule, works, on)
    else:
        table = _one(schedule, works, on, needed)
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


def _one(given: Named, works: Works, on: Mapping[str, Slice], reads: Reads) -> Schedule:
    """One schedule of all these parts."""
    if isinstance(given, Comparison):
        return _compared(given, works, on, reads)
    return _table(given, works, on)


def _compared(given: Comparison, works: Works, on: Mapping[str, Slice], reads: Reads) -> Schedule:
    """The parts' tasks by comparison, as early as the step's own dependencies allow them."""
    rows = {place: row for row, place in enumerate(dict.fromkeys(on.values()))}
    where = tuple(rows[place] for place in on.values())
    chain = Schedule(given.name, works.microbatches, where, ())

    def needs(task: Task) -> tuple[Task, ...]:
        # A part may lack a task, as the first one does its backward work when weights are apart.
        return reads[task] if task in reads else chain.needs(task)

    return compared(given, where, works.microbatches, needs)


def _towers(
    schedule: Mapping[str | tuple[str, ...], Named], works: Works, on: Mapping[str, Slice]
) -> Schedule:
    """Each tower's own schedule, side by side."""
    stages = {part: stage for stage, part in enumerate(on)}
    where: dict[int, int] = {}
    order: list[tuple[Task, ...]] = []
    towers: dict[Slice, str] = {}
    told = []
    for key, own in schedule.items():
        names = (key,) if isinstance(key, str) else tuple(key)
        unknown = [name for name in names if name not in on]
        again = [name for name in names if stages.get(name) in where]
        if unknown or again or not names:
            what = (
                f"{_all(unknown)}, which `on` does not list"
                if unknown
                else (f"{_all(again)} for a second time" if again else "no part")
            )
            raise refused(
                f"the schedules of towers name {what}; parts are {_all(on)}",
                'schedule={("encoder", "pooler"): "1f1b", ("decoder",): "gpipe"}',
            )
        for name in names:
            if towers.setdefault(on[name], names[0]) != names[0]:
                raise refused(
                    f"the towers of {towers[on[name]]!r} and {name!r} share slice {on[name].name}:"
                    " two orders on one slice are none",
                    "give each tower slices of its own, or one schedule to both",
                )
        mine = {name: on[name] for name in names}
        table = _one(own, works, mine, {})
        where.update({stages[n]: len(order) + table.slices[s] for s, n in enumerate(names)})
        order += [
            tuple(Task(task.kind, stages[names[task.stage]], task.microbatch) for task in row)
            for row in table.order
        ]
        told.append(f"{names[0]}: {table.name}")
    if missing := [part for part in on if stages[part] not in where]:
        raise refused(
            f"no tower has {_all(missing)}", "give each part of `on` to a tower, also a single one"
        )
    rows = tuple(where[stage] for stage in range(len(on)))
    return Schedule(", ".join(told), works.microbatches, rows, tuple(order))


def _all(names: Iterable[object]) -> str:
    return ", ".join(map(repr, names))


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
        raise refused(
            f"schedule {table.name!r} is for {table.stages} stages and {table.microbatches}"
            f" microbatches, and the step has {len(on)} parts ({', '.join(on)}) and"
            f" {works.microbatches} microbatches",
            "parts are those that `on` lists; microbatches are the turns of the loop around them",
        )
    rows: dict[int, tuple[str, Slice]] = {}
    for stage, (part, place) in enumerate(on.items()):
        other, there = rows.setdefault(table.slices[stage], (part, place))
        if there is not place:
            raise refused(
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
