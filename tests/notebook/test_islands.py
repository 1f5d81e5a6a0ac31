"""The islands panel: a tile for each device, with all that it computed in the time drawn."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pathways_lab.notebook.scene.palette import HEAT
from pathways_lab.notebook.scene.text import table
from pathways_lab.timeline.busy import utilisation
from pathways_lab.timeline.records import Event, Record, Sample, Span
from tests.notebook.synthetic import Cluster, arrival, training
from tests.notebook.test_panels import column, panel, scene_at


def test_a_device_is_named_by_what_it_computes_and_not_by_what_it_computed_before():
    cluster = Cluster(islands=1, devices=1)
    cluster.gang(0, 1, 0, "before", "first", "", 0.0, 0.4, 0.0)
    cluster.gang(0, 2, 0, "after", "second", "", 0.4, 0.4, 0.0)
    scene = scene_at(cluster.in_order(), 0.6)
    assert column(panel("islands", scene, 0.6), "islands-words", "choices")[0][0] == "0 · second"
    assert column(panel("islands", scene, 0.6), "islands-cells", "work") == ["second of after"]


def test_a_meter_has_the_colours_of_all_that_ran_each_by_its_time():
    cluster = Cluster(islands=1, devices=1)
    cluster.gang(0, 1, 0, "before", "first", "", 0.0, 0.4, 0.0)
    cluster.gang(0, 2, 0, "after", "second", "", 0.4, 0.4, 0.0)
    scene = scene_at(cluster.in_order(), 0.6)
    plot = panel("islands", scene, 0.6)
    parts = zip(*(column(plot, "islands-meters", of) for of in ("left", "right", "fill")),
                strict=True)  # fmt: skip
    wide = {colour: right - left for left, right, colour in parts}
    first, second = (scene.palette.colour(*of) for of in (("before", "first"), ("after", "second")))
    assert wide.keys() == {first, second}
    assert wide[first] == pytest.approx(2 * wide[second], rel=0.02), "0.4 s, and 0.2 s so far"


def test_all_numbers_of_a_picture_are_of_the_time_that_is_drawn() -> None:
    """Devices, islands and the text say the same, also of the two last steps."""
    records = training(6)
    for moment, stepwise in ((2.0, True), (2.0, False), (2.31, True)):
        scene = scene_at(records, moment, stepwise=stepwise)
        start, end = scene.elapsed(moment)
        spans = [r for r in records if isinstance(r, Span)]
        exact = utilisation(
            [replace(r, end=min(r.end, moment)) for r in spans if r.start < moment], start, end
        )
        states = column(panel("islands", scene, moment), "islands-cells", "state")
        assert [float(state.split()[1]) for state in states] == pytest.approx(
            [100 * share for share in exact.values()], abs=2
        )
        shares = panel("utilisation", scene, moment).readouts.values()
        assert [float(share.split()[0]) for share in shares] == pytest.approx(
            [100 * exact[lane] for lane in exact if lane.device == 0], abs=2
        )
        told = table(scene, moment, "p").splitlines()[2:10]
        assert [line.split()[3] for line in told] == [state.split()[1] for state in states]


def test_every_device_is_a_cell_of_its_island() -> None:
    plot = panel("islands", scene_at(training(1, hosts=2, devices=2), 0.0), 0.0)
    names = column(plot, "islands-cells", "name")
    assert names == [
        f"island{i}/host{h}, device {d}" for i in range(2) for h in range(2) for d in range(2)
    ]
    assert set(column(plot, "islands-cells", "state")) == {"idle"}
    assert set(column(plot, "islands-cells", "holder")) == {
        "slice s0 (data=2, model=2) of kernel-1", "slice s1 (data=2, model=2) of kernel-1",
    }  # fmt: skip
    heads = column(plot, "islands-heads", "text")
    assert heads[0].startswith("island0  ·  2 hosts, 4 CPU devices")
    choices = column(plot, "islands-heads", "choices")[0]
    assert [len(words.split("  ·  ")) for words in choices] == [3, 2, 2, 1, 1], "for narrower pages"
    assert choices == sorted(choices, key=len, reverse=True)


def test_a_meter_is_as_long_as_its_device_was_busy() -> None:
    cluster = Cluster(islands=1, devices=1)
    cluster.gang(0, 1, 0, "p", "n", "", ready=0.25, seconds=0.25, granted=0.0)
    plot = panel("islands", scene_at(cluster.in_order(), 0.75), 0.75)
    cell = column(plot, "islands-cells", "right")[0] - column(plot, "islands-cells", "left")[0]
    meter = column(plot, "islands-meters", "right")[0] - column(plot, "islands-meters", "left")[0]
    assert meter / cell == pytest.approx(1 / 3)
    assert column(plot, "islands-cells", "state")[0] == "busy 33 %"


def test_what_runs_now_counts_as_busy_until_now() -> None:
    launched = Event(
        "launched", 1.0, "island0", "island0/host0", 1, 0, "p", "n", args={"devices": (0,)}
    )
    joined = Event("host-joined", 0.0, "island0", "island0/host0", args={"devices": 1})
    plot = panel("islands", scene_at([joined, launched], 3.0), 3.0)
    assert column(plot, "islands-cells", "state") == ["busy 91 %"], "0.2 s before it are drawn"


def test_free_and_lost_devices_say_so() -> None:
    records: list[Record] = [
        Event("host-joined", 0.0, "island0", "island0/host0", args={"devices": 2, "kind": "cpu"}),
        Event("host-joined", 0.0, "island0", "island0/host1", args={"devices": 2, "kind": "cpu"}),
        Event("host-lost", 0.5, "island0", "island0/host1", args={"reason": "it exited"}),
    ]
    plot = panel("islands", scene_at(records, 1.0), 1.0)
    assert column(plot, "islands-cells", "state") == ["free", "free"] + ["lost: it exited"] * 2
    assert len(column(plot, "islands-lost", "left")) == 2
    assert "lost" in column(plot, "islands-words", "text")


def test_where_many_hosts_share_a_row_a_tile_has_the_share_of_its_host() -> None:
    records = training(2, islands=2, hosts=70, devices=4)
    idle = [r for r in records if r.host != "island1/host3" or isinstance(r, Sample) or r.step <= 2]
    scene = scene_at(idle, 2.0)
    plot = panel("islands", scene, 2.0)
    states = dict(zip(column(plot, "islands-cells", "name"), column(plot, "islands-cells", "state"),
                      strict=True))  # fmt: skip
    exact = utilisation([r for r in idle if arrival(r) <= 2.0], *scene.elapsed(2.0))
    for host in (2, 3):
        (share,) = {s for lane, s in exact.items() if lane.host == f"island1/host{host}"}
        assert states[f"island1/host{host}"] == f"busy {100 * share:.0f} %"
    assert {*column(plot, "islands-meters", "fill")} == {HEAT}
