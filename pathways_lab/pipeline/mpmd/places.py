"""Where each equation of a training step runs, and where each of its inputs lives.

Problem: marks say where parts run.  All the rest (residual sums, losses, sums of gradients,
clipping, the optimizer) says nothing, and what is moved for it costs time.

How: a marked call runs on the slice of its part.  Any other equation runs where most bytes of its
operands are; an input that all microbatches read counts once for all of them.  Between equal ones
the slice wins on which the result is wanted: the one where a state lives that the result replaces,
so that the gradients of a tied weight are summed at home.  A value that depends on inputs only has
no place; it is made where it is read.  An input lives where it is read first.

Rule for maintainers: no place changes a value.

Paper: section 4.2 (data movement is the system's job).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.client.lab.devices import Slice
from pathways_lab.pipeline.mpmd.flat import Equation, Flat, Variable
from pathways_lab.pipeline.mpmd.work import Works


@dataclass(slots=True)
class Places:
    """slices: by equation that has a place.  homes: by input, where it lives.

    floating: by variable without a place that is no input, the equation that makes it.
    sources: by variable without a place, the inputs that it is made of.
    """

    slices: dict[Equation, Slice] = field(default_factory=dict)
    homes: dict[Variable, Slice] = field(default_factory=dict)
    floating: dict[Variable, Equation] = field(default_factory=dict)
    sources: dict[Variable, tuple[Variable, ...]] = field(default_factory=dict)


def places(
    flat: Flat,
    on: Mapping[str, Slice],
    replaced: Iterable[tuple[Variable, Variable]],
    works: Works,
) -> Places:
    """The place of everything.  replaced: (input, the result that comes instead of it)."""
    return _Placer(flat, on, replaced, works).found


class _Placer:
    def __init__(
        self,
        flat: Flat,
        on: Mapping[str, Slice],
        replaced: Iterable[tuple[Variable, Variable]],
        works: Works,
    ) -> None:
        self._works = works
        self.found = Places()
        self._at: dict[Variable, Slice] = {}
        self._made: dict[Variable, int] = {}
        self._sources = self.found.sources
        self._sources.update({v: (v,) for v in flat.inputs})
        self._sources.update(dict.fromkeys(flat.constants, ()))
        for equation in flat.equations:
            self._float(equation)
        for equation in flat.equations:
            if equation.mark is not None:
                self._settle(equation, on[equation.mark])
        self._wanted = self._wishes(flat, replaced)
        for number, equation in enumerate(flat.equations):
            self._place(equation, on, number)
        first = next(iter(on.values()))
        for given in flat.inputs:
            self.found.homes.setdefault(given, first)

    def _float(self, equation: Equation) -> None:
        """Equations that are made of inputs only wait for their readers."""
        if equation.mark is not None or equation.origin.effects:
            return
        sources: dict[Variable, None] = {}
        for variable in equation.read:
            if variable not in self._sources:
                return
            sources.update(dict.fromkeys(self._sources[variable]))
        for result in equation.results:
            self._sources[result] = tuple(sources)
            self.found.floating[result] = equation

    def _settle(self, equation: Equation, on: Slice) -> None:
        """Inputs that an equation reads live on its slice, unless they were read before."""
        for variable in equation.read:
            for source in self._sources.get(variable, ()):
                self.found.homes.setdefault(source, on)

    def _wishes(
        self, flat: Flat, replaced: Iterable[tuple[Variable, Variable]]
    ) -> dict[Variable, Slice]:
        homes = self.found.homes
        wanted = {new: homes[old] for old, new in replaced if old in homes}
        for equation in reversed(flat.equations):
            if equation.mark is not None:
                continue
            wish = next((wanted[r] for r in equation.results if r in wanted), None)
            if wish is not None:
                shapes = {r.type.shape for r in equation.results}
                for variable in equation.read:
                    if variable.type.shape in shapes:
                        wanted.setdefault(variable, wish)
        return wanted

    def _place(self, equation: Equation, on: Mapping[str, Slice], number: int) -> None:
        if equation.mark is not None:
            place = on[equation.mark]
        elif equation.results and equation.results[0] in self.found.floating:
            return
        else:
            place = self._best(equation, next(iter(on.values())))
        self.found.slices[equation] = place
        self._at.update(dict.fromkeys(equation.results, place))
        self._made.update(dict.fromkeys(equation.results, number))
        self._settle(equation, place)

    def _best(self, equation: Equation, default: Slice) -> Slice:
        weights: dict[Slice, float] = {}
        latest: dict[Slice, int] = {}
        turns = self._works.turns[equation.results[0]] if equation.results else 0
        times = self._works.microbatches if turns.bit_count() == 1 else 1
        for variable in dict.fromkeys(equation.read):
            place, weight = self._at.get(variable), float(size(variable.type))
            if place is None:
                place, weight = self._leaning(variable), weight / times
            if place is not None:
                weights[place] = weights.get(place, 0) + weight
                latest[place] = max(latest.get(place, -1), self._made.get(variable, -1))
        if not weights:
            return default
        wish = next((self._wanted[r] for r in equation.results if r in self._wanted), None)
        return max(weights, key=lambda s: (weights[s], s is wish, latest[s]))

    def _leaning(self, variable: Variable) -> Slice | None:
        """Where the largest input lives that a value without a place is made of."""
        known = [s for s in self._sources.get(variable, ()) if s in self.found.homes]
        largest = max(known, key=lambda s: size(s.type), default=None)
        return None if largest is None else self.found.homes[largest]


def size(kind: ArrayType) -> int:
    """Bytes of an array; of what has none, 0."""
    return 0 if "float0" in kind.dtype else kind.nbytes
