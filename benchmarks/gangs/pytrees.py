"""A step whose state is many small arrays, called again and again.

``t = f(t)`` with a list of n arrays of eight numbers, to each of which one is added.  Plain JAX
runs it in its one process on as many devices as the lab's host has, the lab on one host, and
through the door JAX's own code runs on that host of a lab.  Cases name the number of arrays, and
how it is called: *donated* or *kept* (the call may overwrite its arguments, or not) without waiting
between calls, or *waited* for, each call.

*x + 1* is an operator on one array: *chained*, each on the result of the last, or each *waited*
for.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gangs.one_host import lab_and_slice, plain_mesh
from benchmarks.harness.child import Served, serve

HOW = ("donated", "kept", "waited")
OPERATOR = ("x + 1, chained", "x + 1, waited")


def case(arrays: int, how: str) -> str:
    """The name of a case."""
    return f"{arrays} arrays, {how}"


class Steps(abc.ABC):
    """A child that times calls."""

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self._steps: dict[str, Any] = {}
        self._trees: dict[str, Any] = {}

    @abc.abstractmethod
    def start(self) -> None:
        """Open the devices."""

    @abc.abstractmethod
    def put(self, value: Any) -> Any:
        """An array on all devices."""

    @abc.abstractmethod
    def jit(self, function: Any, donate: bool) -> Any:
        """The compiled function."""

    @abc.abstractmethod
    def stop(self) -> None:
        """End everything."""

    def round(self, case: str, units: int) -> tuple[float, float]:
        """So many calls.  Raises RuntimeError when a value is wrong."""
        import jax
        import numpy as np

        waited = case.endswith("waited")
        if case not in self._trees:
            if case in OPERATOR:
                self._trees[case] = self.put(np.zeros(8, np.float32))
                self._steps[case] = lambda x: x + 1
            else:
                count = int(case.split()[0])
                self._trees[case] = [self.put(np.zeros(8, np.float32)) for _ in range(count)]
                step = self.jit(lambda tree: [x + 1 for x in tree], case.endswith("donated"))
                self._steps[case] = step
                for _ in range(4):
                    self._trees[case] = step(self._trees[case])
        step, tree = self._steps[case], self._trees[case]
        before = float(np.asarray(jax.tree.leaves(tree)[-1])[0])
        begun = time.perf_counter()
        for _ in range(units):
            tree = step(tree)
            if waited:
                jax.block_until_ready(tree)
        jax.block_until_ready(tree)
        seconds = time.perf_counter() - begun
        self._trees[case] = tree
        value = float(np.asarray(jax.tree.leaves(tree)[-1])[0])
        if value != before + units:
            raise RuntimeError(f"{units} steps from {before:g} came to {value:g}")
        return seconds, units


class PlainSteps(Steps):
    """JAX in this process."""

    def start(self) -> None:
        import jax

        mesh = plain_mesh(self.devices)
        self._sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def put(self, value: Any) -> Any:
        import jax

        return jax.device_put(value, self._sharding)

    def jit(self, function: Any, donate: bool) -> Any:
        import jax

        return jax.jit(function, donate_argnums=(0,) if donate else ())

    def stop(self) -> None:
        """Its devices end with the process."""


class LabSteps(Steps):
    """One host of a lab."""

    def start(self) -> None:
        self._lab, self._slice = lab_and_slice(self.devices)

    def put(self, value: Any) -> Any:
        import pathways_lab as pw

        return pw.device_put(value, self._slice)

    def jit(self, function: Any, donate: bool) -> Any:
        import pathways_lab as pw

        return pw.jit(function, on=self._slice, donate_argnums=(0,) if donate else None)

    def stop(self) -> None:
        self._lab.close()


class DoorSteps(PlainSteps):
    """JAX in this process, on the devices of a lab."""

    def start(self) -> None:
        import jax

        self._lab, place = lab_and_slice(self.devices)
        self._lab.open_door()
        mesh = place.mesh
        self._sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def stop(self) -> None:
        self._lab.close()


SYSTEMS: dict[str, Callable[[int], Served]] = {
    "jax": PlainSteps,
    "lab": LabSteps,
    "door": DoorSteps,
}


def make(system: str, devices: int) -> Served:
    """The child for a system."""
    return SYSTEMS[system](devices)


if __name__ == "__main__":
    serve(make)
