"""A wait that somebody has clicked has a card of its own, and computations lead to each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pathways_lab.notebook.panels import PANELS
from pathways_lab.notebook.scene.awaited import (
    client_waits,
    device_at,
    sources,
    users,
    wait_at,
    waits_so_far,
)
from pathways_lab.notebook.scene.gang_number import number
from pathways_lab.notebook.scene.header import Header
from pathways_lab.notebook.scene.scene import MARKS, RUNS, UNKNOWN, Scene
from pathways_lab.notebook.scene.text import NAMED, card, wait_card
from pathways_lab.notebook.view.picture import Picture, Wanted
from pathways_lab.timeline.log import Timeline
from pathways_lab.timeline.records import Event, Record, Sample, Span
from pathways_lab.timeline.waits import known_order
from tests.notebook.synthetic import Cluster, arrival
from tests.notebook.test_card import RUN

PLACE = ("island0", "island0/host0")


def picture(records: list[Record], now: float = 5.0) -> Picture:
    log = Timeline(clock=lambda: now)
    log.extend([r for r in sorted(records, key=known_order) if arrival(r) <= now])
    made = Picture(log, Wanted(origin=0.0, since=0.0))
    made.look(now)
    return made


def chosen(records: list[Record], moment: float, y: float = 0.0, now: float = 5.0) -> Header:
    """The header when the wait at a moment and a height is clicked."""
    made = picture(records, now)
    made.do("choose", [moment, y])
    return made.look(now)[1]


def test_a_wait_has_a_card_of_its_cause_its_time_its_place_and_what_it_is_behind() -> None:
    cluster = Cluster()
    cluster.pipeline(micro=1)
    header = chosen(cluster.records, 0.02, 1.55)
    assert dict(header.chosen) == {
        "": "waited 43 ms for earlier computation",
        "behind": "fwd0 on island0",
        "line": "h = forward(params, x)",
        "from": "0.0010 s to 0.0440 s",
        "on": "island1, device 0 and 3 more alike, slice s1",
        "before": "fwd1 of train",
        "that is": "a computation that makes its inputs, or is before it on its slices,"
        " had not ended",
    }
    assert header.line == "h = forward(params, x)"
    first, second = number(RUN, 0), number(RUN, 2)
    assert header.links == (("behind", (("fwd0", first),)), ("before", (("fwd1", second),)))
    assert header.arrows == ((first, second),)
    moved = chosen(cluster.records, 0.05, 1.55)
    told = dict(moved.chosen)
    assert told["behind"] == "transfer of 1 MiB from island0/host0, results of fwd0"
    assert moved.arrows == ((number(RUN, 1), second),)
    assert "does not have it" in dict(chosen(cluster.records, 4.0).chosen)["wait"]


def test_a_wait_that_goes_on_says_so_and_is_found_again_when_it_has_ended() -> None:
    cluster = Cluster()
    cluster.pipeline(micro=1)
    again = cluster.pipeline(micro=1, at=0.5)
    assert again > 0.53
    assert dict(chosen(cluster.records, 0.52, 1.55, now=0.53).chosen)[""].startswith("has waited ")
    assert dict(chosen(cluster.records, 0.52, 1.55).chosen)[""] == (
        "waited 43 ms for earlier computation"
    )


def test_a_wait_for_a_computation_that_itself_waited_for_a_transfer_says_so() -> None:
    cluster, run = Cluster(), 1
    of: dict[str, Any] = {"program": "p", "client": "kernel-1"}
    steps = [
        [False, "encode", 0, 8, [], ""], [True, "to 1", 1, 8, [0], ""],
        [False, "decode", 1, 8, [1], ""], [True, "to 0", 0, 8, [2], ""],
        [False, "encode", 0, 8, [3], ""],
    ]  # fmt: skip
    cluster.records.append(Event("plan", 0.0, args={"plan": "k", "steps": steps}))
    cluster.records.append(Event("submitted", 0.0, run=run, args={"plan": "k"}, **of))
    end = cluster.gang(0, run, 0, "p", "encode", "", 0.0, 0.1, 0.0)
    moved = cluster.transfer(0, 1, run, 1, "p", "", end, 0.5)
    end = cluster.gang(1, run, 2, "p", "decode", "", moved, 0.1, moved)
    moved = cluster.transfer(1, 0, run, 3, "p", "", end, 0.1)
    cluster.gang(0, run, 4, "p", "encode", "", moved, 0.1, moved)
    told = dict(chosen(cluster.records, 0.4, 0.0).chosen)
    assert told[""].endswith("for earlier computation")
    assert told["behind"] == (
        "decode on island1, which itself waited 500 ms of that for input transfer"
    )


def held(cause: str) -> list[Record]:
    """Two clients on one device: the second waits from 0.2 s to 0.5 s for some cause."""
    of: dict[str, Any] = {"run": 2, "program": "q", "client": "bob"}
    records: list[Record] = [
        *Cluster(1, devices=1).records,
        Event("plan", 0.0, args={"plan": "k", "steps": [[False, "g", 0, 8, [], ""]]}),
        Event("submitted", 0.0, run=1, program="p", client="ann"),
        Event("submitted", 0.2, args={"plan": "k"}, **of),
        Span("gang", 0.0, 0.1, *PLACE, (0,), 1, 0, "p", "f", "ann", "a.py:1: f(x)"),
        Span("gang", 0.5, 0.6, *PLACE, (0,), step=0, node="g", line="a.py:2: g(x)", **of),
    ]
    if cause == "compiling":
        records.append(Span("compile", 0.2, 0.5, *PLACE, node="g", args={"slice": 0}))
        return records
    args = {"since": 0.2, "waited_for": cause}
    records += [
        Event("admitted", 0.5, args=args, **of),
        Sample("memory", 0.15, 3 << 20, *PLACE, args={"device": 0}),
        Event("submitted", 0.1, run=3, program="p", client="ann"),
        Span("gang", 0.2, 0.5, "island0", "island0/host1", (0,), 3, 0, "p", "h", "ann", "a.py:3:"),
    ]
    return records


@pytest.mark.parametrize(
    ("cause", "behind", "linked"),
    [
        ("memory", "3 MiB in use on island0", []),
        ("turn", "h of ann", [("h", number(3, 0))]),
        ("compiling", "g, which was compiled", []),
    ],
)
def test_each_cause_names_what_it_is_behind(cause: str, behind: str, linked: list[Any]) -> None:
    header = chosen(held(cause), 0.4)
    told = dict(header.chosen)
    assert (told[""], told["behind"]) == (f"waited 300 ms for {cause}", behind)
    assert [*dict(header.links).get("behind", ())] == linked


def test_a_mark_of_several_waits_has_a_cause_and_nothing_that_it_is_behind() -> None:
    made = picture(held("turn"))
    scene = made.scene
    lane = device_at(scene, 0.0)
    assert lane is not None
    wait = wait_at(scene, lane, 0.4, 5.0)
    assert wait is not None
    wait.step, wait.node = -1, ""
    told = wait_card(scene, lane, 0.4, 5.0)
    assert dict(told.facts)["before"] == "several of q"
    assert not dict(told.facts)["behind"]
    assert told.links == told.arrows == ()


def test_a_computation_leads_to_those_that_make_its_inputs_and_use_its_results() -> None:
    cluster = Cluster()
    cluster.pipeline(micro=1)
    made = picture(cluster.records)
    told = card(made.scene, number(RUN, 2))  # fwd1
    assert [told.facts[-2:]] == [(("inputs from", "fwd0"), ("results to", "bwd1"))]
    steps = {"inputs from": (("fwd0", number(RUN, 0)),), "results to": (("bwd1", number(RUN, 3)),)}
    assert dict(told.links) == steps
    here = number(RUN, 2)
    assert told.arrows == ((number(RUN, 0), here), (here, number(RUN, 3)))


def test_of_many_only_some_are_named() -> None:
    many = NAMED + 7
    steps = [[False, "a", 0, 8, [], ""], *([False, "b", 0, 8, [0], ""] for _ in range(many))]
    cluster = Cluster(1)
    cluster.records += [
        Event("plan", 0.0, args={"plan": "k", "steps": steps}),
        Event("submitted", 0.0, run=1, program="p", args={"plan": "k"}),
    ]
    cluster.gang(0, 1, 0, "p", "a", "", 0.0, 0.1, 0.0)
    told = card(picture(cluster.records).scene, number(1, 0))
    names = [f"b (no. {n})" for n in range(1, NAMED + 1)]
    assert dict(told.facts)["results to"] == ", ".join(names) + " and 7 more"
    assert [name for name, _ in dict(told.links)["results to"]] == names


def test_results_are_followed_through_transfers_and_no_further() -> None:
    steps = [
        [n in (1, 2), "n", 0, 8, after, ""] for n, after in enumerate(([], [0], [1], [2], [3], [0]))
    ]
    scene = picture([
        Event("plan", 0.0, args={"plan": "p", "steps": steps}),
        Event("submitted", 0.0, run=1, program="p", args={"plan": "p"}),
    ]).scene  # fmt: skip
    assert users(scene, 1, 0) == [(1, 3), (1, 5)]
    assert users(scene, 1, 2) == [(1, 3)], "of a transfer"
    assert sources(scene, 1, 3) == [(1, 0)]
    assert users(scene, 1, -1) == sources(scene, 1, -1) == users(scene, 2, 0) == []


def test_a_value_that_is_moved_again_and_again_is_followed_to_its_maker() -> None:
    records: list[Record] = [
        Event("plan", 0.0, args={"plan": "f", "steps": [[False, "f", 0, 8, [], "", [], [0]]]}),
        Event("plan", 0.0, args={"plan": "t", "steps": [[True, "", 0, 8, [], "", [0], [0]]]}),
    ]
    for run in range(1, 2000):
        args = {"plan": "f" if run == 1 else "t", "reads": [run - 1], "makes": [run]}
        records.append(Event("submitted", 0.0, run=run, program="p", args=args))
    scene = Scene(0.0)
    for record in records:
        scene.flows.add(record)
    assert sources(scene, 1999, 0) == [(1, 0)]


def calls(*nodes: str) -> list[Record]:
    """Calls, each a run of its own on an island of its own: all but the first read its result,
    which is there after 0.3 s."""
    cluster, end = Cluster(len(nodes)), 0.3
    for run, node in enumerate(nodes, 1):
        moved = [[True, "", run - 1, 8, [], "", [0], []]] * (run > 1)
        steps = [*moved, [False, node, run - 1, 8, [0] * len(moved), "", [], [0]]]
        args = {"plan": node, "reads": [71] if run > 1 else [], "makes": [70 + run]}
        cluster.records += [
            Event("plan", 0.0, args={"plan": node, "steps": steps}),
            Event("submitted", 0.0, run=run, program=node, args=args),
        ]
        if run > 1:
            cluster.transfer(0, run - 1, run, 0, node, "", end, 0.1)
        begun = 0.0 if run == 1 else end + 0.1
        cluster.gang(run - 1, run, int(run > 1), node, node, f"a.py:{run}:", begun, 0.3, 0.0)
    return cluster.records


def test_calls_that_take_results_of_others_lead_to_these() -> None:
    header = chosen(calls("f", "g", "g"), 0.1, 1.55)
    told = dict(header.chosen)
    assert (told["behind"], header.line) == ("f on island0", "a.py:1:")
    assert header.arrows == ((number(1, 0), number(2, 1)),)
    scene = picture(calls("f", "g", "g")).scene
    assert dict(card(scene, number(2, 1)).facts)["inputs from"] == "f"
    assert dict(card(scene, number(2, 0)).facts)["moves results of"] == "f", "of the transfer"
    first = card(scene, number(1, 0))
    assert dict(first.facts)["results to"] == "g (run 2), g (run 3)"
    assert first.arrows == ((number(1, 0), number(2, 1)), (number(1, 0), number(3, 1)))


def test_a_place_that_was_withheld_for_another_computation_is_not_what_inputs_waited_for() -> None:
    records = [
        replace(r, time=0.05)
        if isinstance(r, Event) and r.kind == "granted" and r.run == 2 else r
        for r in calls("f", "g")
    ]  # fmt: skip
    place = ("island1", "island1/host0", (0, 1, 2, 3))
    records += [
        Event("submitted", 0.0, run=9, program="old"),
        Span("gang", 0.0, 0.05, *place, 9, 0, "old", "old", args={"slice": 1}),
    ]
    assert dict(chosen(records, 0.2, 1.55).chosen)["behind"] == "f on island0"


def test_a_program_of_several_computations_says_which_of_them_reads_what() -> None:
    records = calls("f", "g")
    two = [[False, "h", 1, 8, [], ""], [False, "g", 1, 8, [], "", [0], []]]
    records = [
        replace(r, args={"plan": "g", "steps": two}) if r.args.get("plan") == "g"
        and r.kind == "plan" else r
        for r in records
    ]  # fmt: skip
    scene = picture(records).scene
    assert dict(card(scene, number(1, 0)).facts)["results to"] == "g"
    assert sources(scene, 2, 1) == [(1, 0)]
    assert not sources(scene, 2, 0), "h reads nothing"


def test_a_device_waits_for_a_run_that_has_no_places_yet_and_says_for_what() -> None:
    """Its cause may still be another one, memory for example."""
    made = calls("f", "g")
    about: dict[str, Any] = {"run": 9, "program": "old"}
    old = Span("gang", 0.0, 0.05, "island1", "island1/host0", (0, 1, 2, 3), step=0, **about)
    records = [*made, Event("submitted", 0.0, **about), old, Event("finished", 0.05, **about)]
    granted = [r for r in made if isinstance(r, Event) and r.kind == "granted" and r.run == 2]
    first = [r for r in made if isinstance(r, Event) and r.kind == "granted" and r.run == 1]
    for now, readout, hidden in (
        (0.2, "needs f", granted),
        (0.2, "needs f", granted + first),
        (0.32, "receives f", granted),
    ):  # fmt: skip
        known = [r for r in records if arrival(r) <= now and r not in hidden]
        scene = picture(known, now=now).scene
        assert {MARKS[int(kind)] for kind in waits_so_far(scene, now)["kind"]} == {UNKNOWN}
        assert readout in PANELS["queues"](scene, now).readouts.values()


def test_a_wait_for_a_transfer_that_is_a_run_of_its_own_names_it() -> None:
    cluster, own = Cluster(2), {"f": 1, "t": 2, "g": 3}
    for name, run in own.items():
        about = [name == "t", name, int(name != "f"), 8, [], "", [0][: run - 1], [0]]
        args = {"plan": name, "reads": [69 + run], "makes": [70 + run]}
        cluster.records += [
            Event("plan", 0.0, args={"plan": name, "steps": [about]}),
            Event("submitted", 0.0, run=run, program=name, args=args),
        ]
    cluster.gang(0, 1, 0, "f", "f", "a.py:1:", 0.0, 0.3, 0.0)
    cluster.transfer(0, 1, 2, 0, "t", "", 0.3, 0.1)
    cluster.gang(1, 3, 0, "g", "g", "a.py:2:", 0.4, 0.3, 0.0)
    moved = chosen(cluster.records, 0.35, 1.55)
    assert dict(moved.chosen)["behind"] == "transfer of 1 MiB from island0/host0, results of f"
    assert moved.arrows == ((number(2, 0), number(3, 0)),)
    assert dict(chosen(cluster.records, 0.1, 1.55).chosen)["behind"] == "f on island0"


def test_a_card_tells_for_how_long_the_devices_had_another_computation_before() -> None:
    """Granted at 0.01 s and begun at 0.3 s, it waited for nothing but its own lane."""
    cluster = Cluster(1)
    for run, at in ((1, 0.0), (2, 0.01)):
        cluster.records.append(Event("submitted", at, run=run, program="p"))
        cluster.gang(0, run, 0, "p", "fg"[run - 1], "", 0.0, 0.3, at)
    told = dict(card(picture(cluster.records).scene, number(2, 0)).facts)["waited"]
    assert told == "290 ms behind f in its own lane"


@pytest.mark.parametrize("ahead", [False, True])
def test_a_client_that_waits_for_long_has_a_lane_with_its_line(ahead: bool) -> None:
    """A run takes 0.4 s, and the client makes the next one 0.1 s later, or has made it before."""
    cluster, line, worked = Cluster(1), "cell.py:4: y.block_until_ready()", "cell.py:2: x = read()"
    of: dict[str, Any] = {"program": "p", "client": "kernel-1"}
    for n in range(4):
        begun = 0.5 * n
        cluster.records.append(
            Event("submitted", 0.0 if ahead else begun, run=n + 1,
                  args={"waited": line, "worked": worked} if n else {}, **of)
        )  # fmt: skip
        end = cluster.gang(0, n + 1, 0, "p", "f", "", begun, 0.4, begun)
        cluster.records.append(Event("finished", end, run=n + 1, **of))
    scene = picture(cluster.records, now=1.9).scene
    plot = PANELS["queues"](scene, 1.9)
    layers = {layer.name: layer.columns for layer in plot.layers}
    assert list(plot.rows.values())[1:] == ([] if ahead else ["kernel-1"])
    assert list(plot.groups.values())[1:] == ([] if ahead else ["client"])
    assert layers["queues-clients"]["left"] == ([] if ahead else pytest.approx([0.0, 0.5, 1.0]))
    if ahead:
        return
    assert layers["queues-clients"]["right"] == pytest.approx([0.4, 0.9, 1.4])
    assert set(layers["queues-clients"]["line"]) == {"4 of cell.py: y.block_until_ready()"}
    told = layers["queues-causes"]
    ways = ["waits at line 4 of cell.py: y.block_until_ready()", "waits at line 4 of cell.py",
            "waits at line 4", "waits", ""]  # fmt: skip
    assert ways in told["choices"]
    assert max(layers["queues-clients"]["bottom"]) < plot.y[1]
    ways = ["its own work at line 2 of cell.py: x = read()", "its own work at line 2 of cell.py",
            "its own work at line 2", "its own work", ""]  # fmt: skip
    assert told["choices"].count(ways) == 2, "between two waits"


@pytest.mark.parametrize("over", [True, False], ids=["over", "goes on"])
@pytest.mark.parametrize("waited", [True, False])
def test_a_loop_that_waited_for_each_call_of_a_program_waits_for_its_newest(
    waited: bool, over: bool
) -> None:
    """Calls of q follow those of p at once, or when they have ended; the client waits for those of
    q, half a second each, or makes the next ones half of that time before."""
    cluster, line = Cluster(1), "cell.py:4: y.block_until_ready()"
    for n in range(18):
        of: dict[str, Any] = {"run": n + 1, "program": "pq"[n % 2], "client": "kernel-1"}
        begun = (n // 2 + 0.25 * (n % 2)) / 2
        args = {"waited": line} if waited and n and n % 2 == 0 else {}
        asked = (n // 2 - 0.5 * (not waited)) / 2
        cluster.records.append(Event("submitted", asked, args=args, **of))
        if n < 17 or over:
            end = cluster.gang(
                0, n + 1, 0, of["program"], "f", "", begun, 0.125 + 0.25 * (n % 2), asked
            )
            cluster.records.append(Event("finished", end, **of))
    now = 4.55 if over else 4.3
    scene = picture(cluster.records, now=now).scene
    waits = client_waits(scene, 0.0, now).get("kernel-1", [])
    until = 4.5 if over else now
    assert [wait[1:] for wait in waits][-1:] == ([(pytest.approx(until), line)] if waited else [])


def test_a_client_whose_runs_are_too_many_has_its_lane_for_those_that_are_remembered() -> None:
    cluster, end, many = Cluster(1), 0.0, 6 * RUNS
    for n in range(1, many):
        of: dict[str, Any] = {"run": n, "program": "p", "client": "kernel-1"}
        cluster.records.append(Event("submitted", end, **of))
        end = cluster.gang(0, n, 0, "p", "f", "", end, 0.01, end)
        cluster.records.append(Event("finished", end, **of))
    scene = picture(cluster.records, now=end).scene
    assert len(scene.runs) < many / 5
    assert sum(w.end - w.start for w in client_waits(scene, 0.0, end)["kernel-1"]) < 0.2 * end
    assert "client" in PANELS["queues"](scene, end).groups.values()


def test_a_client_that_waits_for_little_has_no_lane() -> None:
    cluster = Cluster(1)
    of: dict[str, Any] = {"program": "p", "client": "kernel-1"}
    for n in range(4):
        cluster.records.append(Event("submitted", n * 0.5, run=n + 1, **of))
        end = cluster.gang(0, n + 1, 0, "p", "f", "", n * 0.5, 0.05, n * 0.5)
        cluster.records.append(Event("finished", end, run=n + 1, **of))
    scene = picture(cluster.records, now=2.0).scene
    assert len(client_waits(scene, 0.0, 2.0)["kernel-1"]) == 3
    assert "client" not in PANELS["queues"](scene, 2.0).groups.values()


@pytest.mark.parametrize("waits", [True, False], ids=["waited of late", "never waited"])
def test_the_lane_of_a_client_that_waits_now_and_then_comes_and_goes_with_no_step(
    waits: bool,
) -> None:
    """It calls four times ahead, 0.2 s each, and waits for all: two steps are shown."""
    cluster, now, called, shown = Cluster(1), 0.0, 0.0, []
    scene, done = Scene(0.0, stepwise=True), len(cluster.records)
    scene.add(cluster.records, now)
    of: dict[str, Any] = {"program": "p", "client": "kernel-1"}
    for n in range(31):
        called = now if waits and n % 4 == 0 else called
        cluster.records.append(Event("submitted", called, run=n + 1, **of))
        now = cluster.gang(0, n + 1, 0, "p", "f", "", now, 0.2, now)
        cluster.records.append(Event("finished", now, run=n + 1, **of))
        scene.add(sorted(cluster.records[done:], key=known_order), now)
        done = len(cluster.records)
        if n >= 8:
            assert scene.shown is not None
            assert len(scene.shown.runs) <= 3
            shown.append("client" in PANELS["queues"](scene, now).groups.values())
    assert shown == [waits] * len(shown)
    scene.final = True
    drawn = {layer.name: layer.columns for layer in PANELS["queues"](scene, now).layers}
    has_lane = "client" in PANELS["queues"](scene, now).groups.values()
    assert has_lane == bool(len(drawn["queues-clients"]["left"])), "what is over has no empty lane"


@pytest.mark.parametrize("third", [True, False])
def test_a_loop_that_waits_for_each_third_call_waits_for_the_newest_one_if_it_is_its_turn(
    third: bool,
) -> None:
    """Three calls at once, which take 0.2 s each; the newest one is the third, or the second."""
    cluster, end, called = Cluster(1), 0.0, 0.0
    for n in range(12 if third else 11):
        of: dict[str, Any] = {"run": n + 1, "program": "p", "client": "kernel-1"}
        called = end if n % 3 == 0 else called
        cluster.records.append(Event("submitted", called + 0.001 * (n % 3), **of))
        if n < 9:
            end = cluster.gang(0, n + 1, 0, "p", "f", "", end, 0.2, end)
            cluster.records.append(Event("finished", end, **of))
    now = end + 0.1
    waits = client_waits(picture(cluster.records, now=now).scene, 0.0, now)["kernel-1"]
    assert len(waits) == 3 + third
    assert not third or waits[-1][:2] == pytest.approx((end + 0.002, now))
