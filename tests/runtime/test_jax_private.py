"""Each private JAX door that we use still opens, and opens on the same room.

A failure here means that JAX moved something: the message says what, and
``pathways_lab/runtime/jax_private.py`` is the only file to change.
"""

from __future__ import annotations

import gc
import linecache
import subprocess
import sys
import textwrap
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pathways_lab.runtime import jax_private

OWN_OUTPUT = """
import os, sys
sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
"""
"""Where libraries print from their own threads, even in the middle of a line, Python does not."""


def in_new_process(code: str) -> str:
    """Run *code* where nothing has touched JAX yet; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", OWN_OUTPUT + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_cpu_client_computes_without_a_global_backend() -> None:
    """A hand-built client runs jit, and the process still has no backend."""
    out = in_new_process("""
        import numpy as np, jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        from pathways_lab.runtime import jax_private
        client = jax_private.make_cpu_client(4)
        devices = client.local_devices()
        mesh = Mesh(np.array(devices), ("d",))
        cut = NamedSharding(mesh, P("d"))
        x = jax.device_put(np.arange(8, dtype=np.float32), cut)
        total = jax.jit(lambda v: v.sum(), out_shardings=NamedSharding(mesh, P()))(x)
        print(len(devices), float(total), jax_private.backends_initialised())
    """)
    assert out == "4 28.0 False", (
        "a client made by jaxlib.xla_client.make_cpu_client no longer stands on its own: "
        f"expected '4 28.0 False', got {out!r}"
    )


def test_backends_initialised_sees_the_first_use() -> None:
    """The question itself creates nothing, and notices when a backend appears."""
    out = in_new_process("""
        import jax
        from pathways_lab.runtime import jax_private
        before = jax_private.backends_initialised()
        jax.devices("cpu")
        print(before, jax_private.backends_initialised())
    """)
    assert out == "False True"


EXPORT = """
    import contextlib, jax, numpy as np
    from jax import export
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from pathways_lab.runtime import jax_private

    class StandClient:
        platform, runtime_type = "cpu", "none"

    class Stand:
        platform, device_kind, process_index, client = "cpu", "cpu", 0, StandClient()
        def __init__(self, number):
            self.id = self.local_hardware_id = number

    cut = NamedSharding(Mesh(np.array([Stand(0), Stand(1)], dtype=object), ("d",)), P("d"))
    shim = {shim}
    with shim():
        made = export.export(jax.jit(lambda x: x + 1, in_shardings=cut), platforms=["cpu"])(
            jax.ShapeDtypeStruct((4,), np.float32, sharding=cut))
        blob = made.serialize()
    print(len(blob) > 100, jax_private.backends_initialised())
"""


def test_export_needs_no_backend() -> None:
    out = in_new_process(EXPORT.format(shim="jax_private.exporting_without_backend"))
    assert out == "True False", (
        "jax.export asks the backend something new: see jax._src.export._export"
    )


def test_export_without_the_shim_creates_one() -> None:
    """The shim is still needed; when this fails, delete it."""
    assert in_new_process(EXPORT.format(shim="contextlib.nullcontext")) == "True True"


def test_shim_nests_over_threads_and_restores() -> None:
    from jax._src import xla_bridge
    from jax._src.export import _export

    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with jax_private.exporting_without_backend():
            entered.set()
            leave.wait(10)

    other = threading.Thread(target=hold)
    with jax_private.exporting_without_backend():
        other.start()
        assert entered.wait(10)
    assert _export.xb is not xla_bridge, "left while another thread still exports"
    leave.set()
    other.join(10)
    assert _export.xb is xla_bridge


def test_exports_share_contexts_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written in a context stays, so each has an end; other code of JAX's has its own."""
    from jax._src.interpreters import mlir

    made = weakref.WeakSet[Any]()
    new, count = jax_private._new_context, 0

    def counted() -> Any:
        nonlocal count
        count += 1
        made.add(context := new())
        return context

    monkeypatch.setattr(mlir, "make_ir_context", counted)
    monkeypatch.setattr(jax_private, "_new_context", counted)
    monkeypatch.setattr(jax_private._Contexts, "uses", 8)
    monkeypatch.setattr(jax_private._contexts, "left", 0)
    texts = set()
    for number in range(20):
        jitted = jax.jit(lambda x, number=number: x + number)
        with jax_private.exporting_without_backend():
            exported = jax.export.export(jitted, platforms=["cpu"])(np.zeros(3, np.float32))
        code = jax_private.read_lowered(exported.mlir_module_serialized, [1], [1])
        jax_private.forget_lowered()
        texts.add(code.text)
    assert len(texts) == 20
    assert count == 20 * 3 / 8 + 0.5, "JAX makes its contexts in another place now"
    del exported, jitted
    gc.collect()
    assert len(made) <= 2, "who nobody uses any more is gone"
    assert mlir.make_ir_context is counted, "others are given new ones"
    jax_private.share_contexts()
    before = count
    for number in range(4):
        jax.jit(lambda x, number=number: x * number).lower(np.zeros(3, np.float32))
    assert count - before <= 1


def test_user_frames_begin_with_the_callers_own() -> None:
    jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x) * 2)(np.float32(1))  # the line looked for
    file, number = jax_private.user_frames(jaxpr.eqns[0].source_info)[0]
    assert file == __file__
    assert linecache.getline(file, number).rstrip().endswith("# the line looked for")


def test_user_frames_without_traceback() -> None:
    from jax._src import source_info_util

    assert jax_private.user_frames(source_info_util.new_source_info()) == []


