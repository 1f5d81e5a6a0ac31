"""The door to private JAX API.

Problem: what Pathways Lab cannot do without and JAX has no public door for:
building a CPU client that is not *the* backend of the process, asking whether
a backend exists without creating one, exporting without one, learning the
shardings that the partitioner would choose, and saying in a printed stand-in
that its value comes later.  Each is a few lines, and each may move with any
JAX release.

Rule for maintainers: callbacks (:mod:`.jax_callbacks`) and the coordination process have
doors of their own, and no other module imports ``jax._src`` or ``jaxlib._jax``.  Every
function here has a test in ``tests/runtime/test_jax_private.py`` that names what moved.  Prefer
removing a function to adding one.

Paper: section 4.2 (the client compiles without owning devices), section 4.5
(hosts own their devices through the accelerator's own runtime).
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from jax._src import api as _api
from jax._src import checkify as _checkify
from jax._src import config as _config
from jax._src import core as _core
from jax._src import distributed as _distributed
from jax._src import pjit as _pjit
from jax._src import source_info_util
from jax._src import xla_bridge as _xla_bridge
from jax._src.export import _export
from jax._src.export import serialization as _serialization
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.interpreters import pxla as _pxla
from jax.extend.core import ClosedJaxpr
from jaxlib import _jax, xla_client
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import mpmd as _mpmd
from jaxlib.mlir.dialects import sdy

from pathways_lab.core.program.layout import Layout


def read_flags() -> None:
    """Have XLA read ``XLA_FLAGS``: what it does not know ends the process, with a word about it.

    It would do so at the first use of a device, where others have begun to wait.
    """
    xla_client.CompileOptions()


def make_cpu_client(devices: int) -> Any:
    """A CPU client with *devices* devices, beside the global backend, not in it.

    The first client of the process reads ``XLA_FLAGS``, each reads ``NPROC``: the threads that
    compute in it.  One device has as many as plain JAX gives it; with more than there are
    processors its matrix products take a tenth longer.
    """
    with _THREADS:
        before = os.environ.get("NPROC")
        os.environ["NPROC"] = str(threads_of(devices))
        try:
            return xla_client.make_cpu_client(asynchronous=True, num_devices=devices)
        finally:
            if before is None:
                del os.environ["NPROC"]
            else:
                os.environ["NPROC"] = before


_THREADS = threading.Lock()


def threads_of(devices: int) -> int:
    """How many threads a client with *devices* CPU devices needs at least.

    Computations on several devices wait for each other in collectives: those of one call, and one
    call that waits to launch the next, must find threads at once, or the client stands still.
    """
    return max(os.cpu_count() or 1, 2 if devices == 1 else 2 * devices + 2)


_AGES = 10**8
"""Seconds.  A limit that would end a whole process must not run out."""


def missing_cpu_collectives(system: str = sys.platform) -> str:
    """Why CPU devices of several processes cannot compute together here; "" if they can."""
    if system not in ("linux", "darwin"):
        return f"JAX has no collectives between processes on {system!r}"
    if not hasattr(_jax, "make_gloo_tcp_collectives"):
        return "this jaxlib was built without collectives between processes"
    return ""


def put_shards(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    sharding: Any,
    shards: Sequence[np.ndarray[Any, Any]],
    devices: Sequence[Any],
) -> Any:
    """A sharded array from the NumPy arrays of this process's devices.

    As ``jax.device_put`` of each and ``jax.make_array_from_single_device_arrays``,
    in a tenth of the time.
    """
    return _pxla.batched_device_put(_aval(shape, dtype), sharding, list(shards), list(devices))


@functools.lru_cache(maxsize=4096)
def _aval(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    return _core.ShapedArray(shape, dtype)


def coordination_agent(address: str, rank: int) -> Any:
    """This process's end of a coordination service; ``connect()`` waits for the other ranks.

    address: as gRPC takes it, ``"unix:/path"`` or ``"host:port"``.

    It ends the *process* when connecting fails, and when the service goes away
    while it is connected; ``shutdown()`` makes it harmless, cancels what waits
    in it, and leaves the rest usable.  Hence no time limit, and see
    :mod:`pathways_lab.runtime.islands.coordination_relay`.
    """
    return _jax.get_distributed_runtime_client(
        address,
        rank,
        init_timeout=_AGES,
        heartbeat_timeout=_AGES,
        shutdown_timeout=1,
        use_compression=False,
        shutdown_on_destruction=False,
    )


def cpu_collectives(agent: Any, hostname: str) -> Any:
    """Collectives between processes; listens on a port of *hostname*, this process's own."""
    return _jax.make_gloo_tcp_collectives(distributed_client=agent, hostname=hostname)


