"""The widget's protocol without a browser: one message per update, snapshots that fit."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ipykernel.compiler import XCachingCompiler, get_file_name

from pathways_lab.core.errors import Failure
from pathways_lab.core.program.program import Line
from pathways_lab.notebook.draw.bokeh_figures import documented, template
from pathways_lab.notebook.kernel import host_output, line_index
from pathways_lab.notebook.kernel.host_output import LINES, Pane
from pathways_lab.notebook.panels import plots
from pathways_lab.notebook.scene.header import Header
from pathways_lab.notebook.scene.plot import Append, Assign, Replace, changes, steadied
from pathways_lab.notebook.scene.scene import Scene
from pathways_lab.notebook.view import cpu_budget, live, machine_load, renderers, view
from pathways_lab.notebook.view.cpu_budget import PERIOD, Pace
from pathways_lab.notebook.view.encode import encode
from pathways_lab.notebook.view.live import LiveFigures, answer_while_busy
from pathways_lab.notebook.view.saved import MIME
from pathways_lab.notebook.view.stream import Stream
from pathways_lab.timeline.entries import Entries
from pathways_lab.timeline.log import Timeline
from pathways_lab.timeline.records import Span
from tests.notebook.synthetic import arrival, training


class Wire(LiveFigures):
    """A widget whose messages are kept instead of sent, over a stream."""

    def __init__(self, stream: Stream, on_action: Any = None) -> None:
        self.messages: list[tuple[dict[str, Any], list[bytes]]] = []
        self.stream = stream
        super().__init__(lambda: self.post(documented(stream.snapshot())), on_action)
        self.post(stream.snapshot())
        self.messages.clear()

    def send(self, content: Any, buffers: Any = None) -> None:
        self.messages.append((content, list(buffers or ())))

    def update(self, plots: Any, header: Header) -> None:
        message = self.stream.update(plots, header)
        if message is not None:
            self.post(documented(message))

    def kinds(self) -> list[str]:
        return [content["type"] for content, _ in self.messages]


def at(now: float, hosts: int = 1) -> tuple[Any, ...]:
    scene = Scene(0.0)
    scene.add([r for r in training(3, hosts=hosts) if arrival(r) <= now], now)
    return plots(("islands", "order", "queues"), scene, now)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    monkeypatch.setenv(live.ROUTE_VARIABLE, "a/route")
    made = Wire(Stream(at(0.5)))
    made._followed = True
    return made


def test_an_update_is_one_numbered_message(wire: Wire) -> None:
    wire.update(at(0.6), Header("t"))
    wire.update(at(0.7), Header("t"))
    assert wire.kinds() == ["update", "update"]
    assert [content["seq"] for content, _ in wire.messages] == [1, 2]
    assert [len(buffers) for _, buffers in wire.messages] == [1, 1]
    assert "header" in wire.messages[0][0]
    assert "header" not in wire.messages[1][0], "an unchanged header is not sent again"


def test_nothing_new_sends_nothing(wire: Wire) -> None:
    wire.update(at(0.5), Header())
    assert wire.messages == []


def test_a_snapshot_names_the_last_update_that_it_contains(wire: Wire) -> None:
    wire.update(at(0.6), Header("t"))
    wire._received(None, {"type": "snapshot"}, None)
    content, buffers = wire.messages[-1]
    assert (content["type"], content["seq"]) == ("snapshot", 1)
    names = {change.get("name") for change in json.loads(content["changes"])}
    assert {"queues-bars", "order-done", "islands-cells"} <= names
    assert len(buffers[0]) > 1000
    assert "queues-bars" in content["document"]
    assert "plots" not in content, "pages get documents"


def test_a_page_that_opens_late_makes_the_kernel_send_everything(wire: Wire) -> None:
    assert wire.snapshot()["seq"] == -1
    assert wire.kinds() == ["snapshot"]


def test_plots_of_another_shape_are_sent_as_a_snapshot(wire: Wire) -> None:
    wire.update(at(0.6)[1:], Header())
    assert wire.kinds() == ["snapshot"]


def test_rows_that_come_and_go_are_updates(wire: Wire) -> None:
    """On a busy machine hosts straggle all the time; a page takes half a second for a snapshot."""
    for hosts in (2, 1):
        wire.update(at(0.6, hosts), Header())
    assert wire.kinds() == ["update", "update"]
    changed = [json.loads(content["changes"]) for content, _ in wire.messages]
    more, fewer = ({c["set"]: c["value"] for c in each if "set" in c} for each in changed)
    assert (more["order-y"], fewer["order-y"]) == ([4.17, -0.62], [2.17, -0.62])
    assert [len(each["order-rows"]) for each in (more, fewer)] == [4, 2]
    bands = [c["columns"] for each in changed for c in each if c.get("name") == "order-bands"]
    assert bands == [{"y0": [2.05], "y1": [4.05]}, {"y0": [1.05], "y1": [2.05]}]


def test_a_panel_that_is_as_high_as_a_run_is_wide_does_not_shrink(wire: Wire) -> None:
    """Small calls make runs of all sizes; all below would move, and what is new is a number."""
    low = at(0.6)
    high = tuple(replace(plot, height=plot.height + 20) for plot in low)
    for each in (high, low, high):
        wire.update(each, Header())
    assert wire.kinds() == ["update"], "higher once"
    assert Assign("islands", "height", high[0].height) in changes(low[0], high[0])
    more, fewer = at(0.6, hosts=2)[1], at(0.6)[1]
    assert steadied(more, fewer).height == fewer.height < more.height, "as high as its rows"


def test_without_a_route_the_script_comes_unasked_and_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(live.ROUTE_VARIABLE, raising=False)
    wire = Wire(Stream(at(0.5)))
    wire._pushed = False
    for tick in range(6, 10):
        wire.update(at(tick / 10), Header())
    assert wire.kinds().count("scripts") == 1
    assert len(wire.messages[wire.kinds().index("scripts")][1][0]) > 500_000


def test_with_a_route_a_page_has_some_seconds_before_the_script_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(live.ROUTE_VARIABLE, "a/route")
    wire = Wire(Stream(at(0.5)))
    wire.update(at(0.6), Header())
    assert "scripts" not in wire.kinds()
    wire._shown_at -= live.PATIENCE + 1
    wire.update(at(0.7), Header())
    assert "scripts" in wire.kinds()


def test_key_frames_end_when_a_page_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(live.ROUTE_VARIABLE, "a/route")
    monkeypatch.setattr(live, "FIRST", 0.0)
    wire = Wire(Stream(at(0.5)))
    wire._key_frame_at -= live.KEY_FRAME
    wire.update(at(0.6), Header())
    assert "snapshot" in wire.kinds()
    wire._received(None, {"type": "ready"}, None)
    wire.messages.clear()
    wire._key_frame_at -= live.KEY_FRAME
    wire.update(at(0.7), Header())
    assert wire.kinds() == ["update"]


def test_a_frozen_widget_says_so_to_whoever_comes_and_sends_nothing_more(wire: Wire) -> None:
    wire.freeze({"text/html": "<img>"}, {"n": 1})
    wire.freeze({"text/html": "another"}, {})
    wire.update(at(0.9), Header("late"))
    assert wire.kinds() == ["snapshot"]
    assert wire.snapshot()["frozen"]["data"] == {"text/html": "<img>"}
    wire._received(None, {"type": "snapshot"}, None)
    assert wire.kinds() == ["snapshot", "snapshot"]


def test_the_kernel_puts_the_static_picture_into_the_notebook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pages do so too, but not all front ends are pages, and not all of them are open."""
    left: list[dict[str, str]] = []

    class Handle:
        def update(self, data: dict[str, str], metadata: Any, raw: bool) -> None:
            left.append(data)

    monkeypatch.setattr(view, "widgets_work", lambda: True)
    monkeypatch.setattr(view, "_display", lambda *data, **options: Handle())
    log = Timeline(clock=lambda: 3.0)
    log.extend(training(1))
    made = view.View(log)
    made.show()
    made.show()
    made.freeze()
    kinds = {"text/html", "text/plain", MIME}
    assert [set(data) for data in left] == [kinds] * 2, "wherever it is shown"


