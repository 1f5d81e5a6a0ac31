"""How much of what was submitted is done: the head of a picture."""

from __future__ import annotations

from pathways_lab.notebook.dashboard.state import state
from pathways_lab.notebook.view.picture import Picture, Wanted
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


def test_a_function_that_is_compiled_is_named_wherever_somebody_looks() -> None:
    args = {"function": "key", "slice": 1, "waiting": 2}
    log = Timeline(clock=lambda: 5.0)
    log.extend([
        Event("host-joined", 0.0, "i", "i/a", args={"devices": 1}),
        Event("compiling", 1.5, "i", "i/a", node="forward", args=args),
    ])  # fmt: skip
    shown = Picture(log, Wanted(origin=0.0, since=0.0))
    plots, header = shown.look(5.0)
    assert (header.state, header.compiling) == ("compiling", ("forward", 1, 3, 3))
    late = Picture(log, Wanted(origin=4.0, since=4.0))
    assert late.look(5.0)[1].compiling == header.compiling, "it began before that picture"
    late.do("clear")
    assert late.look(5.0)[1].compiling == header.compiling
    empty = "hosts compile forward before the first gang"
    assert {plot.empty for plot in plots if plot.empty} == {empty}
    assert empty in shown.text()
    assert "compiling forward, 1 of 3, 3 s" in state(shown.scene, [], 5.0)["notes"]
    shown.do("seek", 5.0)
    held = shown.look(7.0)[1]
    assert held.at is not None
    assert (held.state, held.compiling) == (header.state, header.compiling), "it stands"
    shown.do("seek", None)
    log.extend([Span("compile", 1.5, 4.0, "i", "i/a", node="forward", args=args)])
    header = shown.look(5.0)[1]
    assert (header.state, header.compiling) == ("waiting", None)
    assert state(shown.scene, [], 5.0)["notes"] == []


def test_the_head_says_how_much_of_the_time_is_the_labs_own() -> None:
    """A device that computes for four of five seconds, and waits for half of one for dispatch."""
    of = {"run": 1, "program": "p", "client": "k"}
    log = Timeline(clock=lambda: 5.0)
    log.extend([
        Event("host-joined", 0.0, "i", "i/a", args={"devices": 1}),
        Event("submitted", 0.5, **of),
        Span("gang", 1.0, 5.0, "i", "i/a", (0,), step=0, node="f", **of),
    ])  # fmt: skip
    shown = Picture(log, Wanted(origin=0.0, since=0.0, until=5.0))
    assert shown.look(5.0)[1].shares == "busy 95 %, dispatch 4.8 %", "of the time drawn"
    assert Picture(Timeline(clock=lambda: 1.0), Wanted()).look(1.0)[1].shares == ""
