"""One compiled function for one set of argument types.

Problem: types and structure of all results must be known before any data
exist, and code must be made once per placement and never again.  A
:class:`Body` is what JAX's tracing of the user's function yields, without
devices; :meth:`Body.on` makes (once) the code for given layouts on a slice.

Rule for maintainers: nothing here depends on values; everything is cached by
what it depends on.

Paper: section 3 (the compiled-function contract), section 4.2.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import jax
import numpy as np

from pathways_lab.client.code import export, jaxprs, layouts
from pathways_lab.client.code.layouts import Requested
from pathways_lab.client.functions import arguments, array_types, scopes
from pathways_lab.client.functions.array_types import ArrayType, type_of
from pathways_lab.client.lab import stats
from pathways_lab.client.lab.devices import OnSlices, Slice
from pathways_lab.client.lab.run_options import USUAL, Running
from pathways_lab.client.session import failures
from pathways_lab.core.errors import PathwaysError
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.program import Line
from pathways_lab.runtime import jax_private
from pathways_lab.runtime.arrays import dtype_of

LARGE_CONSTANT = 1 << 20
"""Closed-over arrays from this many bytes on are worth a warning."""


class LargeConstantWarning(UserWarning):
    """A compiled function carries large arrays in its code."""


class Body:
    """A traced function: types in, types out, structure of the result.

    requested: where the user wants each argument leaf; out_prefix: a pytree
    prefix of where the results go.  donated: flat positions of the arguments
    that may be overwritten.  prepared: programs of one call, by their key.
    derived: what JAX's transformations make of it.  running: what is said of its runs.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        name: str,
        in_types: Sequence[ArrayType],
        *,
        requested: Sequence[Requested] | None = None,
        out_prefix: Any = None,
        donated: tuple[int, ...] = (),
        labels: Sequence[str] = (),
        line: Line | None = None,
        owner: Callable[..., Any] | None = None,
        running: Running = USUAL,
    ) -> None:
        self.in_types = tuple(in_types)
        self.call = array_types.as_here(call, self.in_types)
        self.name = name
        self.donated = donated
        self.labels = tuple(labels) or tuple(f"argument {n}" for n in range(len(in_types)))
        self.line = line or Line()
        self.requested = tuple(requested or (None,) * len(in_types))
        self.running = running
        self.prepared = OnSlices[Any, Any]()
        self.derived: dict[Any, Any] = {}
        self._executables: dict[Any, export.Executable] = {}
        stats.work.traced += 1
        try:
            with (
                scopes.entered(scopes.Body(name)),
                jax_private.whole_tracebacks(),
                array_types.wide(self.in_types),
            ):
                structs = map(_struct, self.in_types, self.requested)
                self.jaxpr = jax.make_jaxpr(self.call)(*structs)
        except Exception as error:
            failures.reraise(error, node=name, called=self._called())
        if any(aval.dtype == jax.dtypes.float0 for aval in self.jaxpr.out_avals):
            raise failures.capture_failure(
                f"a result of {name!r} is {array_types.FLOAT0}",
                "differentiate by arguments that are not integers (argnums=), or leave it out",
                node=name,
            )
        self.out_types = tuple(type_of(aval) for aval in self.jaxpr.out_avals)
        self.out_tree = getattr(call, "out_tree", None)
        self.calls_python = jaxprs.calls_python(self.jaxpr.jaxpr)
        self._bound = bool(jaxprs.meshes_named(self.jaxpr.jaxpr)) or any(
            map(layouts.is_explicit, self.requested)
        )
        self.requested_out: tuple[Requested, ...] = (None,) * len(self.out_types)
        if out_prefix is not None:
            shape = jax.tree.unflatten(self.out_tree, range(len(self.out_types)))
            entries = arguments.broadcast(out_prefix, shape, "out_shardings")
            self.requested_out = tuple(
                layouts.check_requested(entry, "an entry of out_shardings") for entry in entries
            )
        _warn_of_constants(self.jaxpr, name, owner)

    def _called(self) -> str:
        """The call as types, for errors: ``f(w: float32[4,4], x: float32[8])``."""
        parts = (f"{label}: {kind}" for label, kind in zip(self.labels, self.in_types, strict=True))
        return f"{self.name}({', '.join(parts)})"

    def on(
        self,
        place: Slice,
        wanted: Sequence[Layout | None],
        pinned: Sequence[Layout | None] | None = None,
    ) -> export.Executable:
        """The code for these layouts of arguments and results.

        None: whatever suits the code; what the user asked of a result counts more.
        """
        pinned = pinned or (None,) * len(self.out_types)
        key = (self._where(place), tuple(wanted), tuple(pinned))
        known = self._executables.get(key)
        if known is None:
            made = self._export(place, wanted, pinned)
            alive = {k: e for k, e in self._executables.items() if not _released(k[0])}
            known, self._executables = made, {**alive, key: made}
        return known

    def _where(self, place: Slice) -> Any:
        """The part of a slice that code depends on: one code is for all slices of a shape."""
        return place if self._bound else (place.kind, place.axis_sizes)

    def wanted(self, index: int, place: Slice) -> Layout | None:
        """The layout that the user asked for argument leaf *index*."""
        requested = self.requested[index]
        if requested is None:
            return None
        return self._placed(requested, place, self.in_types[index], self.labels[index])

    def _export(
        self, place: Slice, wanted: Sequence[Layout | None], pinned: Sequence[Layout | None]
    ) -> export.Executable:
        out = list(pinned)
        for number, requested in enumerate(self.requested_out):
            if requested is not None:
                kind = self.out_types[number]
                out[number] = self._placed(requested, place, kind, f"result {number}")
        try:
            with (
                scopes.entered(scopes.Body(self.name)),
                jax_private.whole_tracebacks(),
                array_types.wide(self.in_types),
            ):
                return export.make(self, place, list(wanted), out)
        except Exception as error:
            failures.reraise(error, node=self.name)

    def _placed(self, requested: Any, place: Slice, kind: ArrayType, what: str) -> Layout:
        try:
            return layouts.layout_of(requested, place, kind)
        except PathwaysError as error:
            raise failures.capture_failure(
                f"{what} of {self.name!r}: {error.failure.message}",
                error.failure.remedy,
                line=error.failure.line,
                node=self.name,
            ) from None


