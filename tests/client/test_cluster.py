"""The client on real processes: what the lab of one process cannot show."""

from __future__ import annotations

import dataclasses
import math
import signal
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.client.session import code_registry
from pathways_lab.timeline.records import Span
from tests.client.kit import local_devices
from tests.runtime.processes import until

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("optimised")]


@pytest.fixture(scope="module")
def lab() -> Iterator[pw.Lab]:
    with pw.start(islands=2, hosts_per_island=2, devices_per_host=2, platform="cpu") as started:
        yield started


# --- the paper's example ---------------------------------------------------------------


def test_figure_two(lab: pw.Lab) -> None:
    """Exactly ([3., 5.], [2., 4.]): one client message captured, four without."""

    def get_devices(n: int) -> Any:
        return pw.make_virtual_device_set(lab).add_slice(tpu_devices=n).tpus

    a = pw.pmap(lambda x: x * 2.0, devices=get_devices(2))
    b = pw.pmap(lambda x: x + 1.0, devices=get_devices(2))
    c = pw.pmap(lambda x: x / 2.0, devices=get_devices(2))

    def f(v: Any) -> Any:
        x = a(v)
        y = b(x)
        z = a(c(x))
        return y, z

    for function, messages in ((pw.program(f), 1), (f, 4)):
        before = lab.submitted
        y, z = jax.device_get(function(np.array([1.0, 2.0])))
        assert (y.tolist(), z.tolist()) == ([3.0, 5.0], [2.0, 4.0])
        assert lab.submitted - before == messages


# --- moving and resharding --------------------------------------------------------------


@st.composite
def placements(draw: Any) -> tuple[Any, Any, list[Any]]:
    """Two mesh shapes with specs, and an array shape that both cut evenly."""
    ndim = draw(st.integers(0, 3))
    cuts = [1] * ndim
    ends = []
    for _ in range(2):
        shape = draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (1, 4), (2, 1, 2)]))
        axes = list(draw(st.permutations(("x", "y", "z")[: len(shape)])))
        sizes = dict(zip(("x", "y", "z"), shape, strict=False))
        spec: list[Any] = []
        for dimension in range(ndim):
            taken = tuple(axes.pop() for _ in range(draw(st.integers(0, min(2, len(axes))))))
            spec.append(taken[0] if len(taken) == 1 else taken or None)
            cuts[dimension] = math.lcm(cuts[dimension], math.prod(sizes[a] for a in taken))
        ends.append((shape, P(*spec)))
    extents = [cut * draw(st.integers(0 if cut == 1 else 1, 3)) for cut in cuts]
    return ends[0], ends[1], extents


DTYPES = ["float32", "bfloat16", "int8", "bool", "complex64"]
_slices: dict[Any, Any] = {}


def on(lab: pw.Lab, shape: tuple[int, ...], island: str) -> pw.Slice:
    key = (id(lab), shape, island)
    if key not in _slices:
        _slices[key] = lab.slice(shape, island=island)
    return _slices[key]  # type: ignore[no-any-return]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(placements(), st.sampled_from(DTYPES), st.booleans())
def test_moves_agree_with_jax_device_put(lab: pw.Lab, case: Any, dtype: str, across: bool) -> None:
    """Any pair of meshes, specs and device counts, on one island and between two."""
    (shape, spec), (to_shape, to_spec), extents = case
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2 if dtype == "bool" else 100, extents).astype(jnp.dtype(dtype))
    source = on(lab, shape, "island0")
    target = on(lab, to_shape, "island1" if across else "island0")
    given_ = pw.device_put(x, source.sharding(spec))
    moved = pw.device_put(given_, target.sharding(to_spec))
    assert moved.sharding.is_equivalent_to(target.sharding(to_spec), x.ndim)
    np.testing.assert_array_equal(moved.result(), x)
    # What each device holds is what jax.device_put would give it.
    local = local_devices()
    mesh = Mesh(np.array(local[: len(target)]).reshape(to_shape), target.axes)
    there = jax.device_put(x, NamedSharding(mesh, to_spec))
    fetched = moved.session.data.fetch(moved.buffer, moved.type, target, moved.layout)
    moved.session.connection.board.wait(lambda: fetched.done, 30, "the shards")
    for number, part in fetched.parts.items():
        want = np.asarray(there.addressable_shards[number].data)
        assert bytes(part) == want.tobytes()


