"""Panels are functions from records to plots: exact numbers, no library that draws."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pathways_lab.notebook.panels import PANELS, chosen, plots
from pathways_lab.notebook.panels import order as order_panel
from pathways_lab.notebook.panels.graph import SOON, newest
from pathways_lab.notebook.scene.duration import duration
from pathways_lab.notebook.scene.live_fold import Present
from pathways_lab.notebook.scene.plot import (
    FRAME,
    LEFT,
    RIGHT,
    Append,
    Assign,
    Plot,
    Replace,
    changes,
    everything,
    wide,
)
from pathways_lab.notebook.scene.row_layout import rows
from pathways_lab.notebook.scene.scene import WORK, Scene
from pathways_lab.notebook.scene.text import summary
from pathways_lab.timeline import queries
from pathways_lab.timeline.busy import utilisation
from pathways_lab.timeline.gangs import Gang
from pathways_lab.timeline.log import Timeline
from pathways_lab.timeline.records import Event, Record, Sample, Span
from tests.notebook.synthetic import Cluster, arrival, training

HALF = 0.95  # in the middle of the second training step


def scene_at(records: Sequence[Record], now: float, **options: Any) -> Scene:
    scene = Scene(0.0, **options)
    scene.add([r for r in records if arrival(r) <= now], now)
    return scene


def panel(name: str, scene: Scene, now: float) -> Plot:
    return PANELS[name](scene, now)


def column(plot: Plot, layer: str, name: str) -> list[Any]:
    return list(next(each for each in plot.layers if each.name == layer).columns[name])


# --- hosts ----------------------------------------------------------------------


def test_workers_that_make_elements_of_feeds_have_lanes_below_those_of_the_hosts() -> None:
    made = Span(
        "host-computation", 0.1, 0.4, "", "feed-0", program="batches", node="batches[3]",
        args={"step": 3, "made": 0.3},
    )  # fmt: skip
    scene = scene_at([made, *training(1)], 2.0)
    plot = panel("hosts", scene, 2.0)
    (row,) = (row for row, label in plot.rows.items() if label == "feed-0")
    assert row == max(plot.rows), "also when it was known before the hosts"
    assert plot.groups[row] == "feeds"
    seen = [
        (WORK[int(kind)], left, right, top > row - 0.5)
        for kind, left, right, top in zip(
            *(column(plot, "hosts-work", name) for name in ("kind", "left", "right", "top")),
            strict=True,
        )
    ]
    assert seen == [("prepare", 0.1, 0.3, True), ("send", 0.3, 0.4, True)]
    assert "hosts" in [shown.name for shown in plots(("queues",), scene, 2.0)]


# --- order ----------------------------------------------------------------------


def test_each_gang_is_one_column_on_all_its_hosts() -> None:
    records = training(1, hosts=2)
    plot = panel("order", scene_at(records, 10.0), 10.0)
    done = list(zip(column(plot, "order-done", "left"), column(plot, "order-done", "top"),
                    strict=True))  # fmt: skip
    assert len(done) == 9 * 2 * 2
    per_row: dict[float, list[float]] = {}
    for left, top in done:
        per_row.setdefault(float(top), []).append(float(left))
    assert len(per_row) == 4
    assert all(sorted(lefts) == [pytest.approx(n + 0.08) for n in range(9)]
               for lefts in per_row.values())  # fmt: skip


def test_states_of_the_order_panel_are_those_of_the_gangs() -> None:
    records = [r for r in training(3) if arrival(r) <= HALF]
    plot = panel("order", scene_at(records, HALF), HALF)
    expected: dict[str, int] = {"granted": 0, "launched": 0, "done": 0, "failed": 0}
    for island in ("island0", "island1"):
        for gang in queries.order(records, island):
            expected[gang.state] += 1
    shown = {state: len(column(plot, f"order-{state}", "left")) for state in expected}
    assert column(plot, "order-running", "why") == ["it computes"]
    shown["launched"] += len(column(plot, "order-running", "left"))
    assert shown == expected
    assert expected["granted"] > 0
    assert expected["launched"] > 0
    assert list(plot.readouts.values()) == ["13 / 18 done", "14 / 18 done"]


def test_the_frontier_stays_in_sight_when_grants_run_far_ahead() -> None:
    gangs = [
        Event(
            "granted", 0.0, "island0", run=1, step=n, args={"seq": n, "hosts": ("island0/host0",)}
        )
        for n in range(200)
    ]
    scene = scene_at([*Cluster(islands=1).records, *gangs], 1.0)
    plot = panel("order", scene, 1.0)
    assert column(plot, "order-granted", "place") == list(range(40))


# --- queues ---------------------------------------------------------------------


def test_the_bars_are_the_records() -> None:
    records = training(2)
    plot = panel("queues", scene_at(records, 5.0), 5.0)
    spans = [r for r in records if isinstance(r, Span)]
    bars = next(layer for layer in plot.layers if layer.name == "queues-bars").columns
    assert int(np.sum(bars["count"])) == sum(len(span.devices) for span in spans)
    lane_of = {"island0": 0.0, "island1": 1.55}
    expected = sorted((s.start, s.end, lane_of[s.island]) for s in spans if s.kind == "gang")
    thick = (bars["bottom"] - bars["top"]) > 0.5
    drawn = sorted(
        zip(bars["left"][thick], bars["right"][thick], bars["top"][thick] + 0.40, strict=True)
    )
    assert len(drawn) == len(expected)
    assert np.allclose(drawn, expected, atol=1e-6)


def test_what_runs_is_an_open_bar_up_to_now_and_the_rest_waits() -> None:
    records = [r for r in training(3) if arrival(r) <= HALF]
    scene = scene_at(records, HALF)
    plot = panel("queues", scene, HALF)
    running = scene.running()
    assert {lane.island for lane, *_ in running} == {"island1"}
    assert column(plot, "queues-open", "right") == [HALF]
    assert {*column(plot, "queues-open", "left")} == {since for *_, since, _ in running}


def test_a_device_works_on_one_gang_at_a_time() -> None:
    """The second launched gang begins when the first one ends, and only then."""
    cluster = Cluster(islands=1, devices=1)
    for step, launched in enumerate((0.1, 0.2)):
        cluster.records.append(
            Event("launched", launched, "island0", "island0/host0", 1, step, "p", f"n{step}",
                  args={"devices": (0,), "seq": step})
        )  # fmt: skip
    scene = scene_at(cluster.records, 1.0)
    plot = panel("queues", scene, 1.0)
    assert column(plot, "queues-open", "left") == [pytest.approx(0.1)]
    assert list(plot.readouts.values()) == ["1 queued"]
    scene.add([Span("gang", 0.1, 1.5, "island0", "island0/host0", (0,), 1, 0, "p", "n0")], 2.0)
    plot = panel("queues", scene, 2.0)
    assert column(plot, "queues-open", "left") == [1.5]
    assert list(plot.readouts.values()) == [""]


def test_records_that_arrive_late_leave_nothing_open() -> None:
    records = training(2)
    random.Random(3).shuffle(records)
    scene = Scene(0.0)
    scene.add(records, 5.0)
    assert scene.running() == []
    assert not scene.busy


def test_labels_stand_only_on_bars_that_hold_them() -> None:
    plot = panel("queues", scene_at(training(3), HALF), HALF)
    words = set(column(plot, "queues-words", "text"))
    assert words - {""} == {"bwd0", "bwd1"}, "at 0.95 s a forward pass is 29 pixels wide"
    early = panel("queues", scene_at(training(3), 0.5), 0.5)
    assert {"fwd0", "fwd1"} <= set(column(early, "queues-words", "text"))
    late = panel("queues", scene_at(training(60), 20.0), 20.0)
    assert not any(column(late, "queues-words", "text"))


def test_a_bar_too_short_for_its_name_has_that_of_its_function() -> None:
    cluster = Cluster(islands=1, devices=4)
    for n in range(2):
        cluster.gang(0, 1, n, "p", "backward123", "", n * 0.1, 0.09, 0.0)
    plot = panel("queues", scene_at(cluster.records, 0.7), 0.7)
    assert column(plot, "queues-words", "choices")[0] == ["backward123", "backward", ""]
    assert column(plot, "queues-words", "text") == ["backward", "backward"]


def test_causes_of_hosts_that_share_a_row_are_named_once() -> None:
    cluster = Cluster(islands=1, hosts=70, devices=1)
    cluster.records.append(Event("submitted", 0.0, run=1, program="p", args={"plan": ""}))
    cluster.gang(0, 1, 0, "p", "f", "", 0.0, 0.1, 0.0)
    cluster.gang(0, 1, 1, "p", "f", "", 0.5, 0.1, 0.0)
    scene, records = Scene(0.0), cluster.in_order()
    for part in records[:-35], records[-35:]:  # not all hosts report at once
        scene.add(part, 1.0)
    assert len(column(panel("queues", scene, 1.0), "queues-causes", "text")) == 1


def test_more_devices_than_rows_share_rows_by_host() -> None:
    records = Cluster(islands=2, hosts=20, devices=4).records
    seen = rows(queries.machine(records))
    assert (seen.level, len(seen.labels)) == ("host", 40)
    assert set(seen.devices.values()) == {4}
    records = Cluster(islands=4, hosts=128, devices=4).records
    seen = rows(queries.machine(records))
    assert (seen.level, len(seen.labels), len(seen.of)) == ("island", 4, 2048)


def test_too_many_bars_become_coarser_and_none_is_lost() -> None:
    cluster = Cluster(islands=1, devices=2)
    for step in range(4000):
        cluster.gang(0, 1, step, "ab"[step // 500 % 2], "n", "", 0.0, 0.003, 0.0)
    scene = Scene(0.0, window=20.0, budget=600)
    for start in range(0, len(cluster.records), 50):
        scene.add(cluster.records[start : start + 50], 12.0)
    bars = scene.bars.columns()
    assert len(bars["left"]) <= 600
    assert int(bars["count"].sum()) == 8000
    assert scene.merged


# --- utilisation -------------------------------------------------------------------


def test_the_area_of_the_utilisation_panel_is_the_held_time() -> None:
    records = training(3)
    now = 2.0
    plot = panel("utilisation", scene_at(records, now), now)
    exact = utilisation([r for r in records if arrival(r) <= now], 0.0, now)
    for island in ("island0", "island1"):
        area = 0.0
        for of, xs, ys in zip(*(column(plot, "utilisation-areas", name)
                                for name in ("island", "xs", "ys")), strict=True):  # fmt: skip
            x, y = np.array(xs), np.array(ys)
            doubled = abs(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1)))
            area += (of == island) * doubled / 2 / 0.86
        share = np.mean([s for lane, s in exact.items() if lane.island == island])
        assert area / now == pytest.approx(share, abs=0.01)


def test_functions_are_stacked_in_their_colours_and_never_exceed_the_whole() -> None:
    cluster = Cluster(islands=1, devices=4)
    for n in range(20):
        cluster.gang(0, 1, n, "ab"[n % 2], ("fwd", "bwd")[n % 2], "", 0.0, 0.05, 0.0)
    scene = scene_at(cluster.records, 1.0)
    plot = panel("utilisation", scene, 1.0)
    seen = {*zip(column(plot, "utilisation-areas", "program"),
                 column(plot, "utilisation-areas", "fill"), strict=True)}  # fmt: skip
    assert seen == {
        ("a", scene.palette.colour("a", "fwd")),
        ("b", scene.palette.colour("b", "bwd")),
    }
    ys = np.concatenate([np.array(y) for y in column(plot, "utilisation-areas", "ys")])
    assert ys.min() == pytest.approx(0.5 - 0.86)
    assert ys.max() == pytest.approx(0.5)
    assert plot.readouts == {0.0: "100 %"}


# --- time, updates ------------------------------------------------------------------


def test_nothing_yet_says_what_it_waits_for() -> None:
    empty = plots((), Scene(0.0), 0.0)
    assert [plot.empty for plot in empty] == ["waiting for the first host"] + [
        "waiting for the first gang"
    ] * 2
    known = plots((), scene_at(Cluster().records, 0.0), 0.0)
    assert [plot.empty for plot in known] == [""] + ["waiting for the first gang"] * 2
    assert all(plot.empty == "" for plot in plots((), scene_at(training(1), 5.0), 5.0))


def test_gangs_that_are_too_old_to_be_shown_are_told() -> None:
    log = Timeline(clock=lambda: 43.0)
    log.extend(training(1))
    present = Present(log, 20.0)
    ended = max(r.end for r in training(1) if isinstance(r, Span) and r.kind == "gang")
    words = f"no gang yet: the last one ended {duration(23.0 - ended)} before this picture begins"
    empty = [plot.empty for plot in plots(("order", "queues", "graph"), present.scene, 43.0)]
    assert empty == [words] * 3
    assert words in summary(present.scene, 43.0, "train")


def test_the_axis_grows_to_the_window_and_then_follows() -> None:
    scene = Scene(100.0, window=20.0)
    assert scene.range(100.0) == (0.0, 0.2)
    assert scene.range(105.0) == (0.0, 5.0)
    assert scene.range(130.0) == (10.0, 30.0)


def test_a_long_wait_before_the_first_computation_is_left_out_and_said() -> None:
    cluster = Cluster(islands=1, devices=1)
    cluster.gang(0, 1, 0, "p", "n", "", ready=4.0, seconds=0.5, granted=0.0)
    scene = scene_at(cluster.in_order(), 4.6, final=True)
    assert scene.range(4.6) == (pytest.approx(3.798), 4.6)
    assert scene.lead == pytest.approx(3.798)
    assert panel("utilisation", scene, 4.6).readouts[0.0] in ("61 %", "62 %", "63 %")
    assert scene_at(training(1), 1.0).lead == 0.0
    assert scene.resolution == pytest.approx((4.6 - 3.798) / FRAME, rel=0.01), "of what is shown"


def apply(plot: dict[str, Any], out: Sequence[Any]) -> None:
    """What a page does with changes."""
    for change in out:
        if isinstance(change, Replace):
            plot[change.name] = {k: list(v) for k, v in change.columns.items()}
        elif isinstance(change, Append):
            for key, more in change.columns.items():
                plot[change.name][key] = [*plot[change.name][key], *more][-change.keep :]
        else:
            assert isinstance(change, Assign)
            plot[change.name, change.attribute] = change.value


@pytest.mark.parametrize("window", [20.0, 1.0])
def test_updates_bring_a_page_to_the_present_plots(window: float) -> None:
    """Law: snapshot + all updates since == a fresh snapshot, in every panel."""
    records = training(5, hosts=2)
    scene = Scene(0.0, window=window)
    page: dict[str, Any] = {}
    old: tuple[Plot, ...] = ()
    appended = fed = 0
    for tick in range(40):
        now = 0.1 * tick
        upto = sum(arrival(r) <= now for r in records)
        scene.add(records[fed:upto], now)
        fed = upto
        new = plots(tuple(PANELS), scene, now)
        if [p.shape for p in old] == [p.shape for p in new]:
            out = [c for a, b in zip(old, new, strict=True) for c in changes(a, b)]
            appended += sum(isinstance(change, Append) for change in out)
            apply(page, out)
        else:
            page = {}
            apply(page, [c for plot in new for c in everything(plot)])
        old = new
        expected: dict[str, Any] = {}
        apply(expected, [c for plot in new for c in everything(plot)])
        for key, value in page.items():
            if key in ("queues-bars", "queues-waits"):
                held = len(expected[key]["left"])
                value = {k: v[-held:] if held else [] for k, v in value.items()}
            assert repr(value) == repr(expected[key]), key
    assert appended > 20, "bars must be appended, not sent again"


def test_a_lab_that_computes_keeps_the_shape_of_its_picture() -> None:
    """To build a document of another shape takes 200 ms."""
    records = training(8, hosts=2)
    shapes: dict[str, list[object]] = {name: [] for name in PANELS}
    for tenth in range(15, 50):
        scene = scene_at(records, tenth / 10)
        for name, seen in shapes.items():
            seen.append(panel(name, scene, tenth / 10).shape)
    for name, seen in shapes.items():
        assert sum(a != b for a, b in pairwise(seen)) <= 1, name
    used = [*records, Sample("memory", 4.0, 1e6, "island0", "island0/host0", {"device": 0})]
    assert panel("memory", scene_at(used, 5.0), 5.0).shape == shapes["memory"][-1]
    plot = panel("messages", scene, 5.0)
    other = replace(plot, note="other words")
    assert changes(plot, other) == [Assign("messages-note", "content", "other words")]


def test_messages_are_those_of_a_run_of_which_they_are_known() -> None:
    """They come later than what computes: the picture of the last run's stands until then."""
    records = training(2)
    newest = max(r.run for r in records if isinstance(r, Event))
    late = [
        r for r in records
        if not (isinstance(r, Event) and r.kind == "message" and r.run == newest)
    ]  # fmt: skip
    end = arrival(records[-1])
    assert panel("messages", scene_at(late, end), end).empty == ""


