"""JAX's transformations around what runs on devices: refused in our words, at the user's line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.client.program.cell_program import CellProgram
from tests.client.kit import FakeLab

X = np.arange(4, dtype=np.float32)


def called(fake: FakeLab) -> tuple[Any, Any, Any]:
    f = pw.jit(lambda a: a * 2, on=fake.slice(2), name="f")
    return f, pw.program(lambda a: f(a) + 1, name="p"), lambda a: pw.device_put(a, f.slice)


THINGS = (
    (0, "the compiled function 'f', which is one node"),
    (1, "the program 'p', which is one run"),
    (2, "device_put"),
)
AROUND: dict[str, Callable[[Any], Any]] = {
    "jax.grad": lambda f: jax.grad(lambda x: f(x).sum())(X),
    "jax.vmap": lambda f: jax.vmap(f)(X),
    "jax.jit": lambda f: jax.jit(f)(X),
    "JAX's scan": lambda f: jax.lax.scan(lambda c, _: (f(c), None), X, None, length=2),
    "JAX's cond": lambda f: jax.lax.cond(True, f, f, X),
}


@pytest.mark.parametrize(("number", "thing"), THINGS)
@pytest.mark.parametrize("name", AROUND)
def test_around_what_is_called(fake: FakeLab, name: str, number: int, thing: str) -> None:
    function = called(fake)[number]
    function(X)  # what is known already is refused too
    with pytest.raises(pw.PathwaysError) as caught:
        AROUND[name](function)
    failure = caught.value.failure
    assert failure.message.startswith(f"{name} cannot look into {thing}")
    assert "one compiled function (pw.jit)" in failure.remedy
    assert (f"pw.jit({name}(f))" in failure.remedy) is name.startswith("jax.")
    assert (f"pw.program({name}(f))" in failure.remedy) is (name in ("jax.grad", "jax.vmap"))
    assert failure.line.file == __file__


def test_the_remedy_does_work(fake: FakeLab) -> None:
    f, p, _ = called(fake)
    for function in (f, p.function):
        gradient = pw.jit(jax.grad(lambda x, g=function: g(x).sum()), on=f.slice)
        np.testing.assert_array_equal(gradient(X).result(), 2)
        there = pw.program(jax.grad(lambda x, g=function: g(pw.device_put(x, f.slice)).sum()))
        np.testing.assert_array_equal(there(X).result(), 2)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_standins_that_are_left_over(fake: FakeLab, number: int) -> None:
    things = called(fake)
    kept: list[Any] = []
    pw.program(lambda a: kept.append(things[0](a)))(X)
    with pytest.raises(
        pw.PathwaysError, match="stand-in of one program was used outside"
    ) as caught:
        things[number](kept[0])
    assert caught.value.failure.line.file == __file__


def test_standins_that_are_left_over_in_a_cell(fake: FakeLab) -> None:
    f, _, _ = called(fake)
    code = compile("y = f(kept[0])", "<cell>", "exec")
    kept: list[Any] = []
    pw.program(lambda a: kept.append(f(a)))(X)
    with pytest.raises(pw.PathwaysError, match="stand-in of one program was used outside"):
        CellProgram(lambda names: exec(code, names))({"f": f, "kept": kept})


@pytest.mark.parametrize(
    "around",
    [
        lambda f, a: jax.lax.cond(True, f, f, a),
        lambda f, a: jax.lax.map(f, a),
    ],
    ids=["cond", "map"],
)
def test_inside_a_program_the_line_is_the_users(fake: FakeLab, around: Any) -> None:
    f, _, _ = called(fake)
    with pytest.raises(pw.PathwaysError, match="is called inside jax") as caught:
        pw.program(lambda a: around(f, a))(X)
    assert caught.value.failure.line.text.startswith("lambda f, a: jax.")


@pytest.mark.parametrize(
    "use",
    [
        jnp.sum,
        jax.jit(lambda x: x),
        jax.grad(lambda x: (x**2).sum()),
        jax.nn.relu,
        lambda h: jnp.concatenate([h, h]),
        lambda h: jax.lax.add(h, h),
        lambda h: jax.lax.scan(lambda c, x: (c + x, None), 0.0, h),
        lambda h: jax.vmap(lambda x: -x)(h),
    ],
)
def test_functions_of_jax_given_a_handle_ask_for_its_lab(
    fake: FakeLab, use: Callable[[Any], Any]
) -> None:
    h = pw.device_put(X, fake.slice(2))
    with pytest.raises(pw.PathwaysError, match="no lab is there whose devices JAX could have"):
        use(h)
    np.testing.assert_allclose(pw.jit(jnp.sum)(h), X.sum())
