"""Code that calls back into Python, as it travels: traced once, in the kernel.

Problem: ``jax.export`` refuses code with callbacks, for they are Python objects of the process
that lowers it.  To send the user's function and to trace it again on its hosts would run the
user's Python twice, and what it counts, draws or prints while it is traced would be wrong.

How: the kernel lowers each callback to a foreign call that carries a number, and keeps the
callables by that number (:class:`Callback`).  Both travel.  When a host lowers the exported code,
it replaces each of these calls by the one that JAX makes for the host's own kind of device.

Rule for maintainers: the second door to private JAX (:mod:`.jax_private` is full); a test in
``tests/runtime/test_jax_callbacks.py`` names what moved.  A callable is called by the same code
of JAX's as if the host had traced the function.

Paper: section 4.2 (registering computations).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import jax.numpy as jnp
import numpy as np
from jax._src import callback as _callback
from jax._src import compiler as _compiler
from jax._src import config as _config
from jax._src import core as _core
from jax._src import debugging as _debugging
from jax._src import dispatch as _dispatch
from jax._src import ffi as _ffi
from jax._src import sharding_impls as _sharding_impls
from jax._src.export import _export
from jax._src.interpreters import mlir as _mlir
from jaxlib import _jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as _stablehlo

from pathways_lab.runtime.jax_private import shared_context

TARGET = "pathways_lab_callback"
"""Target of the calls back into Python in exported code."""

JAX_TARGETS = frozenset(
    f"xla_ffi{partitioned}_python_{device}_callback"
    for partitioned in ("", "_partitioned")
    for device in ("cpu", "gpu")
)
"""Targets of the calls back into Python in code that JAX has lowered for devices."""

CALLBACK_NAMES = frozenset(
    primitive.name
    for primitive in (
        _callback.pure_callback_p,
        _callback.io_callback_p,
        _debugging.debug_callback_p,
        _debugging.debug_print_p,
    )
)
"""Names of the primitives that call back into Python when they run."""

Type = tuple[tuple[int, ...], Any]
"""Shape and NumPy type of one flat argument or result."""


Wrap = Callable[[Callable[..., Any], bool, Callable[[], tuple[Any, ...]]], Callable[..., Any]]
"""``wrap(callback, numbered, blanks)``: what is called instead.  When *numbered*,
the first argument is the number of the calling device in the mesh, for
callbacks that run on every device; the others run once, on the first device.
``blanks()`` are results of the right shapes without content."""


@dataclass(frozen=True, eq=False)
class Callback:
    """One call back into Python, as it travels.

    call: takes and gives flat arrays.  inputs, outputs: their types.
    options: how JAX calls it: order, side effects, sharding.
    ordered: it takes and gives a token.
    numbered: it runs on every device; else once, on the first.
    wide: it was traced where 64 bits are on.
    lowered: its call is the one that JAX makes for the host's kind of device, but for its number.
    """

    call: Callable[..., Any]
    inputs: tuple[Type, ...]
    outputs: tuple[Type, ...]
    options: dict[str, Any]
    ordered: bool
    numbered: bool
    wide: bool
    lowered: bool = False

    def blanks(self) -> tuple[Any, ...]:
        """Results without content."""
        return tuple(np.zeros(*each) for each in self.outputs)


@dataclass(frozen=True, eq=False)
class Calling:
    """Exported code that calls back into Python.

    blob: the ``jax.export`` artefact, without effects.  callbacks: by number, pickled.
    ordered, unordered: its effects, as numbers in :data:`_EFFECTS`.
    ends: it has one more result, which says that it is over.
    tokens: so many of its first arguments, and of its results, only stand for its ordered effects.
    """

    blob: bytes
    callbacks: bytes
    ordered: tuple[int, ...]
    unordered: tuple[int, ...]
    ends: bool = False
    tokens: int = 0

    def calling(self, wrap: Wrap) -> Callable[..., Any]:
        """The counterpart of ``exported.call`` for code with callbacks; leaves in, leaves out."""
        exported = replace(
            _export.deserialize(bytearray(self.blob)),
            ordered_effects=tuple(_EFFECTS[number] for number in self.ordered),
            unordered_effects=tuple(_EFFECTS[number] for number in self.unordered),
        )
        bound = _Bound(cloudpickle.loads(self.callbacks), wrap)

        def called(*leaves: Any) -> list[Any]:
            tokens, given = leaves[: self.tokens], leaves[self.tokens :]
            made: list[Any] = _calling_p.bind(*given, exported=exported, bound=bound)
            made = [*tokens, *made]
            return [*made, jnp.zeros((), bool)] if self.ends else made

        return called


_EFFECTS = (
    _callback._IOEffect,
    _callback._OrderedIOEffect,
    _debugging.debug_effect,
    _debugging.ordered_debug_effect,
)
"""Effects: a process has one object for each, which an export cannot write."""


# --- in the kernel ----------------------------------------------------------------------

_emit_callback = _callback.emit_python_callback
_collecting = threading.local()


@contextlib.contextmanager
def _collected() -> Iterator[list[Callback]]:
    """While active, what this thread lowers calls :data:`TARGET`; its callables, by number."""
    vars(_callback)["emit_python_callback"] = _emit_number
    before = getattr(_collecting, "found", None)
    found: list[Callback] = []
    _collecting.found = found
    try:
        yield found
    finally:
        _collecting.found = before


def export(
    make: Callable[[], Any], dumps: Callable[[tuple[Callback, ...]], bytes]
) -> tuple[Calling, Any]:
    """Code that travels; and what *make* returns: the same as ``jax.export`` has it.

    Custom calls of :data:`TARGET` must be allowed there.  dumps: pickles the callbacks.
    """
    with _collected() as callbacks:
        exported = make()
    ordered, unordered = (
        tuple(map(_EFFECTS.index, effects))
        for effects in (exported.ordered_effects, exported.unordered_effects)
    )
    plain = replace(exported, ordered_effects=(), unordered_effects=())
    made = Calling(bytes(plain.serialize()), dumps(tuple(callbacks)), ordered, unordered)
    return made, exported


def _emit_number(
    context: Any, call: Any, token: Any, operands: Any, avals: Any, results: Any, **options: Any
) -> Any:
    found: list[Callback] | None = getattr(_collecting, "found", None)
    if found is None:
        return _emit_callback(context, call, token, operands, avals, results, **options)
    axes = context.module_context.axis_context
    numbered = isinstance(axes, _sharding_impls.SPMDAxisContext) and set(axes.manual_axes) == set(
        axes.mesh.axis_names
    )
    ordered = token is not None
    callback = Callback(
        call, _types(avals), _types(results), options, ordered, numbered, _config.enable_x64.value
    )
    found.append(callback)
    tokens = [token] if ordered else []
    context = _as_called(context, callback)
    lower = _ffi.build_ffi_lowering_function(TARGET, has_side_effect=options["has_side_effect"])
    made = list(lower(context, *tokens, *operands, index=np.uint64(len(found) - 1)).results)
    return made[ordered:], made[0] if ordered else None, None


def _types(avals: Sequence[Any]) -> tuple[Type, ...]:
    return tuple((tuple(aval.shape), np.dtype(aval.dtype)) for aval in avals)


def _as_called(context: Any, callback: Callback) -> Any:
    token = [_core.abstract_token] if callback.ordered else []
    return context.replace(
        avals_in=[*token, *(_core.ShapedArray(*each) for each in callback.inputs)],
        avals_out=[*token, *(_core.ShapedArray(*each) for each in callback.outputs)],
    )


# --- on a host --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Bound:
    """Callables of exported code, and what is called instead of them."""

    callbacks: Sequence[Callback]
    wrap: Wrap


_calling_p = _core.Primitive("pathways_lab_calling")
_calling_p.multiple_results = True


def _abstract(*avals: Any, exported: Any, bound: _Bound) -> Any:
    return _export._call_exported_abstract_eval(*avals, exported=exported)


def _lower(context: Any, *args: Any, exported: Any, bound: _Bound) -> Any:
    results = _export._call_exported_lowering(context, *args, exported=exported)
    calls: list[Any] = []

    def look(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            if target == TARGET or target in JAX_TARGETS:
                calls.append(operation)
        return ir.WalkResult.ADVANCE

    context.module_context.module.operation.walk(look)
    for operation in calls:
        index = ir.DictAttr(operation.attributes["mhlo.backend_config"])["index"]
        callback = bound.callbacks[ir.IntegerAttr(index).value]
        put = _renumber if callback.lowered else _replace
        put(context, operation, callback, bound.wrap)
    return results


_calling_p.def_effectful_abstract_eval(_abstract)
_mlir.register_lowering(_calling_p, _lower)


def _replace(context: Any, operation: Any, callback: Callback, wrap: Wrap) -> None:
    """Put JAX's own call in the place of a numbered one."""
    token, *operands = operation.operands if callback.ordered else (None, *operation.operands)
    inputs = [_core.ShapedArray(*each) for each in callback.inputs]
    outputs = [_core.ShapedArray(*each) for each in callback.outputs]
    wrapped = wrap(callback.call, callback.numbered, callback.blanks)
    with ir.InsertionPoint(operation), operation.location:
        if callback.numbered:
            inputs = [_core.ShapedArray((), np.dtype(np.uint32)), *inputs]
            operands = [_stablehlo.partition_id(), *operands]
        within = context.replace(avals_in=inputs, avals_out=outputs)
        made, after, _ = _emit_callback(
            within, wrapped, token, operands, inputs, outputs, **callback.options
        )
    called = context.module_context.host_callbacks
    if callback.wide and callable(called[-1]):
        called[-1] = _wide(called[-1])
    results = [after, *made] if callback.ordered else made
    for old, new in zip(operation.results, results, strict=True):
        old.replace_all_uses_with(new)
    operation.erase()


