"""From a traced function to code that travels.

Problem: hosts must run exactly the user's function, on layouts that everybody
knows beforehand, without the kernel having a single device.  The function is
lowered to StableHLO by ``jax.export`` for the kind of its slice; Shardy's
propagation over that code says where unspecified arguments and results go, and
they are pinned there; the hash of the code is the function's key, so that the
same function in a re-executed cell is the same function.

Functions that call back into Python travel the same way, with what they call by value
(cloudpickle): the user's Python is traced once, here (:mod:`pathways_lab.runtime.jax_callbacks`).

Rule for maintainers: the key covers everything that a host needs to compile;
two functions with one key must be interchangeable.

Paper: section 4.2 (registering computations), section 3.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
from jax import export as jax_export
from jax import jit as jax_jit  # JAX's own, also while jax.jit is routed to the lab
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding

from pathways_lab.client.code import jaxprs, layouts, pickling
from pathways_lab.client.code.layouts import Requested
from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.client.lab import stats
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.run_options import Running
from pathways_lab.client.session import failures
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.program import Line, SliceId
from pathways_lab.runtime import jax_callbacks, jax_private
from pathways_lab.runtime.arrays import dtype_of
from pathways_lab.runtime.client_messages import Function, Kind, Loop
from pathways_lab.transport.codec import pack_fields
from pathways_lab.transport.deferred_signals import HeldBack

PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
"""JAX's name of a kind of device when it lowers for it."""


class Body(Protocol):
    """The exported code: a traced function over flat leaves.

    call: the function.  jaxpr: its closed jaxpr.  calls_python: it has callbacks.
    running: what is said of its runs.
    """

    call: Callable[..., Any]
    name: str
    jaxpr: Any
    calls_python: bool
    running: Running
    in_types: tuple[ArrayType, ...]
    out_types: tuple[ArrayType, ...]
    requested: tuple[Requested, ...]
    donated: tuple[int, ...]
    line: Line


@dataclass(frozen=True)
class Executable:
    """Code for one placement.

    key: hash of the content.  kind: ``"export"`` (blob is a ``jax.export``
    artefact of the flat function) or ``"callbacks"`` (blob is the same with the callbacks,
    pickled).  donated: flat positions.  held: seconds that it holds its devices
    by ``pw.emulated``.  loop: set where hosts repeat it.
    checks: what its gangs are tested for (:data:`pathways_lab.runtime.nan_checks.TESTS`).
    """

    key: str
    kind: Kind
    blob: bytes
    name: str
    in_types: tuple[ArrayType, ...]
    out_types: tuple[ArrayType, ...]
    in_layouts: tuple[Layout, ...]
    out_layouts: tuple[Layout, ...]
    donated: tuple[int, ...]
    line: Line
    held: float = 0.0
    loop: Loop | None = None
    checks: tuple[str, ...] = ()

    def checked(self, check: frozenset[str]) -> Executable:
        """The same, tested on its devices for NaNs: see :mod:`pathways_lab.runtime.nan_checks`."""
        key = hashlib.sha256(f"{self.key} {sorted(check)}".encode()).hexdigest()[:32]
        return replace(self, key=key, checks=tuple(sorted(check)))

    def announced(self, place: SliceId) -> dict[str, Any]:
        """The data that go along with the blob."""
        ins, outs = (
            tuple([(kind.shape, kind.dtype) for kind in kinds])
            for kinds in (self.in_types, self.out_types)
        )
        return pack_fields(
            Function(
                self.key, place, self.kind, self.name, self.in_layouts, self.out_layouts,
                ins, outs, self.donated, self.line, self.loop, self.checks,
            )
        )  # fmt: skip


def make(
    body: Body, place: Slice, wanted: list[Layout | None], out: list[Layout | None]
) -> Executable:
    """Lower and pack *body* for *place*.  wanted, out: layouts that are already decided."""
    stats.work.exported += 1
    platform = PLATFORMS.get(place.kind, place.kind)
    named = jaxprs.meshes_named(body.jaxpr.jaxpr)
    like = _stands_for(body, place, named.get(place))
    _pin(body, place, wanted, out, place in named)
    structs = [
        jax.ShapeDtypeStruct(
            kind.shape,
            dtype_of(kind.dtype),
            sharding=_sharding(requested, layout, place, like),
            weak_type=kind.weak,
        )
        for kind, layout, requested in zip(body.in_types, wanted, body.requested, strict=True)
    ]
    out_shardings = [
        None if layout is None else layouts.sharding_of(layout, place, like) for layout in out
    ]
    # Arguments are counted by position everywhere: those that nothing reads stay.
    jitted = jax_jit(_as_traced(body), out_shardings=out_shardings, keep_unused=True)
    kind: Kind = "callbacks" if body.calls_python else "export"
    blob, module, callbacks = _exported(body, jitted, structs, platform)
    code = jax_private.read_lowered(
        module, [len(t.shape) for t in body.in_types], [len(t.shape) for t in body.out_types]
    )
    failures.check_axes(code.axes)
    in_layouts = _settled(wanted, code.inputs, body.in_types, place)
    out_layouts = _settled(out, code.outputs, body.out_types, place)
    identity = (body.in_types, body.out_types, in_layouts, out_layouts, body.donated, kind)
    digest = hashlib.sha256(code.text.encode())
    digest.update(repr(identity).encode())
    digest.update(callbacks)
    parts = max(map(_parts, (*in_layouts, *out_layouts)), default=1)
    return Executable(
        digest.hexdigest()[:32], kind, blob, body.name, body.in_types, body.out_types,
        in_layouts, out_layouts, body.donated, body.line,
        jaxprs.held_seconds(body.jaxpr.jaxpr, parts),
    )  # fmt: skip


