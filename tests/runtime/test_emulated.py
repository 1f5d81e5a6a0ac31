"""``emulated``: it takes its time on every device, gathers nothing, and is not optimised away."""

from __future__ import annotations

import os
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pathways_lab.runtime import emulated as module
from pathways_lab.runtime import jax_private
from pathways_lab.runtime.emulated import TARGET, emulated

needs_compiler = pytest.mark.skipif(module.compiler() is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    os.environ["NPROC"] = "8"
    devices = jax_private.make_cpu_client(4).local_devices()
    return Mesh(np.array(devices).reshape(2, 2), ("a", "b"))


def compiled(function: Any, x: Any, **kwargs: Any) -> Any:
    return jax.jit(function, **kwargs).lower(x).compile()


def milliseconds(executable: Any, x: Any) -> float:
    """The shortest of three calls: a busy machine only makes them longer."""
    times = []
    for _ in range(3):
        start = time.monotonic()
        jax.block_until_ready(executable(x))
        times.append((time.monotonic() - start) * 1e3)
    return min(times)


CASES = [
    (P("a", "b"), (8, 4)),
    (P(("a", "b")), (8,)),
    (P(None, "b"), (3, 4)),
    (P("b", None, "a"), (2, 3, 4)),
    (P(), (5,)),
    (P(), ()),
]


@needs_compiler
@pytest.mark.parametrize(("spec", "shape"), CASES)
def test_holds_every_device_and_gathers_nothing(
    mesh: Mesh, spec: P, shape: tuple[int, ...]
) -> None:
    cut = NamedSharding(mesh, spec)
    x = jax.device_put(np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape), cut)
    executable = compiled(lambda x: emulated(20)(x + 1), x, out_shardings=cut)
    text = executable.as_text()
    assert text.count(f'custom_call_target="{TARGET}"') == 1
    assert "all-gather" not in text
    assert "all-reduce" not in text
    out = executable(x)
    assert np.array_equal(out, np.asarray(x) + 1)
    assert 19.5 < milliseconds(executable, x) < 35


@needs_compiler
def test_two_in_a_row_take_twice_as_long(mesh: Mesh) -> None:
    """The second waits for the first: the dependency is real."""
    cut = NamedSharding(mesh, P("a"))
    x = jax.device_put(np.ones(4, np.float32), cut)
    hold = emulated(20)
    assert 39 < milliseconds(compiled(lambda x: hold(hold(x) * 2), x), x) < 55


@needs_compiler
def test_survives_export(mesh: Mesh) -> None:
    cut = NamedSharding(mesh, P("a", "b"))
    x = jax.device_put(np.ones((4, 4), np.float32), cut)
    checks = [export.DisabledSafetyCheck.custom_call(TARGET)]
    function = jax.jit(emulated(20), in_shardings=cut, out_shardings=cut)
    with jax_private.exporting_without_backend():
        blob = export.export(function, platforms=["cpu"], disabled_checks=checks)(x).serialize()
    back = compiled(export.deserialize(blob).call, x, out_shardings=cut)
    assert "all-gather" not in back.as_text()
    assert milliseconds(back, x) > 19.5


@needs_compiler
def test_trees_keys_and_gradients(mesh: Mesh) -> None:
    everywhere = NamedSharding(mesh, P())
    tree = {"w": jnp.ones((3, 2)), "n": jnp.int32(4), "empty": jnp.zeros((0, 2)), "k": [True]}
    out = jax.jit(emulated(1))(jax.device_put(tree, everywhere))
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    assert jax.tree.map(lambda a: (a.shape, a.dtype.name), out) == jax.tree.map(
        lambda a: (jnp.shape(a), jnp.asarray(a).dtype.name), tree
    )
    key = jax.jit(emulated(1))(jax.device_put(jax.random.key(7), everywhere))
    assert jnp.array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(7)))
    grad = jax.grad(lambda x: (emulated(1)(x) ** 2).sum())(jax.device_put(2.0, everywhere))
    assert float(grad) == 4.0
    rows = jax.vmap(emulated(1), in_axes=1)(jax.device_put(np.eye(3, dtype=np.float32), everywhere))
    assert np.array_equal(rows, np.eye(3))


def test_without_a_compiler_a_callback_holds_all(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "register", lambda: False)
    cut = NamedSharding(mesh, P("a"))
    x = jax.device_put(np.ones(4, np.float32), cut)
    executable = compiled(emulated(20), x, out_shardings=cut)
    assert np.array_equal(executable(x), np.ones(4))
    assert milliseconds(executable, x) > 19.5


@pytest.mark.parametrize("value", [(), {"a": np.zeros((0, 3))}])
def test_nothing_to_hold_is_an_error(value: Any) -> None:
    with pytest.raises(ValueError, match="needs an array"):
        emulated(5)(value)


def test_negative_time_is_an_error() -> None:
    with pytest.raises(ValueError, match="negative"):
        emulated(-1)


def test_refuses_accelerators(mesh: Mesh) -> None:
    """Lowered for a GPU it says what to do, and nothing sleeps silently."""
    x = jax.device_put(np.ones(4, np.float32), NamedSharding(mesh, P("a")))
    with pytest.raises(NotImplementedError, match="slice of kind 'cpu'"):
        jax.jit(emulated(5)).trace(x).lower(lowering_platforms=("cuda",))


def test_cache_directory_of_others_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that others may write is not loaded from."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert module.cache_directory() == tmp_path / "pathways_lab"
    (tmp_path / "pathways_lab").chmod(0o777)
    assert module.cache_directory() != tmp_path / "pathways_lab"
