"""Which results of a function are kept together, from what was seen of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pathways_lab.client.session.habits import FEW, Habit, learn
from pathways_lab.client.session.pending import Buffer


def made(habit: Habit, run: int, count: int) -> list[Buffer]:
    """The results of one call."""
    buffers = [Buffer(n, run) for n in range(count)]
    for place, buffer in enumerate(buffers):
        buffer.habit, buffer.place = habit, place
    return buffers


def test_results_that_are_passed_on_side_by_side_stay_together() -> None:
    habit = Habit()
    *state, _loss = made(habit, 1, 20)
    learn([*state, None])
    assert habit.ranges == ((0, 19),)


def test_few_results_and_those_of_two_calls_do_not() -> None:
    habit = Habit()
    learn(made(habit, 1, FEW - 1))
    first, second = made(habit, 1, 20), made(habit, 2, 20)
    learn([*first[: FEW - 1], *second[FEW - 1 :][: FEW - 1]])
    assert habit.ranges == ()


def test_each_use_cuts() -> None:
    habit = Habit()
    results = made(habit, 1, 40)
    learn(results)
    assert habit.ranges == ((0, 40),)
    learn(results[:25])
    assert habit.ranges == ((0, 25), (25, 40))
    habit.cut([3])
    assert habit.ranges == ((3, 25), (25, 40))


def test_a_function_whose_bundles_come_apart_too_often_makes_no_more() -> None:
    habit = Habit()
    learn(made(habit, 1, 20))
    for _ in range(FEW):
        habit.made(1)
        habit.taken_apart()
    assert habit.ranges
    habit.taken_apart()
    assert not habit.ranges
    learn(made(habit, 1, 20))
    assert not habit.ranges


def test_a_function_whose_bundles_come_apart_seldom_goes_on() -> None:
    habit = Habit()
    learn(made(habit, 1, 20))
    for _ in range(100):
        habit.made(10)
        habit.taken_apart()
    assert habit.ranges == ((0, 20),)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12))
def test_ranges_are_apart_and_no_use_crosses_one(uses: list[tuple[int, int]]) -> None:
    habit, results = Habit(), 61
    for a, b in uses:
        learn(made(habit, 1, results)[min(a, b) : max(a, b)])
    ends = [end for r in habit.ranges for end in r]
    assert ends == sorted(ends)
    assert all(b - a >= FEW for a, b in habit.ranges)
    for a, b in [(min(u), max(u)) for u in uses if abs(u[0] - u[1]) >= FEW]:
        assert all(
            (a <= first and last <= b) or last <= a or b <= first for first, last in habit.ranges
        )
