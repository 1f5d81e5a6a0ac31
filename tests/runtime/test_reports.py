"""Reports: nothing is lost, nothing comes late, messages stay few."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import HostReport
from pathways_lab.executor.actions import Report
from pathways_lab.executor.device_memory import Memory
from pathways_lab.runtime.host import reports as module
from pathways_lab.runtime.host.host_records import Story
from pathways_lab.runtime.host.reports import PERIOD, QUICK, STORY, Reports
from pathways_lab.sim.machine import Costs
from pathways_lab.timeline.records import Event, Sample, Span
from pathways_lab.transport import record_encoding
from pathways_lab.transport.codec import unpack_fields


class Desk:
    """The reactor and the control plane, with a clock that the test turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.memory: Memory[Any] = Memory()
        launcher: Any = SimpleNamespace(idle=False, memory=self.memory)
        self.launcher = launcher
        self.sent: list[dict[str, Any]] = []
        self.timers: list[tuple[float, Any]] = []
        self.looks = 0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        self.reports = Reports(
            "i/h",
            "i",
            lambda: self.now,
            self.send,
            lambda seconds, call: self.timers.append((self.now + seconds, call)),
            launcher,
            Story("i/h", "i", True, lambda: 0.0),
        )

    def send(self, op: str, fields: dict[str, Any]) -> None:
        assert op == "report"
        self.sent.append(fields)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        due, self.timers = self.timers, []
        for at, call in due:
            if at <= self.now:
                self.looks += 1
                call()
            else:
                self.timers.append((at, call))


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(monkeypatch)


def say_over(
    desk: Desk, run: int, step: int, seconds: float, failure: Failure | None = None
) -> None:
    """A step is over."""
    desk.reports.over(Report(run, step, (seconds,), {step: failure} if failure else {}))


def test_ends_of_two_runs_stay_in_their_order(desk: Desk) -> None:
    for run, step in ((1, 0), (1, 1), (2, 0), (1, 2), (1, 4), (1, 5)):
        say_over(desk, run, step, 0.25)
    desk.reports.due()
    report = unpack_fields(HostReport, {**desk.sent[0], "time": 0.0, "cause": "", "host": "i/h"})
    assert [(run, first, len(times)) for run, first, times in report.ended] == [
        (1, 0, 2), (2, 0, 1), (1, 2, 1), (1, 4, 2)
    ]  # fmt: skip


def test_many_ends_are_one_message(desk: Desk) -> None:
    say_over(desk, 1, 0, 0.5)
    desk.reports.due()  # nothing was sent for long: at once
    assert len(desk.sent) == 1
    for step in range(1, 50):
        say_over(desk, 1, step, 0.5, Failure("execute", "x") if step == 7 else None)
        desk.reports.due()
    assert len(desk.sent) == 1
    desk.pass_time(PERIOD)
    assert len(desk.sent) == 2
    report = unpack_fields(HostReport, {**desk.sent[1], "time": 0.0, "cause": "", "host": "i/h"})
    assert report.ended == ((1, 1, (0.5,) * 49),)
    assert [(run, step) for run, step, _ in report.failed] == [(1, 7)]
    desk.pass_time(1)
    assert len(desk.sent) == 2


@pytest.mark.parametrize("what", ["resident", "parked"])
def test_what_the_core_waits_for_is_told_also_while_something_is_launched(
    desk: Desk, what: str
) -> None:
    desk.reports.due(now=False)
    assert desk.sent == []
    getattr(desk.reports, what)(7)
    desk.reports.due(now=False)
    assert [list(fields[what]) for fields in desk.sent] == [[7]]


def test_the_last_end_does_not_wait(desk: Desk) -> None:
    say_over(desk, 1, 0, 0.5)
    desk.reports.due()
    desk.launcher.idle = True
    say_over(desk, 1, 1, 0.5)
    desk.reports.due()
    assert len(desk.sent) == 2


def ends(desk: Desk, run: int, *, over: bool = True, told: bool = True) -> None:
    """The only step of a run ends, or that before its last one."""
    say_over(desk, run, 0, 0.5)
    if told:
        desk.reports.told()
    if over:
        desk.reports.run_over(run)


