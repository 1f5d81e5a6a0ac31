"""A large array to the devices of one host and back, beside one copy of the same bytes.

    python -m benchmarks.uploads [--megabytes 512] [--devices 1 4]

The systems take turns, and those whose turn it is not are stopped
(:mod:`benchmarks.gangs.copying`).
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gangs.copying import DOWN, UP
from benchmarks.harness.child import Child
from benchmarks.harness.command import arguments, settings
from benchmarks.harness.report import Report, publish
from benchmarks.harness.rounds import measure

COPY, JAX, LAB = "one copy", "JAX, one process", "lab"


def main(argv: Sequence[str] | None = None) -> None:
    """One table for each number of devices."""
    parser = arguments(__doc__, rounds=9, budget=0.5)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 4])
    chosen = parser.parse_args(argv)
    how = settings(chosen)
    megabytes = 8 if how.quick else chosen.megabytes
    for devices in chosen.devices:
        systems = [
            Child(
                name,
                "benchmarks.gangs.copying",
                (UP, DOWN),
                system=system,
                devices=devices,
                megabytes=megabytes,
            )
            for name, system in ((COPY, "copy"), (JAX, "jax"), (LAB, "lab"))
        ]
        measured = measure(systems, (UP, DOWN), rounds=how.rounds, budget=how.budget, seed=how.seed)
        title = f"{megabytes} MB, {devices} device{'s' * (devices > 1)} of one host"
        publish(Report(f"uploads-{devices}", title, "array", measured, COPY), how.folder)


if __name__ == "__main__":
    main()
