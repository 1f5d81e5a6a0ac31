"""The process that draws a lab's views, without a process, and the thread that draws others."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from pathways_lab.notebook.kernel import line_index
from pathways_lab.notebook.panels import PANELS
from pathways_lab.notebook.view import renderers
from pathways_lab.notebook.view.cpu_budget import PERIOD
from pathways_lab.notebook.view.picture import FOLD, SETTLE, Picture, Wanted
from pathways_lab.notebook.view.render_process import Studio
from pathways_lab.timeline.log import Timeline
from pathways_lab.timeline.records import Event
from pathways_lab.transport import record_encoding
from tests.notebook.synthetic import arrival, training
from tests.runtime.processes import until


def test_the_process_that_draws_keeps_as_many_records_as_the_kernel() -> None:
    made = Studio(lambda *_: None, lambda: 0.0)
    written = [record_encoding.write(Event("submitted", 0.0, run=n)) for n in range(1, 9)]
    made.hear("records", [(written, 8)], 0, 0.0, 1.0, 3, {})
    assert len(made.timeline.records) == 3


def test_the_process_that_draws_knows_the_numbers_of_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_index, "numbers", {})
    made = Studio(lambda *_: None, lambda: 0.0)
    made.hear("records", [], 0, 0.0, 1.0, 3, {"a.py": 4})
    made.hear("records", [], 0, 0.0, 1.0, 3, {"b.py": 5})
    told = [line_index.source(f"{file}:3: f(x)") for file in ("a.py", "b.py", "c.py")]
    assert told == ["3 of cell [4]: f(x)", "3 of cell [5]: f(x)", "3 of c.py: f(x)"]


def test_a_view_that_is_frozen_waits_for_the_records_of_what_has_just_ended() -> None:
    now, said = [10.0], list[str]()
    made = Studio(lambda kind, *_: said.append(kind), lambda: now[0])
    made.hear("open", 1, Wanted(("queues",)))
    made.hear("close", 1, "ended")
    made.tick(100)
    assert 1 in made.views, "a value may be there before the records of what made it"
    now[0] += SETTLE + 0.01
    made.tick(100)
    assert 1 not in made.views


def test_a_thread_that_is_behind_takes_in_more_before_it_draws_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2,048 devices in a timeline that only the kernel has: it was ever further behind."""
    folded, fold = list[int](), Picture.fold
    monkeypatch.setattr(
        Picture, "fold", lambda self, now, most: (folded.append(most), fold(self, now, most))
    )
    records = training(30, hosts=8, devices=2)
    log = Timeline(clock=lambda: arrival(records[-1]) + 1.0)
    painter = renderers.Thread(
        log, Wanted(tuple(PANELS), origin=0.0, since=0.0), Mock(ended=lambda: "")
    )
    log.extend(records)
    until(lambda: len(painter.picture.scene.ended) == 30)
    painter.end("ended")
    assert max(folded) > 2 * FOLD


def test_a_picture_of_an_idle_lab_is_drawn_seldom_and_at_once_when_something_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn, now = list[float](), [10.0]
    shown = Picture.shown
    monkeypatch.setattr(
        Picture, "shown", lambda self, moment: (drawn.append(now[0]), shown(self, moment))[1]
    )
    made = Studio(lambda *_: None, lambda: now[0])
    made.hear("open", 1, Wanted(("queues",)))

    def wait(seconds: float) -> int:
        drawn.clear()
        for _ in range(round(seconds / PERIOD)):
            now[0] += PERIOD
            made.hear("records", [], 0, 0.0, 1.0, 3, {})
            made.tick(100)
        return len(drawn)

    assert wait(1.0) == 10, "what has come may be seen some moments later"
    wait(3.0)
    assert wait(20.0) <= 20
    made.hear("records", [([record_encoding.write(Event("submitted", now[0], run=1))], 1)],
              0, 0.0, 1.0, 3, {})  # fmt: skip
    assert wait(1.0) == 10
    wait(5.0)
    made.hear("do", 1, "panel", "order")
    assert wait(1.0) >= 10, "somebody looks at it"