def make_joint_cpu_client(
    agent: Any, collectives: Any, rank: int, processes: int, devices: int
) -> Any:
    """This process's part of a CPU client of several; *devices* of them are its own.

    Waits for the other processes.  ``devices()`` has all devices, in rank
    order; counts may differ between processes.
    """
    return xla_client.make_cpu_client(
        asynchronous=True,
        distributed_client=agent,
        node_id=rank,
        num_nodes=processes,
        collectives=collectives,
        num_devices=devices,
    )


def join_platform(agent: Any, rank: int, processes: int) -> None:
    """Make the connected *agent* the one that the platform's own client will use.

    The same as ``jax.distributed.initialize``, except that no rank serves the
    others.  Must come before the first use of a backend.
    """
    state = _distributed.global_state
    if state.client is not None or backends_initialised():
        raise RuntimeError("this process has JAX devices already, it cannot join others now")
    state.client = agent
    state.process_id = rank
    state.num_processes = processes


def backends_initialised() -> bool:
    """Whether this process has created a global JAX backend."""
    return bool(_xla_bridge.backends_are_initialized())


class _BridgeWithoutBackend:
    """Exporting sees this instead of ``xla_bridge``: no backend, its one answer known."""

    def __init__(self, real: types.ModuleType) -> None:
        self._real = real
        self._answers = types.SimpleNamespace(serialize_with_sdy=True)

    def get_backend(self) -> types.SimpleNamespace:
        return self._answers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Contexts(threading.local):
    uses = 32
    now: Any = None
    left = 0


_contexts = _Contexts()
_new_context = _mlir.make_ir_context


def shared_context() -> Any:
    """An MLIR context of this thread, as ``with`` takes it, for a few modules, one after another.

    JAX makes two for each function that is exported, and to load their dialects takes a fifth
    of the time; but all that was ever named in one stays as long as it does.
    """
    if not _contexts.left:
        _contexts.now, _contexts.left = _new_context(), _contexts.uses
    _contexts.left -= 1
    return _contexts.now


def share_contexts() -> None:
    """All that JAX lowers in this process from now on is in shared contexts."""
    vars(_mlir)["make_ir_context"] = shared_context


for _number, _type in enumerate((ml_dtypes.int2, ml_dtypes.uint2), start=100):
    # XLA computes with these, but JAX's exports have no number for them.
    if (_dtype := np.dtype(_type)) not in _serialization._dtype_to_dtype_kind:
        _serialization.register_dtype_kind(_dtype, _number)

_export_lock = threading.Lock()
_exporting = 0


@contextlib.contextmanager
def exporting_without_backend() -> Iterator[None]:
    """While active, ``jax.export`` serialises without creating a backend, in shared contexts.

    It asks the backend one question, whether the compiler understands Shardy;
    the compilers of all supported platforms do.  May be nested, on any thread.
    """
    global _exporting
    with _export_lock:
        if _exporting == 0:
            vars(_export)["xb"] = _BridgeWithoutBackend(_xla_bridge)
            vars(_mlir)["make_ir_context"] = shared_context
        _exporting += 1
    try:
        yield
    finally:
        with _export_lock:
            _exporting -= 1
            if _exporting == 0:
                vars(_export)["xb"] = _xla_bridge
                vars(_mlir)["make_ir_context"] = _new_context


def forget_lowered() -> None:
    """Let go of what functions were lowered to, here and in user code.

    JAX keeps the last 2,048 of them, each a MB and more, in case that one is asked for again.
    Compiled functions are kept elsewhere.
    """
    _pjit._pjit_lower.cache_clear()
    _pxla._cached_lowering_to_hlo.cache_clear()


