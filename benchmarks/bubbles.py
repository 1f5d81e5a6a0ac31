"""Measured bubbles of pipeline schedules beside those of theory, on emulated devices.

Stages of one layer each take the same emulated time, so theory is exact; what is
measured more is dispatch and transfers.  Run it on a quiet machine:

    python -m benchmarks.bubbles [--milliseconds 5] [--steps 5]

Prints a table, and fails when a bubble is more than *tolerance* away from theory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from typing import Any

import numpy as np

import pathways_lab as pw
from pathways_lab.pipeline.emulation import held
from pathways_lab.pipeline.schedules import SCHEDULES
from pathways_lab.timeline.records import Span

EXAMPLES = 2
"""In a microbatch."""


def identity(own: Any, x: Any) -> Any:
    return x + own


def mean(y: Any, labels: Any) -> Any:
    return ((y - labels) ** 2).mean()


def measured(lab: pw.Lab, schedule: str, stages: int, ms: float, steps: int) -> tuple[float, float]:
    """The bubble by theory, and the median of those of some steps, each waited for."""
    import optax

    each = SCHEDULES[schedule](stages, 2 * stages).stages // stages
    # Nobody wants the gradient of a model's input, which would make the first stage's backward
    # tasks shorter than those of others: so before it there is one more layer, of no length.
    own = np.zeros(4, np.float32)
    layers = [(identity, own)] + [(held(identity, ms), own)] * (stages * each)
    slices = [lab.slice(1, axes="data", island=f"island{n % 2}") for n in range(stages)]
    microbatches = 2 * stages
    x = np.ones((microbatches * EXAMPLES, 4), np.float32)
    pipe = pw.pipeline(
        layers, slices, loss=mean, optimizer=optax.sgd(0.1), example=x[:EXAMPLES],
        schedule=schedule, microbatches=microbatches,
        costs=[1e-3] + [1] * (len(layers) - 1),
    )  # fmt: skip
    state, found = pipe.init(), []
    for step in range(steps + 2):
        with lab.timeline.recording() as recording:
            state, value = pipe.step(state, x, x)
            value.block_until_ready()
            for parameters, _ in state:
                for leaf in parameters:
                    leaf.block_until_ready()
        if step >= 2:
            found.append(recording)
    bubbles = []
    for recording in found:
        tasks = [
            r for r in recording.records
            if isinstance(r, Span) and r.kind == "gang" and r.start >= recording.start
            and r.node.startswith(("forward", "backward", "weight"))
        ]  # fmt: skip
        whole = max(r.end for r in tasks) - min(r.start for r in tasks)
        busy = sum(r.end - r.start for r in tasks)
        bubbles.append(1 - busy / (stages * whole))
    for on in slices:
        on.release()
    return pipe.planned().bubble, statistics.median(bubbles)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--milliseconds", type=float, default=5.0, help="forward, per example")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tolerance", type=float, default=0.03)
    given = parser.parse_args()
    worst = 0.0
    print(f"emulated stages, load {os.getloadavg()[0]:.1f}")
    print("schedule      stages  theory  measured  difference")
    with pw.start(islands=2, hosts_per_island=1, devices_per_host=2, progress=False) as lab:
        for schedule in SCHEDULES:
            for stages in (2, 4):
                theory, got = measured(lab, schedule, stages, given.milliseconds, given.steps)
                worst = max(worst, abs(got - theory))
                print(f"{schedule:13} {stages:6}  {theory:6.1%}  {got:8.1%}  {got - theory:+10.1%}")
    print(f"largest difference {worst:.1%}, load {os.getloadavg()[0]:.1f}")
    return int(worst > given.tolerance)


if __name__ == "__main__":
    sys.exit(main())
