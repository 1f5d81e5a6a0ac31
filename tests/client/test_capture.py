"""Programs: what becomes a node, where it runs, and what is refused with which words."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
import textwrap
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.client.code import layouts
from pathways_lab.client.lab import stats
from pathways_lab.client.program.program import CapturedProgram
from pathways_lab.core.program.program import Call, Transfer
from tests.client.kit import FakeLab, a_slice

A, B = a_slice(4, axes=("d",)), a_slice(2, 2, axes=("x", "y"), island="island1")
f = pw.jit(lambda w, x: jnp.tanh(x @ w), on=A, in_shardings=(P(), P("d")), name="f")
g = pw.jit(lambda h: h.sum(axis=1), on=B, name="g")
W, X = np.full((4, 4), 0.5, np.float32), np.ones((8, 4), np.float32)


def nodes(program: CapturedProgram) -> list[str]:
    """The location-free program, one word per node: name@slice, or a move."""
    assert program.prepared is not None
    names = {A.id: "A", B.id: "B"}
    words = []
    for node in program.prepared.program.nodes:
        if isinstance(node, Call):
            words.append(f"{node.name}@{names[node.slice]}")
        else:
            value = program.prepared.program.values[node.output]
            words.append(f"move@{names[value.slice or 0]}")
    return words


def captured(function: Any, *args: Any, **options: Any) -> CapturedProgram:
    return pw.program(function, **options).capture(*args or (W, X))


# --- what becomes a node ------------------------------------------------------------


def test_calls_are_nodes_and_arithmetic_goes_where_its_operands_are() -> None:
    def program(w: Any, x: Any) -> Any:
        h = f(w, x)
        y = g(h) * 2 + 1
        return jax.tree.map(lambda a: a - 0.1 * a, {"w": w, "y": y}), h

    made = captured(program)
    assert nodes(made) == ["f@A", "g@B", "(mul+add+sub)@B", "(mul+sub)@A"]


def test_groups_keep_the_order_of_the_cell() -> None:
    """Sums of gradients happen between the calls, not all at the end."""

    def program(w: Any, x: Any) -> Any:
        total = f(w, x)
        for _ in range(3):
            total = total + f(w, x)
        return total

    made = captured(program)
    assert nodes(made) == ["f@A", "f@A", "(add)@A", "f@A", "(add)@A", "f@A", "(add)@A"]
    frees = [step.frees for step in made.prepared.plan.steps]  # type: ignore[union-attr]
    assert max(map(len, frees)) <= 4


def test_a_group_on_one_slice_stays_open_across_calls_on_another() -> None:
    def program(w: Any, x: Any) -> Any:
        h = f(w, x)
        a = h * 2
        y = g(h)
        return a + 1, y

    assert nodes(captured(program)) == ["f@A", "g@B", "(mul+add)@A"]


def test_what_has_no_place_is_made_where_it_is_needed_once_per_slice() -> None:
    def program(w: Any, x: Any) -> Any:
        key = jax.random.key(0)
        noise = jax.random.normal(key, (8, 4))
        first = f(w, x[:8] + noise)
        second = g(noise)
        return first, second

    made = captured(program)
    words = nodes(made)
    assert [w.split("@")[1] for w in words] == ["A", "A", "B", "B"]
    inputs = made.prepared.inputs  # type: ignore[union-attr]
    assert [ref.name for ref in inputs] == ["x", "w"]


def test_glue_makes_its_results_as_the_next_call_wants_them() -> None:
    """So no reshard stands between a slice of the batch and the function that takes it."""

    def program(w: Any, x: Any) -> Any:
        return f(w, x * 2)

    made = captured(program)
    assert nodes(made) == ["(mul)@A", "f@A"]
    assert not [s for s in made.prepared.plan.steps if isinstance(s.node, Transfer)]  # type: ignore[union-attr]


def test_dead_arithmetic_disappears() -> None:
    def program(w: Any, x: Any) -> Any:
        h = f(w, x)
        _unused = (h * 3).sum()
        return h

    assert nodes(captured(program)) == ["f@A"]


def test_a_call_without_arguments_and_results_is_a_node_on_its_slice(fake: FakeLab) -> None:
    on = fake.slice(2)
    nothing = pw.jit(lambda: (), on=on)
    program = pw.program(lambda: nothing())
    for call in (program, nothing):
        assert call() == call() == ()
    assert program.capture().prepared.slices == (on,)  # type: ignore[union-attr]
    on.release()
    for call in (program, nothing):
        with pytest.raises(pw.PathwaysError, match="was released"):
            call()


def test_what_a_program_returns_untouched(fake: FakeLab) -> None:
    """An argument is put where the program is, if it is anywhere; the rest is what it was."""
    on = fake.slice(2)
    inc, outside = pw.jit(lambda x: x + 1, on=on), np.ones(3)
    assert pw.program(lambda x: x)(X) is X
    for program in (pw.program(lambda x: (x, outside, 3), on=on),
                    pw.program(lambda x: (x, outside, 3, inc(x)))):  # fmt: skip
        put, same, number, *_ = program(X)
        assert (put.slice, same is outside, number) == (on, True, 3)
        np.testing.assert_array_equal(put.result(), X)


def test_calls_that_print_are_kept_though_nobody_reads_them(fake: FakeLab) -> None:
    on = fake.slice(2)

    def log(x: Any) -> Any:
        jax.debug.print("{}", x.sum())
        return x

    printing, quiet = pw.jit(log, on=on), pw.jit(lambda x: x + 1, on=on)

    def program(x: Any) -> Any:
        printing(x)
        quiet(x)
        return quiet(x)

    made = pw.program(program).capture(X)
    assert made.prepared is not None
    assert [step.node.name for step in made.prepared.plan.steps] == ["log", "<lambda>"]
    result = made.run([X])
    np.testing.assert_array_equal(result.result(), X + 1)


def test_plain_jit_around_calls_is_looked_through() -> None:
    def program(w: Any, x: Any) -> Any:
        return jax.jit(lambda x: jax.jit(lambda y: f(w, y) * 2)(x) + 1)(x)

    assert nodes(captured(program)) == ["f@A", "(mul+add)@A"]


def test_captured_code_that_jax_reuses_keeps_its_meaning() -> None:
    """JAX traces a plain jitted function once, for all captures that call it."""
    helper = jax.jit(lambda x: g(x) * 2)
    other = jax.jit(lambda x: pw.jit(lambda a: a + 1, on=A, name="h")(x))
    assert nodes(captured(lambda x: helper(x), X)) == ["g@B", "(mul)@B"]
    for _ in range(2):
        made = captured(lambda w, x: (helper(f(w, x)), other(x)))
        assert nodes(made) == ["f@A", "g@B", "h@A", "(mul)@B"]


def test_a_capture_keeps_no_handle_alive(fake: FakeLab) -> None:
    """JAX's caches outlive captures; what they hold must not hold arrays."""
    on = fake.slice(2)

    def run() -> weakref.ref[pw.Handle]:
        h = pw.device_put(X, on)
        program = pw.program(lambda: h + h * 2)
        np.testing.assert_allclose(program().result(), X * 3)
        return weakref.ref(h)

    gone = run()
    gc.collect()
    assert gone() is None


