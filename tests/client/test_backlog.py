"""How long a slice has work for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pathways_lab as pw
from pathways_lab.client.session import call_batching
from pathways_lab.client.session.backlog import Backlog
from tests.client.kit import FakeLab, without_ticks

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


def test_calls_wait_for_each_other_while_their_devices_have_work_for_long(
    fake: FakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of hundreds of arrays takes the kernel longer than a pause."""
    monkeypatch.setattr(call_batching, "PAUSE", 0.0)
    without_ticks(fake, monkeypatch)
    step, backlog = pw.jit(lambda x: x + 1, on=fake.slice(2)), fake.connection.backlog
    x = np.zeros(4, np.float32)

    def sent(calls: int) -> int:
        """So many messages leave for so many calls of one line."""
        nonlocal x
        before = len(fake.of("submit"))
        for _ in range(calls):
            x = step(x)
        fake.settle()
        return len(fake.of("submit")) - before

    sent(1)
    x.block_until_ready()
    sent(1)
    x.block_until_ready()
    fake.held = True
    assert sent(2) == 2
    with monkeypatch.context() as patch:
        patch.setattr(type(fake.connection), "under_way", True)
        patch.setattr(backlog, "seconds", lambda slice_id: 1000.0)
        assert sent(4) == 0, "they wait, though each comes after a pause"
    assert sent(1) > 0
    fake.held = False
    fake.release()
    assert x.result().tolist() == [9.0] * 4
