"""Reports: nothing is lost, nothing comes late, messages stay few."""

from __future__ import annotations

from typing import Any

import pytest

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import HostReport
from pathways_lab.runtime import reports as module
from pathways_lab.runtime.codec import unpack, unpack_fields
from pathways_lab.runtime.link import LinkClosed
from pathways_lab.runtime.memory import Memory
from pathways_lab.runtime.reports import PERIOD, Reports
from pathways_lab.timeline.records import Event, Sample


class Desk:
    """The reactor and the control plane, with a clock that the test turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.idle = False
        self.memory: Memory[Any] = Memory()
        self.sent: list[dict[str, Any]] = []
        self.timers: list[tuple[float, Any]] = []
        self.soon: list[Any] = []
        self.gone = False
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        self.reports = Reports(
            "i/h",
            "i",
            lambda: self.now,
            self.send,
            self.soon.append,
            lambda seconds, call: self.timers.append((self.now + seconds, call)),
            lambda: self.idle,
            self.memory,
        )

    def send(self, op: str, fields: dict[str, Any]) -> None:
        assert op == "report"
        if self.gone:
            raise LinkClosed("gone")
        self.sent.append(fields)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        due, self.timers = self.timers, []
        for at, call in due:
            if at <= self.now:
                call()
            else:
                self.timers.append((at, call))


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(monkeypatch)


def test_many_ends_are_one_message(desk: Desk) -> None:
    desk.reports.finished(1, 0, 0.5, None)
    desk.reports.due()  # nothing was sent for long: at once
    assert len(desk.sent) == 1
    for step in range(1, 50):
        desk.reports.finished(1, step, 0.5, Failure("execute", "x") if step == 7 else None)
        desk.reports.due()
    assert len(desk.sent) == 1
    desk.pass_time(PERIOD)
    assert len(desk.sent) == 2
    report = unpack_fields(HostReport, {**desk.sent[1], "time": 0.0, "cause": "", "host": "i/h"})
    assert [step for _, step, _ in report.finished] == list(range(1, 50))
    assert [(run, step) for run, step, _ in report.failed] == [(1, 7)]
    desk.pass_time(1)
    assert len(desk.sent) == 2


def test_the_last_end_does_not_wait(desk: Desk) -> None:
    desk.reports.finished(1, 0, 0.5, None)
    desk.reports.due()
    desk.idle = True
    desk.reports.finished(1, 1, 0.5, None)
    desk.reports.due()
    assert len(desk.sent) == 2


def test_records_of_other_threads_are_sent_without_being_asked_for(desk: Desk) -> None:
    desk.reports.due()
    for number in range(3):
        desk.reports.record_soon(Event("launched", float(number)))
    (call,) = desk.soon  # one wake-up for all
    call()
    assert [unpack(Event | Sample, r).time for r in desk.sent[-1]["records"]] == [0.0, 1.0, 2.0]


def test_memory_is_sampled_when_it_changes_and_not_too_often(desk: Desk) -> None:
    def samples() -> list[tuple[int, float]]:
        found = [unpack(Event | Sample, r) for f in desk.sent for r in f["records"]]
        return [(s.args["device"], s.value) for s in found if isinstance(s, Sample)]

    desk.memory.used = {0: 10, 1: 20}
    desk.reports.flush()
    assert samples() == [(0, 10.0), (1, 20.0)]
    desk.memory.used = {0: 10, 1: 30}
    desk.reports.flush()
    assert len(samples()) == 2, "too soon"
    desk.pass_time(2 * module.MEMORY_PERIOD)  # and it comes by itself
    assert samples()[2:] == [(1, 30.0)]
    desk.idle = True  # the last value is never withheld
    desk.memory.used = {0: 0, 1: 0}
    desk.reports.flush()
    assert samples()[3:] == [(0, 0.0), (1, 0.0)]


def test_a_lost_control_plane_is_no_error(desk: Desk) -> None:
    desk.gone = True
    desk.reports.resident(3)
    desk.reports.due()
    assert desk.sent == []