@pytest.mark.parametrize("wrong", [{"window": "x"}, {"window": 0}, {"origin": float("nan")}])
def test_a_view_of_what_cannot_be_is_refused_when_it_is_asked_for(wrong: Any) -> None:
    """Not by whoever draws it, later and in another process."""
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.* is no"):
        view.View(Timeline(clock=lambda: 0.0), **wrong)


def test_a_button_reaches_its_action() -> None:
    pressed: list[tuple[str, Any]] = []
    wire = Wire(Stream(at(0.0)), lambda name, value: pressed.append((name, value)))
    wire._received(None, {"type": "action", "name": "cancel"}, None)
    wire._received(None, {"type": "action", "name": "seek", "value": 1.5}, None)
    wire._received(None, "nonsense", None)
    assert pressed == [("cancel", None), ("seek", 1.5)]


def test_a_line_has_a_place_when_its_cell_is_known() -> None:
    asked = {"metadata": {"cellId": "a1"}, "content": {"code": "x = 1\ny = 2"}}
    kernel = type("Kernel", (), {"get_parent": lambda self: asked})()
    shell = type("Shell", (), {"kernel": kernel, "compile": XCachingCompiler()})()
    shell.execution_count = 1
    line_index.note(shell)
    line_index.note(shell, "file of a magic's text")
    file = get_file_name("x = 1\ny = 2")
    found = line_index.place_of(f"{file}:2: y = 2")
    assert found == {"cell": "a1", "number": 2, "text": "y = 2"}
    assert line_index.place_of("file of a magic's text:3: z: int = f(':4: ')") == {
        "cell": "a1", "number": 3, "text": "z: int = f(':4: ')",
    }  # fmt: skip
    assert line_index.source(f"{file}:2: y = 2") == "2 of cell [1]: y = 2"
    assert line_index.place_of("model.py:2: y = 2") is None
    assert line_index.source("code/model.py:2: y = 2") == "2 of model.py: y = 2"
    unknown = f"{get_file_name('x = 1')}:1: x = 1"  # a cell of another kernel
    assert line_index.source(unknown) == "1: x = 1"
    assert line_index.place_of("") is None
    del asked["metadata"]["cellId"]  # another front end
    asked["content"]["code"], shell.execution_count = "z = 3", 4
    line_index.note(shell)
    assert line_index.source(f"{get_file_name('z = 3')}:1: z = 3") == "1 of cell [4]: z = 3"
    assert line_index.place_of(f"{get_file_name('z = 3')}:1: z = 3") is None


