"""How much of what was submitted is done: the head of a picture."""

from __future__ import annotations

from pathways_lab.notebook.scene.picture import Picture, Wanted
from pathways_lab.timeline.log import Timeline
from pathways_lab.timeline.records import Event, Span


def test_progress_counts_what_was_submitted_and_not_what_has_a_place() -> None:
    """A loop has submitted ten runs of two gangs, and three gangs have places."""
    steps = [[False, "f", 1, 4, [], ""], [True, "t", 1, 4, [0], ""], [False, "g", 1, 4, [1], ""]]
    args = {"hosts": ("i/a",), "slice": 1}
    log = Timeline(clock=lambda: 2.0)
    log.extend([
        Event("plan", 0.0, program="p", args={"plan": "k", "steps": steps}),
        *(Event("submitted", 1.0, run=n, program="p", args={"plan": "k"}) for n in range(1, 11)),
        Event("granted", 1.0, "i", "", 1, 0, "p", "f", "k", {**args, "seq": 0}),
        Event("granted", 1.0, "i", "", 1, 2, "p", "g", "k", {**args, "seq": 1}),
        Event("granted", 1.0, "i", "", 2, 0, "p", "f", "k", {**args, "seq": 2}),
        Span("gang", 1.1, 1.5, "i", "i/a", (0,), 1, 0, "p", "f", "k", "", {"seq": 0}),
    ])  # fmt: skip
    shown = Picture(log, Wanted(origin=0.0, since=0.0))
    assert shown.look(2.0)[1].status == "1 of 20 gangs done"
    log.extend([Event("cancelled", 2.0, run=10, program="p")])
    assert shown.look(2.0)[1].status == "1 of 18 gangs done"
    shown.do("clear")
    assert shown.look(2.0)[1].status == "1 of 18 gangs done"
