"""The lab: one island with one device on each host, driven as a notebook drives it.

The same hosts, devices and compiled functions also run without a controller: a
loop per host (``lab.multi_controller``), for multi-controller JAX on the same
processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.gangs.work import (
    CHAIN,
    FUSED,
    NODES,
    OP,
    WAIT,
    WORKS,
    Gang,
    computation,
    repeated,
)
from benchmarks.harness.child import serve


class Ours(Gang):
    """An embedded lab."""

    def start(self) -> None:
        import jax
        import numpy as np
        from jax.sharding import NamedSharding, PartitionSpec

        import pathways_lab as pw

        self._wait: Callable[[Any], Any] = jax.block_until_ready
        self._lab = pw.start(
            islands=1, hosts_per_island=self.hosts, devices_per_host=1, progress=False
        )
        where = self._lab.slice(shape=(self.hosts,), axes=("x",))
        spread = PartitionSpec("x")

        def compiled(function: Any) -> Any:
            return pw.jit(function, on=where, in_shardings=spread, out_shardings=spread)

        self._functions: dict[tuple[str, str], Callable[[Any], Any]] = {}
        for work in WORKS:
            part = jax.shard_map(
                computation(work), mesh=where.mesh, in_specs=spread, out_specs=spread
            )
            one = compiled(part)
            self._functions[work, WAIT] = self._functions[work, OP] = one
            self._functions[work, CHAIN] = pw.program(repeated(one, NODES))
            self._functions[work, FUSED] = compiled(repeated(part, NODES))
        zero = np.zeros(self.hosts, np.float32)
        self._zero = pw.device_put(zero, NamedSharding(where.mesh, spread))
        self._x = self._zero

    def reset(self) -> None:
        self._x = self._zero

    def calls(self, work: str, mode: str, count: int) -> None:
        function, x = self._functions[work, mode], self._x
        for _ in range(count):
            x = function(x)
            if mode == WAIT:
                self._wait(x)
        self._x = self._wait(x)

    def value(self) -> float:
        import numpy as np

        return float(np.asarray(self._x)[0])

    def stop(self) -> None:
        self._lab.close()


class Looped(Ours):
    """The lab's hosts without its controller."""

    def start(self) -> None:
        super().start()
        self._lab.lease("island0")
        self._prepared: set[tuple[str, str, int]] = set()

    def timed(self, work: str, mode: str, count: int) -> float:
        """Seconds of *count* steps; to start the loop and hear of its end is no part of them."""
        for steps in (1, count):
            if (work, mode, steps) not in self._prepared:
                # A loop of another length is another program, prepared at its first use.
                self._prepared.add((work, mode, steps))
                self.calls(work, mode, steps)
        single = super().timed(work, mode, 1)
        if count == 1:
            return single
        return max(1e-9, super().timed(work, mode, count) - single) * count / (count - 1)

    def calls(self, work: str, mode: str, count: int) -> None:
        loop = self._lab.multi_controller(
            self._functions[work, mode], self._zero, steps=count, wait=mode == WAIT, records=False
        )
        self._x = self._wait(loop)


def made(hosts: int, controllers: str = "one") -> Ours:
    """controllers: ``"one"``, or ``"many"``: one per host."""
    return {"one": Ours, "many": Looped}[controllers](hosts)


if __name__ == "__main__":
    serve(made)
