"""The dashboard without a browser: feeds, the panel's data, pages, and Dask's menu."""

from __future__ import annotations

import json
import re
import struct
import time
from typing import Any
from unittest.mock import Mock

import pytest

from pathways_lab.notebook.dashboard import PANELS, process, watch
from pathways_lab.notebook.dashboard.feed import KEPT, Feed, begun
from pathways_lab.notebook.dashboard.page import html
from pathways_lab.notebook.dashboard.process import FILES
from pathways_lab.notebook.dashboard.state import state
from pathways_lab.notebook.dashboard.watch import present
from pathways_lab.notebook.scene.palette import palette_of
from pathways_lab.notebook.view import cpu_budget
from pathways_lab.notebook.view.picture import Picture, Wanted
from pathways_lab.runtime.cluster.attach import ControlAddress
from pathways_lab.timeline.log import Timeline
from pathways_lab.timeline.machine import Machine
from pathways_lab.timeline.records import Event
from tests.notebook.synthetic import arrival, training


def messages(body: bytes) -> list[dict[str, Any]]:
    """What ``dashboard.js`` makes of an answer."""
    out = []
    while body:
        text, block = struct.unpack("<II", body[:8])
        out.append(json.loads(body[8 : 8 + text]))
        body = body[8 + text + block :]
    return out


class Playing:
    """A timeline that is told what happened up to a moment."""

    def __init__(self) -> None:
        self.now = 0.0
        self.records = training(2)
        self.timeline = Timeline(clock=lambda: self.now)

    def play(self, until: float) -> None:
        ready = [r for r in self.records if arrival(r) <= until]
        self.records = self.records[len(ready) :]
        self.now = until
        self.timeline.extend(ready)


# --- feeds -------------------------------------------------------------------------------


def test_a_page_gets_everything_once_and_then_what_follows() -> None:
    playing = Playing()
    playing.play(0.1)
    feed = Feed(begun(playing.timeline), ("queues",), first=1000)
    (first,) = messages(feed.since(0))
    assert (first["type"], first["seq"]) == ("snapshot", 1000)
    assert "Figure" in first["document"]
    assert feed.since(1000) == b"", "nothing has happened"
    for step in range(1, 6):
        playing.play(0.1 + step / 10)
        feed.tick()
    news = messages(feed.since(1000))
    assert [m["seq"] for m in news] == list(range(1001, 1001 + len(news)))
    assert len(news) == 5
    assert {m["type"] for m in news} == {"update"}
    assert messages(feed.since(news[2]["seq"])) == news[3:], "another page stands elsewhere"


def test_a_page_that_is_too_late_or_of_another_process_begins_anew() -> None:
    playing = Playing()
    playing.play(0.1)
    feed = Feed(begun(playing.timeline), ("queues",), first=1000)
    for step in range(KEPT + 50):  # the first change nothing: hosts may be late
        playing.play(0.1 + step / 100)
        feed.tick()
    for stale in (0, 1000, 999_999):
        (message,) = messages(feed.since(stale))
        assert message["type"] == "snapshot"


def test_looking_back_is_for_one_page_and_not_for_all() -> None:
    playing = Playing()
    playing.play(0.5)
    present = begun(playing.timeline)
    shared = Feed(present, ("queues",), first=1)
    own = Feed(present, ("queues",), first=2)
    own.do("seek", 0.2)
    assert messages(own.since(0))[0]["header"]["at"] == pytest.approx(0.2)
    assert messages(shared.since(0))[0]["header"]["at"] is None
    (text,) = messages(own.do("text", None))
    assert "island0" in text["text"]


def test_what_one_page_folds_all_of_them_show() -> None:
    playing = Playing()
    playing.play(0.1)
    present = begun(playing.timeline)
    feeds = [Feed(present, (panel,), first=1) for panel in ("queues", "order")]
    playing.play(0.6)
    for feed in feeds:
        feed.tick()
    assert present.folds == 2, "what was there, and what is new: each once"
    for feed in feeds:
        (message,) = messages(feed.since(1))
        assert any("columns" in change for change in json.loads(message["changes"]))


def test_a_first_picture_is_of_no_more_than_can_be_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    playing = Playing()
    playing.play(1.0)
    assert begun(playing.timeline).since == 0.0
    monkeypatch.setattr("pathways_lab.notebook.dashboard.feed.FIRST", 50)
    present = begun(playing.timeline)
    assert 0.0 < present.since < 1.0
    assert len(present.scene.gangs.by_key) < 50
    assert present.scene.machine.islands, "who is there is always in it"


