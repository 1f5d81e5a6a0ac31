"""What a view shows: the present, a moment of the past, one gang; and who draws it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable
from typing import Any
from unittest.mock import Mock

import pytest

from pathways_lab.notebook.scene.gang_number import NOBODY, number, parts
from pathways_lab.notebook.scene.header import Header
from pathways_lab.notebook.scene.live_fold import LATE, Present
from pathways_lab.notebook.scene.plot import Plot
from pathways_lab.notebook.scene.scene import Scene
from pathways_lab.notebook.view import picture, render_process, renderers, view
from pathways_lab.notebook.view.frozen import Bundle
from pathways_lab.notebook.view.picture import FOLD, LAST, Picture, Wanted
from pathways_lab.notebook.view.render_process import Studio
from pathways_lab.notebook.view.stills import Still, Stills
from pathways_lab.notebook.view.stream import Message, Stream
from pathways_lab.notebook.view.view import View
from pathways_lab.timeline.entries import Entries
from pathways_lab.timeline.log import Timeline
from pathways_lab.timeline.records import Event, Record, Sample, Span
from pathways_lab.timeline.waits import known_order
from pathways_lab.transport.record_encoding import read, write
from tests.notebook.synthetic import arrival, training

KEEP = 200_000
"""Records that the kernel keeps."""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def made(records: list[Record], now: float, **wanted: Any) -> tuple[Picture, Clock]:
    clock = Clock()
    log = Timeline(clock=clock)
    log.extend(records)
    clock.now = now
    return Picture(log, Wanted(origin=0.0, since=0.0, **wanted)), clock


def bars(plots: tuple[Plot, ...], layer: str = "queues-bars") -> dict[str, Any]:
    return next(dict(each.columns) for plot in plots for each in plot.layers if each.name == layer)


def ended_by(records: list[Record], moment: float) -> int:
    return sum(len(r.devices) for r in records if isinstance(r, Span) and r.end <= moment)


# --- moments ------------------------------------------------------------------


def test_a_moment_of_the_past_is_what_was_known_then() -> None:
    records, panels = training(3, hosts=2), ("order", "queues")
    shown, _ = made(records, 3.0, panels=panels)
    for moment in (0.5, 1.25, 0.75):
        shown.do("seek", moment)
        plots, header = shown.look(3.0)
        then, _ = made([r for r in records if arrival(r) <= moment], moment, panels=panels)
        expected, _ = then.look(moment)
        assert header.at == moment
        assert sum(bars(plots)["count"]) == ended_by(records, moment)
        for layer in ("queues-bars", "queues-open", "order-done", "order-running"):
            found, wanted = bars(plots, layer), bars(expected, layer)
            assert list(found["left"]) == list(wanted["left"]), (moment, layer)
    shown.do("seek", None)
    plots, header = shown.look(3.0)
    assert header.at is None
    assert sum(bars(plots)["count"]) == ended_by(records, 3.0)


def test_a_panel_that_comes_later_takes_no_other_ones_place_and_stays() -> None:
    records = training(2)
    args = {"step": 3, "made": 0.3}
    work = [Span("host-computation", 0.1, 0.4, "", "feed-0", program="b", node="b[3]", args=args)]
    clock = Clock()
    log = Timeline(clock=clock)
    log.extend(r for r in records if arrival(r) <= 0.1)
    shown = Picture(log, Wanted(origin=0.0, since=0.0))
    stream = Stream(*shown.look(0.1))
    before = [plot.name for plot in stream.plots]
    assert before == ["islands", "queues", "utilisation"]
    clock.now = 9.0
    log.extend(sorted([r for r in records if arrival(r) > 0.1] + work, key=arrival))
    stream.update(*shown.look(9.0))
    after = ["islands", "hosts", "queues", "utilisation"]
    assert [plot.name for plot in stream.plots] == after
    shown.do("seek", 0.05)
    assert [plot.name for plot in shown.look(9.0)[0]] == after
    clock.now = 900.0
    shown.do("seek", None)
    log.extend([Event("submitted", 900.0)])
    assert [plot.name for plot in shown.look(900.0)[0]] == after, "also when it is empty again"


def test_the_scrubber_covers_the_record_and_not_idle_time_after_it() -> None:
    shown, clock = made(training(1), 0.5)
    assert shown.look(0.5)[1].moments == (0.0, 0.5)
    for clock.now in (1.4, 60.0):  # the clock beside it is that of the picture
        plots, header = shown.look(clock.now)
        assert {header.moments[1], *(round(p.x[1], 9) for p in plots if p.time)} == {1.4}


def test_cleared_means_from_now_on_and_what_is_under_way_stays() -> None:
    records = training(4)
    clock = Clock()
    log = Timeline(clock=clock)
    log.extend(r for r in records if arrival(r) <= 1.0)
    clock.now = 1.0
    shown = Picture(log, Wanted(origin=0.0, since=0.0))
    shown.do("clear")
    plots, _ = shown.look(1.0)
    assert len(bars(plots)["left"]) == 0
    assert len(bars(plots, "queues-open")["left"]) > 0, "what runs now is still there"
    log.extend(r for r in records if 1.0 < arrival(r) <= 1.5)
    clock.now = 1.5
    plots, header = shown.look(1.5)
    assert sum(bars(plots)["count"]) == ended_by(records, 1.5) - ended_by(records, 1.0)
    assert header.moments[0] == 1.0


@pytest.mark.parametrize("moment", [0.5, 1.02, 1.5])
def test_what_had_ended_before_it_was_cleared_does_not_run_for_ever(moment: float) -> None:
    records = training(4, hosts=2)
    clock = Clock()
    log = Timeline(clock=clock)
    log.extend(r for r in records if arrival(r) <= moment)
    clock.now = moment
    shown = Picture(log, Wanted(origin=0.0, since=0.0))
    shown.look(moment)
    ran = shown.scene.running()
    shown.do("clear")
    shown.look(moment)
    assert sorted(shown.scene.running()) == sorted(ran)
    log.extend(r for r in records if arrival(r) > moment)
    clock.now = 60.0
    header = shown.look(60.0)[1]
    assert header.state == "idle"
    going = {r.run for r in records if isinstance(r, Event) and r.kind == "finished"}
    going -= {
        r.run for r in records if isinstance(r, Event) and r.kind == "finished" and r.time < moment
    }
    gangs = {(r.run, r.step) for r in records if isinstance(r, Event) and r.kind == "granted"}
    count = sum(run in going for run, _ in gangs)
    assert header.status == f"{count} of {count} gangs done", "all of the runs that went on"


def test_a_part_of_a_gang_that_was_over_when_it_was_cleared_is_still_part_of_it() -> None:
    args = {"seq": 0, "hosts": ("i/a", "i/b"), "slice": 1}
    log = Timeline(clock=lambda: 2.0)
    log.extend([
        Event("granted", 1.0, "i", "", 7, 0, "p", "f", "k", args),
        Event("launched", 1.0, "i", "i/a", 7, 0, "p", "f", "k", {"devices": (0,)}),
        Event("launched", 1.0, "i", "i/b", 7, 0, "p", "f", "k", {"devices": (0,)}),
        Span("gang", 1.1, 1.5, "i", "i/a", (0,), 7, 0, "p", "f", "k", "", {"seq": 0}),
    ])  # fmt: skip
    shown = Picture(log, Wanted(origin=0.0, since=0.0))
    shown.do("clear")
    assert [lane.host for lane, *_ in shown.scene.running()] == ["i/b"]
    log.extend([Span("gang", 1.1, 2.5, "i", "i/b", (0,), 7, 0, "p", "f", "k", "", {"seq": 0})])
    assert shown.look(2.5)[1].status == "1 of 1 gangs done"


def test_a_picture_that_is_behind_moves_on_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "FOLD", 10)
    records = training(2)
    clock = Clock()
    log = Timeline(clock=clock)
    shown = Picture(log, Wanted(origin=0.0, since=0.0))
    log.extend(records)
    clock.now = 5.0
    header = shown.look(5.0)[1]
    assert header.late > picture.BEHIND
    for _ in range(len(records) // 10 + 1):
        plots, header = shown.look(5.0)
    assert header.late == 0
    assert sum(bars(plots)["count"]) == ended_by(records, 5.0)


def test_what_is_left_of_a_view_of_runs_ends_with_them() -> None:
    records = training(3)
    first, *others = [r for r in records if isinstance(r, Event) and r.kind == "submitted"]
    mine = [r for r in records if not isinstance(r, Sample) and r.run == first.run]
    shown, _ = made(records, 9.0, runs=frozenset((first.run,)))
    facts = shown.bundle()[1]["pathways_lab"]
    assert others
    assert facts["computations"] + facts["transfers"] == ended_by(mine, 9.0)
    assert facts["seconds"] == pytest.approx(max(map(arrival, mine)), abs=1e-3)
    everything = made(records, 9.0)[0].bundle()[1]["pathways_lab"]
    assert everything["computations"] > facts["computations"]


def test_a_long_run_says_how_long_it_takes_also_when_what_was_is_cleared() -> None:
    records = training(6)
    runs = frozenset(r.run for r in records if isinstance(r, Event) and r.kind == "submitted")
    gangs = sum(isinstance(r, Event) and r.kind == "granted" for r in records)
    known = [r for r in records if arrival(r) <= 3.0]
    shown, _ = made(known, 3.0, runs=runs, gangs=gangs)
    header = shown.look(3.0)[1]
    assert 0.0 < header.progress < 1.0
    assert " left" in header.status
    for _ in range(2):
        shown.do("clear")
        after = shown.look(3.0)[1]
        assert (after.status, after.progress) == (header.status, header.progress)
    assert made(records, 9.0)[0].look(9.0)[1].progress == -1.0, "nothing is known of the whole"


def test_the_error_of_clocks_is_stated_also_when_hosts_came_long_ago() -> None:
    errors = {"a/0": 0.004, "a/1": 0.0, "b/0": 0.0007, "b/1": 0.0002, "b/2": 0.001}
    first = [Sample("clock", 0.0, 0.0004, "a", "a/0")]
    later = [Sample("clock", 0.1, error, host[0], host) for host, error in errors.items()]
    records = [*first, *later, *training(1)]
    clock = Clock()
    log = Timeline(clock=clock)
    log.extend(records)
    clock.now = 60.0
    notes = Picture(log, Wanted()).look(60.0)[1].notes
    assert notes == ("clocks: a/0 ± 4 ms, b/2 ± 1 ms, b/0 ± 700 µs, and 1 by less",)


def told_late(late: float) -> dict[int, list[Any]]:
    """What devices waited for, where transfers are reported a tenth of a second late."""
    records = training(2)
    arrivals = [(arrival(r) + 0.12 * (r.kind == "transfer"), r) for r in records
                if not isinstance(r, Sample)]  # fmt: skip
    clock = Clock()
    log = Timeline(clock=clock)
    shown = Present(log, 1e9, 0.0, 0.0, late)
    for tick in range(80):
        clock.now = tick / 10
        log.extend([r for at, r in arrivals if clock.now - 0.1 < at <= clock.now])
        shown.collect(clock.now, FOLD)
    assert not shown.behind
    return {run: sorted(map(repr, seen.waits)) for run, seen in shown.scene.runs.items()}


def test_what_a_gang_waited_for_is_known_although_it_was_reported_later() -> None:
    at_once = made(training(2), 8.0)[0].scene.runs
    whole = {run: sorted(map(repr, seen.waits)) for run, seen in at_once.items()}
    assert any(whole.values())
    assert told_late(LATE) == whole
    assert told_late(0.0) != whole, "it matters"


# --- one gang ------------------------------------------------------------------


def test_a_gang_has_one_number_in_all_panels() -> None:
    records = training(1, hosts=2)
    shown, _ = made(records, 3.0, panels=("order", "queues", "graph", "planned"))
    plots, _ = shown.look(3.0)
    gang = next(r for r in records if isinstance(r, Span) and r.kind == "gang" and r.step > 3)
    wanted = number(gang.run, gang.step)
    found = {layer: list(bars(plots, layer)["gang"]).count(wanted)
             for layer in ("order-done", "queues-bars", "graph-done", "planned-lanes")}  # fmt: skip
    assert found == {"order-done": 2, "queues-bars": 1, "graph-done": 1, "planned-lanes": 16}
    shown.do("choose", wanted)
    facts = dict(shown.look(3.0)[1].chosen)
    assert facts[""] == f"{gang.node} of train"
    assert facts["line"] == gang.line
    assert shown.look(3.0)[1].line == gang.line
    assert "ended" in facts["state"]
    shown.do("choose", None)
    assert (shown.look(3.0)[1].chosen, shown.look(3.0)[1].line) == ((), "")


def test_what_is_several_gangs_is_no_gang() -> None:
    assert parts(number((7 << 32) + 5, 1000)) == (5, 1000)
    assert number(3, -1) == NOBODY
    cluster = training(4)
    shown, _ = made(cluster, 2000.0, window=5000.0)
    columns = bars(shown.look(2000.0)[0])
    merged = [g for g, n in zip(columns["gang"], columns["count"], strict=True) if n > 1]
    assert merged
    assert set(merged) == {NOBODY}


# --- who draws ------------------------------------------------------------------


class Screen:
    """Keeps what a painter makes."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.stills: list[Still] = []
        self.told = ""
        self.end: tuple[str, Bundle] | None = None
        self.why = ""
        self.over = threading.Event()

    def message(self, message: dict[str, Any]) -> None:
        self.messages.append(message)

    def still(self, still: Still) -> None:
        self.stills.append(still)

    def ended(self) -> str:
        return self.told

    def frozen(self, outcome: str, bundle: Bundle) -> None:
        self.end = outcome, bundle
        self.over.set()

    def failed(self, why: str) -> None:
        self.why = why
        self.over.set()

    def wait_for(self, what: Any, seconds: float = 60.0) -> Any:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found = next(filter(None, map(what, list(self.messages))), None)
            if found:
                return found
            time.sleep(0.02)
        raise AssertionError(f"not among {len(self.messages)} messages")


