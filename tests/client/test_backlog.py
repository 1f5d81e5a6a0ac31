"""How long a slice has work for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_lab.client.session.backlog import Backlog

ON = (3,)


def test_nothing_is_known_before_two_runs_have_ended() -> None:
    backlog = Backlog()
    for _ in range(5):
        backlog.began(ON, 1)
    assert backlog.seconds(3) == 0.0
    backlog.ended(1.0, ON, 1)
    assert backlog.seconds(3) == 0.0
    backlog.ended(1.5, ON, 1)
    assert backlog.seconds(3) == pytest.approx(2 * 0.5), "two of three: one is almost over"
    assert backlog.seconds(4) == 0.0


def test_ends_that_are_told_together_do_not_look_like_fast_steps() -> None:
    backlog = Backlog()
    for _ in range(20):
        backlog.began(ON, 1)
    for number in range(1, 9):
        backlog.ended(float(4 * (1 + (number - 1) // 4)), ON, 1)  # after 4 s and after 8 s
    assert backlog.seconds(3) == pytest.approx(11 * 4 / 7)


def test_of_a_slice_that_ran_dry_the_time_of_a_step_is_remembered_and_the_pause_is_not() -> None:
    backlog = Backlog()
    for _ in range(3):
        backlog.began(ON, 2)
    for now in (1.0, 3.0, 5.0):
        backlog.ended(now, ON, 2)
    assert backlog.seconds(3) == 0.0, "nothing is under way"
    for _ in range(3):
        backlog.began(ON, 1)
    assert backlog.seconds(3) == pytest.approx(2.0)
    backlog.ended(1000.0, ON, 1)
    assert backlog.seconds(3) == pytest.approx(1.0)


def test_runs_on_several_slices_say_nothing() -> None:
    backlog = Backlog()
    backlog.began((3, 4), 7)
    backlog.ended(1.0, (3, 4), 7)
    assert backlog.seconds(3) == backlog.seconds(4) == 0.0


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 9)), max_size=300))
def test_it_keeps_what_is_under_way_and_little_else(runs: list[tuple[int, int]]) -> None:
    backlog = Backlog()
    for slice_id, steps in runs:
        backlog.began((slice_id,), steps)
    for now, (slice_id, steps) in enumerate(runs):
        backlog.ended(float(now), (slice_id,), steps)
    assert len(backlog._queues) <= 64
    assert all(queue.steps == 0 for queue in backlog._queues.values())
