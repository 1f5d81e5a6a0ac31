"""Compiled functions mean what they mean to ``jax.jit``, and are made once."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.client.lab import stats
from pathways_lab.runtime import jax_private
from tests.client.kit import FakeLab, a_slice


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    w: Any
    b: Any


class State(NamedTuple):
    step: Any
    moments: Any


def both(fake: FakeLab, function: Any, *args: Any, on: Any = None, **options: Any) -> Any:
    """The function on a slice and in plain JAX: same values, dtypes, weak types, structure."""
    ours = pw.jit(function, on=on or fake.slice(4), **options)(*args)
    plain = jax.jit(
        function,
        **{k: v for k, v in options.items() if k in ("static_argnums", "static_argnames")},
    )(*args)
    assert jax.tree.structure(ours) == jax.tree.structure(plain)
    for ours_leaf, leaf in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        assert (ours_leaf.shape, ours_leaf.dtype) == (leaf.shape, leaf.dtype)
        assert ours_leaf.weak_type == leaf.weak_type
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf, got = jax.random.key_data(leaf), jax.random.key_data(ours_leaf.result())
        else:
            got = ours_leaf.result()
        np.testing.assert_allclose(
            np.asarray(got, np.float64), np.asarray(leaf, np.float64), rtol=1e-5
        )
    return ours


TREES: dict[str, Any] = {
    "dict": {"a": np.arange(4.0), "b": [np.ones((2, 2)), None, ()]},
    "dataclass": Model(np.ones((2, 3), np.float32), np.zeros(3)),
    "namedtuple": State(3, {"m": (np.float32(2), np.ones(2))}),
    "nothing": (),
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_any_pytree_goes_in_and_comes_out(fake: FakeLab, tree: Any) -> None:
    both(fake, lambda t: (jax.tree.map(lambda x: x + 1, t), {"again": t}), tree)


DTYPES = ["bool", "int8", "int32", "uint16", "float32", "float16", "bfloat16", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (4, 0, 2), (8, 3)], ids=str)
def test_dtypes_and_shapes(fake: FakeLab, dtype: str, shape: tuple[int, ...]) -> None:
    x = np.ones(shape, jnp.dtype(dtype))
    made = pw.jit(lambda v: (v, jnp.flip(v)), on=fake.slice(2))(x)
    for leaf in made:
        assert leaf.dtype == x.dtype
        np.testing.assert_array_equal(leaf.result(), x)


@pytest.mark.parametrize("value", [3, 2.5, True, 1 + 2j, np.float64(2), np.int64(7)], ids=repr)
def test_scalars_have_the_types_that_jax_gives_them(fake: FakeLab, value: Any) -> None:
    """Weak types follow: a Python number does not widen a bfloat16."""
    function = lambda v: (v, v * jnp.ones(2, jnp.bfloat16))  # noqa: E731
    made = pw.jit(function, on=fake.slice(2))(value)
    plain = jax.jit(function)(value)
    for ours, leaf in zip(made, plain, strict=True):
        assert (ours.dtype, ours.weak_type) == (leaf.dtype, leaf.weak_type)


def test_random_keys(fake: FakeLab) -> None:
    f = pw.jit(lambda k: (jax.random.split(k, 4), jax.random.normal(k, (3,))), on=fake.slice(2))
    keys, normal = f(jax.random.key(7))
    assert keys.dtype == jax.random.key(0).dtype
    want = jax.random.split(jax.random.key(7), 4)
    np.testing.assert_array_equal(jax.random.key_data(keys.result()), jax.random.key_data(want))
    np.testing.assert_allclose(
        normal.result(), jax.random.normal(jax.random.key(7), (3,)), rtol=1e-6
    )
    again = pw.jit(lambda k: jax.random.uniform(k[1]), on=keys.slice)(keys)
    np.testing.assert_allclose(float(again), jax.random.uniform(want[1]), rtol=1e-6)
    with pytest.raises(TypeError, match="key_data"):
        np.asarray(keys)


def test_keyword_and_static_arguments(fake: FakeLab) -> None:
    def f(x: Any, n: int, *, scale: Any = 1.0, mode: str = "add") -> Any:
        total = sum(x * scale for _ in range(n))
        return total + 1 if mode == "add" else total

    on = fake.slice(2)
    g = pw.jit(f, on=on, static_argnames=("n", "mode"))
    np.testing.assert_allclose(g(np.ones(2), 3, scale=2.0).result(), [7, 7])
    np.testing.assert_allclose(g(np.ones(2), n=2, mode="no").result(), [2, 2])
    # As in JAX: with both given, nothing is inferred from the signature.
    h = pw.jit(f, on=on, static_argnums=1, static_argnames="mode")
    np.testing.assert_allclose(h(np.ones(2), 3, mode="no").result(), [3, 3])
    with pytest.raises(pw.PathwaysError, match="where Python needs a number"):
        h(np.ones(2), n=2)
    with pytest.raises(pw.PathwaysError, match=r"static argument.*not hashable"):
        pw.jit(f, on=on, static_argnums=1)(np.ones(2), [3])


def test_static_values_that_compare_equal_are_different(fake: FakeLab) -> None:
    f = pw.jit(lambda x, n: x * n, on=fake.slice(1), static_argnums=1)
    assert f(np.int32(3), 2).dtype == jnp.int32
    assert f(np.int32(3), 2.0).dtype == jnp.float32


def test_a_repeated_call_does_no_work(fake: FakeLab) -> None:
    """The second call of the same types, on the same line, makes nothing anew."""
    f = pw.jit(lambda x, y: x @ y, on=fake.slice(4), in_shardings=(P("x"), P()))
    x = np.ones((8, 4), np.float32)

    def call() -> Any:
        return f(x, x.T)

    call().block_until_ready()
    before = dataclasses.replace(stats.work)
    sent = fake.count("function"), fake.count("program")
    for _ in range(3):
        np.testing.assert_allclose(call().result(), x @ x.T)
    assert stats.work == before
    assert (fake.count("function"), fake.count("program")) == sent
    # The check can fail: other types are other work.
    f(x.astype(np.float16), x.T)
    assert stats.work != before


def test_a_repeated_call_of_handles_is_known_by_them(
    fake: FakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is looked for again: neither for pytrees, nor for keywords."""

    @pw.jit(on=fake.slice(4))
    def step(state: Any, by: Any) -> Any:
        return {"x": state["x"] + by, "count": state["count"] + 1}

    def turn(state: Any) -> Any:
        return step(state, by=by)

    by = pw.device_put(np.float32(2), step.slice)
    state = step({"x": np.arange(4.0, dtype=np.float32), "count": np.int32(0)}, by)
    for _ in range(2):
        state = turn(state)
    monkeypatch.setattr(type(step), "bind", None)
    for _ in range(3):
        state = turn(state)
    assert jax.tree.structure(state) == jax.tree.structure({"x": 0, "count": 0})
    assert state["x"].result().tolist() == [12.0, 13.0, 14.0, 15.0]
    assert state["count"].item() == 6