class Slow:
    """A watched lab on a machine with a clock of its own: a look takes so many seconds of it."""

    def __init__(self, timeline: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
        self.timeline = timeline
        self.now, self.takes, self.used = 100.0, 0.0, 0.0
        times = {
            "monotonic": lambda: self.now,
            "thread_time": lambda: self.used,
            "time_ns": time.time_ns,
        }
        monkeypatch.setattr(process, "time", type("Time", (), times))

    def look(self) -> None:
        self.now += self.takes

    def recall(self) -> None:
        pass


def test_pages_that_wait_in_line_are_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    playing = Playing()
    playing.play(0.5)
    watch = Slow(playing.timeline, monkeypatch)
    gallery = process.Gallery(watch)  # type: ignore[arg-type]
    watch.takes = 0.6 * process.FORGET
    first = gallery.feed(("queues",))
    for panel in PANELS[:5]:
        gallery.feed((panel,))
    assert gallery.feed(("queues",)) is first, "its page could not ask before"
    watch.takes = 0.0
    watch.now += process.FORGET + 1.0
    assert gallery.feed(("queues",)) is not first, "nobody has asked for it"


@pytest.mark.parametrize(("spare", "times"), [(2.0, 40), (0.0, 20)])
def test_pages_give_way_on_a_busy_machine_and_take_turns(
    monkeypatch: pytest.MonkeyPatch, spare: float, times: int
) -> None:
    """Eight seconds of two pages that ask five times a second, and 20 ms for each drawing."""
    playing = Playing()
    playing.play(0.5)
    watch = Slow(playing.timeline, monkeypatch)
    drawn: list[Feed] = []

    def tick(feed: Feed) -> None:
        drawn.append(feed)
        watch.used += 0.020

    monkeypatch.setattr(process, "spare", lambda: spare)
    monkeypatch.setattr(process, "COUNT", 2)
    monkeypatch.setattr(Feed, "tick", tick)
    gallery = process.Gallery(watch)  # type: ignore[arg-type]
    for _ in range(40):
        for panel in ("queues", "order"):
            gallery.feed((panel,))
            watch.now += 0.101
    queues, order = gallery.feed(("queues",)), gallery.feed(("order",))
    assert abs(drawn.count(queues) - drawn.count(order)) <= 1, "nobody draws twice in a turn"
    assert drawn.count(queues) == pytest.approx(times, abs=2)
    assert (0.020 * len(drawn) / 8.0 <= 1.2 * 2 * cpu_budget.LEAST) == (spare == 0.0)


@pytest.mark.parametrize(("spare", "soon"), [(2.0, True), (0.0, False)])
def test_records_that_came_faster_than_a_page_asks_are_taken_in_meanwhile(
    monkeypatch: pytest.MonkeyPatch, spare: float, soon: bool
) -> None:
    """Some 0.6 s of folding are over within 3 s on an idle machine, and go on on a busy one."""
    playing = Playing()
    playing.play(0.2)
    watch = Slow(playing.timeline, monkeypatch)
    monkeypatch.setattr(process, "spare", lambda: spare)
    monkeypatch.setattr(process, "COUNT", 2)
    gallery = process.Gallery(watch)  # type: ignore[arg-type]
    present = gallery.feed(("islands",)).picture.present
    monkeypatch.setattr(process, "FOLD", 10)
    collect = present.collect

    def slow(now: float, most: int = 0) -> None:
        watch.used += 0.050
        collect(now, most)

    monkeypatch.setattr(present, "collect", slow)
    playing.play(1.0)
    present.collect(playing.now, 10)
    assert present.folded < 0.5
    end = watch.now + 3.0
    while watch.now < end:
        watch.now += gallery.go_on()
    assert (present.folded > 0.8) is soon


# --- the side panel's data ---------------------------------------------------------------


def test_the_panel_shows_what_the_views_show() -> None:
    playing = Playing()
    playing.play(0.6)
    picture = Picture(playing.timeline, Wanted(("islands",)))
    found = state(picture.scene, ["kernel-1", "ann"], playing.now)
    assert [island["name"] for island in found["islands"]] == ["island0", "island1"]
    devices = [d for i in found["islands"] for h in i["hosts"] for d in h["devices"]]
    colour = palette_of(playing.timeline).colour("train")
    assert {d["colour"] for d in devices} == {colour}
    assert {d["client"] for d in devices} == {"kernel-1"}
    assert all(0 < d["busy"] <= 1 for d in devices)
    using = sum(d["busy"] for d in devices)
    ours, other = found["clients"]
    assert ours["using"] == pytest.approx(using, abs=0.1)
    assert (ours["devices"], other["devices"], other["using"]) == (len(devices), 0, 0)
    (program,) = found["programs"]
    assert (program["name"], program["colour"], program["client"]) == ("train", colour, "kernel-1")
    assert program["waiting"] > 0
    json.dumps(found)


def test_who_is_there_is_known_when_the_records_of_it_are_gone() -> None:
    machine = Machine()
    for record in training(1):
        machine.add(record)
    machine.add(Event("host-lost", 1.0, "island1", "island1/host0", args={"reason": "gone"}))
    again = Machine()
    for record in present(machine, 2.0):
        again.add(record)
    assert (again.hosts, again.slices) == (machine.hosts, machine.slices)


def test_a_record_that_cannot_be_folded_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "Observer", Mock(return_value=Mock(offset=0.0)))
    watched = watch.Watch(ControlAddress("unix:/x", b""))
    watched.timeline.extend(
        [
            Event("host-joined", 1.0, "island0", "island0/host0", args={"devices": "?"}),
            Event("host-joined", 1.0, "island0", "island0/host1", args={"devices": 2}),
            Event("client-joined", 1.0, client="ann"),
        ]
    )
    watched.look()
    assert list(watched.machine.hosts) == ["island0/host1"]
    assert list(watched.clients) == ["ann"]


# --- pages -------------------------------------------------------------------------------


@pytest.mark.parametrize("panel", ["", *PANELS])
def test_pages_name_nothing_that_is_not_below_them(panel: str) -> None:
    """So they work behind any prefix, and never ask another machine."""
    text = html(panel)
    addresses = re.findall(r'(?:href|src)="([^"]*)"', text)
    assert len(addresses) > 10
    for address in addresses:
        assert re.match(r"pathways|individual-pathways|data:,", address), address
    for paths in FILES.values():
        assert all(path.is_file() for path in paths)
    assert "http" not in text


def test_an_unknown_page_is_refused() -> None:
    from pathways_lab.notebook.dashboard.frame import Dashboard

    with pytest.raises(ValueError, match="no page is called 'gangs'; there are: islands"):
        Dashboard(None, None, "gangs", 100)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="height='x' is not a whole number of pixels"):
        Dashboard(None, None, "order", "x")  # type: ignore[arg-type]
