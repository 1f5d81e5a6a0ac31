"""What devices waited for, and a run as planned: parts that add up, whatever the records say."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pathways_lab.timeline import queries, waits
from pathways_lab.timeline.machine import Lane
from pathways_lab.timeline.packed import Granted, single
from pathways_lab.timeline.planned import OTHERS, PLAN, RunSeen, planned
from pathways_lab.timeline.records import Event, Record, Span
from pathways_lab.timeline.records_of import Placing
from pathways_lab.timeline.waits import (
    CAUSES,
    COMPILE,
    DISPATCH,
    INPUT,
    MEMORY,
    NOTHING,
    ORDER,
    PROMPT,
    REPORT,
    RUNNING,
    TRANSFER,
    TURN,
    blame,
)
from tests.notebook.synthetic import training
from tests.timeline.named import causes, named_first
from tests.timeline.streams import stream

times = st.floats(0.0, 10.0, allow_nan=False).map(lambda t: round(t, 3))


@given(
    since=times,
    length=st.floats(0.001, 10.0),
    submitted=times | st.just(float("-inf")),
    obstacles=st.lists(st.tuples(st.sampled_from(CAUSES), times, times), max_size=8),
)
@settings(max_examples=200, deadline=None)
def test_the_parts_of_a_gap_tile_it(since, length, submitted, obstacles):
    parts = blame(since, since + length, submitted, obstacles)
    edge = since + length
    for _, start, end in parts:
        assert end == edge
        assert start < end
        edge = start
    assert edge == since


@st.composite
def records_of_runs(draw):
    """Gangs, launches, transfers and events at arbitrary, even impossible, times."""
    chance = random.Random(draw(st.integers(0, 1 << 30)))
    out: list[Record] = []
    for run in range(1, 4):
        if chance.random() < 0.8:
            out.append(Event("submitted", chance.uniform(0, 5), run=run))
        for step in range(chance.randrange(1, 6)):
            start, more = chance.uniform(0, 9), chance.uniform(0, 1)
            place = ("island0", f"island0/host{chance.randrange(2)}")
            out.append(
                Span("gang", start, start + more, *place, (0, 1), run, step, "p", f"n{step}")
            )
            if chance.random() < 0.5:
                out.append(Event("granted", chance.uniform(0, 9), "island0", run=run, step=step))
            if chance.random() < 0.5:
                arrived = chance.uniform(0, 9)
                out.append(Span("transfer", arrived, arrived + 0.2, *place, (0,), run, step, "p"))
        if chance.random() < 0.8:
            out.append(Event("finished", chance.uniform(5, 12), run=run))
    chance.shuffle(out)
    return out


@given(records_of_runs())
@settings(max_examples=100, deadline=None)
def test_every_second_of_every_device_has_one_cause(records):
    for parts in queries.waits(records, 1.0, 9.0).values():
        assert parts[0][1] == 1.0
        assert parts[-1][2] == 9.0
        assert all(a[2] == b[1] for a, b in itertools.pairwise(parts))
        assert {cause for cause, _, _ in parts} <= {RUNNING, *CAUSES}
        assert math.isclose(sum(queries.shares(parts).values()), 8.0)


@given(records_of_runs())
@settings(max_examples=100, deadline=None)
def test_the_gap_of_every_device_adds_up(records):
    for run in (1, 2, 3):
        found = planned(records, run)
        for device in found.devices:
            others = {f"run {other} (p)" for other in {1, 2, 3} - {run}}
            assert set(device.gap) <= {PLAN, OTHERS, *CAUSES, *others}
            assert min(device.gap.values(), default=0) >= 0
            covered, reached = 0.0, 0.0
            for _, start, end in sorted(device.actual, key=lambda part: part[1]):
                covered += max(0.0, end - max(start, reached))
                reached = max(reached, end)
            assert math.isclose(device.lost + covered, found.actual, abs_tol=1e-9)
        whole = found.actual * len(found.devices)
        assert math.isclose(sum(part.seconds for part in found.parts()), whole, abs_tol=1e-6)


def one(*records: Record, start: float = 0.0, end: float = 10.0) -> dict[str, float]:
    found = queries.waits(records, start, end)[Lane("i", "i/h", 0)]
    return {cause: round(seconds, 6) for cause, seconds in queries.shares(found).items()}


def gang(start: float, end: float, run: int = 1, step: int = 0) -> Span:
    return Span("gang", start, end, "i", "i/h", (0,), run, step, "p", "n")


def test_before_it_is_asked_a_device_has_nothing_to_do():
    found = one(Event("submitted", 4.0, run=1), gang(6.0, 8.0))
    assert found == {NOTHING: 4.0 + 2.0, DISPATCH: 2.0, RUNNING: 2.0}


def test_the_obstacle_that_came_last_has_the_blame():
    steps = [[False, "a", 1, 8, [], ""], [True, "transfer", 0, 8, [0], ""],
             [False, "b", 0, 8, [1], ""]]  # fmt: skip
    story = [
        Event("plan", 0.0, args={"plan": "k", "steps": steps}),
        Event("submitted", 1.0, run=1, args={"plan": "k"}),
        Event("granted", 1.0, run=1, step=0),
        Event("granted", 2.0, run=1, step=2),
        Span("transfer", 5.0, 7.0, "i", "i/h", (0,), 1, 1, "p", "transfer"),
        gang(7.5, 9.0, step=2),
    ]
    assert one(*story) == {
        NOTHING: 2.0, INPUT: 4.0, TRANSFER: 2.0, DISPATCH: 0.5, RUNNING: 1.5,
    }  # fmt: skip
    late = [*story[:3], Event("granted", 7.2, run=1, step=2), *story[4:]]
    assert one(*late) == one(*story)  # nothing but the transfer was awaited until 7.0


def test_a_transfer_that_is_a_run_of_its_own_has_the_blame_as_one_within_a_run():
    """A value that was moved by a call: its maker, the transfer and the reader are three runs."""
    steps = {
        "a": [False, "a", 1, 8, [], "", [], [0]],
        "t": [True, "transfer", 0, 8, [], "", [0], [0]],
        "b": [False, "b", 0, 8, [], "", [0], []],
    }
    plans = [Event("plan", 0.0, args={"plan": key, "steps": [step]}) for key, step in steps.items()]
    runs = [
        Event("submitted", 1.0, run=run, args={"plan": key, "reads": reads, "makes": makes})
        for run, (key, reads, makes) in enumerate(
            (("a", (), (71,)), ("t", (71,), (72,)), ("b", (72,), ())), 1
        )
    ]
    story = [
        *plans, *runs,
        Span("gang", 1.0, 5.0, "j", "j/h", (0,), 1, 0, "a", "a", args={"slice": 1}),
        Span("transfer", 5.0, 7.0, "i", "i/h", (0,), 2, 0, "t", "transfer"),
        gang(7.5, 9.0, run=3),
    ]  # fmt: skip
    expected = {NOTHING: 2.0, INPUT: 4.0, TRANSFER: 2.0, DISPATCH: 0.5, RUNNING: 1.5}
    assert one(*story) == expected


@pytest.mark.parametrize(("told", "cause"), [("memory", MEMORY), ("turn", TURN)])
def test_a_run_that_was_not_admitted_waited_for_what_the_core_says(told, cause):
    why = {"since": 2.0, "waited_for": told}
    found = one(
        Event("submitted", 0.0, run=2), gang(0.0, 3.0, run=2), Event("submitted", 1.0, run=1),
        Event("admitted", 5.0, run=1, args=why), Event("granted", 5.0, run=1, step=0),
        Event("finished", 6.0, run=2), gang(5.5, 10.0),
    )  # fmt: skip
    assert found == {RUNNING: 7.5, cause: 2.0, DISPATCH: 0.5}


def test_a_place_is_withheld_while_another_host_ends_the_run_before():
    """A straggler, and a slice of the same program elsewhere: neither is dispatch, however late
    the straggler tells of it, nor is the time until it has told."""
    for host, slice_id in (("i/other", 7), ("j/far", 8)):
        late = Span("gang", 1.0, 6.0, host[0], host, (0,), 1, 1, "p", "m", args={"slice": slice_id})
        of = [
            Event("granted", 6.5, island, run=2, step=step, args={"slice": each})
            for step, (island, each) in enumerate((("i", 7), ("j", 8)))
        ]
        found = one(
            Event("submitted", 0.0, run=1), gang(1.0, 3.0), Event("submitted", 0.5, run=2),
            late, *of, gang(7.0, 10.0, run=2),
        )  # fmt: skip
        assert found == {DISPATCH: 1.0 + 0.5, RUNNING: 5.0, INPUT: 3.0, REPORT: 0.5}
        fold = waits.Waits(0.0)
        arrived = (
            Event("submitted", 0.0, run=1), replace(gang(1.0, 3.0), args={"slice": 7}),
            Event("submitted", 0.5, run=2), *of, late, gang(7.0, 10.0, run=2),
        )  # fmt: skip
        *_, told = [fold.add(record) for record in arrived]
        assert [(w.cause, w.start, w.end) for _, w in told] == [
            (DISPATCH, 6.5, 7.0), (REPORT, 6.0, 6.5), (INPUT, 3.0, 6.0),
        ]  # fmt: skip
        alone = one(
            Event("submitted", 0.0, run=1), gang(1.0, 3.0), Event("submitted", 0.5, run=2),
            replace(late, args={"slice": 9}), *of, gang(7.0, 10.0, run=2),
        )  # fmt: skip
        assert alone == {DISPATCH: 1.0 + 4.0, RUNNING: 5.0}


@pytest.mark.parametrize("told", [PROMPT / 2, 2.0])
@pytest.mark.parametrize("full", [False, True])
def test_a_late_report_is_told_where_nothing_else_came_after_the_end(told, full):
    """At once it is a part of dispatch, and where there was no memory either that is the cause."""
    args, place = {"slice": 7}, 3.0 + told
    admitted = Event("admitted", place, run=2, args={"since": 3.0, "waited_for": "memory"})
    found = one(
        Event("submitted", 0.0, run=1), replace(gang(1.0, 3.0), args=args),
        Event("submitted", 0.5, run=2), *[admitted] * full,
        Event("granted", place, "i", run=2, step=0, args=args), gang(6.0, 10.0, run=2),
    )  # fmt: skip
    cause = MEMORY if full else REPORT if told > PROMPT else DISPATCH
    expected = {DISPATCH: 1.0 + 3.0 - told, RUNNING: 6.0}
    expected[cause] = expected.get(cause, 0.0) + told
    assert found == pytest.approx(expected)


def test_a_free_device_waits_for_its_turn_while_another_of_its_gang_is_busy():
    earlier = Span("gang", 2.0, 4.0, "i", "i/h", (1,), 2, 0, "q", "m")
    both = Span("gang", 4.5, 10.0, "i", "i/h", (0, 1), 1, 0, "p", "n")
    found = one(Event("submitted", 1.0, run=1), earlier, both)
    # Also while the other one itself waits: hosts launch in order.
    assert found == {NOTHING: 1.0, DISPATCH: 0.5, ORDER: 3.0, RUNNING: 5.5}


def test_a_first_run_waits_until_all_its_functions_are_compiled_on_all_hosts():
    steps = [[False, "n", 7, 8, [], ""], [False, "m", 7, 8, [0], ""]]
    plan = Event("plan", 0.0, args={"plan": "k", "steps": steps})
    submitted = Event("submitted", 1.0, run=1, args={"plan": "k"})

    def compiled(node: str, start: float, end: float, host: str, slice_id: int = 7) -> Span:
        return Span("compile", start, end, "i", host, node=node, args={"slice": slice_id})

    here, there = compiled("n", 1.5, 3.0, "i/h"), compiled("n", 2.0, 3.5, "i/other")
    last, late = compiled("m", 3.5, 4.0, "i/h"), Event("granted", 4.2, run=1, step=0)
    found = one(plan, submitted, here, there, last, late, gang(4.5, 10.0))
    assert found == {NOTHING: 1.0, DISPATCH: 0.5 + 0.5, COMPILE: 2.5, RUNNING: 5.5}
    for other in (compiled("n", 1.5, 4.0, "i/h", 8), compiled("else", 1.5, 4.0, "i/h")):
        assert COMPILE not in one(plan, submitted, other, gang(4.5, 10.0))
    before = compiled("n", 0.2, 0.9, "i/h")
    assert COMPILE not in one(plan, submitted, before, gang(4.5, 10.0))


def test_a_place_that_is_withheld_while_data_are_made_is_no_dispatch():
    steps = [[False, "a", 0, 8, [], ""], [False, "n", 7, 8, [0], ""]]
    made = Span("gang", 1.1, 4.0, "i", "i/h", (1,), 1, 0, "p", "a")
    found = one(
        Event("plan", 0.0, args={"plan": "k", "steps": steps}),
        Event("submitted", 1.0, run=1, args={"plan": "k"}), Event("granted", 1.0, run=1, step=0),
        made, Event("granted", 4.1, run=1, step=1), gang(4.3, 10.0, step=1),
    )  # fmt: skip
    assert found == {NOTHING: 1.0, INPUT: 3.0, DISPATCH: 0.3, RUNNING: 5.7}


lengths = st.integers(0, 40).map(lambda n: n / 8)


@given(
    gaps=st.lists(
        st.tuples(lengths, lengths, lengths, lengths, lengths, lengths), min_size=1, max_size=6
    ),
    withheld=st.booleans(),
)
@settings(max_examples=500, deadline=None)
def test_causes_that_are_known_beforehand_are_found_to_the_instant(gaps, withheld):
    """A run: nothing to do, compiling, an earlier computation, a transfer, dispatch."""
    now, records, expected = 0.0, [], dict.fromkeys((RUNNING, *CAUSES), 0.0)
    for run, (nothing, compiling, made, sent, dispatch, busy) in enumerate(gaps, 1):
        steps = [[False, "a", 8, 8, [], ""], [True, "t", 7, 8, [0], ""],
                 [False, f"f{run}", 7, 8, [1], ""]]  # fmt: skip
        submitted = now + nothing
        compiled = submitted + compiling
        ready = compiled + made
        arrived = ready + sent
        start = arrived + dispatch
        granted = start if withheld else compiled
        records += [
            Event("plan", submitted, args={"plan": f"k{run}", "steps": steps}),
            Event("submitted", submitted, run=run, args={"plan": f"k{run}"}),
            Span("compile", submitted, compiled, "i", "i/h", node=f"f{run}", args={"slice": 7}),
            Event("granted", compiled, run=run, step=0),
            Span("gang", compiled, ready, "j", "j/h", (0,), run, 0, "p", "a"),
            Span("transfer", ready, arrived, "i", "i/h", (0,), run, 1, "p", "t"),
            Event("granted", granted, run=run, step=2),
            Span("gang", start, start + busy + 1, "i", "i/h", (0,), run, 2, "p", f"f{run}"),
            Event("finished", start + busy + 1, run=run),
        ]
        now = start + busy + 1
        parts = (nothing, compiling, made, sent, dispatch, busy + 1)
        for cause, long in zip(
            (NOTHING, COMPILE, INPUT, TRANSFER, DISPATCH, RUNNING), parts, strict=True
        ):
            expected[cause] += long
    found = one(*records, start=0.0, end=now)
    assert found == {cause: seconds for cause, seconds in expected.items() if seconds}


def test_a_pipeline_has_its_bubble_by_plan_and_the_transfers_on_top():
    records = training(1, islands=2, devices=1)
    run = next(r.run for r in records if isinstance(r, Event) and r.kind == "submitted")
    found = planned(records, run)
    assert found.planned < found.actual
    gap = found.gap()
    assert gap[PLAN] > 0
    assert gap[TRANSFER] > 0
    assert sum(gap.values()) == pytest.approx(sum(d.lost for d in found.devices))


@pytest.mark.parametrize("seed", range(12))
def test_what_a_run_is_slow_for_is_named_first(seed):
    """``python -m tests.timeline.named 200`` tries more."""
    cause, told = causes(seed)
    assert named_first(cause, told), (cause, told)


def test_an_explanation_is_a_table():
    plan = {"plan": "k", "steps": [[False, "a", 7, 8, [], ""], [False, "b", 8, 8, [0], ""]]}
    records = [
        Event("plan", 0.0, args=plan),
        Event("submitted", 0.0, run=1, program="p", args={"plan": "k"}),
        Span("gang", 0.0, 1.0, "i", "i/h", (0,), 1, 0, "p", "a", line="x.py:3: a(x)"),
        Span("gang", 1.0, 4.0, "j", "j/h", (0,), 1, 1, "p", "b", line="x.py:4: b(x)"),
    ]
    assert repr(planned(records, 1)).splitlines() == [
        "run 1 of p: 4,000.0 ms on 2 devices, 4,000.0 ms on an ideal machine",
        "cause      share  device ms  mostly",
        "computing  50.0%    4,000.0  b (x.py:4), a (x.py:3)",
        "imbalance  25.0%    2,000.0",
        "bubble     25.0%    2,000.0",
    ]


def test_a_run_that_was_submitted_ahead_names_those_that_have_its_devices_before_it():
    def made(run: int, start: float) -> list[Record]:
        return [gang(start + n, start + n + 0.9, run, step=n) for n in range(3)]

    submitted = [Event("submitted", 0.1 * run, run=run, program="p") for run in (1, 2, 3)]
    records = [*submitted, *made(1, 1.0), *made(2, 4.0), *made(3, 7.0)]
    gap = planned(records, 3).gap()
    # Also what a device waited for in their turn: 0.7 s until the first one, and 0.1 between them.
    assert gap["run 1 (p)"] == pytest.approx(3.9 - 0.3)
    assert gap["run 2 (p)"] == pytest.approx(3.0)
    assert OTHERS not in gap
    forgotten = planned([r for r in records if r.run != 1], 3).gap()
    assert forgotten["run 2 (p)"] == pytest.approx(6.9 - 0.3)
    assert planned(records, 1).gap().keys().isdisjoint(gap.keys() - {PLAN, OTHERS, *CAUSES})


def test_a_run_is_found_by_its_clients_own_number_where_that_is_one_run():
    first, second = (1 << 32) | 1, (2 << 32) | 1
    mine = [Event("submitted", 0.0, run=first), gang(1.0, 2.0, first)]
    assert planned(mine, 1) == planned(mine, first)
    with pytest.raises(KeyError, match="no gang of run 2 is known"):
        planned(mine, 2)
    both = [*mine, gang(2.0, 4.0, second)]
    assert planned(both, second).actual == pytest.approx(2.0)
    with pytest.raises(KeyError, match=f"2 clients have a run 1: one of .{first}, {second}. must"):
        planned(both, 1)


@pytest.mark.parametrize("seed", range(10))
def test_devices_that_are_always_used_together_wait_as_each_of_them(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are folded as one, until a gang has some of them."""
    records = single(stream(seed, runs=20))
    as_one = queries.waits(records, 0.0, 100.0)
    monkeypatch.setattr(waits.Waits, "_as_one", lambda self, lanes: lanes)
    assert as_one == queries.waits(records, 0.0, 100.0)


