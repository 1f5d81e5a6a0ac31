"""The switch interval: shortened while it is wanted, and the user's otherwise."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from pathways_lab.runtime.switching import SECONDS, Sooner


@pytest.fixture(autouse=True)
def interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_it_is_shorter_until_the_last_one_has_ended() -> None:
    sys.setswitchinterval(0.004)
    one, other = Sooner(), Sooner()
    assert sys.getswitchinterval() == pytest.approx(SECONDS)
    one.end()
    one.end()
    assert sys.getswitchinterval() == pytest.approx(SECONDS)
    other.end()
    assert sys.getswitchinterval() == pytest.approx(0.004)


@pytest.mark.parametrize("users", [0.0001, 0.02])
def test_what_the_user_sets_meanwhile_stays(users: float) -> None:
    sys.setswitchinterval(0.005)
    sooner = Sooner()
    sys.setswitchinterval(users)
    again = Sooner()
    assert sys.getswitchinterval() == pytest.approx(users)
    again.end()
    sooner.end()
    assert sys.getswitchinterval() == pytest.approx(users)


def test_a_shorter_one_stays() -> None:
    sys.setswitchinterval(SECONDS / 2)
    sooner = Sooner()
    assert sys.getswitchinterval() == pytest.approx(SECONDS / 2)
    sooner.end()
    assert sys.getswitchinterval() == pytest.approx(SECONDS / 2)