def test_a_run_whose_end_was_heard_hurries_nobody_and_is_not_lost(desk: Desk) -> None:
    desk.launcher.idle = True
    for run in range(1, 10):
        ends(desk, run)
        desk.reports.due()
        desk.pass_time(QUICK)
    assert desk.sent == []
    desk.pass_time(PERIOD)
    assert len(desk.sent) == 1
    report = unpack_fields(HostReport, {**desk.sent[0], "time": 0.0, "cause": "", "host": "i/h"})
    assert [run for run, _, _ in report.ended] == list(range(1, 10))
    desk.pass_time(1)
    assert len(desk.sent) == 1
    ends(desk, 10)
    desk.reports.due()
    desk.pass_time(PERIOD)
    assert len(desk.sent) == 2


@pytest.mark.parametrize("now", [True, False])
def test_an_end_for_which_grants_wait_is_told_at_once(desk: Desk, now: bool) -> None:
    """Although whoever waits for its value has heard of it, and others are under way here."""
    desk.reports.hurry(1)
    say_over(desk, 2, 0, 0.001)
    desk.reports.due()
    desk.sent.clear()
    for step in (0, 1):
        desk.now += QUICK
        say_over(desk, 1, step, 0.001)
        if step:
            desk.reports.told()
            desk.reports.run_over(1)
        desk.reports.due(now=now)
        desk.pass_time(0.0 if now else QUICK)
        assert len(desk.sent) == step + 1
    desk.pass_time(QUICK)
    say_over(desk, 1, 2, 0.001)
    desk.reports.due()
    assert len(desk.sent) == 2, "what is over hurries nobody"


def test_the_ends_of_small_gangs_are_told_together_although_grants_wait(desk: Desk) -> None:
    desk.reports.hurry(1)
    for step in range(1000):
        say_over(desk, 1, step, 0.00005)
        desk.reports.due()
        desk.pass_time(0.00005)
    assert len(desk.sent) <= 2 + 2 * 1000 * 0.00005 / QUICK


def test_what_nobody_has_heard_takes_what_was_heard_along(desk: Desk) -> None:
    desk.launcher.idle = True
    ends(desk, 1)
    desk.reports.due()
    ends(desk, 2, told=False)
    desk.reports.due()
    assert len(desk.sent) == 1
    report = unpack_fields(HostReport, {**desk.sent[0], "time": 0.0, "cause": "", "host": "i/h"})
    assert [run for run, _, _ in report.ended] == [1, 2]


def test_that_one_has_heard_is_no_reason_to_let_others_wait(desk: Desk) -> None:
    """A value of a run that goes on, and the end of another at the same moment."""
    desk.launcher.idle = True
    ends(desk, 1, over=False)
    desk.reports.due()
    assert len(desk.sent) == 1, "the control plane may have to grant what follows"
    ends(desk, 2)
    ends(desk, 3, told=False)
    desk.reports.due()
    assert len(desk.sent) == 2, "somebody may wait for run 3"


def test_a_report_is_not_lost_behind_a_timer_that_found_nothing(desk: Desk) -> None:
    """A run was over of which nothing was left to tell; the timer for it found nothing."""
    desk.launcher.idle = True
    desk.reports.run_over(1)
    desk.reports.due(now=False)
    desk.pass_time(QUICK)
    say_over(desk, 2, 0, 0.5)
    desk.reports.due(now=False)
    desk.pass_time(QUICK)
    assert len(desk.sent) == 1


def test_the_end_of_a_run_comes_soon_though_the_host_is_busy(desk: Desk) -> None:
    desk.reports.due()
    say_over(desk, 1, 0, 0.5)
    desk.reports.due()
    sent = len(desk.sent)
    say_over(desk, 1, 1, 0.5)
    desk.reports.run_over(1)
    desk.reports.due()
    desk.pass_time(QUICK)
    assert len(desk.sent) == sent + 1
    report = unpack_fields(HostReport, {**desk.sent[-1], "time": 0.0, "cause": "", "host": "i/h"})
    assert [step for _, step, _ in report.ended][-1] == 1


def test_while_something_is_under_way_somebody_looks(desk: Desk) -> None:
    """Ends that nobody was in a hurry with are seen by the clock at the latest, before it calls."""
    desk.reports.due()
    for _ in range(3):
        desk.pass_time(PERIOD)
    assert desk.looks == 3
    desk.launcher.idle = True
    desk.pass_time(PERIOD)
    desk.pass_time(PERIOD)
    assert desk.looks == 4


