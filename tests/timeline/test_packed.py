"""What comes in columns says the same as its records one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pathways_lab.notebook.panels import PANELS, plots
from pathways_lab.notebook.scene.plot import Plot
from pathways_lab.notebook.scene.scene import Scene
from pathways_lab.notebook.scene.table import Table
from pathways_lab.notebook.view.picture import Past, Picture, Wanted
from pathways_lab.timeline.gangs import RECENT, Gangs
from pathways_lab.timeline.log import Timeline, items_within, within
from pathways_lab.timeline.packed import Granted, Item, Row, single, size
from pathways_lab.timeline.planned import compare
from pathways_lab.timeline.records import Event, Record
from pathways_lab.timeline.waits import known_at, known_order
from tests.timeline.streams import CLIENT, ISLAND, granted, row, stream

WINDOW = 20.0


def folded(items: Sequence[Item], parts: Sequence[int], one_by_one: bool) -> Scene:
    """A scene of *items*, which become known in so many parts."""
    scene, now = Scene(0.0, WINDOW), 0.0
    for first, last in zip((0, *parts), (*parts, len(items)), strict=True):
        some = items[first:last]
        now = max([now, *map(known_at, some)])
        scene.add(single(some) if one_by_one else some, now)
    return scene


def ordered(columns: dict[str, Any]) -> dict[str, list[Any]]:
    """Rows of columns, sorted: what is drawn first does not matter."""
    rows = sorted(
        zip(*(list(column) for column in columns.values()), strict=True),
        key=lambda r: [round(v, 9) if isinstance(v, float) else str(v) for v in r],
    )
    return dict(zip(columns, map(list, zip(*rows, strict=True)), strict=False))


def rounded(value: Any) -> Any:
    """Without the last bits of sums that were made in another order."""
    if isinstance(value, dict):
        return {str(rounded(key)): rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [rounded(each) for each in value]
    if isinstance(value, float | np.floating):
        return None if np.isnan(value) else round(float(value), 6)
    return value


def picture(scene: Scene, now: float) -> dict[str, Any]:
    """All that panels show."""

    def said(plot: Plot) -> dict[str, Any]:
        told = {
            name: getattr(plot, name)
            for name in ("note", "height", "x", "y", "rows", "groups", "readouts", "empty")
        }
        layers = {}
        for layer in plot.layers:
            columns = dict(layer.columns)
            if "what" in columns:  # a row of the catalogue, which is in the order of drawing
                columns["what"] = [list(scene.catalogue)[at] for at in columns["what"]]
            layers[layer.name] = ordered(columns) if len(layer) else {}
        layers.pop("catalogue", None)
        return {**told, "layers": layers}

    # Areas leave out steps between equal values, so their points hang on the last bits.
    # What a device did for other runs is told row by row, and not gang by gang: see below.
    shown = [name for name in PANELS if name not in ("utilisation", "planned")]
    return {plot.name: rounded(said(plot)) for plot in plots(tuple(shown), scene, now)}


def table(of: Table) -> Any:
    columns = {name: column.tolist() for name, column in of.columns().items() if name != "what"}
    return rounded(ordered(columns)) if len(of) else []


def check(items: Sequence[Item], parts: Sequence[int]) -> Scene:
    """The same is drawn of columns and of single records."""
    packed, plain = (folded(items, parts, one_by_one) for one_by_one in (False, True))
    assert table(packed.bars) == table(plain.bars)
    assert table(packed.worked.table) == table(plain.worked.table)
    assert table(packed.waited.table) == table(plain.waited.table)
    now = max(map(known_at, items))
    assert picture(packed, now) == picture(plain, now)
    for run, seen in plain.runs.items():
        assert packed.runs[run].gangs == seen.gangs
        assert packed.runs[run].waits == seen.waits
        assert (packed.runs[run].begin, packed.runs[run].end) == (seen.begin, seen.end)
    assert (packed.first, packed.last) == (plain.first, plain.last)
    return packed


@given(st.integers(0, 1 << 30), st.integers(1, 2))
@example(242895, 2)  # a computation that took no time
@settings(max_examples=20, deadline=None)
def test_columns_are_drawn_as_their_records_are(seed: int, hosts: int) -> None:
    items = stream(seed, hosts=hosts)
    chance = random.Random(seed)
    parts = sorted(chance.randrange(len(items)) for _ in range(chance.randrange(4)))
    check(items, parts)


@given(st.integers(0, 1 << 30), st.integers(1, 2), st.lists(st.floats(0, 1), max_size=4))
@settings(max_examples=15, deadline=None)
def test_at_a_moment_of_the_past_all_is_known_that_had_ended_and_nothing_twice(
    seed: int, hosts: int, shares: list[float]
) -> None:
    """Moments in any order, also in the middle of what is in columns."""
    items = stream(seed, hosts=hosts, calm=True)
    end = max(map(known_at, items))
    log = Timeline(clock=lambda: end)
    log.extend(items)
    past = Past(Picture(log, Wanted(origin=0.0, since=0.0)))
    for share in (*shares, 1.0):
        moment = min(end, 1.0 + share * (end - 1.0))
        past.go(moment)
        known = [record for record in single(items) if known_at(record) <= moment]
        plain = Scene(0.0, WINDOW)
        plain.add(sorted(known, key=known_order), moment)
        # What is shorter than a pixel is merged in any order.
        found, wanted = (scene.bars.columns() for scene in (past.scene, plain))
        assert found["count"].sum() == wanted["count"].sum()
        spent = (wanted["count"] * wanted["busy"]).sum()
        assert (found["count"] * found["busy"]).sum() == pytest.approx(spent, rel=1e-4)
        assert past.scene.gangs.all_done == plain.gangs.all_done
        assert past.scene.gangs.known() == plain.gangs.known()
        assert past.scene.ended == plain.ended
        assert past.scene.last == pytest.approx(plain.last, abs=1e-5)


@given(st.integers(0, 1 << 30), st.integers(1, 2))
@settings(max_examples=25, deadline=None)
def test_what_is_ordinary_is_folded_in_columns(seed: int, hosts: int) -> None:
    """Else the test above would compare a slow way with itself."""
    items = stream(seed, hosts=hosts, calm=True)
    assert any(isinstance(item, Row) for item in items)
    alone: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        whole = Scene._add
        patched.setattr(
            Scene, "_add", lambda self, r: (alone.append(getattr(r, "kind", "")), whole(self, r))
        )
        folded(items, (), one_by_one=False)
    assert "gang" not in alone
    assert {"submitted", "finished"} <= set(alone)


@given(st.integers(0, 1 << 30), st.integers(1, 2))
@settings(max_examples=25, deadline=None)
def test_what_a_run_lost_to_others_hangs_on_when_they_had_its_devices(
    seed: int, hosts: int
) -> None:
    """A row of gangs is one stretch of that; idle moments in it are the row's."""
    scenes = [folded(stream(seed, hosts=hosts, calm=True), (), way) for way in (False, True)]
    # Before anybody asks for gangs.
    held = [{run: seen.stretches for run, seen in scene.runs.items()} for scene in scenes]
    for run in range(1, 9):
        found = [
            compare(scene.runs[run], scene.flows.run(run),
                    [s for r, stretches in of.items() if r != run for s in stretches])
            for scene, of in zip(scenes, held, strict=True)
        ]  # fmt: skip
        by_rows, by_gangs = (
            [(d.lane, d.actual, round(d.lost, 9)) for d in f.devices] for f in found
        )
        assert by_rows == by_gangs
        rows, gangs = (rounded(f.gap()) for f in found)
        ours = [cause for cause in gangs if not cause.startswith(("run", "other"))]
        assert {c: rows[c] for c in ours} == {c: gangs[c] for c in ours}
        named = [sum(s for c, s in f.items() if c.startswith("run")) for f in (rows, gangs)]
        assert named[0] >= named[1] - 1e-5