def test_a_repeated_call_is_refused_what_the_first_one_would_be(fake: FakeLab) -> None:
    place = fake.slice(4)
    double = pw.jit(lambda x: x * 2, on=place)

    def turn(x: Any) -> Any:
        return double(x)

    good, dead = (pw.device_put(np.ones(4, np.float32), place) for _ in range(2))
    for _ in range(3):
        turn(good)
    dead.delete()
    with pytest.raises(pw.PathwaysError, match="was deleted"):
        turn(dead)
    assert turn(np.full(4, 3, np.float32)).result().tolist() == [6.0] * 4
    assert turn(pw.device_put(np.ones(8, np.float32), place)).result().tolist() == [2.0] * 8
    place.release()
    with pytest.raises(pw.PathwaysError, match="was released"):
        turn(good)


def test_repeated_calls_know_their_own_lines(fake: FakeLab) -> None:
    inc = pw.jit(lambda x: x + 1, on=fake.slice(1))
    x = pw.device_put(np.float32(0), inc.slice)
    for _ in range(3):
        first = inc(x)
        second = inc(first)
    assert len(inc.repeats) == 2
    lines = {known.prepared.program.nodes[0].line.text for known in inc.repeats.values()}
    assert lines == {"first = inc(x)", "second = inc(first)"}
    assert second.item() == 2.0


def test_the_same_function_in_a_re_executed_cell_is_the_same_code(fake: FakeLab) -> None:
    """Defined again, elsewhere in the file: traced again, and never sent again."""
    on = fake.slice(2)

    def define() -> Any:
        return pw.jit(lambda x: jnp.tanh(x) * 2, on=on)

    def define_below() -> Any:
        return pw.jit(lambda x: jnp.tanh(x) * 2, on=on)

    for g in (define(), define(), define_below()):
        g(np.ones(2)).block_until_ready()
    assert fake.count("function") == 1