def test_messages_of_a_run_that_goes_on_are_shown_when_it_has_gone_on_for_a_moment() -> None:
    """Of runs that come fast the newest one's are not all known, and a picture of another shape
    takes half a second."""
    first, second = (
        [
            Event("submitted", at, run=run, program="p"),
            Event("message", at, run=run, program="p",
                  args={"kind": "submit", "source": "kernel-1", "target": "control", "bytes": 1}),
            Span("gang", at + 0.1, at + 0.2, "island0", "island0/host0", (0,), run, 0, "p", "f"),
        ]
        for run, at in ((1, 1.0), (2, 2.0))
    )  # fmt: skip
    scene = Scene()
    scene.add([*first, Event("finished", 1.3, run=1, program="p"), *second], 2.2)
    shown = [newest(scene, now, told=True) for now in (2.2, 2.1 + SOON)]
    assert [run.run for run in shown if run is not None] == [1, 2]


def test_a_run_that_took_no_time_is_not_compared_with_its_plan() -> None:
    gang = Span("gang", 1.0, 1.0, "island0", "island0/host0", (0,), 1, 0, "p", "f")
    assert panel("planned", scene_at([gang], 1.0), 1.0).empty


def test_what_was_planned_is_compared_with_a_whole_run() -> None:
    records = training(3)
    first = next(r for r in records if isinstance(r, Event) and r.kind == "finished").time
    scene = scene_at(records, first + 0.3)
    before = scene_at(records, first - 0.3)
    shown = (newest(scene), newest(scene, whole=True), newest(before, whole=True))
    assert [run.ended for run in shown if run is not None] == [None, first, None]


