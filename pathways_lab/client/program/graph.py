"""The graph between capture and the core: nodes with code, values with places.

Problem: what was captured speaks of Python objects (bodies of functions, host
arrays, handles); the core wants a location-free :class:`Program` of plain
data, and hosts want code for definite layouts.  Here layouts flow through the
nodes in capture order, code is made for them, and the result is a
:class:`Prepared` program that can be run any number of times.

Rule for maintainers: this is the only place that builds core programs.
Nothing here looks at values; everything is decided from types and layouts.

Paper: section 4.2 (lowering), section 4.3 (the compact graph).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pathways_lab.client.code import layouts
from pathways_lab.client.code.export import Executable
from pathways_lab.client.functions.array_types import ArrayType, shard_bytes
from pathways_lab.client.functions.traced_function import Body
from pathways_lab.client.lab import stats
from pathways_lab.client.lab.devices import Placed, Slice
from pathways_lab.client.lab.run_options import USUAL, Running
from pathways_lab.client.session import failures
from pathways_lab.client.session.habits import FEW, Habit
from pathways_lab.client.session.handles import Handle
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.program import bundles, legality, lowering
from pathways_lab.core.program.bundles import Range, Ranges
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.program import (
    Call,
    Line,
    Node,
    Plan,
    Program,
    Signature,
    SliceId,
    Transfer,
    Value,
    When,
)

# --- where inputs come from -----------------------------------------------------------


@dataclass(frozen=True)
class Argument:
    """Flat argument *index* of the call."""

    index: int


@dataclass(frozen=True, eq=False)
class Constant:
    """An array that the program closes over.  data: as it travels."""

    data: np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Held:
    """A handle that the program closes over; the program keeps it alive."""

    handle: Handle


Source = Argument | Constant | Held


# --- values and nodes -------------------------------------------------------------------


@dataclass(eq=False)
class Ref:
    """One value of the graph, on one slice.

    layout: None until it is decided (inputs from the host take what their
    first consumer wants).  source: set for inputs.
    """

    type: ArrayType
    slice: Slice
    layout: Layout | None = None
    name: str = ""
    source: Source | None = None

    @property
    def placed(self) -> Placed:
        """The same of a program that is ready."""
        assert self.layout is not None, "a prepared program has all layouts"
        return self.slice.placed(self.type, self.layout)

    @property
    def value(self) -> Value:
        """The same for the core."""
        assert self.layout is not None, "a value has a layout once it is numbered"
        nbytes = shard_bytes(self.type, self.layout)
        kind = self.type
        return Value(kind.shape, kind.dtype, self.slice.id, self.layout, nbytes, self.name)


@dataclass(frozen=True, slots=True)
class Branch:
    """The scope of a node: it runs when *ref*, an int32, is *case*, one of *cases*."""

    ref: Ref
    case: int
    cases: int


@dataclass(eq=False)
class CallNode:
    """A call of a compiled function, or (glue) a group of ordinary operations made into one."""

    body: Body
    slice: Slice
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    name: str
    line: Line
    glue: bool = False
    when: Branch | None = None


@dataclass(eq=False)
class TransferNode:
    """An explicit move.  requested: the layout to take, or None for the nearest.

    joins: it gives one branch's result to those who read that of all branches.
    trimmed: rows of zeros at its ends do not travel.
    """

    input: Ref
    output: Ref
    requested: layouts.Requested
    line: Line
    when: Branch | None = None
    joins: bool = False
    trimmed: bool = False


GraphNode = CallNode | TransferNode


@dataclass(frozen=True, eq=False)
class Prepared:
    """A program that is ready to run.

    inputs: the source of each plan input, with its type and place.
    functions: the code that its nodes call, with the slices.
    outputs: type and place of each plan output; after those that were asked for
        come results that only keep a node alive.
    donated: plan inputs that a run consumes, each with the failure of whoever uses it afterwards.
    slices: all that it uses, also those where only calls without any value run.
    tested: the same programs with tests, by what they are tested for.
    habit: which results are passed on side by side.
    results: of each plan output, the range of *outputs* that it is; () where each is one.
    variants, parts: see :mod:`pathways_lab.client.program.bundled`.
    """

    name: str
    program: Program
    plan: Plan
    inputs: tuple[Ref, ...]
    functions: tuple[tuple[Executable, SliceId], ...]
    outputs: tuple[Ref, ...]
    donated: dict[int, Failure] = field(default_factory=dict)

    slices: tuple[Slice, ...] = ()
    tested: dict[frozenset[str], Prepared] = field(default_factory=dict)
    habit: Habit = field(default_factory=Habit)
    results: Ranges = ()
    variants: dict[tuple[Ranges, Ranges], Prepared] = field(default_factory=dict)
    parts: dict[Range, Prepared] = field(default_factory=dict)

    @functools.cached_property
    def made(self) -> tuple[tuple[Placed, str], ...]:
        """Type and place of each output, and its name."""
        return tuple((ref.placed, ref.name) for ref in self.outputs)

    @functools.cached_property
    def may_have_bundles(self) -> bool:
        """Whether it is one call of its arguments, with enough of them, or of results."""
        if max(len(self.inputs), len(self.outputs)) < FEW:
            return False
        sources = [ref.source for ref in self.inputs]
        own = all(isinstance(s, Argument) and s.index == n for n, s in enumerate(sources))
        return own and bundles.may_have_bundles(self.plan)

    @functools.cached_property
    def arrays(self) -> int:
        """How many go in and come out."""
        return len(self.inputs) + len(self.outputs)

    @functools.cached_property
    def place(self) -> Slice:
        """One of its slices: the first that it uses, and where it may compute."""
        return next((on for on in self.slices if not on.taken), self.slices[0])

    @property
    def released(self) -> bool:
        """Whether a slice that it uses was released: it cannot be run any more."""
        return any(on.released for on in self.slices)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All that a call of it may have run: its plan, and those with tests and with bundles."""
        others = (*self.tested.values(), *self.variants.values())
        return self.plan, *(plan for other in others for plan in other.plans)

    def checked(self, check: frozenset[str]) -> Prepared:
        """The same program, every gang of which is tested for what is no number."""
        if check not in self.tested:
            functions = [(code.checked(check), code.key, place) for code, place in self.functions]
            keys = {(key, place): code.key for code, key, place in functions}
            steps = tuple(
                replace(step, node=replace(node, function=keys[node.function, node.slice]))
                if isinstance(node := step.node, Call)
                else step
                for step in self.plan.steps
            )
            key = hashlib.sha256(f"{self.plan.key} {sorted(check)}".encode()).hexdigest()[:32]
            self.tested[check] = replace(
                self,
                plan=replace(self.plan, key=key, steps=steps),
                functions=tuple((code, place) for code, _, place in functions),
                tested={},
                variants={},
                parts={},
            )
        return self.tested[check]

    def check(self) -> None:
        """Raises PathwaysError when a slice that it uses was released, at the line that uses it."""
        for on in self.slices:
            if on.released:
                calls = (step.node for step in self.plan.steps if isinstance(step.node, Call))
                line = next((call.line for call in calls if call.slice == on.id), Line())
                with failures.at(line):
                    on.check()