def lab_log(records: list[Record]) -> Timeline:
    """A timeline whose records came as bytes, and that nobody has read."""
    log = Timeline()
    log.written = Entries()
    entries = [write(r) for r in records]
    log.written.add(entries, len(entries))
    log.extend_later(len(entries), lambda: read(entries))
    return log


@pytest.mark.cluster
def test_a_process_beside_the_kernel_draws_the_same_picture() -> None:
    records = training(2, hosts=2)
    log = lab_log(records)
    wanted = Wanted(title="train", origin=0.0, since=0.0, window=1e9)
    screen = Screen()
    renderers.prepare()
    painter = renderers.painter_of(log, wanted, screen)
    assert renderers._spare.empty(), "the process that was started before is the one that draws"
    whole = screen.wait_for(lambda m: m["type"] == "snapshot" and m)
    assert Header(**whole["header"]).status == "36 of 36 gangs done"
    assert "plots" not in whole, "documents are made there"
    names = ("islands", "queues", "utilisation")
    at = [whole["document"].index(f'"{name}-note"') for name in names]
    assert at == sorted(at), "panels from top to bottom"
    painter.do("seek", 0.5)
    screen.wait_for(lambda m: (m.get("header") or {}).get("at") == 0.5)
    painter.answer("text")
    text = screen.wait_for(lambda m: m.get("text"))
    assert text.startswith("train: 2 islands, 8 devices") or "16 devices" in text
    screen.wait_for(lambda _: screen.stills)
    assert screen.stills[0].bundle[1]["pathways_lab"]["computations"] == 36 * 8
    assert log._later, "the kernel has not read a record"
    screen.told = "finished"
    assert screen.over.wait(60)
    assert screen.end is not None
    assert screen.end[0] == "finished"
    here = Picture(log, wanted).bundle()
    assert screen.end[1][1] == here[1], "the frozen picture has the same numbers"

    # Another view of the same lab, while its process is killed.
    other = Screen()
    renderers.painter_of(log, wanted, other)
    other.wait_for(lambda m: m["type"] == "snapshot")
    studio = renderers._studios[log]
    os.kill(studio._child.pid, signal.SIGKILL)
    assert other.over.wait(60)
    assert "ended" in other.why
    # Who freezes it sees all that is known by then, also what nobody has asked for yet.
    assert log.written is not None
    last = [write(r) for r in training(3, hosts=2)[len(records) :]]
    fourth = Screen()
    painter = renderers.painter_of(log, wanted, fourth)
    fourth.wait_for(lambda m: m["type"] == "snapshot")
    log.written.add(last, len(last))
    log.extend_later(len(last), lambda: read(last))
    painter.end("ended")
    assert fourth.over.wait(60)
    assert fourth.end is not None
    assert fourth.end[1][1] == Picture(log, wanted).bundle()[1] != here[1]
    # And the next view has a new one, which ends with the lab.
    third = Screen()
    renderers.painter_of(log, wanted, third)
    third.wait_for(lambda m: m["type"] == "snapshot")
    child = renderers._studios[log]._child
    renderers.close(log)
    assert third.over.wait(60)
    child.wait()


