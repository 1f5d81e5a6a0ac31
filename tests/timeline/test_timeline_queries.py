"""Questions over the timeline, with exact answers on synthetic records."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from pathways_lab.timeline import bars as timeline_bars
from pathways_lab.timeline import queries
from pathways_lab.timeline.bars import (
    GANG,
    TRANSFER,
    Bar,
    Bars,
    Places,
    bars_of,
    coarser,
    columns,
    fitting,
)
from pathways_lab.timeline.busy import Busy, computed, utilisation
from pathways_lab.timeline.gangs import Gangs
from pathways_lab.timeline.machine import Lane, natural
from pathways_lab.timeline.records import Event, Record, Span, own
from tests.notebook.synthetic import Cluster, training

RUN = (1 << 32) + 1


def lanes_of(records: list[Record]) -> dict[Lane, float]:
    return {lane: float(n) for n, lane in enumerate(queries.machine(records).lanes)}


def test_the_machine_is_what_joined() -> None:
    seen = queries.machine(training(1, islands=2, hosts=2, devices=2))
    assert seen.islands == ("island0", "island1")
    assert [h.name for h in seen.hosts_of("island1")] == ["island1/host0", "island1/host1"]
    assert len(seen.lanes) == 8
    assert seen.lanes[:3] == (
        Lane("island0", "island0/host0", 0),
        Lane("island0", "island0/host0", 1),
        Lane("island0", "island0/host1", 0),
    )
    held = seen.held["island1/host0", 1]
    assert str(held) == "slice s1 (data=2, model=2)"


def test_a_host_is_known_from_its_work_when_its_arrival_is_forgotten() -> None:
    records = [r for r in training(1) if not (isinstance(r, Event) and r.kind == "host-joined")]
    assert len(queries.machine(records).lanes) == 8
    only_spans = [r for r in records if isinstance(r, Span)]
    assert len(queries.machine(only_spans).lanes) == 8


def test_a_lost_host_says_why_and_comes_back() -> None:
    records: list[Record] = [*Cluster().records]
    records.append(Event("host-lost", 1.0, "island0", "island0/host0", args={"reason": "exited"}))
    assert queries.machine(records).hosts["island0/host0"].lost == "exited"
    records.append(Event("host-joined", 2.0, "island0", "island0/host0", args={"devices": 4}))
    assert queries.machine(records).hosts["island0/host0"].lost == ""


def test_names_sort_as_people_count() -> None:
    names = ["island10", "island2", "a", "island2/host10", "island2/host9"]
    expected = ["a", "island2", "island2/host9", "island2/host10", "island10"]
    assert sorted(names, key=natural) == expected


def test_the_order_of_an_island_is_its_numbers_whatever_arrives_first() -> None:
    records = training(2, islands=2, hosts=2)
    expected = [(g.run, g.step, g.state) for g in queries.order(records, "island0")]
    assert len(expected) == 2 * (4 + 4 + 1)
    order = queries.order(records, "island0")
    assert [g.place_on("island0")[1] for g in order] == list(range(18))
    random.Random(0).shuffle(records)
    assert [(g.run, g.step, g.state) for g in queries.order(records, "island0")] == expected
    assert all(state == "done" for _, _, state in expected)


def test_a_gang_is_as_far_as_its_slowest_host() -> None:
    hosts = ("island0/host0", "island0/host1")
    gangs = Gangs()
    gangs.add(Event("granted", 0.0, "island0", run=RUN, step=3, args={"seq": 5, "hosts": hosts}))
    gang = gangs.by_key[RUN, 3]
    assert gang.state == "granted"
    gangs.add(Event("launched", 0.1, "island0", hosts[0], RUN, 3, args={"seq": 5}))
    assert (gang.state, gang.state_on(hosts[0]), gang.state_on(hosts[1])) == (
        "launched", "launched", "granted",
    )  # fmt: skip
    gangs.add(Span("gang", 0.1, 0.2, "island0", hosts[0], (0,), RUN, 3))
    assert (gang.state, gang.state_on(hosts[0])) == ("launched", "done")
    gangs.add(Span("gang", 0.1, 0.3, "island0", hosts[1], (0,), RUN, 3))
    assert gang.state == "done"
    gangs.add(Event("failed", 0.4, run=RUN))
    assert gang.state == "done", "what had ended before its run failed stays done"


def test_a_gang_has_the_place_of_its_newest_grant() -> None:
    gangs = Gangs()
    for epoch, seq in ((0, 5), (1, 2)):
        args = {"seq": seq, "epoch": epoch, "hosts": ("island0/host0",)}
        gangs.add(Event("granted", 0.1 * epoch, "island0", run=RUN, step=3, args=args))
        gangs.add(Event("launched", 0.1 * epoch, "island0", "island0/host0", RUN, 3))
        assert gangs.by_key[RUN, 3].place_on("island0") == (epoch, seq)


def test_an_island_whose_gangs_are_all_forgotten_has_an_empty_order() -> None:
    gangs = Gangs(keep=10)
    for seq, island in enumerate(["island0"] * 3 + ["island1"] * 40):
        gangs.add(Span("gang", 1.0 * seq, seq + 0.5, island, f"{island}/host0", (0,), RUN, seq))
    assert gangs.order("island0") == []
    assert len(gangs.order("island1")) == 10
    assert gangs.gone["island0"] == 3


def test_gangs_of_a_failed_run_that_never_end_are_failed() -> None:
    gangs = Gangs()
    gangs.add(Event("failed", 0.4, run=RUN))
    gangs.add(Event("granted", 0.0, "island0", run=RUN, step=0, args={"hosts": ("h",)}))
    assert gangs.by_key[RUN, 0].state == "failed"


def test_only_the_newest_gangs_are_kept_and_all_are_counted() -> None:
    gangs = Gangs(keep=20)
    for record in training(4, hosts=2):
        gangs.add(record)
    held = len(gangs.by_key)
    assert 20 <= held <= 40
    assert sum(gangs.gone.values()) == 4 * 18 - held
    assert gangs.done == {RUN + n: 18 for n in range(4)}


def test_runs_whose_gangs_are_counted_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathways_lab.timeline.gangs.RUNS", 3)
    gangs = Gangs(keep=20)
    for record in training(6):
        gangs.add(record)
    assert gangs.done == {RUN + n: 18 for n in range(3, 6)}
    assert gangs.all_done == 6 * 18


def test_the_story_of_a_run_and_of_a_gang() -> None:
    records = training(2)
    of_run = queries.story(records, RUN)
    assert isinstance(of_run[0], Event)
    assert of_run[0].kind == "submitted"
    assert isinstance(of_run[-1], Event)
    assert of_run[-1].kind == "finished"
    assert {r.run for r in of_run if isinstance(r, Span | Event)} == {RUN}
    of_gang = queries.story(records, RUN, 0)
    assert [r.kind for r in of_gang if isinstance(r, Span | Event)] == [
        "granted", "launched", "gang",
    ]  # fmt: skip


def test_a_story_is_of_a_run_that_is_known() -> None:
    records = training(2)
    assert queries.story(records, own(RUN)) == queries.story(records, RUN)
    with pytest.raises(KeyError, match="no record of run 99 is known"):
        queries.story(records, 99)
    for wrong in ("1", True, 1.0):
        with pytest.raises(TypeError, match=f"{wrong!r} is no number of a run"):
            queries.story(records, wrong)  # type: ignore[arg-type]


def test_one_message_for_a_run() -> None:
    way = ("submit", "kernel-1", "control")
    assert {way: flow.messages for way, flow in queries.flows(training(3), RUN).items()} == {way: 1}
    assert queries.flows(training(3))[way].messages == 3


def test_lanes_are_in_order_and_do_not_overlap() -> None:
    for spans in queries.lanes(training(2)).values():
        for a, b in itertools.pairwise(spans):
            assert a.end <= b.start


def gang(start: float, end: float, device: int = 0, program: str = "p", node: str = "n") -> Span:
    return Span("gang", start, end, "island0", "island0/host0", (device,), 1, 0, program, node)


LANE = Lane("island0", "island0/host0", 0)


def test_utilisation_is_the_held_share_of_the_range() -> None:
    spans = [gang(0.0, 1.0), gang(2.0, 4.0), gang(9.5, 12.0)]
    assert utilisation(spans, 0.0, 10.0) == {LANE: pytest.approx(0.35)}
    assert utilisation(spans, 1.0, 2.0) == {LANE: 0.0}
    assert utilisation([gang(0.0, 2.0), gang(1.0, 3.0)], 0.0, 4.0) == {LANE: 0.75}
    transfer = Span("transfer", 0.0, 1.0, "island0", "island0/host0", (0,))
    assert utilisation([transfer], 0.0, 1.0) == {}
    with pytest.raises(ValueError, match="must have a length"):
        utilisation([], 1.0, 1.0)


def test_busy_is_of_devices_that_computed_between_the_first_computation_and_the_last() -> None:
    def gang(start: float, end: float, devices: tuple[int, ...]) -> Span:
        return Span("gang", start, end, "i", "i/h", devices, 1, 0)

    records = [gang(0.0, 5.0, (0,)), gang(6.0, 8.0, (0, 1)), gang(9.0, 10.0, (0,))]
    assert computed(records, 5.5) == (6.0, 10.0, (3 / 4 + 2 / 4) / 2)
    assert computed(records, 5.5, {Lane("i", "i/h", 1)}) == (6.0, 8.0, 1.0)
    assert computed(records, 11.0).busy == 0.0


def test_binned_and_exact_utilisation_agree() -> None:
    records = training(3)
    busy = Busy(width=0.05, bins=200)
    for record in records:
        if isinstance(record, Span) and record.kind == "gang":
            for device in record.devices:
                lane = Lane(record.island, record.host, device)
                busy.add(str(lane), record.start, record.end)
    exact = utilisation(records, 0.0, 2.0)
    _, shares = busy.shares(now=2.0 - 1e-9)
    for lane, share in exact.items():
        assert np.mean(shares[str(lane)][:40]) == pytest.approx(share, abs=1e-6)


def test_bins_scroll() -> None:
    busy = Busy(width=1.0, bins=4)
    busy.add("a", 0.5, 1.5)
    edges, shares = busy.shares(now=1.999999)
    assert edges.tolist() == [0.0, 1.0]
    assert shares["a"] == pytest.approx([0.5, 0.5], abs=1e-5)
    busy.add("b", 4.0, 5.5, 2.0)
    edges, shares = busy.shares(now=5.5)
    assert edges.tolist() == [2.0, 3.0, 4.0, 5.0]
    assert shares["a"] == pytest.approx([0.0, 0.0, 0.0, 0.0])
    assert shares["b"] == pytest.approx([0.0, 0.0, 2.0, 2.0])


def test_coarse_bins_stay_where_they_are_as_time_goes_on() -> None:
    busy = Busy(width=1.0, bins=6)
    busy.add("a", 1.0, 3.0)
    edges, shares = busy.shares(now=4.5, coarse=2)
    assert edges.tolist() == [0.0, 2.0, 4.0]
    assert shares["a"] == pytest.approx([0.5, 0.5, 0.0])
    edges, shares = busy.shares(now=7.0 - 1e-9, coarse=2)
    assert edges.tolist() == [1.0, 2.0, 4.0, 6.0]
    assert shares["a"] == pytest.approx([1.0, 0.5, 0.0, 0.0])


def test_a_span_over_many_bins_fills_them() -> None:
    busy = Busy(width=1.0, bins=6)
    busy.add("a", 0.25, 4.5)
    assert busy.shares(5.999)[1]["a"][:5] == pytest.approx([0.75, 1, 1, 1, 0.5])


def test_every_gang_on_every_device_is_one_bar() -> None:
    records = training(2)
    out = columns(records, lanes_of(records))
    gangs, transfers = 2 * 2 * 9 * 4, 2 * 8 * 4
    assert (out["kind"] == GANG).sum() == gangs
    assert (out["kind"] == TRANSFER).sum() == transfers
    first = min(r.start for r in records if isinstance(r, Span))
    last = max(r.end for r in records if isinstance(r, Span))
    assert (out["start"].min(), out["end"].max()) == (first, last)


def test_neighbours_closer_than_a_pixel_become_one_bar_that_knows_their_number() -> None:
    bars = Bars(resolution=0.01)
    for n in range(100):
        bars.add(bars_of(gang(n * 0.002, n * 0.002 + 0.001), Places({LANE: 0})))
    assert len(bars.items) == 1
    bar = bars.items[0]
    assert (bar.count, bar.start, bar.end) == (100, 0.0, 99 * 0.002 + 0.001)
    assert bar.busy == pytest.approx(0.1)


def test_long_bars_and_long_gaps_and_other_programs_stay_apart() -> None:
    bars = Bars(resolution=0.01)
    spans = [gang(0, 0.02), gang(0.02, 0.04), gang(0.1, 0.101), gang(0.101, 0.102, program="q")]
    for span in [*spans, gang(0.2, 0.201, program="q")]:
        bars.add(bars_of(span, Places({LANE: 0})))
    assert [b.count for b in bars.items] == [1, 1, 1, 1, 1]


def test_sealed_bars_never_change() -> None:
    bars = Bars(resolution=1.0)
    bars.add(bars_of(gang(0.0, 0.1), Places({LANE: 0})))
    first = bars.seal()
    bars.add(bars_of(gang(0.1, 0.2), Places({LANE: 0})))
    assert [b.end for b in first] == [0.1]
    assert [b.start for b in bars.seal()] == [0.1]
    assert len(bars.forget_before(0.15)) == 1
    assert [b.start for b in bars.items] == [0.1]
    bars.add(bars_of(gang(0.12, 0.3), Places({LANE: 0})))
    assert [b.end for b in bars.items] == [0.2, 0.3], "another host's part of the same gang"


def test_a_coarser_picture_keeps_counts_and_seconds() -> None:
    rng = random.Random(1)
    bars = Bars()
    time = 0.0
    for _ in range(3000):
        time += rng.random() * 0.002
        end = time + rng.random() * 0.003
        bars.add(bars_of(gang(time, end, program=rng.choice("ab")), Places({LANE: 0})))
        time = end
    total = sum(b.busy for b in bars.items)
    out, resolution = fitting(bars.items, 50, 0.001)
    assert len(out) <= 50
    assert resolution > 0.001
    assert sum(b.count for b in out) == 3000
    assert sum(b.busy for b in out) == pytest.approx(total)
    assert (out[0].start, max(b.end for b in out)) == (bars.items[0].start, bars.items[-1].end)
    assert len(bars.items) == 3000
    assert all(b.count == 1 for b in bars.items)
    assert sum(b.count for b in coarser(bars.items, 0.01)) == 3000


@pytest.mark.parametrize("seed", range(30))
def test_a_resolution_that_is_not_enough_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The same bars as of trying each, while the newest of many bars are drawn ten times finer."""
    rng = random.Random(seed)
    many, limit = rng.choice((0, 1, 5, 60, 600)), rng.choice((1, 5, 20, 100))
    bars = []
    for _ in range(many):
        start, seconds = 20 * rng.random(), rng.choice((0.0, 1e-3, 0.1)) * rng.random()
        row, kind, program = float(rng.randrange(4)), rng.randrange(2), rng.choice("aab")
        gang = rng.randrange(30), rng.randrange(3)
        bars.append(Bar(row, kind, start, start + seconds, program, "n", "c", "l", *gang,
                        rng.choice((1, 1, 2)), seconds, rng.random() < 0.02))  # fmt: skip
    whole = max((b.end for b in bars), default=0.0) - min((b.start for b in bars), default=0.0)
    resolution, doublings = 1e-4, 0
    while len(expected := coarser(bars, resolution, doublings >= 6)) > limit:
        if resolution > whole:
            break
        resolution, doublings = 2 * resolution, doublings + 1
    tried: list[float] = []

    def trying(bars: list[Bar], resolution: float, mix: bool) -> list[Bar]:
        tried.append(resolution)
        return coarser(bars, resolution, mix)

    monkeypatch.setattr(timeline_bars, "coarser", trying)
    assert fitting(bars, limit, 1e-4) == (expected, resolution)
    assert len(tried) <= 1 + doublings // 2


