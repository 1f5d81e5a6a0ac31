"""Stretches of a plan: gangs that a host may launch one after the other, unasked.

Problem: to find the waits, the failures and the last uses of a gang costs more
than a small gang takes; and most gangs wait for nothing but the one
before them, on the same devices.

How: once per plan and window, maximal ranges of such gangs are found.  A value
that is made and dropped inside of one is a *cell*, a number in a list, and
only the launching thread ever sees it.  To the launcher a stretch in
progress is one unit in the order (:class:`pathways_lab.executor.steps.Segment`).

A gang that calls back into Python, or must meet other hosts before is a stretch by
itself; transfers are in none.  Where a stretch begins and ends may differ between the
hosts of a slice: the order of their launches does not.

A gang that donates is like any other, for a donated value has no later reader.  Its results
take the bytes of what it was given, so a loop that donates its state adds nothing to them.

Rule for maintainers: pure, and worked out once.

Paper: section 4.5 (parallel asynchronous dispatch).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from pathways_lab.core.program.program import Call, Plan, ValueId


@dataclass(frozen=True, slots=True)
class Part:
    """One gang of a stretch.

    index: its step in the plan.
    inputs, outputs: cells.
    clears: cells that no later part reads.
    exports: positions in its outputs, and the values that outlive the stretch.
    releases: cells of values from outside that no later part reads.
    frees: values that others know too, and that die with it.
    gives: cells that it donates.  made: bytes per device of its outputs.
    """

    index: int
    call: Call
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    clears: tuple[int, ...]
    exports: tuple[tuple[int, ValueId], ...]
    releases: tuple[int, ...]
    frees: tuple[ValueId, ...]
    gives: tuple[int, ...]
    made: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive gangs on one slice.

    externals: values from outside; the first cells are theirs, in this order.
    later: cells of those that the first part does not read.
    exports: values that outlive it.  functions: those of its gangs.
    gives: cells of externals that it donates.
    sizes: bytes per device, by cell.  read: of its externals; kept: of its exports;
        grows: of what it makes beyond what it makes in donated arrays; most: the same if all
        that it is given from outside must survive.
    seen: positions of parts that touch what others know.
    bundled: some of its values are bundles.
    """

    parts: tuple[Part, ...]
    externals: tuple[ValueId, ...]
    exports: tuple[ValueId, ...]
    later: tuple[int, ...]
    functions: tuple[str, ...]
    gives: tuple[int, ...]
    sizes: tuple[int, ...]
    read: int
    kept: int
    grows: int
    most: int
    seen: tuple[int, ...]
    bundled: bool = False

    @property
    def first(self) -> Call:
        """The call of the first part."""
        return self.parts[0].call


def growth(parts: Sequence[Part], sizes: Sequence[int], copies: Collection[int]) -> int:
    """Bytes of what they make beyond what they make in donated arrays.

    sizes: by cell.  copies: cells that survive their donation.
    """
    found = 0
    for part in parts:
        given = sum([sizes[cell] for cell in part.gives if cell not in copies])
        found += max(part.made - given, 0)
    return found


def stretches(
    plan: Plan,
    first: int,
    last: int,
    ours: Sequence[bool],
    plain: Callable[[Call], bool],
    decides: Callable[[int], Sequence[ValueId]],
) -> dict[int, Stretch]:
    """The stretches of steps *first* to *last* (exclusive), by their first step.

    ours: by step, whether it runs here.  plain(call): whether it need not go alone.
    decides: values that are asked for when they are made, by the steps that make some.
    """
    return {
        begin: _stretch(plan, begin, end, decides)
        for begin, end in _ranges(plan, first, min(last, len(plan.steps)), ours, plain)
    }


def _ranges(
    plan: Plan, first: int, last: int, ours: Sequence[bool], plain: Callable[[Call], bool]
) -> Iterator[tuple[int, int]]:
    gangs = {
        index: node
        for index in range(first, last)
        if ours[index] and isinstance(node := plan.steps[index].node, Call)
    }
    joins = {i: call.slice for i, call in gangs.items() if plain(call)}
    begin = first
    while begin < last:
        end = begin + 1
        if begin in joins:
            while joins.get(end) == joins[begin]:
                end += 1
        if begin in gangs:
            yield begin, end
        begin = end


def _stretch(
    plan: Plan, begin: int, end: int, decides: Callable[[int], Sequence[ValueId]]
) -> Stretch:
    calls = [(i, s.node) for i, s in enumerate(plan.steps[begin:end], begin)]
    gangs = [(index, node) for index, node in calls if isinstance(node, Call)]
    freed = {value for step in plan.steps[begin:end] for value in step.frees}
    made = {value for _, call in gangs for value in call.outputs}
    outlive = {v for v in made if v not in freed or v in plan.outputs}
    outlive |= {value for index, _ in gangs for value in decides(index)}
    read = dict.fromkeys(v for _, call in gangs for v in call.inputs)
    externals = tuple(v for v in read if v not in made)
    cells = {value: cell for cell, value in enumerate(externals)}
    for _, call in gangs:
        for value in call.outputs:
            cells.setdefault(value, len(cells))
    last_use: dict[ValueId, int] = {}
    for index, call in gangs:
        last_use.update(dict.fromkeys((*call.inputs, *call.outputs), index))
    sizes = tuple(plan.values[v].nbytes for v in cells)
    parts = []
    for index, call in gangs:
        over = sorted(cells[v] for v, at in last_use.items() if at == index)
        parts.append(
            Part(
                index,
                call,
                tuple(cells[v] for v in call.inputs),
                tuple(cells[v] for v in call.outputs),
                tuple(over),
                tuple((p, v) for p, v in enumerate(call.outputs) if v in outlive),
                tuple(cell for cell in over if cell < len(externals)),
                tuple(v for v in plan.steps[index].frees if v in outlive or v not in made),
                tuple(cells[call.inputs[p]] for p in call.donated),
                sum(plan.values[v].nbytes for v in call.outputs),
            )
        )
    gives = tuple(cell for part in parts for cell in part.gives if cell < len(externals))
    at_once = set(parts[0].inputs)
    return Stretch(
        tuple(parts),
        externals,
        tuple(v for part in parts for _, v in part.exports),
        tuple(cell for cell in range(len(externals)) if cell not in at_once),
        tuple(dict.fromkeys(call.function for _, call in gangs)),
        gives,
        sizes,
        sum(sizes[: len(externals)]),
        sum(plan.values[v].nbytes for v in outlive),
        growth(parts, sizes, ()),
        growth(parts, sizes, gives),
        tuple(at for at, p in enumerate(parts) if p.exports or p.releases or p.frees),
        any(plan.values[v].leaves for v in cells),
    )