def test_views_of_one_lab_share_what_is_folded_and_what_is_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Stills, "take", lambda self, now: None)
    records = sorted(training(40), key=known_order)
    cut = 200
    sent: list[tuple[Any, ...]] = []
    made = Studio(lambda *frame: sent.append(frame), lambda: arrival(records[-1]) + 2 * LATE)

    def tell(part: list[Record]) -> None:
        batches = [([write(r) for r in part[n : n + 50]], 50) for n in range(0, 6000, 50)]
        made.hear("records", [batch for batch in batches if batch[0]], 0, 0.0, 1.0, KEEP, {})

    tell(records[:cut])
    for seat in (1, 2):
        made.hear("open", seat, Wanted(window=1e9))
    folded: list[Record] = []
    add = Scene.add

    def counted(scene: Scene, part: Iterable[Record], now: float) -> None:
        folded.extend(part := tuple(part))
        add(scene, part, now)

    monkeypatch.setattr(Scene, "add", counted)
    tell(records[cut:])
    made.tick(FOLD)
    assert len(folded) == FOLD < len(records) - cut, "a bounded part, once for both"
    assert made.timeline._waiting > 500, "and the others were not even read"
    one, other = (made.views[seat].picture for seat in (1, 2))
    assert one.present is other.present
    assert one._drawn is other._drawn
    while one.present.behind:
        made.tick(FOLD)
    written = [write(r) for r in folded]
    assert written == [write(r) for r in records[cut:]], "everything, once, in order"
    assert one.bundle() is other.bundle(), "frozen once"
    # What one of them does is its own.
    made.hear("do", 1, "clear")
    made.tick(FOLD)
    assert not one.scene.gangs.by_key
    assert other.scene.gangs.by_key
    assert {kind for kind, *_ in sent} == {"message"}