def test_a_view_ends_with_its_lab_also_when_that_is_lost() -> None:
    timeline = Timeline(clock=lambda: 0.0)
    shown = view.view_of(timeline)
    assert not shown.ended()
    timeline.end()
    assert shown.ended() == "ended"
    assert not view.view_of(timeline, replay=True).ended(), "it is for looking at what is over"


def test_the_axis_of_a_replay_ends_with_the_last_that_happened() -> None:
    now = [30.0]
    timeline = Timeline(clock=lambda: now[0])
    timeline.written = Entries()
    records = training(3)
    timeline.extend(records)
    timeline.end()
    now[0] = 60.0
    assert timeline.clock() == 30.0
    replay = view.view_of(timeline, replay=True)
    drawn = renderers.painter_of(timeline, replay.wanted, replay)
    assert isinstance(drawn, renderers.Thread), "no process draws by another clock"
    drawn.end("ended")
    shown, header = drawn.picture.look(timeline.clock())
    last = max(r.end for r in records if isinstance(r, Span))
    begun = {r.start for r in records if isinstance(r, Span) and r.kind == "gang"}
    axis = pytest.approx((0.0, last), abs=0.2)
    assert all(plot.x == axis for plot in shown if plot.time)
    assert {bar.start for bar in drawn.picture.scene.computed.bars.items} >= {
        min(begun),
        max(begun),
    }
    assert header.actions == ()
    drawn.picture.outcome = ""
    assert drawn.picture.look(now[0])[1].state == "idle"


def test_messages_from_the_page_are_not_routed_to_the_busy_loop() -> None:
    """ipykernel 7.4 keeps the attribute on its comms; should it move, this says so."""
    comm = type("Comm", (), {"_reply_subshell_for": lambda self: None})()
    answer_while_busy(comm)
    assert comm._reply_subshell_for is None
    older = object()
    answer_while_busy(older)