def _renumber(context: Any, operation: Any, callback: Callback, wrap: Wrap) -> None:
    """Have JAX's own call of a module that was lowered elsewhere mean a callable of this one."""
    wrapped = wrap(callback.call, False, callback.blanks)

    def after_token(token: Any, *args: Any) -> Any:
        return (token, *wrapped(*args))

    context.module_context.add_host_callback(after_token if callback.ordered else wrapped)
    number = len(context.module_context.host_callbacks) - 1
    config: Any = ir.DictAttr(operation.attributes["mhlo.backend_config"])
    said = {entry.name: entry.attr for entry in config}
    said["index"] = ir.IntegerAttr.get(said["index"].type, number)
    operation.attributes["mhlo.backend_config"] = ir.DictAttr.get(said)


def _wide(call: Callable[..., Any]) -> Callable[..., Any]:
    """JAX shrinks what callbacks take and give where its thread does not say 64 bits."""

    def wide(*args: Any) -> Any:
        with _config.enable_x64(True):
            return call(*args)

    return wide


# --- in a program whose devices are elsewhere -----------------------------------------------

NUMBERS = "pathways_lab.callbacks"
"""Attribute of a module: the numbers of its callables, in the order of JAX's own list."""


ORDERED, UNORDERED = (1, 3), (0,)
"""Effects, as numbers in :data:`_EFFECTS`."""


