"""Questions about JAX's captured code (jaxprs) that need no private door.

Problem: whether code calls back into Python, which slices it names, which
large constants it closes over: decided before it is lowered, because lowering
such code needs a backend that the kernel does not have.

Rule for maintainers: read-only, recursive, on ``jax.extend.core`` only.

Paper: section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxprs_in_params
from jax.sharding import Mesh, NamedSharding

from pathways_lab.client.code.layouts import slice_of_mesh
from pathways_lab.client.lab.devices import Slice
from pathways_lab.runtime import emulated, jax_callbacks


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation, also of inner jaxprs, outer ones first."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def scan_sizes(parameters: Mapping[str, Any]) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried from turn to turn."""
    if "num_consts" in parameters:
        return parameters["num_consts"], parameters["num_carry"]
    fixed, carried, _ = parameters["ft_in"].unpack()  # since JAX 0.12
    return len(fixed), len(carried)


def calls_python(jaxpr: Any) -> bool:
    """Whether running it calls back into Python."""
    return any(e.primitive.name in jax_callbacks.CALLBACK_NAMES for e in equations(jaxpr))


def foreign_calls(jaxpr: Any) -> set[str]:
    """Names of the foreign functions (``jax.ffi``, ``pw.emulated``) that it calls."""
    found = list(equations(jaxpr))
    held = {emulated.TARGET for e in found if e.primitive.name == emulated.TARGET}
    return held | {e.params["target_name"] for e in found if e.primitive.name == "ffi_call"}


def held_seconds(jaxpr: Any, sharers: int = 1) -> float:
    """For how long ``pw.emulated`` holds each device that runs it.

    sharers: so many devices have a part each of what is held with ``shared=True``.
    """
    found = 0.0
    used = set(filter(_is_variable, jaxpr.outvars))
    for equation in reversed(jaxpr.eqns):
        # XLA drops what nothing needs.
        read = equation.invars
        if not equation.effects:
            needed = [v in used for v in equation.outvars]
            if not any(needed):
                continue
            if equation.primitive.name == "optimization_barrier":
                read = [v for v, wanted in zip(read, needed, strict=True) if wanted]
        used.update(filter(_is_variable, read))
        params = equation.params
        if equation.primitive.name == emulated.TARGET:
            found += float(params["ms"]) / 1e3 / (sharers if params["shared"] else 1)
        times = params["length"] if equation.primitive.name == "scan" else 1
        found += times * sum(held_seconds(j, sharers) for j in jaxprs_in_params(params))
    return found


def _is_variable(entry: Any) -> bool:
    return not isinstance(entry, Literal)


def meshes_named(jaxpr: Any) -> dict[Slice, Mesh]:
    """Meshes of slices that stand in it: in ``shard_map``, constraints, nested ``jit``."""
    found: dict[Slice, Mesh] = {}
    for equation in jaxpr.eqns:
        found |= _meshes_of_equation(equation)
    return found


def slices_of_equation(equation: Any) -> set[Slice]:
    """Slices whose mesh stands in the parameters of one equation, or inside of it."""
    return {*_meshes_of_equation(equation)}


def _meshes_of_equation(equation: Any) -> dict[Slice, Mesh]:
    meshes = (mesh for value in equation.params.values() for mesh in _meshes(value))
    found = {known: mesh for mesh in meshes if (known := slice_of_mesh(mesh)) is not None}
    for inner in jaxprs_in_params(equation.params):
        found |= meshes_named(inner)
    return found


def _meshes(value: Any) -> Iterator[Any]:
    if isinstance(value, Mesh):
        yield value
    elif isinstance(value, NamedSharding):
        yield value.mesh
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from _meshes(entry)


def constants(closed: Any) -> Iterator[np.ndarray[Any, Any]]:
    """The arrays that code closes over, also in inner jaxprs."""
    yield from map(content, getattr(closed, "consts", ()))
    for equation in closed.jaxpr.eqns:
        for value in equation.params.values():
            for entry in value if isinstance(value, tuple | list) else (value,):
                if hasattr(entry, "consts") and hasattr(entry, "jaxpr"):
                    yield from constants(entry)


def content(array: Any) -> np.ndarray[Any, Any]:
    """The content of an array; for random keys, their data."""
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        with jax.ensure_compile_time_eval():  # also while a program is captured
            array = jax.random.key_data(array)
    return np.asarray(array)
