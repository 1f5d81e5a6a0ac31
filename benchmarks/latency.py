"""From a call to its launch and to its answer, while the kernel has other things to do.

    python -m benchmarks.latency

The calls are of one small compiled function, each on the result of the last.
*Launch* is the moment at which the device process hands the gang to its devices,
read from the timeline; *ready* is when the kernel knows that the value is there;
*value* is when it has the value.  The kernels: one that only calls, and waits for each; two
in which another thread computes in Python or plots with Bokeh all the time, and which wait for each
too; and some whose cell goes on after each call itself, to do the same, and waits for none.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.harness.command import arguments, settings
from benchmarks.harness.numbers import seconds, spread
from benchmarks.harness.report import Report, Verdict, publish, verdict_table
from benchmarks.harness.rounds import Timed, measure
from pathways_lab.timeline.records import Event

LAUNCH, READY, VALUE = "call to launch", "call to ready", "call to value"
QUIET = "the kernel only calls"
LIMIT = 0.3e-3
"""Seconds from a call to its launch that are wanted, whatever else the kernel does."""


def compute(numbers: int = 10_000) -> None:
    """Some Python without a pause, a third of a millisecond."""
    sum(i * i for i in range(numbers))


def plot() -> None:
    """One Bokeh figure as JSON."""
    from bokeh.embed import json_item
    from bokeh.plotting import figure

    drawn = figure(width=300, height=200)
    drawn.line(list(range(200)), [i * i % 37 for i in range(200)])
    json_item(drawn)


class Kernel:
    """Calls beside a thread that does *beside* all the time."""

    cases: Sequence[str] = (LAUNCH, READY, VALUE)

    def __init__(self, name: str, lab: Any, beside: Callable[[], None] | None) -> None:
        self.name = name
        self._lab = lab
        self._beside = beside

    def start(self) -> None:
        import pathways_lab as pw

        place = self._lab.slice(1)
        self._step = pw.jit(lambda x: x + 1, on=place)
        self._handle = self._step(np.float32(0))
        self._handle.result()

    def round(self, case: str, units: int) -> Timed:
        over = threading.Event()
        beside = threading.Thread(target=self._work, args=(over,))
        if self._beside is not None:
            beside.start()
        try:
            return Timed(self._calls(case, units), units)
        finally:
            over.set()
            if self._beside is not None:
                beside.join()

    def stop(self) -> None:
        """The lab ends later."""

    def _work(self, over: threading.Event) -> None:
        assert self._beside is not None
        while not over.is_set():
            self._beside()

    def _calls(self, case: str, units: int) -> float:
        handle = self._handle
        called: list[float] = []
        ended: list[float] = []
        for _ in range(units):
            called.append(self._lab.timeline.clock())
            handle = self._step(handle)
            if case == VALUE:
                handle.result()
            else:
                handle.block_until_ready()
            ended.append(self._lab.timeline.clock())
        self._handle = handle
        return sum(ended if case != LAUNCH else self._launches(called[0], units)) - sum(called)

    def _launches(self, since: float, units: int) -> list[float]:
        """When the gangs of so many calls were launched, which are launched in order."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            launched = [
                record.time
                for record in self._lab.timeline.records
                if isinstance(record, Event) and record.kind == "launched" and record.time > since
            ]
            if len(launched) == units:
                return launched
            time.sleep(0.01)
        raise TimeoutError("the timeline does not have all launches")


class Cell(Kernel):
    """Calls after each of which the same cell does *beside*, and waits for nothing."""

    cases = (LAUNCH,)

    def round(self, case: str, units: int) -> Timed:
        assert self._beside is not None
        handle = self._handle
        called: list[float] = []
        for _ in range(units):
            called.append(self._lab.timeline.clock())
            handle = self._step(handle)
            self._beside()
        self._handle = handle.block_until_ready()
        return Timed(sum(self._launches(called[0], units)) - sum(called), units)


def main() -> None:
    """Measure, print, publish."""
    import pathways_lab as pw

    chosen = arguments(__doc__, rounds=15, budget=0.1).parse_args()
    how = settings(chosen)
    with pw.start(islands=1, hosts_per_island=1, devices_per_host=1, progress=False) as lab:
        systems = [
            Kernel(QUIET, lab, None),
            Cell("the cell computes on, little", lab, compute),
            Cell("the cell computes on, more", lab, functools.partial(compute, 30_000)),
            Cell("the cell plots on", lab, plot),
            Kernel("another thread computes", lab, compute),
            Kernel("another thread plots", lab, plot),
        ]
        interval = sys.getswitchinterval()
        measured = measure(
            systems, (LAUNCH, READY, VALUE), rounds=how.rounds, budget=how.budget, seed=how.seed
        )
    report = Report("latency", "From a call to its launch, and back", "call", measured, QUIET)
    report.facts["switch interval"] = interval
    for system in systems:
        samples = measured.of(LAUNCH, system.name)
        if samples:
            middle = spread(samples).median
            report.verdicts.append(
                Verdict(f"launch when {system.name}", f"below {seconds(LIMIT)}",
                        seconds(middle), middle < LIMIT)
            )  # fmt: skip
    report.notes += ["", verdict_table(report.verdicts)]
    publish(report, how.folder)


if __name__ == "__main__":
    main()