def test_a_program_in_a_program_is_part_of_it() -> None:
    inner = pw.program(lambda w, x: f(w, x) + 1)
    assert nodes(captured(lambda w, x: g(inner(w, x)))) == ["f@A", "(add)@A", "g@B"]


def test_moves_are_nodes() -> None:
    def program(w: Any, x: Any) -> Any:
        h = f(w, x)
        moved = pw.device_put({"h": h}, B.sharding(P("x")))["h"]
        back = jax.device_put(moved * 2, A.sharding(P(None, "d")))
        near = pw.device_put(h, B)
        return back, near, pw.device_put(jnp.zeros((4, 4)), A.sharding(P("d"))), x

    made = captured(program)
    assert nodes(made) == ["f@A", "move@B", "(mul)@B", "move@A", "move@B", "(broadcast_in_dim)@A"]
    layouts = [str(ref.layout) for ref in made.prepared.outputs]  # type: ignore[union-attr]
    assert layouts == ["P(None, d)", "P(None, None)", "P(d, None)"]


@pytest.mark.parametrize("x", [np.ones((8, 8), np.float32), np.ones((256, 128), np.float32)])
@pytest.mark.parametrize("wanted", [None, P()], ids=["anyhow", "asked"])
def test_host_arrays_put_on_one_slice_and_read_on_another(
    fake: FakeLab, wanted: Any, x: Any
) -> None:
    """They are put to every device, as outside of a program, whoever reads them first."""
    there, here = fake.slice(2, 2, axes=("x", "y"), island="island1"), fake.slice(1)
    one = pw.jit(lambda a: a + 1, on=here, in_shardings=wanted)
    two = pw.jit(lambda a: a * 2, on=there, in_shardings=P("x"))

    def program(a: Any) -> Any:
        put = pw.device_put(a, there)
        return one(put), two(put)

    made = pw.program(program).capture(x)
    assert made.prepared.inputs[0].layout == layouts.replicated(there, 2)  # type: ignore[union-attr]
    for result, expected in zip(made.run([x]), (x + 1, x * 2), strict=True):
        np.testing.assert_array_equal(result.result(), expected)


