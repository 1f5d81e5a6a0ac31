"""Causes of waiting that were injected into simulated timelines are told, to the instant."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pathways_lab.sim.machine import FunctionCost, Machine
from pathways_lab.sim.simulate import Load, simulate
from pathways_lab.timeline.flow import flows
from pathways_lab.timeline.machine import Lane
from pathways_lab.timeline.queries import waits
from pathways_lab.timeline.records import Event, Span
from pathways_lab.timeline.waits import DISPATCH, REPORT, RUNNING
from tests.timeline import truth


def test_each_instant_of_each_device_has_the_cause_that_was_injected():
    said = [told for seed in range(60) if (told := truth.wrong(seed))]
    assert not said, "\n".join(said[:3])


def test_the_time_until_a_host_has_told_of_an_end_is_not_dispatch():
    """Two runs have places ahead; the end of the first of them opens the place of the third."""
    late, busy = 1 / 8, 1 / 16
    load = Load(truth.one("f", 2), runs=5, flight=5, islands={1: "island1"})
    costs = replace(truth.FREE, control_latency=late)
    functions = {"f": FunctionCost(busy)}
    found = simulate([load], Machine(2, 1, 2, functions=functions, costs=costs)).records
    gangs = [r for r in found if isinstance(r, Span) and r.kind == "gang"]
    told = waits(found, gangs[0].start, gangs[4].end)
    pair = [(RUNNING, busy)] * 2
    gap = [(REPORT, late - busy), (DISPATCH, late)]
    expected = [*pair, *gap, *pair, *gap, pair[0]]
    for device in (0, 1):
        parts = told[Lane("island1", "island1/host0", device)]
        assert [cause for cause, _, _ in parts] == [cause for cause, _ in expected]
        seconds = [until - since for _, since, until in parts]
        assert seconds == pytest.approx([each for _, each in expected], abs=truth.LEAST)


def test_a_run_that_takes_the_result_of_another_one_says_so():
    load = Load(truth.one("f", 2), runs=3, islands={1: "island1"}, feeds={0: 0})
    found = simulate([load], Machine(2, 1, 2, functions={"f": FunctionCost(0.1)})).records
    runs = [r.run for r in found if isinstance(r, Event) and r.kind == "submitted"]
    known = flows(found)
    assert [known.before(run) for run in runs] == [(), (runs[0],), (runs[1],)]
    assert [known.sources(run, 0) for run in runs] == [[], [(runs[0], 0)], [(runs[1], 0)]]
    assert known.users(runs[0], 0) == [(runs[1], 0)]
