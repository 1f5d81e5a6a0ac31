"""The frozen picture: complete, small, readable anywhere, and checked against the records."""

from __future__ import annotations

import base64
import json
import random
import re
from itertools import product
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from pathways_lab.notebook.panels import PANELS
from pathways_lab.notebook.scene.palette import DARK, HUES, LIGHT, Palette, contrast
from pathways_lab.notebook.scene.plot import LEFT, RIGHT, WIDTH, moments, nice
from pathways_lab.notebook.scene.scene import Scene
from pathways_lab.notebook.view.frozen import LIMIT, freeze
from pathways_lab.notebook.view.saved import MIME
from pathways_lab.timeline.records import Event, Record, Span
from tests.notebook.synthetic import Cluster, arrival, training

ALL = tuple(PANELS)
SVG = "{http://www.w3.org/2000/svg}"


def size(part: dict[str, Any]) -> int:
    """Bytes of a part of a bundle, without the data of a live picture."""
    return len(json.dumps({name: value for name, value in part.items() if name != MIME}))


def svg_of(data: dict[str, str]) -> ElementTree.Element:
    found = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', data["text/html"])
    assert found
    return ElementTree.fromstring(base64.b64decode(found[1]))


def drawn_boxes(svg: ElementTree.Element, layer: str) -> list[tuple[float, float, float, float]]:
    """``(left, right, top, bottom)`` in pixels of the boxes of one layer."""
    out = []
    for path in svg.iter(f"{SVG}path"):
        if path.get("data-layer") != layer:
            continue
        d = path.get("d", "")
        for x, y, w, h in re.findall(r"M([-\d.]+) ([-\d.]+)h([-\d.]+)v([-\d.]+)H", d):
            left, top = float(x), float(y)
            out.append((left, left + float(w), top, top + float(h)))
        if path.get("stroke-width"):
            thick = float(path.get("stroke-width", ""))
            at = middle = 0.0
            for kind, x, y, w in re.findall(r"([Mm])([-\d.]+) ([-\d.]+)h([-\d.]+)", d):
                at, middle = (float(x), float(y)) if kind == "M" else (at + float(x), middle)
                out.append((at, at + float(w), middle - thick / 2, middle + thick / 2))
                at += float(w)
    return out


def frozen(records: list[Record], end: float, panels: tuple[str, ...] = ALL) -> Any:
    return freeze(records, 0.0, end, panels, "train", Palette())


def test_the_drawn_bars_are_the_records() -> None:
    """Every computation of the timeline is a box, from its start to its end, on its device."""
    records = training(2)
    end = max(r.end for r in records if isinstance(r, Span))
    data, metadata = frozen(records, end)
    spans = [r for r in records if isinstance(r, Span)]
    gangs = [s for s in spans if s.kind == "gang"]
    facts = metadata["pathways_lab"]
    assert facts["computations"] == sum(len(s.devices) for s in gangs)
    assert facts["transfers"] == sum(len(s.devices) for s in spans) - facts["computations"]
    assert facts["bars"] == (facts["computations"] + facts["transfers"]) / 4, "one lane an island"
    assert facts["programs"] == {"train": facts["computations"]}
    assert facts["held"] == pytest.approx(sum(len(s.devices) * (s.end - s.start) for s in gangs))
    assert facts["start"] == pytest.approx(min(s.start for s in spans))
    assert facts["end"] == facts["seconds"] == pytest.approx(end)
    assert not facts["merged"]
    boxes = drawn_boxes(svg_of(data), "queues-bars")
    assert len(boxes) == facts["bars"]
    scale = (WIDTH - LEFT - RIGHT) / end
    expected = sorted((LEFT + s.start * scale, LEFT + s.end * scale) for s in gangs)
    tall = sorted((left, right) for left, right, top, bottom in boxes if bottom - top > 8)
    assert len(tall) == len(expected)
    assert np.allclose(tall, expected, atol=0.11), "to a tenth of a pixel"
    assert json.loads(svg_of(data).findtext(f"{SVG}metadata") or "") == facts


