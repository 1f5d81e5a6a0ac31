"""Backward work in two halves: the gradients that other parts wait for, and the rest.

Problem: zero-bubble schedules leave the gradients of parameters for a time when there is nothing
better to do.  JAX's transposition of a part makes all gradients in one call.

How: the equations of that call are parted.  The first half has all that its results for other
marked calls are made of.  The second half has the others, and reads what it needs of the first.

Rule for maintainers: both halves together are the call as JAX made it, equation by equation;
nothing is computed twice.

Paper: section 5.3.  Source: Qi et al. 2023 (zero bubble: arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import jit as jax_jit  # JAX's own, also while routed

from pathways_lab.pipeline.mpmd import flat as flattening
from pathways_lab.pipeline.mpmd import marks
from pathways_lab.pipeline.mpmd.flat import Equation, Flat, Variable
from pathways_lab.pipeline.schedule import Kind
from pathways_lab.runtime import jax_private


def halved(flat: Flat) -> Flat:
    """The same step; its backward calls are in two, as far as something of them can wait."""
    leading = flattening.leading(flat.equations)
    known: dict[Any, _Halves] = {}
    equations: list[Equation] = []
    for equation in flat.equations:
        if equation.mark is None or equation.kind != "backward":
            equations.append(equation)
            continue
        first = tuple(result in leading for result in equation.results)
        key = id(equation.origin.params["jaxpr"]), first  # which the step keeps
        if key not in known:
            known[key] = _Halves(equation, first)
            flat.constants.update(known[key].constants)
        equations += known[key].of(equation)
    return replace(flat, equations=equations)


@dataclass(frozen=True, slots=True)
class _Half:
    """origin: JAX's equation.  reads, gives: values of the whole call."""

    kind: Kind
    origin: Any
    reads: Sequence[Variable]
    gives: Sequence[Variable]


class _Halves:
    """The two halves of a call, for all calls of the same code."""

    def __init__(self, equation: Equation, first: Sequence[bool]) -> None:
        body = flattening.flattened(equation.origin.params["jaxpr"], through=True)
        self.constants = body.constants
        self._body = body
        self._halves: list[_Half] = []
        results = [r for r in body.results if isinstance(r, Variable)]
        made = {v for e in body.equations for v in e.results}
        if len(set(results) & made) < len(body.results):
            return  # a result that is an argument, or the same twice: it stays whole
        wanted = {r for r, own in zip(results, first, strict=True) if own}
        ahead = flattening.live(body.equations, wanted)
        own = set(ahead)
        later = [e for e in body.equations if e not in own]
        if later:
            needed = {v for e in later for v in e.read}.union(results)
            assert equation.mark is not None, "only marked calls are in halves"
            if ahead:
                self._halves.append(_half("backward", equation.mark, ahead, needed))
            self._halves.append(_half("weight", equation.mark, later, set(results)))

    def of(self, equation: Equation) -> Iterable[Equation]:
        """The halves of one call."""
        if not self._halves:
            return [equation]
        values: dict[Variable, Any] = dict(zip(self._body.inputs, equation.operands, strict=True))
        values.update({constant: constant for constant in self.constants})
        values.update(zip(self._body.results, equation.results, strict=True))
        found = []
        for half in self._halves:
            for variable in half.gives:
                values.setdefault(variable, Variable(variable.type))
            operands = tuple(values[v] for v in half.reads)
            given = tuple(values[v] for v in half.gives)
            found.append(Equation(half.origin, operands, given, equation.mark, half.kind))
        return found


def _half(kind: Kind, mark: str, equations: Sequence[Equation], needed: set[Variable]) -> _Half:
    """Some equations of a call as a call.  needed: the values that are read after them."""
    made = {v: None for e in equations for v in e.results}
    reads = list(dict.fromkeys(v for e in equations for v in e.read if v not in made))
    gives = [v for v in made if v in needed]

    def replayed(*arrays: Any) -> list[Any]:
        values = dict(zip(reads, arrays, strict=True))
        for equation in equations:
            operands = [values[x] if isinstance(x, Variable) else x for x in equation.operands]
            results = jax_private.replay(equation.origin, operands)
            values.update(zip(equation.results, results, strict=True))
        return [values[v] for v in gives]

    replayed.__name__ = replayed.__qualname__ = marks.marked(mark)
    closed = jax.make_jaxpr(jax_jit(replayed))(*(v.type.struct for v in reads))
    (origin,) = closed.jaxpr.eqns
    assert (len(origin.invars), len(origin.outvars)) == (len(reads), len(gives))
    return _Half(kind, origin, reads, gives)
