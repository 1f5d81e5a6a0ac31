"""A large array to the devices of one host, and back.

*Up* puts an array of the process on the devices, cut over them, and waits; *down* makes a new array
of the process of it.  Plain JAX does so in its one process; the lab, whose host is another process,
through shared memory.  *One copy* is NumPy's into new memory: less is not to be had, for both ends
keep their bytes.

Rule for maintainers: what is put and what comes back are other memory each time, or JAX and
the lab would hand out what they have.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gangs.one_host import lab_and_slice, plain_mesh
from benchmarks.harness.child import Served, serve

UP, DOWN = "up", "down"


class Copying(abc.ABC):
    """A child that times copies of an array of so many megabytes."""

    def __init__(self, devices: int, megabytes: int) -> None:
        self.devices, self.megabytes = devices, megabytes

    def start(self) -> None:
        """Open the devices, and put the array there once."""
        import numpy as np

        self.open()
        self.data = np.arange(self.megabytes * 250_000, dtype=np.float32)
        self.there = self.up()
        if not np.array_equal(self.down(), self.data):
            raise RuntimeError("what came back is another array")

    @abc.abstractmethod
    def open(self) -> None:
        """The devices."""

    @abc.abstractmethod
    def up(self) -> Any:
        """The array on the devices."""

    @abc.abstractmethod
    def down(self) -> Any:
        """A new array of this process."""

    @abc.abstractmethod
    def stop(self) -> None:
        """End everything."""

    def round(self, case: str, units: int) -> tuple[float, float]:
        """So many copies."""
        copy = self.up if case == UP else self.down
        begun = time.perf_counter()
        for _ in range(units):
            copy()
        return time.perf_counter() - begun, units


class OneCopy(Copying):
    """NumPy's."""

    def open(self) -> None:
        """Nothing is elsewhere."""

    def up(self) -> Any:
        return self.data.copy()

    def down(self) -> Any:
        return self.there.copy()

    def stop(self) -> None:
        """Nothing was opened."""


class PlainCopying(Copying):
    """JAX in this process."""

    def open(self) -> None:
        import jax

        self._sharding = jax.sharding.NamedSharding(
            plain_mesh(self.devices), jax.sharding.PartitionSpec("x")
        )

    def up(self) -> Any:
        import jax

        # CPU devices would else share the memory of the process.
        return jax.block_until_ready(jax.device_put(self.data, self._sharding, may_alias=False))

    def down(self) -> Any:
        import numpy as np

        whole = np.empty_like(self.data)
        for shard in self.there.addressable_shards:
            whole[shard.index] = np.asarray(shard.data)
        return whole

    def stop(self) -> None:
        """Its devices end with the process."""


class LabCopying(Copying):
    """One host of a lab."""

    def open(self) -> None:
        import jax

        self._lab, place = lab_and_slice(self.devices)
        self._sharding = place.sharding(jax.sharding.PartitionSpec(*place.mesh.axis_names))

    def up(self) -> Any:
        import pathways_lab as pw

        return pw.device_put(self.data, self._sharding).block_until_ready()

    def down(self) -> Any:
        return self.there.result()

    def stop(self) -> None:
        self._lab.close()


SYSTEMS: dict[str, Callable[[int, int], Served]] = {
    "copy": OneCopy,
    "jax": PlainCopying,
    "lab": LabCopying,
}


def make(system: str, devices: int, megabytes: int) -> Served:
    """The child for a system."""
    return SYSTEMS[system](devices, megabytes)


if __name__ == "__main__":
    serve(make)