def test_columns_are_aligned_bytes_and_text() -> None:
    described, block = encode(
        [
            Replace("a", {"n": np.array([1, 2, 3], np.uint8), "t": ["x", "y", "z"]}),
            Append("b", {"x": np.array([0.5], np.float64)}, 7),
            Assign("time", "range", (0.0, 1.0)),
            Assign("q-rows", "labels", {0.0: "device 0"}),
        ]
    )
    assert described[0]["columns"]["t"] == ["x", "y", "z"]
    assert described[0]["columns"]["n"] == {"type": "uint8", "offset": 0, "length": 3}
    where = described[1]["columns"]["x"]
    assert (where["offset"] % 8, described[1]["keep"]) == (0, 7)
    assert np.frombuffer(block, "<f8", 1, where["offset"]).tolist() == [0.5]
    assert described[3]["value"] == [(0.0, "device 0")]
    with pytest.raises(TypeError, match="int64"):
        encode([Replace("a", {"n": np.array([1], np.int64)})])


def test_printed_lines_are_bounded_and_what_is_missing_is_said() -> None:
    pane = Pane(lambda text: None)
    pane.add("".join(f"{n}\n" for n in range(LINES + 5)))
    lines = pane.text.splitlines()
    assert lines[0] == "... 5 earlier lines"
    assert lines[1:] == [str(n) for n in range(5, LINES + 5)]


def test_what_is_noticed_later_appears_below_its_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    pane = Pane(lambda text: None)
    monkeypatch.setattr(host_output, "pane_below_cell", lambda: pane)
    note = host_output.notes_below_cell(lambda file: "Cell In[3]")
    note("asked about ['a', 'b']\n")
    line = Line("cell", 4, "return view.candidates[5].run")
    note(Failure("policy", "policy Mine was removed", "correct it", line=line))
    assert re.sub(r"\x1b\[\d*m", "", pane.text).splitlines() == [
        "asked about ['a', 'b']",
        "PathwaysError: policy Mine was removed",
        "  Cell In[3], line 4",
        "---->    4  return view.candidates[5].run",
        "  remedy: correct it",
    ]


def looked(seconds: float, spare: Callable[[float], float], update: float = 0.025) -> list[float]:
    """When a painter with a pace draws, whose updates take so long (processor seconds)."""
    pace, now, at = Pace(0.0, 2), 0.0, []
    while now < seconds:
        rest = pace.rest(now, spare(now))
        if not rest:
            at.append(now)
            pace.spent(update)
        now += rest or PERIOD
    return at


def test_pictures_give_way_on_a_busy_machine() -> None:
    busy = looked(60.0, lambda now: 0.1)
    assert [sum(at < end for at in busy) for end in (1, 10)] == [4, 40], "from the first update on"
    assert 0.025 * len(busy) / 60 <= 1.05 * 2 * cpu_budget.LEAST
    idle = looked(60.0, lambda now: 1.8)
    assert len(idle) == pytest.approx(600, abs=1), "ten times a second"
    dear = looked(60.0, lambda now: 1.8, update=0.2)
    assert 0.2 * len(dear) / 60 == pytest.approx(cpu_budget.MOST, rel=0.05)
    assert [cpu_budget.share(0.0, least) for least in (0.05, 0.1, 3.2)] == [0.05, 0.1, 0.25]
    half = [cpu_budget.share(spare, 0.1) for spare in (0.0, 0.6, 0.75, 0.9, 1.0, 2.0)]
    assert half == pytest.approx([0.1, 0.1, 0.1, 0.15, 0.25, 0.25]), "what is idle at moments"


def test_a_picture_stands_still_for_half_a_second_or_takes_a_quarter_of_a_processor() -> None:
    """What stands still seems to be broken."""
    for update, longest in ((0.1, cpu_budget.LONGEST), (0.5, 0.5 / cpu_budget.MOST)):
        for spare in (0.0, 0.1):
            slow = looked(60.0, lambda now, spare=spare: spare, update)
            rests = [after - before for before, after in itertools.pairwise(slow)]
            assert max(rests) == pytest.approx(longest, abs=0.01), (update, spare)
            assert update * len(slow) / 60 < 1.1 * cpu_budget.MOST


def test_a_picture_takes_in_no_more_than_it_can_pay_for_while_it_rests() -> None:
    """A record takes 50 us and a picture 10 ms: on two busy processors 40 of 50 ms are left."""
    painter = Pace(0.0, 2)
    for now in range(1, 20):
        assert not painter.rest(float(now), 0.0)
        painter.drew(painter.part * 50e-6, 0.010)
    assert painter.part * 50e-6 == pytest.approx(2 * cpu_budget.LEAST * cpu_budget.LONGEST - 0.010)
    for now in range(20, 40):
        painter.rest(float(now), 0.0)
        painter.drew(painter.part * 50e-6, 0.1)
    assert painter.part == cpu_budget.FEWEST, "drawing takes it all"


