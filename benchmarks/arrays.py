"""Calls with many arrays, beside plain JAX in one process.

    python -m benchmarks.arrays [--arrays 1 16 64 256 1024] [--devices 1 4]

A training step takes and gives hundreds of arrays.  Here they are small, so that all that is
seen is what each array and each call cost: ``t = f(t)`` with a list of n arrays, donated, kept
and waited for, and ``x + 1`` on one array, on one device and on four of one host
(:mod:`benchmarks.gangs.pytrees`).  The systems take turns, and those whose turn it is not are
stopped.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gangs.pytrees import HOW, OPERATOR, case
from benchmarks.harness.child import Child
from benchmarks.harness.command import arguments, settings
from benchmarks.harness.report import Report, publish
from benchmarks.harness.rounds import measure

JAX, LAB, DOOR = "JAX, one process", "lab", "JAX through the door"
SYSTEMS = {JAX: "jax", LAB: "lab", DOOR: "door"}


def main(argv: Sequence[str] | None = None) -> None:
    """One table for each number of devices."""
    parser = arguments(__doc__, rounds=9, budget=0.3)
    parser.add_argument("--arrays", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    chosen = parser.parse_args(argv)
    how = settings(chosen)
    counts = [1, 16] if how.quick else chosen.arrays
    cases = [case(count, kind) for kind in HOW for count in counts] + list(OPERATOR)
    for devices in chosen.devices:
        systems = [
            Child(name, "benchmarks.gangs.pytrees", cases, system=system, devices=devices)
            for name, system in SYSTEMS.items()
            if name in chosen.systems
        ]
        measured = measure(systems, cases, rounds=how.rounds, budget=how.budget, seed=how.seed)
        title = f"calls with many arrays, {devices} device{'s' * (devices > 1)} of one host"
        report = Report(f"arrays-{devices}", title, "call", measured, JAX)
        publish(report, how.folder)


if __name__ == "__main__":
    main()