def test_static_arguments_and_python_values() -> None:
    @pw.program(static_argnames=("count", "mode"))
    def program(w: Any, x: Any, *, count: int, mode: str) -> Any:
        for _ in range(count):
            x = f(w, x)
        return {"x": x, "mode": mode, "count": count, "none": None}

    made = program.capture(W, X, count=2, mode="fast")
    assert nodes(made) == ["f@A", "f@A"]
    assert program.capture(W, X, count=2, mode="fast") is made
    assert program.capture(W, X, count=3, mode="fast") is not made


def test_ir_shows_every_stage_with_names_and_lines() -> None:
    text = captured(lambda w, x: g(f(w, x))).ir()
    for part in ("--- captured ---", "pw_call", "--- program ---", "--- plan ---", "call f",
                 f"{A.name} P(d, None)", "transfer", "frees", "test_capture.py"):  # fmt: skip
        assert part in text
    assert str(A.id) not in text


def test_lines_are_the_users_own() -> None:
    def helper(w: Any, x: Any) -> Any:
        return f(w, x)  # the call

    made = captured(lambda w, x: helper(w, x) * 2)  # the sum
    lines = [node.line.text for node in made.prepared.program.nodes]  # type: ignore[union-attr]
    assert lines == ["return f(w, x)  # the call",
                     "made = captured(lambda w, x: helper(w, x) * 2)  # the sum"]  # fmt: skip


def test_standins_say_what_they_are() -> None:
    seen: list[str] = []

    def program(w: Any, x: Any) -> Any:
        h = f(w, x)
        seen.extend([f"{h}", repr(h.sum() * 2), str(x)])
        return h

    captured(program)
    assert seen == [
        f"<float32[8,4] on {A.name}: the value comes after the run>",
        f"<float32[] on {A.name}: the value comes after the run>",
        "<float32[8,4]: the value comes after the run>",
    ]


# --- what is refused -------------------------------------------------------------------


def control_flow(w: Any, x: Any) -> Any:
    return x if f(w, x).sum() > 0 else w  # here


def loop_bound(w: Any, x: Any) -> Any:
    return [x for _ in range(f(w, x).astype(int)[0, 0])]  # here


def to_float(w: Any, x: Any) -> Any:
    return float(f(w, x).sum())  # here


def to_numpy(w: Any, x: Any) -> Any:
    return np.sin(f(w, x))  # here


def formatted(w: Any, x: Any) -> Any:
    return f"{f(w, x).sum():.3f}"  # here


def asked_for_result(w: Any, x: Any) -> Any:
    return f(w, x).result()  # here


def masked(w: Any, x: Any) -> Any:
    return x[f(w, x) > 0]  # here


def scanned(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda c, _: (f(w, c), None), x, None, length=3)  # here


def branched(w: Any, x: Any) -> Any:
    return jax.lax.cond(True, lambda: f(w, x), lambda: x)  # here


def two_slices(w: Any, x: Any) -> Any:
    h = f(w, x)
    return g(h) + h[:, 0]  # here


def printed(w: Any, x: Any) -> Any:
    h = f(w, x)
    jax.debug.print("{}", h)  # here
    return h


def wrong_shape(w: Any, x: Any) -> Any:
    return f(w, x) @ jnp.ones((3, 3))  # here


def used_after_donation(w: Any, x: Any) -> Any:
    w = f(w, x)
    consume = pw.jit(lambda a: a + 1, on=A, donate_argnums=0)
    consume(w)
    return w * 2  # here


