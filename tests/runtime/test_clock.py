"""Clocks of several machines: the difference is bounded, again and again, and a pulse is missed."""

from __future__ import annotations

import random
import time

import pytest

from pathways_lab.transport import clock_sync
from pathways_lab.transport.clock_sync import ANSWER, DRIFT, PERIOD, Beat, Difference


def test_one_machine_has_one_clock() -> None:
    sent = time.monotonic()
    found = Difference.of_hello(clock_sync.stamp(), sent, time.monotonic())
    assert found.one
    found.learn(1.0, 500.0, 2.0)
    assert (found.offset, found.error(1e6)) == (0.0, 0.0)


def of(sent: float, there: float, received: float) -> Difference:
    return Difference.of_hello({"clock": there, "machine": "another"}, sent, received)


@pytest.mark.parametrize("there", [0.0, 0.25, 1.0])
def test_the_difference_is_off_by_no_more_than_is_stated(there: float) -> None:
    """*there*: at which part of the round trip the other end took its stamp."""
    sent, received, ahead = 100.0, 100.2, 5000.0
    found = of(sent, sent + there * 0.2 + ahead, received)
    assert found.error(received) == pytest.approx(0.1)
    assert abs(found.offset - ahead) <= found.error(received) + 1e-9


def test_an_end_that_says_no_time_is_taken_as_it_is() -> None:
    found = Difference.of_hello({}, 1.0, 2.0)
    assert (found.offset, found.error(9.0)) == (0.0, 0.0)


@pytest.mark.parametrize("drift", [-0.9 * DRIFT, 0.0, 0.9 * DRIFT])
def test_a_drifting_clock_stays_within_its_bound_for_an_hour(drift: float) -> None:
    """The ways there and back take unlike times; now and then both are short."""
    luck = random.Random(1)

    def other(now: float) -> float:
        return 5000.0 + now * (1.0 + drift)

    found = of(0.0, other(0.1), 0.5)
    before, jumps = found.offset, 0
    for asked in map(float, range(1, 3600)):
        there, back = luck.choice([(0.02, 0.001), (0.001, 0.02), (0.001, 0.001)])
        heard = asked + there + back
        found.learn(asked, other(asked + there), heard)
        for now in (heard, heard + PERIOD):
            assert abs(other(now) - now - found.offset) <= found.error(now) + 1e-9
        jumps += found.offset != before
        before = found.offset
    assert found.error(heard) < 0.003, "the short round trips count"
    assert drift or jumps < 5, "times of one process jump seldom"


def test_a_clock_that_was_set_is_followed_at_once() -> None:
    found = of(0.0, 100.0, 0.002)
    found.learn(10.0, 910.001, 10.002)
    assert found.offset == pytest.approx(900.0)
    assert found.error(10.002) == pytest.approx(0.001)


def test_an_end_that_does_not_answer_is_told_once_and_again_when_it_does() -> None:
    beat, told, heard = Beat(0.0), [], 0.0
    for tick in range(40):
        now = tick / 2
        asks = beat.due(now)
        answers = not 5.0 <= now < 12.0
        silent = beat.silent(heard, now)
        if silent is not None:
            told.append((now, silent))
        if asks and answers:
            heard = now + 0.01
    assert told == [(7.0, pytest.approx(2.99)), (12.5, 0.0)]


def test_a_process_that_was_away_itself_accuses_nobody() -> None:
    beat = Beat(0.0)
    assert beat.due(0.0)
    assert beat.silent(-1.0, 60.0) is None
    assert beat.silent(-1.0, 60.0 + ANSWER) is None
    assert beat.silent(-1.0, 60.5 + ANSWER) == pytest.approx(61.5 + ANSWER)