def test_with_more_rows_than_bars_every_row_is_one_bar() -> None:
    rows = Places({Lane("i", "h", n): n for n in range(8)})
    bars = Bars()
    for n in range(16):
        bars.add(bars_of(Span("gang", n, n + 0.5, "i", "h", (n % 8,), step=n), rows))
    assert len(fitting(bars.items, 4, 0.001)[0]) == 8


def test_a_transfer_without_devices_is_drawn_on_all_lanes_of_its_host() -> None:
    lanes = {Lane("i", "h", 0): 0, Lane("i", "h", 1): 1, Lane("i", "g", 0): 2}
    places = Places(lanes)
    assert [b.row for b in bars_of(Span("transfer", 0, 1, "i", "h"), places)] == [0, 1]
    assert bars_of(Span("compile", 0, 1, "i", "h", (0,)), places) == []


def test_one_gang_of_several_hosts_in_a_shared_row_is_one_bar() -> None:
    rows = Places({Lane("i", "h", 0): 0.0, Lane("i", "g", 0): 0.0})
    bars = Bars()
    for host, start, step in (("h", 0.0, 0), ("h", 1.0, 1), ("g", 0.1, 0), ("g", 1.1, 1)):
        bars.add(bars_of(Span("gang", start, start + 0.9, "i", host, (0,), 7, step), rows))
    assert [(b.start, b.end, b.count) for b in bars.items] == [(0.0, 1.0, 2), (1.0, 2.0, 2)]


def test_devices_that_share_a_row_share_a_bar_that_counts_them() -> None:
    rows = Places({Lane("i", "h", 0): 0, Lane("i", "h", 1): 0, Lane("i", "h", 2): 1})
    bars = bars_of(Span("gang", 0.0, 0.5, "i", "h", (0, 1, 2)), rows)
    assert [(b.row, b.count, b.busy) for b in bars] == [(0, 2, 1.0), (1, 1, 0.5)]
