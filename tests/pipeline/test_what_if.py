"""Predictions of runs with something changed: against the simulator, which knows the truth."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import pathways_lab as pw
from pathways_lab.client.program.simulation import Simulation
from pathways_lab.pipeline.mpmd.step import Step
from pathways_lab.timeline.log import Timeline
from tests.pipeline.mpmd_kit import OPTIMIZER, PARAMETERS, X, Y, loss, scan

QUIET = pw.Costs(jitter=0.0, dcn_latency=3e-3, dcn=1e6, launch=1e-4, wake=1e-4)
MACHINE = pw.Machine(3, 1, 1, costs=QUIET)
SECONDS = {"forward": 0.004, "backward": 0.008, "weight": 0.008}
TYPES = PARAMETERS, OPTIMIZER.init(PARAMETERS), X, Y


@pytest.fixture(scope="module")
def step() -> Step:
    on = {part: MACHINE.slice(1, island=f"island{n}") for n, part in enumerate("abc")}
    return pw.mpmd.jit(scan(loss, 4), on=on, schedule="gpipe")


def ran(step: Step, machine: pw.Machine = MACHINE, **factors: float) -> Simulation:
    """The step on a machine.  factors: how many times as long a function takes."""
    captured = step.capture(*TYPES)
    names = {fragment.name for fragment in step.fragments}
    times = {}
    for name in names:
        kind = name.partition("_")[0]
        seconds = SECONDS.get(kind, 0.001)
        if {f"backward_{name[-1]}", f"weight_{name[-1]}"} <= names:
            seconds = 0.004
        times[name] = seconds * factors.get(name, 1.0)
    return simulated(captured, machine, times)


def simulated(program: Any, machine: pw.Machine, times: dict[str, float]) -> Simulation:
    """Two runs: the second one counts, whose functions have run before."""
    return pw.simulate(pw.Load(program, runs=2, flight=1), machine, times=times)


def seconds(found: Simulation) -> float:
    """From its submission to the end of its last computation, as predictions count."""
    return found.timeline.planned(max(found.ended)).actual


def test_an_unchanged_replay_takes_as_long_as_the_run(step: Step) -> None:
    """As the second one: functions that never ran are granted their places less far ahead."""
    found = pw.what_if(ran(step).timeline, dcn=2)
    assert found.measured.actual == pytest.approx(found.before, rel=1e-3)
    assert abs(found.error) < 1e-3


def test_a_faster_network(step: Step) -> None:
    fast = dataclasses.replace(QUIET, dcn_latency=QUIET.dcn_latency / 4, dcn=QUIET.dcn * 4)
    truth = seconds(ran(step, dataclasses.replace(MACHINE, costs=fast)))
    before = ran(step)
    found = pw.what_if(before.timeline, dcn=4)
    assert truth < 0.9 * seconds(before)
    assert found.after == pytest.approx(truth, rel=0.03)
    assert "dcn=4" in repr(found)
    assert "off" in found._repr_html_()


def test_a_faster_function(step: Step) -> None:
    before = ran(step, backward_b=4.0)
    found = pw.what_if(before.timeline, speed={"backward_b": 4})
    assert found.after == pytest.approx(seconds(ran(step)), rel=0.03)
    assert found.before > 1.3 * found.after


def test_a_host_is_as_fast_as_others_at_the_same_functions() -> None:
    """The same function runs on two islands, one of which computes at half the speed."""
    slow = dataclasses.replace(MACHINE, unlike={"island1": {"speed": 0.5}})
    work = pw.jit(lambda x: x + 1, on=slow.slice(1, island="island0"), name="work")
    there = pw.jit(lambda x: x + 1, on=slow.slice(1, island="island1"), name="work")
    program = pw.program(lambda x: [work(x), there(x), work(x), there(there(x))], name="both")
    found, even = (
        simulated(program.capture(X), machine, {"work": 0.02}) for machine in (slow, MACHINE)
    )
    predicted = pw.what_if(found.timeline, without="island1/host0")
    assert predicted.before > 1.5 * predicted.after
    assert predicted.after == pytest.approx(seconds(even), rel=0.05)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_another_schedule(step: Step, schedule: str) -> None:
    before, truth = ran(step), seconds(ran(step.otherwise(schedule=schedule)))
    found = pw.what_if(before.timeline, step=step, schedule=schedule)
    assert found.after == pytest.approx(truth, rel=0.03)
    back = pw.what_if(
        ran(other := step.otherwise(schedule=schedule)).timeline, step=other, schedule="gpipe"
    )
    assert back.after == pytest.approx(seconds(before), rel=0.03)


def test_where_the_time_goes_adds_up(step: Step) -> None:
    found = pw.what_if(ran(step).timeline, dcn=0.5)
    for each in (found.measured, found.replayed, found.changed):
        assert sum(part.share for part in each.parts()) == pytest.approx(1)
    assert found.after > found.before


def test_later_predictions_say_how_good_earlier_ones_were(step: Step) -> None:
    timeline = Timeline()
    timeline.extend(ran(step).records)
    first = pw.what_if(timeline, step=step, schedule="1f1b")
    second = pw.what_if(timeline, dcn=2)
    assert not second.earlier
    second.compare(ran(step).timeline)
    assert pw.what_if(timeline, dcn=2).earlier == (second.prediction,)
    # A run of the very program that was predicted is compared without a word.
    later = ran(step.otherwise(schedule="1f1b"))
    timeline.extend(_after(later.records, timeline.clock() + 1))
    third = pw.what_if(timeline, dcn=2)
    assert first.prediction in third.earlier
    assert abs(first.prediction.error) < 0.03
    assert "earlier predictions" in repr(third)


def _after(records: Any, moment: float) -> list[Any]:
    """Later records of another run."""
    out = []
    for r in records:
        moved = {
            f.name: getattr(r, f.name) + moment
            for f in dataclasses.fields(r)
            if f.name in ("time", "start", "end")
        }
        run: dict[str, Any] = {"run": r.run + 1000} if getattr(r, "run", 0) else {}
        out.append(dataclasses.replace(r, **moved, **run))
    return out


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "changes nothing"),
        ({"dcn": 0}, "dcn=0 makes no network"),
        ({"dcn": "fast"}, "dcn='fast' makes no network"),
        ({"speed": {"nobody": 2}}, "forward_a"),
        ({"without": "host7"}, "island0/host0"),
        ({"without": "island0/host0"}, "no other host computes"),
        ({"schedule": "1f1b"}, "step=step"),
    ],
)
def test_refusals_say_what_there_is(step: Step, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(pw.PathwaysError, match=said):
        pw.what_if(ran(step).timeline, **asked)
    empty = Timeline()
    empty.end()
    with pytest.raises(pw.PathwaysError, match="no run"):
        pw.what_if(empty, dcn=2)
