"""Law: what was saved comes back to the bit, anywhere; there is the old checkpoint or the new."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.client.lab import stats
from pathways_lab.client.lab.devices import Slice
from pathways_lab.runtime import zarr_arrays
from tests.runtime.processes import until

pytestmark = pytest.mark.cluster

X = np.arange(64, dtype=np.float32).reshape(8, 8)


@pytest.fixture(scope="module")
def lab() -> Iterator[pw.Lab]:
    with pw.start(islands=2, hosts_per_island=2, devices_per_host=2) as started:
        yield started


@pytest.fixture(scope="module")
def on(lab: pw.Lab) -> Slice:
    return lab.slice((2, 2), ("x", "y"), island="island0")


@pytest.fixture(scope="module")
def there(lab: pw.Lab) -> Slice:
    return lab.slice((4,), ("a",), island="island1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints" / "step 1"


def put(value: Any, on: Slice, *spec: Any) -> Any:
    return pw.device_put(value, NamedSharding(on.mesh, P(*spec)))


def values(on: Slice) -> dict[str, Any]:
    """All kinds of dtype, each cut in another way over axes x and y."""
    return {
        "float32": put(X, on, "y", "x"),
        "bfloat16": put(jnp.arange(8, dtype=jnp.bfloat16), on, "y"),
        "float8": put(jnp.array([1, -2, 3, 0.5], jnp.float8_e4m3fn), on, ("x", "y")),
        "int4": put(jnp.array([1, -2, 7, -8], jnp.int4), on),
        "bool": put(np.array([True, False]), on, "x"),
        "keys": (put(jax.random.split(jax.random.key(3), 4), on, "x"),),
        "scalar": [put(np.float32(4), on)],
        "empty": put(np.zeros((0, 4), np.int8), on, None, "y"),
        "here": np.arange(3) + 2**40,
        "count": 3,
        "rate": 1e-3,
    }


@jax.enable_x64(True)
def wide_values(on: Slice) -> dict[str, Any]:
    """Those of 64 bits."""
    return {
        "float64": put(np.arange(4) + 1e-12, on, "x"),
        "int64": put(np.arange(4) + 2**40, on),
        "complex128": put(np.arange(4) * (1e-12 + 1j), on, ("y", "x")),
    }


def plain(value: Any) -> np.ndarray[Any, Any]:
    value = value.result() if isinstance(value, pw.Handle) else value
    is_key = jnp.issubdtype(getattr(value, "dtype", int), jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)


def assert_same(got: Any, wanted: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        one, other = plain(a), plain(b)
        assert (one.dtype, one.shape) == (other.dtype, other.shape), path
        assert one.tobytes() == other.tobytes(), path


def left(folder: Path) -> list[str]:
    """What lies where checkpoints do."""
    return sorted(path.name for path in folder.parent.iterdir())


# --- there and back ---------------------------------------------------------------------------


def test_all_kinds_of_values_come_back_to_where_they_were(on: Slice, folder: Path) -> None:
    saved = values(on) | wide_values(on)
    done = pw.save(folder, saved)
    assert (done.done, done.folder, left(folder)) == (True, folder, [folder.name])
    assert repr(done) == f"<checkpoint {folder}: {done.nbytes:,} bytes, written>"
    back = pw.restore(folder, saved)
    assert_same(back, saved)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(saved), strict=True):
        assert isinstance(a, type(b))
        if isinstance(b, pw.Handle):
            assert (a.slice, a.layout, a.dtype) == (b.slice, b.layout, b.dtype)


def test_or_to_another_slice_or_to_the_client(on: Slice, there: Slice, folder: Path) -> None:
    saved = values(on) | wide_values(on)
    pw.save(folder, saved)
    back = pw.restore(folder, saved, on=there)
    assert_same(back, saved)
    assert {leaf.slice for leaf in jax.tree.leaves(back)} == {there}
    rows = NamedSharding(there.mesh, P("a"))
    likes = [X, jax.ShapeDtypeStruct(X.shape, X.dtype)]
    like = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=rows)
    pw.save(folder, {"w": saved["float32"]})
    for got in (
        *(pw.restore(folder, {"w": w}, on=rows) for w in likes),
        pw.restore(folder, {"w": like}),
    ):
        assert str(got["w"].layout) == "P(a, None)"
        np.testing.assert_array_equal(got["w"].result(), X)
    here = pw.restore(folder, {"w": likes[1]})["w"]
    assert isinstance(here, np.ndarray)
    np.testing.assert_array_equal(here, X)


def test_a_training_goes_on_on_another_number_of_stages(lab: pw.Lab, folder: Path) -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01))
    parts = ["a", "b", "c", "d"]

    def loss(parameters: Any, x: Any) -> Any:
        h = x
        for part in parts:
            h = pw.mpmd.named(part, lambda own, h: jnp.tanh(h @ own))(parameters[part], h)
        return jnp.mean((h - x) ** 2)

    def step(parameters: Any, memory: Any, x: Any) -> Any:
        value, slopes = jax.value_and_grad(loss)(parameters, x)
        changes, memory = optimizer.update(slopes, memory, parameters)
        return optax.apply_updates(parameters, changes), memory, value

    def train(on: Sequence[Slice], state: Any, steps: int) -> tuple[Any, list[float]]:
        made = pw.mpmd.jit(step, on=dict(zip(parts, on, strict=True)), donate_argnums=(0, 1))
        losses = []
        for _ in range(steps):
            *state, value = made(*state, X / 64)
            losses.append(value)
        return state, [float(value) for value in losses]

    chance = np.random.default_rng(0)
    parameters = {part: chance.normal(size=(8, 8)).astype(np.float32) / 4 for part in parts}
    state: Any = (parameters, optimizer.init(parameters))
    with contextlib.ExitStack() as stack:
        islands = ("island0", "island1") * 2
        stages = [stack.enter_context(lab.slice(1, island=island)) for island in islands]
        state, _ = train(stages, state, 5)
        pw.save(folder, state)
        _, wanted = train(stages, state, 2)
        like = jax.tree.map(jnp.zeros_like, [parameters, optimizer.init(parameters)])
        two = [stages[0], stages[0], stages[1], stages[1]]
        for others, off in {tuple(stages[::-1]): 0, tuple(two): 1e-6}.items():
            _, again = train(others, pw.restore(folder, like, on=others[-1]), 2)
            # On one slice other functions are compiled as a whole, and round otherwise.
            np.testing.assert_allclose(again, wanted, rtol=off)
    assert len(set(wanted)) == 2


def test_without_a_pattern_everything_in_dicts_and_lists(on: Slice, folder: Path) -> None:
    saved = values(on)
    pw.save(folder, saved)
    assert_same(pw.restore(folder), saved | {"keys": list(saved["keys"])})


# --- what it costs ----------------------------------------------------------------------------


def test_no_array_passes_the_client(lab: pw.Lab, on: Slice, folder: Path) -> None:
    tree = {"whole": put(X, on), "rows": [put(X, on, "y") for _ in range(40)]}
    before = lab.session.connection.traffic.fetches
    pw.save(folder, tree)
    jax.block_until_ready(pw.restore(folder, tree))
    asked = lab.session.connection.traffic.fetches - before
    assert 1 <= asked < 40, "whether it is written, and nothing else"


def test_a_loop_that_saves_compiles_once(on: Slice, tmp_path: Path) -> None:
    tree = {"v": put(X, on, "x"), "w": put(X + 1, on, "x")}
    work = []
    for step in range(3):
        pw.save(tmp_path / f"step {step}", tree)
        tree = pw.restore(tmp_path / f"step {step}", tree)
        work.append((stats.work.traced, stats.work.exported))
    assert work[1] == work[2] == work[0]
    np.testing.assert_array_equal(tree["w"].result(), X + 1)


# --- while others work --------------------------------------------------------------------------


def test_it_is_written_while_others_work_and_may_be_donated(on: Slice, folder: Path) -> None:
    h = put(X, on, "x")
    busy = pw.jit(lambda x: pw.emulated(900)(x))
    step = pw.jit(lambda x: x + 1, donate_argnums=0)
    # Compiled, so that what follows is called in no time.
    pw.save(folder.with_name("before"), step(busy(h)))
    value = busy(h)
    saving = pw.save(folder, value, wait=False)
    after = step(value)
    assert not saving.done
    assert "being written" in repr(saving)
    assert not folder.exists()
    with pytest.raises(TimeoutError, match="being written"):
        saving.wait(0.01)
    assert saving.wait(60) is saving
    np.testing.assert_array_equal(pw.restore(folder), X)
    np.testing.assert_array_equal(after.result(), X + 1)


@pytest.mark.parametrize("wait", [True, False])
def test_what_fails_leaves_the_old_one_and_nothing_else(
    on: Slice, folder: Path, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    h = put(X, on, "x")
    pw.save(folder, h)
    with monkeypatch.context() as patch:
        patch.setattr(zarr_arrays, "make", lambda *_: None)
        with pytest.raises(pw.PathwaysError, match="a file system that all hosts"):
            pw.save(folder, {"w": h + 1}, wait=wait).wait()
    assert left(folder) == [folder.name]
    np.testing.assert_array_equal(pw.restore(folder), X)
    pw.save(folder, h + 1, wait=wait).wait()
    assert left(folder) == [folder.name]
    np.testing.assert_array_equal(pw.restore(folder), X + 1)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A disk on which nothing is ever written; its files."""
    made = zarr_arrays.make

    def with_a_pipe(folder: Path, *how: Any) -> None:
        made(folder, *how)
        pipes.append(folder / "0.0")
        os.mkfifo(pipes[0])  # a host waits for a reader when it opens this

    pipes: list[Path] = []
    monkeypatch.setattr(zarr_arrays, "make", with_a_pipe)
    return pipes


