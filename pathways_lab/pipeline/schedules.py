"""The known schedules: GPipe, 1F1B, interleaved 1F1B, zero-bubble.

Problem: each is a paper with pictures; here each is a function that returns a
table, so that they can be put side by side.

Rule for maintainers: what a paper promises of bubble and memory is a test.

Paper: section 5.3.  Sources: Huang et al. 2019 (GPipe, arXiv 1811.06965);
Narayanan et al. 2019 and 2021 (1F1B, and interleaved: arXiv 2104.04473);
Qi et al. 2023 (zero bubble: arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable

from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.pipeline.schedule import Schedule, Task, tasks


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All microbatches forward, then all backward.  Keeps every microbatch's activations."""
    _check("gpipe", stages, microbatches)
    every = range(microbatches)
    order = (tasks("forward", s, every) + tasks("backward", s, every) for s in range(stages))
    return Schedule("gpipe", microbatches, tuple(range(stages)), tuple(order))


def one_forward_one_backward(stages: int, microbatches: int) -> Schedule:
    """1F1B: after a warm-up each slice alternates; it keeps at most *stages* microbatches."""
    _check("1f1b", stages, microbatches)
    order = []
    for stage in range(stages):
        forward = tasks("forward", stage, range(microbatches))
        backward = tasks("backward", stage, range(microbatches))
        order.append(_alternate(forward, backward, stages - stage - 1))
    return Schedule("1f1b", microbatches, tuple(range(stages)), tuple(order))


def interleaved(slices: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B with *chunks* stages on every slice: a smaller bubble for more transfers.

    Stage ``c * slices + s`` is on slice ``s``.  microbatches: a multiple of *slices*.
    """
    _check("interleaved", slices, microbatches)
    if chunks < 1 or microbatches % slices:
        raise PathwaysError(
            Failure(
                "refused",
                f"interleaved 1F1B of {microbatches} microbatches over {slices} slices with "
                f"{chunks} stages each: microbatches must be a multiple of the slices, and "
                "each slice needs a stage",
                f"for example {slices * max(1, round(microbatches / slices))} microbatches",
            )
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
    done: dict[Task, int] = {}
    order: list[list[Task]] = [[] for _ in range(stages)]
    count = [{"forward": 0, "backward": 0, "weight": 0} for _ in range(stages)]

    def ready(kind: str, stage: int, time: int) -> bool:
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
            number - mine["backward"] < stages - stage
            and number - mine["weight"] < stages
            and (stage == 0 or done.get(before, time + 1) <= time)
        )

    time = 0
    while any(row["weight"] < microbatches for row in count):
        for stage in range(stages):
            for kind in ("forward", "backward", "weight"):
                if ready(kind, stage, time):
                    task = Task(kind, stage, count[stage][kind])
                    order[stage].append(task)
                    count[stage][kind] += 1
                    done[task] = time + 1
                    break
        time += 1
    return Schedule("zero-bubble", microbatches, tuple(range(stages)), tuple(map(tuple, order)))


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}
"""By name: of how many slices, and how many microbatches."""


def called(given: str | Schedule, slices: int, microbatches: int) -> Schedule:
    """The schedule of that name; one's own as it is.  Raises PathwaysError for unknown names."""
    if isinstance(given, Schedule):
        return given
    make = SCHEDULES.get(given)
    if make is None:
        raise PathwaysError(
            Failure(
                "refused",
                f"there is no schedule called {given!r}",
                f"one of {', '.join(SCHEDULES)}, or a Schedule of your own",
            )
        )
    return make(slices, microbatches)


def _alternate(
    forward: tuple[Task, ...], backward: tuple[Task, ...], warm_up: int
) -> tuple[Task, ...]:
    """*warm_up* forward tasks, then one of each in turn, then what is left."""
    warm_up = min(warm_up, len(forward))
    found = list(forward[:warm_up])
    for one, other in zip(forward[warm_up:], backward, strict=False):
        found += (one, other)
    return (*found, *backward[len(forward) - warm_up :])


def _check(name: str, stages: int, microbatches: int) -> None:
    if stages < 1 or microbatches < 1:
        raise PathwaysError(
            Failure(
                "refused",
                f"{name} of {stages} stages and {microbatches} microbatches: both are at least 1",
                "for example 4 stages and 16 microbatches",
            )
        )
