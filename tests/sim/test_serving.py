"""Training and serving on one device: how long a token waits behind the other program."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from pathways_lab.core.scheduling.policies import Policy, Priority, ProportionalShare, ShortestFirst
from pathways_lab.core.scheduling.rules import Rules
from pathways_lab.sim.machine import Costs, FunctionCost, Machine
from pathways_lab.sim.simulate import Load, chain, simulate

TOKEN = 0.002
"""Device seconds of a token."""
SLACK = 0.002
"""Seconds for messages, twice."""
LATE = 0.02
"""Seconds after which the end of a gang is told at the latest."""
POLICIES = (Priority(), ProportionalShare(), ShortestFirst())


def tokens(
    policy: Policy, gang: float, rules: Rules | None = None, window: float | None = None
) -> list[float]:
    """Seconds of every token, beside a training whose loop is ten steps ahead.

    gang: device seconds of a training's gang; a step has four.  window: of the training.
    """
    costs = {"token": FunctionCost(TOKEN), "layer": FunctionCost(gang)}
    machine = Machine(1, 1, 1, functions=costs, costs=Costs(jitter=0.0))
    step = chain("train", 1, ["layer"] * 4)
    step = replace(step, nodes=tuple(replace(node, window=window) for node in step.nodes))
    training = Load(step, "trainer", runs=10**6, flight=10, feeds={0: 0})
    serving = Load(
        chain("serve", 1, ["token"]), "server", runs=60, flight=1, start=1.0, priority=1,
        feeds={0: 0},
    )  # fmt: skip
    until = 2.0 + 60 * max(0.13, 2 * gang + 0.02)
    found = simulate([training, serving], machine, policy, until=until, rules=rules)
    ends = sorted(time for run, (time, _) in found.ended.items() if run >> 32 == 2)
    return sorted(b - a for a, b in itertools.pairwise(ends[10:]))


@pytest.mark.parametrize("gang", [0.005, 0.03, 0.08, 0.15])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_token_waits_for_a_tenth_of_a_second_or_two_gangs(policy: Policy, gang: float) -> None:
    found = tokens(policy, gang)
    assert len(found) > 40
    assert found[-1] <= max(0.1 + LATE, 2 * gang) + TOKEN + SLACK


@pytest.mark.parametrize("gang", [0.005, 0.03, 0.15])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_it_waits_for_one_gang_where_a_training_has_no_window(policy: Policy, gang: float) -> None:
    found = tokens(policy, gang, window=0.0)
    assert len(found) > 40
    assert found[-1] <= gang + TOKEN + SLACK


@pytest.mark.parametrize("gang", [0.002, 0.005, 0.03])
def test_a_training_whose_window_is_two_gangs_keeps_its_device(gang: float) -> None:
    """Its hosts tell at once what the next grant waits for."""
    machine = Machine(1, 1, 1, functions={"layer": FunctionCost(gang)}, costs=Costs(jitter=0.0))
    training = Load(chain("train", 1, ["layer"] * 4), "trainer", runs=100, flight=10, feeds={0: 0})
    found = simulate([training], machine, rules=Rules(ahead=2 * gang))
    assert found.seconds < 1.02 * 400 * gang


def test_without_the_bound_it_waits_for_three_times_as_long() -> None:
    found = tokens(Priority(), 0.03, Rules(ahead=0.3, window=0.1))
    assert found[len(found) // 2] > 0.2