def test_moments_on_a_narrow_axis_do_not_lie_on_each_other() -> None:
    document = json.loads(template(plots((), Scene(0.0), 0.0)))
    assert "NoOverlap" in json.dumps(document)


def behind(seconds: float, spare: float, rate: int, fold: float, draw: float) -> list[float]:
    """How far a picture is behind whenever it is drawn.

    rate: records that come in a second; fold: processor seconds that one takes; draw: that a
    picture takes.  spare: processors that are idle but for it.
    """
    pace, now, used, folded, out = Pace(0.0, 2), 0.0, 0.0, 0.0, []
    while now < seconds:
        late = now - folded / rate
        rest = pace.rest(now, max(0.0, spare - used), late=late)
        used = 0.0
        if not rest:
            out.append(late)
            many = min(pace.part, rate * now - folded)
            folded += many
            pace.drew(many * fold, draw)
            pace.spent(many * fold + draw)
            used = 1.0
        now += rest or max(many * fold + draw, PERIOD)
    return out


def test_a_picture_of_2048_devices_is_at_most_three_seconds_behind_on_a_quiet_machine() -> None:
    """Gangs of 40 ms on 256 hosts: 11,500 records a second, of 35 us each."""
    quiet = {"spare": 2.0, "rate": 11_500, "fold": 35e-6, "draw": 0.1}
    assert max(behind(120.0, **quiet)) < 3.0
    busy = behind(120.0, **{**quiet, "spare": 0.5})
    assert busy[-1] > 20.0, "on a busy machine computations go first"


def test_a_picture_of_600_runs_a_second_is_at_most_three_seconds_behind_on_a_busy_machine() -> None:
    """7,500 records a second, of 20 us each: more than the share of a picture that is in time."""
    late = behind(120.0, spare=0.0, rate=7_500, fold=20e-6, draw=0.01)
    assert max(late) < 3.0


def test_a_machine_is_not_judged_by_the_hundredth_of_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, percents = [5.0], iter((0.0, 50.0, 100.0))
    monkeypatch.setattr(machine_load.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(machine_load.psutil, "cpu_percent", lambda: next(percents))
    monkeypatch.setattr(machine_load, "COUNT", 2)
    spare = machine_load.Spare()
    found = []
    for now[0] in (5.0, 5.05, 5.11, 5.2, 5.22):
        found.append(spare())
    assert found == [2.0, 2.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("count", [1, 2, 64])
def test_a_kernel_that_computes_is_left_alone_also_where_other_processors_are_idle(
    count: int,
) -> None:
    """A second of its only interpreter is dear, however many processors there are."""

    def used(idle: float, kernel: float, here: float = 0.002) -> float:
        """The kernel's part, of its time."""
        painter, now, updates = Pace(0.0, count), 0.0, 0
        while now < 60.0:
            rest = painter.rest(now, float(count), idle)
            if not rest:
                updates += 1
                painter.spent(here, kernel)
            now += rest or PERIOD
        return updates * kernel / 60

    assert used(idle=0.0, kernel=0.005) == pytest.approx(cpu_budget.KERNEL, rel=0.02)
    assert used(idle=0.0, kernel=0.010) == pytest.approx(0.010 / cpu_budget.LONGEST, rel=0.02)
    assert used(idle=1.0, kernel=0.010) == pytest.approx(0.010 / PERIOD, rel=0.02)


@pytest.mark.parametrize(
    ("a_record", "records"), [(2e-6, cpu_budget.MANY), (25e-6, 2000), (400e-6, cpu_budget.FEWEST)]
)
def test_a_picture_that_is_behind_takes_in_more_before_it_is_drawn(
    a_record: float, records: int
) -> None:
    """It takes 10 ms to draw, so 50 may go into folding."""
    painter = Pace(0.0, 2)
    for _ in range(10):
        painter.drew(painter.part * a_record, 0.010)
    assert painter.part == pytest.approx(records, abs=1)
    painter.drew(0.0, 0.010)
    assert painter.part == pytest.approx(records, abs=1), "nothing was new"