# --- shardings -----------------------------------------------------------------------


def layouts_of(tree: Any) -> list[str]:
    return [str(leaf.layout) for leaf in jax.tree.leaves(tree)]


def test_arguments_that_nothing_reads_or_that_are_none(fake: FakeLab) -> None:
    """Positions count, also of what the code does not need."""
    x, y = np.arange(4.0, dtype=np.float32), np.ones(4, np.float32)
    both(fake, lambda a, b: b + 1, x, y)
    both(fake, lambda a, b, c: (c * 2, b), x, None, y, in_shardings=(P("x"), None, P("x")))


def test_shardings_are_pytree_prefixes(fake: FakeLab) -> None:
    on = fake.slice(2, 2, axes=("data", "model"))
    params = {"w": np.ones((4, 8), np.float32), "b": np.ones(8, np.float32)}
    x = np.ones((8, 4), np.float32)
    f = pw.jit(
        lambda p, x: (jax.tree.map(lambda a: a * 2, p), x @ p["w"] + p["b"]),
        on=on,
        in_shardings=({"w": P(None, "model"), "b": P("model")}, P("data")),
        out_shardings=({"w": P(None, "model"), "b": None}, P("data", "model")),
    )
    made, y = f(params, x)
    assert str(made["w"].layout) == "P(None, model)"
    assert str(y.layout) == "P(data, model)"
    assert str(made["b"].layout) == "P(model)", "propagated"
    np.testing.assert_allclose(y.result(), x @ params["w"] + params["b"])
    fake.settle()
    (sent,) = fake.of("function")
    assert len(sent["in_layouts"]) == 3


def test_unspecified_results_are_where_propagation_puts_them(fake: FakeLab) -> None:
    on = fake.slice(4, axes=("d",))
    f = pw.jit(lambda x: (x * 2, x.T, x.sum(), x[:3]), on=on, in_shardings=P("d"))
    assert layouts_of(f(np.ones((8, 2)))) == ["P(d, None)", "P(None, d)", "P()", "P(None, None)"]


def test_unspecified_arguments_are_taken_where_they_are(fake: FakeLab) -> None:
    on = fake.slice(4, axes=("d",))
    cut = pw.device_put(np.ones((8, 2)), on.sharding(P("d")))
    f = pw.jit(lambda x, y: x + y, on=on)
    assert layouts_of(f(cut, np.ones((8, 2)))) == ["P(d, None)"]
    assert layouts_of(f(np.ones((8, 2)), 1.0)) == ["P(None, None)"]


def test_shard_map_over_the_mesh_of_the_slice(fake: FakeLab) -> None:
    on = fake.slice(4, axes=("d",))

    def f(x: Any) -> Any:
        inner = jax.shard_map(
            lambda a: jax.lax.psum(a, "d") + jax.lax.axis_index("d"),
            mesh=on.mesh, in_specs=P("d"), out_specs=P("d"),
        )  # fmt: skip
        return inner(x)

    made = pw.jit(f, on=on)(np.arange(4.0))
    np.testing.assert_allclose(made.result(), [6, 7, 8, 9])
    assert layouts_of(made) == ["P(d)"]
    # A constraint in the body places too.
    g = pw.jit(lambda x: jax.lax.with_sharding_constraint(x * 2, on.sharding(P("d"))), on=on)
    assert layouts_of(g(np.arange(8.0))) == ["P(d)"]


def test_the_slice_follows_from_shardings_or_handles(fake: FakeLab) -> None:
    on = fake.slice(2)
    f = pw.jit(lambda x: x + 1, in_shardings=NamedSharding(on.mesh, P("x")))
    y = f(np.ones(2))
    assert y.slice is on
    assert pw.jit(lambda x: x * 3)(y).slice is on
    assert (y * 2 + 1).slice is on


BAD_PLACES = {
    "uneven": (lambda s, o: {"on": s, "in_shardings": P("x")}, r"not divisible by 4"),
    "unknown axis": (lambda s, o: {"on": s, "in_shardings": P("y")}, r"names axis 'y'"),
    "too many": (lambda s, o: {"on": s, "in_shardings": P(None, "x")}, r"2 dimensions"),
    "structure": (lambda s, o: {"on": s, "in_shardings": (P(), P())}, r"has 2 entries"),
    "nonsense": (lambda s, o: {"on": s, "in_shardings": "x"}, r"entry of in_shardings is 'x'"),
    "two slices": (
        lambda s, o: {"in_shardings": s.sharding(), "out_shardings": o.sharding()},
        r"names slices s\d+ and s\d+",
    ),
    "another slice": (
        lambda s, o: {"on": s, "out_shardings": o.sharding()}, r"names slices s\d+ and s\d+"),
    "no slice": (lambda s, o: {}, r"nothing says on which slice"),
    "not a slice": (lambda s, o: {"on": "tpu"}, r"on='tpu'.*is not a slice"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "text"), BAD_PLACES.values(), ids=BAD_PLACES)
