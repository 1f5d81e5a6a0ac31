"""Pictures that a notebook keeps: what a page gets of them is what it got live, and it is small."""

from __future__ import annotations

import base64
import json
import random
import zlib
from typing import Any

import numpy as np
import pytest

from pathways_lab.notebook.draw.bokeh_figures import documented
from pathways_lab.notebook.panels import DEFAULT, PANELS, plots
from pathways_lab.notebook.scene.palette import Palette
from pathways_lab.notebook.view import frozen
from pathways_lab.notebook.view.frozen import WHOLE, Bundle, freeze
from pathways_lab.notebook.view.picture import Picture, Wanted
from pathways_lab.notebook.view.saved import MIME, PARTS
from pathways_lab.notebook.view.stream import Stream
from pathways_lab.timeline.log import Timeline
from pathways_lab.timeline.records import Record, Span
from tests.notebook.synthetic import Cluster, training

Columns = dict[str, dict[str, Any]]


def columns_of(changes: str, block: bytes) -> tuple[Columns, list[Any]]:
    """The columns of a message by source, and all else that it sets, as a page reads them."""
    data: Columns = {}
    rest = []
    for change in json.loads(changes):
        if "set" in change:
            rest.append(change)
            continue
        data[change["name"]] = {
            name: column
            if isinstance(column, list)
            else np.frombuffer(block, column["type"], column["length"], column["offset"])
            for name, column in change["columns"].items()
        }
    return data, rest


def unpacked(bundle: Bundle) -> tuple[dict[str, Any], bytes]:
    """The message in a bundle, and its block."""
    frame = zlib.decompress(base64.b64decode(bundle[0][MIME]))
    text, size = (int.from_bytes(frame[at : at + 4], "little") for at in (0, 4))
    assert len(frame) == 8 + text + size
    return json.loads(frame[8 : 8 + text]), frame[8 + text :]


def bars(bundle: Bundle) -> Any:
    message, block = unpacked(bundle)
    return columns_of(message["changes"], block)[0]["queues-bars"]


def end_of(records: list[Record]) -> float:
    return max(r.end for r in records if isinstance(r, Span))


def uneven(hosts: int, devices: int, gangs: int) -> list[Record]:
    """Gangs with pauses between them, and times that are like no other."""
    rng = random.Random(0)
    cluster = Cluster(islands=2, hosts=hosts, devices=devices)
    for step in range(gangs):
        ready = cluster.free.get(f"island{step % 2}", 0.0) + 0.003 * rng.random()
        cluster.gang(step % 2, 1 + step // 20, step % 20, "train", f"f{step % 7}", "x = f(y)",
                     ready, 0.002 + 0.004 * rng.random(), ready - 0.001)  # fmt: skip
    return cluster.records


@pytest.mark.parametrize("panels", [DEFAULT, tuple(PANELS)])
def test_a_page_gets_of_it_what_it_got_live(panels: tuple[str, ...]) -> None:
    log = Timeline(clock=lambda: 1.9)
    log.extend(training(3))
    picture = Picture(log, Wanted(panels, origin=0.0, since=0.0))
    _, header = picture.look(1.9)
    bundle = picture.still()
    assert bundle is not None
    message, block = unpacked(bundle)
    drawn = plots(panels, picture.scene, 1.9, edge="end")
    live = documented(Stream(drawn, header).snapshot())
    assert message["document"] == live["document"]
    here, there = columns_of(message["changes"], block), columns_of(live["changes"], live["block"])
    assert here[1] == there[1]
    assert here[0].keys() == there[0].keys()
    assert len(here[0]["queues-bars"]["left"]) > 50
    for name, columns in there[0].items():
        for column, values in columns.items():
            if isinstance(values, list):
                assert here[0][name][column] == values
            else:
                assert here[0][name][column].dtype == values.dtype
                assert np.allclose(here[0][name][column], values, rtol=0, atol=1e-6)
    told = message["header"]
    assert told["state"] == "saved"
    for name in ("title", "shares", "advice", "summary", "overview"):
        assert told[name] == json.loads(json.dumps(getattr(header, name))), name


