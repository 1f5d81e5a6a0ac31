"""Programs of Shardy's partitioner run on slices as their modules say."""

from __future__ import annotations

import gc
import itertools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxlib.version import __version_info__ as jaxlib_version

import pathways_lab as pw
from pathways_lab.client.code import tiles
from pathways_lab.core.program.layout import Layout, boxes
from pathways_lab.core.program.program import Call, Transfer
from pathways_lab.runtime import jax_ifrt
from tests.client.kit import FakeLab
from tests.pipeline.spelling import spelled

TWO_MESHES = spelled("""
#whole = #ifrt.sharding_param<1x1 to [0] on 2>
#rows = #ifrt.sharding_param<2x1 to [0] on 2>
module @jit_train {
  func.func public @main(%w: !ifrt.array<tensor<4x4xf32>, #whole, [0, 1]> {ifrt.donated},
      %x: !ifrt.array<tensor<4x4xf32>, #rows, [0, 1]>) -> (
      !ifrt.array<tensor<4x4xf32>, #rows, [2, 3]>, !ifrt.array<tensor<4x4xf32>, #whole, [0, 1]>)
      attributes {ifrt.function} {
    %h, %c0 = ifrt.Call @forward.train::@main(%w, %x) on devices [0, 1] {ifrt.mesh_name = "first"}
      : (!ifrt.array<tensor<4x4xf32>, #whole, [0, 1]>, !ifrt.array<tensor<4x4xf32>, #rows, [0, 1]>)
      -> !ifrt.array<tensor<4x4xf32>, #rows, [0, 1]>
    %m, %c1 = ifrt.CopyArrays(%h) : (!ifrt.array<tensor<4x4xf32>, #rows, [0, 1]>)
      -> !ifrt.array<tensor<4x4xf32>, #rows, [2, 3]>
    %y, %c2 = ifrt.Call @double.train::@main(%m) on devices [2, 3]
      {ifrt.mesh_name = "second", io_aliases = [array<i32: 0, 0>]}
      : (!ifrt.array<tensor<4x4xf32>, #rows, [2, 3]>) -> !ifrt.array<tensor<4x4xf32>, #rows, [2, 3]>
    %v, %c3 = ifrt.Call @update.train::@main(%w, %h) after %c0 on devices [0, 1]
      {ifrt.mesh_name = "first", donated_input_indices = array<i32: 0>}
      : (!ifrt.array<tensor<4x4xf32>, #whole, [0, 1]>, !ifrt.array<tensor<4x4xf32>, #rows, [0, 1]>)
      -> !ifrt.array<tensor<4x4xf32>, #whole, [0, 1]>
    return %y, %v : !ifrt.array<tensor<4x4xf32>, #rows, [2, 3]>,
      !ifrt.array<tensor<4x4xf32>, #whole, [0, 1]>
  }
  module @forward.train attributes {sym_visibility = "private"} {
    func.func @main(%w: tensor<4x4xf32>, %x: tensor<4x4xf32>) -> tensor<4x4xf32> {
      %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
        : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
      return %0 : tensor<4x4xf32>
    }
  }
  module @double.train attributes {sym_visibility = "private"} {
    func.func @main(%x: tensor<4x4xf32> {tf.aliasing_output = 0 : i32}) -> tensor<4x4xf32> {
      %0 = stablehlo.add %x, %x : tensor<4x4xf32>
      return %0 : tensor<4x4xf32>
    }
  }
  module @update.train attributes {sym_visibility = "private"} {
    func.func @main(%w: tensor<4x4xf32> {jax.buffer_donor = true}, %h: tensor<4x4xf32>)
        -> tensor<4x4xf32> {
      %0 = stablehlo.subtract %w, %h : tensor<4x4xf32>
      return %0 : tensor<4x4xf32>
    }
  }
}
""")
RNG = np.random.default_rng(0)
W, X = RNG.normal(size=(2, 4, 4)).astype(np.float32)


def test_calls_copies_and_donation_are_those_of_the_module(fake: FakeLab) -> None:
    first, second = fake.slice(2), fake.slice(2)
    train = pw.mpmd.load(TWO_MESHES, on={"first": first, "second": second})
    assert train.name == "train"
    w, x = (
        pw.device_put(value, sharding)
        for value, sharding in zip((W, X), train.in_shardings, strict=True)
    )
    y, v = train(w, x)
    np.testing.assert_array_equal(y.result(), 2 * (X @ W))
    np.testing.assert_array_equal(v.result(), W - X @ W)
    assert (y.slice, v.slice) == (second, first)
    assert fake.count("submit") == 1
    with pytest.raises(pw.PathwaysError, match="donated to 'update'"):
        w.result()
    np.testing.assert_array_equal(x.result(), X)
    steps = [step.node for step in train.capture(v, x).prepared.plan.steps]
    calls = [step for step in steps if isinstance(step, Call)]
    assert [(step.name, step.donated) for step in calls] == [
        ("forward", ()), ("double", (0,)), ("update", (0,)),
    ]  # fmt: skip
    assert sum(isinstance(step, Transfer) for step in steps) == 1


