"""``jax.grad`` and ``jax.vmap`` in a program: over calls, moves and decisions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.client.functions.pullbacks import Pullback
from tests.client.kit import FakeLab

X = np.linspace(-1, 1, 8, dtype=np.float32)
W = np.linspace(1, 2, 8, dtype=np.float32)
V = np.linspace(0.5, 1.5, 8, dtype=np.float32)


def first(w: Any, x: Any) -> Any:
    return jnp.tanh(w * x)


def second(v: Any, h: Any) -> Any:
    return ((v * h) ** 2).sum()


def equal(found: Any, expected: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5),
        jax.device_get(found),
        expected,
    )


def nodes(text: str) -> list[str]:
    """The plan's nodes, without their values and lines."""
    plan = text.split("--- plan ---")[1]
    return [
        re.split(r" \(| %|  #", line.split(" = ")[1])[0]
        for line in plan.splitlines()
        if " = " in line
    ]


def test_a_loss_over_two_slices(fake: FakeLab) -> None:
    """Each half has its two calls; the gradient at the cut moves, and nothing else is between."""
    left, right = fake.slice(2), fake.slice(2)
    on_left, on_right = pw.jit(first, on=left), pw.jit(second, on=right)

    def loss(w: Any, v: Any, x: Any) -> Any:
        return on_right(v, on_left(w, x))

    step = pw.program(jax.value_and_grad(loss, argnums=(0, 1)))
    w, v = pw.device_put(W, left), pw.device_put(V, right)
    value, (of_w, of_v) = step(w, v, X)
    equal(
        (value, (of_w, of_v)),
        jax.value_and_grad(lambda *a: second(a[1], first(a[0], a[2])), argnums=(0, 1))(W, V, X),
    )
    assert (of_w.slice, of_v.slice) == (left, right)
    assert nodes(step.ir()) == [
        "call first on slice s1",
        "transfer",
        "call second on slice s2",
        "call backward second on slice s2",
        "transfer",
        "call backward first on slice s1",
    ]


def test_the_order_of_microbatches_is_that_of_the_code(fake: FakeLab) -> None:
    on = fake.slice(1)
    call = pw.jit(lambda w, x: second(w, x), on=on, name="call")

    @pw.program
    def step(w: Any, xs: Any) -> Any:
        pulls = [jax.vjp(lambda w, x=x: call(w, x), w)[1] for x in xs]
        first, last = [pull(jnp.float32(1))[0] for pull in pulls]
        return first + last

    found = step(pw.device_put(W, on), (X, 2 * X))
    equal(found, jax.grad(lambda w: second(w, X) + second(w, 2 * X))(W))
    calls = [node.split(" on ")[0] for node in nodes(step.ir())][:4]
    assert calls == ["call call", "call call", "call backward call", "call backward call"]


def test_parameters_are_not_kept_a_second_time() -> None:
    w, x = jnp.ones(3), jnp.ones(3)
    result, pull = jax.vjp(lambda w, x: w * jnp.sin(x), w, x)
    taken, kept = Pullback.of(pull, result, (w, x))
    assert w is not kept[0]
    assert len(kept) == 2  # sin(x), cos(x)
    again = taken.function((w, x), kept)
    equal(again(jnp.ones(3)), jax.device_get(pull(jnp.ones(3))))


def tied(calls: list[Callable[..., Any]], w: Any, x: Any) -> Any:
    """The same weights on both slices, and a connection that skips the second one."""
    a, b, total = calls
    h = a(w, x)
    return total(w, b(w, h), h, x)


def test_weights_and_values_that_are_used_on_both_slices(fake: FakeLab) -> None:
    left, right = fake.slice(2), fake.slice(1)
    plain = [first, lambda w, h: jnp.sin(h) * w, lambda w, b, h, x: (w * b + h - x).sum()]
    calls = [pw.jit(f, on=on) for f, on in zip(plain, (left, right, left), strict=True)]
    step = pw.program(jax.grad(lambda w, x: tied(calls, w, x), argnums=(0, 1)))
    found = step(pw.device_put(W, left), pw.device_put(X, left))
    equal(found, jax.grad(lambda w, x: tied(plain, w, x), argnums=(0, 1))(W, X))
    assert [handle.slice for handle in found] == [left, left]


def test_integers_results_that_are_left_and_further_results(fake: FakeLab) -> None:
    on = fake.slice(2)

    def several(w: dict[str, Any], which: Any) -> Any:
        h = jnp.take(w["table"], which) * w["scale"]
        return h, which + 1, {"norm": (h**2).sum(), "left": h.max()}

    call = pw.jit(several, on=on)

    def loss(function: Any, w: Any, which: Any) -> Any:
        _, after, more = function(w, which)
        return more["norm"] * 2, after

    w = {"table": W, "scale": np.float32(3), "unused": V}
    which = np.array([1, 1, 4])
    step = pw.program(lambda w: jax.value_and_grad(loss, argnums=1, has_aux=True)(call, w, which))
    found = step(w)
    equal(found, jax.value_and_grad(loss, argnums=1, has_aux=True)(several, w, which))