def test_records_that_nobody_can_read_or_fold_are_lost_and_views_go_on() -> None:
    records = training(2)
    cut = len(records) // 2
    written = [write(record) for record in records]
    sent: list[str] = []
    clock = Clock()
    clock.now = arrival(records[-1])
    made = Studio(lambda kind, *_: sent.append(kind), clock)
    made.hear("open", 1, Wanted(origin=0.0, since=0.0))
    strange = Event("host-joined", clock.now, args={"devices": "?"})
    batches = [
        (written[:cut], cut),
        ([written[0], b"\xc1"], 7),
        ([write(strange)], 1),
        (written[cut:], len(records) - cut),
    ]
    made.hear("records", batches, 0, 0.0, 1.0, KEEP, {})
    for _ in range(2):  # read, and folded when nothing older can come
        made.tick(1000)
        clock.now += 2 * LATE
    assert set(sent) == {"message", "still"}
    _, header = made.views[1].picture.shown(made.timeline.clock())
    assert "8 records dropped" in header.notes
    assert "7 records could not be read: CodecError" in made.timeline.failures[0]
    there = [r for r in made.timeline.records if not isinstance(r, Sample) and r != strange]
    known = [write(r) for r in there]
    assert known == [w for w, r in zip(written, records, strict=True) if not isinstance(r, Sample)]


