"""Devices that do alike share a lane, and a straggler has its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from pathways_lab.notebook.panels import PANELS
from pathways_lab.notebook.scene.lanes import STEADY
from pathways_lab.notebook.scene.plot import FRAME, wide
from pathways_lab.notebook.scene.scene import WAITS, Scene
from pathways_lab.notebook.view.picture import Picture, Wanted
from pathways_lab.timeline.log import Timeline
from pathways_lab.timeline.machine import Lane
from pathways_lab.timeline.records import Event, Record, Span
from pathways_lab.timeline.waits import INPUT
from tests.notebook.synthetic import Cluster, arrival, training

END = 5.0


def scene_of(records: Sequence[Record], until: float = END, window: float = 20.0) -> Scene:
    scene = Scene(0.0, window)
    scene.add([r for r in records if arrival(r) <= until], until)
    return scene


def names(scene: Scene) -> list[str]:
    """Of lanes of devices."""
    labels = PANELS["queues"](scene, END).rows
    return [labels[at] for at in scene.lanes.rows.labels if at in labels]


def bars(scene: Scene) -> dict[str, Any]:
    layers = PANELS["queues"](scene, END).layers
    return next(dict(each.columns) for each in layers if each.name == "queues-bars")


@pytest.mark.parametrize("known", [False, True])
def test_bars_are_drawn_in_their_lanes_also_where_the_machine_is_known_before(known: bool) -> None:
    """A saved picture knows the machine, and has lanes, before it has computations."""
    cluster = Cluster(2, 1, 4)
    cluster.pipeline(micro=1)
    records = cluster.in_order()
    machine = deepcopy(scene_of(records).machine) if known else None
    scene = Scene(0.0, 20.0, final=True, machine=machine)
    scene.add(records, END)
    middles = {round(float(top + bottom) / 2) for top, bottom in zip(
        bars(scene)["top"], bars(scene)["bottom"], strict=True)}  # fmt: skip
    assert middles == {round(row) for row in PANELS["queues"](scene, END).rows}


def late(records: Sequence[Record], host: str, by: float, since: float = 0.0) -> list[Record]:
    """The same where a host ends each computation later, by so many seconds."""

    def told(r: Record) -> Record:
        slow = isinstance(r, Span) and r.kind == "gang" and r.host == host and r.start >= since
        return replace(r, end=r.end + by) if slow and isinstance(r, Span) else r

    return sorted(map(told, records), key=arrival)


@pytest.mark.parametrize(
    ("islands", "hosts", "devices"), [(2, 1, 4), (2, 2, 4), (8, 2, 4), (2, 40, 4)]
)
def test_all_devices_of_a_slice_are_one_lane_that_counts_for_all(
    islands: int, hosts: int, devices: int
) -> None:
    cluster = Cluster(islands, hosts, devices)
    cluster.pipeline(micro=1)
    records = cluster.in_order()
    scene = scene_of(records)
    count = hosts * devices
    assert len(names(scene)) == islands
    size = f" · {count} devices" if count < 100 else f" ×{count}"
    assert names(scene) == [f"s{n}{size}" for n in range(islands)]
    spans = [r for r in records if isinstance(r, Span)]
    assert int(bars(scene)["count"].sum()) == sum(len(r.devices) for r in spans)


def test_a_part_of_an_island_that_computes_for_another_slice_has_its_lane_and_name() -> None:
    cluster = Cluster(islands=1, devices=4)
    of = {"run": 1, "program": "p", "node": "f"}
    bound = [
        Event("slice-bound", 0.0, "island0", client="k", args={
            "slice": n, "devices": [("island0/host0", d) for d in devices], "shape": (2,),
            "axes": ("x",),
        })
        for n, devices in ((7, (0, 2)), (8, (1,)))
    ]  # fmt: skip
    gangs = [
        Span("gang", n / 10, (n + 1) / 10, "island0", "island0/host0", devices, step=n,
             args={"slice": slice_id}, **of)  # type: ignore[arg-type]
        for n, (slice_id, devices) in enumerate(((7, (0, 2)), (8, (1,)), (7, (0, 2))))
    ]  # fmt: skip
    scene = scene_of([*cluster.records, *bound, *gangs])
    assert names(scene) == ["s7 · 2 devices", "device 1", "device 3"]
    assert sorted(bars(scene)["count"]) == [1, 2, 2]


def test_a_straggler_has_its_own_lane_while_that_is_shown() -> None:
    records = training(3, islands=1, hosts=3)
    host = "island0/host1"
    assert names(scene_of(late(records, host, 0.015))) == ["s0 · 12 devices"], "not to be seen"
    assert names(scene_of(late(records, host, 0.002), 0.25)) == ["s0 · 12 devices"], "as always"
    slow = late(records, host, 0.060)
    scene = scene_of(slow)
    assert names(scene) == ["s0 · 8 devices", "host1 ×4"]
    ends = {round(float(end), 4) for end, top in zip(bars(scene)["right"], bars(scene)["top"],
                                                     strict=True) if top > 0}  # fmt: skip
    assert ends == {round(r.end, 4) for r in slow if isinstance(r, Span) and r.host == host}
    scene = scene_of(late(records, host, 0.300), 18.0)
    assert names(scene) == ["s0 · 8 devices", "host1 ×4"]
    scene.add((), 30.0)
    assert names(scene) == ["s0 · 12 devices"], "nothing of it is shown any more"


def test_a_straggler_keeps_its_lane_for_some_seconds_where_the_last_steps_are_shown() -> None:
    """On a busy machine every other step has one, and the picture would be laid anew with each."""
    usual = training(8, islands=1, hosts=3)
    third = sorted({r.run for r in usual if isinstance(r, Span)})[2]
    slow = late(usual, "island0/host1", 0.060)
    told = sorted(
        [*(r for r in usual if r.run != third), *(r for r in slow if r.run == third)], key=arrival
    )
    scene, fed = Scene(0.0, 20.0, stepwise=True), 0
    seen: list[list[str]] = []
    for tenth in range(40):
        upto = sum(arrival(r) <= tenth / 10 for r in told)
        scene.add(told[fed:upto], tenth / 10)
        fed = upto
        seen.append(names(scene))
    assert scene.shown is not None
    laid = [after for before, after in pairwise(seen) if before != after]
    assert laid[-1] == ["s0 · 8 devices", "host1 ×4"], "and so it is to the end"


@pytest.mark.parametrize("first", ["early", "later", "last"])
def test_one_host_that_is_early_makes_no_other_one_late(first: str) -> None:
    """It has a lane of its own, however soon its word comes."""
    records = late(training(2, islands=1, hosts=5), "island0/host1", -0.015)
    order = {"early": 0, "later": 1, "last": 9}[first]
    ordered = sorted(records, key=lambda r: (
        round(arrival(r), 1), order if getattr(r, "host", "") == "island0/host1" else 1
    ))  # fmt: skip
    scene = Scene(0.0, 0.5)
    for record in ordered:
        scene.add([record], 0.5)
    assert not scene.late(0.5)
    assert names(scene) == ["s0 · 16 devices", "host1 ×4"]


@pytest.mark.parametrize("hosts", [2, 3])
def test_a_host_is_as_late_as_it_is_in_what_is_shown_or_was_of_late(hosts: int) -> None:
    records = training(3, islands=1, hosts=hosts)
    long = [replace(r, end=r.end + 0.05) if isinstance(r, Span) and r.start < 0.1
            and r.host == "island0/host1" and r.kind == "gang" else r for r in records]  # fmt: skip
    scene = scene_of(late(long, "island0/host1", 0.060), 2.5)
    assert scene.late(2.5)["island0/host1"] == pytest.approx(0.11)
    scene.window = 1.5
    assert scene.late(2.5)["island0/host1"] == pytest.approx(0.06), "no more than is shown"
    assert "60 ms late" in PANELS["queues"](scene, 2.5).readouts.values()
    assert scene.late(2.5, lately=True)["island0/host1"] == pytest.approx(0.11)
    later = 0.5 + STEADY
    assert scene.late(later, lately=True)["island0/host1"] == pytest.approx(0.06)


def test_beside_a_late_host_those_that_are_hardly_late_are_not_named() -> None:
    records = late(training(1, islands=1, hosts=5), "island0/host1", 0.060)
    scene = scene_of(late(records, "island0/host2", 0.014), 0.5)
    assert scene.late(0.5).keys() == {"island0/host1", "island0/host2"}
    told = PANELS["queues"](scene, 0.5).readouts.values()
    assert [text for text in told if "late" in text] == ["60 ms late"]


def test_those_that_go_on_are_not_late_where_one_host_has_ended() -> None:
    records = late(training(1, islands=1, hosts=4), "island0/host1", -0.035)
    first = min(r.end for r in records if isinstance(r, Span) and r.host == "island0/host1")
    assert names(scene_of(records, first + 0.03)) == ["s0 · 16 devices"]


def test_a_straggler_is_seen_before_it_ends() -> None:
    records = late(training(1, islands=1, hosts=2), "island0/host1", 3.0)
    scene = scene_of(records, 0.5)
    assert names(scene) == ["host0 ×4", "host1 ×4"]


def test_how_the_records_come_does_not_matter() -> None:
    records = late(training(2, islands=2, hosts=3), "island1/host2", 0.060)
    scene = Scene(0.0, 20.0)
    for first in range(0, len(records), 7):
        some = records[first : first + 7]
        scene.add(some, max(map(arrival, some)))
    scene.add((), END)
    at_once = scene_of(records)
    assert names(scene) == names(at_once)
    for name, values in bars(at_once).items():
        if name != "what":  # numbered as they came
            assert sorted(bars(scene)[name]) == pytest.approx(sorted(values), abs=1e-3), name


def test_a_click_unfolds_a_lane_and_folds_it_again() -> None:
    log = Timeline(clock=lambda: END)
    log.extend(training(2, hosts=2, devices=2))
    shown = Picture(log, Wanted(origin=0.0, since=0.0))

    def lanes() -> list[str]:
        plots, _ = shown.look(END)
        return next(list(plot.rows.values()) for plot in plots if plot.name == "queues")

    one, other = lanes()
    whole = bars(shown.scene)
    single = ["host0 · 0", "host0 · 1", "host1 · 0", "host1 · 1"]
    shown.do("fold", 0.1)
    assert lanes() == [*single, other]
    assert int(bars(shown.scene)["count"].sum()) == int(whole["count"].sum())
    shown.do("seek", 0.5)
    assert lanes() == [*single, other], "also at another moment"
    shown.do("fold", 2.0)
    assert lanes() == [one, other]
    shown.do("seek", None)
    assert lanes() == [one, other]
    assert all((bars(shown.scene)[name] == column).all() for name, column in whole.items())
    shown.do("fold", None)
    assert lanes() == [*single, *single]
    shown.do("fold", None)
    assert lanes() == [one, other]


def test_all_slices_of_a_lane_are_named_unless_they_are_many() -> None:
    cluster = Cluster(islands=1)
    cluster.gang(0, 1, 0, "p", "f", "", 0.0, 0.1, 0.0)
    few = {1: "s0, s1 ×2", 2: "s0, s1, s2 ×2"}
    for number in (1, 2, 3):
        args = {"slice": number, "devices": [("island0/host0", d) for d in (0, 1)],
                "shape": (2,), "axes": ("x",)}  # fmt: skip
        of = {"run": number + 1, "step": 0, "program": "p", "node": "f"}
        cluster.records += [
            Event("slice-bound", 0.2, "island0", client="kernel-1", args=args),
            Span("gang", 0.2 * number, 0.2 * number + 0.1, "island0", "island0/host0", (0, 1),
                 args={"slice": number}, **of),
        ]  # fmt: skip
        scene = scene_of(cluster.in_order())
        rest = "s0 · 2 devices" if number in few else "devices 2, 3"
        assert names(scene) == [few.get(number, "devices 0, 1"), rest]
    heads = next(
        each for each in PANELS["islands"](scene, 5.0).layers if each.name == "islands-heads"
    )
    assert heads.columns["choices"][0][0].endswith("4 slices")


def test_slices_of_several_clients_are_not_named_by_their_numbers_alone() -> None:
    """Each client counts its own."""
    cluster = Cluster(islands=1)
    cluster.gang(0, 1, 0, "p", "f", "", 0.0, 0.1, 0.0)
    number, place = 1 << 32, ("island0", "island0/host0")
    args = {"slice": number, "devices": [(place[1], 0)], "shape": (1,), "axes": ("x",)}
    gang = Span("gang", 0.2, 0.3, *place, (0,), 9, 0, "q", "g", "bob", args={"slice": number})
    bound = Event("slice-bound", 0.1, "island0", client="bob", args=args)
    scene = scene_of([*cluster.in_order(), bound, gang])
    assert names(scene) == ["device 0", "devices 1, 2, 3"]
    layers = PANELS["islands"](scene, 5.0).layers
    heads = next(each for each in layers if each.name == "islands-heads").columns["choices"][0]
    assert heads[0].endswith("slices kernel-1 s0: 1×4, bob s0: 1")


def test_a_lost_host_is_not_among_those_that_go_on() -> None:
    gone = Event("host-lost", 4.0, "island0", "island0/host1", args={"reason": "killed"})
    scene = scene_of([*training(1, islands=1, hosts=2), gone])
    assert names(scene) == ["host0 ×4", "host1 ×4"]


def test_causes_of_waiting_have_their_names_where_there_is_room() -> None:
    """Whoever cannot tell their colours apart reads them."""
    scene = scene_of(training(1, islands=4), 1.0)
    plot = PANELS["queues"](scene, 1.0)
    marks = scene.waited.table.columns()
    words = next(dict(each.columns) for each in plot.layers if each.name == "queues-causes")
    assert {"waits for bwd2", "waits for bwd1"} <= set(words["text"]), "and which one it is"
    for x, text in zip(words["x"], words["text"], strict=True):
        if not text:
            continue
        cause = INPUT if text.startswith(("waits for ", "for ")) else text
        of = (marks["kind"] == WAITS.index(cause)) & (marks["left"] <= x) & (x <= marks["right"])
        wide_enough = (marks["right"] - marks["left"]) * FRAME > wide(text)
        assert (of & wide_enough).any(), "it would lie on its neighbours"
    scene.waited.coarsen(4, float("inf"))
    plot = PANELS["queues"](scene, 1.0)
    words = next(dict(each.columns) for each in plot.layers if each.name == "queues-causes")
    alone = scene.waited.table.columns()["gang"] >= 0
    assert len(words["text"]) <= alone.sum() < len(alone), "the others lie on each other"
    many = scene_of(training(1, islands=20), 1.0)
    layers = PANELS["queues"](many, 1.0).layers
    none = next(list(each.columns["text"]) for each in layers if each.name == "queues-causes")
    assert not any(none)


def test_the_sums_of_a_stretch_are_those_of_its_records() -> None:
    records = training(2, hosts=2)
    log = Timeline(clock=lambda: END)
    log.extend(records)
    shown = Picture(log, Wanted(origin=0.0, since=0.0))
    shown.look(END)
    start, end = 0.13, 0.9
    shown.do("sum", [end, start])
    told = dict(shown.look(END)[1].chosen)
    spans = [r for r in records if isinstance(r, Span)]

    def share(*nodes: str) -> str:
        held = sum(
            len(r.devices) * max(0.0, min(r.end, end) - max(r.start, start))
            for r in spans
            if r.kind == "gang" and r.node.startswith(nodes)
        )
        return f"{100 * held / (16 * (end - start)):.0f} %"

    assert told["computed"] == (
        f"{share('')}: bwd {share('bwd')}, fwd {share('fwd')}, update {share('update')}"
    )
    moved = [r for r in spans if r.kind == "transfer" and r.end > start and r.start < end]
    assert told["transfers"] == f"{sum(len(r.devices) for r in moved)} to a device"
    waits = shown.scene.runs.values()
    waited = sum(
        len(devices) * max(0.0, min(wait.end, end) - max(wait.start, start))
        for run in waits for devices, wait in run.waits
    )  # fmt: skip
    assert told["waited"].startswith(f"{100 * waited / (16 * (end - start)):.0f} %: ")
    percent = re.compile(r"\d+(?= %)")
    parts = [int(percent.match(told[of])[0]) for of in ("computed", "waited", "nothing to do")]
    assert sum(parts) == 100
    shown.do("choose", None)
    assert shown.look(END)[1].chosen == ()


@pytest.mark.parametrize("chunk", [500, 1 << 30])
def test_where_islands_share_rows_the_worst_hosts_have_their_own_on_top(chunk: int) -> None:
    """Live, and of a saved picture, which knows the machine."""
    records = training(3, islands=2, hosts=70, devices=2)
    slow = {"island1/host7": 0.03, "island1/host5": 0.02, "island1/host6": 0.021,
            "island1/host9": 0.04}  # fmt: skip
    for host, by in slow.items():
        records = late(records, host, by)
    machine = scene_of(records[:200]).machine
    scene = Scene(0.0, 20.0, machine=machine)
    for first in range(0, len(records), chunk):
        part = records[first : first + chunk]
        scene.add(part, arrival(part[-1]))
    assert names(scene) == ["s0 ×140", "host6 ×2", "host7 ×2", "host9 ×2", "s1 ×134"]
    spans = [r for r in records if isinstance(r, Span)]
    assert int(bars(scene)["count"].sum()) == sum(len(r.devices) for r in spans)


def test_the_price_of_a_computation_does_not_grow_with_the_hosts_of_its_slice() -> None:
    """Of each slice the first host tells what the others do: counted, and not timed."""
    looked = []
    for hosts in (100, 200):
        scene = scene_of(Cluster(islands=1, hosts=hosts, devices=4).records, 0.0)
        alike, seen = scene.alike, [0]

        class Counted(dict[Any, Any]):
            def __setitem__(self, key: Any, value: Any, seen: list[int] = seen) -> None:
                seen[0] += 1
                super().__setitem__(key, value)

        alike.of = Counted()
        for host in range(hosts):
            lanes = tuple(Lane("island0", f"island0/host{host}", n) for n in range(4))
            alike.computed(0, lanes, scene.machine)
        looked.append(seen[0])
    assert looked == [400, 800]
