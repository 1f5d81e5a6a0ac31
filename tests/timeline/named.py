"""A run that is slow for one known reason: the explanation names it first.

Problem: an explanation of a run is believed, so what it names first must be the reason.  A
scenario takes a pipeline that is even and fast, and spoils one thing of it.

    python -m tests.timeline.named 200        # so many scenarios: how often it is named first

Rule for maintainers: what is expected is what was spoiled, never worked out from records.

Paper: section 5.1 (dispatch overheads), section 5.3 (pipelines).
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import replace

from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.program import Call, Program, Signature, Value
from pathways_lab.sim.machine import FunctionCost, Machine
from pathways_lab.sim.simulate import Load, simulate
from pathways_lab.timeline.planned import BUBBLE, COMPUTING, IMBALANCE, planned
from pathways_lab.timeline.records import Event
from pathways_lab.timeline.waits import COMPILE, DISPATCH, TRANSFER
from tests.timeline.truth import FREE

OTHER = "another client"
CAUSES = (IMBALANCE, BUBBLE, TRANSFER, DISPATCH, COMPILE, OTHER)
BUSY = 0.01
"""Seconds of a stage on a microbatch."""
NBYTES = 1000


def pipeline(stages: int, microbatches: int) -> Program:
    """Stages one after the other, each on a slice of one device."""
    row = Layout((("x", 1),), ((),))
    values, calls = [], []
    for _ in range(microbatches):
        first = len(values)
        values += [Value((NBYTES,), "uint8", max(0, s - 1), row, NBYTES) for s in range(stages + 1)]
        calls += [
            Call(f"stage{s}", s, (first + s,), (first + s + 1,), name=f"stage{s}")
            for s in range(stages)
        ]
    signatures = {f"stage{s}": Signature(f"stage{s}", 0, (row,), (row,)) for s in range(stages)}
    inputs = tuple(range(0, len(values), stages + 1))
    results = tuple(n + stages for n in inputs)
    return Program("pipeline", tuple(values), tuple(calls), inputs, results, signatures)


def causes(seed: int) -> tuple[str, list[str]]:
    """The cause of a scenario, and all causes that the explanation names, the first one first."""
    chance = random.Random(seed)
    cause = CAUSES[seed % len(CAUSES)]
    stages = chance.randint(3, 6)
    microbatches = 2 if cause == BUBBLE else chance.randint(6, 10) * stages
    seconds = {f"stage{s}": BUSY * chance.uniform(0.95, 1.05) for s in range(stages)}
    costs, compile_seconds = FREE, 0.0
    loads = [Load(pipeline(stages, microbatches), islands={s: f"island{s}" for s in range(stages)})]
    much = chance.uniform(1.5, 3.0)
    if cause == IMBALANCE:
        seconds[f"stage{chance.randrange(stages)}"] *= 1 + much
    elif cause == TRANSFER:
        costs = replace(costs, dcn=NBYTES / (BUSY * much))
    elif cause == DISPATCH:
        costs = replace(costs, launch=BUSY * much)
    elif cause == COMPILE:
        compile_seconds = BUSY * microbatches * much
    elif cause == OTHER:
        there = chance.randrange(stages)
        more = pipeline(1, microbatches)
        seconds |= {"other": BUSY * much}
        call = tuple(replace(node, function="other", name="other") for node in more.nodes)
        (signature,) = more.signatures.values()
        signatures = {"other": replace(signature, name="other")}
        other = replace(more, name="other", nodes=call, signatures=signatures)
        loads.insert(0, Load(other, client="other", islands={0: f"island{there}"}))
    functions = {
        name: FunctionCost(seconds=each, compile=compile_seconds) for name, each in seconds.items()
    }
    machine = Machine(
        islands=stages, hosts_per_island=1, devices_per_host=1, costs=costs, functions=functions
    )
    found = simulate(loads, machine)
    (run,) = (
        r.run
        for r in found.records
        if isinstance(r, Event) and r.kind == "submitted" and r.program == "pipeline"
    )
    parts = planned(found.records, run).parts()
    return cause, [part.cause for part in parts if part.cause != COMPUTING]


def named_first(cause: str, told: list[str]) -> bool:
    """Whether the explanation begins with the cause."""
    first = told[0] if told else ""
    return first.startswith("run ") if cause == OTHER else first == cause


def main(scenarios: int) -> int:
    right: Counter[str] = Counter()
    for seed in range(scenarios):
        cause, told = causes(seed)
        right[cause] += named_first(cause, told)
        if not named_first(cause, told):
            print(f"scenario {seed}: {cause}, and named were {', '.join(told)}")
    print(f"{right.total()} of {scenarios} named first: {dict(right)}")
    return int(right.total() < 0.95 * scenarios)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 200))
