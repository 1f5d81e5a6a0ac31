"""The process that draws a lab's views, without a process."""

from __future__ import annotations

from pathways_lab.notebook.view.render_process import Studio
from pathways_lab.timeline.records import Event
from pathways_lab.transport import record_encoding


def test_the_process_that_draws_keeps_as_many_records_as_the_kernel() -> None:
    made = Studio(lambda *_: None, lambda: 0.0)
    written = [record_encoding.write(Event("submitted", 0.0, run=n)) for n in range(1, 9)]
    made.hear("records", [(written, 8)], 0, 0.0, 1.0, 3)
    assert len(made.timeline.records) == 3
