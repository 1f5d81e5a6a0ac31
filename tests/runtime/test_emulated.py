"""``emulated``: it takes its time on every device, gathers nothing, and is not optimised away."""

from __future__ import annotations

import ctypes
import math
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
from pathways_lab.runtime.emulated import TARGET, dear_zero, emulated, keeps_clock, telling
from pathways_lab.transport.addresses import cache_folder

needs_compiler = pytest.mark.skipif(module.compiler() is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    os.environ["NPROC"] = "8"
    devices = jax_private.make_cpu_client(4).local_devices()
    return Mesh(np.array(devices).reshape(2, 2), ("a", "b"))


def compiled(function: Any, x: Any, **kwargs: Any) -> Any:
    return jax.jit(function, **kwargs).lower(x).compile()


def milliseconds(executable: Any, x: Any, most: float = math.inf) -> float:
    """The shortest of so many calls as it takes: a busy machine only makes them longer."""
    shortest = math.inf
    for _ in range(30):
        start = time.monotonic()
        jax.block_until_ready(executable(x))
        shortest = min(shortest, (time.monotonic() - start) * 1e3)
        if shortest < most:
            break
    return shortest


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
    assert 19.5 < milliseconds(executable, x, 35) < 35


@needs_compiler
def test_two_in_a_row_take_twice_as_long(mesh: Mesh) -> None:
    """The second waits for the first: the dependency is real."""
    cut = NamedSharding(mesh, P("a"))
    x = jax.device_put(np.ones(4, np.float32), cut)
    hold = emulated(20)
    assert 39 < milliseconds(compiled(lambda x: hold(hold(x) * 2), x), x, 55) < 55


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
    with pytest.raises(ValueError, match="a number from 0 on"):
        emulated(-1)


def test_refuses_accelerators(mesh: Mesh) -> None:
    """Lowered for a GPU it says what to do, and nothing sleeps silently."""
    x = jax.device_put(np.ones(4, np.float32), NamedSharding(mesh, P("a")))
    with pytest.raises(NotImplementedError, match="slice of kind 'cpu'"):
        jax.jit(emulated(5)).trace(x).lower(lowering_platforms=("cuda",))


def test_a_cache_folder_of_others_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that others may write is not loaded from."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "pathways_lab"
    (tmp_path / "pathways_lab").chmod(0o777)
    assert cache_folder() != tmp_path / "pathways_lab"


# --- clocks -------------------------------------------------------------------------

MS = 10**6
_lanes = iter(range(10**6, 10**7))


class Clock:
    """The clock of a lane with one device, whose time the test says (nanoseconds)."""

    def __init__(self) -> None:
        self.lane, self.runs = next(_lanes), iter(range(1, 1000))
        library = module._load()
        assert library is not None
        self._launched, self._until = library.PathwaysLabLaunchedAt, library.PathwaysLabUntil
        self._launched.argtypes, self._launched.restype = [ctypes.c_int64] * 2, None
        self._until.argtypes = [ctypes.c_int64, ctypes.c_int32] + [ctypes.c_int64] * 3
        self._until.restype = ctypes.c_int64

    def launch(self, now: int) -> int:
        """A computation: its run."""
        self._launched(self.lane, now)
        return next(self.runs)

    def hold(self, run: int, now: int, length: int) -> int:
        """When the device is free again."""
        return int(self._until(self.lane, 0, run, now, length))


@needs_compiler
def test_what_was_in_the_queue_begins_when_the_last_one_ended() -> None:
    clock, begin = Clock(), 1000 * MS
    first, second, third = [clock.launch(begin) for _ in range(3)]
    assert clock.hold(first, begin + 1, 10 * MS) == begin + 1 + 10 * MS
    free = begin + 1 + 10 * MS
    # Sleeps that end late, hand-overs, and what is computed between two holds do not add up.
    assert clock.hold(second, free + MS, 10 * MS) == free + 10 * MS
    assert clock.hold(second, free + 13 * MS, 5 * MS) == free + 15 * MS
    assert clock.hold(third, free + 16 * MS, 10 * MS) == free + 25 * MS


@needs_compiler
def test_what_came_later_begins_when_it_does() -> None:
    clock, begin = Clock(), 1000 * MS
    assert clock.hold(clock.launch(begin), begin, 10 * MS) == begin + 10 * MS
    late = clock.launch(begin + 10 * MS + 1)
    assert clock.hold(late, begin + 11 * MS, 10 * MS) == begin + 21 * MS
    # In time, but kept by something else for too long to be a sleep's lateness.
    kept = clock.launch(begin + 15 * MS)
    assert clock.hold(kept, begin + 27 * MS, 10 * MS) == begin + 37 * MS


@needs_compiler
def test_launches_and_holds_of_compiled_functions_go_by_the_clock() -> None:
    clock = Clock()
    x = jax.device_put(np.ones(4, np.float32), jax_private.make_cpu_client(1).local_devices()[0])
    lowered = jax.jit(lambda x: (emulated(30)(x), dear_zero())).lower(x)
    assert keeps_clock(lowered, clock.lane)
    call = telling(lowered.compile(), clock.lane)
    begun = time.monotonic_ns()
    result, _ = call(x)
    assert not result.is_ready()  # it does not run in whoever calls
    result.block_until_ready()
    free = clock.hold(clock.launch(0), 0, 0)
    # The clocks of two processors may differ by a little.
    assert begun + 25 * MS <= free <= time.monotonic_ns() + 5 * MS
    # One launch was told by the call, one above: else this would not be in the queue.
    assert clock.hold(clock.launch(0), free + MS, 0) == free


@needs_compiler
def test_branches_and_loops_keep_no_clock() -> None:
    x = jnp.ones(4)
    hold = emulated(1)
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, 2, lambda _, y: hold(y), x)).lower(x)
    branch = jax.jit(lambda x: jax.lax.cond(x[0] > 0, hold, lambda y: y, x)).lower(x)
    none = jax.jit(lambda x: x + 1).lower(x)
    assert [keeps_clock(lowered, 1) for lowered in (loop, branch, none)] == [False] * 3