def _as_traced(body: Body) -> Callable[..., Any]:
    """The result of the user's Python: it runs once, for any number of places."""

    def traced(*leaves: Any) -> Any:
        return jaxpr_as_fun(body.jaxpr)(*leaves)

    # JAX names the compiled module after it.
    traced.__name__ = traced.__qualname__ = body.call.__name__
    return traced


def _parts(layout: Layout) -> int:
    """Into how many different parts it cuts an array."""
    sizes = dict(layout.mesh)
    return math.prod(sizes[axis] for axes in layout.spec for axis in axes)


def _sharding(
    requested: Any, layout: Layout | None, place: Slice, like: Mesh | None
) -> NamedSharding | None:
    """The type of an argument for JAX; where axes are explicit, the user's own sharding."""
    if layouts.is_explicit(requested):
        return requested
    return None if layout is None else layouts.sharding_of(layout, place, like)


def _stands_for(body: Body, place: Slice, named: Mesh | None) -> Mesh | None:
    """The mesh whose devices the user's code means by a slice: virtual ones, or JAX's by a door.

    named: a mesh of the slice that stands in the code.
    """
    asked = (each.mesh for each in body.requested if layouts.is_explicit(each))
    meshes: list[Any] = [named, *asked]
    with contextlib.suppress(ValueError):  # within a trace of JAX's
        meshes.append(jax.sharding.get_mesh())
    return next((mesh for mesh in meshes if layouts.slice_of_mesh(mesh) is place), None)


def _pin(
    body: Body, place: Slice, wanted: list[Layout | None], out: list[Layout | None], named: bool
) -> None:
    """Decide as much as JAX needs to know on how many devices it lowers.

    named: a mesh in the code says it.
    """
    if named or any(layout is not None for layout in (*wanted, *out)):
        return
    wanted[:] = [layouts.replicated(place, len(kind.shape)) for kind in body.in_types]
    if not wanted:
        out[:] = [layouts.replicated(place, len(kind.shape)) for kind in body.out_types]


def _exported(
    body: Body, jitted: Any, structs: list[Any], platform: str
) -> tuple[bytes, bytes, bytes]:
    """As it travels, the StableHLO in it, and what it calls in Python."""
    foreign = jaxprs.foreign_calls(body.jaxpr.jaxpr)
    if body.calls_python:
        foreign.add(jax_callbacks.TARGET)
    disabled = [jax_export.DisabledSafetyCheck.custom_call(target) for target in sorted(foreign)]
    exporter = jax_export.export(jitted, platforms=[platform], disabled_checks=disabled)
    callbacks = b""
    # Nothing of the user's runs here.  JAX's C++ code asks virtual devices, which are Python, and
    # an interrupt that is raised there would end the process.
    with jax_private.exporting_without_backend(), HeldBack():
        try:
            if body.calls_python:
                pickled = functools.partial(_pickled, body)
                calling, exported = jax_callbacks.export(lambda: exporter(*structs), pickled)
                blob, callbacks = pickle.dumps(calling), calling.callbacks
            else:
                exported = exporter(*structs)
                blob = bytes(exported.serialize())
        except KeyError as unknown:
            raise failures.capture_failure(
                f"compiled function {body.name!r} takes or returns an array of {unknown.args[0]},"
                " and jax.export cannot write that dtype",
                "take and return a wider one, and use .astype() inside of the function",
                node=body.name,
            ) from unknown
    jax_private.forget_lowered()
    return blob, exported.mlir_module_serialized, callbacks


def _pickled(body: Body, callbacks: object) -> bytes:
    try:
        return pickling.dumps(callbacks)
    except Exception as error:
        raise failures.capture_failure(
            f"compiled function {body.name!r} calls back into Python, what it calls is sent by"
            f" value, and that cannot be pickled: {error}",
            "do not close over locks, files, sockets, or handles",
            node=body.name,
        ) from error


def _settled(
    decided: list[Layout | None],
    found: tuple[Layout | None, ...],
    kinds: tuple[ArrayType, ...],
    place: Slice,
) -> tuple[Layout, ...]:
    """The chosen layout; else that of propagation, where it cuts evenly; else whole copies."""
    settled = []
    for layout, propagated, kind in zip(decided, found, kinds, strict=True):
        if layout is None and propagated is not None and layouts.fits(propagated, kind, place):
            layout = propagated
        settled.append(layout or layouts.replicated(place, len(kind.shape)))
    return tuple(settled)