def prepare(
    name: str,
    nodes: Sequence[GraphNode],
    outputs: Sequence[Ref],
    *,
    sequential: bool = False,
    written: bool = False,
    running: Running = USUAL,
) -> Prepared:
    """Give every value its layout and every node its code; lower the result.

    outputs: distinct values that nodes make; more may follow them in the result.
    sequential: see :func:`pathways_lab.core.program.lowering.lower`.  written: as of the program.
    running: what is said of all of it.
    Raises PathwaysError for illegal programs, at the user's own line.
    """
    _check_one_lab(name, nodes)
    builder = _Builder(_first_wishes(nodes), running)
    for node in nodes:
        with failures.at(node.line):
            builder.add(node)
    outputs = (*outputs, *_unseen(nodes, outputs))
    program = Program(
        name,
        tuple(builder.values),
        tuple(builder.nodes),
        tuple(builder.numbers[ref] for ref in builder.inputs),
        tuple(builder.numbers[ref] for ref in outputs),
        builder.signatures,
        written,
    )
    stats.work.lowered += 1
    plan = bundles.gathered(lowering.lower(program, sequential=sequential), FEW)
    places = [ref.slice for ref in builder.numbers]
    places += [node.slice for node in nodes if isinstance(node, CallNode)]
    return Prepared(
        name,
        program,
        plan,
        tuple(builder.inputs),
        tuple(builder.functions.values()),
        outputs,
        builder.donated,
        tuple(dict.fromkeys(places)),
    )