def test_wrong_places_are_refused_with_a_remedy(fake: FakeLab, options: Any, text: str) -> None:
    with pytest.raises(pw.PathwaysError, match=text) as caught:
        pw.jit(lambda x: x, **options(fake.slice(4), fake.slice(2)))(np.ones(3))
    assert caught.value.failure.remedy
    assert caught.value.failure.line.file == __file__


def test_part_of_a_slice_is_no_slice(fake: FakeLab) -> None:
    on = fake.slice(4)
    with pytest.raises(pw.PathwaysError, match="in their own order"):
        pw.pmap(lambda x: x, devices=on.tpus[:2])
    mesh = jax.sharding.Mesh(np.array(on.tpus[::-1]), ("x",))
    with pytest.raises(pw.PathwaysError, match="in their own order"):
        pw.jit(lambda x: x, in_shardings=NamedSharding(mesh, P("x")))


def test_another_mesh_over_the_same_devices(fake: FakeLab) -> None:
    on = fake.slice(4)
    mesh = jax.sharding.Mesh(np.array(on.tpus).reshape(2, 2), ("a", "b"))
    f = pw.jit(lambda x: x * 2, in_shardings=NamedSharding(mesh, P("b", "a")))
    x = np.arange(16.0).reshape(4, 4)
    made = f(x)
    assert layouts_of(made) == ["P(b, a)"]
    np.testing.assert_allclose(made.result(), x * 2)


def test_explicit_axes_are_part_of_types(fake: FakeLab) -> None:
    """``jax.make_mesh`` over a slice makes explicit axes: bodies see shardings of arguments."""
    on = fake.slice(4)
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=on.tpus)
    seen: list[Any] = []

    def f(x: Any) -> Any:
        seen.append(jax.typeof(x).sharding.spec)
        return jax.shard_map(lambda v: v * 2, mesh=mesh, in_specs=P("a"), out_specs=P("a"))(x)

    x = np.arange(8.0).reshape(4, 2)
    made = pw.jit(f, in_shardings=NamedSharding(mesh, P("a")))(x)
    np.testing.assert_allclose(made.result(), x * 2)
    assert set(seen) == {P("a", None)}
    assert str(made.layout) == "P(a, None)"


# --- donation, constants, errors, nesting ------------------------------------------------


def test_donated_handles_are_dead(fake: FakeLab) -> None:
    on = fake.slice(2)
    f = pw.jit(lambda p, g: p - g, on=on, donate_argnums=0)
    p, g = (pw.device_put(np.ones(4, np.float32), on) for _ in range(2))
    new = f(p, g)
    assert p.is_deleted()
    assert not g.is_deleted()
    for use in (
        p.result,
        lambda: f(p, g),
        lambda: p + 1,
        lambda: np.asarray(p),
        p.block_until_ready,
    ):
        with pytest.raises(pw.PathwaysError, match=r"was donated to.*may have overwritten"):
            use()
    assert "dead" in repr(p)
    np.testing.assert_allclose(new.result(), 0)
    with pytest.raises(pw.PathwaysError, match="passed twice"):
        f(g, g)
    assert not g.is_deleted()
    by_name = pw.jit(lambda a, b: a + b, on=on, donate_argnames=("b",))
    by_name(new, g)
    assert g.is_deleted()
    assert not new.is_deleted()
    (flags,) = {tuple(m["donated"]) for m in fake.of("function") if m["donated"]} - {(1,)}
    assert flags == (0,)


