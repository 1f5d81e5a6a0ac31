"""Placement: from recorded equations to a graph in which each operation has its slice.

Problem: calls of compiled functions say where they run; ordinary operations
do not.  They run where their operands are.  A value without a place (zeros,
random keys, slices of a host array) waits until an operation with a place needs
it, and is then made there, once per slice.  So does an operation on values that were taken
from another client, since nothing is computed where those are.  Operands on two slices are an
error: the user decides which one moves.

A group of operations stays open until something else on its slice, or a reader
elsewhere, comes: so nodes follow each other in the user's own order.

Rule for maintainers: order is capture order; nothing is reordered or merged
across a call on the same slice.

Paper: section 4.2 (data movement is the system's job), section 4.3.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from jax.core import Tracer
from jax.extend.core import Jaxpr, Literal

from pathways_lab.client.code import jaxprs, layouts, source_lines
from pathways_lab.client.functions import array_types
from pathways_lab.client.functions.array_types import ArrayType, type_of
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.program.calls import result_name, slice_of_arguments
from pathways_lab.client.program.capture import Captured
from pathways_lab.client.program.equations import (
    TRANSPARENT,
    check_pure,
    first_own,
    has_nodes,
    outside_name,
)
from pathways_lab.client.program.glue import Group, Operation
from pathways_lab.client.program.graph import (
    Branch,
    CallNode,
    Constant,
    GraphNode,
    Held,
    Ref,
    Source,
    TransferNode,
    uses,
)
from pathways_lab.client.program.primitives import Move, Outside, Site
from pathways_lab.client.session import failures
from pathways_lab.client.session.handles import Handle
from pathways_lab.core.program.program import Line
from pathways_lab.runtime.arrays import is_key

_BAKED = 1024
"""Constants up to this many bytes become part of the code of a group."""


@dataclass(eq=False)
class Given:
    """An input from the host, which may be wanted on several slices."""

    type: ArrayType
    source: Source
    name: str


@dataclass(eq=False)
class Waiting:
    """An operation that has no place yet.  number: its place in the recorded order."""

    number: int
    equation: Any
    operands: tuple[Any, ...]
    kinds: tuple[ArrayType, ...]


@dataclass(frozen=True)
class Part:
    """Result *index* of an operation without a place."""

    operation: Waiting
    index: int


Item = Ref | Given | Part


@dataclass
class Graph:
    """Nodes in order, and the value of each result of the captured code.

    results: a value, or an input (:class:`Given`) that is returned untouched.
    """

    nodes: list[GraphNode] = field(default_factory=list)
    results: list[Ref | Given] = field(default_factory=list)


def place(captured: Captured, inputs: Sequence[Ref | Given], default: Slice | None = None) -> Graph:
    """The graph of captured code.

    inputs: what each argument of the code is: a value with a place, or a host array.
    default: where results run that nothing gives a place; without it the first
        slice of the program.

    Raises PathwaysError for operands on two slices, and for what is no node.
    """
    placer = _Placer()
    closed = captured.jaxpr
    constants = [placer.constant(value) for value in closed.consts]
    items = placer.read(closed.jaxpr, constants, list(inputs))
    results = [placer.result(item, default) for item in items]
    return Graph(placer.finished(results), results)


class _Placer:
    def __init__(self) -> None:
        self.steps: list[GraphNode | Group] = []
        self.open: dict[Slice, Group] = {}
        self.when: Branch | None = None
        # Values that have their place on a slice already: inputs, and results of
        # operations, by the identity of their variables (kept, so that it stays theirs).
        self.given: dict[tuple[int, Slice], Ref] = {}
        self.made: dict[tuple[int, Slice], tuple[Ref, ...]] = {}
        # Single numbers that were moved: by the value and the slice.
        self.copies: dict[tuple[Ref, Slice], Ref] = {}
        self.constants: dict[Any, Given] = {}
        self.kept: list[Any] = []
        self.first: Slice | None = None
        self.count = 0

    # --- reading the recorded code ------------------------------------------------------

    def read(self, jaxpr: Any, constants: Sequence[Item], inputs: Sequence[Item]) -> list[Item]:
        """Place every equation; what the code returns."""
        items: dict[Any, Item] = dict(zip(jaxpr.constvars, constants, strict=True))
        items.update(zip(jaxpr.invars, inputs, strict=True))
        for item in inputs:
            if _has_place(item):
                self.first = self.first or item.slice

        def value_of(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else items[atom]

        for equation in jaxpr.eqns:
            operands = [value_of(atom) for atom in equation.invars]
            handler = self._HANDLERS.get(equation.primitive.name)
            if handler is not None:
                results = handler(self, equation, operands)
            elif has_nodes(equation):
                results = self._inlined(equation, operands)
            else:
                results = self._operation(equation, operands)
            items.update(zip(equation.outvars, results, strict=True))
        outputs = []
        for atom in jaxpr.outvars:
            value = value_of(atom)
            outputs.append(self.constant(value) if isinstance(atom, Literal) else value)
        return outputs

    def constant(self, value: Any, kind: ArrayType | None = None) -> Item:
        """A handle or a host array that the program closes over; equal ones are one."""
        if type(value) is Handle:
            return self._outside(value)
        if isinstance(value, Tracer):
            raise failures.capture_failure(*failures.ESCAPED)
        kind = kind or array_types.host_type(value)
        assert kind is not None, "JAX has accepted it as an array"
        data = array_types.host_bytes(value, kind)
        key = (kind, data.tobytes()) if data.nbytes <= _BAKED else id(value)
        known = self.constants.get(key)
        if known is None:
            # A copy: the user's array may change after the capture.
            known = self.constants[key] = Given(kind, Constant(data.copy()), "constant")
            self.kept.append(value)
        return known

    def _inlined(self, equation: Any, operands: list[Any]) -> list[Item]:
        """A plain ``jax.jit`` around nodes: its body stands in its place."""
        inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
        if equation.primitive.name not in TRANSPARENT or inner is None:
            line = source_lines.of_equation(first_own(equation))
            raise failures.capture_failure(
                f"a compiled function is called inside {outside_name(equation)},"
                " which runs it an unknown number of times or under another rule",
                "put the whole loop into one compiled function, or write a Python loop",
                # JAX's own calls know no line of the user's: then that of JAX's function.
                line=line if line.number else source_lines.of_equation(equation),
            )
        given = [x if isinstance(x, Item) else self.constant(x) for x in operands]
        if isinstance(inner, Jaxpr):
            return self.read(inner, (), given)
        return self.read(inner.jaxpr, [self.constant(value) for value in inner.consts], given)

    # --- nodes --------------------------------------------------------------------------------

    def _call(self, equation: Any, operands: list[Any]) -> list[Item]:
        call: Site = equation.params["site"]
        line = source_lines.of_node(equation)
        placed = (x for x in operands if isinstance(x, Ref))
        on = call.function.slice or slice_of_arguments(
            placed, call.function.name, failures.capture_failure, line=line
        )
        items = [
            x if isinstance(x, Item) else self.constant(x, kind)
            for x, kind in zip(operands, call.body.in_types, strict=True)
        ]
        inputs = tuple(self._placed(item, on) for item in items)
        for ref in inputs:
            self._close_of(ref)
        self._close(on)
        body, name = call.body, call.function.name
        outputs = tuple(
            Ref(kind, on, name=result_name(name, number, len(body.out_types)))
            for number, kind in enumerate(body.out_types)
        )
        self.first = self.first or on
        self.steps.append(CallNode(body, on, inputs, outputs, name, line, when=self.when))
        return list(outputs)

    def _handle(self, equation: Any, _: list[Any]) -> list[Item]:
        outside: Outside = equation.params["outside"]
        return [self._outside(outside.handle)]

    def _outside(self, handle: Handle) -> Ref:
        known = self.given.get((id(handle), handle.slice))
        if known is None:
            name = handle.name or "handle"
            known = Ref(handle.type, handle.slice, handle.layout, name, Held(handle))
            self.given[id(handle), handle.slice] = known
            self.kept.append(handle)
        return known

    def _move(self, equation: Any, operands: list[Any]) -> list[Item]:
        move: Move = equation.params["move"]
        return [self._moved(operands[0], move, source_lines.of_node(equation))]

    def _beside(self, equation: Any, operands: list[Any]) -> list[Item]:
        value, anchor = operands
        line = source_lines.of_node(equation)
        if _has_place(anchor) and not (_has_place(value) and value.slice is anchor.slice):
            move = Move(anchor.slice, trimmed=equation.params.get("trimmed", False))
            return [self._moved(value, move, line)]
        return [value if isinstance(value, Item) else self.constant(value)]

    def _device_put(self, equation: Any, operands: list[Any]) -> list[Item]:
        """``jax.device_put``: a move when it names the mesh of a slice, else nothing."""
        results: list[Item] = []
        for operand, target in zip(operands, equation.params["devices"], strict=True):
            item = operand if isinstance(operand, Item) else self.constant(operand)
            on = layouts.slice_of_sharding(target)
            if on is not None:
                item = self._moved(item, Move(on, target), source_lines.of_node(equation))
            results.append(item)
        return results

    def _moved(self, operand: Any, move: Move, line: Line) -> Ref:
        item = operand if isinstance(operand, Item) else self.constant(operand)
        on, requested = move.slice, move.requested
        self.first = self.first or on
        if isinstance(item, Given) and requested is not None:
            # It has no place yet: it comes to this one at once.
            with failures.at(line):
                layout = layouts.layout_of(requested, on, item.type)
            self.kept.append(item)
            return Ref(item.type, on, layout, item.name, item.source)
        source = self._placed(item, on)
        if not isinstance(item, Ref) and requested is None:
            return source
        self._close_of(source)
        target = Ref(source.type, on, name=source.name)
        self.steps.append(
            TransferNode(source, target, requested, line, self.when, trimmed=move.trimmed)
        )
        return target

    # --- decisions ----------------------------------------------------------------------

    def _switch(self, equation: Any, operands: list[Any]) -> list[Item]:
        """All branches, each under its condition; what they give is joined."""
        codes, around = equation.params["branches"], equation.params["around"]
        given = [x if isinstance(x, Item) else self.constant(x) for x in operands[1:]]
        own = len(given) - sum(around)
        args, rest = given[:own], iter(given[own:])
        number = self._decided(operands[0], codes)
        ends = []
        for case, (code, count) in enumerate(zip(codes, around, strict=True)):
            branch = Branch(number, case, len(codes))
            with self._under(branch):
                more = [next(rest) for _ in range(count)]
                ends.append((branch, self._branch(code, args, more)))
        return self._joined(ends, source_lines.of_node(equation))

    def _within(self, equation: Any, operands: list[Any]) -> list[Item]:
        """Nodes under a condition, whose results are read under the same one only."""
        parameters = equation.params
        number = self._decided(operands[0], [parameters["code"]])
        with self._under(Branch(number, parameters["case"], parameters["cases"])):
            found = self._branch(parameters["code"], (), operands[1:])
            return [self.result(item, None) for item in found]

    def _until(self, equation: Any, operands: list[Any]) -> list[Item]:
        """Every turn, each under the condition that the one before it was not the last."""
        asked, _ = equation.params["around"]
        given = [x if isinstance(x, Item) else self.constant(x) for x in operands]
        own = len(equation.params["types"])
        state, rest = given[:own], given[own:]
        ends: list[tuple[Branch | None, list[Item]]] = []
        before = self.when
        turn: Branch | None = before
        for _ in range(equation.params["most"]):
            with self._under(turn):
                (done,) = self._branch(equation.params["done"], state, rest[:asked])
                number = self._decided(done, [equation.params["body"]])
            ends.append((Branch(number, 1, 2), state))
            turn = Branch(number, 0, 2)
            with self._under(turn):
                state = self._branch(equation.params["body"], state, rest[asked:])
        if turn is before:
            return state
        return self._joined([(turn, state), *ends], source_lines.of_node(equation))

    def _branch(self, code: Any, args: Sequence[Item], around: Sequence[Item]) -> list[Item]:
        """The results of captured code.  around: in place of the stand-ins that it closes over."""
        more = iter(around)
        constants = [next(more) if isinstance(v, Tracer) else self.constant(v) for v in code.consts]
        return self.read(code.jaxpr, constants, list(args))

    @contextlib.contextmanager
    def _under(self, branch: Branch | None) -> Iterator[None]:
        """Nodes that are placed meanwhile have this condition."""
        self._close_all()
        made, copies, when = dict(self.made), dict(self.copies), self.when
        self.when = branch
        yield
        self._close_all()
        self.made, self.copies, self.when = made, copies, when

    def _decided(self, item: Any, codes: Iterable[Any]) -> Ref:
        """The number that decides, which an operation makes.  codes: what it decides about."""
        calls = (inner for code in codes for inner in jaxprs.equations(code.jaxpr))
        named = (inner.params["site"].function.slice for inner in calls if "site" in inner.params)
        ref = self.result(item, self.first or next((on for on in named if on is not None), None))
        assert isinstance(ref, Ref), "it was clamped"
        return ref

    def _joined(
        self, ends: Sequence[tuple[Branch | None, Sequence[Item]]], line: Line
    ) -> list[Item]:
        """One value for each result of the branches."""
        joined: list[Item] = []
        for at, first in enumerate(ends[0][1]):
            found = [items[at] for _, items in ends]
            places = [item.slice for item in found if _has_place(item)]
            on = places[0] if places else self.first
            if on is None:
                raise failures.capture_failure(
                    "a result of a branch has no place", "call a compiled function in it", line=line
                )
            if len(set(places)) > 1 and ends[0][0] is not None and _is_switch(ends):
                names = ", ".join(place.name for place in places)
                raise failures.capture_failure(
                    f"result {at} of the branches is on different slices: {names}",
                    "move one of them in its branch: pw.device_put(x, slice)",
                    line=line,
                )
            kind = first.operation.kinds[first.index] if isinstance(first, Part) else first.type
            target = Ref(kind, on, name=getattr(first, "name", ""))
            for branch, items in ends:
                with self._under(branch):
                    source = self._placed(items[at], on)
                    self._close_all()
                    self.steps.append(TransferNode(source, target, None, line, branch, joins=True))
            joined.append(target)
        return joined

    def _close_all(self) -> None:
        self.steps += self.open.values()
        self.open = {}

    # --- ordinary operations -----------------------------------------------------------------

    def _operation(self, equation: Any, operands: list[Any]) -> list[Item]:
        check_pure(equation)
        kinds = tuple(type_of(variable.aval) for variable in equation.outvars)
        self.count += 1
        on = self._where(equation, operands)
        if on is not None:
            operands = [self._brought(x, on, equation) for x in operands]
        operation = Waiting(self.count, equation, tuple(operands), kinds)
        if on is None:
            return [Part(operation, index) for index in range(len(kinds))]
        return list(self._made(operation, on))

    def _brought(self, item: Any, on: Slice, equation: Any) -> Any:
        """An operand; a single number that is elsewhere is moved."""
        if not _has_place(item) or item.slice is on:
            return item
        if (item, on) not in self.copies:
            line = source_lines.of_node(equation)
            self.copies[item, on] = self._moved(item, Move(on, None), line)
        return self.copies[item, on]

    def _where(self, equation: Any, operands: list[Any]) -> Slice | None:
        placed = [x for x in operands if _has_place(x)]
        arrays = [x for x in placed if math.prod(x.type.shape) != 1]
        places = {x.slice: x for x in arrays or placed[:1]}
        for on in jaxprs.slices_of_equation(equation):
            places.setdefault(on, Ref(type_of(equation.outvars[0].aval), on, name="its sharding"))
        if len(places) <= 1:
            return next(iter(places), None)
        parts = [f"{ref.name or 'a value'} ({ref.type}) on {on.name}" for on, ref in places.items()]
        name = equation.params.get("name") or equation.primitive.name
        raise failures.capture_failure(
            f"{name} has operands on different slices: {', '.join(parts)}",
            "move one of them: pw.device_put(x, slice)",
            line=source_lines.of_equation(equation),
        )

    def _placed(self, item: Item, on: Slice) -> Ref:
        """The value on *on*; one that has a place already stays where it is."""
        if isinstance(item, Ref):
            return item
        if isinstance(item, Given):
            return self._given(item, on)
        for operation in _needed(item.operation, lambda w: (id(w), on) in self.made):
            self._made(operation, on)
        return self.made[id(item.operation), on][item.index]

    def _given(self, item: Given, on: Slice) -> Ref:
        key = (id(item), on)
        known = self.given.get(key)
        if known is None:
            known = self.given[key] = Ref(item.type, on, None, item.name, item.source)
            self.kept.append(item)
        return known

    def _made(self, operation: Waiting, on: Slice) -> tuple[Ref, ...]:
        """Put an operation into the open group of a slice, its inputs first."""
        operands = tuple(self._operand(x, on) for x in operation.operands)
        group = self.open.get(on)
        if group is None:
            group = self.open[on] = Group(on, self.when)
        name = str(operation.equation.params.get("name") or operation.equation.primitive.name)
        results = tuple(Ref(kind, on, name=name) for kind in operation.kinds)
        group.add(Operation(operation.equation, operands, results))
        self.first = self.first or on
        self.made[id(operation), on] = results
        self.kept.append(operation)
        return results

    def _operand(self, value: Any, on: Slice) -> Any:
        if isinstance(value, Given) and isinstance(value.source, Constant):
            data = value.source.data
            if data.nbytes <= _BAKED and not is_key(value.type.dtype):
                return data
        return self._placed(value, on) if isinstance(value, Item) else value

    # --- groups ------------------------------------------------------------------------------

    def _close(self, on: Slice) -> None:
        group = self.open.pop(on, None)
        if group is not None:
            self.steps.append(group)

    def _close_of(self, ref: Ref) -> None:
        group = self.open.get(ref.slice)
        if group is not None and ref in group.made:
            self._close(ref.slice)

    def result(self, item: Item, default: Slice | None) -> Ref | Given:
        """A value that the program returns."""
        if isinstance(item, Ref | Given):
            return item
        on = default or self.first
        if on is None:
            raise failures.capture_failure(
                "a result has no place: nothing that it is made of is on a slice",
                "put an argument on a slice (pw.device_put), or call a compiled function with on=",
                line=source_lines.of_equation(item.operation.equation),
            )
        return self._placed(item, on)

    def finished(self, results: Sequence[Ref | Given]) -> list[GraphNode]:
        """The nodes in order, groups made into nodes, without groups that nobody needs."""
        self._close_all()
        needed = {ref for ref in results if isinstance(ref, Ref)}
        nodes: list[GraphNode] = []
        for step in reversed(self.steps):
            node = step.node(needed) if isinstance(step, Group) else step
            if node is not None:
                nodes.append(node)
                needed.update(ref for _, ref in uses([node]))
                if node.when is not None:
                    needed.add(node.when.ref)
        return _renamed(nodes[::-1], results)

    _HANDLERS: dict[str, Callable[[_Placer, Any, list[Any]], list[Item]]] = {  # noqa: RUF012
        "pw_call": _call,
        "pw_handle": _handle,
        "pw_move": _move,
        "pw_beside": _beside,
        "pw_switch": _switch,
        "pw_within": _within,
        "pw_until": _until,
        "device_put": _device_put,
    }


def _is_switch(ends: Sequence[tuple[Branch | None, Sequence[Item]]]) -> bool:
    """Whether all are branches of one decision."""
    return len({branch.ref for branch, _ in ends if branch is not None}) == 1


def _renamed(nodes: list[GraphNode], results: Sequence[Ref | Given]) -> list[GraphNode]:
    """Calls make what is joined themselves, where nothing but a copy would be between."""
    maker = {ref: node for node in nodes if isinstance(node, CallNode) for ref in node.outputs}
    new: dict[Ref, Ref] = {}
    kept: list[GraphNode] = []
    for node in nodes:
        if isinstance(node, TransferNode) and node.joins:
            source, made = node.input, maker.get(node.input)
            alike = source.slice is node.output.slice and source not in new
            if made is not None and made.when == node.when and alike and source not in results:
                new[source] = node.output
                continue
        kept.append(node)
    for node in kept:
        if isinstance(node, CallNode):
            node.inputs = tuple([new.get(ref, ref) for ref in node.inputs])
            node.outputs = tuple([new.get(ref, ref) for ref in node.outputs])
        else:
            node.input = new.get(node.input, node.input)
    return kept


def _has_place(item: Any) -> TypeGuard[Ref]:
    """Whether what is computed with a value is computed where it is."""
    return isinstance(item, Ref) and not item.slice.taken


def _needed(operation: Waiting, done: Callable[[Waiting], bool]) -> list[Waiting]:
    """*operation* and what it is made of, as far as not *done*, in recorded order."""
    found: dict[int, Waiting] = {}
    todo = [operation]
    while todo:
        current = todo.pop()
        if current.number not in found and not done(current):
            found[current.number] = current
            todo += [x.operation for x in current.operands if isinstance(x, Part)]
    return [found[number] for number in sorted(found)]
