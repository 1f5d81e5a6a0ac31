"""One training on emulated devices: SPMD, pipelines, and data parallel over islands.

Sixteen layers hold every device that computes them for so many milliseconds per
example forward, and for twice as many backward; a batch has 64 examples.  A device
stands for a host of eight cores.  Two constants stand for what is not emulated, the
collectives inside of an SPMD computation, and fix the ratios of one island:
:data:`SPMD`, and :data:`STAGE` for each doubling of the cores of a stage.  They are the
least squares fit of theory to all ratios that Table 2 gives (S = 4, 8, 16 against SPMD on
128 cores, and S=16 on 512 against 128), which they meet within 0.7%.
:data:`LATENCY` and :data:`BANDWIDTH` fix the ratios of several islands.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness.child import serve

DEVICES, LAYERS, EXAMPLES, WIDTH = 16, 16, 64, 128
CORES = 8
"""Of the paper's, that a device stands for."""
SPMD, STAGE = 0.362, 0.016
"""By how much collectives lengthen SPMD, and a stage for each doubling of its cores."""
LATENCY, BANDWIDTH = 200e-6, 5e6
"""Between islands that are apart: seconds, and bytes per second (a megabyte of gradients)."""

COSTS = [1e-3] + [1] * LAYERS
"""Of the layers, and before them one of no length."""

ALL, FEW = "SPMD on 16", "GPipe S=4 on 4"
STAGES = {count: f"GPipe S={count} on 16" for count in (4, 8, 16)}
EIGHT, OVERLAP = "data parallel on 8", "data parallel on 8, overlapped"
TOGETHER = (ALL, *STAGES.values(), FEW, EIGHT)
"""What one island of all devices does."""
APART = (FEW, EIGHT, OVERLAP)
"""What four islands of four devices do: one stage on each, or half of the batch on two."""


class Training(NamedTuple):
    """What is trained: emulated layers on the slices of a lab, or of a simulated machine.

    forward: milliseconds per layer and example.  factor: of all constants, to vary them.
    examples: in a batch.  cores: that a device stands for.
    """

    forward: float
    factor: float = 1.0
    examples: int = EXAMPLES
    cores: int = CORES

    def pipelined(self, place: Any, sizes: Sequence[int], islands: Sequence[str]) -> Any:
        """GPipe with a stage on each of some slices: of so many devices, in these islands."""
        import optax

        import pathways_lab as pw

        microbatches = 4 * len(sizes)
        example = np.zeros((self.examples // microbatches, WIDTH), np.float32)
        return pw.pipeline(
            self._layers(self._collectives(sizes[0])), _slices(place, sizes, islands),
            loss=_loss, optimizer=optax.sgd(0.1), example=example,
            schedule="gpipe", microbatches=microbatches, costs=COSTS,
        )  # fmt: skip

    def parallel(
        self, place: Any, sizes: Sequence[int], islands: Sequence[str], more: float, chunks: int
    ) -> Any:
        """Data parallel over some slices.  more: by how much collectives lengthen a layer."""
        import optax

        import pathways_lab as pw

        return pw.data_parallel(
            self._layers(more), _slices(place, sizes, islands), loss=_loss,
            optimizer=optax.sgd(0.1), example=np.zeros((self.examples, WIDTH), np.float32),
            chunks=chunks, costs=COSTS,
        )  # fmt: skip

    def by_theory(self, stages: int, size: int) -> float:
        """Seconds of a step of GPipe with stages of so many devices, were there nothing else."""
        from pathways_lab.pipeline import schedule, schedules

        microbatches = 4 * stages
        each = self.forward * 1e-3 * (1 + self._collectives(size) * self.factor)
        forward = each * LAYERS / stages * self.examples / microbatches / size
        costs = schedule.Costs(forward, 2 * forward)
        return schedules.gpipe(stages, microbatches).timed(costs).seconds

    def _collectives(self, size: int) -> float:
        """By how much they lengthen a stage of so many devices."""
        return STAGE * math.log2(size * self.cores)

    def _layers(self, more: float) -> list[tuple[Any, Any]]:
        """Whose time is longer by this share, for collectives."""
        import jax.numpy as jnp

        from pathways_lab.pipeline.emulation import held

        def dense(weights: Any, x: Any) -> Any:
            return jnp.tanh(x @ weights)

        def first(shift: Any, x: Any) -> Any:
            return x + shift

        slow = held(dense, self.forward * (1 + more * self.factor))
        rng = np.random.default_rng(0)
        weights = rng.normal(0, 0.1, (LAYERS, WIDTH, WIDTH)).astype(np.float32)
        # Nobody wants the gradient of a model's input, which would make the first of the layers
        # shorter than others, and SPMD by more than pipelines: so there is one of no length.
        return [(first, np.zeros(WIDTH, np.float32)), *((slow, own) for own in weights)]


class Trainings:
    """A lab and its trainings.

    apart: four islands instead of one.  forward, factor: see :class:`Training`.
    """

    def __init__(self, apart: bool, forward: float, factor: float = 1.0) -> None:
        self._apart, self._training = apart, Training(forward, factor)
        self._steps: dict[str, Callable[[], None]] = {}

    def start(self) -> None:
        import pathways_lab as pw

        islands, hosts = (4, 1) if self._apart else (1, 2)
        self._lab = lab = pw.start(
            islands=islands, hosts_per_island=hosts, progress=False,
            devices_per_host=DEVICES // islands // hosts,
        )  # fmt: skip
        training, factor = self._training, self._training.factor
        if self._apart:
            lab.dcn(latency=LATENCY * factor, bandwidth=BANDWIDTH / factor)
            self._keep(FEW, training.pipelined(lab, [1] * 4, [f"island{n}" for n in range(4)]))
            for case, chunks in ((EIGHT, 1), (OVERLAP, 4)):
                halves = training.parallel(lab, [4, 4], ["island0", "island1"], 0.0, chunks)
                self._keep(case, halves)
            return
        self._keep(ALL, training.parallel(lab, [DEVICES], ["island0"], SPMD, 1))
        for count, case in STAGES.items():
            sizes = [DEVICES // count] * count
            self._keep(case, training.pipelined(lab, sizes, ["island0"] * count))
        self._keep(FEW, training.pipelined(lab, [1] * 4, ["island0"] * 4))
        self._keep(EIGHT, training.parallel(lab, [8], ["island0"], 0.0, 1))

    def round(self, case: str, units: int) -> tuple[float, float]:
        """So many steps, each waited for."""
        begun = time.perf_counter()
        for _ in range(units):
            self._steps[case]()
        return time.perf_counter() - begun, units

    def stop(self) -> None:
        self._lab.close()

    def _keep(self, case: str, trained: Any) -> None:
        import jax

        x = np.random.default_rng(1).normal(size=(EXAMPLES, WIDTH)).astype(np.float32)
        state = [trained.init()]

        def step() -> None:
            state[0], _ = trained.step(state[0], x, x)
            jax.block_until_ready(state[0])

        self._steps[case] = step


def _slices(place: Any, sizes: Sequence[int], islands: Sequence[str]) -> list[Any]:
    pairs = zip(sizes, islands, strict=True)
    return [place.slice(size, axes="data", island=island) for size, island in pairs]


def _loss(y: Any, labels: Any) -> Any:
    return ((y - labels) ** 2).mean()


if __name__ == "__main__":
    serve(Trainings)
