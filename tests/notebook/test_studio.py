"""The process that draws a lab's views, without a process."""

from __future__ import annotations

from pathways_lab.notebook.scene.picture import SETTLE, Wanted
from pathways_lab.notebook.view.render_process import Studio
from pathways_lab.timeline.records import Event
from pathways_lab.transport import record_encoding


def test_the_process_that_draws_keeps_as_many_records_as_the_kernel() -> None:
    made = Studio(lambda *_: None, lambda: 0.0)
    written = [record_encoding.write(Event("submitted", 0.0, run=n)) for n in range(1, 9)]
    made.hear("records", [(written, 8)], 0, 0.0, 1.0, 3)
    assert len(made.timeline.records) == 3


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