# --- gangs ------------------------------------------------------------------------------------


def busy_island(runs: int, ahead: int = 0, steps: int = 16) -> list[Item]:
    """So many runs that are over, and so many that are granted only."""
    host = "island0/host0"
    out: list[Item] = []
    for run in range(1, runs + ahead + 1):
        out.append(granted(run * 1e-3, run, steps, [host]))
        if run <= runs:
            at = [run * 1e-3 + n * 1e-5 for n in range(steps)]
            out.append(row((at, at, at, at), run, host=host))
    return out


def told(items: Sequence[Item], keep: int) -> Gangs:
    out = Gangs(keep)
    for item in items:
        if isinstance(item, Granted | Row):
            out.add_packed(item)
        else:
            out.add(item)
    return out


def test_gangs_that_nobody_looks_at_are_counted_and_not_made() -> None:
    gangs = told(busy_island(40), keep=2000)
    assert gangs.known() == gangs.known("island0") == gangs.all_done == 640
    assert RECENT <= len(gangs.by_key) < RECENT + 16
    order = [gang.key("island0") for gang in gangs.order("island0")]
    assert order == sorted(order)
    assert gangs.order("island0")[-1].run == 40
    assert all(gang.over for gang in gangs.by_key.values())
    assert gangs.done == dict.fromkeys(range(1, 41), 16)


