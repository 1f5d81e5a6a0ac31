"""A training step as one flat list of equations: what JAX recorded, with its loops unrolled.

Problem: marks stand deep inside of what JAX records: in a scan over microbatches, in inner
``jit``s, in what ``jax.checkpoint`` recomputes.  Each marked call must become an equation of its
own before anything can be placed.

How: calls without a mark are read in place, scans with marks inside are unrolled.  Equations
that nothing needs are dropped.

Rule for maintainers: equations are kept as JAX recorded them, to be replayed exactly; nothing
here knows of slices.

Paper: section 4.2 (lowering by passes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import Literal, jaxprs_in_params

from pathways_lab.client.code import jaxprs, source_lines
from pathways_lab.client.functions.array_types import ArrayType, type_of
from pathways_lab.client.session import failures
from pathways_lab.pipeline.mpmd import marks
from pathways_lab.pipeline.schedule import Kind


@dataclass(eq=False, slots=True)
class Variable:
    """One value of the step."""

    type: ArrayType


@dataclass(eq=False, slots=True)
class Equation:
    """One recorded operation.

    origin: JAX's equation.  operands: variables and plain constants.
    mark: the part that it is a call of.  kind: ``"backward"`` where a transposition made it.
    """

    origin: Any
    operands: tuple[Any, ...]
    results: tuple[Variable, ...]
    mark: str | None = None
    kind: Kind = "forward"

    @property
    def read(self) -> Iterator[Variable]:
        """The variables among its operands."""
        return (x for x in self.operands if isinstance(x, Variable))


@dataclass(slots=True)
class Flat:
    """The step.  inputs: by flat argument.  results: variables and plain constants.

    constants: arrays that the step closes over.
    """

    inputs: tuple[Variable, ...]
    results: tuple[Any, ...]
    equations: list[Equation]
    constants: dict[Variable, Any] = field(default_factory=dict)


def flattened(closed: Any, *, through: bool = False) -> Flat:
    """The equations of a closed jaxpr.

    through: marks, and calls that are opened only for marks, are read in place too.
    Raises PathwaysError for marks in what cannot be taken apart (``while_loop``, ``cond``).
    """
    reader = _Reader(through)
    inputs = tuple(Variable(type_of(v.aval)) for v in closed.jaxpr.invars)
    results = tuple(reader.read(closed.jaxpr, reader.constant(closed.consts), inputs, "forward"))
    needed = {x for x in results if isinstance(x, Variable)}
    return Flat(inputs, results, live(reader.equations, needed), reader.constants)


def live(equations: Sequence[Equation], results: Iterable[Variable]) -> list[Equation]:
    """The equations that *results* are made of, and those that do something else."""
    needed = set(results)
    kept = []
    for equation in reversed(equations):
        if equation.origin.effects or not needed.isdisjoint(equation.results):
            kept.append(equation)
            needed.update(equation.read)
    return kept[::-1]


def leading(equations: Sequence[Equation]) -> set[Variable]:
    """The values that a marked call is made of, by way of any equations."""
    found: set[Variable] = set()
    for equation in reversed(equations):
        if equation.mark is not None or not found.isdisjoint(equation.results):
            found.update(equation.read)
    return found


class _Reader:
    def __init__(self, through: bool) -> None:
        self._through = through
        self.equations: list[Equation] = []
        self.constants: dict[Variable, Any] = {}
        self._known: dict[int, Variable] = {}  # by identity of the array, which is kept
        self._rows: dict[Variable, list[Any]] = {}
        # By identity of equations and types, which the recorded step and these keep:
        self._traces: list[Any] = []
        self._marked: dict[int, bool] = {}
        self._types: dict[int, ArrayType] = {}

    def constant(self, values: Iterable[Any]) -> list[Variable]:
        found = []
        for value in values:
            variable = self._known.get(id(value))
            if variable is None:
                variable = self._known[id(value)] = Variable(type_of(jax.typeof(value)))
                self.constants[variable] = value
            found.append(variable)
        return found

    def read(
        self, jaxpr: Any, constants: Sequence[Any], inputs: Sequence[Any], kind: Kind
    ) -> list[Any]:
        """Append all equations; what the code returns."""
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
        values.update(zip(jaxpr.invars, inputs, strict=True))

        def value_of(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else values[atom]

        for equation in jaxpr.eqns:
            operands = [value_of(atom) for atom in equation.invars]
            own = kind
            if "transpose(" in str(equation.source_info.name_stack):
                own = "backward"
            made = self._results(equation, operands, own)
            values.update(zip(equation.outvars, made, strict=True))
        return [value_of(atom) for atom in jaxpr.outvars]

    def _results(self, equation: Any, operands: list[Any], kind: Kind) -> Sequence[Any]:
        name, mark = equation.primitive.name, marks.name_of(equation)
        if self._through:
            if name in _TRANSPARENT or name in _OPENED:
                return self._inner(equation, operands, kind)
        elif mark is None:
            if name in _TRANSPARENT:
                return self._inner(equation, operands, kind)
            if self._has_marks(equation):
                if name in _OPENED:
                    return self._inner(equation, operands, kind)
                if name == "scan":
                    return self._unrolled(equation, operands, kind)
                raise _refused(equation)
        results = tuple(Variable(self._type(v.aval)) for v in equation.outvars)
        self.equations.append(Equation(equation, tuple(operands), results, mark, kind))
        return results

    def _type(self, aval: Any) -> ArrayType:
        known = self._types.get(id(aval))
        if known is None:
            known = self._types[id(aval)] = type_of(aval)
        return known

    def _has_marks(self, equation: Any) -> bool:
        known = self._marked.get(id(equation))
        if known is None:
            known = self._marked[id(equation)] = _first_mark(equation) is not None
        return known

    def _inner(self, equation: Any, operands: list[Any], kind: Kind) -> list[Any]:
        (inner,) = [
            value
            for name in ("jaxpr", "call_jaxpr", "fun_jaxpr")
            if (value := equation.params.get(name)) is not None
        ]
        constants = self.constant(getattr(inner, "consts", ()))
        return self.read(getattr(inner, "jaxpr", inner), constants, operands, kind)

    def _unrolled(self, equation: Any, operands: list[Any], kind: Kind) -> list[Any]:
        """A scan, turn by turn."""
        params = equation.params
        inner, length = params["jaxpr"], params["length"]
        first, count = jaxprs.scan_sizes(params)
        then = first + count
        fixed, carried = operands[:first], operands[first:then]
        columns = [
            self._row(x, length, atom.aval)
            for x, atom in zip(operands[then:], equation.invars[then:], strict=True)
        ]
        constants = self.constant(inner.consts)
        rows: dict[int, list[Any]] = {}
        turns = range(length)
        for turn in reversed(turns) if params["reverse"] else turns:
            given = [*fixed, *carried, *(column[turn] for column in columns)]
            made = self.read(inner.jaxpr, constants, given, kind)
            carried, rows[turn] = made[:count], made[count:]
        stacked = range(len(equation.outvars) - count)
        return carried + [self._stacked([rows[turn][n] for turn in turns]) for n in stacked]

    def _row(self, value: Any, length: int, aval: Any) -> list[Any]:
        """The rows of an array, as the turns of a scan read them; a stack is not made for that."""
        if isinstance(value, Variable):
            rows = self._rows.get(value)
            if rows is None:
                rows = self._rows[value] = self._traced(
                    lambda x: [jax.lax.index_in_dim(x, n, keepdims=False) for n in range(length)],
                    [value],
                )
            return rows
        return [value[n] for n in range(length)]

    def _stacked(self, rows: list[Any]) -> Any:
        (stacked,) = self._traced(lambda *rows: [jax.numpy.stack(rows)], rows)
        self._rows[stacked] = rows
        return stacked

    def _traced(self, function: Callable[..., Any], operands: list[Any]) -> list[Any]:
        """The results of a few operations of our own."""
        kinds = [x.type.struct if isinstance(x, Variable) else x for x in operands]
        closed = jax.make_jaxpr(function)(*kinds)
        self._traces.append(closed)
        return self.read(closed.jaxpr, self.constant(closed.consts), operands, "forward")


_TRANSPARENT = frozenset({"jit", "pjit", "closed_call", "core_call"})
"""Calls that are read in place."""
_OPENED = frozenset({"checkpoint", "remat2", "remat", "custom_jvp_call", "custom_vjp_call"})
"""Calls that are read in place where there are marks in them."""


def _first_mark(equation: Any) -> str | None:
    inner = (e for j in jaxprs_in_params(equation.params) for e in jaxprs.equations(j))
    return next((mark for e in inner if (mark := marks.name_of(e)) is not None), None)


def _refused(equation: Any) -> Exception:
    return failures.capture_failure(
        f"part {_first_mark(equation)!r} is marked inside of {equation.primitive.name}, whose turns"
        " and branches are one computation on one slice",
        "mark the whole of it, or use jax.lax.scan, which is unrolled",
        line=source_lines.of_equation(equation),
    )