@pytest.mark.parametrize(
    ("hosts", "devices", "gangs", "stepwise"),
    [(1, 4, 40, False), (1, 4, 4_400, True), (1, 4, 20_000, False), (256, 4, 20, False)],
)
def test_it_is_small_whatever_happened(
    hosts: int, devices: int, gangs: int, stepwise: bool
) -> None:
    records = uneven(hosts, devices, gangs)
    end = end_of(records)
    bundle = freeze(records, 0.0, end, DEFAULT, "train", Palette(), stepwise=stepwise)
    assert MIME in bundle[0]
    assert sum(len(json.dumps(part)) for part in bundle) <= WHOLE < 150_000
    if not stepwise:
        assert sum(bars(bundle)["count"]) == gangs * hosts * devices, "none is left out"


def test_what_is_too_much_for_a_live_picture_is_merged_in_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = uneven(1, 4, 1_000)

    def kept() -> Bundle:
        return freeze(records, 0.0, end_of(records), tuple(PANELS), "train", Palette())

    whole = kept()
    monkeypatch.setattr(frozen, "WHOLE", sum(len(json.dumps(part)) for part in whole) - 20_000)
    less = kept()
    assert less[0]["text/html"] == whole[0]["text/html"], "the static picture is as fine as it was"
    assert len(bars(less)["left"]) < len(bars(whole)["left"])
    assert sum(bars(less)["count"]) == sum(bars(whole)["count"]) == 1_000 * 4
    before, after = (unpacked(each)[0]["header"]["notes"][-1] for each in (whole, less))
    assert before != after
    assert after.endswith("are drawn as one")
    monkeypatch.setattr(frozen, "WHOLE", 10_000)
    assert set(kept()[0]) == {"text/html", "text/plain"}, "better a static one than none"


def test_the_steps_before_those_that_are_shown_are_there_as_long_as_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = training(20)
    end = end_of(records)

    def kept() -> tuple[Bundle, float]:
        bundle = freeze(records, 0.0, end, DEFAULT, "train", Palette(), stepwise=True)
        shown = unpacked(bundle)[0]["header"]["shown"]
        assert shown[1] - shown[0] < end / 5
        return bundle, shown[0]

    def veiled(bundle: Bundle, panel: str) -> list[float]:
        message, block = unpacked(bundle)
        return columns_of(message["changes"], block)[0][f"{panel}-before"]["x1"]

    bundle, start = kept()
    assert min(bars(bundle)["left"]) < 0.1
    assert veiled(bundle, "queues") == []
    assert veiled(bundle, "utilisation") == [start], "no curve without steps is what was"
    size = len(json.dumps(bundle[0]))
    monkeypatch.setattr(frozen, "WHOLE", size - 1_000)
    bundle, start = kept()
    assert min(bars(bundle)["right"]) >= start - 1 / PARTS
    assert len(bars(bundle)["left"]) >= 2 * 18, "both steps, as fine as they were"
    assert veiled(bundle, "queues") == [start]


def test_no_picture_has_the_path_of_a_cell() -> None:
    class Cells(Cluster):
        def steps(self, micro: int) -> list[list[object]]:
            line = "/tmp/ipykernel_7/12.py:3: y = f(x)"
            return [[*step[:-1], line] for step in super().steps(micro)]

    cluster = Cells()
    end = cluster.pipeline()
    bundle = freeze(cluster.in_order(), 0.0, end, tuple(PANELS), "train", Palette())
    message, block = unpacked(bundle)
    drawn = columns_of(message["changes"], block)[0]
    told = {
        line for name in drawn if name.startswith("graph") for line in drawn[name].get("line", ())
    }
    assert told == {"3: y = f(x)"}
    assert "ipykernel" not in message["changes"]
