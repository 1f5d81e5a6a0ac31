"""A recorded run on a simulated machine that costs what the run's own machine cost.

Problem: "would a faster network help?" should be answered from what was measured, and not by
a second model of the machine.

How: the record of a run says which steps its program has, how long each computed, what each
transfer moved, and how long after its cause everything began.  So a plan is made of the steps, and
the costs of the machine are read off the run; the simulator does the rest.

Rule for maintainers: a cost is what the record shows, or the default; nothing is fitted to the time
that the whole run took, so an unchanged replay tells how good the others are.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.legality import last_uses
from pathways_lab.core.program.program import Call, Line, Plan, SliceId, Step, Transfer, Value
from pathways_lab.core.slices.topology import Owned
from pathways_lab.sim.machine import Costs, FunctionCost, Machine
from pathways_lab.sim.result import Simulated
from pathways_lab.sim.simulate import Load, simulate
from pathways_lab.timeline import queries
from pathways_lab.timeline.flow import Flow, Flows
from pathways_lab.timeline.machine import Lane, lanes_of
from pathways_lab.timeline.records import Event, Record, Span

ENDLESS = 1e15
"""Bytes per second where more bytes took no longer."""
ROOM = 1 << 50
"""Bytes of memory on a device: the record does not say when values are freed."""
LOCAL, ISLAND, DCN = "local", "island", "dcn"
"""How far a transfer goes."""


@dataclass(frozen=True, slots=True)
class Change:
    """A difference to the run as it was.

    dcn: how many times as fast the network between islands is.
    speed: by function or host, how many times as fast it computes.
    without: hosts that shall be no slower than the others.
    """

    dcn: float = 1.0
    speed: Mapping[str, float] = field(default_factory=dict)
    without: tuple[str, ...] = ()


UNCHANGED = Change()

Where = tuple[str, tuple[Owned, ...]]
"""A function by its name, and the devices on which it computes."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A run as its records have it.

    gangs, transfers: by step, a span for each host.  devices: of its slices.
    submitted: seconds.  granted: by step, when it got its place.  prepared: by step and host, when
        the host had read the message that grants it.  launches: seconds of the launch threads.
    hosts: by name, island, number of devices and bytes of each.
    """

    run: int
    program: str
    flow: Flow
    gangs: Mapping[int, Sequence[Span]]
    transfers: Mapping[int, Sequence[Span]]
    devices: Mapping[int, tuple[Owned, ...]]
    submitted: float
    granted: Mapping[int, float]
    prepared: Mapping[tuple[int, str], float]
    launches: Sequence[float]
    hosts: Mapping[str, tuple[str, int, int]]


def seen(records: Iterable[Record], run: int) -> Seen:
    """Read a run.  Raises KeyError where its program or its slices are not known."""
    flows = Flows()
    spans: dict[str, dict[int, list[Span]]] = {"gang": {}, "transfer": {}}
    devices: dict[int, tuple[Owned, ...]] = {}
    hosts: dict[str, tuple[str, int, int]] = {}
    submitted, program = float("inf"), ""
    granted: dict[int, float] = {}
    prepared: dict[tuple[int, str], float] = {}
    launches: list[float] = []
    for record in sorted(records, key=queries.time_of):
        flows.add(record)
        if isinstance(record, Event) and record.kind == "host-joined":
            size = int(record.args["devices"]), int(record.args["memory"])
            hosts[record.host] = record.island, *size
        elif isinstance(record, Event) and record.kind == "slice-bound":
            at = record.args["devices"]
            devices[int(record.args["slice"])] = tuple((host, number) for host, number in at)
        elif getattr(record, "run", 0) != run:
            continue
        elif isinstance(record, Event) and record.kind == "submitted":
            submitted, program = record.time, record.program
        elif isinstance(record, Event) and record.kind == "granted":
            granted[record.step] = record.time
        elif isinstance(record, Span) and record.kind in spans:
            spans[record.kind].setdefault(record.step, []).append(record)
            program = record.program
        elif isinstance(record, Span) and record.kind == "prepare":
            prepared[record.step, record.host] = record.end
        elif isinstance(record, Span) and record.kind == "launch":
            launches.append(record.end - record.start)
    flow = flows.run(run)
    missing = {stage.slice for stage in flow} - devices.keys()
    if not flow or missing:
        raise KeyError(
            f"run {run} cannot be replayed: its {'slices' if flow else 'program'} are not recorded"
        )
    gangs, transfers = spans["gang"], spans["transfer"]
    return Seen(
        run, program, flow, gangs, transfers, devices, submitted, granted, prepared, launches, hosts
    )


def lead(run: Seen, machine: Costs) -> float:
    """Seconds before the first gang of a run that the costs of a machine do not explain."""
    begun = min((s.start for spans in run.gangs.values() for s in spans), default=run.submitted)
    return max(0.0, begun - run.submitted - machine.control_latency - machine.wake - machine.launch)


def replay(run: Seen, change: Change = UNCHANGED) -> Simulated:
    """The run once more, with something changed."""
    functions = {
        _function(step): FunctionCost(seconds, collective=len(run.gangs[step]) > 1)
        for step, seconds in computing(run, change).items()
    }
    return _simulated(run, plan(run), run.devices, functions, change)


def another(
    run: Seen,
    plan: Plan,
    at: Mapping[SliceId, tuple[Owned, ...]],
    seconds: Mapping[Where, float],
    change: Change = UNCHANGED,
) -> Simulated:
    """Another plan on the machine of a run.

    at: devices of its slices.  seconds: of its functions; of one that was not measured there, as
        elsewhere, and of one that was nowhere, none.
    Its inputs are there before it begins.
    """
    anywhere = {name: took for (name, _), took in seconds.items()}
    functions = {}
    for step in plan.steps:
        if isinstance(node := step.node, Call):
            several = len({host for host, _ in at[node.slice]}) > 1
            took = seconds.get((node.name, at[node.slice]), anywhere.get(node.name, 0.0))
            cost = FunctionCost(took, collective=several)
            functions[node.function, node.slice] = cost
    # One function costs more on one slice than on another.
    keys = {key: f"{key[0]} on {key[1]}" for key in functions}
    values = list(plan.values)
    for given in plan.inputs:
        values[given] = replace(values[given], nbytes=1)
    steps = tuple(
        Step(replace(s.node, function=keys[s.node.function, s.node.slice]), s.frees)
        if isinstance(s.node, Call)
        else s
        for s in plan.steps
    )
    made = replace(plan, values=tuple(values), steps=steps)
    return _simulated(run, made, at, {keys[key]: cost for key, cost in functions.items()}, change)


def _simulated(
    run: Seen,
    plan: Plan,
    at: Mapping[SliceId, tuple[Owned, ...]],
    functions: Mapping[str, FunctionCost],
    change: Change,
) -> Simulated:
    machine, names = machine_of(run.hosts)
    machine = replace(machine, costs=_changed(costs(run), change), functions=functions)
    there = {s: tuple((names[h], d) for h, d in devices) for s, devices in at.items()}
    # Places are given as far ahead as functions are known to take: the second run counts.
    return simulate(Load(plan, at=there, runs=2, flight=1), machine)


def machine_of(hosts: Mapping[str, tuple[str, int, int]]) -> tuple[Machine, dict[str, str]]:
    """A machine of as many islands, hosts and devices, and its hosts' names by the given ones."""
    islands: dict[str, list[tuple[str, int]]] = {}
    for host, (island, devices, _) in hosts.items():
        islands.setdefault(island, []).append((host, devices))
    sizes = [(len(of), max(devices for _, devices in of)) for of in islands.values()]
    unlike = {
        f"island{number}": {"hosts_per_island": size[0], "devices_per_host": size[1]}
        for number, size in enumerate(sizes)
    }
    names = {
        host: f"island{i}/host{h}"
        for i, of in enumerate(islands.values())
        for h, (host, _) in enumerate(of)
    }
    return Machine(len(sizes), *max(sizes), memory=ROOM, unlike=unlike), names


