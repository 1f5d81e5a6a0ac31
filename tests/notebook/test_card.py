"""What is told of a gang that somebody has clicked, and of a lane that has nothing to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from pathways_lab.notebook.panels import PANELS
from pathways_lab.notebook.scene import text
from pathways_lab.notebook.scene.advice import advice
from pathways_lab.notebook.scene.awaited import later, makers, waits_so_far
from pathways_lab.notebook.scene.gang_number import number
from pathways_lab.notebook.scene.scene import MARKS, UNKNOWN, WAITS, Scene
from pathways_lab.notebook.view.picture import Picture, Wanted
from pathways_lab.notebook.view.stream import Stream
from pathways_lab.notebook.view.view import View
from pathways_lab.timeline.flow import Stage
from pathways_lab.timeline.log import Timeline
from pathways_lab.timeline.records import Event, Record, Span
from pathways_lab.timeline.waits import INPUT, ORDER, TRANSFER, known_order
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
    assert told["waited"] == (
        "43 ms earlier computation (behind fwd0 on island0), 10 ms input transfer, 1 ms dispatch"
    )
    assert told["inputs from"] == "fwd0"
    assert told["island"] == "island1", "a place among gangs and transfers says nothing to a reader"
    assert not card(records, steps["fwd0"])["inputs from"]


def test_a_gang_whose_run_had_no_places_says_for_which_computation_they_were_withheld() -> None:
    cluster = Cluster()
    for run, begin in ((RUN, 0.0), (RUN + 1, 0.42)):
        cluster.records.append(Event("submitted", 0.0, run=run, program="p", args={"plan": ""}))
        end = cluster.gang(0, run, 0, "p", "a", "", begin, 0.1, max(0.0, begin - 0.01))
        cluster.gang(1, run, 1, "p", "b", "", end, 0.3, max(0.0, begin - 0.01))
    log = Timeline(clock=lambda: 9.0)
    log.extend(cluster.in_order())
    picture = Picture(log, Wanted(origin=0.0, since=0.0))
    picture.look(9.0)
    picture.do("choose", number(RUN + 1, 0))
    told = dict(picture.look(9.0)[1].chosen)["waited"]
    assert told == "300 ms earlier computation (behind b on island1), 20 ms dispatch"


def test_an_arrival_has_a_card_of_what_moved_from_where_to_where() -> None:
    cluster = Cluster()
    cluster.pipeline(micro=1)
    records = cluster.in_order()
    moved = next(r for r in records if isinstance(r, Span) and r.kind == "transfer")
    told = card(records, moved.step)
    assert (told["moves results of"], told["for"]) == ("fwd0", "fwd1")
    assert (told["from"], told["to"]) == ("island0/host0", "island1/host0")
    assert told["moved"] == "1 MiB in 10 ms, 100 MiB/s"
    assert told["line"] == "h = forward(params, x)"
    assert told["run"] == f"1 of kernel-1, no. {moved.step} of its program"
    assert "does not have it" in card(records, 99)["computation"]


def test_a_mark_of_a_run_that_is_not_remembered_has_a_card_while_it_is_drawn() -> None:
    log = Timeline(clock=lambda: 5.0)
    log.extend(records := training(1))
    picture = Picture(log, Wanted(origin=0.0, since=0.0))
    picture.look(5.0)
    picture.scene.runs.clear()
    moved = next(r for r in records if isinstance(r, Span) and r.kind == "transfer")
    picture.do("choose", number(moved.run, moved.step))
    _, header = picture.look(5.0)
    told = dict(header.chosen)
    assert told[""] == "transfer of train"
    assert told["from"] == f"{moved.start:.4f} s to {moved.end:.4f} s"
    assert header.line == told["line"] == moved.line


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
        marks = waits_so_far(scene, moment), scene.waited.table.columns()
        found.append({})
        for each in marks:
            for kind, left, right, top in zip(
                *(each[name].tolist() for name in ("kind", "left", "right", "top")), strict=True
            ):
                if top > 0.6:  # island1
                    found[-1][kind] = right - left
        assert (begin in marks[0]["right"]) == (moment < begin + 0.04), "only while it runs"
    assert found[0].keys() == found[1].keys() >= {WAITS.index(INPUT), WAITS.index(TRANSFER)}
    assert found[0] == pytest.approx(found[1])


@pytest.mark.parametrize("placed", [True, False])
def test_an_idle_device_waits_for_its_next_gang_already(placed: bool) -> None:
    """Until its inputs are made, then for what is not known before their bytes have come; also
    where its run has places on another island only."""
    cluster = Cluster()
    cluster.pipeline(micro=1)
    again = cluster.pipeline(micro=1, at=0.5)
    assert again > 0.5
    records = [
        r for r in cluster.in_order()
        if placed or not (isinstance(r, Event) and r.kind == "granted"
                          and r.island == "island1" and r.time > 0.4)
    ]  # fmt: skip
    for moment, cause in ((0.53, INPUT), (0.55, UNKNOWN)):
        scene = Scene(0.0, 20.0)
        scene.add([r for r in records if arrival(r) <= moment], moment)
        marks = waits_so_far(scene, moment)
        mine = {MARKS[int(kind)]: right for kind, right, top in zip(
            marks["kind"], marks["right"], marks["top"], strict=True) if top > 0.6}  # fmt: skip
        assert max(mine, key=lambda cause: mine[cause]) == cause
        assert mine[cause] == pytest.approx(moment)


@pytest.mark.parametrize("micro", [1, 3])
def test_a_cause_that_is_drawn_while_a_device_waits_is_never_taken_back(micro: int) -> None:
    cluster, at = Cluster(islands=3), 0.0
    for _ in range(3):
        at = cluster.pipeline(micro=micro, at=at + 0.02)
    begun = {(r.run, r.step): r.start for r in cluster.records
             if isinstance(r, Span) and r.kind == "gang"}  # fmt: skip
    records = sorted(
        [
            replace(r, time=begun[r.run, r.step])
            if isinstance(r, Event) and r.kind == "launched" else r
            for r in cluster.records
        ],
        key=known_order,
    )  # fmt: skip
    whole = Scene(0.0, 20.0)
    whole.add(records, at)
    final = whole.waited.table.columns()
    told = unknown = 0.0
    for moment in np.arange(0.01, at, 0.013).tolist():
        scene = Scene(0.0, 20.0)
        scene.add([r for r in records if arrival(r) <= moment], moment)
        marks = waits_so_far(scene, moment)
        for kind, left, right, top in zip(
            *(marks[name].tolist() for name in ("kind", "left", "right", "top")), strict=True
        ):
            if MARKS[int(kind)] == UNKNOWN:
                unknown += right - left
                continue
            same = (final["kind"] == kind) & (abs(final["top"] - top) < 1e-3)
            common = np.minimum(final["right"], right) - np.maximum(final["left"], left)
            shared = np.maximum(common, 0.0)[same].sum()
            assert shared == pytest.approx(right - left, abs=1e-6), (moment, MARKS[int(kind)])
            told += right - left
    assert told > unknown, "most of it is known"


def test_an_idle_device_whose_next_gang_needs_one_that_computes_waits_for_the_order() -> None:
    cluster = Cluster(1, devices=2)
    name, place = "island0", ("island0", "island0/host0")
    slices = {7: [(place[1], 0)], 8: [(place[1], 0), (place[1], 1)]}
    for number_, devices in slices.items():
        args = {"slice": number_, "devices": devices, "shape": (len(devices),), "axes": ("x",)}
        cluster.records.append(Event("slice-bound", 0.0, name, client="ann", args=args))
    for run, of in ((1, 8), (2, 7), (3, 8)):
        cluster.records.append(Event("submitted", 0.0, run=run, program="p"))
        args = {"seq": run, "slice": of, "hosts": place[1:]}
        cluster.records.append(Event("granted", 0.0, name, run=run, step=0, node="f", args=args))
    launched = {"run": 2, "step": 0, "node": "f", "program": "p"}
    cluster.records += [
        Span("gang", 0.0, 0.2, *place, (0, 1), 1, 0, "p", "f", args={"slice": 8}),
        Event("launched", 0.2, *place, **launched, args={"devices": (0,), "slice": 7}),
    ]
    scene = Scene(0.0, 20.0)
    scene.add(sorted(cluster.records, key=arrival), 0.5)
    marks = waits_so_far(scene, 0.5)
    assert [WAITS[int(kind)] for kind in marks["kind"]] == [ORDER]
    assert (marks["left"][0], marks["right"][0]) == (0.2, 0.5)


def test_a_card_says_behind_which_computation_a_gang_had_its_place() -> None:
    """Of another client, on a part of its devices."""
    place = ("island0", "island0/host0")
    slices = {1: (0, 1), 2: (0,)}
    records: list[Record] = [*Cluster(1, devices=2).records]
    for number_, devices in slices.items():
        args = {"slice": number_, "devices": [(place[1], d) for d in devices], "shape": (1,)}
        records.append(
            Event("slice-bound", 0.0, place[0], client="ann", args={**args, "axes": ("x",)})
        )
    for run, start, end, client in (
        (1, 0.0, 0.1, "ann"),
        (2, 0.1, 0.4, "bob"),
        (3, 0.4, 0.5, "ann"),
    ):
        on, node = (2, "answer") if client == "bob" else (1, "evaluate")
        of = {"run": run, "program": client, "client": client}
        records += [
            Event("submitted", 0.0, **of),
            Span("gang", start, end, *place, slices[on], step=0, node=node,
                 line=f"cell.py:{run}: {node}(x)", args={"slice": on}, **of),
        ]  # fmt: skip
    scene = Scene(0.0, 20.0)
    scene.add(sorted(records, key=known_order), 0.6)
    told = dict(text.card(scene, number(3, 0)).facts)["waited"]
    assert "gang order (behind answer of bob (line 2 of cell.py: answer(x)))" in told


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
    marks = waits_so_far(scene, 1.5)
    assert marks["kind"].tolist() == [WAITS.index(ORDER)]
    assert (marks["left"][0], marks["right"][0]) == (0.5, 1.0)
    assert marks["top"][0] > 0.5, "the lane of the two that are free"


def test_what_is_compiled_while_no_device_computes_has_its_line_a_card_and_an_advice() -> None:
    line = "a.py:7: def f(v):"
    args = {"function": "d", "slice": 0, "waiting": 2, "line": line}
    begun = Event("compiling", 0.5, "island0", "island0/host0", node="decode", args=args)
    log = Timeline(clock=lambda: 4.5)
    log.extend([*Cluster(1).records, begun])
    picture = Picture(log, Wanted(origin=0.0, since=0.0))
    plots, header = picture.look(4.5)
    told = "hosts compile decode before the first gang"
    assert {plot.empty for plot in plots if plot.empty} == {told}
    assert header.advice.startswith(
        "no device computes: hosts compile decode (line 7 of a.py: def f(v):); only the first call"
        " with new shapes does that: make one before the loop"
    )
    assert header.line == line
    assert header.chosen == (("", "hosts compile decode"), ("line", "7 of a.py: def f(v):"))
    assert header.compiling == ("decode", 1, 3, 4), "the time is told once"


def test_a_function_that_is_compiled_after_others_ran_has_an_advice_until_a_device_computes() -> (
    None
):
    args = {"function": "d", "slice": 0, "waiting": 0, "line": ""}
    place = "island0", "island0/host0"
    scene = Scene(0.0, 20.0)
    scene.add([*training(1, islands=1), Event("compiling", 1.5, *place, node="g", args=args)], 2.0)
    assert advice(scene, 2.0).startswith("no device computes: hosts compile g; only")
    of = {"run": 9, "step": 0, "program": "p", "node": "f"}
    scene.add([Event("launched", 2.0, *place, args={"devices": (0,)}, **of)], 2.1)
    assert not advice(scene, 2.1).startswith("no device computes")


def test_a_bar_of_several_steps_has_no_step_of_which_something_is_told() -> None:
    first, second = Stage(False, "f", 1, 4, ()), Stage(False, "g", 1, 4, ())
    flow = (first, second, Stage(True, "f", 2, 4, (0,)), Stage(True, "g", 2, 4, (1,)))
    scene: Any = Mock(flows=Mock(run=lambda _: flow, sources=lambda *_: []))
    assert later(scene, RUN, 0, 0.0) == second
    assert later(scene, RUN, -1, 0.0) is None
    assert makers(scene, RUN, 3) == [1]
    assert makers(scene, RUN, -1) == []