def test_a_program_that_nobody_has_is_let_go(fake: FakeLab) -> None:
    train = pw.mpmd.load(TWO_MESHES, on=[fake.slice(2), fake.slice(2)])
    gone = weakref.ref(train)
    train(W, X)
    del train
    gc.collect()
    assert gone() is None


def test_slices_in_the_order_of_the_meshes_will_do(fake: FakeLab) -> None:
    train = pw.mpmd.load(TWO_MESHES, on=[fake.slice(2), fake.slice(2)], name="mine")
    assert train.name == "mine"
    np.testing.assert_array_equal(train(W, X)[0].result(), 2 * (X @ W))


def test_what_a_program_prints_loads_back(fake: FakeLab) -> None:
    a, b = fake.slice(2, 2, axes=("x", "y")), fake.slice(4, axes=("d",))
    cut = b.sharding(jax.P("d"))
    rows, columns = a.sharding(jax.P("x")), a.sharding(jax.P(None, "y"))
    forward = pw.jit(lambda w, x: jnp.tanh(x @ w), on=a, in_shardings=(columns, rows))
    backward = pw.jit(
        lambda w, y: (y @ w).sum(0), on=b, in_shardings=(b.sharding(jax.P("d")), None)
    )

    @pw.program
    def both(w: object, v: object, x: object) -> object:
        y = forward(w, x)
        return backward(v, y), y

    given = [
        pw.device_put(W, columns),
        pw.device_put(W[:, :2], cut),
        pw.device_put(X, rows),
    ]
    wanted = [each.result() for each in both(*given)]
    printed = both.mlir()
    loaded = pw.mpmd.load(printed, on={a.name: a, b.name: b})
    order = [printed.index(f"%arg{n}: ") for n in range(3)]
    assert order == sorted(order)
    kinds = [(sharding.mesh, sharding.spec) for sharding in loaded.in_shardings]
    by_place = {(h.sharding.mesh, h.sharding.spec): h for h in given}
    made = loaded(*[by_place[kind] for kind in kinds])
    for one, other in zip(made, wanted, strict=True):
        np.testing.assert_array_equal(one.result(), other)
    # Nothing is moved that the program did not move, and it prints as it was printed.
    assert fake.count("submit") == 2
    count = len(both.last.prepared.plan.steps)
    assert len(loaded.last.prepared.plan.steps) == count
    again = pw.mpmd.load(loaded.mlir(), on={a.name: a, b.name: b})
    np.testing.assert_array_equal(again(*[by_place[kind] for kind in kinds])[0].result(), wanted[0])


def test_what_decides_while_it_runs_is_refused_in_words(fake: FakeLab) -> None:
    on = fake.slice(1)
    less, more = (pw.jit(lambda x, by=by: x + by, on=on) for by in (-1, 1))
    choose = pw.program(lambda n, x: pw.cond(n, less, more, x), name="choose")
    loop = pw.program(
        lambda x: pw.until(lambda x: x < 0, less, x, at_most=3), name="loop"
    )  # fmt: skip
    one = np.float32(1)
    for printed in (choose.mlir(np.int32(1), one), loop.mlir(one)):
        with pytest.raises(pw.PathwaysError, match="decides while it runs, and IFRT IR"):
            pw.mpmd.load(printed, on=[on])
    other = loop.mlir(one).replace("scf.index_switch", "scf.none_such")
    with pytest.raises(pw.PathwaysError, match="this is no module of IFRT IR"):
        pw.mpmd.load(other, on=[on])
    assigned = """func.func @main(%x: tensor<4xf32>) -> !mpmd.mesh_tensor<"m", tensor<4xf32>>
        attributes {topology = #mpmd.topology<<"m" : <["x"=1]>>>} {
      %0 = mpmd.assign %x : (tensor<4xf32>) -> !mpmd.mesh_tensor<"m", tensor<4xf32>>
      return %0 : !mpmd.mesh_tensor<"m", tensor<4xf32>>
    }"""
    with pytest.raises(pw.PathwaysError, match="the partitioner does not lower it to IFRT IR"):
        pw.mpmd.load(assigned, on=[on])


MESHES = ((4,), (2, 2), (2, 3), (2, 2, 2), (3, 1, 2))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    sizes = draw(st.sampled_from(MESHES))
    names = draw(st.permutations([f"m{n}" for n in range(len(sizes))]))
    used = draw(st.lists(st.sampled_from(names), unique=True))
    cuts = [[], []]
    for name in used:
        cuts[draw(st.integers(0, 1))].append(name)
    mesh = tuple((f"m{n}", size) for n, size in enumerate(sizes))
    return Layout(mesh, tuple(map(tuple, cuts)))