# --- the steps ------------------------------------------------------------------------------


def plan(run: Seen) -> Plan:
    """The steps that ran, each with one result of as many bytes as were moved."""
    ran = run.gangs.keys() | run.transfers.keys()
    values: list[Value] = []
    nodes: list[Call | Transfer] = []
    made: dict[int, int] = {}
    inputs: list[int] = []

    def value(where: int, nbytes: int) -> int:
        layout = Layout((("x", len(run.devices[where])),), ((),))
        values.append(Value((max(nbytes, 1),), "uint8", where, layout, nbytes))
        return len(values) - 1

    for step, stage in enumerate(run.flow):
        if step not in ran:  # another branch was taken
            continue
        after = [made[a] for a in stage.after if a in made]
        line = _line(stage.line)
        moved = max((int(s.args.get("nbytes", 0)) for s in run.transfers.get(step, ())), default=0)
        if stage.transfer and not after:
            after = [value(_source(run, step), 1)]
            inputs += after
        result = made[step] = value(stage.slice, moved)
        if stage.transfer:
            nodes.append(Transfer(after[0], result, stage.node, line))
        else:
            nodes.append(
                Call(_function(step), stage.slice, tuple(after), (result,), (), stage.node, line)
            )
    read = {v for node in nodes for v in (node.inputs if isinstance(node, Call) else (node.input,))}
    outputs = tuple(v for v in made.values() if v not in read)
    freed = last_uses(tuple(nodes), outputs)
    steps = tuple(Step(node, tuple(freed.get(n, ()))) for n, node in enumerate(nodes))
    used = sorted({where for v in values if (where := v.slice) is not None})
    return Plan(
        f"replay of {run.run}",
        run.program,
        tuple(values),
        steps,
        tuple(inputs),
        outputs,
        tuple(used),
    )


