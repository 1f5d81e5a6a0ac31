"""The code that travels is what the user's Python came to when it ran, once."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from tests.client.kit import FakeLab

X = np.arange(8, dtype=np.float32)


@pytest.mark.parametrize("calls_back", [False, True], ids=["", "calls back"])
@pytest.mark.parametrize("fuse", [None, False, True], ids=["call", "plain", "fused"])
def test_python_runs_once_whatever_it_does_and_wherever_its_code_goes(
    fake: FakeLab, fuse: bool | None, calls_back: bool
) -> None:
    """As with ``jax.jit``: what it counts, draws or prints when it runs is part of the code."""
    ran: list[None] = []

    def count(x: Any) -> Any:
        ran.append(None)
        if calls_back:
            x = jax.pure_callback(np.negative, jax.ShapeDtypeStruct(x.shape, x.dtype), -x)
        return x + len(ran)

    f = pw.jit(count)
    call = f if fuse is None else pw.program(lambda x: f(f(x)) - 1, fuse=fuse)
    left, right = fake.slice(2), fake.slice(4)
    for place in (left, right, right.sharding(P("x"))):
        made = call(pw.device_put(X, place))
        np.testing.assert_array_equal(made.result(), X + 1)
    assert len(ran) == 1


@pytest.mark.parametrize("count", [(), (8,), (1 << 17,)], ids=str)
@pytest.mark.filterwarnings(
    "ignore::pathways_lab.client.functions.traced_function.LargeConstantWarning"
)
def test_random_keys_from_outside_are_part_of_the_code(
    fake: FakeLab, count: tuple[int, ...]
) -> None:
    keys = jax.random.split(jax.random.key(3), count)

    def draw(x: Any) -> Any:
        return x + jax.random.uniform(keys.reshape(-1)[-1], x.shape), keys

    for call in (pw.jit(draw, on=fake.slice(4)), pw.program(pw.jit(draw, on=fake.slice(4)))):
        made, back = call(X)
        np.testing.assert_array_equal(made.result(), jax.jit(draw)(X)[0])
        assert (back.result() == keys).all()


def test_keywords_static_arguments_and_maps_run_python_once(fake: FakeLab) -> None:
    ran: list[str] = []
    on = fake.slice(2)

    def step(x: Any, times: int, *, plus: Any, twice: bool = False) -> Any:
        ran.append("step")
        return x * times * (2 if twice else 1) + plus

    def each(x: Any, times: int) -> Any:
        ran.append("each")
        return jax.lax.psum(x, "i") * times

    static: Any = {"static_argnums": 1, "static_argnames": "twice"}
    for compiled in (pw.jit(step, on=on, **static), pw.program(step, on=on, **static)):
        for _ in range(2):
            made = compiled(X, 3, plus=X, twice=True)
            np.testing.assert_array_equal(made.result(), 7 * X)
    assert ran == 2 * ["step"]
    mapped = pw.pmap(each, axis_name="i", devices=on, static_broadcasted_argnums=1)
    np.testing.assert_array_equal(mapped(X.reshape(2, 4), 2).result(), [2 * (X[:4] + X[4:])] * 2)
    assert ran[2:] == ["each"]


def test_functions_that_keep_notes_of_their_tracing_work(fake: FakeLab) -> None:
    """``checkify`` keeps what it has traced: a second time it would be another error."""

    def root(x: Any) -> Any:
        checkify.check(jnp.all(x >= 0), "{} is negative", x[0])
        return jnp.sqrt(x)

    on = fake.slice(2)
    checked = pw.jit(checkify.checkify(root), on=on)
    for call in (checked, pw.program(checked), pw.program(checkify.checkify(root), on=on)):
        error, made = call(X)
        error.throw()
        assert (error.get(), str(error)) == (None, "Error(None)")
        np.testing.assert_allclose(made.result(), np.sqrt(X))
        error, _ = call(X - 1)
        assert error.get() == "-1.0 is negative (`check` failed)"
        assert "-1.0 is negative" in str(error)
        fetched = jax.device_get(error)
        for throw in (error.throw, fetched.throw, functools.partial(checkify.check_error, error)):
            with pytest.raises(checkify.JaxRuntimeError, match=r"-1\.0 is negative"):
                throw()
    each = pw.jit(jax.vmap(checkify.checkify(lambda x: checkify.check(x != 2, "{}", x))), on=on)
    error, _ = each(X)
    with pytest.raises(checkify.JaxRuntimeError, match=r"2\.0"):
        error.throw()
    assert error.get().startswith("at mapped index 2: 2.0")


@pytest.mark.parametrize("where", ["in_shardings", "inside"])
def test_a_mesh_that_ends_who_compiles_for_it_does_not_leave_the_kernel(
    fake: FakeLab, where: str
) -> None:
    on = fake.slice(2)
    cut = NamedSharding(Mesh(np.array(on.devices), ("größe",)), P("größe"))
    constrained = jax.lax.with_sharding_constraint
    f = pw.jit(abs, in_shardings=cut) if where == "in_shardings" else pw.jit(
        lambda x: constrained(x, cut), on=on
    )  # fmt: skip
    with pytest.raises(pw.PathwaysError, match="'größe' cannot be the name of a mesh axis"):
        f(X)