def test_shardings_that_were_asked_for_are_those_of_gradients(fake: FakeLab) -> None:
    on = fake.slice(4)
    call = pw.jit(
        lambda w, x: jnp.sin(x @ w).sum(), on=on, in_shardings=(P(None, "x"), P()), name="wide"
    )
    w = np.ones((4, 8), np.float32)
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    handle = pw.device_put(w, jax.sharding.NamedSharding(on.mesh, P(None, "x")))
    found = pw.program(lambda w: jax.grad(lambda w: call(w, x))(w))(handle)
    equal(found, jax.grad(lambda w: jnp.sin(x @ w).sum())(w))
    assert found.layout == handle.layout


def test_functions_without_a_slice_run_backward_where_they_ran_forward(fake: FakeLab) -> None:
    left, right = fake.slice(1), fake.slice(1)
    here, there = pw.jit(first), pw.jit(second, on=right)
    step = pw.program(jax.grad(lambda w, x: there(jnp.float32(1), here(w, x))))
    found = step(pw.device_put(W, left), pw.device_put(X, left))
    equal(found, jax.grad(lambda w, x: second(1, first(w, x)))(W, X))
    assert found.slice is left


def test_a_gradient_that_a_number_elsewhere_makes_comes_to_where_its_call_is(fake: FakeLab) -> None:
    left, right = fake.slice(1), fake.slice(1)
    here = pw.jit(lambda x: jnp.sin(x).sum())
    step = pw.program(jax.grad(lambda x, v: here(x) * v.sum()))
    found = step(pw.device_put(X, left), pw.device_put(V, right))
    equal(found, np.cos(X) * V.sum())
    assert found.slice is left


def test_an_explicit_move_and_its_way_back(fake: FakeLab) -> None:
    left, right = fake.slice(1), fake.slice(1)
    call = pw.jit(second, on=right)
    step = pw.program(jax.grad(lambda x: call(V, pw.device_put(x * 2, right) + 1)))
    found = step(pw.device_put(X, left))
    equal(found, jax.grad(lambda x: second(V, x * 2 + 1))(X))
    assert found.slice is left


def with_a_gradient_of_its_own(f: Any) -> Any:
    function = jax.custom_vjp(f)
    function.defvjp(lambda w, x: (f(w, x), (w, x)), lambda saved, g: (g * saved[0], g * saved[1]))
    return function


AROUND: dict[str, Callable[[Any], Any]] = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "twice": lambda f: lambda w, x: jax.grad(lambda w: f(w, x))(w).sum(),
    "custom": lambda f: with_a_gradient_of_its_own(f),
}


@pytest.mark.parametrize("name", AROUND)
def test_inside_of_jaxs_own(fake: FakeLab, name: str) -> None:
    on = fake.slice(1)
    call = pw.jit(lambda w, x: (first(w, x) ** 3).sum(), on=on)

    def plain(w: Any, x: Any) -> Any:
        return (first(w, x) ** 3).sum()

    around = AROUND[name]
    step = pw.program(jax.grad(lambda w, x: around(call)(w, x)))
    equal(step(W, X), jax.grad(around(plain))(W, X))