def test_devices_do_not_wait_for_the_disk(on: Slice, folder: Path, stuck: list[Path]) -> None:
    h = put(X, on, "x")
    step = pw.jit(lambda x: x + 1, donate_argnums=0)
    saving = pw.save(folder, {"w": h}, wait=False)
    np.testing.assert_array_equal(step(step(h)).result(), X + 2)
    with pytest.raises(TimeoutError, match="being written"):
        saving.wait(0.5)
    assert not folder.exists()
    with stuck[0].open("rb") as pipe:
        assert pipe.read() == X[:4].tobytes(), "the values of the moment of the call"
    # A pipe cannot be made sure to be on a disk.
    with pytest.raises(pw.PathwaysError, match=r"w cannot be written on this host .*Invalid"):
        saving.wait(60)
    assert left(folder) == []


def test_a_host_dies_before_it_has_written(
    lab: pw.Lab, there: Slice, on: Slice, folder: Path
) -> None:
    h = put(X, there, "a")
    pw.save(folder, h)
    busy = pw.jit(lambda x: pw.emulated(5_000)(x))
    saving = pw.save(folder, busy(h), wait=False)
    host = lab.islands[1].hosts[0]
    os.kill(host.pid, signal.SIGKILL)
    with pytest.raises(pw.PathwaysError, match="island1/host0"):
        saving.wait(60)
    assert left(folder) == [folder.name]
    np.testing.assert_array_equal(pw.restore(folder, X, on=on).result(), X)


