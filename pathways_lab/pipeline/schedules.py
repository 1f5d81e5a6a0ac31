"""The known schedules: GPipe, circular, 1F1B and its kinds, zero-bubble; and by comparison.

Problem: each is a paper with pictures; here each is a function that returns a
table, so that they can be put side by side.

Rule for maintainers: what a paper promises of bubble and memory is a test.

Paper: section 5.3.  Sources: Huang et al. 2019 (GPipe, arXiv 1811.06965);
Narayanan et al. 2019 and 2021 (1F1B, and interleaved: arXiv 2104.04473);
Qi et al. 2023 (zero bubble, ZB-H1 and ZB-H2: arXiv 2401.10241); DeepSeek-AI 2024 and Qi et al.
2025 (DualPipe: arXiv 2412.19437, and its half, DualPipeV); Xu et al. 2021 (circular: GSPMD,
arXiv 2105.04663); Zhuang et al. 2022 (eager 1F1B: arXiv 2211.05322).
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from pathways_lab.core.errors import refused
from pathways_lab.pipeline.schedule import KINDS, Kind, Schedule, Task, tasks


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All microbatches forward, then all backward.  Keeps every microbatch's activations."""
    _check("gpipe", stages, microbatches)
    every = range(microbatches)
    order = (tasks("forward", s, every) + tasks("backward", s, every) for s in range(stages))
    return Schedule("gpipe", microbatches, tuple(range(stages)), tuple(order))


def one_forward_one_backward(stages: int, microbatches: int) -> Schedule:
    """1F1B: after a warm-up each slice alternates; it keeps at most *stages* microbatches."""
    return _one_by_one("1f1b", stages, microbatches, lambda stage: stages - stage - 1)


def eager_one_forward_one_backward(stages: int, microbatches: int) -> Schedule:
    """Eager 1F1B: 1F1B with a warm-up twice as long, which hides the time of transfers.

    The first slice keeps ``2 * stages - 1`` microbatches, where 1F1B keeps *stages*.
    """
    return _one_by_one("eager-1f1b", stages, microbatches, lambda stage: 2 * (stages - stage - 1))


def circular(slices: int, microbatches: int, chunks: int = 2) -> Schedule:
    """GPipe with *chunks* stages on every slice: all microbatches go around the slices.

    Stage ``c * slices + s`` is on slice ``s``.  The bubble is that of GPipe, in units of a
    stage, which is *chunks* times smaller.
    """
    _check("circular", slices, microbatches)
    if chunks < 1:
        raise refused(f"circular with {chunks} stages on a slice", "give 1 or more")
    every = range(microbatches)
    order = []
    for s in range(slices):
        own = [c * slices + s for c in range(chunks)]
        forward = [task for stage in own for task in tasks("forward", stage, every)]
        backward = [task for stage in reversed(own) for task in tasks("backward", stage, every)]
        order.append((*forward, *backward))
    where = tuple(stage % slices for stage in range(slices * chunks))
    return Schedule("circular", microbatches, where, tuple(order))


