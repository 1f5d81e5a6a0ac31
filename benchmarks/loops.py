"""A plain loop over microbatches as one program, beside the shortest time that is possible.

    python -m benchmarks.loops

First simulated, up to sixteen stages, with lowering's turns of slices and without; then real
hosts of emulated devices, and the same calls without a program
(:mod:`benchmarks.gangs.microbatches`).
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gangs.microbatches import CALLS, CAPTURED, WRITTEN, loop, shortest
from benchmarks.harness.child import Child
from benchmarks.harness.command import arguments, settings
from benchmarks.harness.report import Report, markdown, publish
from benchmarks.harness.rounds import measure

REAL = {f"4 stages, {many} microbatches of 20 and 40 ms": (4, many, 20.0) for many in (8, 16)}
SIMULATED = ((4, 16, 20.0), (8, 16, 20.0), (8, 32, 40.0), (16, 64, 20.0))
"""Stages, microbatches, and milliseconds forward."""


def simulated(order: str, stages: int, microbatches: int, milliseconds: float) -> float:
    """Seconds of one loop on a machine that is simulated."""
    import jax
    import numpy as np

    import pathways_lab as pw

    machine = pw.Machine(islands=stages, hosts_per_island=1, devices_per_host=1)
    slices = [machine.slice(1, island=f"island{n}") for n in range(stages)]
    step = pw.program(loop(slices, microbatches, milliseconds), order=order)
    return pw.simulate(step.capture(jax.ShapeDtypeStruct((8,), np.float32)), machine).seconds


def table() -> str:
    """Every size, in turns and as written."""
    rows = [("stages", "microbatches", "ms", "shortest", "in turns", "as written")]
    for size in SIMULATED:
        least, ours, written = (
            shortest(*size),
            simulated("turns", *size),
            simulated("written", *size),
        )
        rows.append(
            (
                str(size[0]), str(size[1]), f"{size[2]:g} and {2 * size[2]:g}", f"{least:.2f} s",
                f"{ours:.2f} s, {ours / least:.2f}", f"{written:.2f} s, {written / least:.2f}",
            )
        )  # fmt: skip
    return markdown(rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Both tables."""
    how = settings(arguments(__doc__, rounds=5, budget=2.0).parse_args(argv))
    cases = {name: size for name, size in REAL.items() if not how.quick or size[1] == 8}
    systems = [
        Child(name, "benchmarks.gangs.microbatches", list(cases), system=name, sizes=cases)
        for name in (CAPTURED, WRITTEN, CALLS)
    ]
    measured = measure(systems, list(cases), rounds=how.rounds, budget=how.budget, seed=how.seed)
    least = ", ".join(f"{name}: {shortest(*size):.2f} s" for name, size in cases.items())
    notes = [f"Shortest: {least}.", "", "Simulated:", "", table()]
    title = "A plain loop over microbatches (emulated devices)"
    publish(Report("loops", title, "loop", measured, CAPTURED, notes=notes), how.folder)


if __name__ == "__main__":
    main()