def test_a_host_dies_while_it_writes(
    lab: pw.Lab, there: Slice, folder: Path, stuck: list[Path]
) -> None:
    until(lambda: len(lab.devices()) == 8, 60)
    there.rebind()
    h = put(X, there, "a")
    saving = pw.save(folder, {"w": h}, wait=False)
    np.testing.assert_array_equal((h + 1).result(), X + 1)
    assert not saving.done
    for host in lab.islands[1].hosts:
        os.kill(host.pid, signal.SIGKILL)
    with pytest.raises(pw.PathwaysError, match="island1/host"):
        saving.wait(60)
    assert left(folder) == []


# --- what is refused ----------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[Any, Path], Any], str]] = {
    "a folder of others": (lambda h, at: pw.save(at.parent, h), "exists and is not a checkpoint"),
    "a folder in a file": (lambda h, at: pw.save(at / "_METADATA" / "x", h), "cannot be written"),
    "a long name": (lambda h, at: pw.save(at / "/".join(["x" * 200] * 25), h), "at most 4096"),
    "text": (lambda h, at: pw.save(at, {"a": h, "b": "text"}), "b is 'text'"),
    "a type": (lambda h, at: pw.save(at, jax.ShapeDtypeStruct((2,), int)), "holds handles"),
    "in a program": (lambda h, at: pw.program(lambda x: pw.save(at, x))(h), "part of a program"),
    "no checkpoint": (lambda h, at: pw.restore(at.parent, h), "is not a checkpoint"),
    "more values": (lambda h, at: pw.restore(at, {"w": h, "v": h}), "'v' is not in the check"),
    "fewer values": (lambda h, at: pw.restore(at, {}), "'w' is not in like="),
    "another type": (lambda h, at: pw.restore(at, {"w": h[0]}), r"float32\[8,8\] in .*32\[8\]"),
    "a place without": (lambda h, at: pw.restore(at, on=h.slice), "give a pytree"),
}  # fmt: skip