def nowhere(w: Any, x: Any) -> Any:
    return w + x[:4]  # here


def no_common_slice(w: Any, x: Any) -> Any:
    h = f(w, x)
    return pw.jit(lambda a, b: (a, b))(h, g(h))  # here


def mesh_inside(w: Any, x: Any) -> Any:
    with jax.set_mesh(A.mesh):  # here
        return f(w, x)


REFUSED = {
    control_flow: ("control flow depends on the value", "jnp.where"),
    loop_bound: ("where Python needs a number", "static_argnames"),
    to_float: ("asked for the value", "after the program has returned"),
    to_numpy: ("NumPy was asked for the value", "jax.numpy"),
    formatted: ("formatted before it exists", "without a format"),
    asked_for_result: ("only its shape and dtype", "after the program"),
    masked: ("shape of the result depends on values", "jnp.where"),
    scanned: ("called inside jax.lax.scan", "Python loop"),
    branched: ("called inside jax.lax.cond", "one compiled function"),
    two_slices: ("operands on different slices", "pw.device_put"),
    printed: ("stands between the nodes", "into a compiled function"),
    wrong_shape: ("dot_general requires contracting dimensions", ""),
    used_after_donation: ("was donated", "result of that call"),
    nowhere: ("has no place", "pw.device_put"),
    mesh_inside: ("cannot enter a mesh", "around the call of the program"),
    no_common_slice: ("nothing says where it runs", "on=slice"),
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_what_cannot_be_captured_is_refused_with_the_remedy(function: Any) -> None:
    """In our words, at the user's own line, and nothing stays behind."""
    text, remedy = REFUSED[function]
    with pytest.raises(pw.PathwaysError) as caught:
        captured(function)
    failure = caught.value.failure
    assert text in failure.message
    assert remedy in failure.remedy
    assert failure.line.text.endswith("# here")
    assert failure.program == function.__name__
    assert nodes(captured(lambda w, x: f(w, x))) == ["f@A"]


def test_waiting_is_refused() -> None:
    async def program(w: Any, x: Any) -> Any:
        return await f(w, x)

    with pytest.raises(pw.PathwaysError, match="a program cannot wait") as caught:
        captured(program)
    assert "await the handles" in caught.value.failure.remedy


def test_standins_that_escape_are_explained() -> None:
    kept: list[Any] = []
    captured(lambda w, x: kept.append(f(w, x)))
    with pytest.raises(pw.PathwaysError, match="stand-in of one program was used outside of it"):
        captured(lambda w, x: g(kept[0]) + 1)


def test_programs_inside_compiled_functions_are_refused() -> None:
    inner = pw.program(lambda w, x: f(w, x))
    outer = pw.jit(lambda w, x: inner(w, x), on=A)
    with pytest.raises(pw.PathwaysError, match="called inside compiled function"):
        captured(lambda w, x: outer(w, x))


# --- running ---------------------------------------------------------------------------


def two(fake: FakeLab) -> tuple[Any, Any]:
    left, right = fake.slice(4, axes=("d",)), fake.slice(2, 2, axes=("x", "y"), island="island1")
    return (
        pw.jit(lambda w, x: jnp.tanh(x @ w), on=left, in_shardings=(P(), P("d"))),
        pw.jit(lambda h: h.sum(axis=1), on=right),
    )


def test_the_value_is_that_of_plain_python(fake: FakeLab) -> None:
    left, right = two(fake)
    table = np.arange(32, dtype=np.float32).reshape(8, 4)  # closed over, baked in or sent
    large = np.ones((40, 100, 8), np.float32)  # closed over, uploaded once

    def body(f: Any, g: Any, w: Any, x: Any, key: Any) -> Any:
        h = f(w, x + table)
        y = g(h) + g(table) * 0.5 + jnp.asarray(large).sum((0, 1))
        noise = jax.random.normal(key, y.shape)
        return {"h": h, "y": y + noise, "n": noise[::-1], "w": w * 2}, jnp.arange(3), 7

    program = pw.program(lambda w, x, key: body(left, right, w, x, key))
    plain_left, plain_right = (jax.jit(function.function) for function in (left, right))
    want = body(plain_left, plain_right, W, X, jax.random.key(3))
    for _ in range(2):
        got = jax.device_get(program(W, X, jax.random.key(3)))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)
    assert fake.count("submit") == 2
    assert fake.count("declare") == 1, "the large constant was uploaded once"


