"""Fragments: equations of one slice that follow each other become one computation.

Problem: an equation is too little for a launch.  A fragment should be the forward or the backward
work of one part on one microbatch, with what belongs to it; no two fragments may wait for each
other; and equal ones of different microbatches should be one function.

How: the equations are taken in an order in which each comes behind what it reads.  A slice has one
fragment open; that ends where another slice reads from it, or a marked call begins.  Equations that
become ready by a marked call (residual sums, losses, sums of gradients) join it.  Equations that
need all microbatches, and that no marked call needs, come last: clipping, the optimizer.
Values without a place are made on each slice that reads them.

Rule for maintainers: fragments end in the order in which they are listed, so a fragment reads
only from those before it.

Paper: section 4.2 (nodes of a program are compiled functions).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.program.glue import Operation
from pathways_lab.client.program.graph import Ref
from pathways_lab.pipeline.mpmd import flat as flattening
from pathways_lab.pipeline.mpmd.flat import Equation, Flat, Variable
from pathways_lab.pipeline.mpmd.places import Places
from pathways_lab.pipeline.mpmd.work import Work, Works
from pathways_lab.runtime.arrays import is_key

_BAKED = 1024
"""Closed-over arrays of up to so many bytes become part of the code."""
_CHOOSE = frozenset(
    {
        *("slice", "dynamic_slice", "gather", "squeeze", "reshape", "expand_dims", "split"),
        *("transpose", "rev", "convert_element_type", "random_fold_in", "random_split"),
        *("random_wrap", "random_unwrap", "threefry2x32"),
    }
)
"""Operations that cut a batch, or make a key for each microbatch."""


@dataclass(eq=False, slots=True)
class Piece:
    """Equations on one slice.  kind: what they are called.  work: the marked call among them."""

    slice: Slice
    kind: str
    work: Work | None = None
    operations: list[Operation] = field(default_factory=list)
    made: set[Ref] = field(default_factory=set)


@dataclass(slots=True)
class Cut:
    """A step in pieces, in order.  inputs: of the step, in order.

    results: values and plain constants.  constants: arrays that the step closes over.
    rows: what is chosen from an input for a microbatch, with that input.
    """

    pieces: list[Piece]
    inputs: list[Ref]
    results: list[Any]
    constants: dict[Ref, Any]
    rows: dict[Ref, Ref]


def cut(
    flat: Flat, places: Places, works: Works, order: Sequence[Work], labels: Sequence[str]
) -> Cut:
    """The pieces of a step, whose works come in *order*.  labels: names of its inputs."""
    cutter = _Cutter(flat, places, works, labels)
    for work in order:
        cutter.add(work)
    return cutter.finished()


class _Cutter:
    def __init__(self, flat: Flat, places: Places, works: Works, labels: Sequence[str]) -> None:
        self._flat, self._places, self._works = flat, places, works
        self._numbers = {e: n for n, e in enumerate(flat.equations)}
        self._inputs = {
            variable: Ref(variable.type, places.homes[variable], name=label)
            for variable, label in zip(flat.inputs, labels, strict=True)
        }
        self._refs = dict(self._inputs)
        self._local: dict[tuple[Variable, Slice | Piece], Ref] = {}
        self._constants: dict[Ref, Any] = {}
        self._rows: dict[Ref, Ref] = {}
        self._owner: dict[Ref, Piece] = {}
        self._open: dict[Slice, Piece] = {}
        self._pieces: list[Piece] = []
        self._waits: dict[Equation, int] = {}
        self._readers: dict[Equation, list[Equation]] = {}
        self._ready: dict[Slice, list[int]] = {}
        self._last = _last(flat, places, works)
        self._early = _early(flat, places, works, self._last)
        self._link()

    def _link(self) -> None:
        makers: dict[Variable, Equation] = {}
        for equation in self._places.slices:
            before = {makers[v] for v in equation.read if v in makers}
            self._waits[equation] = len(before)
            for each in before:
                self._readers.setdefault(each, []).append(equation)
            makers.update(dict.fromkeys(equation.results, equation))
            if not before:
                self._offer(equation)

    def _offer(self, equation: Equation) -> None:
        """An equation whose operands are there."""
        if equation not in self._works.of and equation not in self._last:
            on = self._places.slices[equation]
            heapq.heappush(self._ready.setdefault(on, []), self._numbers[equation])

    # --- order ---------------------------------------------------------------------------

    def add(self, work: Work) -> None:
        """The next marked call, and what follows from it."""
        on = self._places.slices[work.equation]
        self._close(on)
        self._open[on] = Piece(on, work.kind, work)
        self._emit(work.equation)
        self._drain(on, "between")

    def finished(self) -> Cut:
        """After the last work: what is left, and the results."""
        for on in tuple(self._open):
            self._close(on)
        last, self._last = self._last, frozenset()
        for equation in last:
            if not self._waits[equation]:
                self._offer(equation)
        self._drain(None, "update")
        results = [self._result(x) if isinstance(x, Variable) else x for x in self._flat.results]
        for on in tuple(self._open):
            self._close(on)
        inputs = list(self._inputs.values())
        return Cut(self._pieces, inputs, results, self._constants, self._rows)

    def _result(self, variable: Variable) -> Ref:
        ref = self._refs.get(variable)
        if ref is not None:
            return ref
        homes = [self._places.homes[v] for v in self._places.sources[variable]]
        on = homes[0] if homes else next(iter(self._places.slices.values()))
        found: Ref = self._operand(variable, self._piece(on, "update"))
        return found

    def _drain(self, current: Slice | None, kind: str) -> None:
        """All that is ready, slice by slice, so that as little as can be is cut in two."""
        while ready := {on: numbers for on, numbers in self._ready.items() if numbers}:
            if current not in ready:
                current = min(ready, key=lambda on: ready[on][0])
            assert current is not None
            equation = self._flat.equations[heapq.heappop(ready[current])]
            piece = self._open.get(current)
            if piece is not None and piece.work is not None and not self._joins(equation, piece):
                self._close(current)
            self._piece(current, kind)
            self._emit(equation)

    def _joins(self, equation: Equation, piece: Piece) -> bool:
        return any(self._refs.get(v) in piece.made for v in equation.read)

    # --- pieces --------------------------------------------------------------------------

    def _piece(self, on: Slice, kind: str) -> Piece:
        piece = self._open.get(on)
        if piece is None:
            piece = self._open[on] = Piece(on, kind)
        return piece

    def _close(self, on: Slice) -> None:
        piece = self._open.pop(on, None)
        if piece is not None and piece.operations:
            self._pieces.append(piece)

    def _emit(self, equation: Equation) -> None:
        """An equation that has a place, into the piece that is open there."""
        made = self._add(equation, self._open[self._places.slices[equation]])
        self._refs.update(zip(equation.results, made, strict=True))
        for reader in self._readers.get(equation, ()):
            self._waits[reader] -= 1
            if not self._waits[reader]:
                self._offer(reader)

    def _add(self, equation: Equation, piece: Piece) -> tuple[Ref, ...]:
        operands = tuple(
            self._operand(x, piece) if isinstance(x, Variable) else x for x in equation.operands
        )
        name = equation.mark or equation.origin.primitive.name
        results = tuple(Ref(v.type, piece.slice, name=name) for v in equation.results)
        piece.operations.append(Operation(equation.origin, operands, results))
        piece.made.update(results)
        self._owner.update(dict.fromkeys(results, piece))
        return results

    def _operand(self, variable: Variable, piece: Piece) -> Any:
        ref = self._refs.get(variable)
        if ref is None:
            if variable in self._flat.constants:
                return self._constant(variable, piece.slice)
            return self._pulled(variable, piece)
        owner = self._owner.get(ref)
        if owner is not None and owner is not piece and self._open.get(owner.slice) is owner:
            self._close(owner.slice)
        return ref

    def _constant(self, variable: Variable, on: Slice) -> Any:
        """A closed-over array: in the code, or once on each slice that reads it."""
        value = self._flat.constants[variable]
        if variable.type.nbytes <= _BAKED and not is_key(variable.type.dtype):
            return np.asarray(value)
        ref = self._local.get((variable, on))
        if ref is None:
            ref = self._local[variable, on] = Ref(variable.type, on, name="constant")
            self._constants[ref] = value
        return ref

    # --- values without a place ----------------------------------------------------------

    def _pulled(self, variable: Variable, piece: Piece) -> Ref:
        """A value that is made of inputs: once for a slice; of constants: for each piece."""
        on, equation = piece.slice, self._places.floating[variable]
        where = on if self._places.sources[variable] else piece
        known = self._local.get((variable, where))
        if known is None and equation in self._early.get(on, ()):
            first = Piece(on, "inputs")
            for each in self._early.pop(on):
                sources = self._places.sources[each.results[0]]
                for ref in self._make(each, on, first):
                    if len(sources) == 1 and len(ref.type.shape) == len(sources[0].type.shape):
                        self._rows[ref] = self._inputs[sources[0]]
            self._pieces.append(first)
            known = self._local[variable, on]
        return known or self._make(equation, where, piece)[equation.results.index(variable)]

    def _make(self, equation: Equation, where: Slice | Piece, piece: Piece) -> tuple[Ref, ...]:
        made = self._add(equation, piece)
        self._local.update({(v, where): r for v, r in zip(equation.results, made, strict=True)})
        return made


# --- what is done first, and last ---------------------------------------------------------


def _last(flat: Flat, places: Places, works: Works) -> AbstractSet[Equation]:
    """The equations that need all microbatches, and that no marked call needs."""
    leading = flattening.leading(flat.equations)
    return {
        equation
        for equation in places.slices
        if equation not in works.of
        and leading.isdisjoint(equation.results)
        and _turns(equation, works) == works.every
    }


def _turns(equation: Equation, works: Works) -> int:
    """The microbatches that an equation belongs to."""
    work = works.of.get(equation)
    if work is not None and work.microbatch is None:
        return works.every
    found = 0
    for result in equation.results:
        found |= works.turns[result]
    return found


def _early(
    flat: Flat, places: Places, works: Works, last: AbstractSet[Equation]
) -> dict[Slice, list[Equation]]:
    """By slice, the equations without a place that are done at once for all microbatches.

    They choose the rows of a batch, or several microbatches read them.  Calls that choose rows
    differ in nothing but the row; apart from them, all readers of rows can be one function.
    """
    if works.microbatches == 1:
        return {}
    read: dict[Slice, dict[Variable, int]] = {on: {} for on in places.slices.values()}
    chosen: dict[Slice, list[Equation]] = {on: [] for on in read}
    for equation in reversed(flat.equations):
        place = places.slices.get(equation)
        for on, own in read.items() if place is None else [(place, read[place])]:
            turns = [own[v] for v in equation.results if v in own]
            if place is not None and equation not in last:
                turns = [_turns(equation, works)]
            elif place is None and turns:
                chosen[on].append(equation)
            for turn in turns:
                for variable in equation.read:
                    own[variable] = own.get(variable, 0) | turn
    return {on: _shared(equations[::-1], read[on], places) for on, equations in chosen.items()}


def _shared(
    equations: Sequence[Equation], read: dict[Variable, int], places: Places
) -> list[Equation]:
    found: list[Equation] = []
    made: set[Variable] = set()
    for equation in equations:
        operands = [v for v in equation.read if v in places.floating and places.sources[v]]
        turns = 0
        for result in equation.results:
            turns |= read.get(result, 0)
        several = turns & (turns - 1) or equation.origin.primitive.name in _CHOOSE
        if several and places.sources[equation.results[0]] and made.issuperset(operands):
            found.append(equation)
            made.update(equation.results)
    return found
