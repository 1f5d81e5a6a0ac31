"""The switch interval: shortened while it is wanted, and the user's otherwise."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from pathways_lab.runtime.processes.gil_switch_interval import PYTHONS, SECONDS, Sooner


@pytest.fixture(autouse=True)
def interval(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if no lab were open in this process."""
    monkeypatch.setattr(Sooner, "_wanted", 0)
    monkeypatch.setattr(Sooner, "_ours", None)
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(before)


def test_it_is_shorter_until_the_last_one_has_ended() -> None:
    one, other = Sooner(), Sooner()
    assert sys.getswitchinterval() == pytest.approx(SECONDS)
    one.end()
    one.end()
    assert sys.getswitchinterval() == pytest.approx(SECONDS)
    other.end()
    assert sys.getswitchinterval() == PYTHONS


@pytest.mark.parametrize("users", [0.0001, 0.02])
@pytest.mark.parametrize("meanwhile", [False, True])
def test_what_the_user_sets_stays(users: float, meanwhile: bool) -> None:
    one = Sooner() if meanwhile else None
    sys.setswitchinterval(users)
    other = Sooner()
    assert sys.getswitchinterval() == pytest.approx(users)
    other.end()
    if one is not None:
        one.end()
    assert sys.getswitchinterval() == pytest.approx(users)
