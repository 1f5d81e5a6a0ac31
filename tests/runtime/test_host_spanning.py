"""Slices over several device processes: collectives, order, poison, skew."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.runtime import emulated as emulated_module
from pathways_lab.runtime.emulated import emulated
from tests.runtime.fake_control import FetchFailed, Lab, Program, spans
from tests.runtime.host_kit import binding, code, layout

pytestmark = pytest.mark.cluster

A, B, C = "island0/host0", "island0/host1", "island1/host0"
numbers = itertools.count(1)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    made = Lab([A, B, C], devices=2)
    yield made
    made.close()


def wide(lab: Lab, *devices: tuple[str, int]) -> SliceBinding:
    """A row of devices of both hosts of the island."""
    owned = devices or ((A, 0), (A, 1), (B, 0), (B, 1))
    return lab.span(binding(next(numbers), (len(owned),), owned))


def summing(on: SliceBinding, size: int = 8, name: str = "sum") -> Any:
    """Every element becomes the sum of all: a collective over all devices."""
    kind, cut = ((size,), "float32"), layout(on, "a")
    return code(lambda x: (x * 0 + x.sum(),), on, [(kind, cut)], [(kind, cut)], name=name)


def test_a_collective_over_two_processes(lab: Lab) -> None:
    on = wide(lab)
    made = summing(on)
    lab.prepare(made)
    program = Program("wide").value("x", on.slice, (8,), "float32", layout(on, "a"))
    program.call(made, ["x"], ["y"]).call(made, ["y"], ["z"])
    plan = lab.program(program.plan(["x"], ["z"]))
    lab.put(10, program["x"], np.arange(8, dtype=np.float32))
    for _ in range(20):
        run = next(numbers)
        lab.grant(run, plan, [10], [1000 + run])
        assert (lab.fetch(1000 + run, program["z"]) == 28 * 8).all()
        lab.run_over(run, plan)
        lab.broadcast("free", buffers=[1000 + run])
    gangs = [s for s in spans(lab.records, "gang") if s.run == run and s.step == 0]
    assert {g.host for g in gangs} == {A, B}
    assert len({g.args["seq"] for g in gangs}) == 1, "one place in the island's order"


def test_parts_go_where_they_are_needed(lab: Lab) -> None:
    """From a slice over two hosts to one on a third, and back cut in another way."""
    on = wide(lab)
    far = lab.bind(binding(next(numbers), (2,), [0, 1], C))
    program = Program("parts").value("x", on.slice, (4, 8), "float32", layout(on, None, "a"))
    program.move("x", "y", far.slice, layout(far, "a", None))
    program.move("y", "z", on.slice, layout(on, "a", None))
    plan = lab.program(program.plan(["x"], ["y", "z"]))
    data = np.arange(32, dtype=np.float32).reshape(4, 8)
    lab.put(20, program["x"], data)
    run = next(numbers)
    lab.grant(run, plan, [20], [21, 22])
    assert np.array_equal(lab.fetch(21, program["y"]), data)
    assert np.array_equal(lab.fetch(22, program["z"]), data)
    lab.run_over(run, plan)
    arrived = {
        (s.host, s.step): s.args["nbytes"] for s in spans(lab.records, "transfer") if s.run == run
    }
    assert arrived == {(C, 0): data.nbytes, (A, 1): data.nbytes // 2, (B, 1): data.nbytes // 2}


def test_an_input_that_fails_on_one_host_poisons_its_run_and_no_other(lab: Lab) -> None:
    """The collective is entered by both, with zeros where the input is missing."""
    on = wide(lab)
    made = summing(on)
    lab.prepare(made)
    program = Program("poison").value("x", on.slice, (8,), "float32", layout(on, "a"))
    program.call(made, ["x"], ["y"])
    plan = lab.program(program.plan(["x"], ["y"]))
    lab.put(30, program["x"], np.ones(8, np.float32))
    lab.links[B].send("free", {"buffers": [30]})  # one host has lost its part
    bad, good = next(numbers), next(numbers)
    lab.grant(bad, plan, [30], [31])
    lab.put(32, program["x"], np.ones(8, np.float32))
    lab.grant(good, plan, [32], [33])
    assert (lab.fetch(33, program["y"]) == 8).all()
    lab.run_over(bad, plan)
    lab.run_over(good, plan)
    assert {host for host, run, _ in lab.failed if run == bad} == {B}
    assert not [1 for _, run, _ in lab.failed if run == good]
    with pytest.raises(FetchFailed, match="buffer 30"):
        lab.fetch(31, program["y"])


@pytest.mark.skipif(emulated_module.compiler() is None, reason="no C++ compiler")
def test_a_host_with_earlier_work_is_waited_for(lab: Lab) -> None:
    """Skew between hosts is legal however long: nobody is killed, results are right."""
    on = wide(lab)
    busy = lab.bind(binding(next(numbers), (2,), [0, 1], B))
    made = summing(on)
    kind, cut = ((2,), "float32"), layout(busy, "a")
    work = code(lambda: (emulated(3000)(jnp.zeros(2)),), busy, [], [(kind, cut)], name="work")
    lab.prepare(made), lab.prepare(work)
    program = Program("skew").value("x", on.slice, (8,), "float32", layout(on, "a"))
    program.call(work, [], ["w"]).call(made, ["x"], ["y"])
    plan = lab.program(program.plan(["x"], ["y"]))
    lab.put(40, program["x"], np.ones(8, np.float32))
    run = next(numbers)
    lab.grant(run, plan, [40], [41])
    assert (lab.fetch(41, program["y"]) == 8).all()
    lab.run_over(run, plan)
    gangs = {(s.host, s.node): s for s in spans(lab.records, "gang") if s.run == run}
    assert gangs[A, "sum"].end > gangs[B, "work"].end


def test_competing_collectives_are_always_right(lab: Lab) -> None:
    """Overlapping slices, different collectives, one order: the classic recipe for a hang."""
    whole = wide(lab)
    pair = wide(lab, (A, 1), (B, 0))
    back = wide(lab, (B, 1), (B, 0), (A, 1), (A, 0))
    local = lab.bind(binding(next(numbers), (2,), [0, 1], A))
    slices = [whole, pair, back, local]
    functions = [summing(on, 8, f"sum{n}") for n, on in enumerate(slices)]
    for made in functions:
        lab.prepare(made)
    plans = []
    for on, made in zip(slices, functions, strict=True):
        program = Program(f"compete {on.slice}")
        program.value("x", on.slice, (8,), "float32", layout(on, "a")).call(made, ["x"], ["y"])
        plans.append((program, lab.program(program.plan(["x"], ["y"]))))
    rng = np.random.default_rng(5)
    runs = []
    for number in range(200):
        program, plan = plans[rng.integers(4)]
        run = next(numbers)
        data = np.full(8, float(number), np.float32)
        lab.grant(run, plan, [data], [10_000 + run])
        runs.append((run, program, plan, 8.0 * number))
    for run, program, plan, total in runs:
        assert (lab.fetch(10_000 + run, program["y"]) == total).all(), run
        lab.run_over(run, plan)
    assert not [1 for _, run, _ in lab.failed if run >= runs[0][0]]


def test_a_formation_that_ends_fails_what_needs_it_and_nothing_else(lab: Lab) -> None:
    on = wide(lab)
    made = summing(on)
    lab.prepare(made)
    program = Program("ends").value("x", on.slice, (8,), "float32", layout(on, "a"))
    program.call(made, ["x"], ["y"])
    plan = lab.program(program.plan(["x"], ["y"]))
    data = np.ones(8, np.float32)
    lab.put(50, program["x"], data)
    run = next(numbers)
    # Only one host is granted the collective: it waits there for the other.
    lab.grant(run, plan, [50], [51], hosts=(A,))
    with pytest.raises(AssertionError, match="not within"):
        lab.wait(lambda: (A, run, 0) in lab.finished, 0.5)
    number = lab.spans[on.slice]
    for host in (A, B):
        lab.links[host].send("dissolve", {"number": number, "reason": "a test ended it"})
    lab.wait(lambda: (A, run, 0) in lab.failed)
    again = wide(lab)
    made = summing(again)
    lab.prepare(made)
    program = Program("again").value("x", again.slice, (8,), "float32", layout(again, "a"))
    program.call(made, ["x"], ["y"])
    plan = lab.program(program.plan(["x"], ["y"]))
    run = next(numbers)
    lab.grant(run, plan, [data], [52])
    assert (lab.fetch(52, program["y"]) == 8).all()


def test_a_process_that_is_given_up_ends_itself(lab: Lab) -> None:
    """The last test of the module: its worker would start another."""
    lab.links[B].send("restart", {"reason": "a gang does not end"})
    lab.wait(lambda: B in lab.closed)
    assert lab.reasons[B] == "a gang does not end"
    lab.children[B].wait()
    assert lab.children[B].exit_code == 70