def user_frames(source_info: Any) -> list[tuple[str, int]]:
    """``(file, line)`` of the frames outside JAX that made an equation, innermost first."""
    return [
        (frame.file_name, frame.start_line)
        for frame in source_info_util.user_frames(source_info.traceback)
    ]


def replay(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of a recorded equation for other operands, in its own context."""
    parameters = equation.primitive.get_bind_params(equation.params)
    where = source_info_util.current_name_stack() + equation.source_info.name_stack
    with (
        source_info_util.user_context(equation.source_info.traceback, name_stack=where),
        equation.ctx.manager,
    ):
        results = equation.primitive.bind(*operands, **parameters)
    return list(results) if equation.primitive.multiple_results else [results]


def at_equation(equation: Any) -> Any:
    """A context in which what is recorded stands at the user's line of a recorded equation."""
    return source_info_util.user_context(equation.source_info.traceback)


def replayed_like(equation: Any) -> tuple[Any, ...]:
    """Equal for equations whose replays with the same operands are the same; if it has a hash."""
    parameters = [each for each in equation.params.items() if each[0] not in _RULES]
    scopes = str(equation.source_info.name_stack)
    return equation.primitive, equation.ctx, scopes, _strictly(sorted(parameters))


_RULES = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd")
"""Parameters that say how to differentiate: for each use of a function others."""


def _strictly(value: Any) -> Any:
    """Different for values that only compare equal (1, 1.0, True; 0.0, -0.0)."""
    if isinstance(value, tuple | list):
        return (type(value), *map(_strictly, value))
    if isinstance(value, float | complex):
        return type(value), repr(value)
    if isinstance(value, ClosedJaxpr) and not value.consts:
        return _code(value.jaxpr)
    return type(value), value


def _code(jaxpr: Any) -> tuple[Any, ...]:
    """A jaxpr without the names of its variables."""
    numbers: dict[Any, int] = {}

    def told(atom: Any) -> tuple[Any, ...]:
        if isinstance(atom, _core.Literal):
            return atom.aval, type(atom.val), np.asarray(atom.val).tobytes()
        return atom.aval, numbers.setdefault(atom, len(numbers))

    return (
        *map(told, (*jaxpr.constvars, *jaxpr.invars)),
        *((replayed_like(each), *map(told, (*each.invars, *each.outvars))) for each in jaxpr.eqns),
        *map(told, jaxpr.outvars),
    )


def needed(jaxpr: Any, outputs: Sequence[bool]) -> list[bool]:
    """Which inputs of a jaxpr these of its outputs depend on."""
    return list(_partial_eval.dce_jaxpr(jaxpr, list(outputs))[1])


def values_read_by(fetch: Callable[[Any], Any], key: Callable[[Any], Any]) -> None:
    """Have errors of ``checkify`` read what *fetch* makes of them, ``jax.device_get`` what *key*
    makes of a leaf, and IPython print what says that it is an array of JAX's by its ``repr``.
    """
    checks, api, error_class = vars(_checkify), vars(_api), vars(_checkify)["Error"]
    check, get, look = checks["_check_error"], api["_device_get"], error_class.get_exception
    checks["_check_error"] = lambda error, **how: check(fetch(error), **how)
    error_class.get_exception = lambda error: look(fetch(error))
    api["_device_get"] = lambda leaf: get(key(leaf))
    vars(_jax)["Array"]._repr_pretty_ = lambda array, to, cycle: to.text(repr(array))


def whole_tracebacks() -> Any:
    """A context in which JAX leaves tracebacks whole, so that they tell who raised an error."""
    context: Any = _config.traceback_filtering
    return context("off")


trace_context: Callable[[], tuple[Any, ...]] = _config.trace_context
"""The additions of this thread's configuration of JAX to traced code: types of 64 bits,
precision, promotion, meshes.  Equal where the same code comes out; JAX's own caches ask it too."""


def tracing() -> bool:
    """Whether this thread's code runs under a transformation of JAX's."""
    return not _core.trace_state_clean()


# --- lowered code: shardings without devices --------------------------------


@dataclass(frozen=True)
class LoweredCode:
    """The facts in the text of a StableHLO module.

    text: the module without source locations: equal for equal code.
    inputs, outputs: the layout of each argument and result as Shardy propagates
        them; None where it has no opinion or one that a Layout cannot express.
    axes: the names of its meshes' axes.
    """

    text: str
    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout | None, ...]
    axes: frozenset[str]