def test_a_program_inserts_the_moves(lab: pw.Lab) -> None:
    left, right = on(lab, (4,), "island0"), on(lab, (2, 2), "island1")
    f = pw.jit(lambda x: x @ x.T, on=left, in_shardings=P("x"), out_shardings=P(None, "x"))
    g = pw.jit(lambda x: jnp.tanh(x / 100), on=right, in_shardings=P("y", "x"))
    program = pw.program(lambda x: f(g(f(x))))
    x = np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)
    want = (lambda y: y @ y.T)(np.tanh((x @ x.T) / 100))
    np.testing.assert_allclose(program(x).result(), want, rtol=1e-4, atol=1e-5)


# --- trees, optimisers, keys -----------------------------------------------------------------


class Layer(NamedTuple):
    w: Any
    b: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    layers: list[Layer]
    scale: Any
    name: str = dataclasses.field(metadata={"static": True}, default="mlp")


def test_an_optimiser_trains_as_in_plain_jax(lab: pw.Lab) -> None:
    """optax states, NamedTuples and dataclasses go through; values follow plain JAX."""
    optax = pytest.importorskip("optax")
    tx = optax.adamw(1e-2)
    rng = np.random.default_rng(0)
    model = Model(
        [Layer(rng.normal(size=(4, 8)).astype(np.float32), np.zeros(8, np.float32)),
         Layer(rng.normal(size=(8, 1)).astype(np.float32), np.zeros(1, np.float32))],
        np.float32(1),
    )  # fmt: skip
    x = rng.normal(size=(16, 4)).astype(np.float32)

    def loss(m: Model, x: Any) -> Any:
        h = x
        for layer in m.layers:
            h = jnp.tanh(h @ layer.w + layer.b)
        return ((h * m.scale - x.sum(1, keepdims=True)) ** 2).mean()

    def step(m: Model, state: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(m, x)
        updates, state = tx.update(grads, state, m)
        return optax.apply_updates(m, updates), state, value

    place = on(lab, (4,), "island0")
    fast = pw.jit(step, on=place, in_shardings=(None, None, P("x")), donate_argnums=(0, 1))
    plain = jax.jit(step)
    ours, theirs = (model, tx.init(model)), (model, tx.init(model))
    losses: list[Any] = []
    for _ in range(5):
        *ours, value = fast(*ours, x)
        *theirs, want = plain(*theirs, x)
        losses.append((value, want))
    assert jax.tree.structure(tuple(ours)) == jax.tree.structure(tuple(theirs))
    for value, want in losses:
        np.testing.assert_allclose(float(value), float(want), rtol=1e-4)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-3, atol=1e-5),
        tuple(ours), tuple(theirs),
    )  # fmt: skip


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.recursive(
        st.sampled_from(["f", "i", "b", "k", "z", "none"]),
        lambda child: st.lists(child, max_size=3) | st.dictionaries(st.sampled_from("abc"), child),
        max_leaves=6,
    )
)
def test_random_trees_come_back_as_they_went(lab: pw.Lab, shape: Any) -> None:
    kinds = {
        "f": np.arange(4, dtype=np.float32), "i": 7, "b": np.array([True, False]),
        "k": jax.random.key(5), "z": np.zeros((0, 3), np.float16), "none": None,
    }  # fmt: skip
    tree = jax.tree.map(kinds.get, shape)
    f = pw.jit(lambda t: t, on=on(lab, (2,), "island1"))
    back = jax.tree.map(lambda h: h.result(), f(tree), is_leaf=lambda x: isinstance(x, pw.Handle))
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True):
        if isinstance(want, jax.Array):
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


