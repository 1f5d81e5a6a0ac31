"""Training and serving on one device: how long a token waits behind the other program."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pathways_lab.core.scheduling.policies import (
    FIFO,
    Policy,
    Priority,
    ProportionalShare,
    ShortestFirst,
)
from pathways_lab.core.scheduling.rules import Rules
from pathways_lab.sim.machine import Costs, FunctionCost, Machine
from pathways_lab.sim.simulate import Load, chain, simulate

TOKEN = 0.002
"""Device seconds of a token."""
SLACK = 0.002
"""Seconds for messages, twice."""
CLOSE = 0.01
"""Seconds of work that are ahead on shared devices, where two gangs take less."""
POLICIES = (Priority(), ProportionalShare(), ProportionalShare(by="program"), ShortestFirst())


def tokens(
    policy: Policy,
    gang: float,
    rules: Rules | None = None,
    window: float | None = None,
    layers: int = 4,
) -> list[float]:
    """Seconds of every token, beside a training whose loop is ten steps ahead.

    gang: device seconds of a training's gang.  window: of the training.  layers: of a step.
    """
    costs = {"token": FunctionCost(TOKEN), "layer": FunctionCost(gang)}
    machine = Machine(1, 1, 1, functions=costs, costs=Costs(jitter=0.0))
    step = chain("train", 1, ["layer"] * layers)
    step = replace(step, nodes=tuple(replace(node, window=window) for node in step.nodes))
    training = Load(step, "trainer", runs=10**6, flight=10, feeds={0: 0})
    serving = Load(
        chain("serve", 1, ["token"]), "server", runs=60, flight=1, start=1.0, priority=1,
        feeds={0: 0},
    )  # fmt: skip
    until = 2.0 + 60 * (max(CLOSE, 2 * gang) + 0.03)
    found = simulate([training, serving], machine, policy, until=until, rules=rules)
    ends = sorted(time for run, (time, _) in found.ended.items() if run >> 32 == 2)
    return sorted(b - a for a, b in itertools.pairwise(ends[10:]))


@pytest.mark.parametrize("gang", [0.005, 0.03, 0.15])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_token_waits_for_two_gangs(policy: Policy, gang: float) -> None:
    found = tokens(policy, gang)
    assert len(found) > 40
    assert found[-1] <= 2 * gang + TOKEN + SLACK


@settings(max_examples=6, deadline=None)
@given(
    gang=st.floats(0.001, 0.1),
    policy=st.sampled_from(POLICIES[:3]),
    layers=st.sampled_from([1, 4, 50]),
)
def test_a_token_waits_for_two_gangs_or_ten_milliseconds_whatever_the_gangs(
    gang: float, policy: Policy, layers: int
) -> None:
    found = tokens(policy, gang, layers=layers)
    assert len(found) > 40
    assert found[-1] <= max(CLOSE, 2 * gang) + TOKEN + SLACK


@pytest.mark.parametrize("gang", [0.005, 0.03])
def test_beside_a_server_a_training_keeps_the_rest_of_its_device(gang: float) -> None:
    found = tokens(Priority(), gang)
    assert found[0] >= 2 * gang + TOKEN - 0.001, "two of its gangs between any two tokens"


@pytest.mark.parametrize("gang", [0.005, 0.03, 0.15])
@pytest.mark.parametrize("policy", [FIFO(), *POLICIES], ids=repr)
def test_it_waits_for_one_gang_where_a_training_has_no_window(policy: Policy, gang: float) -> None:
    """Under FIFO too: what has no window gets its places when its devices have nothing to do."""
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


@pytest.mark.parametrize("gang", [0.005, 0.03])
def test_without_the_bound_it_waits_for_three_times_as_long(gang: float) -> None:
    found = tokens(Priority(), gang, Rules(close=10.0, ahead=0.3, window=0.1))
    assert found[len(found) // 2] > 3 * (2 * gang + TOKEN)
