"""Random programs on real device processes: right values, every step reported, nothing left."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from pathways_lab.core.program.program import Plan
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.runtime.host.compiler import Code
from pathways_lab.timeline.records import Sample
from tests.runtime.fake_control import FetchFailed, Lab, Program, spans
from tests.runtime.host_kit import binding, code, layout

pytestmark = pytest.mark.cluster

NEAR, FAR = "island0/host0", "island1/host0"
SIZE = 8
numbers = itertools.count(1)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    made = Lab([NEAR, FAR])
    yield made
    made.close()


@dataclass
class Home:
    """A slice with its compiled functions."""

    on: SliceBinding
    functions: dict[str, Code] = field(default_factory=dict)


def homes(lab: Lab) -> list[Home]:
    """Slices that overlap, contain and exclude each other."""
    cuts = [(NEAR, (0, 1)), (NEAR, (1, 2)), (NEAR, (3,)), (NEAR, (0, 1, 2, 3)), (FAR, (0, 1))]
    made = []
    for host, devices in cuts:
        home = Home(lab.bind(binding(next(numbers), (len(devices),), devices, host)))
        cut = ((SIZE,), "int32"), layout(home.on, "a")
        for name, function, arity, donated in (
            ("inc", lambda x: (x + 1,), 1, ()),
            ("twice", lambda x: (x * 2,), 1, (0,)),
            ("add", lambda x, y: (x + y,), 2, ()),
            ("turn", lambda x: (x[::-1],), 1, ()),
        ):
            made_code = code(function, home.on, [cut] * arity, [cut], donated=donated, name=name)
            home.functions[name] = made_code
            lab.prepare(made_code)
        made.append(home)
    return made


@dataclass
class Case:
    """One random program and what it must compute from *x*."""

    program: Program
    plan: Plan
    outputs: list[str]
    expected: list[Any]


def random_case(rng: random.Random, all_homes: list[Home], lab: Lab) -> Case:
    home = rng.choice(all_homes)
    program = Program(f"random {next(numbers)}")
    program.value("v0", home.on.slice, (SIZE,), "int32", layout(home.on, "a"))
    where = {"v0": home}
    compute: dict[str, Any] = {"v0": lambda x: x}
    alive = ["v0"]
    for number in range(1, rng.randint(2, 12)):
        new, old = f"v{number}", rng.choice(alive)
        if rng.random() < 0.4:
            target = rng.choice(all_homes)
            program.move(old, new, target.on.slice, layout(target.on, "a"))
            where[new], compute[new] = target, compute[old]
        else:
            home = where[old]
            name = rng.choice(["inc", "twice", "add", "turn"])
            f = compute[old]
            if name == "add":
                other = rng.choice([v for v in alive if where[v] is home])
                g = compute[other]
                program.call(home.functions["add"], [old, other], [new])
                compute[new] = lambda x, f=f, g=g: f(x) + g(x)
            else:
                if name == "twice":
                    if old == "v0":
                        continue
                    alive.remove(old)  # donated: nobody may use it afterwards
                program.call(home.functions[name], [old], [new])
                apply = {
                    "inc": lambda a: a + 1,
                    "twice": lambda a: a * 2,
                    "turn": lambda a: a[::-1],
                }
                compute[new] = lambda x, f=f, a=apply[name]: a(f(x))
            where[new] = home
        alive.append(new)
    outputs = [v for v in alive if v != "v0" and rng.random() < 0.6]
    plan = lab.program(program.plan(["v0"], outputs))
    return Case(program, plan, outputs, [compute[v] for v in outputs])


@pytest.mark.parametrize("seed", range(4))
def test_random_programs(lab: Lab, seed: int) -> None:
    rng = random.Random(seed)
    all_homes = homes(lab)
    cases = [random_case(rng, all_homes, lab) for _ in range(12)]
    going: list[tuple[int, Case, np.ndarray, list[int], str]] = []
    for _ in range(40):
        case, run = rng.choice(cases), next(numbers)
        if not case.plan.steps:
            continue
        data = np.arange(SIZE, dtype=np.int32) + rng.randint(0, 100)
        ids = [run * 1000 + n for n in range(len(case.outputs))]
        fate = rng.choices(["ends", "starves", "aborts", "dropped"], [6, 1, 1, 1])[0]
        given: Any = 999 if fate == "starves" else data
        cut = rng.randint(1, len(case.plan.steps))
        lab.grant(run, case.plan, [given], ids, last=cut)
        if fate == "dropped":
            lab.broadcast("free", buffers=ids)
        if cut < len(case.plan.steps):
            if fate == "aborts":
                lab.broadcast("abort", run=run)
                continue
            lab.grant(run, case.plan, [given], ids, first=cut)
        going.append((run, case, data, ids, fate))
    for run, case, data, ids, fate in going:
        for name, number, compute in zip(case.outputs, ids, case.expected, strict=True):
            if fate in ("starves", "dropped"):
                with pytest.raises(FetchFailed):
                    lab.fetch(number, case.program[name])
            else:
                assert np.array_equal(lab.fetch(number, case.program[name]), compute(data)), name
        lab.run_over(run, case.plan)
        lab.broadcast("free", buffers=ids)
    bars = sorted(spans(lab.records, "gang"), key=lambda s: s.start)
    for host in (NEAR, FAR):
        for device in range(4):
            mine = [s for s in bars if s.host == host and device in s.devices]
            assert all(a.end <= b.start + 1e-4 for a, b in itertools.pairwise(mine))
    aborted = [run * 1000 + n for run in range(1, next(numbers)) for n in range(12)]
    lab.broadcast("free", buffers=aborted)

    def nothing_left() -> bool:
        samples = [r for r in lab.records if isinstance(r, Sample) and r.name == "memory"]
        last = {(r.host, r.args["device"]): r.value for r in samples}
        return not any(last.values())

    lab.wait(nothing_left)
