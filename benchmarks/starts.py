"""How long a lab of this machine takes to be there, and how much memory.

    python -m benchmarks.starts

From the first process to the last device, without the kernel's own imports.  *Copies*: workers
and device processes are copies of one process that has imported what they need, as on Linux;
*interpreters*: each is a Python of its own, as on macOS.  Memory that is shared counts once.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from unittest import mock

import psutil

from benchmarks.harness.command import arguments, settings
from benchmarks.harness.numbers import brief, spread
from benchmarks.harness.report import Report, markdown, publish
from benchmarks.harness.rounds import Timed, measure
from pathways_lab.runtime.cluster import worker_spec
from pathways_lab.runtime.cluster.embedded import start_cluster
from pathways_lab.runtime.cluster.lab_spec import Wishes

COPIES, INTERPRETERS = "copies", "interpreters"
HOSTS = (2, 4, 8)


class Starts:
    """Labs of islands of two hosts with two devices each, one after the other."""

    def __init__(self, name: str, hosts: tuple[int, ...]) -> None:
        self.name = name
        self.cases: Sequence[str] = tuple(f"{count} hosts" for count in hosts)
        self.memory: dict[str, list[int]] = defaultdict(list)

    def start(self) -> None:
        """Every round starts a lab of its own."""

    def round(self, case: str, units: int) -> Timed:
        taken = 0.0
        islands = int(case.split()[0]) // 2
        with mock.patch.object(worker_spec, "can_fork", return_value=self.name == COPIES):
            for _ in range(units):
                began = time.monotonic()
                with start_cluster(Wishes(islands, 2, 2, 64 << 20, "cpu")):
                    taken += time.monotonic() - began
                    processes = psutil.Process().children(recursive=True)
                    self.memory[case].append(sum(p.memory_full_info().pss for p in processes))
        return Timed(taken, units)

    def stop(self) -> None:
        """Every round ends its lab."""


def main() -> None:
    """Measure, print, publish."""
    chosen = arguments(__doc__, rounds=7, budget=0.1).parse_args()
    how = settings(chosen)
    systems = [Starts(name, HOSTS[: 1 if how.quick else None]) for name in (INTERPRETERS, COPIES)]
    measured = measure(
        systems, systems[0].cases, rounds=how.rounds, budget=how.budget, seed=how.seed
    )
    report = Report("starts", "Starts of a lab of one machine", "lab", measured, INTERPRETERS)
    rows = [("case", *(system.name for system in systems))]
    for case in systems[0].cases:
        middle = [spread([float(n) for n in system.memory[case]]).median for system in systems]
        report.facts[f"bytes, {case}"] = middle
        rows.append((case, *(f"{brief(value / 2**20)} MiB" for value in middle)))
    report.notes += ["", "Memory when all devices are there:", "", markdown(rows)]
    publish(report, how.folder)


if __name__ == "__main__":
    main()
