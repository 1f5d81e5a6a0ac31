"""Pipelines (the paper's Figure 7): parallel against sequential dispatch, and what a hop costs.

    python -m benchmarks.pipeline --peers-python PATH

A run goes through S stages, each on a device of another host than the one before
(four hosts with four emulated devices each), one run after the other.  With
parallel dispatch the hosts' work for all stages happens at once, before there
are data; with sequential dispatch a stage is granted when the one before it has
ended.  A stage holds its device for a given time; 0 ms is a computation shorter
than any work of a host.

The cost of a hop is compared with Ray's Compiled Graph on two hosts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.gangs.hops import CASE
from benchmarks.harness.child import Child
from benchmarks.harness.command import arguments, settings
from benchmarks.harness.figure import curves
from benchmarks.harness.numbers import Ratio, ratio, spread
from benchmarks.harness.report import (
    Claim,
    Report,
    Verdict,
    judged,
    markdown,
    matrix,
    publish,
    verdict_table,
)
from benchmarks.harness.rounds import Measured, Timed, measure

HOSTS, DEVICES = 4, 4
STAGES = (2, 4, 8, 16)
LENGTHS = (0.0, 0.5, 2.0)
"""Milliseconds for which a stage holds its device."""

PARALLEL, SEQUENTIAL = "parallel", "sequential"
OURS, RAY = "Pathways Lab", "Ray Compiled Graph"


def name_of(stages: int, ms: float) -> str:
    """The case of a pipeline."""
    return f"{stages} stages of {ms:g} ms"


class Dispatch:
    """One way of dispatching the same pipelines in one lab.

    pipelines: makes the program of (stages, ms) for this way.  Unit: one stage.
    """

    def __init__(
        self, name: str, pipeline: Callable[[int, float, str], Any], zero: Any,
        cases: Sequence[tuple[int, float]],
    ) -> None:  # fmt: skip
        self.name = name
        self._of = {name_of(*case): case for case in cases}
        self.cases: Sequence[str] = tuple(self._of)
        self._pipeline, self._zero = pipeline, zero
        self._programs: dict[str, Any] = {}

    def start(self) -> None:
        """Make the programs."""
        for case, (stages, ms) in self._of.items():
            self._programs[case] = self._pipeline(stages, ms, self.name)

    def round(self, case: str, units: int) -> Timed:
        """Runs one after the other, at least *units* stages in all."""
        import jax

        program, stages = self._programs[case], self._of[case][0]
        runs = -(-units // stages)
        begun = time.perf_counter()
        for _ in range(runs):
            jax.block_until_ready(program(self._zero))
        return Timed(time.perf_counter() - begun, runs * stages)

    def stop(self) -> None:
        """The lab ends later."""


def ways(lab: Any, cases: Sequence[tuple[int, float]]) -> list[Dispatch]:
    """Both ways of dispatching, on slices of one device, neighbours on different hosts."""
    import numpy as np

    import pathways_lab as pw

    names = [island.name for island in lab.islands]
    places = [
        lab.slice(shape=(1,), axes=("x",), island=names[number % len(names)])
        for number in range(max(stages for stages, _ in cases))
    ]

    def pipeline(stages: int, ms: float, dispatch: str) -> Any:
        hold = pw.emulated(ms)
        compiled = [pw.jit(lambda v: hold(v + 1), on=place) for place in places[:stages]]

        def through(value: Any) -> Any:
            for stage in compiled:
                value = stage(value)
            return value

        return pw.program(through, dispatch=dispatch)

    zero = pw.device_put(np.zeros(1, np.float32), places[0])
    return [Dispatch(way, pipeline, zero, cases) for way in (PARALLEL, SEQUENTIAL)]


def hops(peers: str) -> list[Child]:
    """A hop, here and there."""
    return [
        Child(OURS, "benchmarks.gangs.hops", (CASE,), framework="ours"),
        Child(RAY, "benchmarks.gangs.hops", (CASE,), peers, framework="ray"),
    ]


def factors(
    measured: Measured, cases: Sequence[tuple[int, float]]
) -> dict[tuple[int, float], Ratio]:
    """How many times as long a run takes with sequential dispatch; without cases that failed."""
    found = {}
    for stages, ms in cases:
        slow = measured.of(name_of(stages, ms), SEQUENTIAL)
        fast = measured.of(name_of(stages, ms), PARALLEL)
        if slow and fast:
            found[stages, ms] = ratio(slow, fast)
    return found


def factor_table(found: Mapping[tuple[int, float], Ratio]) -> str:
    """Stages down, lengths across."""
    lengths = sorted({ms for _, ms in found})
    rows = [("stages", *(f"{ms:g} ms" for ms in lengths))]
    for stages in sorted({stages for stages, _ in found}):
        cells = (found.get((stages, ms)) for ms in lengths)
        rows.append((str(stages), *(f"{cell} x" if cell else "-" for cell in cells)))
    return markdown(rows)


def never_slower(found: Mapping[tuple[int, float], Ratio]) -> list[Verdict]:
    """Whether parallel dispatch gains, or costs nothing, everywhere."""
    if not found:
        return []
    (stages, ms), least = min(found.items(), key=lambda item: item[1].value)
    text = f"{least} x at least: {stages} stages of {ms:g} ms"
    return [Verdict("parallel dispatch: sequential", "at least 1 x", text, least.value >= 1)]


def main() -> None:
    """Measure both, print, publish."""
    import pathways_lab as pw

    parser = arguments(__doc__, rounds=7, budget=0.2)
    parser.add_argument("--peers-python", default=sys.executable, help="an interpreter with Ray")
    chosen = parser.parse_args()
    how = settings(chosen)
    stages, islands = ((2,), 2) if how.quick else (STAGES, HOSTS)
    cases = [(s, ms) for ms in LENGTHS for s in stages]
    with pw.start(islands, 1, DEVICES, progress=False) as lab:
        measured = measure(
            ways(lab, cases), [name_of(*case) for case in cases],
            rounds=how.rounds, budget=how.budget, seed=how.seed,
        )  # fmt: skip
    hop = measure(
        hops(chosen.peers_python), [CASE], rounds=how.rounds, budget=how.budget, seed=how.seed
    )
    lines = {
        f"{way}, {ms:g} ms": [
            (float(s), 1e3 * s * spread(measured.of(name_of(s, ms), way)).median)
            for s in stages
            if measured.of(name_of(s, ms), way)
        ]
        for ms in LENGTHS
        for way in (PARALLEL, SEQUENTIAL)
    }
    twice = Claim("hop: Ray Compiled Graph", (CASE, RAY), (CASE, OURS), 2.0)
    tables = []
    for ms in LENGTHS:
        heads = {name_of(s, ms): f"{s} stages" for s in stages}
        tables += [f"Time per stage, stages of {ms:g} ms:", "", matrix(measured, heads), ""]
    found = factors(measured, cases)
    verdicts = [*never_slower(found), *judged([twice], hop)]
    text = [
        *tables, "Sequential over parallel dispatch, time of a run:", "", factor_table(found),
        "", matrix(hop, {CASE: CASE}), "", verdict_table(verdicts), "",
        *(f"Without {name}: {why}." for name, why in (measured.missing | hop.missing).items()),
    ]  # fmt: skip
    measured.times |= hop.times
    measured.missing |= hop.missing
    title = "Pipelines: parallel and sequential dispatch (emulated devices)"
    report = Report("pipeline", title, "stage", measured, PARALLEL, verdicts=verdicts)
    drawn = {name: line for name, line in lines.items() if line}
    publish(
        report, how.folder, "\n".join(text), curves(title, drawn, "stages", "time of a run in ms")
    )


if __name__ == "__main__":
    main()