def keep_callables(client: Any, keep: Callable[[Any], int], drop: Callable[[int], None]) -> None:
    """Compile code with callbacks for a client that takes none: their numbers travel instead.

    keep(callable): its number; drop(number): nothing calls it any more.
    """
    compile_and_load: Any = _compiler.backend_compile_and_load
    # A client that lives takes a tenth of a core: one of its threads looks for work all the time.
    alive = weakref.ref(client)

    def compiled(backend: Any, module: Any, devices: Any, options: Any, called: Any) -> Any:
        if backend is not alive() or not called:
            return compile_and_load(backend, module, devices, options, called)
        numbers = [keep(each) for each in called]
        with module.context:
            wide = ir.IntegerType.get_signless(64)
            module.operation.attributes[NUMBERS] = ir.ArrayAttr.get(
                [ir.IntegerAttr.get(wide, number) for number in numbers]
            )
        made = compile_and_load(backend, module, devices, options, [])
        with contextlib.suppress(TypeError):
            for number in numbers:
                weakref.finalize(made, drop, number)
        return made

    vars(_compiler)["backend_compile_and_load"] = compiled


@functools.cache
def say_once() -> None:
    """From now on a failed call that calls back in order fails the next such call, and no others.

    JAX waits for the token of the last one, and it would keep a token that fails forever.
    """
    kept: Any = type(_dispatch.runtime_tokens)
    take, wait = kept.get_token_input, kept.block_until_ready

    def taken(self: Any, effect: Any, devices: Any) -> Any:
        try:
            return take(self, effect, devices)
        except RuntimeError:
            self.current_tokens.pop(effect, None)
            raise

    def waited(self: Any) -> None:
        try:
            wait(self)
        except RuntimeError:
            self.clear()
            raise

    kept.get_token_input, kept.block_until_ready = taken, waited


def numbered(
    module: bytes, call: Callable[[int, bool], Callable[..., Any]], dtype: Callable[[str], Any]
) -> list[Callback]:
    """The callbacks of such a module, by JAX's number.

    call: makes what calls a number's callable, which takes a token or not.
    dtype: NumPy's type for MLIR's word.

    Raises ValueError for callbacks without a number.
    """
    with shared_context():
        parsed = _jax.mlir.deserialize_portable_artifact(module)
        about = parsed.operation.attributes
        said: Any = ir.ArrayAttr(about[NUMBERS]) if NUMBERS in about else ()
        numbers = [ir.IntegerAttr(entry).value for entry in said]
        found: dict[int, Callback] = {}

        def look(operation: Any) -> Any:
            if operation.name == "stablehlo.custom_call":
                target = ir.StringAttr(operation.attributes["call_target_name"]).value
                if target in JAX_TARGETS:
                    config = ir.DictAttr(operation.attributes["mhlo.backend_config"])
                    index = ir.IntegerAttr(config["index"]).value
                    if index >= len(numbers):
                        raise ValueError(f"a callback {index} of {len(numbers)}")
                    results = [str(value.type) for value in operation.results]
                    ordered = "!stablehlo.token" in results
                    outputs = tuple(
                        (
                            tuple((t := ir.RankedTensorType(value.type)).shape),
                            dtype(str(t.element_type)),
                        )
                        for value in operation.results
                        if "token" not in str(value.type)
                    )
                    found[index] = Callback(
                        call(numbers[index], ordered), (), outputs, {}, ordered, False, False, True
                    )
            return ir.WalkResult.ADVANCE

        parsed.operation.walk(look)
        if not found:
            return []
        nothing = Callback(call(0, False), (), (), {}, False, False, False, True)
        return [found.get(index, nothing) for index in range(max(found) + 1)]
