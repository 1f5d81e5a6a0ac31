"""A plain loop over microbatches: every stage forward, then every stage backward.

Stages are slices of one emulated device on islands of their own, which hold it for so many
milliseconds forward and twice as many backward, so the shortest time is known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness.child import serve

CAPTURED, WRITTEN, CALLS = "captured", "captured, in the order as written", "calls one by one"
"""Systems: one program, the same without turns of slices, and no program."""


def shortest(stages: int, microbatches: int, milliseconds: float) -> float:
    """Seconds of a loop in which no stage waits for anything but its data."""
    return (microbatches + stages - 1) * 3 * milliseconds / 1e3


def loop(slices: Sequence[Any], microbatches: int, milliseconds: float) -> Callable[[Any], Any]:
    """The function; each of its calls is a gang."""
    import pathways_lab as pw

    forward, backward = (
        [pw.jit(pw.emulated(times * milliseconds), on=place, name=name) for place in slices]
        for name, times in (("forward", 1), ("backward", 2))
    )

    def step(x: Any) -> Any:
        activations, gradients = [], []
        for _ in range(microbatches):
            h = x
            for stage in forward:
                h = stage(h)
            activations.append(h)
        for g in activations:
            for stage in reversed(backward):
                g = stage(g)
            gradients.append(g)
        return gradients

    return step


class Loops:
    """A lab with a host for each stage.  sizes: by case, stages, microbatches and milliseconds."""

    def __init__(self, system: str, sizes: dict[str, tuple[int, int, float]]) -> None:
        self._system, self._sizes = system, sizes
        self._steps: dict[str, Callable[[Any], Any]] = {}

    def start(self) -> None:
        import numpy as np

        import pathways_lab as pw

        most = max(stages for stages, _, _ in self._sizes.values())
        self._lab = pw.start(islands=most, hosts_per_island=1, devices_per_host=1, progress=False)
        slices = [self._lab.slice(1, island=f"island{n}") for n in range(most)]
        self._x = np.zeros(8, np.float32)
        for case, (stages, microbatches, milliseconds) in self._sizes.items():
            step = loop(slices[:stages], microbatches, milliseconds)
            order = "written" if self._system == WRITTEN else "turns"
            self._steps[case] = step if self._system == CALLS else pw.program(step, order=order)

    def round(self, case: str, units: int) -> tuple[float, float]:
        """So many loops, each waited for."""
        import jax

        begun = time.perf_counter()
        for _ in range(units):
            jax.block_until_ready(self._steps[case](self._x))
        return time.perf_counter() - begun, units

    def stop(self) -> None:
        self._lab.close()


if __name__ == "__main__":
    serve(Loops)
