"""Schedules: what their papers promise, and what the checker finds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_lab.core.errors import PathwaysError
from pathways_lab.pipeline.schedule import Costs, Schedule, Task, ideal_bubble
from pathways_lab.pipeline.schedules import (
    SCHEDULES,
    Comparison,
    circular,
    compared,
    dual_pipe_v,
    eager_one_forward_one_backward,
    gpipe,
    interleaved,
    one_forward_one_backward,
    zero_bubble,
    zero_bubble_h2,
)

SIZES = st.tuples(st.integers(1, 5), st.integers(1, 8))
KNOWN: tuple[Callable[[int, int], Schedule], ...] = (
    gpipe, one_forward_one_backward, zero_bubble, zero_bubble_h2, eager_one_forward_one_backward,
)  # fmt: skip
EQUAL = Costs(forward=1, backward=2, weight=1)
"""A forward task takes as long as a backward task without weights, and as weights."""


@pytest.mark.parametrize("make", KNOWN)
@given(size=SIZES)
def test_known_schedules_are_legal_and_cannot_hang(
    make: Callable[[int, int], Schedule], size: tuple[int, int]
) -> None:
    assert make(*size).problem() is None


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_interleaved_is_legal_and_its_bubble_shrinks_with_chunks(
    slices: int, groups: int, chunks: int
) -> None:
    microbatches = slices * groups
    schedule = interleaved(slices, microbatches, chunks)
    assert schedule.problem() is None
    idle = schedule.timed(Costs(1, 2)).seconds - 3 * microbatches * chunks
    assert idle == 3 * (slices - 1)  # in units of a chunk, which is 1/chunks of a stage


@pytest.mark.parametrize("make", KNOWN[:2])
@given(size=SIZES)
def test_gpipe_and_1f1b_have_the_bubble_of_theory(
    make: Callable[[int, int], Schedule], size: tuple[int, int]
) -> None:
    assert make(*size).timed(Costs(1, 2)).bubble == pytest.approx(float(ideal_bubble(*size)))


@given(st.integers(1, 6), st.integers(0, 6))
def test_zero_bubble_has_a_third_of_the_bubble_in_the_memory_of_1f1b(
    stages: int, more: int
) -> None:
    microbatches = stages + more
    zero, classic = (f(stages, microbatches) for f in (zero_bubble, one_forward_one_backward))
    costs = Costs(forward=1, backward=2, weight=1)
    work = 3 * microbatches
    assert zero.timed(costs).seconds - work == stages - 1
    assert classic.timed(costs).seconds - work == 3 * (stages - 1)
    assert max(zero.peak) == max(classic.peak) == min(stages, microbatches)


@given(st.integers(1, 6), st.integers(0, 6))
def test_zb_h2_has_no_bubble_where_step_follows_step(stages: int, more: int) -> None:
    """It takes twice the memory, and slices begin and end one after the other."""
    schedule = zero_bubble_h2(stages, 2 * stages - 1 + more)
    each = 3 * schedule.microbatches
    for steps in (1, 3):
        table = schedule.timed(EQUAL, steps=steps)
        assert table.seconds == steps * each + stages - 1
        for number in range(stages):
            mine = [slot for slot in table.slots if slot.slice == number]
            assert mine[-1].end - mine[0].start == steps * each
    assert max(schedule.peak) == 2 * stages - 1


@given(st.integers(1, 6), st.integers(0, 6))
def test_dualpipev_has_half_the_bubble_of_zb_h1_on_as_many_slices(slices: int, more: int) -> None:
    """Its stages are half as long, and each idles as many of their tasks."""
    schedule = dual_pipe_v(slices, 2 * slices + more)
    assert schedule.problem() is None
    assert schedule.slices == (*range(slices), *reversed(range(slices)))
    assert schedule.timed(EQUAL).seconds - 6 * schedule.microbatches == slices - 1
    assert set(schedule.peak) == {2 * slices + 1}


@given(st.integers(1, 5), st.integers(1, 8), st.integers(1, 3))
def test_circular_has_the_bubble_of_gpipe_in_shorter_stages(
    slices: int, more: int, chunks: int
) -> None:
    schedule = circular(slices, slices + more, chunks)
    assert schedule.problem() is None
    idle = schedule.timed(Costs(1, 2)).seconds - 3 * schedule.microbatches * chunks
    assert idle == 3 * (slices - 1)


@given(st.integers(2, 6), st.integers(0, 6))
def test_eager_1f1b_hides_what_transfers_take(stages: int, more: int) -> None:
    """1F1B waits for every hop of a round trip, which takes as long as a task here."""
    microbatches, costs = 2 * stages + more, Costs(1, 1, transfer=1)
    eager, classic = (
        make(stages, microbatches).timed(costs).seconds
        for make in (eager_one_forward_one_backward, one_forward_one_backward)
    )
    assert eager == 2 * microbatches + 4 * (stages - 1)
    assert classic > eager


@pytest.mark.parametrize("name", SCHEDULES)
def test_names_are_those_of_the_schedules(name: str) -> None:
    made = SCHEDULES[name](2, 4)
    assert made.name == name
    assert made.problem() is None


@given(SIZES)
def test_peaks_of_memory(size: tuple[int, int]) -> None:
    stages, microbatches = size
    assert gpipe(*size).peak == (microbatches,) * stages
    assert one_forward_one_backward(*size).peak == tuple(
        min(stages - s, microbatches) for s in range(stages)
    )


@given(SIZES, st.data())
def test_times_keep_orders_and_needs(size: tuple[int, int], data: st.DataObject) -> None:
    """Nothing overlaps on a slice, nothing starts before what it reads."""
    schedule = data.draw(st.sampled_from(KNOWN))(*size)
    stages = size[0]
    cost = st.lists(st.integers(1, 9), min_size=stages, max_size=stages)
    forward, more = data.draw(cost), data.draw(cost)
    weight = data.draw(cost)
    backward = [w + m for w, m in zip(weight, more, strict=True)]
    costs = Costs(forward, backward, weight, transfer=data.draw(st.integers(0, 3)))
    table = schedule.timed(costs)
    at = {slot.task: slot for slot in table.slots}
    for number, order in enumerate(schedule.order):
        slots = [at[task] for task in order]
        assert [s.slice for s in slots] == [number] * len(order)
        assert all(a.end <= b.start for a, b in pairwise(slots))
    for slot in table.slots:
        for need in schedule.needs(slot.task):
            hop = costs.transfer if schedule.slices[need.stage] != slot.slice else 0
            assert at[need].end + hop <= slot.start
    linear = schedule.linear()
    place = {task: n for n, task in enumerate(linear)}
    assert all(place[n] < place[task] for task in linear for n in schedule.needs(task))


def test_a_schedule_drawn_by_hand() -> None:
    drawn = Schedule.read(
        "mine",
        """
        F0 F1 .  .  B0 .  B1
        .  F0 B0 F1 B1
        """,
    )
    assert drawn.problem() is None
    assert drawn.stages == 2
    assert drawn.peak == (2, 1)


@pytest.mark.parametrize("make", [*KNOWN, interleaved])
def test_a_schedule_is_shown_as_it_is_drawn(make: Callable[[int, int], Schedule]) -> None:
    schedule = make(3, 12)
    assert Schedule.read(schedule.name, schedule.text()) == schedule
    assert repr(gpipe(2, 2)).splitlines()[1:] == ["F0 F1 B0 B1", "F0 F1 B0 B1"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("F0 B0 F1 B1\nF1 F0 B1 B0", "would hang: "),
        ("F0 F1 B0 B1\nF0 B0 F1", "1 tasks are missing: B1/1"),
        ("F0 F0 B0\nF0 B0", "task F0/0 is done twice"),
        ("F0 B0 F0/1\nF0 B0", "F0/1 is on slice 0, but stage 1 is on slice 1"),
        ("F0 B0 W0\nF0 B0", "1 tasks are missing: W0/1"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    schedule = Schedule.read("mine", text)
    problem = schedule.problem()
    assert problem is not None
    assert said in problem.message
    with pytest.raises(PathwaysError, match="schedule 'mine'"):
        schedule.timed()


def test_a_hang_is_explained_by_its_cycle() -> None:
    schedule = Schedule.read("mine", "F0 B0 F1 B1\nF1 F0 B1 B0")
    cycle = schedule.cycle()
    assert {wait.gang for wait in cycle} == {wait.behind for wait in cycle}
    problem = schedule.problem()
    assert problem is not None
    assert "B0/1 comes behind F1/1 on slice 1" in problem.message


def test_words_that_are_no_tasks_are_refused_with_their_place() -> None:
    with pytest.raises(PathwaysError, match="'X0' on line 2 is not a task"):
        Schedule.read("mine", "F0 B0\nX0")


@pytest.mark.parametrize("size", [(0, 1), (1, 0), (-1, 4), (2, 2.5)])
def test_sizes_that_cannot_be(size: tuple[int, int]) -> None:
    with pytest.raises(PathwaysError, match="whole numbers from 1 on"):
        gpipe(*size)
    with pytest.raises(PathwaysError, match="multiple"):
        interleaved(4, 6)
    with pytest.raises(PathwaysError, match="for example 8 microbatches"):
        dual_pipe_v(4, 7)
    with pytest.raises(PathwaysError, match="1 or more"):
        circular(4, 7, 0)


def test_the_drawing() -> None:
    assert gpipe(2, 2).timed(Costs(1, 1)).text() == (
        "slice 0   F0 F1 .  .  B0 B1\nslice 1   .  F0 F1 B0 B1 ."
    )
    assert "bubble 33.3%" in str(gpipe(2, 2).timed(Costs(1, 1)))
    assert gpipe(2, 40).timed().text(40).endswith("…")


def test_tasks_read_what_theory_says() -> None:
    schedule = zero_bubble(3, 3)
    assert schedule.needs(Task("backward", 1, 0)) == (
        Task("forward", 1, 0),
        Task("backward", 2, 0),
    )
    assert schedule.needs(Task("weight", 1, 0)) == (Task("backward", 1, 0),)
    assert schedule.needs(Task("backward", 2, 1)) == (Task("forward", 2, 1),)


def test_a_table_is_drawn_with_a_box_for_every_task() -> None:
    table = zero_bubble(3, 4).timed()
    drawn = table._repr_html_()
    assert drawn.count("<rect") == 3 + len(table.slots) + 3  # rows, tasks, legend
    assert "zero-bubble: bubble" in drawn
    assert gpipe(2, 2).timed()._repr_html_().count("<rect") == 2 + 8 + 2


def before(name: str) -> Callable[[Task, Task], bool]:
    """An arbitrary order of tasks."""
    keys: dict[str, Callable[[Task], tuple[int, ...]]] = {
        "microbatch": lambda task: (task.microbatch,),
        "forward first": lambda task: (task.kind != "forward", task.microbatch),
        "last stage": lambda task: (-task.stage, task.microbatch),
        "nothing": lambda task: (),
    }
    return lambda task, other: keys[name](task) < keys[name](other)


ORDERS = ("microbatch", "forward first", "last stage", "nothing")


@given(SIZES, st.sampled_from(ORDERS), st.booleans(), st.data())
def test_a_comparison_makes_legal_schedules_in_which_nobody_waits_who_can_do_something(
    size: tuple[int, int], name: str, split: bool, data: st.DataObject
) -> None:
    stages, microbatches = size
    slices = data.draw(st.lists(st.integers(0, 2), min_size=stages, max_size=stages))
    slices = [sorted({*slices}).index(row) for row in slices]
    comparison = Comparison(before(name), split)
    made = compared(comparison, slices, microbatches)
    assert made.problem() is None
    assert made.split == split
    unit = Costs(forward=1, backward=2 if split else 1, weight=1)
    slots = made.timed(unit).slots
    starts = {slot.task: slot.start for slot in slots}
    for row in made.order:
        for one, later in itertools.combinations(row, 2):
            ready = max((starts[need] + 1 for need in made.needs(later)), default=0)
            # What was done first came first, or nothing else could be done.
            assert ready > starts[one] or not comparison.before(later, one)


def test_known_orders_are_comparisons() -> None:
    """GPipe: forward work first; the last stage alternates where the oldest goes first."""
    forward = Comparison(before("forward first"), name="forward first")
    assert compared(forward, range(4), 8).order == gpipe(4, 8).order
    deep = compared(Comparison(before("microbatch")), range(3), 4)
    assert deep.order[-1] == one_forward_one_backward(3, 4).order[-1]
    assert compared(Comparison(before("last stage")), range(1), 3).text() == "F0 B0 F1 B1 F2 B2"


def test_the_cost_of_a_comparison_does_not_grow_with_the_square_of_tasks() -> None:
    def calls(microbatches: int) -> int:
        count = 0

        def less(task: Task, other: Task) -> bool:
            nonlocal count
            count += 1
            return task.microbatch < other.microbatch

        compared(Comparison(less), range(4), microbatches)
        return count

    assert calls(256) < 6 * calls(64)


def test_what_is_no_comparison_is_refused() -> None:
    with pytest.raises(PathwaysError, match="compares with 'gpipe', which is no function"):
        Comparison("gpipe")  # type: ignore[arg-type]