def test_a_second_run_is_one_message_and_no_work(fake: FakeLab) -> None:
    left, right = two(fake)
    program = pw.program(lambda w, x: right(left(w, x)) * 2)
    jax.block_until_ready(program(W, X))
    before, sent = dataclasses.replace(stats.work), len(fake.messages)
    jax.block_until_ready(program(W, X))
    assert stats.work == before
    assert [op for op, _ in fake.messages[sent:] if op != "drop"] == ["submit"]


def test_small_arguments_ride_and_large_ones_are_uploaded(fake: FakeLab) -> None:
    left, _ = two(fake)
    program = pw.program(lambda w, x: left(w, x))
    program(W, X)
    fake.settle()
    assert fake.count("declare") == 0
    big = np.ones((8192, 4), np.float32)
    np.testing.assert_allclose(program(W, big).result(), np.tanh(big @ W), rtol=1e-5)
    (declared,) = fake.of("declare")
    assert declared["nbytes"] == big.nbytes // 4, "each device gets its shard only"


def test_handles_are_arguments_without_moving(fake: FakeLab) -> None:
    left, right = two(fake)
    program = pw.program(lambda w, x: left(w, x))
    h = program(W, X)
    again = program(W, h)
    assert fake.count("declare") == 0
    assert fake.session.connection.traffic.fetches == 0
    np.testing.assert_allclose(again.result(), np.tanh(np.tanh(X @ W) @ W), rtol=1e-5)
    # A handle that the program reads from outside is an input too.
    closed = pw.program(lambda x: right(left(W, x) + h))
    np.testing.assert_allclose(closed(X).result(), 2 * np.tanh(X @ W).sum(1), rtol=1e-5)


def test_results_that_are_arguments(fake: FakeLab) -> None:
    left, _ = two(fake)
    program = pw.program(lambda w, x: (left(w, x), x, w, w))
    h = pw.device_put(X, left.slice)
    _, x, w, w_again = program(W, h)
    assert x is h
    np.testing.assert_array_equal(w.result(), W)
    np.testing.assert_array_equal(w_again.result(), W)
    assert pw.program(lambda x: x)(h) is h
    assert pw.program(lambda x: {"x": x})(X)["x"] is X


def test_same_value_returned_twice_is_one_buffer(fake: FakeLab) -> None:
    left, _ = two(fake)
    a, b = pw.program(lambda w, x: (left(w, x),) * 2)(W, X)
    np.testing.assert_array_equal(a.result(), b.result())


def test_donation_inside_a_program(fake: FakeLab) -> None:
    on = fake.slice(2)
    step = pw.jit(lambda p, g: p - g, on=on, donate_argnums=0)
    program = pw.program(lambda p, g: step(step(p, g), g))
    p = pw.device_put(np.ones(4, np.float32), on)
    q = program(p, np.float32(0.25))
    assert p.is_deleted()
    np.testing.assert_allclose(q.result(), 0.5)
    with pytest.raises(pw.PathwaysError, match="was donated to '<lambda>'"):
        program(p, np.float32(1))


def test_capture_needs_no_backend() -> None:
    """The kernel computes nothing: capture, lowering and export create no JAX device."""
    code = """
        import sys
        sys.path.insert(0, {root!r})
        import jax, numpy as np, jax.numpy as jnp
        from tests.client import test_capture as t
        from pathways_lab.runtime import jax_private

        def program(w, x):
            h = t.f(w, x)
            key = jax.random.key(0)
            y = t.g(h) * 2 + jax.random.normal(key, (8,))
            return y, jnp.zeros(3), jax.device_put(h, t.B.sharding())

        import pathways_lab as pw
        def chatty(x):
            jax.debug.print("{{}}", x)
            return x * 2
        printing = pw.jit(chatty, on=t.A)
        print(len(t.nodes(t.captured(program))), end=" ")
        t.captured(lambda w, x: printing(x))
        print(jax_private.backends_initialised())
    """
    import pathlib

    root = str(pathlib.Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code.format(root=root))],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["5", "False"]
