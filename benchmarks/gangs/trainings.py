"""One training on emulated devices: SPMD, pipelines, and data parallel over islands.

Sixteen layers hold every device that computes them for so many milliseconds per
example forward, and for twice as many backward; a batch has 64 examples.  Two
constants stand for what is not emulated, the collectives inside of an SPMD
computation, and fix the ratios of one island (chosen so that the paper's own come
out at its size, see notebook 08): :data:`SPMD`, and :data:`STAGE` for each doubling of
the devices of a stage.  :data:`LATENCY` and :data:`BANDWIDTH` fix those of several.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness.child import serve

DEVICES, LAYERS, EXAMPLES, WIDTH = 16, 16, 64, 128
SPMD, STAGE = 0.33, 0.0113
"""By how much collectives lengthen SPMD, and a stage for each doubling of its devices."""
LATENCY, BANDWIDTH = 200e-6, 1e7
"""Between islands that are apart: seconds, and bytes per second (a megabyte of gradients)."""

ALL, FEW = "SPMD on 16", "GPipe S=4 on 4"
STAGES = {count: f"GPipe S={count} on 16" for count in (4, 8, 16)}
EIGHT, OVERLAP = "data parallel on 8", "data parallel on 8, overlapped"
TOGETHER = (ALL, *STAGES.values(), FEW, EIGHT)
"""What one island of all devices does."""
APART = (FEW, EIGHT, OVERLAP)
"""What four islands of four devices do: one stage on each, or half of the batch on two."""


class Trainings:
    """A lab and its trainings.

    apart: four islands instead of one.  forward: milliseconds per layer and example.
    factor: of all constants, to vary them.
    """

    def __init__(self, apart: bool, forward: float, factor: float = 1.0) -> None:
        self._apart, self._forward, self._factor = apart, forward, factor
        self._steps: dict[str, Callable[[], None]] = {}

    def start(self) -> None:
        import numpy as np

        import pathways_lab as pw

        islands, hosts = (4, 1) if self._apart else (1, 2)
        self._lab = pw.start(
            islands=islands, hosts_per_island=hosts, progress=False,
            devices_per_host=DEVICES // islands // hosts,
        )  # fmt: skip
        rng = np.random.default_rng(0)
        self._x = rng.normal(size=(EXAMPLES, WIDTH)).astype(np.float32)
        self._weights = rng.normal(0, 0.1, (LAYERS, WIDTH, WIDTH)).astype(np.float32)
        if self._apart:
            self._lab.dcn(latency=LATENCY * self._factor, bandwidth=BANDWIDTH / self._factor)
            self._pipelined(FEW, [1] * 4, [f"island{n}" for n in range(4)])
            for case, chunks in ((EIGHT, 1), (OVERLAP, 4)):
                self._parallel(case, [4, 4], ["island0", "island1"], 0.0, chunks)
            return
        self._parallel(ALL, [DEVICES], ["island0"], SPMD, 1)
        for count, case in STAGES.items():
            self._pipelined(case, [DEVICES // count] * count, ["island0"] * count)
        self._pipelined(FEW, [1] * 4, ["island0"] * 4)
        self._parallel(EIGHT, [8], ["island0"], 0.0, 1)

    def round(self, case: str, units: int) -> tuple[float, float]:
        """So many steps, each waited for."""
        begun = time.perf_counter()
        for _ in range(units):
            self._steps[case]()
        return time.perf_counter() - begun, units

    def stop(self) -> None:
        self._lab.close()

    def _layers(self, more: float) -> list[tuple[Any, Any]]:
        """Whose time is longer by this share, for collectives."""
        import jax.numpy as jnp

        from pathways_lab.pipeline.emulation import held

        def dense(weights: Any, x: Any) -> Any:
            return jnp.tanh(x @ weights)

        slow = held(dense, self._forward * (1 + more * self._factor))
        return [(slow, weights) for weights in self._weights]

    def _pipelined(self, case: str, sizes: list[int], islands: list[str]) -> None:
        import optax

        import pathways_lab as pw

        microbatches = 4 * len(sizes)
        trained = pw.pipeline(
            self._layers(STAGE * math.log2(sizes[0])), self._slices(sizes, islands),
            loss=_loss, optimizer=optax.sgd(0.1), example=self._x[: EXAMPLES // microbatches],
            schedule="gpipe", microbatches=microbatches, costs=[1] * LAYERS,
        )  # fmt: skip
        self._keep(case, trained)

    def _parallel(
        self, case: str, sizes: list[int], islands: list[str], more: float, chunks: int
    ) -> None:
        import optax

        import pathways_lab as pw

        trained = pw.data_parallel(
            self._layers(more), self._slices(sizes, islands), loss=_loss,
            optimizer=optax.sgd(0.1), example=self._x, chunks=chunks, costs=[1] * LAYERS,
        )  # fmt: skip
        self._keep(case, trained)

    def _slices(self, sizes: list[int], islands: list[str]) -> list[Any]:
        pairs = zip(sizes, islands, strict=True)
        return [self._lab.slice(size, axes="data", island=island) for size, island in pairs]

    def _keep(self, case: str, trained: Any) -> None:
        import jax

        state = [trained.init()]

        def step() -> None:
            state[0], _ = trained.step(state[0], self._x, self._x)
            jax.block_until_ready(state[0])

        self._steps[case] = step


def _loss(y: Any, labels: Any) -> Any:
    return ((y - labels) ** 2).mean()


if __name__ == "__main__":
    serve(Trainings)