def test_a_picture_with_a_bar_missing_does_not_pass_for_the_records() -> None:
    records = training(2)
    whole, less = (frozen(r, 1.5)[1]["pathways_lab"] for r in (records, records[:-1]))
    lost = [r for r in records if isinstance(r, Span)][-1]
    dropped = [r for r in records if r is not lost]
    assert frozen(dropped, 1.5)[1]["pathways_lab"]["computations"] == whole["computations"] - 4
    assert less["computations"] == whole["computations"], "the last record is the end of a run"


@pytest.mark.parametrize(("hosts", "devices", "gangs"), [(1, 4, 3000), (4, 8, 1000), (64, 4, 100)])
def test_thousands_of_bars_stay_under_the_limit_and_all_are_counted(
    hosts: int, devices: int, gangs: int
) -> None:
    rng = random.Random(0)
    cluster = Cluster(islands=2, hosts=hosts, devices=devices)
    for step in range(gangs):
        cluster.gang(step % 2, 1, step, rng.choice(["train", "eval"]), f"f{step % 7}", "x = f(y)",
                     0.0, rng.choice([0.0002, 0.004]), 0.0)  # fmt: skip
    end = max(cluster.free.values())
    data, metadata = frozen(cluster.records, end)
    facts = metadata["pathways_lab"]
    assert size(data) + size(metadata) <= LIMIT
    assert facts["computations"] == gangs * hosts * devices
    assert facts["merged"] == (facts["bars"] < gangs)
    assert facts["merged"] == ("are drawn as one" in "".join(svg_of(data).itertext()))


def test_the_time_axis_is_the_records_clock() -> None:
    data, _ = frozen(training(2), 1.5, ("queues",))
    texts = [t.text for t in svg_of(data).iter(f"{SVG}text")]
    assert [t for t in texts if t and t.endswith(" s")] == [
        f"{t:g} s" for t in nice(0.0, 1.5)
    ]  # fmt: skip


def test_nothing_is_drawn_beside_the_time_that_is_shown() -> None:
    """Bytes of all steps are known, and the last two are shown."""
    records = training(9)
    end = max(r.end for r in records if isinstance(r, Span))
    bundle = freeze(records, 0.0, end, ("memory",), "train", Palette(), stepwise=True)
    areas = [
        path for path in svg_of(bundle[0]).iter(f"{SVG}path") if path.get("fill-opacity") == ".9"
    ]
    xs = [float(x) for path in areas for x in re.findall(r"[MH](-?[0-9.]+)", path.get("d", ""))]
    assert xs
    assert LEFT <= min(xs) <= max(xs) <= WIDTH - RIGHT


def test_round_numbers_for_an_axis() -> None:
    assert nice(0.0, 1.5) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4]
    assert nice(0.0, 0.004) == [0.0, 0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.0035, 0.004]
    assert nice(97.0, 103.0) == [97.0, 98.0, 99.0, 100.0, 101.0, 102.0, 103.0]
    assert nice(1.0, 1.0) == [1.0]


def test_short_times_are_told_in_milliseconds() -> None:
    assert list(moments(0.0, 0.031, 4).values()) == ["0 s", "10 ms", "20 ms", "30 ms"]
    assert list(moments(16.5, 16.531, 4).values()) == ["16.5 s", "16.51 s", "16.52 s", "16.53 s"]


def test_the_legend_explains_what_is_shown_and_nothing_else() -> None:
    cluster = Cluster()
    cluster.pipeline("new", at=cluster.pipeline("old"))
    records = cluster.in_order()

    def headings(*panels: str) -> set[str]:
        data, _ = frozen(records, 3.0, panels)
        bold = [t for t in svg_of(data).iter(f"{SVG}text") if t.get("font-weight")]
        return {t.text or "" for t in bold if t.get("x") != str(LEFT)} & {"old", "new", "waits for"}

    assert headings("queues") >= {"old", "new"}
    assert headings("planned") - {"waits for"} == {"new"}
    assert headings("memory") == set()


def mixed(colour: str, other: str, share: float) -> str:
    """*colour* with a *share* (0 to 1) of *other*; both ``"#rrggbb"``."""
    parts = (
        round(int(colour[i : i + 2], 16) * (1 - share) + int(other[i : i + 2], 16) * share)
        for i in (1, 3, 5)
    )
    return "#" + "".join(f"{part:02x}" for part in parts)