def _check_one_lab(name: str, nodes: Iterable[GraphNode]) -> None:
    """Raises PathwaysError, at the user's own line, where values or functions of two labs meet."""
    first: Slice | None = None
    for node in nodes:
        if isinstance(node, CallNode):
            places = [node.slice, *(ref.slice for ref in node.inputs)]
        else:
            places = [node.input.slice, node.output.slice]
        for on in places:
            if on.owner is None:
                continue  # taken from another client, or made without a lab
            first = first or on
            if on.owner is not first.owner:
                raise failures.refused(
                    f"{name!r} uses slice {first.name} of {first.owner}, and slice {on.name}, which"
                    f" belongs to another lab, {on.owner}",
                    "fetch what is on the other lab with handle.result(), and pass the array",
                    line=node.line,
                )


def _unseen(nodes: Sequence[GraphNode], outputs: Sequence[Ref]) -> list[Ref]:
    """A result of each node that calls back into Python and that nobody reads.

    Without it the node would be dropped, and what it prints with it.
    """
    seen = {ref for _, ref in uses(nodes)} | set(outputs)
    return [
        node.outputs[0]
        for node in nodes
        if isinstance(node, CallNode)
        and node.body.calls_python
        and node.outputs
        and not seen.intersection(node.outputs)
    ]


def uses(nodes: Iterable[GraphNode]) -> Iterator[tuple[GraphNode, Ref]]:
    """Every ``(node, value that it reads)``."""
    for node in nodes:
        for ref in node.inputs if isinstance(node, CallNode) else (node.input,):
            yield node, ref


def _first_wishes(nodes: Sequence[GraphNode]) -> dict[Ref, Layout]:
    """The layout of a value that its first reader on its slice asks for."""
    wishes: dict[Ref, Layout] = {}
    for node in nodes:
        with failures.at(node.line):
            _wish(node, wishes)
    return wishes


def _wish(node: GraphNode, wishes: dict[Ref, Layout]) -> None:
    if isinstance(node, TransferNode):
        ref, on = node.input, node.output.slice
        if ref.slice is on and ref not in wishes and node.requested is not None:
            wishes[ref] = layouts.layout_of(node.requested, on, ref.type)
        return
    for index, ref in enumerate(node.inputs):
        if ref.slice is node.slice and ref not in wishes:
            wanted = node.body.wanted(index, node.slice)
            if wanted is not None:
                wishes[ref] = wanted


def _settled(ref: Ref) -> Layout:
    """The layout of a value that is read elsewhere.

    A host array that nobody has read where it is was put there, to every device.
    """
    if ref.layout is None:
        ref.layout = layouts.replicated(ref.slice, len(ref.type.shape))
    return ref.layout


def check(name: str, nodes: Iterable[GraphNode], returned: Iterable[Ref]) -> None:
    """Raises PathwaysError, at the user's own line, for what is read or returned after donation.

    returned: also inputs that the program returns as they are.  To be asked of the nodes
    that the user wrote: of those that are made of them it does not show.
    """
    numbers: dict[Ref, int] = {}

    def numbered(refs: Iterable[Ref]) -> tuple[int, ...]:
        return tuple([numbers.setdefault(ref, len(numbers)) for ref in refs])

    steps: list[Node] = []
    for node in nodes:
        if isinstance(node, TransferNode):
            source, target = numbered((node.input, node.output))
            when = _when(node, numbers)
            name = node.output.name
            steps.append(Transfer(source, target, name, node.line, when, node.trimmed))
            continue
        given, made = numbered(node.inputs), numbered(node.outputs)
        steps.append(
            Call(
                "", node.slice.id, given, made, node.body.donated, node.name, node.line,
                when=_when(node, numbers),
            )
        )  # fmt: skip
    outputs = numbered(returned)
    inputs = tuple(number for ref, number in numbers.items() if ref.source is not None)
    names = tuple(ref.name for ref in numbers)
    failure = legality.check_order(name, len(numbers), inputs, tuple(steps), outputs, names)
    if failure is not None:
        raise PathwaysError(failure)


