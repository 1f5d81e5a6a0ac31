"""Law: a crossing is where ours stays above for good; dearer constants never bring it nearer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import crossover
from benchmarks.crossover import Constants, crossing, fitted, simulated_crossing
from benchmarks.fanout import Line, line
from benchmarks.harness.rounds import Measured


def test_a_crossing_lies_between_the_last_point_below_and_the_next() -> None:
    assert crossing([(1.0, 0.5), (2.0, 0.99), (4.0, 0.9), (8.0, 1.04)]) == pytest.approx(
        4.0 * 2.0 ** (0.07 / 0.14)
    )
    assert crossing([(1.0, 0.98), (2.0, 1.0)]) == 1.0, "always above: the shortest that was tried"
    assert crossing([(1.0, 0.98), (2.0, 0.9)]) is None
    assert crossing([]) is None


def test_shares_compare_with_many_controllers() -> None:
    measured = Measured({"1 ms": {crossover.JAX: [1.0], crossover.CALLS: [2.0]}, "2 ms": {}})
    assert crossover.shares(measured, (1.0, 2.0), crossover.CALLS) == [(1e-3, 0.5)]


def test_the_control_plane_is_a_line_over_hosts_that_is_nowhere_below_nothing() -> None:
    assert line([(h, 2e-4 + h * 1e-5) for h in (1, 2, 4)]) == pytest.approx((2e-4, 1e-5))
    assert line([(1, 1e-5), (4, 4e-3)]) == (0.0, 1e-3)
    found = fitted([(1e-4, 3e-4, 1e-6), (2e-4, 1e-4, 2e-6)], Line(5e-5, 1e-5))
    assert found == Constants(2e-4, 5e-5, 1e-5, 3e-4, 2e-6)


def test_a_simulated_crossing_follows_the_dearest_cost() -> None:
    constants = Constants(
        client=5e-5, control=1e-4, control_per_host=5e-5, host=1e-4, jax=1e-5, latency=5e-5
    )
    found = simulated_crossing(16, constants)
    assert 0.5e-3 < found < 2e-3, "16 hosts cost the control plane 0.9 ms per run"
    assert simulated_crossing(16, replace(constants, control_per_host=2e-4)) > 2 * found
    assert simulated_crossing(4, constants) < found


def test_what_starting_a_loop_takes_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def loop(value: int, steps: int) -> int:
        nonlocal now
        now += 3.0 + 0.5 * steps
        return value

    monkeypatch.setattr("benchmarks.crossover.time.perf_counter", lambda: now)
    assert crossover.Way("loop", {"case": loop}, 0, less=1).round("case", 10) == (5.0, 10)
    assert crossover.Way("call", {"case": loop}, 0).round("case", 10) == (8.0, 10)
    assert crossover.Way("four", {"case": loop}, 0, each=4).round("case", 10) == (4.5, 12)