def test_nothing_rests_for_what_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a run has ended, the view of the next one moves at once."""

    def dear(picture: Picture) -> Bundle:
        begun = time.thread_time()
        while time.thread_time() < begun + 0.3:
            pass
        return {}, {}

    monkeypatch.setattr(Picture, "bundle", dear)
    monkeypatch.setattr(picture, "SETTLE", 0.0)
    records = training(1)
    made = Studio(lambda *_: None, lambda: arrival(records[-1]))
    made.hear("records", [([write(r) for r in records], len(records))], 0, 0.0, 1.0, KEEP, {})
    made.hear("open", 1, Wanted(origin=0.0, since=0.0))
    made.hear("told", 1, "finished")
    assert sum(made.tick(1000)) < 0.3 <= made.extra
    assert not made.views
    made.tick(1000)
    assert made.extra == 0


def test_a_document_of_another_shape_is_part_of_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that look different may follow each other all the time."""

    def dear(message: Message) -> Message:
        begun = time.thread_time()
        while time.thread_time() < begun + 0.05:
            pass
        return message

    monkeypatch.setattr(render_process, "documented", dear)
    monkeypatch.setattr(Stills, "take", lambda self, now: None)
    records = training(1)
    made = Studio(lambda *_: None, lambda: arrival(records[-1]))
    made.hear("records", [([write(r) for r in records], len(records))], 0, 0.0, 1.0, KEEP, {})
    made.hear("open", 1, Wanted(origin=0.0, since=0.0))
    assert made.extra >= 0.05
    monkeypatch.setattr(Stream, "update", lambda self, *_: self.snapshot())
    assert sum(made.tick(1000)) >= 0.05
    assert made.extra == 0


