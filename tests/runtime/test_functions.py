"""Compiling on a host: types, keys, donation, receipts, callbacks and what they print."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages.elastic import Compiling
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.program import Value
from pathways_lab.runtime import arrays
from pathways_lab.runtime.devices import CpuRuntime, Place
from pathways_lab.runtime.host import compile_marks
from pathways_lab.runtime.host.compiler import Code, Compiler, Executable, Passed, compile_code
from pathways_lab.runtime.host.user_output import Output
from pathways_lab.runtime.processes import heaps
from tests.runtime.host_kit import (
    HOST,
    binding,
    broken,
    code,
    kept,
    key_array,
    layout,
    mesh_of,
    wire,
)

SLICE = binding(1, (2, 2), [0, 1, 2, 3])
CUT = layout(SLICE, "a")
GRID = layout(SLICE, "a", "b")
WHOLE = layout(SLICE, None)
ONE = Layout(GRID.mesh, ())


@pytest.fixture(scope="module")
def place() -> Place:
    return CpuRuntime(HOST, 4).open(SLICE)


def no_output() -> Output:
    return Output(lambda run, device, text: None)


def put(place: Place, data: Any, dtype: str, where: Layout, shape: tuple[int, ...]) -> jax.Array:
    kind = arrays.physical(shape, dtype, where)
    whole = np.asarray(data, kind.dtype)
    cuts = kind.boxes()
    shards = {n: np.asarray(whole[arrays.index(cuts[n])], order="C") for n in place.numbers}
    return arrays.join(Value(shape, dtype, 1, where, 0), place, shards)


def run(place: Place, made: Code, *data: Any) -> list[Any]:
    executable = compile_code(made, place, no_output())
    inputs = [
        put(place, d, dtype, where, shape)
        for d, (shape, dtype), where in zip(data, made.in_types, made.in_layouts, strict=True)
    ]
    results, receipt = executable(inputs)
    receipt.block_until_ready()
    assert receipt.shape == ()
    return results


TYPES = ["float32", "bfloat16", "int8", "uint32", "bool", "float64", "int4", "uint4"]


@pytest.mark.parametrize("dtype", TYPES)
def test_types_survive(place: Place, dtype: str) -> None:
    made = code_of(lambda x: (x[::-1],), [((4,), dtype)], [CUT], [((4,), dtype)], [WHOLE])
    (out,) = run(place, made, [0, 1, 1, 0])
    assert str(out.dtype) == dtype
    assert np.asarray(out).astype(int).tolist() == [0, 1, 1, 0]


def code_of(
    function: Any,
    in_types: Sequence[Any],
    ins: Sequence[Layout],
    out_types: Sequence[Any],
    outs: Sequence[Layout],
    **options: Any,
) -> Code:
    wide = any(dtype == "float64" for _, dtype in (*in_types, *out_types))
    with arrays.wide(np.dtype("float64" if wide else "float32")):
        return code(
            function,
            SLICE,
            list(zip(in_types, ins, strict=True)),
            list(zip(out_types, outs, strict=True)),
            **options,
        )


@pytest.mark.parametrize("dtype", ["key<fry>", "key<rbg>"])
@pytest.mark.parametrize("kind", ["export", "callbacks"])
def test_random_keys_are_their_data(place: Place, dtype: str, kind: str) -> None:
    def draw(key: Any) -> Any:
        a, b = jax.random.split(key)
        return jax.random.uniform(a, (4,)), jnp.stack([b, b])

    types = [((4,), "float32"), ((2,), dtype)]
    made = code_of(draw, [((), dtype)], [ONE], types, [CUT, CUT], kind=kind)
    drawn, keys = run(place, made, key_array(7, (), dtype))
    a, b = jax.random.split(
        jax.random.wrap_key_data(key_array(7, (), dtype), impl=arrays.key_implementation(dtype))
    )
    assert np.array_equal(drawn, jax.random.uniform(a, (4,)))
    assert np.array_equal(np.asarray(keys)[1], jax.random.key_data(b))
    assert keys.dtype == np.uint32


def test_callbacks_of_code_with_64_bits_inside_see_them(place: Place) -> None:
    def narrow() -> Any:
        jax.debug.callback(lambda wide: seen.append(wide.dtype), jnp.zeros(4))
        return (((jnp.ones(4) + 1e-9 - 1) * 1e9).astype(jnp.float32),)

    seen: list[Any] = []
    with jax.enable_x64(True):
        made = code(narrow, SLICE, [], [(((4,), "float32"), CUT)], kind="callbacks", dumps=kept)
    (out,) = run(place, Code.from_wire(wire(made), made.blob))
    np.testing.assert_allclose(out, np.ones(4), rtol=1e-6)
    jax.effects_barrier()
    assert set(seen) == {np.dtype(np.float64)}
    assert not jax.config.jax_enable_x64


def test_no_inputs_no_outputs_empty_and_scalar(place: Place) -> None:
    nothing = code_of(lambda: (), [], [], [], [])
    assert run(place, nothing) == []
    made = code_of(
        lambda e, s: (e, s + 1),
        [((0, 3), "float32"), ((), "int32")],
        [layout(SLICE, None, None), ONE],
        [((0, 3), "float32"), ((), "int32")],
        [layout(SLICE, None, None), ONE],
    )
    empty, scalar = run(place, made, np.zeros((0, 3)), 4)
    assert empty.shape == (0, 3)
    assert int(scalar) == 5


def test_donation_happens_in_place_and_the_receipt_survives_it(place: Place) -> None:
    types = [((1024, 1024), "float32")]
    made = code_of(lambda x: (x + 1,), types, [GRID], types, [GRID], donated=(0,))
    executable = compile_code(made, place, no_output())
    # An array made by a computation: one that NumPy still sees is copied instead.
    fresh = code_of(lambda: (jnp.zeros((1024, 1024)),), [], [], types, [GRID])
    (x,), _ = compile_code(fresh, place, no_output())([])
    where = x.addressable_data(0).unsafe_buffer_pointer()
    (y,), first = executable([x])
    (z,), second = executable([y])
    assert x.is_deleted()
    assert y.is_deleted()
    first.block_until_ready()
    second.block_until_ready()
    assert z.addressable_data(0).unsafe_buffer_pointer() == where
    assert float(np.asarray(z)[3, 3]) == 2.0


def test_layouts_may_name_other_axes_than_the_slice(place: Place) -> None:
    flat = Layout((("x", 4),), (("x",),))
    made = code_of(lambda x: (x * 2,), [((8,), "float32")], [flat], [((8,), "float32")], [flat])
    (out,) = run(place, made, np.arange(8))
    assert out.addressable_data(0).shape == (2,)
    assert np.array_equal(out, np.arange(8) * 2)


# --- the pool --------------------------------------------------------------------------------


def died(error: BaseException) -> None:
    raise AssertionError("the compiler's own code failed") from error


@pytest.mark.parametrize("what", ["report", "job"])
def test_what_the_pool_would_swallow_ends_the_host(place: Place, what: str) -> None:
    """A function that is never reported would be waited for silently, for ever."""
    deaths: list[BaseException] = []
    dead = threading.Event()
    compiler = Compiler(HOST, no_output(), lambda error: (deaths.append(error), dead.set()))

    def bug(*_: Any) -> None:
        raise RuntimeError("a bug")

    if what == "job":
        compiler.submit(bug)
    else:
        compiler.prepare(code_of(lambda: (), [], [], [], []), place, bug)
    assert dead.wait(60)
    assert str(deaths[0]) == "a bug"
    compiler.close()


def prepared(
    compiler: Compiler, made: Code, place: Place, begun: Any = lambda *_: None
) -> Executable | Failure:
    box: list[Any] = []
    there = threading.Event()

    def done(result: Any, start: float, end: float) -> None:
        box.append(result)
        there.set()

    compiler.prepare(made, place, done, begun)
    assert there.wait(60)
    found: Executable | Failure = box[0]
    return found


def test_nothing_is_compiled_twice_for_one_placement() -> None:
    runtime, compiler = CpuRuntime(HOST, 4), Compiler(HOST, no_output(), died)
    made = code_of(lambda x: (x + 1,), [((4,), "float32")], [CUT], [((4,), "float32")], [CUT])
    begun: list[int] = []

    def begin(start: float, waiting: int) -> None:
        begun.append(waiting)

    first = prepared(compiler, made, runtime.open(SLICE), begin)
    runtime.close(SLICE)
    again = binding(2, (2, 2), [0, 1, 2, 3])  # another slice on the same devices
    assert prepared(compiler, made, runtime.open(again), begin) is first
    assert compiler.compilations == 1
    assert begun == [0], "what is compiled already is not begun"
    other = binding(3, (2, 2), [3, 2, 1, 0])  # the same devices in another order
    assert prepared(compiler, made, runtime.open(other)) is not first
    assert compiler.compilations == 2
    compiler.close()


def test_memory_is_given_back_when_nothing_else_waits_to_be_compiled(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    compiler = Compiler(HOST, no_output(), died, threads=1)
    monkeypatch.setattr(heaps, "give_back", lambda: given.append(compiler.compilations))
    kind, both = [((4,), "float32")], threading.Event()
    first, second = (code_of(lambda x, n=n: (x + n,), kind, [CUT], kind, [CUT]) for n in (1, 2))
    compiler.prepare(first, place, lambda *_: None, lambda *_: both.wait(60))
    compiler.prepare(second, place, lambda *_: None)
    both.set()
    prepared(compiler, second, place)
    compiler._pool.shutdown()
    assert given == [2]


def test_what_lies_between_things_in_use_is_given_back() -> None:
    kept = """if True:
        import psutil
        from pathways_lab.runtime.processes import heaps

        made = [bytes(2000) for _ in range(50_000)]
        made = made[::50]
        before = psutil.Process().memory_info().rss
        heaps.give_back()
        print((before - psutil.Process().memory_info().rss) >> 20)
    """
    environment = {**os.environ, **heaps.heaps()}
    told = subprocess.run(
        [sys.executable, "-c", kept], env=environment, capture_output=True, text=True, check=True
    )
    assert int(told.stdout) > 50, "of 100 MB"


def test_code_of_another_client_under_the_same_key_is_other_code(place: Place) -> None:
    compiler = Compiler(HOST, no_output(), died)
    kind = [((4,), "float32")]
    first = code_of(lambda x: (x + 1,), kind, [CUT], kind, [CUT])
    second = code_of(lambda x: (x + 2,), kind, [CUT], kind, [CUT])
    second = dataclasses.replace(second, function=first.function)
    other, third = (
        Place(dataclasses.replace(place.binding, client=name), HOST, place.footprint)
        for name in ("b", "c")
    )
    made = [prepared(compiler, first, place), prepared(compiler, second, other)]
    assert made[0] is not made[1]
    assert prepared(compiler, first, other) is made[1], "its client has said that it is the same"
    assert prepared(compiler, first, third) is made[0], "it has the same content"
    compiler.close()


def test_a_broken_function_is_a_failure_with_its_line(place: Place) -> None:
    made = broken(code_of(lambda x: (), [((4,), "float32")], [CUT], [], []), "only on the host")
    compiler = Compiler(HOST, no_output(), died)
    failure = prepared(compiler, made, place)
    compiler.close()
    assert isinstance(failure, Failure)
    assert failure.kind == "compile"
    assert failure.host == HOST
    assert failure.line.number == 3
    assert "only on the host" in failure.message
    assert "Traceback" in failure.details


def test_a_function_must_return_what_its_client_says(place: Place) -> None:
    types = [((4,), "float32")]
    made = code_of(lambda x: (x, x), types, [CUT], types * 2, [CUT, CUT])
    made = dataclasses.replace(made, out_types=made.out_types[:1], out_layouts=(CUT,))
    with pytest.raises(TypeError, match="when it was captured"):
        compile_code(made, place, no_output())


# --- callbacks ------------------------------------------------------------------------------


def printed(place: Place, made: Code, *data: Any) -> tuple[Executable, list[tuple[int, int, str]]]:
    lines: list[tuple[int, int, str]] = []
    output = Output(lambda run, device, text: lines.append((run, device, text)))
    executable = compile_code(made, place, output)
    executable.gangs.key = (42, 0)
    stdout = sys.stdout
    output.install()
    try:
        inputs = [
            put(place, d, dtype, where, shape)
            for d, (shape, dtype), where in zip(data, made.in_types, made.in_layouts, strict=True)
        ]
        _, receipt = executable(inputs)
        receipt.block_until_ready()
        jax.effects_barrier()
    finally:
        sys.stdout = stdout
    return executable, lines


def test_prints_of_every_device_carry_its_number(place: Place) -> None:
    def f(x: Any) -> Any:
        def body(v: Any) -> Any:
            jax.debug.print("got {v}", v=v[0])
            return v

        mesh = mesh_of(CUT)
        spec = jax.sharding.PartitionSpec(("a", "b"))
        return (jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)(x),)

    made = in_process(f, [((4,), "int32")], [CUT], [((4,), "int32")], [CUT])
    executable, lines = printed(place, made, np.arange(4) * 10)
    assert executable.calls_python
    assert sorted(lines) == [(42, n, f"got {10 * n}\n") for n in range(4)]


def in_process(f: Any, *args: Any) -> Code:
    """A function whose callbacks stay in this process."""
    return code_of(f, *args, kind="callbacks", dumps=kept)


def test_prints_of_a_whole_array_come_once(place: Place) -> None:
    def f(x: Any) -> Any:
        jax.debug.print("sum {s}", s=x.sum())
        jax.debug.callback(lambda s: print("no newline", end=""), x.sum())
        return ()

    made = in_process(f, [((4,), "int32")], [CUT], [], [])
    _, lines = printed(place, made, np.arange(4))
    assert sorted(lines) == [(42, 0, "no newline"), (42, 0, "sum 6\n")]


def test_values_of_callbacks_and_their_errors(place: Place) -> None:
    def f(x: Any) -> Any:
        def on_host(v: Any) -> Any:
            if v.max() > 5:
                raise ValueError("too large")
            return v * 2

        return (jax.pure_callback(on_host, jax.ShapeDtypeStruct((4,), np.int32), x),)

    made = in_process(f, [((4,), "int32")], [CUT], [((4,), "int32")], [CUT])
    executable = compile_code(made, place, no_output())
    (out,), receipt = executable([put(place, np.arange(4), "int32", CUT, (4,))])
    assert np.asarray(out).tolist() == [0, 2, 4, 6]
    assert executable.gangs.errors == []
    _, receipt = executable([put(place, np.arange(4) + 5, "int32", CUT, (4,))])
    receipt.block_until_ready()  # nothing hangs, and the error is not lost
    ((device, error),) = executable.gangs.errors
    assert device == 0
    assert str(error) == "too large"


def test_an_error_on_one_device_does_not_leave_the_others_waiting(place: Place) -> None:
    def f(x: Any) -> Any:
        def on_host(v: Any) -> Any:
            if v[0] == 20:
                raise ValueError("not this one")
            return v

        def body(v: Any) -> Any:
            v = jax.pure_callback(on_host, jax.ShapeDtypeStruct(v.shape, v.dtype), v)
            return jax.lax.psum(v, ("a", "b"))

        spec = jax.sharding.PartitionSpec(("a", "b"))
        whole = jax.sharding.PartitionSpec()
        mesh = mesh_of(CUT)
        return (jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=whole)(x),)

    made = in_process(f, [((4,), "int32")], [CUT], [((1,), "int32")], [WHOLE])
    executable = compile_code(made, place, no_output())
    (out,), receipt = executable([put(place, np.arange(4) * 10, "int32", CUT, (4,))])
    receipt.block_until_ready()
    assert np.asarray(out).tolist() == [40]
    assert [(d, str(e)) for d, e in executable.gangs.errors] == [(2, "not this one")]


def test_after_an_error_a_device_calls_back_no_more_in_that_gang(place: Place) -> None:
    """Libraries ask the user, or stop, in a callback that reads what an earlier one refused."""
    called = []

    def f(x: Any) -> Any:
        def first(v: Any) -> Any:
            if v[0] == 9:
                raise ValueError("refused")
            return v

        def second(v: Any) -> Any:
            called.append(v.tolist())
            return v

        x = jax.pure_callback(first, jax.ShapeDtypeStruct((4,), np.int32), x)
        return (jax.pure_callback(second, jax.ShapeDtypeStruct((4,), np.int32), x),)

    made = in_process(f, [((4,), "int32")], [CUT], [((4,), "int32")], [CUT])
    executable = compile_code(made, place, no_output())
    for first in (9, 1):
        executable.gangs.errors = []
        _, receipt = executable([put(place, np.arange(4) + first, "int32", CUT, (4,))])
        receipt.block_until_ready()
        assert [str(error) for _, error in executable.gangs.errors] == ["refused"] * (first == 9)
    assert called == [[1, 2, 3, 4]]


def raised(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda v: v[:3], "a callback returned float32[3], and it was to return float32[4]"),
        (lambda v: v.astype(np.int32), "returned int32[4], and"),
        (lambda v: None, "returned nothing, and"),
        (lambda v: "abc", "returned <U3[], and"),
        (lambda v: (v, v), "returned float32[4], float32[4], and"),
        (lambda v: raised(SystemExit("away")), "away"),
    ],
)
def test_a_callback_that_breaks_its_promise_fails_and_nothing_waits_for_it(
    place: Place, answer: Any, said: str
) -> None:
    def f(x: Any) -> Any:
        return (jax.pure_callback(answer, jax.ShapeDtypeStruct((4,), np.float32), x),)

    made = in_process(f, [((4,), "float32")], [CUT], [((4,), "float32")], [CUT])
    executable = compile_code(made, place, no_output())
    _, receipt = executable([put(place, np.arange(4), "float32", CUT, (4,))])
    receipt.block_until_ready()
    ((device, error),) = executable.gangs.errors
    assert device == 0
    assert said in str(error)


def test_callbacks_take_and_give_64_bits(place: Place) -> None:
    def f(x: Any) -> Any:
        def on_host(v: Any) -> Any:
            return np.asarray(v) / 3 if v[0] < 9 else None

        return (jax.pure_callback(on_host, jax.ShapeDtypeStruct((4,), np.float64), x),)

    made = in_process(f, [((4,), "float64")], [CUT], [((4,), "float64")], [CUT])
    executable = compile_code(made, place, no_output())
    (out,), _ = executable([put(place, np.arange(4), "float64", CUT, (4,))])
    assert np.array_equal(np.asarray(out), np.arange(4) / 3)
    _, receipt = executable([put(place, np.arange(4) + 9, "float64", CUT, (4,))])
    receipt.block_until_ready()  # zeros that stand for a failed one are of 64 bits too
    assert len(executable.gangs.errors) == 1


def test_what_is_being_compiled_can_be_read_by_whoever_outlives_it(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Compiling, ...]] = []

    def look(*_: Any) -> None:
        seen.append(compile_marks.told(compile_marks.read(tmp_path)))

    monkeypatch.setattr("pathways_lab.runtime.host.compiler.compile_code", look)
    made = code_of(lambda: (), [], [], [], [], name="looked")
    compiler = Compiler(HOST, no_output(), died, notes=compile_marks.Notes(tmp_path))
    prepared(compiler, made, place)
    compiler.close()
    assert seen == [(Compiling(made.function, "looked", made.line),)]
    assert compile_marks.read(tmp_path) == []
    (tmp_path / "compiling-7").write_text("[half of")
    assert compile_marks.read(tmp_path) == []


class Donated:
    """An array that is donated while somebody asks whether it is there."""

    deleted = False

    def is_deleted(self) -> bool:
        return self.deleted

    def is_ready(self) -> bool:
        assert not self.deleted, "a deleted array is not asked: that may end the process"
        self.deleted = True
        raise RuntimeError("Array has been deleted")


def test_arrays_that_were_made_before_are_there_also_when_they_are_donated_meanwhile() -> None:
    receipt = Passed(Donated())
    assert receipt.is_ready()
    assert receipt.is_ready()