def test_an_update_of_another_shape_is_refused() -> None:
    one, two = (panel(name, scene_at(Cluster().records, 0), 0.0) for name in ("queues", "order"))
    with pytest.raises(ValueError, match="another shape"):
        changes(one, two)


def test_a_host_that_joins_moves_the_rows_below_it_with_their_bars() -> None:
    records = training(1)
    scene = scene_at(records, 5.0)
    before = panel("queues", scene, 5.0)
    scene.add([Event("host-joined", 5.0, "island0", "island0/host1", args={"devices": 2})], 5.0)
    after = panel("queues", scene, 5.0)
    moved = {scene.drawn_at(lane) for lane in scene.rows.of if lane.island == "island1"} - {None}
    assert before.shape == after.shape
    assert before.places != after.places
    bars = next(layer for layer in after.layers if layer.name == "queues-bars").columns
    thick = (bars["bottom"] - bars["top"]) > 0.5
    used = {round(float(top) + 0.40, 3) for top in bars["top"][thick]}
    assert moved == {2.55} <= used
    assert int(bars["count"].sum()) == sum(len(r.devices) for r in records if isinstance(r, Span))


def test_panels_are_known_by_name() -> None:
    assert chosen(()) == ("islands", "queues", "utilisation")
    assert chosen(("queues",)) == ("queues",)
    with pytest.raises(ValueError, match="no panel is called 'queue'; there are: islands"):
        chosen(("queue",))