def _when(node: GraphNode, numbers: dict[Ref, int]) -> When | None:
    """The same for the core."""
    if node.when is None:
        return None
    return When(numbers[node.when.ref], node.when.case, node.when.cases)


class _Builder:
    """Numbers values, flows layouts, collects code."""

    def __init__(self, wishes: dict[Ref, Layout], running: Running) -> None:
        self.wishes = wishes
        self.running = running
        self.values: list[Value] = []
        self.numbers: dict[Ref, int] = {}
        self.inputs: list[Ref] = []
        self.nodes: list[Node] = []
        self.signatures: dict[str, Signature] = {}
        self.functions: dict[tuple[str, SliceId], tuple[Executable, SliceId]] = {}
        self.donated: dict[int, Failure] = {}

    def add(self, node: GraphNode) -> None:
        if isinstance(node, TransferNode):
            self._transfer(node)
        else:
            self._call(node)

    def _call(self, node: CallNode) -> None:
        wanted = [self._layout_for(node, index, ref) for index, ref in enumerate(node.inputs)]
        # Glue makes its results where they are wanted; a compiled function is
        # the same code wherever its results go.
        pinned = [self.wishes.get(ref) for ref in node.outputs] if node.glue else None
        code = node.body.on(node.slice, wanted, pinned)
        if code.name != node.name:  # traced as another function's, of another slice
            code = replace(code, name=node.name)
        for ref, layout in zip(node.inputs, code.in_layouts, strict=True):
            if ref.layout is None:
                ref.layout = layout
        inputs = tuple(self._number(ref) for ref in node.inputs)
        for ref, layout in zip(node.outputs, code.out_layouts, strict=True):
            if ref.layout not in (None, layout):
                raise failures.capture_failure(
                    f"{node.name!r} gives {ref.type} the layout {layout}, and another branch"
                    f" gives it {ref.layout}: the results of all branches have one layout",
                    "give both functions the same out_shardings",
                    line=node.line,
                    node=node.name,
                )
            ref.layout = layout
        outputs = tuple(self._number(ref) for ref in node.outputs)
        # By number: what a move leaves where it is, is the input itself.
        taken = {inputs[position] for position in code.donated}
        if taken:
            why = failures.donated_to(node.name, node.line)
            gone = [index for index, ref in enumerate(self.inputs) if self.numbers[ref] in taken]
            self.donated.update(dict.fromkeys(gone, why))
        self.functions[code.key, node.slice.id] = (code, node.slice.id)
        self.signatures[code.key] = Signature(
            node.name, node.slice.id, code.in_layouts, code.out_layouts
        )
        running = node.body.running.beside(self.running)
        self.nodes.append(
            Call(
                code.key, node.slice.id, inputs, outputs, code.donated, node.name, node.line,
                keep=running.keep or node.body.calls_python, window=running.window,
                when=_when(node, self.numbers),
            )
        )  # fmt: skip

    def _layout_for(self, node: CallNode, index: int, ref: Ref) -> Layout | None:
        """The layout in which the code takes an argument; None leaves it to the code."""
        if ref.slice is node.slice:
            nearest = ref.layout or self.wishes.get(ref)
        else:
            nearest = layouts.carried_over(_settled(ref), node.slice, ref.type)
        return node.body.wanted(index, node.slice) or nearest

    def _transfer(self, node: TransferNode) -> None:
        source, target = node.input, node.output
        if node.requested is not None:
            target.layout = layouts.layout_of(node.requested, target.slice, target.type)
        layout = _settled(source)
        if target.layout is None:
            target.layout = layouts.carried_over(layout, target.slice, target.type)
        if (source.slice, layout) == (target.slice, target.layout) and not node.joins:
            self.numbers[target] = self._number(source)
            return
        given, made = self._number(source), self._number(target)
        name = f"{source.name or 'value'} to {target.slice.name}"
        when = _when(node, self.numbers)
        self.nodes.append(Transfer(given, made, name, node.line, when, node.trimmed))

    def _number(self, ref: Ref) -> int:
        known = self.numbers.get(ref)
        if known is not None:
            return known
        assert ref.layout is not None
        if ref.source is not None:
            self.inputs.append(ref)
        number = self.numbers[ref] = len(self.values)
        self.values.append(ref.value)
        return number
