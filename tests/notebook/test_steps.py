"""The window of the last two steps: which it is, that it stands, and that nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pathways_lab.notebook.panels import DEFAULT, PANELS, plots
from pathways_lab.notebook.scene.overview import Profile
from pathways_lab.notebook.scene.palette import Palette
from pathways_lab.notebook.scene.plot import FRAME, LEFT, WIDTH, wide
from pathways_lab.notebook.scene.scene import Scene
from pathways_lab.notebook.scene.steps import LATE, SHORTEST, Steps, Window
from pathways_lab.notebook.view.frozen import freeze
from pathways_lab.notebook.view.picture import Picture, Wanted
from pathways_lab.timeline.log import Timeline
from pathways_lab.timeline.records import Event, Record, Span, own
from tests.notebook.synthetic import Cluster, arrival, training
from tests.notebook.test_frozen import SVG, drawn_boxes, svg_of


def gangs(records: Sequence[Record], run: int = -1) -> list[Span]:
    return [r for r in records if isinstance(r, Span) and r.kind == "gang" and run in (-1, r.run)]


def starts(records: Sequence[Record]) -> list[float]:
    """When each run began to compute."""
    runs = sorted({gang.run for gang in gangs(records)})
    return [min(gang.start for gang in gangs(records, run)) for run in runs]


def scene_at(records: Sequence[Record], now: float, **options: Any) -> Scene:
    scene = Scene(0.0, stepwise=True, **options)
    scene.add([r for r in records if arrival(r) <= now], now)
    return scene


def test_the_last_two_steps_are_shown_and_stand_until_the_next_one() -> None:
    records = training(6)
    begun = starts(records)
    step = begun[1] - begun[0]
    for moment in (0.2, 0.5, 0.9):
        now = begun[4] + moment * step
        start, end = scene_at(records, now).range(now)
        assert start == pytest.approx(begun[3]), "the step before, whole"
        assert end == pytest.approx(begun[4] + step), "and room for the present one"
    scene = scene_at(records, now)
    assert scene.lately(now) == (0.0, now)
    note = PANELS["queues"](scene, now).note
    assert note.startswith("last 2 runs of train, each with 4 × fwd0 · "), "its microbatches"


def test_calls_that_go_as_one_run_are_counted_one_by_one() -> None:
    cluster, end = Cluster(islands=1, devices=1), 0.0
    steps = [[False, "f", 0, 8, [], "c.py:3: f(x)"]] * 4
    cluster.records.append(Event("plan", 0.0, args={"plan": "k", "steps": steps}))
    for run in range(1, 6):
        cluster.records.append(Event("submitted", end, run=run, program="f", args={"plan": "k"}))
        for step in range(4):
            end = cluster.gang(0, run, step, "f", "f", "", end, 0.02, end)
    scene = scene_at(cluster.in_order(), end)
    assert scene.shown is not None
    drawn = [gang for gang in gangs(cluster.records) if gang.start > scene.shown.start - 1e-9]
    assert PANELS["queues"](scene, end).note.startswith(f"last {len(drawn)} calls of f · ")


def test_operations_between_calls_are_not_what_repeats_within_a_run() -> None:
    cluster, end, nodes = Cluster(islands=1, devices=1), 0.0, ("f", "f", *["(slice)"] * 3)
    steps = [[False, node, 0, 8, [], ""] for node in nodes]
    cluster.records.append(Event("plan", 0.0, args={"plan": "k", "steps": steps}))
    for run in range(1, 6):
        cluster.records.append(Event("submitted", end, run=run, program="p", args={"plan": "k"}))
        for step, node in enumerate(nodes):
            end = cluster.gang(0, run, step, "p", node, "", end, 0.02, end)
    note = PANELS["queues"](scene_at(cluster.in_order(), end), end).note
    assert note.startswith("last 2 runs of p, each with 2 × f · ")


def test_the_time_that_is_to_come_is_veiled_from_a_mark_on() -> None:
    records = training(6)
    begun = starts(records)
    now = begun[4] + 0.3 * (begun[1] - begun[0])
    scene = scene_at(records, now)
    drawn = {plot.name: plot for plot in plots((), scene, now)}
    assert drawn["islands"].ahead is None
    assert drawn["queues"].ahead == (now, "now")
    assert drawn["utilisation"].ahead == (now, ""), "one word is enough"
    veil = drawn["queues"].grounds["queues-ahead"]
    assert (veil["x0"], veil["x1"], veil["text"]) == ([now], [scene.range(now)[1]], ["now"])
    narrow = replace(drawn["queues"], ahead=(0.02 * now + 0.98 * scene.range(now)[1], "now"))
    assert narrow.grounds["queues-ahead"]["text"] == [""], "there is no room for a word"
    whole = Scene(0.0)
    whole.add(records, 2.0)
    assert not any(plot.ahead for plot in plots((), whole, 2.0)), "nothing is to come"
    log = Timeline(clock=lambda: now)
    log.extend([r for r in records if arrival(r) <= now])
    held = Picture(log, Wanted(origin=0.0, since=0.0, stepwise=True))
    held.do("seek", now - 0.1)
    assert held.look(now)[0][1].ahead == (pytest.approx(now - 0.1), "held")
    still = held.still()
    assert still is not None
    texts = {text.text for text in svg_of(still[0]).iter(f"{SVG}text")}
    assert "end" in texts
    assert not {"now", "held"} & texts


def test_the_notes_of_panels_are_not_cut() -> None:
    scene = scene_at(training(6), 2.0)
    for name in DEFAULT:
        plot = PANELS[name](scene, 2.0)
        room = WIDTH - LEFT - wide(plot.title + "  ", bold=True)
        assert wide(plot.note) <= room, plot.note
    assert "hatched: still computes" in PANELS["queues"](scene, 2.0).note


def test_what_does_not_repeat_is_shown_whole() -> None:
    records = training(2)
    scene = scene_at(records, 1.5)
    assert scene.shown is None
    assert scene.range(1.5) == scene.lately(1.5)


def test_a_loop_that_is_over_stands_and_what_comes_after_it_is_shown() -> None:
    cluster = Cluster()
    at = 0.0
    for _ in range(5):
        at = cluster.pipeline(at=at)
    loop = scene_at(cluster.in_order(), at + 60.0, window=100.0)
    assert loop.shown is not None
    assert loop.shown.end <= at + 0.1, "it does not run away from what was"
    other = Event("launched", at + 5.0, "island0", "island0/host0", run=99, step=0, program="eval",
                  args={"devices": (0,)})  # fmt: skip
    running = [*cluster.in_order(), other]
    assert scene_at(running, at + 6.0, window=100.0).shown is None, "it is over"
    later = cluster.pipeline("eval", at=at + 5.0)
    scene = scene_at(cluster.in_order(), later, window=100.0)
    assert scene.shown is None, "the loop is not what is going on"


def test_the_program_that_devices_compute_for_most_is_looked_at() -> None:
    cluster = Cluster()
    at = 0.0
    for _ in range(6):
        at = cluster.pipeline("train", at=at)
        at = cluster.pipeline("loss", micro=1, at=at, forward=0.001)
    shown = scene_at(cluster.in_order(), at).shown
    assert shown is not None
    assert (shown.program, [own(run) for run in shown.runs]) == ("train", [9, 11])


def test_of_steps_too_short_to_be_seen_there_are_more_than_two() -> None:
    cluster = Cluster(islands=1, devices=1)
    for run in range(200):
        cluster.gang(0, run, 0, "f", "f", "", 0.002 * run, 0.001, 0.0)
    shown = scene_at(cluster.in_order(), 1.0).shown
    assert shown is not None
    assert shown.end - shown.start == pytest.approx(SHORTEST, abs=0.003)


def test_a_step_that_hangs_stays_in_sight_and_the_window_jumps_seldom() -> None:
    records = training(5)
    last = starts(records)[-1]
    hung = [r for r in records if arrival(r) <= last + 0.1]
    hung += [Event("launched", last + 0.1, "island0", "island0/host0", run=(1 << 32) + 5, step=9,
                   program="train", node="bwd0", args={"devices": (0,)})]  # fmt: skip
    scene = Scene(0.0, 100.0, stepwise=True)
    scene.add(hung, last + 0.1)
    ends = []
    for tick in range(300):
        now = last + 0.1 + tick / 10
        scene.add((), now)
        start, end = scene.range(now)
        assert start <= last <= now <= end + LATE
        ends.append(end)
    assert sum(a != b for a, b in pairwise(ends)) <= 7


def test_bars_of_the_steps_are_told_apart_and_older_ones_go_coarser() -> None:
    """Also where there are more bars than are drawn; and none of them is lost."""
    cluster = Cluster(islands=1, devices=2)
    for run in range(40):
        for step in range(50):
            cluster.gang(0, run, step, "train", f"f{step % 3}", "", 0.0, 0.004, 0.0)
    records = cluster.in_order()
    end = max(gang.end for gang in gangs(records))
    scene = Scene(0.0, budget=600, stepwise=True)
    for first in range(0, len(records), 60):
        scene.add(records[first : first + 60], arrival(records[min(first + 59, len(records) - 1)]))
    bars: dict[str, Any] = scene.bars.columns()
    assert int(bars["count"].sum()) == 40 * 50 * 2
    assert len(bars["count"]) <= 600
    start, _ = scene.range(end)
    shown = bars["left"] >= start
    assert list(np.unique(bars["count"][shown])) == [2], "one gang, of two devices"
    assert not scene.merged
    assert scene.resolution < 0.4 / FRAME * 1.1
    assert bars["count"][~shown].max() > 2


def test_a_saved_picture_shows_the_steps_and_all_the_rest_below_them() -> None:
    records = training(90)
    end = max(gang.end for gang in gangs(records))
    bundle = freeze(records, 0.0, end, (), "train", Palette(), stepwise=True)
    facts = bundle[1]["pathways_lab"]
    assert facts["computations"] == sum(len(gang.devices) for gang in gangs(records))
    assert not facts["merged"]
    whole = freeze(records, 0.0, end, (), "train", Palette())[1]["pathways_lab"]
    assert whole["computations"] == facts["computations"]
    assert whole["merged"]
    layers = {path.get("data-layer"): path for path in svg_of(bundle[0]).iter(f"{SVG}path")}
    assert {"queues-bars", "overview", "shown"} <= layers.keys()
    bars = drawn_boxes(svg_of(bundle[0]), "queues-bars")
    assert len(bars) == 2 * 2 * (9 + 4), "two steps, of two islands: nine gangs, four transfers"


def test_a_page_is_told_what_it_shows_and_may_have_the_whole_window() -> None:
    log = Timeline(clock=lambda: 4.0)
    records = training(6)
    log.extend([r for r in records if arrival(r) <= 4.0])
    shown = Picture(log, Wanted(origin=0.0, since=0.0, stepwise=True))
    _, header = shown.look(4.0)
    begin, length, parts = header.overview
    assert header.shown[0] == pytest.approx(starts(records)[-2], abs=0.001)
    assert header.window == "last 20 s"
    assert (0.0 < begin < 0.01, 3.8 < begin + length * len(parts) < 4.2) == (True, True)
    shown.do("window")
    _, header = shown.look(4.0)
    assert (header.shown, header.window) == ((0.0, 4.0), "last runs")
    shown.do("seek", 3.0)
    assert shown.look(4.0)[1].shown == (0.0, 3.0)
    shown.do("window")
    assert shown.look(4.0)[1].shown[0] > 0.5, "also at another moment"
    plain = Picture(log, Wanted(origin=0.0, since=0.0))
    assert plain.look(4.0)[1].window == ""


times = st.lists(
    st.tuples(st.integers(0, 3), st.floats(0.0, 10.0), st.floats(1e-4, 2.0)), min_size=1,
    max_size=60,
)  # fmt: skip


@example([(0, 0.0, 1.0), (0, 0.0, 1.0), (0, 1e-308, 1.0)], set(), 0.0)
@given(times, st.sets(st.integers(0, 3)), st.floats(0.0, 5.0))
def test_a_window_holds_the_newest_and_folding_a_few_at_a_time_finds_the_same(
    told: list[tuple[int, float, float]], busy: set[int], wait: float
) -> None:
    spans: list[Record] = [
        Span("gang", at, at + took, "i", "i/h", (0,), number, 0, f"p{program}", "f", "c")
        for number, (program, at, took) in enumerate(told)
    ]
    now = max(map(arrival, spans)) + wait
    whole, parts, profile = Steps(), Steps(), Profile()
    whole.add(spans)
    for span in spans:
        parts.add([span])
    profile.add(spans)
    assert profile._seconds.sum() <= sum(took for _, _, took in told) * 1.001
    running = {("c", f"p{program}") for program in busy}
    found = whole.window(now, running, 1e9)
    assert found == parts.window(now, running, 1e9)
    if found is not None:
        newest = max(map(arrival, spans))
        assert found.start < newest <= found.end * (1 + 1e-12)
        assert not busy or found.end >= now - LATE
        assert isinstance(found, Window)


def test_the_overview_has_one_size_and_all_of_the_time() -> None:
    profile = Profile()
    spans = [Span("gang", n, n + 0.5, "i", "i/h", (0, 1), n, 0, "p", "f", "c") for n in range(1000)]
    for span in spans:
        profile.add([span])
    begin, length, parts = profile.told(0.0, 4)
    assert begin == 0.0
    assert length * len(parts) >= 999.5
    assert set(parts[:-1]) == {"3"}, "two of four devices, half of the time"


def test_the_clock_beside_the_scrubber_does_not_run_out_of_the_window() -> None:
    """The window stands until hosts tell of the next step."""
    cluster, at, moments = Cluster(1), 0.0, []
    for n in range(1, 9):
        cluster.records.append(Event("submitted", at, run=n, program="p"))
        at = cluster.gang(0, n, 0, "p", "f", "", at, 0.25, at)
        cluster.records.append(Event("finished", at, run=n, program="p"))
    known = [r for r in cluster.records if arrival(r) < at]
    log = Timeline(clock=lambda: at)
    log.extend(known)
    shown = Picture(log, Wanted(origin=0.0, since=0.0, stepwise=True))
    for now in (at - 0.1, at, at + 0.1):
        header = shown.look(now)[1]
        moments.append((header.moments[1], header.shown[1]))
    assert moments == [(at - 0.25, at - 0.25), (at - 0.25, at - 0.25), (at, at)]