def test_places_in_columns_are_places_one_by_one():
    gangs = tuple((at, 3 * at, "f", 7, "", ("i/h",)) for at in range(4))
    window = Granted(2.0, 1, 0, 5, Placing("i", "p", "ann", gangs))
    columns, single_ = RunSeen(1, windows=[window]), RunSeen(1)
    for record in window.records():
        single_.add(record, [])
    assert columns.granted == single_.granted == {0: 2.0, 3: 2.0, 6: 2.0, 9: 2.0}


def test_a_run_that_reads_results_of_another_waits_for_it_and_not_for_its_own_place():
    """Its place is withheld until that run has one: nothing that the lab could hurry."""
    made = [
        Event("submitted", 0.0, run=1, program="f", args={"makes": (8,)}),
        Event("submitted", 0.1, run=2, program="g", args={"reads": (8,), "makes": (9,)}),
        Event("granted", 0.2, "i", run=1, step=0, args={"slice": 1}),
        Span("gang", 0.2, 1.0, "i", "i/h", (0,), 1, 0, "f", "f", args={"slice": 1}),
        Event("granted", 0.9, "j", run=2, step=0, args={"slice": 2}),
        Span("gang", 1.1, 2.0, "j", "j/h", (0,), 2, 0, "g", "g", args={"slice": 2}),
    ]
    found = queries.waits(made, 0.0, 2.0)[Lane("j", "j/h", 0)]
    assert found == [
        (NOTHING, 0.0, 0.1), (INPUT, 0.1, 1.0), (DISPATCH, 1.0, 1.1), (RUNNING, 1.1, 2.0)
    ]  # fmt: skip
