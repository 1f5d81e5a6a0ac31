"""Law: Orbax restores what `pw.save` wrote, and `pw.restore` what Orbax wrote, to the bit."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.client.lab.devices import Slice
from pathways_lab.runtime import jax_private

ocp = pytest.importorskip("orbax.checkpoint", reason="Orbax is not installed")

pytestmark = pytest.mark.cluster

X = np.arange(64, dtype=np.float32).reshape(8, 8)


@pytest.fixture(scope="module")
def lab() -> Iterator[pw.Lab]:
    with pw.start(islands=2, hosts_per_island=2, devices_per_host=1) as started:
        yield started


@pytest.fixture(scope="module")
def on(lab: pw.Lab) -> Slice:
    return lab.slice((2,), ("x",), island="island0")


@pytest.fixture(scope="module")
def there(lab: pw.Lab) -> Slice:
    return lab.slice((2,), ("a",), island="island1")


@functools.cache
def mesh() -> Mesh:
    """Of devices that Orbax sees, and the lab does not."""
    devices = jax_private.make_cpu_client(4).local_devices()
    return Mesh(np.array(devices).reshape(2, 2), ("p", "q"))


def cut(*spec: Any) -> NamedSharding:
    return NamedSharding(mesh(), P(*spec))


def state() -> dict[str, Any]:
    """Of a training: dtypes, structures, empty nodes, keys."""
    params = {"w": X, "mlp/~/b": jnp.arange(8, dtype=jnp.bfloat16)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    return {
        "params": params,
        "memory": optimizer.init(params),
        "small": [jnp.array([1, -2, 7, -8], jnp.int4), jnp.array([1, -2], jnp.float8_e4m3fn)],
        "flags": (np.array([True, False]), None, {}, []),
        "key": jax.random.split(jax.random.key(3, impl="rbg"), 4),
        "step": 3,
        "rate": 1e-3,
    }


def put(values: Any, place: Any) -> Any:
    """Arrays of a tree, cut over the first axis of a place where they have one."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, int | float):
            return leaf
        rows = P(place.mesh.axis_names[0]) if leaf.ndim else P()
        at = NamedSharding(place.mesh, rows)
        return pw.device_put(leaf, at) if isinstance(place, Slice) else jax.device_put(leaf, at)

    return jax.tree.map(one, values)


def bits(value: Any) -> tuple[Any, ...]:
    value = value.result() if isinstance(value, pw.Handle) else value
    if jnp.issubdtype(getattr(value, "dtype", int), jax.dtypes.prng_key):
        return str(value.dtype), bits(jax.random.key_data(value))
    there = np.asarray(value)
    return str(there.dtype), there.shape, there.tobytes()


def assert_same(got: Any, wanted: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for (path, one), other in zip(
        jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True
    ):
        assert bits(one) == bits(other), path


def test_orbax_restores_ours_onto_other_shardings(on: Slice, tmp_path: Path) -> None:
    saved = put(state(), on)
    pw.save(tmp_path / "ours", saved)
    like = jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(
                leaf.shape,
                leaf.dtype,
                sharding=cut(("q", "p")) if leaf.shape[:1] == (8,) else cut(),
            )
            if isinstance(leaf, pw.Handle)
            else leaf
        ),
        saved,
    )
    with ocp.StandardCheckpointer() as checkpointer:
        got = checkpointer.restore(tmp_path / "ours", like)
    assert_same(got, state())
    w = got["params"]["w"]
    assert w.sharding.is_equivalent_to(cut(("q", "p")), 2)
    plainly = ocp.PyTreeCheckpointer().restore(tmp_path / "ours")
    np.testing.assert_array_equal(plainly["params"]["w"], X)
    assert (plainly["step"], plainly["rate"]) == (3, 1e-3)
    assert plainly["flags"][1:] == [None, {}, []]


def written_by_orbax(folder: Path, how: str) -> dict[str, Any]:
    saved = put(state(), type("Place", (), {"mesh": mesh()}))
    options = {
        "zarr": {"use_ocdbt": False},
        "zarr, plain": {"use_ocdbt": False, "use_compression": False},
        "ocdbt": {},
        "zarr3": {"use_zarr3": True},
    }[how]
    handler = ocp.PyTreeCheckpointHandler(**options)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder, saved)
    return saved


@pytest.mark.parametrize("how", ["zarr", "zarr, plain", "ocdbt", "zarr3"])
def test_we_restore_orbaxs_onto_slices(
    on: Slice, there: Slice, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = written_by_orbax(tmp_path / "theirs", how)
    back = pw.restore(tmp_path / "theirs", put(state(), there))
    assert_same(back, wanted)
    assert {h.slice for h in jax.tree.leaves(back) if isinstance(h, pw.Handle)} == {there}
    assert str(back["params"]["w"].layout) == "P(a, None)"
    here = pw.restore(tmp_path / "theirs")
    np.testing.assert_array_equal(here["params"]["w"], X)
    assert here["step"] == 3
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    if how == "zarr, plain":
        assert_same(pw.restore(tmp_path / "theirs", state()), wanted)
    else:
        with pytest.raises(pw.PathwaysError, match="pip install tensorstore, here and where"):
            pw.restore(tmp_path / "theirs")


def test_steps_of_a_manager(on: Slice, tmp_path: Path) -> None:
    """Orbax goes on after a step of ours, and we after one of Orbax's."""
    like = put({"w": X}, on)
    pw.save(tmp_path / "5" / "default", like)
    with ocp.CheckpointManager(tmp_path) as manager:
        shape = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=cut("p", "q"))
        got = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore({"w": shape}))
        manager.save(6, args=ocp.args.StandardSave({"w": got["w"] + 1}))
    back = pw.restore(tmp_path / "6", like)
    np.testing.assert_array_equal(back["w"].result(), X + 1)
