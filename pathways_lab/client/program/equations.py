"""Questions about JAX's equations, as a program records them.

Problem: between the nodes of a program stand JAX's own operations, and some of them hold nodes
inside: those are read in place, or refused by name.

Rule for maintainers: nothing is placed or made here.

Paper: section 3 (the program tracer).
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import jaxprs_in_params

from pathways_lab.client.code import jaxprs, source_lines
from pathways_lab.client.program.primitives import OWN
from pathways_lab.client.session import failures
from pathways_lab.runtime import jax_callbacks


def has_nodes(equation: Any) -> bool:
    """Whether nodes of the program stand inside of it."""
    return any(
        inner.primitive.name in OWN
        for jaxpr in jaxprs_in_params(equation.params)
        for inner in jaxprs.equations(jaxpr)
    )


def first_own(equation: Any) -> Any:
    """The call that stands inside an equation of JAX's."""
    for jaxpr in jaxprs_in_params(equation.params):
        for inner in jaxprs.equations(jaxpr):
            if inner.primitive.name in OWN:
                return inner
    return equation


TRANSPARENT = frozenset(
    {"jit", "pjit", "closed_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"}
)
"""Calls of JAX's that are read in place: what stands in a program is differentiated already."""

_OUTSIDE = {
    "scan": "jax.lax.scan (or fori_loop, or map)",
    "while": "jax.lax.while_loop (or fori_loop)",
    "cond": "jax.lax.cond (or switch)",
    "shard_map": "jax.shard_map",
}


def outside_name(equation: Any) -> str:
    """The name that a user knows it by."""
    name = equation.primitive.name
    return _OUTSIDE.get(name, "a custom derivative" if name.startswith("custom_") else name)


def check_pure(equation: Any) -> None:
    """Operations between nodes compute; they do not print or call back."""
    names = {equation.primitive.name}
    for jaxpr in jaxprs_in_params(equation.params):
        names.update(inner.primitive.name for inner in jaxprs.equations(jaxpr))
    found = sorted(names & jax_callbacks.CALLBACK_NAMES)
    if found or equation.effects:
        what = found[0] if found else equation.primitive.name
        raise failures.capture_failure(
            f"{what} stands between the nodes of a program, where nothing calls back into Python",
            "put it into a compiled function (pw.jit): there it runs on the devices",
            line=source_lines.of_equation(equation),
        )
