"""Ways to run a training step: schedules, microbatches, and which slice has which part.

Problem: there are many, and few of them are legal.

How: neighbouring parts on one slice are a stage.  A known schedule of the stages becomes one of the
parts: where it has a task of a stage, the parts of the stage have one each.

Rule for maintainers: pure; a way that the step refuses is found out by making it.

Paper: section 5.3.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pathways_lab.client.lab.devices import Slice
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.pipeline.mpmd.step import Step
from pathways_lab.pipeline.schedule import Schedule, Task
from pathways_lab.pipeline.schedules import SCHEDULES, for_stages

SCHEDULE, MICROBATCHES, CUT, PLACEMENT = OVER = ("schedule", "microbatches", "cut", "placement")
"""Names of what ways may differ in."""
LAYOUTS = 200
"""Ways to put parts on slices that are looked at."""

Layout = tuple[tuple[str, Slice], ...]
"""Each part with its slice."""


@dataclass(frozen=True, slots=True)
class Way:
    """schedule: its name; None: in the order of the code.  microbatches: None: as it was."""

    schedule: str | None
    microbatches: int | None
    layout: Layout

    def __str__(self) -> str:
        many = "" if self.microbatches is None else f", {self.microbatches} microbatches"
        return f"{self.schedule or 'as written'}{many}"


def ways(step: Step, over: Collection[str]) -> list[Way]:
    """All ways of a step; its own comes first.  over: of :data:`OVER`."""
    own = step.schedule.name if isinstance(step.schedule, Schedule) else step.schedule
    count = step.microbatches
    schedules = [own, *SCHEDULES] if SCHEDULE in over else [own]
    counts = [count]
    if MICROBATCHES in over and count is not None:
        counts += [count * 2, count // 2, count * 4, count // 4]
    found = itertools.product(
        layouts(step.on, cut=CUT in over, placement=PLACEMENT in over),
        [count for count in counts if count is None or count > 0],
        schedules,
    )
    return list(dict.fromkeys(Way(schedule, many, at) for at, many, schedule in found))


def layouts(on: Mapping[str, Slice], *, cut: bool, placement: bool) -> list[Layout]:
    """Ways to put the parts on their slices; the given one comes first."""
    parts, slices = list(on), list(dict.fromkeys(on.values()))
    cuts = _cuts(parts, len(slices)) if cut else iter([[slices.index(on[p]) for p in parts]])
    orders = itertools.permutations(slices) if placement else iter([tuple(slices)])
    found = (
        tuple((part, order[at]) for part, at in zip(parts, where, strict=True))
        for where, order in itertools.product(cuts, orders)
    )
    return list(dict.fromkeys([tuple(on.items()), *itertools.islice(found, LAYOUTS)]))


def _cuts(parts: Sequence[str], slices: int) -> Iterator[list[int]]:
    """Neighbouring parts for each slice: the number of its slice, by part."""
    for ends in itertools.combinations(range(1, len(parts)), slices - 1):
        yield [sum(end <= part for end in ends) for part in range(len(parts))]


def scheduled(way: Way, microbatches: int) -> str | Schedule | None:
    """The schedule of a way, for a step.  Raises PathwaysError where its stages do not fit."""
    groups = [list(group) for _, group in itertools.groupby(way.layout, key=lambda part: part[1])]
    if way.schedule is None or len(groups) == len(way.layout):
        return way.schedule
    slices = len({on for _, on in way.layout})
    made = for_stages(way.schedule, len(groups), slices, microbatches)
    if made.stages != len(groups):
        raise PathwaysError(
            Failure(
                "refused",
                f"{way.schedule} has {made.stages} stages; {len(groups)} are on {slices} slices",
                "take another schedule",
            )
        )
    return spread(made, [len(group) for group in groups])


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
