"""Rows by expert, from what hosts told with their decisions."""

from __future__ import annotations

from pathways_lab.notebook.panels import PANELS, completed
from pathways_lab.notebook.scene.balance import RUNS
from pathways_lab.notebook.scene.scene import Scene
from pathways_lab.timeline.records import Event


def told(run: int, *rows: int, step: int = 3) -> list[Event]:
    return [
        Event("rows", run * 0.1, "island0", "island0/host0", run, step, "train", "rows of ffn",
              args={"expert": expert, "rows": count})
        for expert, count in enumerate(rows)
    ]  # fmt: skip


def test_bars_are_the_mean_of_the_last_runs_and_lines_the_newest_one() -> None:
    scene = Scene()
    scene.add([*told(1, 8, 0, 4), *told(2, 4, 0, 8), *told(2, 0, 12, 0, step=9)], 0.2)
    plot = PANELS["experts"](scene, 0.2)
    bars, lines = (layer.columns for layer in plot.layers)
    assert list(bars["right"]) == [6, 0, 6, 0, 12, 0]
    assert [xs[0] for xs in lines["xs"]] == [4, 0, 8, 0, 12, 0]
    assert list(plot.readouts.values()) == ["6", "0", "6", "0", "12", "0"]
    assert "largest is 1.50 of the mean of the last 2 runs" in plot.note
    assert "largest is 3.00 of the mean of one run" in plot.note


def test_runs_before_the_last_ones_are_forgotten() -> None:
    scene = Scene()
    for run in range(1, RUNS + 1):
        scene.add(told(run, 0, 10), run * 0.1)
    scene.add(told(RUNS + 1, 20, 10), 9.0)
    plot = PANELS["experts"](scene, 9.0)
    assert list(plot.layers[0].columns["right"]) == [20 / RUNS, 10]


def test_the_panel_stands_above_the_queues_of_programs_that_have_experts() -> None:
    scene = Scene()
    assert "experts" not in completed((), scene)
    assert PANELS["experts"](scene, 0.0).empty
    assert PANELS["experts"](scene, 0.0).note.startswith("line: ")
    scene.add(told(1, 1, 2), 0.1)
    assert completed(("order", "queues"), scene) == ("order", "experts", "queues")
    assert completed(("experts", "queues"), scene) == ("experts", "queues")
