"""``pw.emulated(ms)``: hold every device for a given time, without using a core.

Problem: dispatch, order and overlap can only be seen where devices take time,
and eight CPU "devices" on two cores cannot compute for 50 ms each side by
side.  A computation that *sleeps* can.  It is an XLA custom call of a few lines
of C++, built once per user; where no compiler is found a Python callback does
the same, less exactly.

A sleep ends some 60 us late, and on busy cores the next one begins a while after that,
which no device does.  On hosts each device of a device queue therefore has a *clock*.  A
computation that was launched before the last one ended, by that clock, begins at that moment, and
its work between two holds is done in their time.  A computation that was launched later
begins when it does, so a wait for inputs or for dispatch is never hidden; and a hold that
comes more than 5 ms late has another cause, and counts.

Rule for maintainers: the held array is a real operand and a real result of the
call, so XLA can neither drop it nor move it; and the call is declared pointwise
to both partitioners, so that every device holds its own shard and nothing is
gathered.  The tests count the collectives.

Paper: section 5 (dispatch measured with trivial computations of known length).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxlib.mlir import ir

from pathways_lab.transport.addresses import cache_folder

TARGET = "pathways_lab_hold"
"""Name of the custom call: exporting code must list it among ``disabled_checks``."""

_SOURCE = pathlib.Path(__file__).with_name("emulated.cc")
_OPTIONS = "mhlo.backend_config"
_UNSURE = frozenset({"stablehlo.case", "stablehlo.if", "stablehlo.while"})
"""Operations in which a hold may run never, or again and again."""
_lock = threading.Lock()
Tree = TypeVar("Tree")


# --- the shared library --------------------------------------------------------


def compiler() -> str | None:
    """The C++ compiler that would be used, or None."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    return None


def build() -> pathlib.Path | None:
    """The library's path, built on first use (seconds); None without a compiler."""
    key = hashlib.sha256(
        "\0".join(
            (_SOURCE.read_text(), jax.__version__, platform.machine(), platform.system())
        ).encode()
    ).hexdigest()[:16]
    directory = cache_folder()
    path = directory / f"emulated-{key}.so"
    if path.exists():
        return path
    found = compiler()
    if found is None:
        return None
    # Several processes may build at once: each its own file, moved in one step.
    handle, scratch = tempfile.mkstemp(suffix=".so", dir=directory)
    os.close(handle)
    command = [found, "-std=c++17", "-O1", "-w", "-shared", "-fPIC"]
    command += ["-I", jax.ffi.include_dir(), str(_SOURCE), "-o", scratch]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        os.unlink(scratch)
        return None
    os.replace(scratch, path)
    return path


@functools.cache
def _load() -> ctypes.PyDLL | None:
    path = build()
    if path is None:
        return None
    # A call from Python takes less than to let go of the interpreter.
    library = ctypes.PyDLL(str(path))
    library.PathwaysLabLaunched.argtypes = [ctypes.c_int64]
    library.PathwaysLabLaunched.restype = None
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(library.PathwaysLabHold), platform="cpu")
    jax.ffi.register_ffi_target_as_batch_partitionable(TARGET)
    return library


def register() -> bool:
    """Make the custom call known to this process.  False: there is no compiler."""
    with _lock:
        return _load() is not None


# --- the clocks of a lane's devices -----------------------------------------------


def keeps_clock(lowered: Any, lane: int) -> bool:
    """Have the holds of a lowered function, not compiled yet, go by the clocks of a lane.

    lane: its number in this process.  False: they do not, because there is none that
    every call runs once; such calls must not be told to :func:`telling`.
    """
    module = lowered.compiler_ir("stablehlo")
    holds: list[Any] = []
    names: set[str] = set()

    def look(operation: Any) -> Any:
        names.add(operation.name)
        attributes = operation.attributes
        if "call_target_name" in attributes and attributes["call_target_name"].value == TARGET:
            holds.append(operation)
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(look)
        if not holds or names & _UNSURE:
            return False
        number = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), lane)
        for hold in holds:
            known = ir.DictAttr(hold.attributes[_OPTIONS])
            options = {name: known[name] for name in ("ms", "elements")}
            hold.attributes[_OPTIONS] = ir.DictAttr.get({**options, "lane": number})
    return True


def telling(call: Callable[..., Any], lane: int) -> Callable[..., Any]:
    """A launcher of *call*, whose holds go by the clocks of a device queue; it tells the clocks."""
    library = _load()
    assert library is not None
    launched: Callable[[int], None] = library.PathwaysLabLaunched

    def launch(*arguments: Any) -> Any:
        results = call(*arguments)
        launched(lane)
        return results

    return launch


def dear_zero() -> jax.Array:
    """A zero (uint8) that XLA takes for a thousand operations to compute.

    A cheaper computation for one device runs in the calling thread: then nothing
    could be in that device's queue.
    """
    ones = jax.lax.optimization_barrier(jnp.ones((8, 8), jnp.float32))
    zero: jax.Array = ((ones @ ones)[0, 0] < 0).astype(jnp.uint8)
    return zero