def _released(where: Any) -> bool:
    return isinstance(where, Slice) and where.released


def _struct(kind: ArrayType, requested: Requested) -> jax.ShapeDtypeStruct:
    """An argument for JAX; with its sharding, which is part of its type for explicit axes."""
    sharding = requested if layouts.is_explicit(requested) else None
    return jax.ShapeDtypeStruct(
        kind.shape, dtype_of(kind.dtype), sharding=sharding, weak_type=kind.weak
    )


def _warn_of_constants(closed: Any, name: str, owner: Callable[..., Any] | None) -> None:
    large = [c for c in jaxprs.constants(closed) if c.nbytes >= LARGE_CONSTANT]
    if not large:
        return
    known = _closed_over(owner) if owner is not None else []
    parts = []
    for constant in large:
        names = [n for n, array in known if np.shares_memory(jaxprs.content(array), constant)]
        label = names[0] if names else "an array made in its body"
        kind = type_of(constant)
        parts.append(f"{label} ({kind}, {constant.nbytes / 2**20:.1f} MiB)")
    warnings.warn(
        f"compiled function {name!r} carries large arrays in its code: {', '.join(parts)}."
        " They are sent with the code and kept once per function; pass them as arguments instead.",
        LargeConstantWarning,
        stacklevel=2,
    )


def _closed_over(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """``(name, array)`` of everything that a Python function reads from outside."""
    return [
        (name + jax.tree_util.keystr(path), leaf)
        for name, value in read_from_outside(function).items()
        for path, leaf in jax.tree.leaves_with_path(value)
        if isinstance(leaf, np.ndarray | jax.Array)
    ]


def read_from_outside(function: Callable[..., Any]) -> dict[str, Any]:
    """Values that a Python function, or one inside of it, reads beside its arguments, by name."""
    function = getattr(function, "__wrapped__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    scope = {n: function.__globals__[n] for n in _names(code) if n in function.__globals__}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it has none yet
            scope[name] = cell.cell_contents
    return scope


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