@pytest.mark.parametrize("devices", [1, 3])
def test_two_clients_pass_arrays_to_each_other(devices: int) -> None:
    """Hand-built clients of one process exchange arrays by device_put."""
    ours, theirs = jax_private.make_cpu_client(devices), jax_private.make_cpu_client(1)
    mesh = Mesh(np.array(ours.local_devices()), ("d",))
    x = jax.device_put(np.arange(3.0, dtype=np.float32), NamedSharding(mesh, PartitionSpec("d")))
    y = jax.device_put(x, theirs.local_devices()[0])
    assert np.asarray(y).tolist() == [0.0, 1.0, 2.0]
    assert y.devices() == set(theirs.local_devices())


# --- lowered code ---------------------------------------------------------------

PROPAGATE = """
    import jax, numpy as np, jax.numpy as jnp
    from jax import export
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from pathways_lab.runtime import jax_private

    class StandClient:
        platform, runtime_type = "cpu", "none"

    class Stand:
        platform, device_kind, process_index, client = "cpu", "cpu", 0, StandClient()
        def __init__(self, number):
            self.id = self.local_hardware_id = number

    devices = np.array([Stand(i) for i in range(4)], dtype=object)
    mesh, line = Mesh(devices.reshape(2, 2), ("x", "y")), Mesh(devices, ("d",))

    def struct(shape, *spec, dtype=np.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))
"""


def test_propagation_tells_the_shardings_of_results_without_devices() -> None:
    """Batch rows and weight columns come out of a matrix product as they went in."""
    out = in_new_process(
        PROPAGATE
        + """
    def f(w, x, k):
        shifted = jax.shard_map(lambda a: a + 1, mesh=line, in_specs=P("d"), out_specs=P("d"))(x)
        return x @ w, x.sum(), shifted, jax.random.split(k, 4)

    key = jax.eval_shape(lambda: jax.random.key(0)).dtype
    with jax_private.exporting_without_backend():
        made = export.export(jax.jit(f), platforms=["cpu"])(
            struct((4, 4), None, "y"), struct((8, 4), "x"), struct((), dtype=key))
    code = jax_private.read_lowered(made.mlir_module_serialized, [2, 2, 0], [2, 0, 2, 1])
    print(*code.inputs, "|", *code.outputs[:3], "|", code.outputs[2].mesh)
    print("loc(" in code.text, jax_private.backends_initialised())
    """
    )
    assert out == (
        "P(None, y) P(x, None) P() | P(x, y) None P(d, None) | (('d', 4),)\nFalse False"
    ), out


# --- stand-ins --------------------------------------------------------------------


def test_standins_are_described_while_asked_for() -> None:
    """Descriptions nest, may decline, end with their block, and know where a value comes from."""
    seen: list[str] = []
    origins: list[object] = []

    def program(x: jax.Array) -> jax.Array:
        y = jnp.sin(x) * 2
        with jax_private.standins_described_by(lambda _: "outer"):
            with jax_private.standins_described_by(lambda t: "inner" if t is y else None):
                seen.extend([repr(y), f"{x}"])
            seen.append(str(y))
        seen.append(repr(y))
        origin = jax_private.standin_origin(y)
        assert origin is not None
        origins.extend([str(origin[0].primitive), jax_private.standin_origin(x)])
        return y

    jax.make_jaxpr(program)(np.float32(1))
    assert seen[:3] == ["inner", "outer", "outer"]
    assert "float32" in seen[3]
    assert origins == ["mul", None]


def test_standins_say_which_transformation_is_at_work() -> None:
    said: list[str] = []
    kept: list[Any] = []

    def look(x: Any) -> Any:
        said.append(jax_private.transformation_of(x))
        kept.append(x)
        return x * 2.0

    one = np.ones(1, np.float32)[0]
    for transformed in (jax.grad(look), jax.jit(look), jax.checkpoint(look)):
        transformed(one)
    jax.jvp(look, (one,), (one,))
    jax.vmap(look)(np.ones(2, np.float32))
    jax.lax.scan(lambda c, _: (look(c), None), one, None, length=2)
    assert said == ["jax.grad", "jax.jit", "JAX's checkpoint / remat", "jax.grad", "jax.vmap",
                    "JAX's scan"], "JAX's stand-ins have other names now"  # fmt: skip
    assert {jax_private.transformation_of(x) for x in kept} == {""}


def test_the_context_is_another_where_other_code_comes_out() -> None:
    before = jax_private.trace_context()
    seen = {before}
    for setting in (
        jax.enable_x64(True),
        jax.default_matmul_precision("highest"),
        jax.numpy_dtype_promotion("strict"),
    ):
        with setting:
            seen.add(jax_private.trace_context())
    jax.make_jaxpr(lambda x: seen.add(jax_private.trace_context()))(1.0)
    assert len(seen) == 4, "the settings of JAX that code depends on are asked in another place now"
    assert jax_private.trace_context() == before


def test_what_functions_were_lowered_to_is_let_go() -> None:
    """Else a function that lives long is kept once more for each slice that it was exported for."""
    modules = weakref.WeakSet[object]()
    function = jax.jit(lambda x: x * 3 + 1)
    lowered = function.lower(np.zeros(4, np.float32))
    modules.add(lowered._lowering)
    del lowered
    gc.collect()
    assert modules, "JAX keeps it, in case that it is asked for again"
    jax_private.forget_lowered()
    gc.collect()
    assert not modules
    assert not jax_private._pxla._cached_lowering_to_hlo.cache_info().currsize
    assert function.lower(np.zeros(4, np.float32)).as_text()
