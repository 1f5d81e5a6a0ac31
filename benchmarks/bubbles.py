"""Schedules of pipelines beside 1F1B: bubbles, activations and throughput, real and simulated.

Stages of one layer each take the same emulated time, so theory is exact; what is
measured more is dispatch and transfers.  The simulated machines have islands of four hosts, as
the paper's configuration C, and a stage on each host; 8 and 16 stages are sizes of the zero-bubble
paper (arXiv 2401.10241), 16 stages and 64 microbatches also of the paper's section 5.3.  Run it
on a quiet machine:

    python -m benchmarks.bubbles [--milliseconds 40] [--steps 4]

Prints a table, and fails when a measured bubble is more than *tolerance* away from theory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import pathways_lab as pw
from benchmarks.harness.report import markdown
from pathways_lab.pipeline.emulation import held
from pathways_lab.pipeline.schedule import Schedule
from pathways_lab.pipeline.schedules import SCHEDULES
from pathways_lab.timeline.records import Record, Span

USUAL = "1f1b"
"""All others are compared with it."""
EXAMPLES = 2
"""In a microbatch."""
ISLAND = 4
"""Hosts of a simulated island."""
REAL = 4
"""Stages on real devices; twice as many microbatches."""
SIZES = ((8, 24), (16, 64))
"""Simulated: stages and microbatches."""
TASK, ACTIVATION = 10.0, 10 << 20
"""Assumed there: milliseconds of a task, and bytes that go from stage to stage."""


def identity(own: Any, x: Any) -> Any:
    return x + own


def mean(y: Any, labels: Any) -> Any:
    return ((y - labels) ** 2).mean()


@dataclass(frozen=True)
class Found:
    """One schedule at one size.

    theory, bubble: of one step.  following, seconds: by theory and really, of a step that others
    follow.
    """

    theory: float
    bubble: float
    following: float
    seconds: float


def pipeline(
    schedule: str, slices: Sequence[Any], microbatches: int, ms: float, width: int
) -> pw.Pipeline:
    """ms: of forward work of a slice on a microbatch, as of each half of its backward work."""
    import optax

    each = _each(SCHEDULES[schedule](len(slices), microbatches))
    # Nobody wants the gradient of a model's input, which would make the first stage's backward
    # tasks shorter than those of others: so before it there is one more layer, of no length.
    own = np.zeros(1, np.float32)
    slow = held(identity, ms / EXAMPLES / each)
    layers = [(identity, own)] + [(slow, own)] * (len(slices) * each)
    return pw.pipeline(
        layers, slices, loss=mean, optimizer=optax.sgd(0.1),
        example=jax.ShapeDtypeStruct((EXAMPLES, width), np.float32),
        schedule=schedule, microbatches=microbatches, costs=[1e-3] + [1] * (len(layers) - 1),
    )  # fmt: skip


def _each(schedule: Schedule) -> int:
    """Stages on a slice."""
    return schedule.stages // len(schedule.order)


def tasks(records: Iterable[Record], start: float) -> list[Span]:
    return [
        r for r in records
        if isinstance(r, Span) and r.kind == "gang" and r.start >= start
        and r.node.startswith(("forward", "backward", "weight"))
    ]  # fmt: skip


def whole(spans: Sequence[Span]) -> float:
    """From the first start to the last end."""
    return max(s.end for s in spans) - min(s.start for s in spans)


def bubble(spans: Sequence[Span], slices: int) -> float:
    return 1 - sum(s.end - s.start for s in spans) / (slices * whole(spans))


def found(pipe: pw.Pipeline, steps: int, got: float, seconds: float) -> Found:
    # Of equal stages: the layer of no length is no part of theory.
    one, all_of_them = pipe.schedule.timed(), pipe.schedule.timed(steps=steps)
    following = all_of_them.seconds / steps / _each(pipe.schedule)
    return Found(one.bubble, got, following, seconds / steps)


def measured(lab: pw.Lab, schedule: str, ms: float, steps: int) -> Found:
    """On emulated devices: the median bubble of steps that are waited for, and steps in a row."""
    slices = [lab.slice(1, axes="data", island=f"island{n % 2}") for n in range(REAL)]
    pipe = pipeline(schedule, slices, 2 * REAL, ms, 4)
    x = np.ones((2 * REAL * EXAMPLES, 4), np.float32)
    state, bubbles = pipe.init(), []

    def run(count: int) -> list[Span]:
        nonlocal state
        with lab.timeline.recording() as recording:
            for _ in range(count):
                state, value = pipe.step(state, x, x)
            jax.block_until_ready((state, value))
        recording.settle(runs=count)
        return tasks(recording.records, recording.start)

    run(1), run(1)
    bubbles = [bubble(run(1), REAL) for _ in range(steps)]
    seconds = whole(run(steps))
    for on in slices:
        on.release()
    return found(pipe, steps, statistics.median(bubbles), seconds)


def simulated(schedule: str, stages: int, microbatches: int, steps: int) -> Found:
    """The same program at another size: steps in a row, and the bubble of the last one."""
    machine = pw.Machine(-(-stages // ISLAND), ISLAND, 1, memory=80 << 30)
    slices = [machine.slice(1, axes="data", island=f"island{n // ISLAND}") for n in range(stages)]
    width = ACTIVATION // EXAMPLES // 4
    pipe = pipeline(schedule, slices, microbatches, TASK, width)
    x = jax.ShapeDtypeStruct((microbatches * EXAMPLES, width), np.float32)
    captured = pipe.program.capture(pipe.types(), x, x)
    spans = tasks(pw.simulate(captured, machine, runs=steps).records, 0.0)
    last = max(spans, key=lambda span: span.start).run
    return found(pipe, steps, bubble([s for s in spans if s.run == last], stages), whole(spans))


def table(known: dict[str, list[Found]]) -> str:
    """Schedules down, sizes across."""
    sizes = [f"{REAL} x {2 * REAL}", *(f"{s} x {m} simulated" for s, m in SIZES)]
    rows = [(
        "schedule", f"activations / {USUAL}",
        *(f"bubble, {size}" for size in sizes),
        *(f"throughput / {USUAL}, {size}" for size in sizes),
    )]  # fmt: skip
    stages, microbatches = SIZES[-1]

    def kept(schedule: str) -> float:
        made = SCHEDULES[schedule](stages, microbatches)
        return max(made.peak) / _each(made)

    for schedule, own in known.items():
        pairs = list(zip(own, known[USUAL], strict=True))
        rows.append((
            schedule, f"{kept(schedule) / kept(USUAL):.2f}",
            *(f"{f.bubble:.1%} ({f.theory:.1%})" for f in own),
            *(f"{o.seconds / f.seconds:.3f} ({o.following / f.following:.3f})" for f, o in pairs),
        ))  # fmt: skip
    return markdown(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--milliseconds", type=float, default=40.0, help="of a measured task")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tolerance", type=float, default=0.03)
    given = parser.parse_args()
    print(f"emulated stages, load {os.getloadavg()[0]:.1f}; in brackets what theory says")
    known: dict[str, list[Found]] = {}
    with pw.start(islands=2, hosts_per_island=1, devices_per_host=2, progress=False) as lab:
        for schedule in SCHEDULES:
            known[schedule] = [measured(lab, schedule, given.milliseconds, given.steps)]
    for schedule, own in known.items():
        own += [simulated(schedule, *size, given.steps) for size in SIZES]
    print(table(known))
    worst = max(abs(own[0].bubble - own[0].theory) for own in known.values())
    print(f"largest difference of a measured bubble {worst:.1%}, load {os.getloadavg()[0]:.1f}")
    return int(worst > given.tolerance)


if __name__ == "__main__":
    sys.exit(main())
