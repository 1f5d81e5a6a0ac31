"""Answers about twice as many gangs take twice as many steps, and not four times as many."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from pathways_lab.notebook.panels import graph, planned
from pathways_lab.notebook.scene import scene as scenes
from pathways_lab.notebook.scene.scene import Scene
from pathways_lab.timeline.log import Timeline
from pathways_lab.timeline.packed import Item
from pathways_lab.timeline.queries import order
from pathways_lab.timeline.records import Event, Span
from pathways_lab.timeline.waits import known_order
from tests.lines import lines
from tests.timeline.streams import CLIENT, ISLAND, granted, row

HOSTS = [f"{ISLAND}/host{n}" for n in range(2)]


def program(steps: int, each: int = 4, told: bool = True) -> list[Item]:
    """A run of *steps* gangs one after the other with a moment between them: *each* of them are
    granted, and reported, at a time.  told: whether its plan is known."""
    flow = [[False, "f", 7, 4, [at - 1] if at else [], "a.py:0: f(x)"] for at in range(steps)]
    plan = {"plan": "k", "steps": flow} if told else {"plan": "other", "steps": []}
    of = {"run": 1, "program": "p", "client": CLIENT}
    items: list[Item] = [Event("host-joined", 0.0, ISLAND, h, args={"devices": 2}) for h in HOSTS]
    items.append(Event("plan", 0.5, program="p", client=CLIENT, args=plan))
    items.append(Event("submitted", 1.0, **of, args={"plan": "k"}))
    for first in range(0, steps, each):
        when = 1.0 + 3e-4 * first
        items.append(granted(when, 1, min(steps, first + each), HOSTS, first=first))
        for late, host in enumerate(HOSTS):
            at = [when + 3e-4 * n + 1e-5 * late for n in range(min(each, steps - first))]
            start = [t + 3e-6 for t in at]
            columns = (at, [t + 1e-6 for t in at], start, [t + 2e-4 for t in start])
            items.append(row(columns, 1, first, host))
            if not told:
                items.append(
                    Span("transfer", when, when + 1e-5, ISLAND, host, (0, 1), 1, first, "p", "f")
                )
    items.append(Event("finished", 2.0 + 3e-4 * steps, **of))
    return sorted(items, key=known_order)


def timeline(steps: int) -> Timeline:
    made = Timeline(clock=lambda: 100.0)
    made.extend(program(steps))
    return made


def fold(items: list[Item]) -> Scene:
    made = Scene(0.0, 100.0, final=True)
    made.add(items, 100.0)
    return made


def with_others(steps: int) -> Timeline:
    """Between any two gangs of run 1 another run has its devices; a third says it had them all."""
    made = Timeline(clock=lambda: 100.0)
    each = [
        Span("gang", at, at + 0.4, ISLAND, HOSTS[0], (0,), 1 + number % 2, number // 2, "p", "f")
        for number in range(2 * steps)
        for at in [1.0 + number / 2]
    ]
    made.extend(each)
    made.extend([Span("gang", 1.0, 2.0 + steps, ISLAND, HOSTS[0], (0,), 3, 0, "q", "f")])
    return made


def failing(runs: int) -> list[Event | Span]:
    """So many runs of one gang, all of which fail."""
    found: list[Event | Span] = []
    for run in range(1, runs + 1):
        found.append(Span("gang", run, run + 0.5, ISLAND, HOSTS[0], (0,), run, 0, "p", "f"))
        found.append(Event("failed", run + 0.6, run=run, program="p", client=CLIENT))
    return found


Question = Callable[[Any], Any]
QUESTIONS: dict[str, tuple[Callable[[int], Any], Question]] = {
    "the story of a run": (timeline, lambda log: log.story(1)),
    "utilisation": (timeline, Timeline.utilisation),
    "waits": (timeline, Timeline.waits),
    "planned": (timeline, lambda log: log.planned(1)),
    "planned, among others": (with_others, lambda log: log.planned(1)),
    "the table of runs": (timeline, lambda log: log.runs),
    "the order of runs that fail": (failing, lambda records: order(records, ISLAND)),
    "a fold": (program, fold),
    "a fold without a plan": (lambda steps: program(steps, told=False), fold),
    "the graph": (lambda steps: fold(program(steps)), lambda scene: graph.plot(scene, 100.0)),
    "planned, drawn": (
        lambda steps: fold(program(steps)), lambda scene: planned.plot(scene, 100.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("question", QUESTIONS)
def test_twice_as_many_gangs_take_twice_as_long(question: str) -> None:
    make, ask = QUESTIONS[question]
    few, many = [lines(functools.partial(ask, make(steps))) for steps in (250, 500)]
    assert many < 2.2 * few, (few, many)


def test_a_large_run_is_remembered_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenes, "PARTS", 100)
    scene = fold(program(6_000))
    run = scene.runs[1]
    assert run.outcome == "finished"
    assert run.count == 6_000 * len(HOSTS)
    states = {layer.name: len(layer.columns["node"]) for layer in graph.plot(scene, 100.0).layers
              if layer.name in {f"graph-{state}" for state in graph.STATES}}  # fmt: skip
    assert [name for name, count in states.items() if count] == ["graph-done"]


def test_of_runs_that_are_over_the_newest_are_remembered_and_at_least_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scenes, "PARTS", 5)
    scene = Scene(0.0, 100.0)
    for run in range(1, 7):
        of = {"run": run, "program": "p", "client": CLIENT}
        gangs = [Span("gang", run, run + 0.5, ISLAND, HOSTS[0], (0,), step=n, **of)
                 for n in range(run)]  # fmt: skip
        scene.add([*gangs, Event("finished", run + 0.6, **of)], run + 0.7)
        held = [known.count for known in scene.runs.values()]
        assert sum(held) <= 5 or held == [run]


def test_the_graph_of_a_finished_run_is_whole_when_half_of_its_records_are_gone() -> None:
    items = program(5_000)
    log = Timeline(capacity=1_000, clock=lambda: 100.0)
    log.extend(items)
    assert log.evicted
    scene = Scene(0.0, 100.0, final=True)
    for record in log.kept:
        scene.flows.add(record)
    scene.add(log.items, 100.0)
    assert len(scene.flows.run(1)) == 5_000
    drawn = {layer.name: len(next(iter(layer.columns.values())))
             for layer in graph.plot(scene, 100.0).layers}  # fmt: skip
    assert drawn["graph-waiting"] == drawn["graph-granted"] == 0
    assert drawn["graph-done"]
