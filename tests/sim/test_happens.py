"""Machines that lose hosts and get others, and loads whose runs arrive by the clock."""

from __future__ import annotations

from typing import Any

import pytest

from pathways_lab.sim.machine import FunctionCost, Machine
from pathways_lab.sim.simulate import Load, chain, simulate
from tests.sim.test_machines import EXACT

MACHINE = Machine(2, 1, 4, costs=EXACT, default=FunctionCost(0.1))
OUTCOMES = {"finished", "failed"}


def outcomes(found: Any) -> list[str]:
    return [row.outcome for row in found.timeline.runs]


def test_runs_of_a_lost_host_fail_and_later_ones_go_on_elsewhere() -> None:
    found = simulate(
        Load(chain("c", 4, ["f"]), runs=10, flight=2), MACHINE,
        happens=[(0.35, "lost", "island0")],
    )  # fmt: skip
    assert outcomes(found).count("failed") == 2
    assert outcomes(found).count("finished") == 8
    assert found.open == 0
    hosts = [r.host for r in found.records if getattr(r, "kind", "") == "gang"]
    assert set(hosts) == {"island0/host0", "island1/host0"}
    assert hosts == sorted(hosts)


def test_where_no_devices_are_left_runs_wait_until_there_are_some() -> None:
    one = Machine(1, 1, 4, costs=EXACT, default=FunctionCost(0.1))
    load = Load(chain("c", 4, ["f"]), runs=6, flight=1)
    gone = [(0.25, "lost", "island0/host0")]
    alone = simulate(load, one, happens=gone)
    assert outcomes(alone) == ["finished", "finished", "failed"]
    assert alone.open == 3
    assert "3 never" in repr(alone)
    back = simulate(load, one, happens=[*gone, (5.0, "joined", "island0/host0")])
    assert outcomes(back) == ["finished", "finished", "failed", *["finished"] * 3]
    begun = [row.begun for row in back.timeline.runs]
    assert begun[3] is not None
    assert begun[3] >= 5.0


def test_large_inputs_and_fed_back_outputs_are_made_again() -> None:
    load = Load(chain("c", 4, ["f"], nbytes=1 << 20), runs=8, flight=2, feeds={0: 0})
    found = simulate(load, MACHINE, happens=[(0.35, "lost", "island0")])
    assert outcomes(found).count("finished") >= 5
    assert found.open == 0


def test_an_island_that_comes_later_is_not_there_before() -> None:
    load = Load(chain("c", 4, ["f"]), islands={0: "island1"}, start=3.0)
    found = simulate(load, MACHINE, happens=[(2.0, "joined", "island1")])
    assert outcomes(found) == ["finished"]
    joined = {r.host: r.time for r in found.records if getattr(r, "kind", "") == "host-joined"}
    assert joined["island0/host0"] < 0.1
    assert joined["island1/host0"] == pytest.approx(2.0, abs=0.01)


def test_the_same_happens_every_time() -> None:
    load = Load(chain("c", 4, ["f", "g"]), runs=10, flight=3)
    happens = [(0.35, "lost", "island0"), (0.9, "joined", "island0"), (1.2, "lost", "island1")]
    machine = Machine(2, 1, 4, default=FunctionCost(0.1))
    one, other = (simulate(load, machine, seed=3, happens=happens).records for _ in range(2))
    assert one == other


def test_runs_arrive_by_the_clock_whether_others_have_ended_or_not() -> None:
    load = Load(chain("c", 4, ["f"]), arrivals=(0.0, 0.01, 1.0), start=0.5)
    rows = simulate(load, MACHINE).timeline.runs
    submitted = [row.submitted for row in rows]
    assert submitted == pytest.approx([0.5, 0.51, 1.5], abs=0.005)
    assert [row.outcome for row in rows] == ["finished"] * 3
    assert rows[1].begun == pytest.approx(rows[0].ended, abs=0.005)


@pytest.mark.parametrize(
    ("happens", "rule"),
    [
        (3, "is not a list"),
        ("lost", "is not a list"),
        ([(1.0, "lost")], "is not \\(seconds"),
        ([(-1.0, "lost", "island0")], "seconds from 0 on"),
        ([(float("nan"), "lost", "island0")], "seconds from 0 on"),
        ([(1.0, "burnt", "island0")], "'lost' or 'joined'"),
        ([(1.0, "lost", "island9")], "the machine's hosts are island0/host0"),
    ],
)
def test_what_cannot_happen_is_refused(happens: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        simulate(chain("c", 4, ["f"]), MACHINE, happens=happens)


@pytest.mark.parametrize("times", [(-1.0,), (float("inf"),), ("soon",)])
def test_arrivals_are_times(times: Any) -> None:
    with pytest.raises(ValueError, match="is not a time from 0 on"):
        Load(chain("c", 4, ["f"]), arrivals=times)