# --- work that is done once, memory that comes back ---------------------------------------------


def test_a_second_run_makes_nothing_anew(lab: pw.Lab) -> None:
    f = pw.jit(lambda x: jnp.sin(x) * 3, on=on(lab, (4,), "island0"), in_shardings=P("x"))
    program = pw.program(lambda x: f(f(x)) + 1)
    x = np.ones(8, np.float32)
    began = lab.timeline.clock()
    jax.block_until_ready(program(x))
    before, moment = lab.stats(), lab.timeline.clock()
    for _ in range(3):
        jax.block_until_ready(program(x))
    after = lab.stats()
    for name in ("captured", "traced", "lowered", "exported"):
        assert getattr(after, name) == getattr(before, name), name
    assert after.sent["submit"] - before.sent["submit"] == 3
    # The same cell again: traced anew, and neither sent nor compiled.
    g = pw.jit(lambda x: jnp.sin(x) * 3, on=on(lab, (4,), "island0"), in_shardings=P("x"))
    last = jax.block_until_ready(g(x)).buffer.run
    assert lab.stats().sent["function"] == after.sent["function"]

    def spans(kind: str) -> list[Span]:
        return [r for r in lab.timeline.records if isinstance(r, Span) and r.kind == kind]

    # Each host tells in order: what it compiled before its last computation is known with that.
    until(lambda: len({s.host for s in spans("gang") if s.run == last}) == 2)
    compiled = [s.start for s in spans("compile") if s.start > began]
    assert len(compiled) >= 4, "two functions on two hosts"
    assert max(compiled) < moment, "and none a second time"


def test_the_kernel_computes_nothing(lab: pw.Lab) -> None:
    """Checked where nothing else has touched JAX: in a process of its own."""
    import subprocess
    import sys

    code = """if True:
        import numpy as np, jax, pathways_lab as pw
        from pathways_lab.runtime import jax_private
        with pw.start(islands=1, hosts_per_island=1, devices_per_host=2, progress=False) as lab:
            s = lab.slice(2)
            f = pw.jit(lambda k, x: x + jax.random.normal(k, x.shape), on=s)
            @pw.program
            def run(x):
                return f(jax.random.key(0), x) * 2 + jax.numpy.arange(4)
            value = run(np.ones(4)).result()
            print(value.shape, jax_private.backends_initialised())
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.stdout.strip() == "(4,) False", done.stderr


def test_interrupting_cancels_what_is_not_granted(lab: pw.Lab) -> None:
    """Ctrl-C returns at once; what had its place ends, the rest is cancelled, the lab goes on."""
    hold = pw.jit(lambda x: pw.emulated(200)(x) + 1, on=on(lab, (2,), "island0"))
    chain = [hold(np.zeros(4, np.float32)).block_until_ready()]
    for _ in range(20):
        chain.append(hold(chain[-1]))
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        chain[-1].result()
    kinds = []
    for handle in chain:
        try:
            handle.result(timeout=60)
            kinds.append("value")
        except pw.PathwaysError as error:
            kinds.append(error.failure.kind)
    assert kinds == sorted(kinds, reverse=True)
    assert set(kinds) == {"value", "cancelled"}, "who waits to the end cancels nothing"
    np.testing.assert_array_equal(hold(np.ones(4, np.float32)).result(), 2)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_wide_types(lab: pw.Lab) -> None:
    """64 bits where the kernel's JAX has them."""
    f = pw.jit(lambda x: (x * 2, x.astype(int)), on=on(lab, (2,), "island1"))
    x = np.arange(4) / 3
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        handles = f(x)
        wide, whole = jax.device_get(handles)
    finally:
        jax.config.update("jax_enable_x64", before)
    assert (wide.dtype, whole.dtype) == (np.float64, np.int64)
    np.testing.assert_array_equal(wide, x * 2)
    assert f(x)[0].result().dtype == np.float32
    # Elsewhere they are what they are to JAX, which shrinks what it promotes.
    half, negative = pw.jit(lambda x: (x / 2, -x))(handles[0])
    assert (half.dtype, negative.dtype) == (np.float32, np.float64)
    np.testing.assert_array_equal(half.result(), x.astype(np.float32))
    np.testing.assert_array_equal(negative.result(), -wide)
    seen: list[Any] = []
    shown = pw.jit(lambda x: (jax.debug.callback(lambda v: seen.append(v), x), x / 2)[1])
    assert shown(handles[0]).result().dtype == np.float32
    np.testing.assert_array_equal((handles[1] + 1).result(), whole + 1)


