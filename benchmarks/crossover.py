"""Crossover (the paper's Figure 6): from which length on is one controller as fast as many?

    python -m benchmarks.crossover

A computation holds one device of every host for a given time (an emulated
accelerator: no core is used) and ends with a scalar AllReduce and an addition.
Multi-controller JAX runs it in a loop on every host, in the very same processes
of the same lab; ours is called from here, each call depending on the last.  The
*crossover* is the shortest computation at which ours reaches 97% of the
throughput of multi-controller JAX.

Machines of up to 512 hosts are **simulated**, with costs measured in the same
run: CPU seconds of the client per call, of the control plane per run and for each
host (:mod:`benchmarks.fanout`: the real one, with hosts that only talk), and of a
host per gang.  Each cost is also halved and raised by half, to see which of them decide.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil

from benchmarks.fanout import Line, line
from benchmarks.fanout import measured as fanout
from benchmarks.gangs.work import ALLREDUCE, computation, repeated
from benchmarks.harness.command import Settings, arguments, settings
from benchmarks.harness.figure import curves
from benchmarks.harness.numbers import brief, ratio, seconds
from benchmarks.harness.report import Report, Verdict, grid, markdown, publish, verdict_table
from benchmarks.harness.rounds import Measured, Timed, busy_cores, measure
from pathways_lab.sim.machine import Costs, FunctionCost, Machine
from pathways_lab.sim.simulate import Load, chain, simulate
from pathways_lab.timeline.records import Span

LEVEL = 0.97
LENGTHS = (0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0)
"""Milliseconds for which a computation holds its devices."""

NODES = 32
JAX, CALLS, CHAINED = "multi-controller JAX", "OpByOp", f"Chained {NODES}"
PAPER = {16: 2.3e-3, 512: 35e-3}
"""Hosts -> seconds: what the paper found on real accelerators."""
WANTED = {4: 0.5e-3}
"""Real hosts -> seconds: what is wanted of them."""


def crossing(points: Sequence[tuple[float, float]], level: float = LEVEL) -> float | None:
    """Where (length, share) points reach *level* for good; None when they do not.

    Between the last point below and the next, the share is taken to grow evenly
    with the logarithm of the length.  Always above: the shortest length.
    """
    ordered = sorted(points)
    below = [n for n, (_, share) in enumerate(ordered) if share < level]
    if not below:
        return ordered[0][0] if ordered else None
    last = below[-1]
    if last + 1 == len(ordered):
        return None
    (left, low), (right, high) = ordered[last], ordered[last + 1]
    part = (level - low) / (high - low)
    return math.exp(math.log(left) + part * (math.log(right) - math.log(left)))


# --- for real --------------------------------------------------------------------------------


@dataclass
class Way:
    """A way of running the computation in one lab.

    loop: case -> (value, calls) -> the value after so many calls, not waited for.
    each: computations per call.  less: so many calls, timed apart, are subtracted.
    """

    name: str
    loop: Mapping[str, Callable[[Any, int], Any]]
    zero: Any
    each: int = 1
    less: int = 0

    def __post_init__(self) -> None:
        self.cases: Sequence[str] = tuple(self.loop)
        self._seen: set[tuple[str, int]] = set()

    def start(self) -> None:
        """The lab runs already."""

    def round(self, case: str, units: int) -> Timed:
        """At least *units* computations, each depending on the last."""
        calls = -(-units // self.each)
        taken = self._seconds(case, calls + self.less)
        if self.less:
            taken -= self._seconds(case, self.less)
        return Timed(max(taken, 1e-9), calls * self.each)

    def _seconds(self, case: str, calls: int) -> float:
        import jax

        if self.less and (case, calls) not in self._seen:
            # A loop of another length is another program, prepared at its first use.
            self._seen.add((case, calls))
            jax.block_until_ready(self.loop[case](self.zero, calls))
        begun = time.perf_counter()
        jax.block_until_ready(self.loop[case](self.zero, calls))
        return time.perf_counter() - begun

    def stop(self) -> None:
        """The lab ends later."""


class Stage:
    """One slice over the first island of a lab, leased, and what runs on it.

    lengths: of computations in milliseconds.
    """

    def __init__(self, lab: Any, lengths: Sequence[float]) -> None:
        import numpy as np
        from jax.sharding import NamedSharding, PartitionSpec

        import pathways_lab as pw

        self.lab, self.lengths = lab, lengths
        devices = lab.islands[0].devices
        self.place = lab.slice(shape=(devices,), axes=("x",), island=lab.islands[0].name)
        spread = NamedSharding(self.place.mesh, PartitionSpec("x"))
        self.zero = pw.device_put(np.zeros(devices, np.float32), spread)

    def function(self, ms: float) -> Any:
        """The compiled computation of one length."""
        import jax
        from jax.sharding import PartitionSpec

        import pathways_lab as pw

        hold, reduce, spread = pw.emulated(ms), computation(ALLREDUCE), PartitionSpec("x")
        part = jax.shard_map(
            lambda value: reduce(hold(value)),
            mesh=self.place.mesh, in_specs=spread, out_specs=spread,
        )  # fmt: skip
        return pw.jit(part, on=self.place, in_shardings=spread, out_shardings=spread)

    def ways(self) -> list[Way]:
        """The same computations in three ways."""
        import pathways_lab as pw

        one = {name_of(ms): self.function(ms) for ms in self.lengths}
        many = {case: pw.program(repeated(f, NODES)) for case, f in one.items()}

        def called(function: Any) -> Callable[[Any, int], Any]:
            return lambda value, calls: repeated(function, calls)(value)

        def looped(function: Any) -> Callable[[Any, int], Any]:
            return lambda value, steps: self.lab.multi_controller(
                function, value, steps=steps, records=False
            )

        return [
            # The controller starts the hosts' loops and hears of their end: that is no part
            # of multi-controller JAX, so the time of a loop of one step is subtracted.
            Way(JAX, {case: looped(f) for case, f in one.items()}, self.zero, less=1),
            Way(CALLS, {case: called(f) for case, f in one.items()}, self.zero),
            Way(CHAINED, {case: called(f) for case, f in many.items()}, self.zero, NODES),
        ]


def name_of(ms: float) -> str:
    """The case of a length."""
    return f"{ms:g} ms"


def shares(measured: Measured, lengths: Sequence[float], way: str) -> list[tuple[float, float]]:
    """(seconds of the computation, throughput as a share of multi-controller JAX's)."""
    found = []
    for ms in lengths:
        theirs, ours = measured.of(name_of(ms), JAX), measured.of(name_of(ms), way)
        if theirs and ours:
            found.append((ms / 1e3, ratio(theirs, ours).value))
    return found


# --- what everything costs -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Constants:
    """CPU seconds: of the client per call; of the control plane per run, and more for each
    host; of a host per gang that it is granted, and per step of a loop of its own (jax).
    latency: one way between two processes (assumed: a network)."""

    client: float
    control: float
    control_per_host: float
    host: float
    jax: float
    latency: float = 50e-6


def process_seconds(pids: Sequence[int]) -> float:
    """CPU seconds that processes have used."""
    used = [psutil.Process(pid).cpu_times() for pid in pids]
    return float(sum(times.user + times.system for times in used))


def costs_per_run(stage: Stage, runs: int) -> tuple[float, float, float]:
    """CPU seconds per run of one gang: of the client's thread, and of each host; and of
    each host per step of a loop of its own."""
    import jax

    assert stage.lab.embedded is not None
    hosts = stage.lab.embedded.pids["devices"]
    function = stage.function(0.0)
    value = jax.block_until_ready(function(stage.zero))
    before = process_seconds(hosts), time.thread_time()
    for _ in range(runs):
        value = function(value)
    jax.block_until_ready(value)
    after = process_seconds(hosts), time.thread_time()
    of_hosts, of_client = ((end - begin) / runs for begin, end in zip(before, after, strict=True))
    before_loop = 0.0
    for _ in range(2):  # the first prepares it
        before_loop = process_seconds(hosts)
        loop = stage.lab.multi_controller(function, stage.zero, steps=runs, records=False)
        jax.block_until_ready(loop)
    of_loop = (process_seconds(hosts) - before_loop) / runs
    return of_client, of_hosts / len(hosts), of_loop / len(hosts)


def fitted(found: Iterable[tuple[float, float, float]], control: Line) -> Constants:
    """The constants behind what :func:`costs_per_run` found on some numbers of hosts: of
    each the dearest."""
    client, host, jax = map(max, zip(*found, strict=True))
    return Constants(client, control.base, control.per_host, host, jax)


def control_line(how: Settings) -> Line:
    """What a run costs the control plane, over hosts."""
    costs = [
        (float(n), statistics.median(fanout(n, 1, how.rounds, how.budget)))
        for n in (CROWDS[:2] if how.quick else CROWDS)
    ]
    return line(costs)


# --- simulated -------------------------------------------------------------------------------

CROWDS = (4, 64, 256)
"""Hosts that only talk, for what a run costs the control plane."""

RUNS = 16
"""Simulated calls, each depending on the last, all but the first in flight at once."""

PER_HOST = 4
"""Devices of a simulated host, as in the paper's configuration A."""


def period(hosts: int, length: float, costs: Costs) -> float:
    """Simulated seconds per computation of *length* on *hosts* hosts, in the steady state."""
    machine = Machine(
        islands=1, hosts_per_island=hosts, devices_per_host=PER_HOST, costs=costs,
        default=FunctionCost(seconds=length),
    )  # fmt: skip
    program = chain("computation", hosts * PER_HOST, ["step"])
    load = Load(program, runs=RUNS, flight=RUNS, warm=True, feeds={0: 0})
    result = simulate(load, machine)
    ends = sorted(
        record.end
        for record in result.records
        if isinstance(record, Span) and record.kind == "gang" and record.host == "island0/host0"
    )
    return (ends[-1] - ends[len(ends) // 4]) / (len(ends) - 1 - len(ends) // 4)


def simulated_crossing(
    hosts: int, constants: Constants, around: float = 0.0, spread: float = 4.0, steps: int = 6
) -> float:
    """The shortest length at which one controller reaches the level, by bisection.

    around, spread: it is looked for between a spread-th and *spread* times of that
    (0: of the dearest cost).  Many controllers need no simulation: their hosts
    only call JAX, so a step takes the computation or the call, whichever is longer.
    """
    # A run means two events for the control plane: the run, and the drop of what it replaced.
    control = (constants.control + constants.control_per_host * hosts) / 2
    costs = Costs(
        submit=constants.client, control_latency=constants.latency, decision=control,
        hearing=0.0, launch=constants.host, jitter=0.0,
    )  # fmt: skip
    middle = around or max(constants.client, 2 * control, constants.host)
    low, high = middle / spread, middle * spread
    for _ in range(steps):
        length = math.sqrt(low * high)
        if max(length, constants.jax) / period(hosts, length, costs) >= LEVEL:
            high = length
        else:
            low = length
    return high


def varied(
    hosts: int, constants: Constants, base: float, share: float = 0.5
) -> dict[str, tuple[float, float]]:
    """Constant -> the crossing with that share less of it, and with that share more.

    base: the crossing with the constants as they are.
    """

    def at(name: str, factor: float) -> float:
        other = replace(constants, **{name: getattr(constants, name) * factor})
        return simulated_crossing(hosts, other, base, spread=2.2, steps=4)

    return {name: (at(name, 1 - share), at(name, 1 + share)) for name in asdict(constants)}


# --- the command -----------------------------------------------------------------------------


def real(
    hosts: int, lengths: Sequence[float], how: Settings
) -> tuple[Measured, dict[str, float | None], tuple[float, float, float]]:
    """All ways in one lab: the samples, the crossing of each way in seconds, the costs."""
    import pathways_lab as pw

    with pw.start(1, hosts, 1, progress=False) as lab, lab.lease("island0"):
        stage, cases = Stage(lab, lengths), [name_of(ms) for ms in lengths]
        measured = measure(stage.ways(), cases, rounds=how.rounds, budget=how.budget, seed=how.seed)
        costs = costs_per_run(stage, 20 if how.quick else 1000)
    found = {way: crossing(shares(measured, lengths, way)) for way in (CALLS, CHAINED)}
    return measured, found, costs


def said(value: float | None, lengths: Sequence[float]) -> str:
    """A crossing in words; *lengths* in milliseconds are those that were tried."""
    if value is None:
        return f"above {max(lengths):g} ms"
    return f"{'at most ' if value <= min(lengths) / 1e3 else ''}{seconds(value)}"


def verdicts(
    real: Mapping[int, Mapping[str, float | None]], simulated: Mapping[int, float]
) -> list[Verdict]:
    """Whether crossings are where they are wanted: hosts -> way -> seconds, hosts -> seconds."""

    def of(what: str, value: float | None, limit: float) -> Verdict:
        found = "none" if value is None else seconds(value)
        return Verdict(what, f"below {seconds(limit)}", found, value is not None and value < limit)

    return [
        *(
            of(f"crossover on {hosts} hosts, {way}", value, WANTED[hosts])
            for hosts in real.keys() & WANTED
            for way, value in real[hosts].items()
        ),
        *(
            of(f"crossover on {hosts} simulated hosts", simulated[hosts], limit)
            for hosts, limit in PAPER.items()
            if hosts in simulated
        ),
    ]


def simulation(constants: Constants, most: int) -> tuple[str, dict[str, Any]]:
    """The table of simulated machines, and its numbers."""
    rows = [("simulated hosts", "devices", "crossover", "paper (real accelerators)")]
    facts: dict[str, Any] = {"constants": asdict(constants), "crossover": {}, "varied": {}}
    hosts = 4
    while hosts <= most:
        found = facts["crossover"][hosts] = simulated_crossing(hosts, constants)
        paper = seconds(PAPER[hosts]) if hosts in PAPER else ""
        rows.append((str(hosts), str(hosts * PER_HOST), seconds(found), paper))
        hosts *= 2
    tables = [markdown(rows)]
    for hosts in [hosts for hosts in PAPER if hosts <= most]:
        base = facts["crossover"][hosts]
        head = (f"constant ({hosts} hosts)", "value", "at half of it", "at one and a half", "")
        table = [head]
        facts["varied"][hosts] = varied(hosts, constants, base)
        for name, (half, more) in facts["varied"][hosts].items():
            decides = "decides" if max(abs(half - base), abs(more - base)) > 0.15 * base else ""
            value = seconds(getattr(constants, name))
            table.append((name, value, seconds(half), seconds(more), decides))
        tables.append(markdown(table))
    return "\n\n".join(tables), facts


def main() -> None:
    """Measure on real hosts, then simulate more."""
    parser = arguments(__doc__, rounds=5, budget=0.3)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--most", type=int, default=512, help="simulated hosts at most")
    chosen = parser.parse_args()
    how = settings(chosen)
    lengths = LENGTHS[::5] if how.quick else LENGTHS
    everything, costs = Measured(), {}
    everything.busy = busy_cores(1.0)
    lines: dict[str, list[tuple[float, float]]] = {}
    rows = [("hosts", *(f"crossover, {way}" for way in (CALLS, CHAINED)))]
    facts: dict[str, Any] = {"crossover": {}}
    for hosts in chosen.hosts:
        measured, found, costs[hosts] = real(hosts, lengths, how)
        facts["crossover"][hosts] = found
        rows.append((str(hosts), *(said(value, lengths) for value in found.values())))
        for case, times in measured.times.items():
            everything.times[f"{hosts} hosts, {case}"] = times
        everything.missing |= measured.missing
        for way in found:
            line = [(1e3 * length, share) for length, share in shares(measured, lengths, way)]
            lines[f"{way}, {hosts} host{'s' * (hosts > 1)}"] = line
    constants = fitted(costs.values(), control_line(how))
    simulated, facts["simulated"] = simulation(constants, 8 if how.quick else chosen.most)
    title = f"Crossover: {brief(100 * LEVEL)}% of the throughput of multi-controller JAX"
    report = Report("crossover", title, "computation", everything, JAX, facts)
    report.verdicts = verdicts(facts["crossover"], facts["simulated"]["crossover"])
    text = [markdown(rows), ""]
    for hosts in chosen.hosts:
        heads = {f"{hosts} hosts, {name_of(ms)}": name_of(ms) for ms in lengths}
        text += [f"Time per computation on {hosts} hosts:", "", grid(everything, heads, JAX), ""]
    text += ["Simulated:", "", simulated, "", verdict_table(report.verdicts)]
    text += [f"Without {name}: {why}." for name, why in everything.missing.items()]
    picture = curves(title, lines, "length of the computation in ms", "share of throughput", LEVEL)
    publish(report, how.folder, "\n".join(text), picture)


if __name__ == "__main__":
    main()
