"""Ways to run a training step: schedules, microbatches, and which slice has which part.

Problem: there are many, and few of them are legal.

How: the product of schedules, numbers of microbatches, cuts into neighbours and orders of slices.

Rule for maintainers: pure; a way that the step refuses is found out by making it.

Paper: section 5.3.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pathways_lab.client.lab.devices import Slice
from pathways_lab.core.errors import refused
from pathways_lab.pipeline.mpmd.step import Step
from pathways_lab.pipeline.schedules import SCHEDULES, Named

SCHEDULE, MICROBATCHES, CUT, PLACEMENT = OVER = ("schedule", "microbatches", "cut", "placement")
"""Names of what ways may differ in."""
LAYOUTS = 200
"""Ways to put parts on slices that are looked at."""

Layout = tuple[tuple[str, Slice], ...]
"""Each part with its slice."""


@dataclass(frozen=True, slots=True)
class Way:
    """schedule: None: in the order of the code.  microbatches: None: as it was."""

    schedule: Named | None
    microbatches: int | None
    layout: Layout

    def __str__(self) -> str:
        many = "" if self.microbatches is None else f", {self.microbatches} microbatches"
        own = self.schedule
        told = own if own is None or isinstance(own, str) else own.name
        return f"{told or 'as written'}{many}"


def ways(step: Step, over: Collection[str]) -> list[Way]:
    """All ways of a step; its own comes first.  over: of :data:`OVER`.

    Raises PathwaysError for a step with a schedule for each tower.
    """
    own = step.schedule
    if isinstance(own, Mapping):
        raise refused(
            f"step {step.name!r} has a schedule for each tower, and one for all is searched",
            "give the step one schedule, or None",
        )
    count = step.microbatches
    schedules: list[Named | None] = [own, *SCHEDULES] if SCHEDULE in over else [own]
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