def read_lowered(
    module: str | bytes, input_ranks: Sequence[int], output_ranks: Sequence[int]
) -> LoweredCode:
    """Read a StableHLO module, text or an export's, and run Shardy's propagation over it.

    input_ranks, output_ranks: dimensions of each argument and result as JAX
    sees them (a key array has one more in the module).
    """
    with shared_context():
        if isinstance(module, bytes):
            parsed = _jax.mlir.deserialize_portable_artifact(module)
        else:
            parsed = ir.Module.parse(module)
        text = str(parsed.operation.get_asm(enable_debug_info=False))
        pipeline = "builtin.module(sdy-propagation-pipeline)"
        passmanager.PassManager.parse(pipeline).run(parsed.operation)
        meshes: dict[str, tuple[tuple[str, int], ...]] = {}
        names: set[str] = set()
        main: Any = None
        for operation in parsed.body.operations:
            attributes = operation.operation.attributes
            name = ir.StringAttr(attributes["sym_name"]).value if "sym_name" in attributes else ""
            if operation.operation.name == "sdy.mesh":
                mesh = sdy.MeshAttr(attributes["mesh"])
                names.update(sdy.MeshAxisAttr(axis).name for axis in mesh.axes)
                if not mesh.device_ids:
                    axes = tuple(
                        (axis.name, axis.size) for axis in map(sdy.MeshAxisAttr, mesh.axes)
                    )
                    meshes[f"@{name}"] = axes
            elif name == "main":
                main = operation.operation
        return LoweredCode(
            text,
            _layouts(main.attributes, "arg_attrs", input_ranks, meshes),
            _layouts(main.attributes, "res_attrs", output_ranks, meshes),
            frozenset(names),
        )


@dataclass(frozen=True)
class Fragment:
    """A module as functions that stand beside others in a larger one.

    text: of the functions; the main one has the name that was asked for.
    inputs, outputs: the types of its arguments and results, as MLIR.
    """

    text: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def fragment(module: str, name: str, mesh: str, axes: tuple[tuple[str, int], ...]) -> Fragment:
    """A StableHLO module's functions, renamed after *name*, over a mesh of *axes* called *mesh*."""
    with _mlir.make_ir_context():
        parsed = ir.Module.parse(module)
        functions = []
        inputs: tuple[str, ...] = ()
        outputs: tuple[str, ...] = ()
        for operation in list(parsed.body.operations):
            op = operation.operation
            symbol = ir.StringAttr(op.attributes["sym_name"]).value
            is_function = op.name == "func.func"
            new = f"{name}.{symbol}" if is_function else mesh
            if symbol == "main":
                new = name
                kind = ir.FunctionType(ir.TypeAttr(op.attributes["function_type"]).value)
                inputs, outputs = tuple(map(str, kind.inputs)), tuple(map(str, kind.results))
                sizes = ", ".join(f"{quoted(axis)}={size}" for axis, size in axes)
                op.attributes["mesh_shape"] = ir.Attribute.parse(f"#sdy.mesh<[{sizes}]>")
            ir.SymbolTable.replace_all_symbol_uses(symbol, new, parsed.operation)
            ir.SymbolTable.set_symbol_name(op, new)
            if is_function:
                ir.SymbolTable.set_visibility(op, "private")
                functions.append(op)
        text = "\n".join(str(op.get_asm(enable_debug_info=False)) for op in functions)
        return Fragment(text, inputs, outputs)


