"""A device that computes wrong, on purpose: one bit of all that it makes.

Problem: whether a device that spoils bits in silence is found must be tried on real results in
real memory; and the way of a launch must not know of it.

How: while it lasts, device queues get executables that make each result again after its
computation, with one bit of that device's shard turned over.  It waits for the computation, so
hosts launch no further ahead meanwhile.

It is written for any device, and has run with CPU devices only.

Rule for maintainers: it ends by itself.  When it is not in use there is nothing of it anywhere:
the mappings in which executables are found are exchanged, and exchanged back.  The shard is made
again and not written into: others may share its memory.

Paper: none; silent data corruption (Gemini, section 5).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pathways_lab.runtime import arrays
from pathways_lab.runtime.devices import Place
from pathways_lab.runtime.host.compiler import Executable
from pathways_lab.runtime.host.local_slices import Tenant, Tenants


class Flips:
    """All such devices of one process; in its reactor's thread.

    later(seconds, function): run it in that thread.
    """

    def __init__(self, tenants: Tenants, later: Callable[..., None]) -> None:
        self._tenants = tenants
        self._later = later
        self._until: dict[int, float] = {}

    def begin(self, plain: Mapping[str, Any]) -> None:
        """device: the host's own number.  lasts: seconds; 0: it computes right from now on."""
        device, lasts = plain["device"], plain["lasts"]
        self._until[device] = time.monotonic() + lasts
        self._later(lasts, self._look)
        self._look()

    def _look(self) -> None:
        now = time.monotonic()
        self._until = {device: until for device, until in self._until.items() if until > now}
        spoilt = frozenset(self._until)
        self._tenants.find_in((lambda tenant: _Spoiling(tenant, spoilt)) if spoilt else None)


class _Spoiling(dict[str, Executable]):
    """The executables of a slice, as they are launched meanwhile."""

    def __init__(self, tenant: Tenant, spoilt: frozenset[int]) -> None:
        super().__init__(tenant.executables)
        self._tenant = tenant
        self._spoilt = spoilt

    def get(self, function: str, default: Any = None) -> Any:
        found, place = super().get(function), self._tenant.place
        if found is None or not isinstance(place, Place):
            return default
        devices = [
            place.devices[number]
            for number, local in zip(place.numbers, place.locals, strict=True)
            if local in self._spoilt
        ]
        return _Spoilt(found, devices) if devices else found


class _Spoilt(Executable):
    """An executable on devices of which some are bad."""

    def __init__(self, good: Executable, devices: Sequence[Any]) -> None:
        self.__dict__.update(good.__dict__)
        self._good = good
        self._devices = devices

    def __call__(self, arguments: Sequence[jax.Array]) -> tuple[list[jax.Array], Any]:
        results, receipt = self._good(arguments)
        return [spoilt(result, self._devices) for result in results], receipt


def spoilt(array: jax.Array, devices: Sequence[Any]) -> jax.Array:
    """The array with one bit turned over in what it has on each of *devices*."""
    with arrays.wide(array.dtype):
        parts = [
            jax.device_put(_flipped(shard.data), shard.device)
            if shard.device in devices and shard.data.size
            else shard.data
            for shard in array.addressable_shards
        ]
        return jax.make_array_from_single_device_arrays(
            array.shape, array.sharding, parts, dtype=array.dtype
        )


def _flipped(shard: jax.Array) -> np.ndarray[Any, Any]:
    """A bit that matters and leaves a number: of a float, a high one of its mantissa."""
    data = np.array(shard, order="C")
    size = data.dtype.itemsize
    data.reshape(-1).view(np.uint8)[max(0, size - 2)] ^= 1 if size == 1 else 1 << 6
    return data
