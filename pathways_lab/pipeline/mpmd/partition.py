"""A training step in fragments: which there are, in which order, as which functions.

Problem: from what JAX recorded of a step to computations that can be launched is a way of five
decisions (marks, places, order, pieces, functions); each is a module, and this one goes the way.

Rule for maintainers: equal pieces are one function, so a step has few functions to compile,
however many microbatches; nothing here runs anything.

Paper: section 4.2.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.client.functions.jit import CompiledFunction
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.program import glue
from pathways_lab.client.program.glue import Replay
from pathways_lab.client.program.graph import Ref
from pathways_lab.client.session import failures
from pathways_lab.pipeline.mpmd import fragments, halves, marks, order, places, work
from pathways_lab.pipeline.mpmd.flat import Equation, Flat, Variable
from pathways_lab.pipeline.mpmd.fragments import Cut, Piece
from pathways_lab.pipeline.mpmd.order import Schedules
from pathways_lab.pipeline.schedule import Schedule
from pathways_lab.runtime import jax_private


@dataclass(frozen=True, slots=True)
class Fragment:
    """One computation of a training step.

    kind: ``"forward"``, ``"backward"`` or ``"weight"`` work of a part on a microbatch; or
        ``"inputs"``, ``"between"``, ``"update"``: other equations, before, between and after it.
    part: the marked part, or "".  microbatch: its number; None: for all.
    name: of its function.  bytes_in, bytes_out: of the values that it reads, and that others read.
    """

    kind: str
    part: str
    microbatch: int | None
    slice: Slice
    name: str
    bytes_in: int
    bytes_out: int


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A fragment with its function.  equation: JAX's, which tells the user's line."""

    fragment: Fragment
    function: CompiledFunction
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    equation: Any


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """A step in fragments.  nodes: in order.

    results: flat: values, and plain constants.  tree: their structure.
    constants: arrays that the step closes over.
    moves: by number, results that go where the state lives that they replace.
    schedule: whose tasks wait for each other as the step has it; None: as written.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Ref, ...]
    results: tuple[Any, ...]
    tree: Any
    constants: Mapping[Ref, Any]
    moves: Mapping[int, Slice]
    microbatches: int
    schedule: Schedule | None


@dataclass(frozen=True, slots=True)
class Given:
    """Arguments and results of a step.

    labels: names of the flat arguments.  specs: how they are cut over their slices, or None.
    donated: their numbers.  replaced: (argument, the result that comes instead of it).
    tree: structure of the result.
    """

    labels: Sequence[str]
    specs: Sequence[Any]
    donated: frozenset[int]
    replaced: Sequence[tuple[int, int]]
    tree: Any


@dataclass(slots=True)
class Functions:
    """Compiled functions of a step, by what they compute, and where.

    traced: one of those that compute the same, on slices of one shape.
    numbers: of equations, equal for those that compute the same.
    """

    compiled: dict[Any, CompiledFunction] = field(default_factory=dict)
    traced: dict[Any, CompiledFunction] = field(default_factory=dict)
    numbers: dict[Any, int] = field(default_factory=dict)


def partition(
    step: Flat,
    given: Given,
    on: Mapping[str, Slice],
    schedule: Schedules | None,
    functions: Functions,
) -> Partition:
    """The fragments of a step.

    Raises PathwaysError for marks that have no slice, and the other way round; for schedules
    that do not fit.
    """
    _check_marks(step, on)
    if schedule is not None and order.split(schedule):
        step = halves.halved(step)
    alike = _Alike(functions.numbers)
    count = schedule.microbatches if isinstance(schedule, Schedule) else None
    works = work.works(step.equations, alike.work, count)
    replaced = [
        (step.inputs[old], new)
        for old, number in given.replaced
        if isinstance(new := step.results[number], Variable)
    ]
    where = places.places(step, on, replaced, works)
    turns, table = works.all, None
    if schedule is not None:
        table = order.scheduled(works, on, schedule)
        turns = order.ordered(works, on, table)
    cut = fragments.cut(step, where, works, turns, given.labels)
    moves = {}
    for old, number in given.replaced:
        home, made = cut.inputs[old], cut.results[number]
        if isinstance(made, Ref) and made.slice is not home.slice:
            moves[number] = home.slice
    return Partition(
        tuple(_compiled(cut, given, functions, alike)),
        tuple(cut.inputs),
        tuple(cut.results),
        given.tree,
        cut.constants,
        moves,
        works.microbatches,
        table,
    )


def _check_marks(step: Flat, on: Mapping[str, Slice]) -> None:
    marked = dict.fromkeys(e.mark for e in step.equations if e.mark is not None)
    for part in marked:
        if part not in on:
            raise failures.refused(
                f"part {part!r} is marked in the step, and `on` has no slice for it",
                f"on={{..., {part!r}: slice}}; there is {', '.join(map(repr, on)) or 'none'}",
            )
    for part in on:
        if part not in marked:
            raise failures.refused(
                f"on={{{part!r}: ...}}: nothing that the step needs is marked as {part!r}; marked"
                f" is {', '.join(map(repr, marked)) or 'nothing'}",
                f"pw.mpmd.named({part!r}, function), and call that in the step",
            )


class _Alike:
    """A number for each equation of JAX's, equal for those that compute the same, in any part.

    Equations and inner code that come again are looked at once: a step has thousands of them.
    """

    def __init__(self, numbers: dict[Any, int]) -> None:
        self._seen: dict[Any, int] = {}  # by identity, of what the recorded step keeps
        self._numbers = numbers

    def __call__(self, origin: Any) -> int:
        """Raises TypeError where it cannot be told."""
        number = self._seen.get(id(origin))
        if number is None:
            key: Any = id(origin)
            if marks.name_of(origin) is not None:
                key = id(origin.params["jaxpr"]), str(origin.source_info.name_stack)
            number = self._seen.get(key)
            if number is None:
                found = jax_private.replayed_like(marks.without_name(origin))
                number = self._seen[key] = self._numbers.setdefault(found, len(self._numbers))
            self._seen[id(origin)] = number
        return number

    def work(self, equation: Equation) -> Any:
        """The same for a marked call; one that cannot be told is like itself only."""
        try:
            return self(equation.origin)
        except TypeError:
            return equation


# --- functions ----------------------------------------------------------------------------


def _compiled(cut: Cut, given: Given, functions: Functions, alike: _Alike) -> Iterable[Node]:
    last: dict[Ref, Piece] = {}
    reads: dict[Piece, tuple[Ref, ...]] = {}
    for piece in cut.pieces:
        operands = (x for o in piece.operations for x in o.operands if isinstance(x, Ref))
        reads[piece] = tuple(dict.fromkeys(x for x in operands if x not in piece.made))
        last.update(dict.fromkeys(reads[piece], piece))
    returned = {x for x in cut.results if isinstance(x, Ref)}
    specs = _specs(cut, given)
    kept = returned | set(cut.constants)
    inputs = set(cut.inputs)
    kept |= {ref for n, ref in enumerate(cut.inputs) if n not in given.donated}
    for piece in cut.pieces:
        outputs = tuple(
            ref for o in piece.operations for ref in o.results if ref in last or ref in returned
        )
        free = [
            ref
            for ref in reads[piece]
            if last[ref] is piece and ref not in kept and ref.slice is piece.slice
        ]
        free.sort(key=lambda ref: ref not in inputs)  # what the user donates goes first
        donated = _donated(reads[piece], free, outputs)
        yield _node(piece, reads[piece], outputs, donated, specs, functions, alike)


def _specs(cut: Cut, given: Given) -> dict[Ref, Any]:
    """How values are cut over their slices: arguments, rows of them, what replaces them."""
    specs = {cut.inputs[n]: spec for n, spec in enumerate(given.specs) if spec is not None}
    for ref, whole in cut.rows.items():
        if whole in specs and _divides(specs[whole], ref):
            specs[ref] = specs[whole]
    for old, number in given.replaced:
        made = cut.results[number]
        home = cut.inputs[old]
        if isinstance(made, Ref) and made.slice is home.slice and home in specs:
            specs[made] = specs[home]
    return specs


def _divides(spec: Any, ref: Ref) -> bool:
    sizes = ref.slice.mesh.shape
    for length, axes in zip(ref.type.shape, spec, strict=False):
        names = axes if isinstance(axes, tuple) else (axes,) if axes else ()
        if length % math.prod(sizes[name] for name in names):
            return False
    return True


def _donated(inputs: Sequence[Ref], free: Sequence[Ref], outputs: Sequence[Ref]) -> tuple[int, ...]:
    """The inputs whose memory a result of their type can have."""
    room: Counter[ArrayType] = Counter(ref.type for ref in outputs)
    found = []
    for ref in free:
        if room[ref.type]:
            room[ref.type] -= 1
            found.append(inputs.index(ref))
    return tuple(found)


def _node(
    piece: Piece,
    inputs: tuple[Ref, ...],
    outputs: tuple[Ref, ...],
    donated: tuple[int, ...],
    specs: Mapping[Ref, Any],
    functions: Functions,
    alike: _Alike,
) -> Node:
    own = piece.work
    part = "" if own is None else own.part
    name = f"{piece.kind}_{part}" if part else piece.kind
    takes, gives = ([specs.get(ref) for ref in refs] for refs in (inputs, outputs))
    like = glue.key_of(piece.operations, inputs, outputs, alike)
    key = donated, tuple(takes), tuple(gives), like
    function = None if like is None else functions.compiled.get((name, piece.slice, key))
    if function is None:
        shape = piece.slice.kind, piece.slice.axis_sizes
        known = None if like is None else functions.traced.get((shape, key))
        if known is None:
            known = CompiledFunction(
                Replay(piece.operations, inputs, outputs, name),
                in_shardings=tuple(takes) if any(takes) else None,
                out_shardings=list(gives) if any(gives) else None,
                donate_argnums=donated or None,
            )
        function = known.elsewhere(piece.slice, name)
        if like is not None:
            functions.compiled[name, piece.slice, key] = function
            functions.traced[shape, key] = known
    origin = piece.operations[-1].equation if own is None else own.equation.origin
    fragment = Fragment(
        piece.kind,
        part,
        None if own is None else own.microbatch,
        piece.slice,
        name,
        sum(places.size(ref.type) for ref in inputs),
        sum(places.size(ref.type) for ref in outputs),
    )
    return Node(fragment, function, inputs, outputs, origin)