# --- memory -------------------------------------------------------------------------------


def test_memory_is_added_up_by_time_and_drawn_against_what_there_is() -> None:
    """Two hosts' samples come out of order; nothing is drawn beyond now or above the limit."""
    hosts = ("island0/host0", "island0/host1")
    joined = [
        Event("host-joined", 0.0, "island0", host, args={"devices": 1, "memory": 1 << 20})
        for host in hosts
    ]
    started = Span("gang", 0.0, 1.0, "island0", hosts[0], (0,), 1, 0, "p", "f", "c")
    told = ((0.9, hosts[0], 1 << 19), (0.2, hosts[1], 1 << 19), (5.0, hosts[1], 0))
    samples = [
        Sample("memory", time, value, "island0", host, {"device": 0}) for time, host, value in told
    ]
    scene = Scene(0.0, 10.0)
    scene.add([*joined, started, *samples], 1.0)
    plot = PANELS["memory"](scene, 1.0)
    (xs,), (ys,) = plot.layers[0].columns["xs"], plot.layers[0].columns["ys"]
    half = len(xs) // 2
    assert list(xs[:half]) == sorted(xs[:half])
    assert (min(xs), max(xs)) == (0.2, 1.0)
    # The scale is what there is, of which half is in use; nothing comes from other islands.
    assert tuple(plot.rows.values()) == ("2 MiB", "")
    assert min(ys) == pytest.approx(-0.02 - 0.42 / 2)
    assert plot.readouts[-0.22] == "1 MiB"


