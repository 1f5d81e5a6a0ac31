"""The primitives of captured programs: the operations that JAX records and does not know.

Problem: JAX records calls of compiled functions, moves and decisions as equations, and keeps the
parameters of equations: in caches of types by their hash, and in the captured code of plain
``jax.jit`` functions, which it reuses in later captures.

Rule for maintainers: a parameter carries all that it stands for, and never keeps an array alive.

Paper: section 3 (the program tracer).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from jax.core import ShapedArray
from jax.extend.core import Primitive

from pathways_lab.client.code.layouts import Requested
from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.client.functions.jit import CompiledFunction
from pathways_lab.client.functions.traced_function import Body
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.session import failures
from pathways_lab.client.session.handles import Handle
from pathways_lab.runtime.arrays import dtype_of


class Site:
    """A call of a compiled function, without its arguments.

    Equal to every other site with results of these types, because that is all
    that JAX's cache of types may depend on; so the cache keeps only one of them.
    """

    def __init__(self, function: CompiledFunction, body: Body) -> None:
        self.function = function
        self.body = body

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Site) and other.body.out_types == self.body.out_types

    def __hash__(self) -> int:
        return hash(self.body.out_types)

    def __repr__(self) -> str:
        return self.function.name


class Outside:
    """A handle that the program reads from outside; weakly, because JAX keeps parameters."""

    def __init__(self, handle: Handle) -> None:
        self.kind = handle.type
        self._handle = weakref.ref(handle)

    @property
    def handle(self) -> Handle:
        """Raises PathwaysError when nobody has it any more."""
        handle = self._handle()
        if handle is None:
            raise failures.capture_failure(
                f"a handle ({self.kind}) that captured code reads from outside is gone",
                "pass it as an argument",
            )
        return handle

    def __repr__(self) -> str:
        return str(self.kind)


@dataclass(frozen=True, eq=False)
class Move:
    """An explicit ``device_put``: to a slice, under a sharding or the nearest layout.

    trimmed: rows of zeros at its ends do not travel.
    """

    slice: Slice
    requested: Requested = None
    trimmed: bool = False

    def __repr__(self) -> str:
        return f"to {self.slice.name}"


call_p = Primitive("pw_call")
"""A call of a compiled function.  Parameter: ``site``."""
call_p.multiple_results = True
handle_p = Primitive("pw_handle")
"""A handle from outside.  Parameter: ``outside``."""
move_p = Primitive("pw_move")
"""An explicit transfer.  Parameter: ``move``."""
beside_p = Primitive("pw_beside")
"""A value, moved to the slice of a second one where that has a place.  Parameter: ``trimmed``."""

switch_p = Primitive("pw_switch")
"""One of several branches.  Parameter: ``branches``, and how many arguments each reads."""
switch_p.multiple_results = True
within_p = Primitive("pw_within")
"""Nodes of one case of a decision; only nodes of the same case may read the results."""
within_p.multiple_results = True
until_p = Primitive("pw_until")
"""A loop.  Parameters: ``done``, ``body``, ``most``, and how many arguments each reads."""
until_p.multiple_results = True

OWN = frozenset(p.name for p in (call_p, handle_p, move_p, beside_p, switch_p, within_p, until_p))
"""Names of the primitives that only a program may contain."""


def _aval(kind: ArrayType) -> ShapedArray:
    return ShapedArray(kind.shape, dtype_of(kind.dtype), weak_type=kind.weak)


call_p.def_abstract_eval(lambda *_, site: [_aval(kind) for kind in site.body.out_types])
handle_p.def_abstract_eval(lambda *, outside: _aval(outside.kind))
move_p.def_abstract_eval(lambda value, *, move: value)
beside_p.def_abstract_eval(lambda value, _, **__: value)
switch_p.def_abstract_eval(lambda *_, types, **__: [_aval(kind) for kind in types])
within_p.def_abstract_eval(lambda *_, types, **__: [_aval(kind) for kind in types])
until_p.def_abstract_eval(lambda *_, types, **__: [_aval(kind) for kind in types])
