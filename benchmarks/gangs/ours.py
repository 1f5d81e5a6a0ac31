"""The lab: one island with one device on each host, driven as a notebook drives it."""

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


if __name__ == "__main__":
    serve(Ours)