def test_large_constants_are_warned_about_by_name_and_size(fake: FakeLab) -> None:
    table = {"big": np.ones((1024, 512), np.float32)}
    small = np.ones(3)
    with pytest.warns(
        pw.LargeConstantWarning, match=r"table\['big'\] \(float32\[1024,512\], 2.0 MiB"
    ):
        pw.jit(lambda x: x + jnp.sin(table["big"]).sum() + small, on=fake.slice(1))(np.ones(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error", pw.LargeConstantWarning)
        pw.jit(lambda x: x + small, on=fake.slice(1))(np.ones(3))


def test_shape_errors_show_the_users_own_line(fake: FakeLab) -> None:
    def f(w: Any, x: Any) -> Any:
        return x @ w  # the wrong line

    with pytest.raises(pw.PathwaysError) as caught:
        pw.jit(f, on=fake.slice(1))(np.ones((3, 3)), np.ones((2, 2)))
    failure = caught.value.failure
    assert failure.kind == "capture"
    assert failure.line.text == "return x @ w  # the wrong line"
    assert failure.node == "f"
    assert "w: float32[3,3], x: float32[2,2]" in failure.message
    assert isinstance(caught.value.__cause__, TypeError)


def test_the_users_own_exceptions_stay_theirs(fake: FakeLab) -> None:
    class MineError(Exception):
        pass

    def f(x: Any) -> Any:
        raise MineError("mine")

    with pytest.raises(MineError, match="mine") as caught:
        pw.jit(f, on=fake.slice(1))(np.ones(3))
    assert "node 'f'" in caught.value.__notes__[0]
    shown = [frame.name for frame in caught.traceback if "jax" in str(frame.path)]
    assert not shown, "no frames of JAX between the user's own"


def test_arguments_that_are_no_arrays(fake: FakeLab) -> None:
    def f(options: Any) -> Any:
        return options

    g = pw.jit(f, on=fake.slice(1))
    with pytest.raises(pw.PathwaysError, match=r"options\['mode'\] of 'f' is of type") as caught:
        g({"mode": "fast"})
    assert "static" in caught.value.failure.remedy


def test_a_compiled_function_inside_another_is_part_of_it(fake: FakeLab) -> None:
    on = fake.slice(2)
    inner = pw.jit(lambda x, n: x * n, on=on, static_argnums=1)
    outer = pw.jit(lambda x: inner(x, 3) + 1, on=on)
    np.testing.assert_allclose(outer(np.ones(2)).result(), 4)
    assert fake.count("submit") == 1
    # So JAX may look into it.
    grad = pw.jit(jax.grad(lambda x: inner(x, 3).sum()), on=on)
    np.testing.assert_allclose(grad(np.ones(2)).result(), 3)


@pytest.mark.parametrize("how", [jax.jit, jax.grad, jax.vmap], ids=lambda f: f.__name__)
def test_transformations_from_outside_are_refused(fake: FakeLab, how: Any) -> None:
    f = pw.jit(lambda x: (x * 2).sum(), on=fake.slice(1))
    with pytest.raises(pw.PathwaysError, match="cannot look into the compiled function") as caught:
        how(f)(np.ones(3))
    assert "pw.jit(" in caught.value.failure.remedy


def test_handles_in_closures_are_refused_by_name(fake: FakeLab) -> None:
    on = fake.slice(1)
    h = pw.device_put(np.ones(2), on)
    for body in (lambda x: x + h, lambda x: h * x, lambda x: jnp.add(x, h)):
        with pytest.raises(pw.PathwaysError, match="handle") as caught:
            pw.jit(body, on=on)(np.ones(2))
        assert "argument" in caught.value.failure.remedy


def test_methods_and_partials(fake: FakeLab) -> None:
    on = fake.slice(1)

    class Layer:
        scale = 3.0

        @pw.jit(on=on, static_argnums=0)
        def apply(self, x: Any) -> Any:
            return x * self.scale

    np.testing.assert_allclose(Layer().apply(np.ones(2)).result(), 3)
    f = pw.jit(functools.partial(lambda a, x: a + x, 2.0), on=on)
    np.testing.assert_allclose(f(np.ones(2)).result(), 3)


# --- functions that call back -----------------------------------------------------------


def test_functions_that_print_travel_by_value(fake: FakeLab) -> None:
    on = fake.slice(2, axes=("d",))
    seen: list[Any] = []

    def f(x: Any) -> Any:
        jax.debug.print("sum {}", x.sum())
        y = jax.pure_callback(
            lambda a: np.asarray(a) + 1, jax.ShapeDtypeStruct(x.shape, x.dtype), x
        )
        return x * 2, y

    made, called = pw.jit(f, on=on, in_shardings=P("d"))(np.ones(4, np.float32))
    fake.settle()
    (sent,) = fake.of("function")
    assert sent["kind"] == "callbacks"
    assert str(made.layout) == "P(d)", "its layouts are propagated all the same"
    np.testing.assert_allclose(made.result(), 2)
    np.testing.assert_allclose(called.result(), 2)
    assert not seen


def test_what_cannot_be_pickled_is_said(fake: FakeLab) -> None:
    import threading

    lock = threading.Lock()

    def f(x: Any) -> Any:
        jax.debug.callback(lambda _: lock.locked(), x)
        return x

    with pytest.raises(pw.PathwaysError, match=r"(?s)sent by value.*cannot be pickled") as caught:
        pw.jit(f, on=fake.slice(1))(np.ones(2))
    assert "locks" in caught.value.failure.remedy


def test_no_lab_no_run() -> None:
    with pytest.raises(pw.PathwaysError, match="belongs to no running lab"):
        pw.jit(lambda x: x, on=a_slice(2))(np.ones(2))


def test_nothing_is_kept_for_slices_that_were_released(fake: FakeLab) -> None:
    """Functions and programs that live long meet many slices."""
    step = pw.jit(lambda x: x + 1)
    twice = pw.program(lambda x: step(step(x)))
    for _ in range(4):
        with fake.slice(2) as on:
            x = pw.device_put(np.arange(4.0, dtype=np.float32), on)
            np.testing.assert_array_equal(step(x).result(), np.arange(4) + 1)
            np.testing.assert_array_equal(twice(x).result(), np.arange(4) + 2)
    (body,) = step._bodies.values()
    assert (len(body._executables), len(body.prepared), len(twice._captured)) == (1, 1, 1)
    assert len(step.repeats) == 1


def test_what_jax_lowered_is_let_go_with_each_export(
    fake: FakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[int] = []
    monkeypatch.setattr(jax_private, "forget_lowered", lambda: forgotten.append(1))
    step = pw.jit(lambda x: x + 1)
    for times, devices in enumerate((2, 4, 2), 1):
        with fake.slice(devices) as on:
            step(pw.device_put(np.zeros(4, np.float32), on)).result()
        assert len(forgotten) == min(times, 2)  # a slice of a shape that was there has its code


def test_a_dtype_that_cannot_travel_is_named(fake: FakeLab) -> None:
    f = pw.jit(lambda x: x, on=fake.slice(2))
    with pytest.raises(pw.PathwaysError, match=r"'<lambda>' takes or returns an array of int1"):
        f(jnp.zeros(4, jnp.int1))


NO_DTYPES = [
    (np.arange(4, dtype=">f4"), ">f4"),
    (np.array(["a"]), "<U1"),
    (np.array([{}]), "object"),
    (np.zeros(4, "datetime64[s]"), r"datetime64\[s\]"),
]


@pytest.mark.parametrize(("given", "dtype"), NO_DTYPES)
def test_a_dtype_that_jax_does_not_have_is_named(fake: FakeLab, given: Any, dtype: str) -> None:
    on = fake.slice(2)
    said = f"is an array of dtype {dtype}, which JAX does not have"
    for use, what in (
        (lambda: pw.jit(lambda x: x, on=on)(given), "x of '<lambda>'"),
        (lambda: pw.program(lambda x: x, on=on)(given), "x of '<lambda>'"),
        (lambda: pw.device_put(given, on), "a leaf given to device_put"),
    ):
        with pytest.raises(pw.PathwaysError, match=f"{what} {said}") as caught:
            use()
        assert "astype" in caught.value.failure.remedy


def test_a_number_that_does_not_fit_is_named(fake: FakeLab) -> None:
    f = pw.jit(lambda x, n: x + n, on=fake.slice(2))
    x = np.zeros(2, np.float32)
    f(x, 2**31 - 1)
    with pytest.raises(pw.PathwaysError, match=r"n of '<lambda>' is 1099511627776, .* int32"):
        f(x, 2**40)


@pytest.mark.parametrize("size", [3, 100_000])
def test_a_type_without_a_value_is_named(fake: FakeLab, size: int) -> None:
    f = pw.jit(lambda x: x, on=fake.slice(2))
    with pytest.raises(pw.PathwaysError, match=r"x is a ShapeDtypeStruct, float32\[\d+\]: a type"):
        f(jax.ShapeDtypeStruct((size,), "float32"))
    assert fake.connection.under_way is False


def test_a_timeout_that_is_no_number_is_named(fake: FakeLab) -> None:
    h = pw.jit(lambda x: x, on=fake.slice(2))(np.zeros(2, np.float32))
    with pytest.raises(pw.PathwaysError, match="timeout='a' is not a number of seconds"):
        h.result(timeout="a")  # type: ignore[arg-type]