def _source(run: Seen, step: int) -> int:
    """A slice from which a transfer may have come that moves an input of the run."""
    source = str(run.transfers[step][0].args.get("source", "")).split(", ")[0]
    there = run.flow[step].slice
    return next(
        (n for n, at in run.devices.items() if n != there and any(h == source for h, _ in at)),
        there,
    )


def _function(step: int) -> str:
    return f"step {step}"


def _line(text: str) -> Line:
    found = re.match(r"(.*?):(\d+): (.*)", text, re.DOTALL)
    return Line(found[1], int(found[2]), found[3]) if found else Line()


# --- the costs ------------------------------------------------------------------------------


def computing(run: Seen, change: Change) -> dict[int, float]:
    """By step, the seconds that it computes: those of its fastest host, which waits for nobody."""
    slow = {host: _slowness(run, host) for host in change.without}
    speed = change.speed
    between = _between(run)
    found = {}
    for step, spans in run.gangs.items():
        seconds = min(span.end - span.start for span in spans) + between
        hosts = {span.host for span in spans}
        seconds /= max(slow.get(host, 1.0) for host in hosts)
        factors = [speed[name] for name in (spans[0].node, *hosts) if name in speed]
        for factor in factors:
            seconds /= factor
        found[step] = seconds
    return found


def means(run: Seen, change: Change) -> dict[Where, float]:
    """The seconds that functions compute."""
    found: dict[Where, list[float]] = {}
    for step, seconds in computing(run, change).items():
        where = run.devices[run.flow[step].slice]
        found.setdefault((run.gangs[step][0].node, where), []).append(seconds)
    return {key: statistics.fmean(seconds) for key, seconds in found.items()}


def _slowness(run: Seen, host: str) -> float:
    """How many times as long a host takes as others do for the same functions.

    Raises ValueError where other hosts do not compute most of what it computes.
    """
    here: dict[str, list[float]] = {}
    there: dict[str, list[float]] = {}
    for spans in run.gangs.values():
        for span in spans:
            of = here if span.host == host else there
            of.setdefault(span.node, []).append(span.end - span.start)
    took, usual = 0.0, 0.0
    for name in here.keys() & there.keys():
        took += sum(here[name])
        usual += len(here[name]) * statistics.median(there[name])
    if took <= sum(sum(seconds) for seconds in here.values()) / 2:
        raise ValueError(
            f"without={host!r}: no other host computes what it computes, so nothing says how fast"
            f" it should be; say it yourself: speed={{{host!r}: 2.0}}"
        )
    return max(1.0, took / usual)


