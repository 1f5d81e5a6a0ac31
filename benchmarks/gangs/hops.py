"""A scalar that goes back and forth between two hosts, one addition on each arrival.

A chain of 128 nodes, alternately on one and the other host: the time per node
is a hop, the way from one node to the next on another host, addition included.
Every framework runs the same compiled addition of JAX; Ray's actors hand on
NumPy arrays, since a Compiled Graph has no transport for JAX's on CPUs.
"""

from __future__ import annotations

import abc
import time
from typing import Any

from benchmarks.gangs.work import NODES, repeated
from benchmarks.harness.child import Served, serve

CASE = f"hop, in a chain of {NODES} over two hosts"


class Hops(abc.ABC):
    """A child that times whole chains, one after the other."""

    @abc.abstractmethod
    def start(self) -> None:
        """Start the framework and build the chain."""

    @abc.abstractmethod
    def chain(self) -> float:
        """One chain from zero: the value at its end."""

    @abc.abstractmethod
    def stop(self) -> None:
        """End the framework."""

    def round(self, case: str, units: int) -> tuple[float, float]:
        """At least *units* hops.  Raises RuntimeError when the value is wrong."""
        chains = -(-units // NODES)
        begun = time.perf_counter()
        for _ in range(chains):
            value = self.chain()
        seconds = time.perf_counter() - begun
        if value != NODES:
            raise RuntimeError(f"a chain of {NODES} additions ended with {value}")
        return seconds, chains * NODES


class OursHops(Hops):
    """One island of two hosts with one device each, and a program over two slices."""

    def start(self) -> None:
        import jax
        import numpy as np

        import pathways_lab as pw

        self._lab = pw.start(islands=1, hosts_per_island=2, devices_per_host=1, progress=False)
        places = [self._lab.slice(shape=(1,), axes=("x",)) for _ in range(2)]
        hosts = {place.binding.devices[0][0] for place in places}
        assert len(hosts) == 2, f"both slices are on {hosts}"

        def add(value: Any) -> Any:
            return value + 1

        here, there = (pw.jit(add, on=place) for place in places)
        both = repeated(lambda value: there(here(value)), NODES // 2)
        self._program = pw.program(both)
        self._zero = pw.device_put(np.float32(0), places[0])
        self._get = jax.device_get

    def chain(self) -> float:
        return float(self._get(self._program(self._zero)))

    def stop(self) -> None:
        self._lab.close()


class RayHops(Hops):
    """Two actors and a Compiled Graph."""

    def start(self) -> None:
        import ray
        from ray.dag import InputNode

        class Adder:
            """One host."""

            def __init__(self) -> None:
                import os

                os.environ["JAX_PLATFORMS"] = "cpu"
                import jax
                import numpy as np

                self._add = jax.jit(lambda value: value + 1)
                self._array = np.asarray

            def add(self, value: Any) -> Any:
                return self._array(self._add(value))

        import numpy as np

        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        actors = [ray.remote(num_cpus=1)(Adder).remote() for _ in range(2)]
        with InputNode() as given:
            last = given
            for number in range(NODES):
                last = actors[number % 2].add.bind(last)
        self._graph = last.experimental_compile()
        self._zero = np.float32(0)
        self._get = ray.get

    def chain(self) -> float:
        return float(self._get(self._graph.execute(self._zero)))

    def stop(self) -> None:
        import ray

        ray.shutdown()


def made(framework: str) -> Served:
    """What to serve: ``"ours"`` or ``"ray"``."""
    return {"ours": OursHops, "ray": RayHops}[framework]()


if __name__ == "__main__":
    serve(made)
