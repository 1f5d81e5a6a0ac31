"""The simulator against reality: measure its machine's figures, then predict other programs.

``python -m benchmarks.calibrate`` starts a lab on this machine and, in each of
several rounds,

* measures what single things cost (a run, a launch, a transfer, a computation),
  with the smallest programs that show them,
* runs *other* programs: pipelines, chains of runs over two islands, fans,
  competing clients, with emulated devices and with real computation.

Then it simulates these programs with the measured figures and compares the
makespans, from the first submission to the end of the last run, both taken from
timelines.  The figures are saved as JSON for ``Machine.calibrated``.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import pathways_lab as pw
from benchmarks.harness import machine as facts
from benchmarks.harness.command import Settings, arguments, settings
from benchmarks.harness.numbers import ratio, seconds
from benchmarks.harness.report import markdown
from pathways_lab.timeline.records import Event, Record, Span

HOLD = 5.0
"""Milliseconds of the emulated computation by which everything else is measured."""

BOUND = 0.15
"""How far a prediction may be off."""

LARGE = 8 << 20
"""Bytes of the transfer by which bandwidth is measured."""


# --- what happened on the real lab --------------------------------------------------------


def happened(lab: pw.Lab, work: Callable[[], Any]) -> list[Record]:
    """The records of *work*, once all of them are here."""
    before = lab.timeline.version
    jax.block_until_ready(work())
    until = time.monotonic() + 60
    while time.monotonic() < until:
        new = list(lab.timeline.since(before).records)
        began = {r.run for r in events(new, "submitted")}
        ended = {r.run for r in events(new, "finished")}
        launched = {(r.run, r.step, r.host) for r in events(new, "launched")}
        done = {(r.run, r.step, r.host) for r in gangs(new)}
        if began and began <= ended and launched and launched <= done:
            return new
        time.sleep(0.01)
    raise TimeoutError("the timeline did not become complete within a minute")


def events(records: Sequence[Record], kind: str) -> list[Event]:
    """The events of one kind."""
    return [r for r in records if isinstance(r, Event) and r.kind == kind]


def gangs(records: Sequence[Record]) -> list[Span]:
    """The computations, by their ends."""
    found = [r for r in records if isinstance(r, Span) and r.kind == "gang"]
    return sorted(found, key=lambda span: span.end)


def makespan(records: Sequence[Record]) -> float:
    """Seconds from the first submission to the end of the last run."""
    first = min(r.time for r in events(records, "submitted"))
    return max(r.time for r in events(records, "finished")) - first


def pace(records: Sequence[Record]) -> float:
    """Mean seconds from the end of one gang to the end of the next.

    The mean: what is rarely slow makes a whole program slow.
    """
    found = gangs(records)
    return (found[-1].end - found[0].end) / (len(found) - 1)


# --- programs -------------------------------------------------------------------------------


class Stages:
    """Slices and compiled functions of both kinds of program, each made once.

    pairs, singles, wholes: by island, slices of two devices, of one beside them, and
    of all; so it is clear which of them share devices, also in the simulator.
    """

    def __init__(self, lab: pw.Lab) -> None:
        self.lab = lab
        self.functions: dict[str, Any] = {}
        islands = [island.name for island in lab.islands]
        self.pairs = [lab.slice(2, island=name) for name in islands]
        self.singles = [[lab.slice(1, island=name) for _ in range(2)] for name in islands]
        self.wholes = [lab.slice(4, island=name) for name in islands]

    def hold(self, name: str, milliseconds: float, on: pw.Slice) -> Any:
        """An emulated computation."""
        if name not in self.functions:
            self.functions[name] = pw.jit(
                lambda x: pw.emulated(milliseconds)(x + 1), on=on, name=name
            )
        return self.functions[name]

    def compute(self, name: str, times: int, on: pw.Slice) -> Any:
        """A real computation: so many products of matrices."""

        def products(x: Any) -> Any:
            return jax.lax.fori_loop(0, times, lambda _, y: jnp.tanh(y @ x), x)

        if name not in self.functions:
            self.functions[name] = pw.jit(products, on=on, name=name)
        return self.functions[name]


def chained(name: str, *stages: Any) -> Any:
    """A program that calls functions one after the other."""

    def body(x: Any) -> Any:
        for stage in stages:
            x = stage(x)
        return x

    return pw.program(body, name=name)


@dataclass(frozen=True)
class Case:
    """One program and how it is used, on the lab and in the simulator.

    argument: of each run, or of the first one when results are fed back (*fed*).
    clients: how many use it at once.  timed: its functions, with their argument.
    """

    name: str
    program: Any
    argument: Any
    runs: int = 1
    fed: bool = False
    clients: int = 1
    timed: tuple[tuple[Any, Any], ...] = ()

    def work(self) -> list[Any]:
        """Use it, by one client."""
        made, value = [], self.argument
        for _ in range(self.runs):
            made.append(self.program(value))
            value = made[-1] if self.fed else self.argument
        return made[-1:] if self.fed else made


def cases(stages: Stages, other: Stages) -> list[Case]:
    """Programs that were not used for calibration."""
    hold, pairs, singles = stages.hold, stages.pairs, stages.singles
    small, matrix = jnp.ones((64,), jnp.float32), jnp.full((64, 64), 1e-3, jnp.float32)
    a, b = hold("a8", 8, pairs[0]), hold("b12", 12, pairs[1])
    source, join = hold("source4", 4, pairs[0]), hold("join6", 6, pairs[1])
    parts = [hold(f"part{n}", 15.0 + 5 * n, singles[n % 2][n // 2]) for n in range(4)]

    def pipeline(xs: Any) -> Any:
        return [b(a(x)) for x in xs]

    def fan(x: Any) -> Any:
        first = source(x)
        there = pw.device_put([part(first) for part in parts], pairs[1])
        return join(sum(there[1:], there[0]))

    back = chained(
        "back", hold("c3", 3, pairs[0]), hold("d7", 7, pairs[1]), hold("e5", 5, pairs[0])
    )
    tick = hold("tick", 1, pairs[0])
    ticks = chained("small", *[tick] * 200)
    both = [
        chained(
            f"of {name}", of.hold(f"{name}6", 6, of.wholes[0]), of.hold(f"{name}4", 4, of.wholes[1])
        )
        for name, of in (("m", stages), ("o", other))
    ]
    row, left, right = (
        stages.compute(name, 600, singles[island][0])
        for name, island in (("products", 0), ("left", 0), ("right", 1))
    )
    large = pw.device_put(jnp.ones((512, 512), jnp.float32), pairs[0])
    return [
        Case("pipeline of 24 over 2 islands", pw.program(pipeline), [small] * 24),
        Case("20 runs there and back, each fed to the next", back, small, 20, fed=True),
        Case("12 runs fanned out to 4 slices and joined", pw.program(fan), small, 12),
        Case("200 gangs of 1 ms", ticks, small, timed=((tick, small),)),
        Case("40 MB moved: 40 runs of a pipeline", chained("moved", a, b), large, 40),
        Case("2 clients compete for the devices", tuple(both), small, 40, clients=2),
        Case("20 real computations in a row", chained("row", *[row] * 20), matrix,
             timed=((row, matrix),)),
        Case("real pipeline of 20 over 2 islands", chained("real", left, right), matrix, 20,
             timed=((left, matrix), (right, matrix))),
    ]  # fmt: skip


# --- measuring single things -----------------------------------------------------------------


class Calibration:
    """Samples of every figure, one per round."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self.samples: dict[str, list[float]] = {}
        hold, pairs = stages.hold, stages.pairs
        self.near, self.far = hold("near", HOLD, pairs[0]), hold("far", HOLD, pairs[1])
        self.beside = hold("beside", HOLD, stages.singles[0][0])
        self.trivial = pw.jit(lambda x: x + 1, on=pairs[0], name="trivial")
        self.one = chained("one", self.near)
        self.row = chained("row of holds", *[self.near] * 20)
        self.ticks = chained("ticks", *[self.trivial] * 100)
        # By name: the programs, and how many bytes of each transfer come to the target's host.
        # The same computation on two islands: what is lost when both compute at once.
        self.sides = [
            chained(f"side {n}", *[stages.compute(f"side{n}", 600, single[1])] * 20)
            for n, single in enumerate(stages.singles)
        ]
        self.matrix = jnp.full((64, 64), 1e-3, jnp.float32)
        self.moves = {
            "dcn": (chained("over islands", *[self.near, self.far] * 20), 2),
            "local": (chained("inside", *[self.near, self.beside] * 10), 1.5),
        }
        # What the lab itself computes, by steps of one device that only wait.
        here, there = (
            hold(f"alone {n}", HOLD, single[0]) for n, single in enumerate(stages.singles)
        )
        self.single = chained("alone", here)
        self.there_and_back = chained("there and back", *[here, there] * 20)
        self.small = jnp.ones((64,), jnp.float32)
        self.large = jnp.ones((LARGE // 4,), jnp.float32)

    def add(self, name: str, value: float) -> None:
        """One more sample."""
        self.samples.setdefault(name, []).append(value)

    def measure(self) -> None:
        """One round."""
        lab, small = self.stages.lab, self.small
        hold = pace(happened(lab, lambda: self.row(small)))
        self.add("overhead", hold - HOLD / 1e3)
        launch = pace(happened(lab, lambda: self.ticks(small)))
        self.add("launch", launch)
        begins, ends = [], []
        for _ in range(15):
            new = happened(lab, lambda: self.one(small))
            (gang,) = gangs(new)
            begins.append(gang.end - events(new, "submitted")[0].time)
            ends.append(events(new, "finished")[0].time - gang.end)
        up = statistics.median(ends)
        self.add("control_latency", up)
        wake = statistics.median(begins) - up - launch - hold
        self.add("wake", max(wake, 0.0))
        burst = happened(lab, lambda: [self.one(small) for _ in range(30)])
        times = sorted(r.time for r in events(burst, "submitted"))
        self.add("submit", (times[-1] - times[0]) / (len(times) - 1))
        for name, (program, copies) in self.moves.items():
            hops = [
                pace(happened(lab, functools.partial(program, value))) - hold
                for value in (small, self.large)
            ]
            self.add(f"{name}_latency", max(hops[0] - max(wake, 0.0) - launch, 0.0))
            self.add(name, copies * LARGE / max(hops[1] - hops[0], 1e-6))

        # 40 gangs and 39 transfers, each of which is a step on both hosts.
        step = self._work(lambda: self.there_and_back(small)) / 118
        self.add("step_work", step)
        runs = self._work(lambda: [self.single(small) for _ in range(30)])
        self.add("run_work", max(runs / 30 - step, 0.0))
        self.add("cores", self._cores())

    def _work(self, use: Callable[[], Any]) -> float:
        """The processor time that all processes of the lab spend on it."""
        lab = self.stages.lab
        assert lab.embedded is not None
        processes = [os.getpid(), *(pid for pids in lab.embedded.pids.values() for pid in pids)]
        before = facts.processor_seconds(processes)
        jax.block_until_ready(use())
        return facts.processor_seconds(processes) - before

    def _cores(self) -> float:
        """How many computations at once are as much as one after the other."""
        lab, sides = self.stages.lab, self.sides
        alone = [pace(happened(lab, functools.partial(side, self.matrix))) for side in sides]
        both = happened(lab, lambda: [side(self.matrix) for side in sides])
        paces = [pace([r for r in gangs(both) if r.node == f"side{n}"]) for n in range(2)]
        return sum(lone / together for lone, together in zip(alone, paces, strict=True))

    def seconds(self, function: Any, argument: Any) -> float:
        """What a computation takes where nothing else runs."""
        alone = chained(f"{function.name} alone", *[function] * 20)
        return pace(happened(self.stages.lab, lambda: alone(argument)))

    def figure(self, name: str, number: int | None = None) -> float:
        """Of one round, or the median of all."""
        samples = self.samples[name]
        return statistics.median(samples) if number is None else samples[number]

    def costs(self, number: int | None = None) -> dict[str, float]:
        """For ``Machine.calibrated``: of one round, or the medians of all."""
        names = ("submit", "control_latency", "wake", "launch", "local", "local_latency", "dcn",
                 "dcn_latency", "run_work", "step_work")  # fmt: skip
        return {**{name: self.figure(name, number) for name in names}, "jitter": 0.0}


# --- both ---------------------------------------------------------------------------------------


def real(case: Case, lab: pw.Lab) -> float:
    """The makespan on the lab."""
    if case.clients == 1:
        return makespan(happened(lab, case.work))
    mine, theirs = case.program

    def both() -> list[Any]:
        made = []
        for _ in range(case.runs):
            made += [mine(case.argument), theirs(case.argument)]
        return made

    return makespan(happened(lab, both))


def simulated(case: Case, machine: pw.Machine, known: Calibration, number: int) -> float:
    """The makespan in the simulator, with the figures of one round."""
    programs = case.program if case.clients > 1 else (case.program,)
    loads, times = [], {}
    for client, program in enumerate(programs):
        captured = program.capture(case.argument)
        loads.append(
            pw.Load(
                captured,
                f"kernel-{client}",
                case.runs,
                case.runs,
                feeds={0: 0} if case.fed else {},
            )
        )
        for code, _ in captured.prepared.functions:
            if f"seconds of {code.name}" in known.samples:
                times[code.name] = known.figure(f"seconds of {code.name}", number)
            elif code.held:
                times[code.name] = code.held + known.figure("overhead", number)
            else:
                times[code.name] = known.figure("launch", number)  # as short as any
    cores = known.figure("cores", number)
    measured = replace(machine.calibrated(known.costs(number)), cores=cores)
    return pw.simulate(loads, measured, times=times).seconds


def run(how: Settings, only: Sequence[str] = ()) -> dict[str, Any]:
    """Measure, simulate, compare.  only: cases whose name begins like one of these."""
    began, before = facts.now(), facts.load()
    with tempfile.TemporaryDirectory() as folder, pw.start(2, 1, 4, progress=False) as lab:
        lab.invite(Path(folder) / "lab")
        other = pw.connect(Path(folder) / "lab")
        stages = Stages(lab)
        known = Calibration(stages)
        tried = [
            case
            for case in cases(stages, Stages(other))
            if not only or case.name.startswith(tuple(only))
        ]
        times: dict[str, list[float]] = {case.name: [] for case in tried}
        for number in range(how.rounds + 1):
            known.measure()
            for case in tried:
                # Before and after, because what else the machine computes changes in seconds.
                took = [known.seconds(*timed) for timed in case.timed]
                times[case.name].append(real(case, lab))
                for (function, argument), first in zip(case.timed, took, strict=True):
                    both = first + known.seconds(function, argument)
                    known.add(f"seconds of {function.name}", both / 2)
            if not number:  # the round in which everything is compiled
                known.samples.clear()
                for samples in times.values():
                    samples.clear()
        machine, rows = pw.Machine.like(lab), []
        for case in tried:
            # Round by round: what was predicted and what it was predicted from were near in time.
            said = [simulated(case, machine, known, number) for number in range(how.rounds)]
            rows.append((case.name, times[case.name], said, ratio(said, times[case.name])))
        other.close()
    return {
        "benchmark": "calibrate",
        "command": facts.command(),
        "began": began,
        "machine": facts.machine(),
        "load": {"before": before, "after": facts.load()},
        "costs": known.costs(),
        "samples": known.samples,
        "cases": {
            name: {"real": samples, "simulated": said, "ratio": off.value}
            for name, samples, said, off in rows
        },
        "table": table(rows),
    }


def table(rows: Sequence[tuple[str, list[float], list[float], Any]]) -> str:
    """Real and simulated makespans, in Markdown."""
    lines = [
        ("program", "real, median", "least .. most", "simulated, median", "simulated / real", "")
    ]
    for name, samples, said, off in rows:
        lines.append(
            (
                name, seconds(statistics.median(samples)),
                f"{seconds(min(samples))} .. {seconds(max(samples))}",
                seconds(statistics.median(said)),
                str(off), "within 15 %" if abs(off.value - 1) <= BOUND else "**off**",
            )
        )  # fmt: skip
    return markdown(lines)


def main() -> None:
    """Parse, measure, save, print."""
    parser = arguments(__doc__, rounds=7)
    parser.add_argument("--only", nargs="+", default=[], help="how names of programs begin")
    chosen = parser.parse_args()
    how = settings(chosen)
    found = run(how, chosen.only)
    shown = found.pop("table")
    how.folder.mkdir(parents=True, exist_ok=True)
    (how.folder / "calibrate.json").write_text(json.dumps(found, indent=1) + "\n")
    print(shown)
    for name, value in found["costs"].items():
        print(f"  {name}: {value:.4g}")
    print(f"load {found['load']}, {found['began']}; saved in {how.folder.name}/calibrate.json")


if __name__ == "__main__":
    main()
