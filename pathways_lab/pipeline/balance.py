"""Which layers make a stage: neighbours, so that the dearest stage is as cheap as can be.

Problem: a pipeline is as fast as its slowest stage, and layers differ.

Rule for maintainers: costs are relative; whoever has measured ones gives them.
Estimates count multiplications from JAX's own form of a layer, without a device.

Paper: section 5.3 ("stages balanced").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from pathways_lab.core.errors import refused


def partition(
    costs: Sequence[float], stages: int, speeds: Sequence[float] = ()
) -> tuple[range, ...]:
    """Neighbouring layers for each of *stages*: the largest sum of costs is the least possible.

    speeds: of each stage, where they are not equal.

    Raises PathwaysError where there are fewer layers than stages.
    """
    count = len(costs)
    speed = [1.0] * stages if not speeds else list(speeds)
    if not 1 <= stages <= count:
        raise refused(
            f"{count} layers cannot be cut into {stages} stages: each needs at least one",
            f"use at most {count} slices, or cut the layers finer",
        )

    @cache
    def best(start: int, left: int) -> tuple[float, int]:
        """The dearest of *left* stages over the layers from *start*, and where the first ends."""
        own = speed[stages - left]
        if left == 1:
            return sum(costs[start:]) / own, count
        ends = range(start + 1, count - left + 2)
        return min((max(sum(costs[start:end]) / own, best(end, left - 1)[0]), end) for end in ends)

    cuts = [0]
    for left in range(stages, 0, -1):
        cuts.append(best(cuts[-1], left)[1])
    return tuple(range(a, b) for a, b in pairwise(cuts))


def operations(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Multiplications and element-wise operations of *function* for arguments of these types, and
    the types of its result.  It is traced once."""
    closed, result = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return _of_jaxpr(closed.jaxpr), result


def _of_jaxpr(jaxpr: Jaxpr) -> float:
    return sum(of_equation(equation) for equation in jaxpr.eqns)


def of_equation(equation: JaxprEqn) -> float:
    """The same of one equation, with all that it calls."""
    inner = [_of_jaxpr(body) for body in _bodies(equation)]
    if inner:
        # Branches exclude each other; a loop of unknown length counts once.
        turns = int(equation.params.get("length", 1))
        return turns * (max(inner) if "branches" in equation.params else sum(inner))
    made = sum(float(math.prod(_shape(v))) for v in equation.outvars)
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        shape = _shape(equation.invars[0])
        return 2.0 * made * float(math.prod(shape[axis] for axis in contracted))
    if equation.primitive.name == "conv_general_dilated":
        kernel = _shape(equation.invars[1])
        features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * made * math.prod(kernel) / int(features)
    return made


def _shape(variable: Any) -> tuple[int, ...]:
    return tuple(getattr(variable.aval, "shape", ()))


def _bodies(equation: JaxprEqn) -> list[Jaxpr]:
    """The functions that an equation calls, repeats or chooses from."""
    found = []
    for parameter in equation.params.values():
        for value in parameter if isinstance(parameter, list | tuple) else (parameter,):
            body = getattr(value, "jaxpr", value)
            if isinstance(body, Jaxpr):
                found.append(body)
    return found
