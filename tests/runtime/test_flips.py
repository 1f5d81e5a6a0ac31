"""Law: one bit is wrong in what that device has, in nothing else, and only while it lasts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.runtime import jax_private
from pathways_lab.runtime.devices import Footprint, Place
from pathways_lab.runtime.host import bit_flips

TYPES = (
    *("float32", "bfloat16", "float16", "float8_e5m2", "bool", "complex64"),
    *("int4", "uint4", "int8", "int32", "float64", "int64"),
)


@functools.cache
def mesh() -> Mesh:
    devices = jax_private.make_cpu_client(4).local_devices()
    return Mesh(np.array(devices).reshape(2, 2), ("x", "y"))


def bits(array: Any) -> list[int]:
    """Of each device's part, as one number."""
    shards = [np.asarray(shard.data) for shard in array.addressable_shards]
    return [int.from_bytes(shard.tobytes(), "little") for shard in shards]


class Clock:
    """Of a reactor: moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[tuple[float, Callable[[], None]]] = []

    def monotonic(self) -> float:
        return self.now

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        self.due.append((self.now + seconds, function))

    def pass_until(self, then: float) -> None:
        self.now = then
        for _, function in [entry for entry in self.due if entry[0] <= then]:
            function()


class Slices:
    """One slice on devices 0 and 1 of this host."""

    def __init__(self) -> None:
        self.tenant = SimpleNamespace(executables={"f": GOOD}, place=None)

    def find_in(self, made: Any) -> None:
        known = dict(self.tenant.executables)
        self.tenant.executables = known if made is None else made(self.tenant)


GOOD: Any = SimpleNamespace(calls_python=False, check=None)


def test_it_ends_by_itself_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, slices = Clock(), Slices()
    monkeypatch.setattr(bit_flips, "time", clock)
    made = bit_flips.Flips(slices, clock.later)  # type: ignore[arg-type]
    made.begin({"device": 1, "lasts": 5.0})
    made.begin({"device": 0, "lasts": 2.0})
    assert slices.tenant.executables.get("f") is None, "its devices are not open"
    binding = SliceBinding(1, "k", "i", (2,), ("x",), (("h", 0), ("h", 1)), "cpu")
    footprint = Footprint("h", {("h", n): mesh().devices[0, n] for n in range(2)})
    slices.tenant.place = Place(binding, "h", footprint)
    for then, spoils in ((0.0, [0, 1]), (2.0, [1])):
        clock.pass_until(then)
        found = slices.tenant.executables.get("f")
        assert found._devices == [mesh().devices[0, n] for n in spoils]
    clock.pass_until(5.0)
    assert type(slices.tenant.executables) is dict
    assert slices.tenant.executables == {"f": GOOD}
    made.begin({"device": 1, "lasts": 5.0})
    made.begin({"device": 1, "lasts": 0.0})
    assert type(slices.tenant.executables) is dict


@pytest.mark.parametrize("dtype", TYPES)
def test_one_bit_of_one_part(dtype: str) -> None:
    device = mesh().devices[1, 0]
    with jax.enable_x64(True):
        good = jax.device_put(jnp.ones((4, 2), dtype), NamedSharding(mesh(), P("x")))
    bad = bit_flips.spoilt(good, [device])
    assert (bad.dtype, bad.shape, bad.sharding) == (good.dtype, good.shape, good.sharding)
    changed = [(a ^ b).bit_count() for a, b in zip(bits(good), bits(bad), strict=True)]
    assert changed == [int(shard.device is device) for shard in good.addressable_shards]
    assert np.isfinite(np.asarray(bad).astype(np.complex128)).all()


def test_what_is_empty_stays_so() -> None:
    empty = jax.device_put(np.zeros((0, 4), np.float32), NamedSharding(mesh(), P()))
    assert bit_flips.spoilt(empty, list(mesh().devices.flat)).shape == (0, 4)