@given(layouts())
def test_a_sharding_comes_through_the_partitioner_as_it_was(layout: Layout) -> None:
    mesh = ", ".join(f'"{name}"={size}' for name, size in layout.mesh)
    spec = ", ".join("{" + ", ".join(f'"{name}"' for name in cut) + "}" for cut in layout.spec)
    kind = f'!mpmd.mesh_tensor<"m", tensor<12x12xf32>, sharding=<@m, [{spec}]>>'
    module = f"""
    sdy.mesh @m = <[{mesh}]>
    func.func public @same(%x: {kind}) -> {kind} attributes {{
        topology = #mpmd.topology<<"m" : <[{mesh}]>>>}} {{
      return %x : {kind}
    }}"""
    read = jax_ifrt.read(module)
    value = read.values[read.inputs[0]]
    found = tiles.layout_of_tiles(value.tiles, layout.devices, 2)
    assert boxes(found, (12, 12)) == boxes(layout, (12, 12))
    named = tiles.over(found, layout.mesh)
    assert boxes(named, (12, 12)) == boxes(layout, (12, 12))
    if all(size > 1 for _, size in layout.mesh):
        assert named == layout


@given(st.sampled_from(list(itertools.product(MESHES, MESHES))), layouts())
def test_a_layout_over_other_axes_cuts_the_same(
    both: tuple[tuple[int, ...], tuple[int, ...]], layout: Layout
) -> None:
    for sizes in both:
        axes = tuple((f"o{n}", size) for n, size in enumerate(sizes))
        if np.prod(sizes) == layout.devices:
            assert boxes(tiles.over(layout, axes), (12, 12)) == boxes(layout, (12, 12))


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("module @jit_train {", "module @jit_train (", "no module of IFRT IR"),
        ("[0, 1]>", '[0, 1], memory_kind = "pinned_host">', "pinned_host"),
        (" {ifrt.donated}", ") -> (", "no module of IFRT IR"),
        ("func.func public @main", "func.func private @main", "0 public functions"),
        ("ifrt.CopyArrays(%h)", "ifrt.RemapArrays(%h)", "IFRT IR"),
        (
            "stablehlo.add %x, %x : tensor<4x4xf32>",
            "stablehlo.custom_call @xla_ffi_python_cpu_callback(%x) {has_side_effect = true}"
            " : (tensor<4x4xf32>) -> tensor<4x4xf32>",
            "fragment 'double.train' calls back into Python",
        ),
    ],
)
def test_modules_that_cannot_be_run_are_refused(
    fake: FakeLab, old: str, new: str, why: str
) -> None:
    assert old in TWO_MESHES
    with pytest.raises(pw.PathwaysError, match=why):
        pw.mpmd.load(TWO_MESHES.replace(old, new), on=[fake.slice(2), fake.slice(2)])


def test_a_module_of_another_dialect_is_refused(fake: FakeLab) -> None:
    plain = "func.func public @f(%x: tensor<f32>) -> tensor<f32> { return %x : tensor<f32> }"
    with pytest.raises(pw.PathwaysError, match="'f' is no function of IFRT IR"):
        pw.mpmd.load(plain, on=[fake.slice(2)])


@pytest.mark.skipif(jaxlib_version < (0, 12), reason="jaxlib before 0.12 spells as before")
def test_text_of_another_jaxlib_is_refused_with_the_remedy(fake: FakeLab) -> None:
    older = TWO_MESHES.replace('<sym_visibility = "private">', 'attributes {sym_visibility = "p"}')
    with pytest.raises(pw.PathwaysError, match="in MLIR's generic form all of them read it"):
        pw.mpmd.load(older, on=[fake.slice(2), fake.slice(2)])


def test_slices_that_do_not_fit_are_refused_and_so_are_arguments(fake: FakeLab) -> None:
    a, b = fake.slice(2), fake.slice(2)
    with pytest.raises(pw.PathwaysError, match="names slices for first, and the module has first"):
        pw.mpmd.load(TWO_MESHES, on={"first": a})
    with pytest.raises(pw.PathwaysError, match=r"has 1 slices, and .* first of 2 devices, second"):
        pw.mpmd.load(TWO_MESHES, on=[a])
    with pytest.raises(pw.PathwaysError, match="has 1 devices"):
        pw.mpmd.load(TWO_MESHES, on=[a, fake.slice(1)])
    train = pw.mpmd.load(TWO_MESHES, on=[a, b])
    with pytest.raises(pw.PathwaysError, match="takes 2 arrays, and was called with 1"):
        train(W)
    with pytest.raises(pw.PathwaysError, match="train"):
        train(W, X[:2])