@pytest.mark.parametrize(("use", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(on: Slice, folder: Path, use: Any, words: str) -> None:
    h = put(X, on, "x")
    pw.save(folder, {"w": h})
    with pytest.raises(pw.PathwaysError, match=words) as caught:
        use(h, folder)
    assert caught.value.failure.remedy
    assert caught.value.failure.line.file == __file__
    assert left(folder) == [folder.name]
    np.testing.assert_array_equal(pw.restore(folder)["w"], X)


def test_names_that_cannot_be_kept_apart(folder: Path) -> None:
    for keys, words in {
        ("a.b", "a"): "'a.b' in the checkpoint, and two values have it",
        ("..",): "cannot be that of a folder",
        ("_METADATA",): "cannot be that of a folder",
    }.items():
        with pytest.raises(pw.PathwaysError, match=words):
            pw.save(folder, {key: {"b": X} if key == "a" else X for key in keys})
        assert not folder.parent.exists()
    haiku = {"mlp/~/linear": {"w": X}, "lock": {"0": X}}
    pw.save(folder, haiku)
    assert_same(pw.restore(folder), haiku)


def test_what_is_no_checkpoint_says_where_one_is(on: Slice, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "checkpoint.json").write_text("{}")
    with pytest.raises(pw.PathwaysError, match="earlier release wrote it"):
        pw.restore(folder)
    pw.save(folder / "default", {"w": put(X, on, "x")})
    np.testing.assert_array_equal(pw.restore(folder)["w"], X)
    pw.save(folder / "other", X)
    with pytest.raises(pw.PathwaysError, match=r"one item, for example .*step 1/default'"):
        pw.restore(folder)


def test_a_part_that_is_gone(on: Slice, folder: Path) -> None:
    h = put(X, on, "x")
    pw.save(folder, {"w": h})
    (folder / "w" / "1.0").unlink()
    with pytest.raises(pw.PathwaysError, match=r"'w' of .*cannot be read: .*1\.0"):
        pw.restore(folder)
    with pytest.raises(pw.PathwaysError, match="a file system that all hosts"):
        pw.restore(folder, {"w": h})["w"].result()
