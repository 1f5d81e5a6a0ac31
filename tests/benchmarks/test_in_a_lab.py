"""Law: the benchmarks that need a lab run, and what they say follows from the samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import pathways_lab as pw
from benchmarks import (
    clients,
    crossover,
    deciding,
    fanout,
    following,
    looking,
    pipeline,
    serving,
    trunk,
)
from benchmarks.gangs import asking
from benchmarks.gangs.asking import Asker
from benchmarks.gangs.tenant import Tenant
from benchmarks.harness.numbers import Ratio
from benchmarks.harness.rounds import Measured, Timed, measure


@pytest.fixture(scope="module")
def lab() -> Iterator[pw.Lab]:
    with pw.start(islands=2, hosts_per_island=1, devices_per_host=1, progress=False) as made:
        yield made


@pytest.mark.cluster
def test_pipelines_run_in_both_ways_and_a_third_is_said_not_to_exist(lab: pw.Lab) -> None:
    cases = [(2, 0.0)]
    ways = pipeline.ways(lab, cases)
    odd = pipeline.Dispatch("backwards", ways[0]._pipeline, ways[0]._zero, cases)
    found = measure([*ways, odd], [pipeline.name_of(2, 0.0)], rounds=1, budget=0.01)
    assert set(found.times[pipeline.name_of(2, 0.0)]) == {pipeline.PARALLEL, pipeline.SEQUENTIAL}
    assert "does not exist" in found.missing["backwards"]


@pytest.mark.cluster
def test_the_crossover_measures_all_ways_and_what_they_cost(lab: pw.Lab) -> None:
    with lab.lease("island0"):
        stage = crossover.Stage(lab, (0.5,))
        found = measure(stage.ways(), ["0.5 ms"], rounds=1, budget=0.01)
        costs = crossover.costs_per_run(stage, 30)
    assert set(found.times["0.5 ms"]) == {crossover.JAX, crossover.CALLS, crossover.CHAINED}
    # A loop's time is a difference of two, which a short sample does not bound from below.
    ours = [found.of("0.5 ms", way) for way in (crossover.CALLS, crossover.CHAINED)]
    assert all(seconds >= 0.5e-3 for (seconds,) in ours)
    assert costs[0] > 0


@pytest.mark.cluster
def test_hosts_that_only_talk_are_granted_every_run_once() -> None:
    crowd = fanout.Crowd(hosts=3, nodes=2)
    try:
        crowd.run(70)
        granted = [list(host.places) for host in crowd.hosts]
        # The functions of the first run are not known yet: gang by gang.
        assert granted == [[0, 1, *range(2, 142, 2)]] * 3
        assert crowd.seconds() > 0
    finally:
        crowd.close()


@pytest.mark.cluster
def test_what_clients_used_together_is_all_accounted_for(lab: pw.Lab, tmp_path: Path) -> None:
    file, case = tmp_path / "lab.json", "2 ms"
    lab.invite(file)
    tenants = [Tenant(str(file), name, held=[case], devices=1) for name in ("ann", "bob")]
    for tenant in tenants:
        tenant.start()
    crowd = clients.Crowd(lab, tenants, [case])
    try:
        timed = crowd.round(case, 9)
    finally:
        for tenant in tenants:
            tenant.stop()
    assert timed.units == 10
    ((held, least, most),) = crowd.used[case]
    assert held == pytest.approx(10 * 2e-3 / timed.seconds)
    assert least + most == pytest.approx(2)


@pytest.mark.cluster
def test_looking_stops_the_process_that_draws_in_one_sample_of_each_pair() -> None:
    states: list[str] = []

    class Watched(looking.Looking):
        def _timed(self, kind: str, units: int) -> tuple[Timed, tuple[float, float]]:
            states.append(kernel.run("print(*(c.status() for c in drawing()))").strip())
            return super()._timed(kind, units)

    kernel = looking.Kernel(next(iter(looking.SETUPS)))
    try:
        found = Watched(kernel, Measured(), 0.01)
        found.measure([looking.STEPS], [looking.ALL], rounds=1, pairs=2, seed=0)
        times = found.measured.times[f"{looking.STEPS}, {looking.ALL}"]
        assert [len(samples) for samples in times.values()] == [2, 2]
        assert kernel.messages > 0
        first, second = ([state == "stopped" for state in states[-8:][n::2]] for n in (0, 1))
        assert first == second  # before a sample begins, and in it
        assert [sum(first[:2]), sum(first[2:])] == [1, 1]
        assert "updates a second" in looking.taken(found.used[looking.STEPS, looking.ALL])
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            kernel.run("1 / 0")
    finally:
        kernel.close()


@pytest.mark.cluster
def test_tokens_are_measured_alone_and_beside_a_trainer(lab: pw.Lab) -> None:
    setting = serving.Setting(pw.Priority(), 0.0)
    before, server = lab.window, serving.Server(lab)
    try:
        alone, beside, held = serving.one_round(lab, lab, server, 5.0, setting, 0.2)
        assert lab.window == 0.0
    finally:
        lab.policy, lab.window = pw.FIFO(), before
    assert min(alone) >= serving.TOKEN / 1e3
    assert beside
    assert held >= 0.0
    names = [each.name for each in serving.settings_of([0.1, 0.0])]
    assert len(set(names)) == 12
    assert serving.percentile([3.0, 1.0, 2.0], 0.99) == 3.0


def test_a_picture_says_how_late_it_is_and_what_it_has_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(looking.Kernel, "__init__", lambda self, setup: None)
    front = following.Follower("")
    front._drawn, front.messages, front.bytes, front.updates = set(), 0, 0, 0

    def comm(told: dict[str, Any]) -> dict[str, Any]:
        content = {"comm_id": "view", "data": {"content": told}}
        return {"msg_type": "comm_msg", "content": content, "buffers": []}

    for notes in (None, ["emulated devices"], ["the picture is 657 ms behind"],
                  ["1,234 records dropped", "the picture is 2.1 s behind"]):  # fmt: skip
        told = {"type": "update", "header": None if notes is None else {"notes": notes}}
        front._take(comm(told))
    front._take(comm({"type": "text"}))
    front._take({"msg_type": "status", "content": {}})
    assert ([lag for _, lag in front.late], front.lost) == ([0.5, 0.5, 0.657, 2.1], 1234)
    old = following.ages([(10.35, 0.5), (10.45, 2.0)], begun=10.0, over=10.61)
    assert old == pytest.approx([0.1, 0.2, 0.3, 0.55, 2.05, 2.15])


def test_what_views_take_is_told_of_all_samples_together() -> None:
    told = looking.taken([(0.1, 0.01, 0.0, 1), (1.9, 0.03, 0.1, 18)])
    assert told == ("2.0% of the kernel's time and 5.0% of another processor, 9.5 updates a second")


def test_a_cost_is_the_share_of_throughput_that_is_gone() -> None:
    case = f"{looking.FAST}, {looking.ONE}"
    measured = Measured({case: {looking.STOPPED: [0.9, 0.9], looking.MOVING: [1.0, 1.0]}})
    found = looking.cost(measured, looking.FAST, looking.ONE)
    assert (found.value, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))
    assert looking.percent(found) == "10.0% [10.0, 10.0]"
    for cost, pairs, word in (
        (found, looking.ENOUGH, "**no**"),
        (Ratio(0.02, 0.01, 0.06), looking.ENOUGH, "not decided"),
        (Ratio(0.02, 0.01, 0.049), looking.ENOUGH, "yes"),
        (Ratio(0.02, 0.02, 0.02), 1, "not decided"),
    ):
        assert looking.verdict("one view", cost, pairs).word == word


def test_factors_compare_the_two_dispatches() -> None:
    cases = [(stages, 0.5) for stages in (2, 4, 8)]
    two, four, eight = (pipeline.name_of(*case) for case in cases)
    measured = Measured(
        {
            two: {pipeline.PARALLEL: [1.0], pipeline.SEQUENTIAL: [1.0]},
            four: {pipeline.PARALLEL: [1.0], pipeline.SEQUENTIAL: [3.0]},
            eight: {},  # it failed
        }
    )
    found = pipeline.factors(measured, cases)
    assert "3.00 [3.00, 3.00] x" in pipeline.factor_table(found)
    (verdict,) = pipeline.never_slower(found)
    assert (verdict.met, verdict.measured.split(": ")[1]) == (True, "2 stages of 0.5 ms")
    measured.times[two][pipeline.PARALLEL] = [1.1]
    (verdict,) = pipeline.never_slower(pipeline.factors(measured, cases))
    assert verdict.met is False


@pytest.mark.cluster
def test_calls_of_trunks_and_of_copies_are_measured_and_are_right(
    lab: pw.Lab, tmp_path: Path
) -> None:
    file, model = tmp_path / "lab.json", asking.Model(8, 1.0)
    lab.invite(file)
    clients = [Asker(str(file), f"client{n}", n, True, **asdict(model)) for n in range(3)]
    for client in clients:
        client.start()
    try:
        bench = trunk.Bench(lab, clients, model)
        ways = (asking.COPIES, asking.TURNS, asking.TRUNK)
        times, told = trunk.case(bench, model, ways, 1, 0.1)
        assert all(0 < seconds < 60 for each in times.values() for seconds in each)
        assert "calls in a gang" in told
        clients[0]._expected = clients[1]._expected
        with pytest.raises(RuntimeError, match=r"client0, a copy each: a row is .* away"):
            bench.ask(asking.COPIES, 0.1)
    finally:
        for client in clients:
            client.stop()


@pytest.mark.cluster
def test_programs_that_decide_are_measured_beside_the_same_without_decisions(lab: pw.Lab) -> None:
    loops = deciding.loop(lab, 3)
    deciding.check(loops)
    times = deciding.measure(loops, 2, 3)
    assert {len(each) for each in times.values()} == {2}
    mixture = deciding.Mixture(lab, 4, 4, experts=2)
    systems = mixture.systems(deciding.forward)
    deciding.check(systems)
    mixture.router[:] = 0
    with pytest.raises(AssertionError, match="Not equal"):
        deciding.check(systems)
