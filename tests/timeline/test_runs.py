"""The table of runs says what the records say, whether they come one by one or in columns."""

from __future__ import annotations

import pytest

from pathways_lab.sim.machine import Machine
from pathways_lab.sim.simulate import Load, chain, simulate
from pathways_lab.timeline.log import Timeline
from pathways_lab.timeline.packed import single
from pathways_lab.timeline.records import Event
from pathways_lab.timeline.runs import SHOWN, runs
from tests.timeline.streams import stream


@pytest.mark.parametrize("seed", range(20))
def test_columns_and_single_records_say_the_same(seed: int) -> None:
    items = stream(seed, runs=12, calm=True)
    assert list(runs(items)) == list(runs(single(items)))


def test_a_simulated_timeline_has_the_table() -> None:
    loads = [
        Load(chain("train", 2, ["f"]), "ann", runs=2),
        Load(chain("serve", 2, ["g"]), "bob", runs=1, start=0.5, priority=3),
    ]
    table = simulate(loads, Machine(1, 1, 2)).timeline.runs
    assert [(r.client, r.program, r.priority) for r in table] == [
        ("ann", "train", 0), ("ann", "train", 0), ("bob", "serve", 3),
    ]  # fmt: skip
    for row in table:
        times = [row.submitted, row.granted, row.begun, row.ended]
        known = [time for time in times if time is not None]
        assert known == sorted(times, key=lambda time: time or 0.0)
        assert row.outcome == "finished"
        assert row.waited == known[2] - known[0]
    assert "bob" in repr(table)
    assert ">serve</td>" in table._repr_html_()
    assert [row.client for row in table[2:]] == ["bob"]


def test_what_no_record_says_is_not_guessed() -> None:
    log = Timeline()
    log.extend([Event("finished", 3.0, run=(1 << 32) + 5, program="p", client="ann")])
    (row,) = log.runs
    assert (row.submitted, row.begun, row.ended, row.waited) == (None, None, 3.0, None)
    assert repr(log.runs).splitlines()[1].split() == ["5", "ann", "p", "0.0000", "finished"]


def test_a_long_table_shows_its_newest_rows_and_counts_the_others() -> None:
    log = Timeline(capacity=10)
    log.extend(Event("submitted", float(n), run=n, client="ann") for n in range(1, SHOWN + 4))
    assert len(log.runs) == SHOWN + 3  # the bound does not push them out
    assert repr(log.runs).startswith("3 earlier runs are not shown")
    assert len(repr(log.runs).splitlines()) == SHOWN + 2


def test_as_a_data_frame() -> None:
    pytest.importorskip("pandas")
    log = Timeline()
    log.extend([Event("submitted", 1.0, run=1, client="ann", args={"priority": 2})])
    assert log.runs.to_dataframe().to_dict("records")[0]["priority"] == 2