@pytest.mark.parametrize("sure", [0.0, 1.0])
def test_conditions(fake: FakeLab, sure: float) -> None:
    """Only the branch that was taken is computed again, and its arguments alone have gradients."""
    left, right = fake.slice(1), fake.slice(1)
    small = pw.jit(lambda w, x: w * x, on=left, name="small")
    large = pw.jit(lambda v, x: jnp.sin(v * x), on=right, name="large")
    end = pw.jit(lambda y: (y**2).sum(), on=left, name="end")
    scale = pw.jit(lambda x: x * 3, on=left, name="scale")

    def loss(w: Any, v: Any, x: Any, sure: Any) -> Any:
        z = scale(x)  # both branches read it from around them
        y = pw.cond(
            sure > 0.5,
            lambda w, v: small(w, z),
            lambda w, v: pw.device_put(large(v, z), left),
            w,
            v,
        )
        return end(y)

    def plain(w: Any, v: Any, x: Any) -> Any:
        z = x * 3
        return ((w * z if sure > 0.5 else jnp.sin(v * z)) ** 2).sum()

    step = pw.program(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    found = step(
        pw.device_put(W, left), pw.device_put(V, right), pw.device_put(X, left),
        pw.device_put(np.float32(sure), left),
    )  # fmt: skip
    equal(found, jax.value_and_grad(plain, argnums=(0, 1, 2))(W, V, X))
    assert [handle.slice for handle in found[1]] == [left, right, left]


def test_optax_as_published(fake: FakeLab) -> None:
    optax = pytest.importorskip("optax")
    left, right = fake.slice(2), fake.slice(2)
    on_left, on_right = pw.jit(first, on=left), pw.jit(second, on=right)
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(f: Any, g: Any, parameters: Any, memory: Any, x: Any) -> Any:
        def loss(parameters: Any) -> Any:
            return g(parameters[1], f(parameters[0], x))

        value, slopes = jax.value_and_grad(loss)(parameters)
        changes, memory = optimizer.update(slopes, memory, parameters)
        return optax.apply_updates(parameters, changes), memory, value

    there = pw.program(lambda *args: step(on_left, on_right, *args))
    parameters = (pw.device_put(W, left), pw.device_put(V, right))
    state = (parameters, optimizer.init((W, V)))
    here = ((W, V), optimizer.init((W, V)))
    for _ in range(3):
        *state, value = there(*state, X)
        *here, expected = step(first, second, *here, X)
        equal(value, expected)
    equal(state[0], here[0])


def test_a_norm_over_all_slices_moves_as_single_numbers(fake: FakeLab) -> None:
    left, right = fake.slice(1), fake.slice(1)

    @pw.program
    def clipped(w: Any, v: Any) -> Any:
        norm = jnp.sqrt((w**2).sum() + (v**2).sum())
        return w / norm, v / norm

    found = clipped(pw.device_put(W, left), pw.device_put(V, right))
    norm = np.sqrt((W**2).sum() + (V**2).sum())
    equal(found, (W / norm, V / norm))
    assert [handle.slice for handle in found] == [left, right]
    moved = [node for node in nodes(clipped.ir()) if node.startswith("transfer")]
    assert len(moved) == 2, "the square sum of one, and the norm back, once"
    with pytest.raises(pw.PathwaysError, match="operands on different slices"):
        pw.program(lambda w, v: w + v)(pw.device_put(W, left), pw.device_put(V, right))


def test_a_batch_is_one_call(fake: FakeLab) -> None:
    """Also of gradients by example, over slices, with arguments that all examples share."""
    left, right = fake.slice(2), fake.slice(1)
    cut = pw.jit(first, on=left, in_shardings=(P("x"), P("x")), out_shardings=P("x"))
    end = pw.jit(second, on=right)
    xs = np.stack([X, 2 * X, 3 * X], axis=1)

    def of_each(f: Any, g: Any, put: Any) -> Any:
        def loss(w: Any, x: Any) -> Any:
            return g(V, put(f(w, x)))

        return jax.vmap(jax.value_and_grad(loss), in_axes=(None, 1))

    step = pw.program(of_each(cut, end, lambda h: pw.device_put(h, right)))
    found = step(pw.device_put(W, left), xs)
    equal(found, of_each(first, second, lambda h: h)(W, xs))
    assert sum(node.startswith("call") for node in nodes(step.ir())) == 4


def test_jacobians_come_backward_and_not_forward(fake: FakeLab) -> None:
    f = pw.jit(jnp.sin, on=fake.slice(1), name="f")
    equal(pw.program(jax.jacrev(f))(X), np.diag(np.cos(X)))
    for forward in (jax.jacfwd(f), lambda x: jax.jvp(f, (x,), (x,))):
        with pytest.raises(pw.PathwaysError, match="forward mode"):
            pw.program(forward)(X)


def test_the_loop_of_until_has_no_gradient(fake: FakeLab) -> None:
    f = pw.jit(lambda x: x * 2, on=fake.slice(1), name="f")

    def loss(x: Any) -> Any:
        return pw.until(lambda x: x.max() > 9, f, x, at_most=3).sum()

    with pytest.raises(pw.PathwaysError, match=r"jax\.grad cannot look into pw\.until"):
        pw.program(jax.grad(loss))(X)
    with pytest.raises(pw.PathwaysError, match=r"jax\.vmap cannot look into pw\.until"):
        pw.program(jax.vmap(loss))(np.stack([X, X]))


@st.composite
def graphs(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    """Calls: function, slice, and the two earlier values that they take."""
    made = []
    for n in range(draw(st.integers(1, 7))):
        earlier = st.integers(0, n + 1)
        made.append(
            (draw(st.integers(0, 2)), draw(st.integers(0, 2)), draw(earlier), draw(earlier))
        )
    return made


PLAIN = (lambda a, b: jnp.tanh(a + b), lambda a, b: a * b, lambda a, b: (jnp.sin(a), b)[0] - b)


@given(graph=graphs())
@settings(max_examples=25)
def test_any_graph(graph: list[tuple[int, int, int, int]]) -> None:
    with FakeLab() as fake:
        slices = [fake.slice(1) for _ in range(3)]
        calls = [[pw.jit(f, on=on) for on in slices] for f in PLAIN]

        def run(function: Any, a: Any, b: Any) -> Any:
            values = [a, b]
            for which, on, left, right in graph:
                values.append(function(which, on)(values[left], values[right]))
            return values[-1].sum()

        step = pw.program(jax.grad(lambda a, b: run(lambda f, on: calls[f][on], a, b), (0, 1)))
        found = step(pw.device_put(W, slices[0]), pw.device_put(X, slices[1]))
        equal(found, jax.grad(lambda a, b: run(lambda f, _: PLAIN[f], a, b), (0, 1))(W, X))