# --- errors --------------------------------------------------------------------------------------


def test_an_exception_on_a_host_is_one_readable_error(lab: pw.Lab) -> None:
    place = on(lab, (2,), "island0")

    def bad(x: Any) -> Any:
        def explode(a: Any) -> Any:
            raise ValueError("the user's own words")

        return jax.pure_callback(explode, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    fails = pw.jit(bad, on=place)
    fine = pw.jit(lambda x: x + 1, on=place)

    @pw.program
    def training(x: Any) -> Any:
        y = fine(x)
        z = fails(y)  # the line that fails
        return fine(z), y

    lost, kept = training(np.ones(4, np.float32))
    dependant = fine(lost)
    for handle in (lost, dependant):
        with pytest.raises(pw.PathwaysError, match="the user's own words") as caught:
            handle.result(timeout=60)
        failure = caught.value.failure
        assert failure.line.text == "z = fails(y)  # the line that fails"
        assert (failure.program, failure.node) == ("training", "bad")
        assert failure.host.startswith("island0/")
        assert "explode" in failure.details
    np.testing.assert_array_equal(kept.result(), 2)
    np.testing.assert_array_equal(fine(np.ones(4)).result(), 2)


def test_what_functions_print_names_host_and_device(lab: pw.Lab, capsys: Any) -> None:
    def chatty(x: Any) -> Any:
        jax.debug.print("largest {}", x.max())
        return x * 2

    pw.jit(chatty, on=on(lab, (2,), "island1"), in_shardings=P("x"))(np.arange(4.0)).result()
    said: list[str] = []

    def heard() -> bool:
        lab.session.flush_outputs()
        said.append(capsys.readouterr().out)
        return "largest 3.0" in "".join(said)

    until(heard)
    assert "".join(said).startswith("[island1/")


def test_requests_that_cannot_be_met_say_what_there_is(lab: pw.Lab) -> None:
    for ask, text in (
        (lambda: lab.slice(64), "64"),
        (lambda: lab.slice(2, kind="tpu"), "tpu"),
        (lambda: lab.slice(2, island="island9"), "no island 'island9' .* island0, island1"),
        (lambda: lab.slice(2, memory="900 GB"), "900,000,000,000 bytes"),
    ):
        with pytest.raises(pw.PathwaysError, match=text):
            ask()
    for shape, axes in (((), None), ((2, 0), None), ((2, 2), ("x", "x")), ((2, 2), ("x",))):
        with pytest.raises(pw.PathwaysError):
            lab.slice(shape, axes)


# --- what is registered -----------------------------------------------------------------


def test_hosts_forget_compiled_code_that_nobody_has_and_compile_it_again(
    lab: pw.Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_registry, "_KEPT", 0)
    known = lab.session.connection.registered
    with lab.slice(4) as on:

        def compilations(function: str) -> int:
            spans = [r for r in lab.timeline.records if isinstance(r, Span) and r.kind == "compile"]
            return sum(r.args["function"] == function and r.args["slice"] == on.id for r in spans)

        for times in (1, 2):
            gone = pw.jit(lambda x: x + 1, on=on)
            handle = gone(np.zeros(4, np.float32))
            ((key, _),) = [f for f in known._functions if f[1] == on.id]
            del gone
            np.testing.assert_array_equal(handle.result(), np.ones(4))
            until(lambda n=times, k=key: compilations(k) == 2 * n)  # type: ignore[misc]
            until(lambda k=key: (k, on.id) not in known._functions)  # type: ignore[misc]
