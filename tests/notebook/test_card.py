"""What is told of a gang that somebody has clicked, and of a lane that has nothing to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from pathways_lab.notebook.panels import PANELS
from pathways_lab.notebook.panels.queues import waits_so_far
from pathways_lab.notebook.scene.advice import advice
from pathways_lab.notebook.scene.gang_number import number
from pathways_lab.notebook.scene.picture import Picture, Wanted
from pathways_lab.notebook.scene.scene import WAITS, Scene
from pathways_lab.notebook.view.stream import Stream
from pathways_lab.notebook.view.view import View
from pathways_lab.timeline.log import Timeline
from pathways_lab.timeline.records import Event, Span
from pathways_lab.timeline.waits import INPUT, ORDER, TRANSFER
from tests.notebook.synthetic import Cluster, arrival, training
from tests.notebook.test_lanes import late

RUN = (1 << 32) + 1


def card(records: list[Any], step: int, now: float = 5.0) -> dict[str, str]:
    """The facts about a step of the first run."""
    log = Timeline(clock=lambda: now)
    log.extend([r for r in records if arrival(r) <= now])
    picture = Picture(log, Wanted(origin=0.0, since=0.0))
    picture.look(now)
    picture.do("choose", number(RUN, step))
    _, header = picture.look(now)
    return dict(header.chosen)


def test_the_card_tells_what_was_waited_for_and_who_makes_the_inputs() -> None:
    cluster = Cluster()
    cluster.pipeline(micro=1)
    records = cluster.in_order()
    steps = {r.node: r.step for r in records if isinstance(r, Span) and r.kind == "gang"}
    told = card(records, steps["fwd1"])
    # Submitted at 0, granted at 1 ms; fwd0 takes 40 ms from 4 ms on, and its bytes 10 ms.
    assert told["waited"] == "43 ms earlier computation, 10 ms input transfer, 1 ms dispatch"
    assert told["inputs from"] == "fwd0"
    assert not card(records, steps["fwd0"])["inputs from"]


def test_the_card_names_the_hosts_that_have_not_ended() -> None:
    records = late(training(1, islands=1, hosts=2), "island0/host1", 3.0)
    step = next(r.step for r in records if isinstance(r, Span) and r.node == "fwd0")
    state = card(records, step, now=0.5)["state"]
    assert "(last on host0), not yet on host1" in state
    assert "not yet" not in card(records, step, now=9.0)["state"]


def test_an_idle_lane_says_which_node_it_waits_for() -> None:
    cluster = Cluster()
    cluster.pipeline(micro=1)
    scene = Scene(0.0, 20.0)
    scene.add([r for r in cluster.in_order() if arrival(r) <= 0.03], 0.03)
    assert list(PANELS["queues"](scene, 0.03).readouts.values()) == ["", "needs fwd0"]


@pytest.mark.parametrize("node", ["fwd0", "other"])
def test_the_operations_of_a_function_are_in_the_card_of_its_gangs(node: str) -> None:
    view = View(Timeline())
    view.live = Mock()
    view.timeline.operations["fwd0"] = "dot 75 %"
    picture = Picture(view.timeline, Wanted())
    _, header = picture.look(0.0)
    message = Stream((), header).snapshot()
    message["header"]["node"] = node
    view.message(message)
    ((sent,), _) = view.live.post.call_args
    assert dict(sent["header"]["chosen"]).get("operations") == {"fwd0": "dot 75 %"}.get(node)


def test_a_view_knows_the_name_of_the_gang_that_is_chosen() -> None:
    records = training(1)
    log = Timeline(clock=lambda: 5.0)
    log.extend(records)
    picture = Picture(log, Wanted(origin=0.0, since=0.0))
    gang = next(r for r in records if isinstance(r, Event) and r.kind == "granted")
    picture.do("choose", number(gang.run, gang.step))
    assert picture.look(5.0)[1].node == gang.node


def test_the_gap_before_what_runs_has_its_causes_before_that_has_ended() -> None:
    cluster = Cluster()
    cluster.pipeline(micro=1)
    begin = next(r.start for r in cluster.records if isinstance(r, Span) and r.node == "fwd1")
    found: list[dict[int, float]] = []
    for moment in (begin + 0.01, begin + 0.05):
        scene = Scene(0.0, 20.0)
        records = [
            replace(r, time=begin) if isinstance(r, Event) and r.kind == "launched"
            and r.node == "fwd1" else r
            for r in cluster.in_order()
        ]  # fmt: skip
        scene.add([r for r in records if arrival(r) <= moment], moment)
        marks = waits_so_far(scene), scene.waited.table.columns()
        found.append({})
        for each in marks:
            for kind, left, right, top in zip(
                *(each[name].tolist() for name in ("kind", "left", "right", "top")), strict=True
            ):
                if top > 0.6:  # island1
                    found[-1][kind] = right - left
        assert bool(len(marks[0]["left"])) == (moment < begin + 0.04), "only while it runs"
    assert found[0].keys() == found[1].keys() >= {WAITS.index(INPUT), WAITS.index(TRANSFER)}
    assert found[0] == pytest.approx(found[1])


def test_lanes_that_share_what_runs_have_gaps_of_their_own() -> None:
    """Two devices wait while two others of their gang are another client's."""
    place = ("island0", "island0/host0")
    of = {"run": 3, "program": "q", "node": "b"}
    scene = Scene(0.0, 20.0)
    scene.add(
        [
            *Cluster(1).records,
            Event("submitted", 0.0, run=1, program="q"),
            Span("gang", 0.0, 0.4, *place, (0, 1, 2, 3), 1, 0, "q", "b", args={"slice": 1}),
            Event("submitted", 0.5, run=3, program="q"),
            Event("submitted", 0.0, run=2, program="p"),
            Span("gang", 0.4, 1.0, *place, (0, 1), 2, 0, "p", "a", args={"slice": 2}),
            Event(
                "launched", 1.0, *place, step=0, args={"devices": (0, 1, 2, 3), "slice": 1}, **of
            ),
        ],
        1.5,
    )
    marks = waits_so_far(scene)
    assert marks["kind"].tolist() == [WAITS.index(ORDER)]
    assert (marks["left"][0], marks["right"][0]) == (0.5, 1.0)
    assert marks["top"][0] > 0.5, "the lane of the two that are free"


def test_what_is_compiled_before_the_first_gang_has_its_line_and_an_advice() -> None:
    steps = [[False, "decode", 0, 8, [], "a.py:7: return decode(x)"]]
    scene = Scene(0.0, 20.0)
    scene.add(
        [
            *Cluster(1).records,
            Event("plan", 0.0, args={"plan": "k", "steps": steps}),
            Event("submitted", 0.0, run=1, program="p", args={"plan": "k"}),
            Event("compiling", 0.1, "island0", "island0/host0", node="decode",
                  args={"function": "d", "slice": 0, "waiting": 0}),
        ],
        1.0,
    )  # fmt: skip
    assert PANELS["queues"](scene, 1.0).empty == (
        "hosts compile decode before the first gang (line 7: return decode(x))"
    )
    assert advice(scene, 1.0).startswith("hosts compile decode: only the first call")
