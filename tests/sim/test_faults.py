"""Laws: faults stay where they are; random worlds of any seed end, resolve and leave nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pathways_lab.sim.machine import FunctionCost, Machine
from pathways_lab.sim.simulate import Load, chain, simulate
from pathways_lab.sim.world import World
from tests.sim.search import search, shape_of

MACHINE = Machine(2, 2, 2, default=FunctionCost(0.005))
CAREFUL = replace(MACHINE, depth=1)
"""A host launches a gang when the one before it has ended, and knows of its failure."""


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.sampled_from(range(5)))
def test_random_workloads_of_any_seed_keep_the_rules(seed: int, shape: int) -> None:
    assert search(seed, shape_of(shape)).broken == ""


@pytest.mark.parametrize("launched", [True, False])
def test_an_input_that_fails_on_one_host_spoils_its_run_and_no_other(launched: bool) -> None:
    """The collective behind it is entered by all hosts, or those that enter it wait for ever."""
    world = World(CAREFUL, launch_poisoned=launched)
    bad: list[int] = []

    def fails(run: int, step: int, host: str) -> bool:
        bad[:] = bad or [run]
        return (run, step, host) == (bad[0], 0, "island0/host1")

    world.fails = fails
    load = Load(chain("c", 4, ["f", "g"]), runs=4, flight=4, islands={0: "island0"})
    found = simulate(load, world=world)
    kinds = {run: failure.kind if failure else "" for run, (_, failure) in found.ended.items()}
    if launched:
        assert kinds == {run: "execute" if run == bad[0] else "" for run in kinds}
        assert len(kinds) == 4
    else:
        assert world.control.state.runs
        assert (bad[0], 1) in {w.gang for w in world.stuck()}


def test_a_lost_host_ends_its_runs_by_name_and_other_islands_do_not_notice() -> None:
    world = World(MACHINE)
    loads = [
        Load(chain(n, 4, [f"{n}.f"]), client=n, runs=40, islands={0: island})
        for n, island in (("near", "island0"), ("far", "island1"))
    ]
    world.agenda.after(0.1, world.lose, "island0/host1")
    found = simulate(loads, world=world)
    numbers = {1: "near", 2: "far"}
    failed = {numbers[run >> 32] for run, (_, failure) in found.ended.items() if failure}
    assert failed == {"near"}
    reasons = {failure.message for _, failure in found.ended.values() if failure}
    assert reasons == {"host island0/host1 was lost: it was killed"}
    assert len(found.ended) == 80
    assert not world.control.state.runs


def test_a_host_that_comes_back_is_used_again() -> None:
    world = World(MACHINE)
    world.agenda.after(0.05, world.lose, "island0/host0")
    world.agenda.after(0.10, world.join, "island0/host0", "island0")
    late = Load(chain("c", 4, ["f"]), start=0.2, islands={0: "island0"})
    found = simulate(late, world=world)
    assert [failure for _, failure in found.ended.values()] == [None]