@pytest.mark.parametrize("idle", [False, True])
def test_records_alone_wait_for_an_end_while_work_is_under_way(desk: Desk, idle: bool) -> None:
    say_over(desk, 1, 0, 0.5)
    desk.reports.due()
    desk.sent.clear()
    desk.launcher.idle = idle
    for number in range(9):
        desk.pass_time(PERIOD / 2)
        desk.reports.record(Event("launched", desk.now, "i", "i/h", run=number))
        desk.reports.due()
    assert len(desk.sent) == (9 if idle else 0)
    say_over(desk, 1, 1, 0.5)
    desk.reports.due()
    desk.pass_time(PERIOD)
    assert sum(len(fields["records"]) for fields in desk.sent) == 9
    desk.sent.clear()
    desk.reports.record(Event("launched", desk.now, "i", "i/h", run=10))
    desk.reports.due()
    for _ in range(round(STORY / PERIOD) + 1):
        desk.pass_time(PERIOD)
    assert len(desk.sent) == 1, "nothing ends for long, and somebody may look"


def test_gangs_are_written_together_and_read_one_by_one(desk: Desk) -> None:
    about = record_encoding.about("p", "f", "kernel-1", "a.py:1: f(x)", 7, (0, 1))
    for step in range(3):
        columns = ([4.0], [5.0], [6.0], [7.0])
        gang = record_encoding.Ended(
            [about], 9, step, 40 + step, (), 0, step == 0, (0.0, 1.0, 2.0, 3.0), columns
        )
        desk.reports.ended([gang])
    desk.launcher.idle = True
    desk.reports.due()
    (written,) = desk.sent[-1]["records"]
    records = record_encoding.read([written])
    assert [r.kind for r in records if isinstance(r, Span)] == [
        "receive", "prepare", "launch", "gang", "launch", "gang", "launch", "gang",
    ]  # fmt: skip
    gangs = [r for r in records if isinstance(r, Span) and r.kind == "gang"]
    assert [(g.run, g.step, g.args["seq"], g.devices) for g in gangs] == [
        (9, 0, 40, (0, 1)), (9, 1, 41, (0, 1)), (9, 2, 42, (0, 1)),
    ]  # fmt: skip
    assert sum(isinstance(r, Event) and r.kind == "launched" for r in records) == 3


def test_memory_is_sampled_when_it_changes_and_not_too_often(desk: Desk) -> None:
    def samples() -> list[tuple[int, float]]:
        found = [r for f in desk.sent for r in record_encoding.read(f["records"])]
        return [(s.args["device"], s.value) for s in found if isinstance(s, Sample)]

    desk.memory.take((0,), 10)
    desk.memory.take((1,), 20)
    desk.reports.flush()
    assert samples() == [(0, 10.0), (1, 20.0)]
    desk.memory.take((1,), 10)
    desk.reports.flush()
    assert len(samples()) == 2, "too soon"
    desk.pass_time(2 * module.MEMORY_PERIOD)  # and it comes by itself
    desk.pass_time(STORY)
    assert samples()[2:] == [(1, 30.0)]
    desk.launcher.idle = True  # the last value is not withheld for ever
    desk.memory.give((0,), 10)
    desk.memory.give((1,), 30)
    desk.reports.flush()
    desk.pass_time(2 * module.MEMORY_PERIOD)
    desk.pass_time(STORY)
    assert samples()[3:] == [(0, 0.0), (1, 0.0)]


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_a_segment_reads_as_so_many_segments_of_one(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 5))
    names = data.draw(st.lists(st.sampled_from("fg"), min_size=count, max_size=count))
    abouts = [
        record_encoding.about("p", name, "kernel-1", "a.py:1: f(x)", 7, (0, 1)) for name in names
    ]
    poisoned = data.draw(st.sets(st.integers(0, count - 1)))
    announced = data.draw(st.integers(0, count + 1))
    opens = data.draw(st.booleans())
    once = (0.5, 1.0, 1.5, 2.0)
    columns = tuple([n + column / 10 for n in range(count)] for column in range(4))

    def ended(first: int, last: int) -> record_encoding.Ended:
        called, returned, start, end = (column[first:last] for column in columns)
        spoiled = [at - first for at in poisoned if first <= at < last]
        return record_encoding.Ended(
            abouts[first:last], 9, 4 + first, 40 + first, spoiled, max(announced - first, 0),
            opens and not first, once, (called, returned, start, end),
        )  # fmt: skip

    whole, single = (
        record_encoding.segments("i", "i/h", True, [ended(*ends) for ends in parts], 0.25)
        for parts in ([(0, count)], [(n, n + 1) for n in range(count)])
    )
    assert record_encoding.read([whole]) == record_encoding.read([single])
    record_encoding.check([whole, single])


def test_simulated_hosts_report_as_often() -> None:
    assert Costs().report == PERIOD