def test_utilisation_has_a_band_for_each_client_where_there_are_several() -> None:
    """Also where both call a program of the same name; bands say shares of all devices."""
    records = [
        Span("gang", 0.0, 1.0, "island0", "island0/host0", (0, 1), 1, 0, "p", "f", "ann"),
        Span("gang", 0.0, 0.5, "island1", "island1/host0", (0, 1), 2, 0, "p", "f", "bob"),
    ]

    def drawn(kept: list[Record]) -> Plot:
        scene = Scene(0.0, 1.0, final=True)
        scene.add(kept, 1.0)
        return PANELS["utilisation"](scene, 1.0)

    both = drawn(records)
    assert list(both.groups.values()) == ["island0", "island1", "ann", "bob"]
    assert list(both.readouts.values()) == ["100 %", "50 %", "50 %", "25 %"]
    columns = both.layers[0].columns
    assert list(zip(columns["island"], columns["client"], strict=True)) == [
        ("island0", "ann"), ("island1", "bob"), ("ann", "ann"), ("bob", "bob"),
    ]  # fmt: skip
    assert list(drawn(records[:1]).groups.values()) == ["island0"]


def test_how_far_an_island_is_fits_beside_its_order() -> None:
    waiting = Gang(1, 0)
    texts = [order_panel.summary([waiting], gone) for gone in (17, 1182, 12_344, 12_345_678)]
    assert texts == ["17 / 18 done", "1182/1183 done", "12344/12345", "12345678 done"]
    assert all(wide(text) <= RIGHT - 8 for text in texts)