# --- the operation ---------------------------------------------------------------

_hold = Primitive("pathways_lab_hold")
_hold.def_abstract_eval(lambda x, **how: x)
_hold.def_impl(lambda x, **how: jax.jit(functools.partial(_hold.bind, **how))(x))


def _lower(context: Any, x: Any, *, ms: float, shared: bool) -> Any:
    """A custom call whose dimensions are all batch dimensions but a last one of size 1."""
    rule = jax.ffi.ffi_lowering(TARGET, operand_output_aliases={0: 0})
    shape = context.avals_in[0].shape
    elements = np.float64(math.prod(shape) if shared else 0)
    results = rule(context, x, ms=np.float64(ms), elements=elements, lane=np.int64(-1))
    result: Any = results[0] if isinstance(results, (list, tuple)) else results
    factors = [f"d{i}" if i > 17 else "ijklmnopqrstuvwxyz"[i] for i in range(len(shape))]
    dims = f"[{', '.join(factors)}]"
    sizes = ", ".join(f"{name}={size}" for name, size in zip(factors, shape, strict=True))
    attributes = result.owner.attributes
    attributes["sdy.sharding_rule"] = ir.Attribute.parse(
        f"#sdy.op_sharding_rule<({dims})->({dims}) {{{sizes}}}>"
    )
    attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(
        {"num_batch_dims": ir.StringAttr.get(str(len(shape) - 1))}
    )
    return results


def _lower_elsewhere(context: Any, x: Any, *, ms: float, shared: bool) -> Any:
    raise NotImplementedError(
        f"pw.emulated({ms:g}) stands in for an accelerator and exists on CPU devices only; "
        f"this function is being compiled for {', '.join(context.module_context.platforms)}. "
        "Run it on a slice of kind 'cpu', or call a real computation."
    )


mlir.register_lowering(_hold, _lower, platform="cpu")
mlir.register_lowering(_hold, _lower_elsewhere)
ad.primitive_jvps[_hold] = lambda primals, tangents, **how: (
    _hold.bind(primals[0], **how),
    tangents[0],
)
batching.primitive_batchers[_hold] = lambda args, dims, **how: (
    # The last dimension is the helper of size 1: it has to stay the last.
    _hold.bind(jnp.moveaxis(args[0], dims[0], 0), **how),
    0,
)


def _hold_by_callback(x: jax.Array, ms: float) -> jax.Array:
    def sleep(value: Any) -> Any:
        time.sleep(ms / 1e3)
        return value

    held: jax.Array = jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return held


def _hold_array(x: jax.Array, ms: float, shared: bool) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _hold_array(jax.random.key_data(x), ms, shared)
        keys: jax.Array = jax.random.wrap_key_data(data, impl=str(jax.random.key_impl(x)))
        return keys
    if not register():
        return _hold_by_callback(x, ms)
    held: jax.Array = _hold.bind(x[..., None], ms=ms, shared=shared)
    return held[..., 0]


def emulated(ms: float, *, shared: bool = False) -> Callable[[Tree], Tree]:
    """A function ``x -> x`` that holds the devices of its computation for *ms* milliseconds.

    For use inside compiled functions on CPU devices; on an accelerator it
    raises.  *x* is any pytree with at least one array that is not empty: its
    largest array passes through the sleeping operation, and whatever uses any
    of the returned arrays waits for it.  Gradients pass unchanged.

    shared: *ms* is what one device would take for the whole of *x*; a device that
        holds a part is held for its share of it.  So the same code costs the same
        work however its arrays are cut.  (Inside ``shard_map`` a shard is the whole.)

    In the lab a device is a queue: what was launched before the last computation ended
    begins, by an emulated clock, when that one ended, as if neither a sleep's lateness nor
    what else the computation does took time.  Waits for inputs and for dispatch are real.
    Computations with branches or loops keep no clock.

    Where no C++ compiler is found, a Python callback sleeps on one device and
    the others wait for it, whatever they hold.
    """
    if not (isinstance(ms, int | float) and 0 <= ms < math.inf):
        raise ValueError(f"emulated({ms!r}): the time in milliseconds is a number from 0 on.")

    def hold(x: Tree) -> Tree:
        leaves, tree = jax.tree.flatten(x)
        arrays = [jnp.asarray(leaf) for leaf in leaves]
        held = max(range(len(arrays)), key=lambda i: int(arrays[i].size), default=-1)
        if held < 0 or not arrays[held].size:
            raise ValueError(
                f"emulated({ms:g}) needs an array to hold on to, and got none that has elements. "
                "Pass the array that the next operation uses."
            )
        arrays[held] = _hold_array(arrays[held], float(ms), shared)
        if len(arrays) > 1:
            arrays = list(jax.lax.optimization_barrier(tuple(arrays)))
        out: Tree = jax.tree.unflatten(tree, arrays)
        return out

    return hold