def test_what_is_granted_far_ahead_is_counted_and_told_apart_when_its_turn_comes() -> None:
    """More are granted than are kept: none is forgotten before it has ended, or counted twice."""
    items = busy_island(1, ahead=60)
    gangs = told(items, keep=100)
    assert gangs.known() == 61 * 16
    assert len(gangs.by_key) <= RECENT + 2 * 16
    rows = [item for item in busy_island(61)[2:] if isinstance(item, Row)]
    for first in range(0, len(rows), 8):
        for item in rows[first : first + 8]:
            gangs.add_packed(item)
            assert gangs.ended((item.run, 3), "island0/host0")
        assert gangs.known() == 61 * 16
        if item.run < 61:
            assert not gangs.order("island0")[-1].over, "what comes next is in sight"
    assert gangs.all_done == 61 * 16
    assert all(gang.over for gang in gangs.by_key.values())
    assert not gangs.ahead


def test_the_first_gang_that_is_not_over_keeps_what_follows_it() -> None:
    """The picture of the order begins there."""
    stuck = granted(0.0, 900, 1, ["island0/host0"])
    gangs = told([stuck, *busy_island(20)], keep=2000)
    order = gangs.order("island0")
    assert len(order) == gangs.known() == 321
    assert [gang.run for gang in order if not gang.over] == [900]


def test_poisoned_and_abandoned_gangs_are_told_apart() -> None:
    items = busy_island(20)
    bad = items[3]
    assert isinstance(bad, Row)
    columns = ([1.0], [1.0], [1.0], [1.0])
    spoiled = row(columns, 2, poisoned=frozenset({0}))
    gangs = told([*items[:3], spoiled, *items[4:], Event("failed", 9.0, run=3)], keep=2000)
    assert gangs.by_key[2, 0].state == "failed"
    gangs = told([*items[:3], Event("failed", 9.0, run=2), *items[3:]], keep=2000)
    assert gangs.by_key[2, 0].abandoned


def test_after_a_loss_nothing_is_waited_for() -> None:
    """What was granted may long have ended, and nobody will say so."""
    gangs = told([granted(0.0, 1, 4, ["island0/host0"]), *busy_island(0, ahead=9)], keep=2000)
    assert not any(gang.over for gang in gangs.by_key.values())
    gangs.lose()
    assert not gangs.by_key
    assert not gangs.ahead
    columns = ([1.0], [1.0], [1.0], [1.0])
    gangs.add_packed(row(columns, 1, 3))
    assert gangs.by_key[1, 3].state == "done"


def test_the_rest_of_a_row_still_waits_when_its_first_part_has_ended() -> None:
    scene, host = Scene(0.0, WINDOW), f"{ISLAND}/host0"
    told = [
        Event("launched", 0.5, ISLAND, host, 1, at, "p", "f", CLIENT, {"devices": (0, 1)})
        for at in range(4)
    ]
    ended = row(([0.5] * 2, [0.5] * 2, [0.5, 0.6], [0.6, 0.7]), announced=4)
    scene.add([Event("host-joined", 0.0, ISLAND, host, args={"devices": 2}), *told], 0.5)
    scene.add([ended], 0.7)
    assert {gang for _, gang, *_ in scene.running()} == {(1, 2)}
    assert {len(waiting.queue) for waiting in scene.waiting.values()} == {2}