def quoted(text: str) -> str:
    """Text as MLIR writes it: whatever is in it, and without an end in its middle."""
    plain = (chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\{b:02X}" for b in text.encode())
    return f'"{"".join(plain)}"'


def verified_mlir(text: str) -> str:
    """A module in Shardy's ``mpmd`` dialect as MLIR prints it.  Raises ValueError when illegal."""
    with _mlir.make_ir_context() as context:
        _mpmd.register_dialect(context)
        try:
            module = ir.Module.parse(text)
            module.operation.verify()
        except ir.MLIRError as error:
            raise ValueError(str(error)) from None
        return str(module)


def _layouts(
    attributes: Any,
    which: str,
    ranks: Sequence[int],
    meshes: dict[str, tuple[tuple[str, int], ...]],
) -> tuple[Layout | None, ...]:
    if which not in attributes:
        return (None,) * len(ranks)
    # Ordered effects add tokens, which are no arrays to JAX.
    entries = list(ir.ArrayAttr(attributes[which]))
    if len(entries) == len(ranks):
        return tuple(_layout(e, rank, meshes) for e, rank in zip(entries, ranks, strict=True))
    entries = [
        entry for entry in ir.ArrayAttr(attributes[which]) if "jax.token" not in ir.DictAttr(entry)
    ]
    return tuple(_layout(entry, rank, meshes) for entry, rank in zip(entries, ranks, strict=True))


def _layout(
    attributes: Any, rank: int, meshes: dict[str, tuple[tuple[str, int], ...]]
) -> Layout | None:
    named = ir.DictAttr(attributes)
    if "sdy.sharding" not in named:
        return None
    sharding = sdy.TensorShardingAttr(named["sdy.sharding"])
    mesh = meshes.get(str(sharding.mesh_or_ref))
    if mesh is None or sharding.unreduced_axes:
        return None
    spec = []
    for dimension in list(sharding.dimension_shardings)[:rank]:
        axes = [sdy.AxisRefAttr(axis) for axis in sdy.DimensionShardingAttr(dimension).axes]
        if any(axis.sub_axis_info is not None for axis in axes):
            return None
        spec.append(tuple(axis.name for axis in axes))
    return Layout(mesh, tuple(spec))


# --- stand-ins ----------------------------------------------------------------

Describe = Callable[[Any], "str | None"]
_standin: Any = _partial_eval.DynamicJaxprTracer
_short_repr = _standin._short_repr
_describers: list[Describe] = []
_describers_lock = threading.Lock()


def _described(tracer: Any) -> str:
    for describe in reversed(_describers):
        text = describe(tracer)
        if text is not None:
            return text
    return str(_short_repr(tracer))


@contextlib.contextmanager
def standins_described_by(describe: Describe) -> Iterator[None]:
    """While active, JAX's stand-ins print what *describe* says, where it says something.

    May be nested, on any thread; *describe* answers None for stand-ins that
    are not its own.
    """
    with _describers_lock:
        _describers.append(describe)
        _standin._short_repr = _described
    try:
        yield
    finally:
        with _describers_lock:
            _describers.remove(describe)
            if not _describers:
                _standin._short_repr = _short_repr


_TRANSFORMATIONS = {
    _ad.JVPTracer: "jax.grad",
    _ad.LinearizeTracer: "jax.grad",
    _batching.BatchTracer: "jax.vmap",
}


def transformation_of(tracer: Any) -> str:
    """Which transformation of JAX's gave a stand-in to the code that runs now, as users call it.

    "" when none is at work on this thread: the stand-in is left over from one that is over.
    """
    if not tracing():
        return ""
    known = _TRANSFORMATIONS.get(type(tracer))
    if known is None:
        word = getattr(getattr(tracer, "_debug_info", None), "traced_for", "transformation")
        known = "jax.jit" if word == "jit" else f"JAX's {word}"
    return known


def standin_origin(tracer: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """``(equation, its operands that are stand-ins)`` that made a stand-in.

    None for an argument of the function that is being captured.
    """
    equation = getattr(tracer, "parent", None)
    if equation is None:
        return None
    return equation, tuple(equation.in_tracers)


def unpickled_function(text: bytes) -> tuple[Any, ...]:
    """A function of colocated Python, and trees and specs of its arguments and of its results.

    Runs the code of who sent it.
    """
    from jax.experimental.colocated_python import serialization

    return tuple(serialization._deserialize(text)[:5])
