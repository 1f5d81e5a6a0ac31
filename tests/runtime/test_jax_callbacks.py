"""Code with callbacks still lowers as we expect of JAX, and runs without being traced again.

A failure here means that JAX moved something: the message says what, and
``pathways_lab/runtime/jax_callbacks.py`` is the only file to change.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import cloudpickle
import jax
import jax.experimental
import numpy as np
from jax import export
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pathways_lab.runtime import jax_callbacks, jax_private
from tests.runtime.host_kit import binding, kept, layout, mesh_of
from tests.runtime.test_jax_private import PROPAGATE, in_new_process

VECTOR = jax.ShapeDtypeStruct((8,), np.float32)
X = np.arange(8, dtype=np.float32)


def plain(call: Any, numbered: bool, _: Any) -> Any:
    return lambda *args: call(*args[numbered:])


def compiled(
    f: Callable[..., Any],
    devices: int = 4,
    *,
    wrap: jax_callbacks.Wrap = plain,
    dumps: Callable[[Any], bytes] = cloudpickle.dumps,
) -> Callable[..., Any]:
    """*f* of vectors, exported as a kernel does, and compiled as a host does."""
    mesh = mesh_of(layout(binding(1, (devices,), list(range(devices))), "a"))
    spec = jax.ShapeDtypeStruct((8,), np.float32, sharding=NamedSharding(mesh, P("a")))
    checks = [export.DisabledSafetyCheck.custom_call(jax_callbacks.TARGET)]
    exporter = export.export(jax.jit(f), platforms=["cpu"], disabled_checks=checks)
    with jax_private.exporting_without_backend():
        code, _ = jax_callbacks.export(lambda: exporter(spec), dumps)
    code = pickle.loads(pickle.dumps(code))
    real = Mesh(np.array(jax_private.make_cpu_client(devices).local_devices()), ("a",))
    cut = NamedSharding(real, P("a"))
    jitted = jax.jit(code.calling(wrap), in_shardings=cut)
    made = jitted.lower(jax.ShapeDtypeStruct((8,), np.float32, sharding=cut)).compile()

    def run(x: Any) -> Any:
        results = made(jax.device_put(x, cut))
        jax.effects_barrier()
        return [np.asarray(each) for each in results]

    return run


def test_every_kind_of_callback_travels_and_python_is_traced_once() -> None:
    traced: list[int] = []
    seen: list[Any] = []

    def f(x: Any) -> Any:
        traced.append(1)
        jax.debug.callback(lambda v: seen.append(("debug", float(v))), x[1])
        y = jax.pure_callback(lambda v: np.asarray(v) * 2, VECTOR, x)
        z = jax.experimental.io_callback(lambda v: np.float32(v.sum()), VECTOR.update(shape=()), x)

        def body(carry: Any, v: Any) -> Any:
            jax.debug.callback(lambda a: seen.append(("scan", float(a))), v)
            return carry + v, None

        both = jax.vmap(lambda v: jax.pure_callback(np.negative, v, v, vmap_method="expand_dims"))
        total, _ = jax.lax.scan(body, 0.0, y[:2])
        return y, z, total, jax.lax.cond(z > 0, both, lambda v: v, x)

    run = compiled(f, dumps=kept)
    for _ in range(2):
        y, z, total, negative = run(X)
        assert (y.tolist(), float(z), float(total)) == ((2 * X).tolist(), 28.0, 2.0)
        assert negative.tolist() == (-X).tolist()
    assert len(traced) == 1
    assert sorted(seen) == sorted(2 * [("debug", 1.0), ("scan", 0.0), ("scan", 2.0)])


def test_ordered_callbacks_keep_their_order() -> None:
    seen: list[float] = []

    def f(x: Any) -> Any:
        for number in range(6):
            jax.debug.callback(lambda v: seen.append(float(v)), x[number], ordered=True)
        read = jax.experimental.io_callback(
            lambda: np.float32(len(seen)), VECTOR.update(shape=()), ordered=True
        )
        return (x + read,)

    (out,) = compiled(f, 1, dumps=kept)(X)
    assert sorted(seen) == [0, 1, 2, 3, 4, 5]
    assert seen == sorted(seen)
    assert out.shape == (8,)


def test_what_a_callback_refers_to_travels_by_value() -> None:
    factor, table = 3.0, {"plus": 1}

    def f(x: Any) -> Any:
        return (jax.pure_callback(lambda v, w: v * factor + w["plus"], VECTOR, x, table),)

    (out,) = compiled(f)(X)
    assert out.tolist() == (X * 3 + 1).tolist()


def test_wrapped_callbacks_know_their_device_and_may_answer_blanks() -> None:
    """The one place where JAX lowers Python callbacks still is emit_python_callback."""
    seen: list[int] = []

    def wrap(callback: Any, numbered: bool, blanks: Any) -> Any:
        assert numbered

        def wrapped(number: Any, *args: Any) -> Any:
            seen.append(int(number))
            return blanks() if int(number) == 3 else callback(*args)

        return wrapped

    def body(v: Any) -> Any:
        return jax.pure_callback(lambda v: np.asarray(v) + 1, v, v)

    mesh = mesh_of(layout(binding(1, (4,), [0, 1, 2, 3]), "a"))

    def f(x: Any) -> Any:
        return (jax.shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=P("a"))(x),)

    (out,) = compiled(f, wrap=wrap)(X)
    assert out.tolist() == [1, 2, 3, 4, 5, 6, 0, 0], "callbacks are lowered in another place now"
    assert sorted(seen) == [0, 1, 2, 3]


def test_callbacks_of_other_threads_are_lowered_as_ever() -> None:
    results: list[float] = []

    def other() -> None:
        device = jax_private.make_cpu_client(1).local_devices()[0]
        one = jax.device_put(np.float32(1), device)
        results.append(float(jax.jit(lambda v: jax.pure_callback(lambda v: v, v, v))(one)))

    def f(x: Any) -> Any:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(60)
        return (jax.pure_callback(lambda v: v, VECTOR, x),)

    compiled(f)
    assert results == [1.0]


def test_its_layouts_are_known_without_a_backend() -> None:
    out = in_new_process(
        PROPAGATE
        + """
    def f(x):
        jax.debug.print("sum {s}", s=x.sum())
        jax.debug.callback(lambda a: None, x)
        y = jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct((8, 4), np.float32), x)
        z = jax.experimental.io_callback(lambda a: a, jax.ShapeDtypeStruct((), np.int32), x)
        return x * 2 + y, z

    import cloudpickle, jax.experimental
    from pathways_lab.runtime import jax_callbacks
    jitted = jax.jit(f)
    names = {str(e.primitive) for e in jitted.trace(struct((8, 4), "x")).jaxpr.eqns}
    print(sorted(names & jax_callbacks.CALLBACK_NAMES))
    checks = [jax.export.DisabledSafetyCheck.custom_call(jax_callbacks.TARGET)]
    exporter = jax.export.export(jitted, platforms=["cpu"], disabled_checks=checks)
    with jax_private.exporting_without_backend():
        _, exported = jax_callbacks.export(
            lambda: exporter(struct((8, 4), "x")), cloudpickle.dumps
        )
    code = jax_private.read_lowered(exported.mlir_module_serialized, [2], [2, 0])
    print(*code.outputs, jax_private.backends_initialised())
    """
    )
    assert out == (
        "['debug_callback', 'debug_print', 'io_callback', 'pure_callback']\nP(x, None) None False"
    ), out