def test_all_that_came_just_before_is_in_sight() -> None:
    """Rows of a run whose places were told apart before are no newer gangs."""
    host, steps = "island0/host0", 2 * RECENT
    first, *others = (granted(run * 1e-3, run, steps, [host]) for run in (1, 2, 3))
    gangs = told([first], keep=2000)
    assert len(gangs.by_key) == steps
    at = [0.01 + n * 1e-5 for n in range(steps)]
    gangs.add_packed(others[0])
    gangs.add_packed(others[1])
    for run in (1, 2, 3):
        gangs.add_packed(row((at, at, at, at), run, host=host))
    order = gangs.order("island0")
    assert [gang.run for gang in order[-RECENT:]] == [3] * RECENT
    assert gangs.known() == gangs.all_done == 3 * steps


# --- the log ----------------------------------------------------------------------------------


def numbers(records: Sequence[Record]) -> list[tuple[int, int]]:
    return [(r.run, r.step) for r in records if not hasattr(r, "value")]


def test_a_log_gives_single_records_of_what_it_keeps_in_columns() -> None:
    items = stream(5)
    log = Timeline(clock=lambda: 0.0)
    log.extend_later(1, lambda: items[:20])
    log.extend(items[20:])
    assert log.items == tuple(items)
    assert log.records == tuple(single(items))
    assert len(log) == log.version == sum(map(size, items)) == len(log.records)
    half = sum(map(size, items[:9])) + 1
    assert log.since(half).records == log.records[half:]
    assert log.since(log.version).items == ()


def test_a_log_is_bounded_in_records_also_where_they_are_in_columns() -> None:
    items = [item for item in busy_island(30) if isinstance(item, Row)]
    log = Timeline(capacity=200, clock=lambda: 0.0)
    log.extend(items)
    each = size(items[0])
    assert len(log) == 200 // each * each
    assert log.evicted == 30 * each - len(log)
    assert numbers(log.records) == numbers(single(items))[-len(log) :]


def test_who_is_late_is_told_what_was_lost_and_never_the_same_twice() -> None:
    """What waits to be read is newer than all that was read: the bound takes the oldest first."""

    def some(first: int) -> list[Record]:
        return [Event("output", float(first + n)) for n in range(5)]

    log = Timeline(capacity=10, clock=lambda: 0.0)
    log.extend_later(5, lambda: some(0))
    seen = log.since(0)
    assert [r.time for r in seen.records] == [0, 1, 2, 3, 4]
    for first in (5, 10, 15, 20):
        log.extend_later(5, lambda first=first: some(first))  # type: ignore[misc]
    late = log.since(seen.version, most=3)
    assert [r.time for r in late.records] == [15, 16, 17, 18, 19]
    assert (late.missed, late.left) == (10, 5)
    last = log.since(late.version)
    assert ([r.time for r in last.records], last.missed) == ([20, 21, 22, 23, 24], 0)


@given(st.integers(0, 1 << 30), st.floats(0, 3), st.floats(0, 3))
@settings(max_examples=50, deadline=None)
def test_a_part_of_what_is_in_columns_is_cut_out_of_them(
    seed: int, start: float, more: float
) -> None:
    items = stream(seed, runs=4)
    found = single(items_within(items, start, start + more))
    assert found == [r for r in single(items) if within(r, start, start + more)]


# --- parts of pictures -------------------------------------------------------------------------


def test_runs_that_are_ahead_do_not_push_out_those_that_are_over() -> None:
    """A panel of the newest run would have nothing to show."""
    scene = Scene(0.0, WINDOW)
    items: list[Item] = []
    for run in range(1, 201):
        items.append(Event("submitted", run * 1e-3, run=run, program="p"))
    for item in busy_island(80):
        items.append(item)
        if isinstance(item, Row):
            items.append(Event("finished", item.known_at, run=item.run, program="p"))
    scene.add(items, 1.0)
    over = [run for run, seen in scene.runs.items() if seen.outcome]
    assert over == list(range(1, 81))
    assert all(scene.runs[run].count == 16 for run in over)
    assert {*range(81, 201)} <= scene.runs.keys()