def test_long_names_stay_in_their_margin_and_are_told_apart() -> None:
    host = "annes-macbook-pro.local:40001"
    rows = {0.0: f"{host} · 0", 1.0: f"{host} · 1"}
    plot = Plot("queues", "", 9, (0, 1), (0, 1), (), rows=rows, groups={0.5: host})
    first, second = plot.rows.values()
    assert first != second
    assert first.startswith("a")
    assert wide(first) + wide(plot.groups[0.5], bold=True) <= LEFT
    usual = replace(plot, rows={0.0: "host3 · 15"}, groups={0.0: "island10"})
    assert (*usual.rows.values(), *usual.groups.values()) == ("host3 · 15", "island10")


@pytest.mark.parametrize("name", ["order", "graph"])
def test_what_marks_mean_is_read_on_small_screens_too(name: str) -> None:
    plot = panel(name, scene_at(training(1), HALF), HALF)
    marks, ends, _ = plot.note.partition("■ done")
    assert ends
    assert wide(plot.title, bold=True, size=13) + 14 + wide(marks + ends, size=13) < 600 - LEFT


@pytest.mark.parametrize("name", ["graph", "messages", "planned", "queues"])
@pytest.mark.parametrize("width", [200, 480, 1100])
def test_words_overlap_at_no_width_of_a_page(name: str, width: int) -> None:
    """A page picks the first of the ways to write a word that fits there, in any usual font."""
    plot = panel(name, scene_at(training(2), 1.4), 1.4)
    low, high = plot.x
    lines: dict[tuple[float, str], list[tuple[float, float]]] = {}
    for layer in plot.layers:
        if layer.kind != "texts":
            continue
        columns = (layer.columns[each] for each in ("x", "y", "text", "room", "choices"))
        for x, y, text, room, choices in zip(*columns, strict=True):
            assert text in choices
            word = next(each for each in choices if not each or wide(each) < room * width)
            left = width * (x - low) / (high - low) - wide(word) / 2 * (layer.anchor != "start")
            if word:
                lines.setdefault((y, layer.anchor), []).append((left, left + wide(word)))
    assert lines or width == 200
    for line in lines.values():
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(line))), line


@pytest.mark.parametrize(("hosts", "shown"), [(1, 8), (4, 32), (8, 16), (64, 2)])
def test_bars_of_a_plan_keep_their_names_however_many_devices_there_are(
    hosts: int, shown: int
) -> None:
    """Devices of a host share a lane before neighbouring bars are drawn as one."""
    plot = panel("planned", scene_at(training(1, hosts=hosts, devices=4), 1.4), 1.4)
    assert len({int(top + 0.5) for top in column(plot, "planned-lanes", "top")}) == shown
    nodes = column(plot, "planned-lanes", "node")
    assert {node[:3] for node in nodes} == {"fwd", "bwd", "upd"}