@pytest.mark.parametrize("late", [0.4, 1.2])
def test_a_view_that_is_closed_waits_a_little_for_its_last_records(late: float) -> None:
    records = training(1)
    sent: list[str] = []
    ended = arrival(records[-1])
    now = [ended]
    made = Studio(lambda kind, *_: sent.append(kind), lambda: now[0])
    early = [write(r) for r in records[:-12]]
    made.hear("records", [(early, len(early))], 0, 0.25, 1.0, KEEP, {})
    made.hear("open", 1, Wanted(origin=0.0, since=0.0))
    made.hear("close", 1, "ended")
    assert "frozen" not in sent, "gangs were launched and have not ended"
    now[0] += late
    if late < LAST:
        made.tick(1000)
        assert "frozen" not in sent
        made.hear("records", [([write(r) for r in records[-12:]], 12)], 0, 0.25, 1.0, KEEP, {})
    made.tick(1000)
    assert sent[-1] == "frozen"
    assert made.elsewhere == (0.5 if late < LAST else 0.25), "what the kernel used is counted"


@pytest.mark.parametrize("late", [0.4, 1.2])
def test_a_view_that_is_frozen_before_it_was_shown_waits_too(
    late: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = training(1)
    log, all_of_it = lab_log(records[:-12]), lab_log(records)
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        if clock[0] >= late and len(log) == len(records) - 12:
            log.extend(records[-12:])

    monkeypatch.setattr(view, "time", Mock(monotonic=lambda: clock[0], sleep=sleep))
    frozen = View(log, origin=0.0).freeze().bundle()
    assert (frozen == View(all_of_it, origin=0.0).bundle()) == (late < LAST)
    assert clock[0] == pytest.approx(min(late, LAST), abs=0.03), "and no longer"


def test_the_frozen_picture_takes_the_live_ones_place_also_where_no_page_is_open() -> None:
    view, handle = View(lab_log(training(1))), Mock()
    view.live = Mock()
    view._handles.append(handle)
    view.frozen("finished", ({"text/plain": "all of it"}, {"computations": 18}))
    handle.update.assert_called_once_with(
        {"text/plain": "all of it"}, metadata={"computations": 18}, raw=True
    )


def test_a_view_that_cannot_be_drawn_says_so_and_harms_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    view = View(lab_log(training(1)))
    monkeypatch.setattr(Picture, "bundle", lambda _: 1 / 0)
    view.failed("the process that draws it has ended")
    assert view.bundle()[0]["text/plain"].startswith("This view ended: the process")
    assert "ZeroDivisionError" in view.timeline.failures[-1]


def test_what_is_lost_on_the_way_keeps_no_device_busy() -> None:
    log = Timeline(capacity=50, clock=lambda: 9.0)
    records = training(4)
    begun = next(n for n, r in enumerate(records) if getattr(r, "kind", "") == "launched") + 1
    log.extend(records[:begun])
    present = Present(log, 1e9, 0.0, 0.0)
    assert present.scene.busy
    log.extend([Event("message", 9.0)] * 60)
    present.collect(9.0)
    assert present.scene.dropped
    assert not present.scene.busy, "the record of its end may be among them"


def test_entries_are_bounded_and_what_is_missed_is_counted() -> None:
    entries = Entries(capacity=10)
    first, second = [b"0", b"1", b"2"], [b"%d" % n for n in range(3, 12)]
    entries.add(first, 3)
    assert entries.since(0) == ([(first, 3)], 3, 0)
    entries.add(second, 9)
    assert entries.since(3) == ([(second, 9)], 12, 0)
    assert entries.since(0) == ([(second, 9)], 12, 3)
    assert entries.since(12) == ([], 12, 0)
