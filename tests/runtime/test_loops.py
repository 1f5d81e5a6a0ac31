"""Loops that a host runs by itself: the right steps, and when each of them ran."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pathways_lab.runtime.client_messages import Loop
from pathways_lab.runtime.host.host_loop import LAPS, Lap, Laps, run

HOWS = [(wait, records) for wait in (False, True) for records in (False, True)]


def steps_of(step: Callable[..., Any], loop: Loop, *arguments: Any) -> tuple[list[Any], Laps]:
    results, laps = run(jax.jit(step), loop, [jnp.asarray(a) for a in arguments])
    return [np.asarray(r).tolist() for r in results], laps


@pytest.mark.parametrize(("wait", "records"), HOWS)
def test_one_array_goes_round(wait: bool, records: bool) -> None:
    results, laps = steps_of(lambda x: 2 * x + 1, Loop(5, 1, wait, records), 1.0)
    assert results == [63.0]
    assert len(laps.laps) == (5 if records else 0)


@pytest.mark.parametrize(("wait", "records"), HOWS)
def test_the_state_is_carried_and_the_rest_stays(wait: bool, records: bool) -> None:
    """As a training step: two arrays of state, a batch, and a loss beside the new state."""

    def step(w: Any, n: Any, batch: Any) -> list[Any]:
        return [w + batch, n + 1, w * 10]

    results, _ = steps_of(step, Loop(4, 2, wait, records), 0.0, 0, 3.0)
    assert results == [12.0, 4, 90.0]


@pytest.mark.parametrize(("wait", "records"), HOWS)
@pytest.mark.parametrize("steps", [1, 3])
def test_nothing_is_carried(steps: int, wait: bool, records: bool) -> None:
    """Every step is the same, whether it returns one array or several."""
    loop = Loop(steps, 0, wait, records)
    assert steps_of(lambda x: x + 1, loop, 1)[0] == [2]
    assert steps_of(lambda x, y: [x + y, x], loop, 1, 2)[0] == [3, 1]


def test_laps_follow_each_other() -> None:
    _, laps = steps_of(lambda x: x @ x / 100, Loop(20, 1), np.ones((100, 100), np.float32))
    found = laps.laps
    assert [lap.first for lap in found] == list(range(20))
    assert {lap.steps for lap in found} == {1}
    for lap, following in itertools.pairwise(found):
        assert lap.called <= lap.start <= lap.end <= following.start
        assert lap.called <= lap.returned <= following.called


def test_long_loops_are_recorded_in_groups() -> None:
    steps = 2 * LAPS + 3
    results, laps = steps_of(lambda x: x + 1, Loop(steps, 1), 0)
    assert results == [steps]
    assert len(laps.laps) <= LAPS
    assert sum(lap.steps for lap in laps.laps) == steps


def test_ends_that_nobody_could_see_join_the_next() -> None:
    """A step whose result the next one was given to overwrite."""
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    results, laps = run(step, Loop(50, 1), [jnp.zeros(1000)])
    assert float(results[0][0]) == 50.0
    assert sum(lap.steps for lap in laps.laps) == 50
    assert all(isinstance(lap, Lap) and lap.end >= lap.start for lap in laps.laps)


def test_what_a_step_raises_ends_the_loop() -> None:
    def fail(x: Any) -> Any:
        raise ValueError("no such step")

    for records in (False, True):
        with pytest.raises(ValueError, match="no such step"):
            run(fail, Loop(3, 1, records=records), [jnp.zeros(1)])
