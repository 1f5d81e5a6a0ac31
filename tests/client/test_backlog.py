"""How long a slice has work for."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pathways_lab as pw
from pathways_lab.client.session import call_batching
from pathways_lab.client.session.backlog import Backlog
from pathways_lab.client.session.handles import Handle
from tests.client.kit import FakeLab, without_ticks
from tests.runtime.processes import until

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
    assert backlog.seconds(3) == pytest.approx(11 * 1.0)


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


def test_two_ends_of_one_message_do_not_say_how_long_a_step_takes() -> None:
    backlog = Backlog()
    for now in (1.0, 2.0):
        backlog.began(ON, 1)
        backlog.began(ON, 1)
        backlog.ended(now, ON, 1)
    for now in (3.0, 4.0):
        backlog.ended(now, ON, 1)
    for _ in range(5):
        backlog.began(ON, 1)
    backlog.ended(10.0, ON, 1)
    backlog.ended(10.00001, ON, 1)
    assert backlog.seconds(3) == pytest.approx(2 * 1.0), "what was measured before holds"


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


def _loop(fake: FakeLab, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Handle]:
    """Steps of which one each call makes, after a pause; its loss.  Eight are under way."""
    monkeypatch.setattr(call_batching, "SOON", 60.0)
    monkeypatch.setattr(call_batching, "PAUSE", 0.1)
    monkeypatch.setattr(call_batching, "FEW", 1000)
    without_ticks(fake, monkeypatch)
    step = pw.jit(lambda state, x: (state + x, state.sum()), on=fake.slice(2))
    state, x = np.zeros(4, np.float32), np.ones(4, np.float32)

    def call() -> Handle:
        nonlocal state
        fake.session._calls._burst._last = -math.inf
        state, loss = step(state, x)
        return loss

    call().block_until_ready()
    until(lambda: not fake.connection.under_way)
    fake.held = True
    monkeypatch.setattr(Backlog, "seconds", lambda self, on: 10.0 * fake.connection.steps)
    return call


def test_a_loop_that_waits_for_the_loss_of_eight_steps_before_sends_half_of_them_together(
    fake: FakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message for each step costs three processes more than the step."""
    call = _loop(fake, monkeypatch)
    losses = [call() for _ in range(8)]
    fake.connection.flush()
    waiting = []
    for number in range(12):
        fake.connection.awaited(losses[number].pending)
        losses.append(call())
        fake.connection.awaited(losses[number].pending)
        waiting.append(len(fake.session._calls._entries))
    assert waiting == 3 * [1, 2, 3, 0]
    fake.settle()
    assert len(fake.of("submit")) == 1 + 8 + 4 + 1 + 1, "a plan is made when calls come so again"
    fake.held = False
    fake.release()
    assert losses[-1].result() == 4.0 * 20


def test_a_loop_that_waits_after_eight_steps_for_those_before_sends_eight_together(
    fake: FakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = _loop(fake, monkeypatch)
    before = [call() for _ in range(8)]
    fake.connection.flush()
    for group in range(2):
        fake.connection.awaited(before[0].pending)
        fake.settle()
        sent = len(fake.of("submit"))
        losses = [call()]
        assert len(fake.session._calls._entries) == 1, "it comes after a wait, and others follow"
        with monkeypatch.context() as patch:
            patch.setattr(call_batching.Burst, "over", lambda *_: False)
            losses += [call() for _ in range(7)]
        fake.connection.awaited(before[-1].pending)
        assert not fake.session._calls._entries, "devices will have no more than these to do"
        fake.settle()
        assert len(fake.of("submit")) - sent == (1 if group else 8)
        before = losses
    fake.held = False
    fake.release()
    assert losses[-1].result() == 4.0 * 24
