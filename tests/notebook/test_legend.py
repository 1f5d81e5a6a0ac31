"""The legend has the colours of what is shown, and no others."""

from __future__ import annotations

from dataclasses import replace

from pathways_lab.notebook.panels.legend import legend
from pathways_lab.notebook.scene.palette import BETWEEN, NEUTRAL, PAINTS, Palette
from pathways_lab.notebook.scene.scene import Scene
from pathways_lab.timeline.records import Event
from tests.notebook.synthetic import Cluster, arrival, training
from tests.notebook.test_panels import scene_at


def test_a_program_has_a_colour_in_the_legend_where_a_bar_stands_for_several_functions() -> None:
    records = training(1)
    scene = scene_at(records, 1.0)
    several = "several functions of"
    assert several not in dict(legend(("queues",), (scene, 1.0)))
    scene.coarsen(4)
    told = dict(legend(("queues",), (scene, 1.0)))[several]
    assert told == (("train", scene.palette.colour("train")),)
    scene.palette = Palette()  # a saved picture colours only what it draws
    assert dict(legend(("queues",), (scene, 1.0)))[several] == told


def test_calls_that_went_as_one_run_are_not_in_the_legend_twice() -> None:
    cluster = Cluster(1)
    end = cluster.gang(0, 1, 0, "f", "f", "", 0.0, 0.1, 0.0)
    for step, node in enumerate("fg"):
        end = cluster.gang(0, 2, step, "f, g", node, "", end, 0.1, 0.0)
    told = legend(("queues",), (scene_at(cluster.records, end), end))
    assert [(program, [name for name, _ in entries]) for program, entries in told[:2]] == [
        ("f", ["f"]), ("f, g", ["g"]),
    ]  # fmt: skip


def test_an_empty_lane_is_in_the_legend_where_there_is_one() -> None:
    cluster = Cluster(islands=1)
    end = cluster.pipeline(at=0.0)
    scene = Scene(0.0, 20.0)
    scene.add(cluster.in_order(), end)
    told = legend(("queues",), (scene, end)), legend(("utilisation",), (scene, end + 1.0))
    assert all("empty lane" not in dict(each) for each in told)
    later = dict(legend(("queues",), (scene, end + 1.0)))
    assert [name for name, _ in later["empty lane"]] == ["nothing to do"]


def test_a_transfer_is_in_the_legend_where_one_is_drawn() -> None:
    cluster = Cluster(islands=1)
    end = cluster.gang(0, 1, 0, "p", "f", "", 0.0, 0.1, 0.0)
    scene = Scene(0.0, 20.0)
    scene.add(cluster.in_order(), end)
    assert "thin bar" not in dict(legend(("queues",), (scene, end)))
    until = cluster.transfer(0, 0, 1, 1, "p", "", end, 0.1)
    scene.add(cluster.records[-1:], until)
    ((name, colour),) = dict(legend(("queues",), (scene, until)))["thin bar"]
    assert (name, colour in (NEUTRAL, BETWEEN)) == ("transfer", False)
    assert PAINTS[int(scene.bars.columns()["paint"][-1])] == colour
    assert "thin bar" not in dict(legend(("utilisation",), (scene, until)))


def test_the_legend_has_only_programs_and_causes_that_are_in_the_window() -> None:
    cluster = Cluster()
    over = cluster.pipeline("old")
    end = cluster.pipeline("new", at=over + 0.5)
    scene = Scene(0.0, 20.0)
    scene.add(cluster.in_order(), end)
    panels = ("queues", "utilisation")
    assert {"old", "new", "waits for"} <= dict(legend(panels, (scene, end))).keys()
    scene.window = end - over - 0.4
    assert {"new", "waits for"} <= dict(legend(panels, (scene, end))).keys()
    assert "old" not in dict(legend(panels, (scene, end)))
    assert "old" in dict(legend((*panels, "order"), (scene, end))), "its gangs are in the order"
    last = dict(legend(panels, (scene, end + 5.0))).keys()
    assert last == {"waits for", "empty lane"}, "a drag shows them"


def test_the_legend_has_only_functions_that_are_in_the_window() -> None:
    cluster = Cluster(islands=1)
    first = cluster.gang(0, 1, 0, "p", "embed", "", 0.0, 0.1, 0.0)
    end = cluster.gang(0, 1, 1, "p", "head", "", first + 0.2, 0.1, 0.0)
    scene = Scene(0.0, 20.0)
    scene.add(cluster.in_order(), end)

    def functions(panel: str) -> list[str]:
        return [name for name, _ in dict(legend((panel,), (scene, end)))["p"]]

    assert functions("queues") == ["embed", "head"]
    scene.window = end - first - 0.1
    assert functions("queues") == functions("utilisation") == ["head"]
    assert functions("graph") == functions("order") == ["embed", "head"], "it shows the whole run"


def test_the_legend_is_of_the_run_that_is_shown() -> None:
    records = training(2)
    end = next(r for r in records if isinstance(r, Event) and r.kind == "finished").time
    known, last = [r for r in records if arrival(r) <= end + 0.3], (1 << 32) + 2
    named = [replace(r, program="next") if getattr(r, "run", 0) == last else r for r in known]
    scene = scene_at(named, end + 0.3)
    assert [name for name, _ in legend(("graph",), (scene, end + 0.3))][:1] == ["next"]
    assert [name for name, _ in legend(("planned",), (scene, end + 0.3))][:1] == ["train"]
