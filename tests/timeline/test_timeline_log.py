"""The log is bounded, counts what it loses, and cannot be hurt by who watches."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from pathways_lab.timeline.entries import Entries
from pathways_lab.timeline.flow import PLANS, Flows
from pathways_lab.timeline.log import Timeline
from pathways_lab.timeline.records import Event, Record, Sample


def event(number: int, program: str = "") -> Event:
    return Event("submitted", float(number), run=number, program=program)


def test_the_bound_drops_the_oldest_and_counts_them() -> None:
    log = Timeline(capacity=3)
    log.extend(event(n) for n in range(5))
    assert [r.run for r in log.records if isinstance(r, Event)] == [2, 3, 4]
    assert (log.version, log.evicted, log.dropped, len(log)) == (5, 2, 2, 3)


def test_records_lost_on_the_way_count_as_dropped_too() -> None:
    log = Timeline(capacity=10)
    log.extend([Sample("dropped", 0.0, 7.0), event(1)])
    assert (log.evicted, log.dropped) == (0, 7)


def test_since_gives_what_a_reader_has_not_seen_and_what_it_missed() -> None:
    log = Timeline(capacity=3)
    log.extend([event(0), event(1)])
    first = log.since(0)
    assert [r.run for r in first.records if isinstance(r, Event)] == [0, 1]
    assert log.since(first.version).records == ()
    log.extend(event(n) for n in range(2, 7))
    second = log.since(first.version)
    assert [r.run for r in second.records if isinstance(r, Event)] == [4, 5, 6]
    assert (second.version, second.missed) == (7, 2)


def test_an_observer_that_raises_is_dropped_and_the_others_go_on() -> None:
    log = Timeline()
    seen: list[int] = []

    def broken(records: Sequence[Record]) -> None:
        raise RuntimeError("a view broke")

    log.observe(broken)
    log.observe(lambda records: seen.append(len(records)))
    log.extend([event(1)])
    log.extend([event(2), event(3)])
    assert seen == [1, 2]
    assert len(log.failures) == 1
    assert "a view broke" in log.failures[0]


@pytest.mark.parametrize("watched", [False, True])
def test_records_that_cannot_be_read_are_lost_and_no_others(watched: bool) -> None:
    log, seen = Timeline(clock=lambda: 5.0), list[Record]()
    if watched:
        log.observe(seen.extend)
    log.extend_later(1, lambda: [event(1)])
    log.extend_later(3, lambda: iter([event(2), 1 / 0]))  # type: ignore[list-item]
    log.extend_later(1, lambda: [event(3)])
    assert log.records == (event(1), Sample("dropped", 5.0, 3.0), event(3))
    assert log.dropped == 3
    assert log.failures == ["3 records could not be read: ZeroDivisionError: division by zero"]
    assert seen == list(log.records) * watched


def test_an_observer_can_leave() -> None:
    log = Timeline()
    seen: list[int] = []
    leave = log.observe(lambda records: seen.append(len(records)))
    log.extend([event(1)])
    leave()
    leave()
    log.extend([event(2)])
    assert seen == [1]


def test_programs_keep_the_order_of_their_first_appearance() -> None:
    log = Timeline(capacity=2)
    log.extend(event(n, name) for n, name in enumerate(["b", "a", "b", "c"]))
    assert log.programs == {"b": 0, "a": 1, "c": 2}


def test_so_many_names_of_programs_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathways_lab.timeline.log.PROGRAMS", 3)
    log = Timeline()
    log.extend(event(n, f"p{n}") for n in range(5))
    assert log.programs == {"p2": 2, "p3": 3, "p4": 4}
    log.extend([event(5, "p0")])
    assert log.programs == {"p3": 3, "p4": 4, "p0": 5}


def test_many_threads_may_extend_at_once() -> None:
    log = Timeline(capacity=100_000)
    threads = [
        threading.Thread(target=lambda: [log.extend([event(n)]) for n in range(500)])
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.version == len(log) == 4000


def test_plans_are_known_as_long_as_their_programs_are_in_use() -> None:
    log = Timeline(capacity=10)
    flow = Flows()
    for n in range(PLANS + 50):
        news = [
            Event("plan", 0.0, args={"plan": f"p{n}", "steps": [[False, "f", 7, 4, [], ""]]}),
            Event("submitted", 0.0, run=n + 1, args={"plan": f"p{n}"}),
            Event("submitted", 0.0, run=10_000, args={"plan": "p0"}),
        ]
        log.extend(news)
        for record in news:
            flow.add(record)
    known = [str(plan.args["plan"]) for plan in log.plans]
    assert len(known) == PLANS
    assert {"p0", f"p{PLANS + 49}"} <= set(known)
    assert "p1" not in known
    assert flow.run(10_000)
    assert flow.run(PLANS + 50)
    assert not flow.run(2)


def test_how_many_records_are_kept_can_be_said_while_it_grows() -> None:
    log = Timeline(capacity=3)
    log.written = Entries(3)
    log.extend(event(n) for n in range(5))
    log.capacity = 6
    log.extend(event(n) for n in range(5, 10))
    assert [r.run for r in log.records if isinstance(r, Event)] == [4, 5, 6, 7, 8, 9]
    assert log.written.capacity == 6
    log.capacity = 2
    assert [r.run for r in log.records if isinstance(r, Event)] == [8, 9]
    assert log.dropped == 8


@pytest.mark.parametrize("records", [0, -1, 2.5, "many", True, None])
def test_a_bound_that_is_none_is_refused_at_once(records: object) -> None:
    log = Timeline(capacity=3)
    with pytest.raises(ValueError, match="a whole number from 1 on, like 2_000_000"):
        log.capacity = records  # type: ignore[assignment]
    assert log.capacity == 3
