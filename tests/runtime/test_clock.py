"""Clocks of several machines: the difference is estimated, and its error is stated."""

from __future__ import annotations

import time

import pytest

from pathways_lab.transport import clock_sync


def test_one_machine_has_one_clock() -> None:
    sent = time.monotonic()
    hello = clock_sync.stamp()
    assert clock_sync.difference(hello, sent, time.monotonic()) == (0.0, 0.0)


@pytest.mark.parametrize("there", [0.0, 0.25, 1.0])
def test_the_difference_is_off_by_no_more_than_is_stated(there: float) -> None:
    """*there*: at which part of the round trip the other end took its stamp."""
    sent, received, ahead = 100.0, 100.2, 5000.0
    hello = {"clock": sent + there * 0.2 + ahead, "machine": "another"}
    found = clock_sync.difference(hello, sent, received)
    assert found.error == pytest.approx(0.1)
    assert abs(found.offset - ahead) <= found.error + 1e-9


def test_an_end_that_says_no_time_is_taken_as_it_is() -> None:
    assert clock_sync.difference({}, 1.0, 2.0) == (0.0, 0.0)