def test_names_of_nodes_are_legible_whatever_their_state_and_ground() -> None:
    for moment in (0.3, 0.6, 0.95):
        scene = Scene(0.0)
        scene.add([record for record in training(1) if arrival(record) <= moment], moment)
        for layer in PANELS["graph"](scene, moment).layers:
            shown = layer.columns.get("alpha", ())
            for (ground, ink), alpha in product((LIGHT, DARK), shown):
                fills = (mixed(ground, hue, alpha) for hue in HUES)
                assert alpha == 1 or min(contrast(ink, fill) for fill in fills) > 4.5
            assert not layer.hatch or layer.hatch_alpha <= 0.3, "a name is written over it"


def test_it_says_what_a_reader_must_know() -> None:
    records = Cluster(emulated=True).records
    text = frozen(records, 1.0)[0]["text/plain"]
    assert text.startswith("train: 2 islands, 8 devices, waiting for the first gang")
    data, _ = freeze(training(1), 0.0, 1.0, ALL, "<train>", Palette(), ["emulated devices"])
    assert "emulated devices" in "".join(svg_of(data).itertext())
    assert 'alt="&lt;train&gt;: 2 islands' in data["text/html"]


def test_the_text_form_is_a_table_of_devices() -> None:
    records = training(2)
    end = max(r.end for r in records if isinstance(r, Span))
    lines = frozen(records, end)[0]["text/plain"].splitlines()
    assert lines[0] == (
        "train: 2 islands, 8 devices, island0 18 of 18 gangs done, island1 18 of 18 gangs done"
    )
    assert lines[1].split() == ["island", "host", "device", "busy", "last", "computation"]
    assert lines[2].split()[:3] == ["island0", "host0", "0"]
    assert len(lines) == 1 + 1 + 8 + 1 + 1
    assert lines[-1].startswith("  bwd1 on island1 is waited for: island0 computes 77 %")


def test_untrusted_and_scriptless() -> None:
    """Nothing but an image: no script or link, and no style outside of it, that a front end would
    strip."""
    data, _ = frozen(training(1), 1.0)
    assert set(data) == {"text/html", "text/plain", MIME}
    assert re.fullmatch(r'<img alt="[^"]*" src="data:[^"]*" style="[^"]*">', data["text/html"])
    tags = {element.tag.removeprefix(SVG) for element in svg_of(data).iter()}
    assert tags <= {
        "svg",
        "title",
        "desc",
        "metadata",
        "defs",
        "pattern",
        "path",
        "text",
        "style",
        "rect",
    }


def test_failed_gangs_are_hatched_and_counted() -> None:
    cluster = Cluster(islands=1)
    cluster.gang(0, 7, 0, "p", "n", "", 0.0, 0.1, 0.0)
    cluster.records.append(
        Event("granted", 0.0, "island0", run=7, step=1, program="p",
              args={"seq": 1, "hosts": ("island0/host0",)})
    )  # fmt: skip
    cluster.records.append(Event("failed", 0.2, run=7, program="p"))
    svg = svg_of(frozen(cluster.records, 0.3)[0])
    assert len(drawn_boxes(svg, "order-failed")) == 1
    assert svg.find(f".//{SVG}pattern") is not None


def test_short_runs_of_many_devices_stay_under_the_limit_in_all_panels() -> None:
    cluster = Cluster(islands=4, hosts=32, devices=4)
    end = cluster.pipeline(micro=3, forward=0.0004, hop=0.0001)
    data, metadata = frozen(cluster.in_order(), end)
    assert size(data) + size(metadata) <= LIMIT
    assert metadata["pathways_lab"]["computations"] == 4 * 7 * 32 * 4


def test_what_is_alike_is_drawn_once_and_so_little_of_it_is_merged() -> None:
    steps = 60
    records = training(steps)
    data, metadata = frozen(records, max(r.end for r in records if isinstance(r, Span)))
    assert size(data) + size(metadata) <= LIMIT
    facts = metadata["pathways_lab"]
    assert facts["rows"] == 2
    assert facts["bars"] > 90 * 8
    assert facts["computations"] == steps * 18 * 4