def interleaved(slices: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B with *chunks* stages on every slice: a smaller bubble for more transfers.

    Stage ``c * slices + s`` is on slice ``s``.  microbatches: a multiple of *slices*.
    """
    _check("interleaved", slices, microbatches)
    if chunks < 1 or microbatches % slices:
        raise refused(
            f"interleaved 1F1B of {microbatches} microbatches over {slices} slices with "
            f"{chunks} stages each: microbatches must be a multiple of the slices, and "
            "each slice needs a stage",
            f"for example {slices * max(1, round(microbatches / slices))} microbatches",
        )
    group = slices * chunks
    units = [
        (unit % group // slices, unit // group * slices + unit % slices)
        for unit in range(microbatches * chunks)
    ]
    order = []
    for s in range(slices):
        forward = tuple(Task("forward", c * slices + s, m) for c, m in units)
        backward = tuple(Task("backward", (chunks - 1 - c) * slices + s, m) for c, m in units)
        warm_up = 2 * (slices - s - 1) + (chunks - 1) * slices
        order.append(_alternate(forward, backward, warm_up))
    where = tuple(stage % slices for stage in range(slices * chunks))
    return Schedule("interleaved", microbatches, where, tuple(order))


def zero_bubble(stages: int, microbatches: int) -> Schedule:
    """ZB-H1: gradients of parameters are tasks of their own and fill the bubble.

    Keeps at most *stages* microbatches on every slice, as 1F1B does on the
    first.  With equal costs the bubble is a third of 1F1B's.
    """
    _check("zero-bubble", stages, microbatches)
    return _filled("zero-bubble", stages, microbatches, lambda stage: stages - stage, stages)


def zero_bubble_h2(stages: int, microbatches: int) -> Schedule:
    """ZB-H2: with twice the memory of ZB-H1 no slice is idle between its first and last task.

    Keeps at most ``2 * stages - 1`` microbatches on every slice.  Slices begin and end one after
    the other, so the bubble is gone where step follows step (``timed(steps=10)``), with
    equal costs and ``2 * stages - 1`` microbatches or more.
    """
    _check("zb-h2", stages, microbatches)
    most = 2 * stages - 1
    return _filled("zb-h2", stages, microbatches, lambda stage: 2 * (stages - stage) - 1, most)


def dual_pipe_v(slices: int, microbatches: int) -> Schedule:
    """DualPipeV: two stages on every slice, in a V: the first slice has the first and the last.

    A microbatch goes down the slices and up again, so each slice has forward work of one half
    beside backward work of the other.  Keeps ``2 * slices + 1`` microbatches of a stage (each half
    of a slice's model) on every slice.  microbatches: at least twice the slices.
    """
    _check("dualpipev", slices, microbatches)
    if microbatches < 2 * slices:
        raise refused(
            f"DualPipeV of {microbatches} microbatches over {slices} slices: it needs two "
            "microbatches for each slice",
            f"for example {2 * slices} microbatches",
        )
    order = tuple(_dual(slices, s, microbatches) for s in range(slices))
    where = (*range(slices), *reversed(range(slices)))
    return Schedule("dualpipev", microbatches, where, order)


def _dual(slices: int, number: int, microbatches: int) -> tuple[Task, ...]:
    """The order of one slice, in the phases of the source.

    The slices behind it fix the length of each phase: they have to be filled, and emptied.
    """
    down, up = number, 2 * slices - 1 - number
    behind, before = slices - number - 1, number + 1
    made: list[Task] = []
    counts = {(kind, stage): 0 for kind in KINDS for stage in (down, up)}
    later: list[Task] = []

    def do(kind: Kind, stage: int) -> Task:
        task = Task(kind, stage, counts[kind, stage])
        counts[kind, stage] += 1
        made.append(task)
        return task

    def forward(stage: int) -> None:
        do("forward", stage)

    def backward(stage: int, *, now: bool) -> None:
        """now: with the gradients of parameters, which else fill a bubble later."""
        weight = Task("weight", stage, do("backward", stage).microbatch)
        (made if now else later).append(weight)

    for _ in range(2 * behind):
        forward(down)
    for _ in range(before):
        forward(down)
        forward(up)
    for _ in range(behind):
        backward(up, now=False)
        made.append(later.pop(0))
        forward(up)
    for _ in range(microbatches - 2 * slices + before):
        forward(down)
        backward(up, now=True)
        forward(up)
        backward(down, now=True)
    for _ in range(behind):
        backward(up, now=True)
        forward(up)
        backward(down, now=True)
    for turn in range(2 * before):
        backward((up, down)[turn % 2], now=turn < before)
    for _ in range(behind):
        made.append(later.pop(0))
        backward(down, now=False)
    return (*made, *later)


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "circular": circular,
    "1f1b": one_forward_one_backward,
    "eager-1f1b": eager_one_forward_one_backward,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
    "zb-h2": zero_bubble_h2,
    "dualpipev": dual_pipe_v,
}
"""By name: of how many slices, and how many microbatches."""

_CHUNKED: dict[str, Callable[[int, int, int], Schedule]] = {
    "circular": circular,
    "interleaved": interleaved,
    "dualpipev": lambda slices, microbatches, chunks: dual_pipe_v(slices, microbatches),
}
"""Those with several stages on a slice, by how many."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A schedule by comparison: of the tasks that a slice can do, it does the one that goes first.

    before: ``before(task, other)``, whether *task* goes before *other*; of two that go before
        neither, the one that could be done earlier.
    split: gradients of parameters are tasks of their own (``"weight"``).
    name: for people.

    Each task counts as one unit of time, and can be done when those are over whose results it
    reads.  A slice that can do something never waits.

    >>> depth_first = pw.pipeline.Comparison(lambda a, b: a.microbatch < b.microbatch)
    >>> step = pw.mpmd.jit(train_step, on=on, schedule=depth_first)          # doctest: +SKIP
    """

    before: Callable[[Task, Task], bool]
    split: bool = False
    name: str = "comparison"

    def __post_init__(self) -> None:
        if not callable(self.before):
            raise refused(
                f"a schedule by comparison compares with {self.before!r:.80}, which is no function",
                "Comparison(lambda task, other: task.microbatch < other.microbatch)",
            )


Named = str | Schedule | Comparison
"""How a schedule is given: by name, as a table, by comparison."""


def compared(
    given: Comparison,
    slices: Sequence[int],
    microbatches: int,
    needs: Callable[[Task], Iterable[Task]] | None = None,
) -> Schedule:
    """The schedule of a comparison.

    slices: by stage, the number of its slice.  needs: by task, those whose results it reads; those
    of stages in a row without it.
    """
    every = range(microbatches)
    kinds = KINDS[: 3 if given.split else 2]
    known = [task for stage in range(len(slices)) for k in kinds for task in tasks(k, stage, every)]
    chain = Schedule(given.name, microbatches, tuple(slices), ())
    reads = {task: {*(chain.needs if needs is None else needs)(task)} for task in known}
    readers: dict[Task, list[Task]] = {}
    for task, missing in reads.items():
        for need in missing:
            readers.setdefault(need, []).append(task)

    def order(one: Task, other: Task) -> int:
        return given.before(other, one) - given.before(one, other)

    key = functools.cmp_to_key(order)
    could: list[list[tuple[Any, int, Task]]] = [[] for _ in range(max(slices) + 1)]
    done: list[list[Task]] = [[] for _ in could]
    number = 0
    over = [task for task in known if not reads[task]]
    while over or any(could):
        for task in over:
            heapq.heappush(could[slices[task.stage]], (key(task), number, task))
            number += 1
        now = [(row, heapq.heappop(heap)[-1]) for row, heap in enumerate(could) if heap]
        over = []
        for row, task in now:
            done[row].append(task)
            for reader in readers.get(task, ()):
                reads[reader].discard(task)
                if not reads[reader]:
                    over.append(reader)
    return Schedule(given.name, microbatches, tuple(slices), tuple(map(tuple, done)))


def called(given: Named, slices: int, microbatches: int) -> Schedule:
    """The schedule of that name; one's own as it is.  Raises PathwaysError for unknown names."""
    if isinstance(given, Schedule):
        return given
    if isinstance(given, Comparison):
        return compared(given, range(slices), microbatches)
    make = SCHEDULES.get(given) if isinstance(given, str) else None
    if make is None:
        raise refused(
            f"there is no schedule called {given!r}",
            f"one of {', '.join(SCHEDULES)}, a Schedule of your own, or a Comparison",
        )
    return make(slices, microbatches)


def for_stages(given: Named, stages: int, slices: int, microbatches: int) -> Schedule:
    """The schedule of that name for so many stages of a model, on so many slices.

    Raises PathwaysError for unknown names.
    """
    if isinstance(given, str) and given in _CHUNKED:
        return _CHUNKED[given](slices, microbatches, max(1, stages // slices))
    return called(given, stages, microbatches)


def splits(given: Named) -> bool:
    """Whether gradients of parameters are tasks of their own."""
    if not isinstance(given, str):
        return given.split
    return given in SCHEDULES and SCHEDULES[given](1, 2).split


def _filled(
    name: str, stages: int, microbatches: int, ahead: Callable[[int], int], kept: int
) -> Schedule:
    """Forward work first, then backward, and weights where neither is ready.

    ahead: microbatches of a stage between their forward and backward work, at most.
    kept: between their forward work and their weights.
    """
    done: dict[Task, int] = {}
    order: list[list[Task]] = [[] for _ in range(stages)]
    count: list[dict[Kind, int]] = [dict.fromkeys(KINDS, 0) for _ in range(stages)]

    def ready(kind: Kind, stage: int, time: int) -> bool:
        mine = count[stage]
        number = mine[kind]
        if number == microbatches:
            return False
        if kind == "weight":
            return number < mine["backward"]
        if kind == "backward":
            before = Task("backward", stage + 1, number)
            return number < mine["forward"] and (
                stage == stages - 1 or done.get(before, time + 1) <= time
            )
        before = Task("forward", stage - 1, number)
        return (
            number - mine["backward"] < ahead(stage)
            and number - mine["weight"] < kept
            and (stage == 0 or done.get(before, time + 1) <= time)
        )

    time = 0
    while any(row["weight"] < microbatches for row in count):
        for stage in range(stages):
            for kind in KINDS:
                if ready(kind, stage, time):
                    task = Task(kind, stage, count[stage][kind])
                    order[stage].append(task)
                    count[stage][kind] += 1
                    done[task] = time + 1
                    break
        time += 1
    return Schedule(name, microbatches, tuple(range(stages)), tuple(map(tuple, order)))


def _one_by_one(
    name: str, stages: int, microbatches: int, warm_up: Callable[[int], int]
) -> Schedule:
    """Each slice alternates after its warm-up.  warm_up: by stage, forward tasks."""
    _check(name, stages, microbatches)
    order = []
    for stage in range(stages):
        forward = tasks("forward", stage, range(microbatches))
        backward = tasks("backward", stage, range(microbatches))
        order.append(_alternate(forward, backward, warm_up(stage)))
    return Schedule(name, microbatches, tuple(range(stages)), tuple(order))


def _alternate(
    forward: tuple[Task, ...], backward: tuple[Task, ...], warm_up: int
) -> tuple[Task, ...]:
    """*warm_up* forward tasks, then one of each in turn, then what is left."""
    warm_up = min(warm_up, len(forward))
    found = list(forward[:warm_up])
    for one, other in zip(forward[warm_up:], backward, strict=False):
        found += (one, other)
    return (*found, *backward[len(forward) - warm_up :])


def _counts(number: Any) -> bool:
    return isinstance(number, Integral) and int(number) >= 1


def _check(name: str, stages: int, microbatches: int) -> None:
    if not (_counts(stages) and _counts(microbatches)):
        raise refused(
            f"{name} of {stages} stages and {microbatches} microbatches: both are whole numbers"
            " from 1 on",
            "for example 4 stages and 16 microbatches",
        )
