"""``pw.pmap`` means what ``jax.pmap`` means, and JAX's own names can be routed here."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from tests.client.kit import FakeLab

X = np.arange(12, dtype=np.float32).reshape(4, 3)


def test_collectives_and_axes(fake: FakeLab) -> None:
    on = fake.slice(4)
    f = pw.pmap(lambda x: (x / jax.lax.psum(x, "i"), jax.lax.axis_index("i")), "i", devices=on.tpus)
    share, index = f(X + 1)
    np.testing.assert_allclose(share.result(), (X + 1) / (X + 1).sum(0), rtol=1e-6)
    np.testing.assert_array_equal(index.result(), range(4))
    assert str(share.layout) == "P(i, None)"
    # Only the mapped axis: bodies see what remains.
    g = pw.pmap(lambda x, w: x @ w, devices=on, in_axes=(1, None), out_axes=1)
    made = g(X.T, np.ones((3, 2), np.float32))
    np.testing.assert_allclose(made.result(), (X @ np.ones((3, 2))).T)
    assert str(made.layout) == "P(None, devices)"


def test_trees_statics_keywords_and_donation(fake: FakeLab) -> None:
    on = fake.slice(4)
    f = pw.pmap(
        lambda tree, n, *, shift: {"y": tree["x"] * n + shift, "s": tree["c"]},
        devices=on, in_axes=({"x": 0, "c": None}, None), out_axes={"y": 0, "s": None},
        static_broadcasted_argnums=1, donate_argnums=0,
    )  # fmt: skip
    x = pw.device_put(X, on)
    made = f({"x": x, "c": 5.0}, 3, shift=np.arange(4.0)[:, None])
    np.testing.assert_allclose(made["y"].result(), X * 3 + np.arange(4)[:, None])
    assert float(made["s"]) == 5
    assert x.is_deleted()


def test_axes_and_places_that_do_not_go_with_their_trees_are_refused(fake: FakeLab) -> None:
    on = fake.slice(4)
    for ways in ({"in_axes": (0, 0)}, {"out_axes": (0, 0)}):
        with pytest.raises(pw.PathwaysError, match=r"2 entries|the structure") as caught:
            pw.pmap(lambda x: x, devices=on, **ways)(X)
        assert "tree prefix" in caught.value.failure.remedy
    with pytest.raises(pw.PathwaysError, match=r"^the target of device_put does not have"):
        pw.device_put({"x": X}, {"y": on})
    with pytest.raises(pw.PathwaysError, match=r"device_put is of type str") as caught:
        pw.device_put({"x": X, "mode": "fast"}, on)
    assert "leave it out of the tree" in caught.value.failure.remedy
    some = pw.device_put({"x": {"a": X, "b": X}, "y": None, "z": X}, {"x": on, "y": on, "z": on})
    assert jax.tree.leaves(jax.tree.map(lambda h: h.slice is on, some)) == [True] * 3


def test_the_mapped_axis_has_one_element_per_device(fake: FakeLab) -> None:
    f = pw.pmap(lambda x: x, devices=fake.slice(4))
    with pytest.raises(pw.PathwaysError, match=r"size 3, and slice s\d+ has 4 devices") as caught:
        f(X.T)
    assert "slice of 3 devices" in caught.value.failure.remedy
    with pytest.raises(pw.PathwaysError, match="which has 0 dimensions"):
        f(1.0)
    with pytest.raises(pw.PathwaysError, match="axis_size=2 over 4 devices"):
        pw.pmap(lambda x: x, devices=fake.slice(4), axis_size=2)
    with pytest.raises(pw.PathwaysError, match="are not the virtual devices"):
        pw.pmap(lambda x: x, devices=["tpu"])


def test_jax_names_take_virtual_devices_while_patched(fake: FakeLab) -> None:
    on = fake.slice(4)
    jit, pmap, device_put = jax.jit, jax.pmap, jax.device_put

    with pw.patched(), pw.patched():
        a = jax.pmap(lambda x: x * 2, axis_name="i", devices=on.tpus)
        b = jax.jit(lambda x: x + 1, in_shardings=NamedSharding(on.mesh, P("x")))
        handle = jax.device_put(X, on.sharding(P("x")))
        plain = jax.jit(lambda x: x * 3)(X)
        local = jax.device_put(X)

        # Inside of a compiled function they are JAX's own again.
        constrained = pw.jit(lambda x: jax.device_put(x * 2, on.sharding(P("x"))), on=on)
        np.testing.assert_allclose(constrained(X).result(), X * 2)
        assert str((jax.device_put(X, on) + 1).layout) == "P(None, None)"

        @jax.jit
        def decorated(x: Any) -> Any:
            return x

        assert isinstance(decorated(X), jax.Array)
        with pytest.raises(pw.PathwaysError, match="does not take compiler_options"):
            jax.jit(lambda x: x, in_shardings=on.sharding(), compiler_options={"a": 1})
    assert (jax.jit, jax.pmap, jax.device_put) == (jit, pmap, device_put)
    assert isinstance(plain, jax.Array)
    assert isinstance(local, jax.Array)
    assert isinstance(handle, pw.Handle)
    np.testing.assert_allclose(b(a(handle)).result(), X * 2 + 1)


def test_jax_names_that_are_not_routed_ask_for_the_lab(fake: FakeLab) -> None:
    on = fake.slice(4)
    handle = pw.device_put(X, on)
    for use in (
        lambda: jax.jit(lambda x: x, in_shardings=on.sharding(P("x")))(X),
        lambda: jax.pmap(lambda x: x, devices=on.tpus)(X),
        lambda: jax.device_put(X, on.sharding(P("x"))),
        lambda: jnp.zeros(4, device=on.sharding()),
        lambda: jnp.zeros_like(handle),
    ):
        with pytest.raises(pw.PathwaysError, match="no lab is there whose devices JAX could"):
            use()


def test_patching_is_undone_after_an_error() -> None:
    original = jax.jit

    def fail() -> None:
        with pw.patched():
            assert jax.jit is not original
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()
    assert jax.jit is original
    assert jax.jit(lambda x: jnp.sin(x))(1.0)
