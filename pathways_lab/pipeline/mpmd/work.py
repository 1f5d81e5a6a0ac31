"""Which marked call is which: part, direction and microbatch.

Problem: a schedule speaks of the forward and the backward work of a stage on a microbatch.  A
training step written for one device has no such numbers: microbatches are turns of a loop, in
Python or in JAX, and what ``jax.grad`` adds comes in JAX's own order.

How: equal forward calls of one part, none of which needs another, are its microbatches; where parts
differ in how many they have, most parts are right.  A backward call belongs to the forward call
whose results it reads.  Microbatches are numbered in the order in which gradients are summed, so
that schedules, which count upwards, sum in that order.

Rule for maintainers: what cannot be told has no number; it is right in any order that keeps
dependencies.

Paper: section 5.3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pathways_lab.pipeline.mpmd.flat import Equation, Variable
from pathways_lab.pipeline.schedule import Kind


@dataclass(eq=False, slots=True)
class Work:
    """A marked call.  bit: it alone, in sets of works.  needs: the works whose results it reads,
    also by way of equations without a mark."""

    equation: Equation
    part: str
    kind: Kind
    bit: int
    needs: int
    microbatch: int | None = None


@dataclass(slots=True)
class Works:
    """All marked calls, in the order of the step.  microbatches: how many each part has.

    of: by equation.  needs: of each variable, the works that it is made of.
    turns: of each variable, the microbatches that it is made of, as bits.
    """

    all: list[Work]
    microbatches: int
    of: dict[Equation, Work]
    needs: dict[Variable, int] = field(default_factory=dict)
    turns: dict[Variable, int] = field(default_factory=dict)

    @property
    def every(self) -> int:
        """All microbatches, as bits."""
        return (1 << self.microbatches) - 1

    def members(self, bits: int) -> Iterator[Work]:
        """The works of a set."""
        while bits:
            low = bits & -bits
            yield self.all[low.bit_length() - 1]
            bits ^= low


def works(
    equations: Sequence[Equation],
    alike: Callable[[Equation], Hashable],
    microbatches: int | None = None,
) -> Works:
    """The marked calls among equations.  alike: equal for calls that compute the same.

    microbatches: how many a schedule has; None: as the equations say.
    """
    found = Works([], 1, {})
    for equation in equations:
        needs = 0
        for variable in equation.read:
            needs |= found.needs.get(variable, 0)
        if equation.mark is not None:
            made = Work(equation, equation.mark, equation.kind, 1 << len(found.all), needs)
            found.all.append(made)
            found.of[equation] = made
            needs = made.bit
        found.needs.update(dict.fromkeys(equation.results, needs))
    _number(found, alike, microbatches)
    for equation in equations:
        turns = 0
        for variable in equation.read:
            turns |= found.turns.get(variable, 0)
        if (work := found.of.get(equation)) is not None:
            turns = 0 if work.microbatch is None else 1 << work.microbatch
        found.turns.update(dict.fromkeys(equation.results, turns))
    return found


def _number(found: Works, alike: Callable[[Equation], Hashable], wanted: int | None) -> None:
    groups: dict[Any, list[Work]] = {}
    for work in found.all:
        if work.kind == "forward":
            groups.setdefault((work.part, alike(work.equation)), []).append(work)
    before = {
        work: [need for need in found.members(work.needs) if need.kind == "forward"]
        for group in groups.values()
        for work in group
    }
    ordered = [work for work in found.all if work in before]
    levels = {key: _levels(group, ordered, before) for key, group in groups.items()}
    found.microbatches = _count(groups, levels, wanted)
    for key, group in groups.items():
        whole = any(len(level) % found.microbatches for level in levels[key])
        for level in [group] if whole else levels[key]:
            each, rest = divmod(len(level), found.microbatches)
            if not rest:  # else it is done once for all microbatches, or for some
                for number, work in enumerate(level):
                    work.microbatch = number // each
    for work in found.all:
        if work.kind != "forward":
            work.microbatch = _of_backward(work, found)
    _renumber(found)


def _count(
    groups: dict[Any, list[Work]], levels: dict[Any, list[list[Work]]], wanted: int | None
) -> int:
    """How many microbatches most parts have; *wanted* where equal calls are so many.

    Once for each microbatch is more than once for all, where as many parts have one as the other.
    """
    if wanted is not None and wanted in map(len, groups.values()):
        return wanted
    counts: dict[str, int] = {}
    for (part, _), own in levels.items():
        counts[part] = max(counts.get(part, 1), *map(len, own))
    often = Counter(counts.values())
    most = [count for count, times in often.items() if times == max(often.values())]
    return min((count for count in most if count > 1), default=1)


def _levels(
    group: list[Work], ordered: list[Work], before: dict[Work, list[Work]]
) -> list[list[Work]]:
    """The calls of a group that need none of it, those that need one of these, and so on."""
    own = set(group)
    depth: dict[Work, int] = {}
    levels: dict[int, list[Work]] = {}
    for work in ordered:
        behind = max((depth[need] for need in before[work]), default=0)
        depth[work] = behind + (work in own)
        if work in own:
            levels.setdefault(behind, []).append(work)
    return list(levels.values())


def _of_backward(work: Work, found: Works) -> int | None:
    """The microbatch of the forward calls that it reads; else of all that it reads."""
    needs = list(found.members(work.needs))
    own = [need for need in needs if need.part == work.part and need.kind == "forward"]
    for several in (own, needs):
        numbers = Counter(n.microbatch for n in several if n.microbatch is not None)
        if len(numbers) == 1:
            return next(iter(numbers))
    return None


def _renumber(found: Works) -> None:
    order: dict[str, list[int]] = {}
    for work in found.all:
        if work.kind != "forward" and work.microbatch is not None:
            seen = order.setdefault(work.part, [])
            if work.microbatch not in seen:
                seen.append(work.microbatch)
    whole = (seen for seen in order.values() if len(seen) == found.microbatches)
    numbers = {old: new for new, old in enumerate(next(whole, ()))}
    for work in found.all:
        if work.microbatch is not None:
            work.microbatch = numbers.get(work.microbatch, work.microbatch)