def costs(run: Seen) -> Costs:
    """The costs of everything but functions, as far as the run shows them."""
    known = Costs(jitter=0.0)
    idle = _mean(_gaps(run, waiting=True), known.wake + known.launch)
    launch = min(_mean(run.launches, known.launch), idle)
    found = replace(known, wake=idle - launch, launch=launch, control_latency=_told(run))
    for kind, samples in _moves(run).items():
        latency, rate = _fit(samples)
        found = replace(found, **{kind: rate, f"{kind}_latency": latency})
    return found


def _told(run: Seen) -> float:
    """Seconds from the decision that grants a gang until its host has read of it."""
    told = [
        end - run.granted[step] for (step, _), end in run.prepared.items() if step in run.granted
    ]
    return max(0.0, _mean(told, Costs().control_latency))


def _changed(known: Costs, change: Change) -> Costs:
    """A faster network leaves what transfers inside of an island cost too: the hosts' own work."""
    own = min(known.dcn_latency, max(known.local_latency, 0.0))
    latency = own + (known.dcn_latency - own) / change.dcn
    return replace(known, dcn_latency=latency, dcn=known.dcn * change.dcn)


def _mean(samples: Sequence[float], default: float) -> float:
    """The mean: what is rarely slow makes a whole run slow."""
    return statistics.fmean(samples) if samples else default


def _made(run: Seen, step: int, host: str) -> float:
    """When a step had made what a host reads; transfers end on each host by themselves."""
    spans = run.gangs.get(step) or [s for s in run.transfers.get(step, ()) if s.host == host]
    return max((span.end for span in spans), default=float("-inf"))


def _gaps(run: Seen, *, waiting: bool) -> list[float]:
    """Seconds before gangs.  waiting: after their inputs; else: after the gang before them.

    Gangs that had no place yet when they could have begun waited for something else.
    """
    never, told = float("-inf"), _told(run)
    free: dict[Lane, float] = {}
    gaps = []
    spans = [(span, step) for step, spans in run.gangs.items() for span in spans]
    for span, step in sorted(spans, key=lambda each: each[0].start):
        lanes = lanes_of(span.island, span.host, span.devices)
        ready = max((_made(run, a, span.host) for a in run.flow[step].after), default=never)
        before = max(free.get(lane, never) for lane in lanes)
        latest = max(ready, before)
        granted = run.granted[step] + told if step in run.granted else never
        if latest > granted and (ready > before) == waiting:
            gaps.append(max(0.0, span.start - latest))
        free.update(dict.fromkeys(lanes, span.end))
    return gaps


def _between(run: Seen) -> float:
    """Seconds that a device loses from one gang to the next, where nothing else is missing."""
    return statistics.median(_gaps(run, waiting=False) or [0.0])


def _moves(run: Seen) -> dict[str, list[tuple[int, float]]]:
    """By distance, bytes and seconds of transfers, from the moment when their source was made."""
    found: dict[str, list[tuple[int, float]]] = {}
    for step, spans in run.transfers.items():
        for span in spans:
            sources = str(span.args.get("source", "")).split(", ")
            islands = {run.hosts[host][0] for host in sources if host in run.hosts}
            kind = DCN if islands - {span.island} else ISLAND if sources != [span.host] else LOCAL
            made = max((_made(run, a, span.host) for a in run.flow[step].after), default=span.start)
            since = made if made > float("-inf") else span.start
            seconds = max(0.0, span.end - min(since, span.start))
            found.setdefault(kind, []).append((int(span.args.get("nbytes", 0)), seconds))
    return found


def _fit(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Latency and bytes per second: the median slope, and the mean of what it leaves."""
    slopes = [
        (b[1] - a[1]) / (b[0] - a[0])
        for a, b in combinations(samples[:: max(1, len(samples) // 100)], 2)
        if a[0] != b[0]
    ]
    slope = max(0.0, statistics.median(slopes) if slopes else 0.0)
    latency = max(0.0, statistics.fmean(s - slope * nbytes for nbytes, s in samples))
    return latency, 1 / slope if slope > 1 / ENDLESS else ENDLESS
