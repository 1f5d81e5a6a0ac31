"""Heat strips: the share of devices that computed, with the worst on top, of hundreds of hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pathways_lab.notebook.panels import PANELS, completed
from pathways_lab.notebook.panels.heat import EACH, LEVELS, STRIPS
from pathways_lab.notebook.scene.heat import Heat
from pathways_lab.notebook.scene.plot import Plot
from pathways_lab.notebook.scene.scene import Scene
from pathways_lab.timeline.busy import utilisation
from pathways_lab.timeline.records import Event, Record, Span
from tests.notebook.synthetic import Cluster, arrival
from tests.timeline.streams import row

END = 2.0


def scene_of(records: Sequence[Record], now: float = END, parts: int = 1) -> Scene:
    """A scene of what is known at a moment, folded in so many parts."""
    known = sorted([r for r in records if arrival(r) <= now], key=arrival)
    scene = Scene(0.0, 20.0)
    for part in range(parts):
        scene.add(known[part * len(known) // parts : (part + 1) * len(known) // parts], now)
    return scene


def pipeline(
    islands: int, hosts: int, changed: Callable[[Span], Span] = lambda span: span
) -> list[Record]:
    cluster = Cluster(islands, hosts, 2)
    cluster.pipeline(micro=2)
    return [
        changed(r) if isinstance(r, Span) and r.kind == "gang" else r for r in cluster.in_order()
    ]


def heat(scene: Scene, now: float = END) -> Plot:
    return PANELS["heat"](scene, now)


def boxes(plot: Plot) -> dict[str, Any]:
    return dict(plot.layers[0].columns)


def test_few_hosts_have_their_heat_where_it_is_asked_for() -> None:
    scene = scene_of(pipeline(2, 2))
    told = [int(text.rstrip(" %")) for text in heat(scene).readouts.values()]
    busy = PANELS["utilisation"](scene, END).readouts.values()
    assert set(told) == {int(text.rstrip(" %")) for text in busy} != {0}


def test_the_panel_is_there_where_hosts_are_too_many_for_rows() -> None:
    few, many = (scene_of(Cluster(2, hosts, 2).records) for hosts in (32, 33))
    assert "heat" not in completed((), few)
    names = completed((), many)
    assert names.index("heat") + 1 == names.index("queues")
    assert completed(("heat", "queues"), many).count("heat") == 1


def test_strips_are_what_devices_computed() -> None:
    """The area of a strip is the time for which its devices computed, also while they do."""
    records = pipeline(2, 40)
    now = 0.31
    scene = scene_of(records, now)
    plot = heat(scene, now)
    known = [r for r in records if isinstance(r, Span) and arrival(r) <= now]
    running = [
        replace(r, end=now)
        for r in records
        if isinstance(r, Span) and r.kind == "gang" and r.start < now < r.end
    ]
    start, end = scene.range(now)
    exact = utilisation([*known, *running], start, min(end, now))
    strips = boxes(plot)
    lengths = np.array(strips["right"]) - np.array(strips["left"])
    islands = [at for at, label in plot.rows.items() if label == "40 hosts"]
    for at, name in zip(islands, plot.groups.values(), strict=True):
        share = np.mean([busy for lane, busy in exact.items() if lane.island == name])
        assert int(plot.readouts[at].split(" %")[0]) == pytest.approx(100 * share, abs=1)
        own = np.isclose((np.array(strips["top"]) + np.array(strips["bottom"])) / 2, at)
        area = float((lengths * strips["alpha"])[own].sum())
        assert area == pytest.approx(share * (min(end, now) - start), rel=0.2), "rounded up"
        assert area >= share * (min(end, now) - start) - 1e-6


def test_the_latest_host_is_on_top_then_those_that_compute_least() -> None:
    def changed(span: Span) -> Span:
        late = span.host == "island1/host33"
        return replace(span, end=span.end + 0.03) if late else span

    records = pipeline(2, 40, changed)
    idle = {"host": "island1/host20", "node": "bwd1"}
    records = [r for r in records if any(getattr(r, k, "") != v for k, v in idle.items())]
    plot = heat(scene_of(records))
    assert list(plot.groups.values()) == ["island1", "island0"]
    assert list(plot.rows.values())[:3] == ["40 hosts", "host33", "host20"]
    assert plot.readouts[1.0].endswith(" · +30 ms")
    assert plot.readouts[2.0].endswith(" %")


def test_a_lost_host_is_worse_than_a_late_one() -> None:
    records = pipeline(2, 40)
    records.append(Event("host-lost", 1.0, "island0", "island0/host7", args={"reason": "gone"}))
    plot = heat(scene_of(records))
    assert list(plot.rows.values())[:2] == ["40 hosts", "host7"]
    assert plot.readouts[1.0] == "lost"


@pytest.mark.parametrize(("islands", "hosts", "strips"), [
    (1, 256, STRIPS), (2, 128, STRIPS), (4, 64, STRIPS), (16, 16, 16), (20, 8, 20),
    (70, 1, STRIPS),
])  # fmt: skip
def test_there_are_never_too_many_strips(islands: int, hosts: int, strips: int) -> None:
    plot = heat(scene_of(Cluster(islands, hosts, 1).records))
    assert len(plot.rows) == strips
    assert plot.height <= EACH * (STRIPS + 0.55 * 16 + 1)
    assert ("of 70 islands" in plot.note) == (islands == 70)


def test_neighbours_of_one_intensity_are_one_box() -> None:
    plot = heat(scene_of(pipeline(2, 40)))
    strips = boxes(plot)
    assert set(strips["alpha"]) <= {round(level / LEVELS, 2) for level in range(1, LEVELS + 1)}
    marks = sorted(
        zip(strips["top"], strips["left"], strips["right"], strips["alpha"], strict=True)
    )
    for before, after in pairwise(marks):
        assert before[0] != after[0] or before[2] < after[1] or before[3] != after[3]


def test_parts_and_columns_give_the_same_strips() -> None:
    records = pipeline(2, 40)
    whole, parted = (boxes(heat(scene_of(records, parts=parts))) for parts in (1, 7))
    assert sorted(zip(*whole.values(), strict=True)) == sorted(zip(*parted.values(), strict=True))
    packed = row(([1.0, 2.0], [1.1, 2.1], [1.2, 2.2], [1.5, 3.0]))
    edges = np.array([1.0, 1.3, 2.5, 4.0])
    made = [Heat() for _ in range(2)]
    made[0].add([packed])
    made[1].add(packed.records())
    for each in made:
        (held,) = each.seconds(edges).values()
        assert held == pytest.approx([2 * 0.1, 2 * (0.2 + 0.3), 2 * 0.5])


def test_what_is_older_than_the_window_is_forgotten() -> None:
    seen = Heat()
    seen.add([Span("gang", t, t + 1.0, "i", "i/h", (0,), 1, 0) for t in (0.0, 1.0, 5.0)])
    seen.forget_before(3.0)
    (held,) = seen.seconds(np.array([0.0, 3.0, 6.0])).values()
    assert held.tolist() == [0.0, 1.0]
    seen.forget_before(10.0)
    assert seen.seconds(np.array([0.0, 3.0])) == {}
