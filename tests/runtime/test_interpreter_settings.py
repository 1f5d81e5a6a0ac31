"""Settings of the interpreter: a lab's while it is wanted, and the user's otherwise."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from pathways_lab.runtime.processes.interpreter_settings import (
    INTERVAL,
    MANY,
    OBJECTS,
    SHORT,
    Settings,
)

PYTHONS = (OBJECTS[0], 10, 10)


@pytest.fixture(autouse=True)
def as_in_python(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if no lab were open in this process."""
    monkeypatch.setattr(Settings, "wanted", 0)
    for setting in Settings._all:
        monkeypatch.setattr(setting, "_pythons", None)
        monkeypatch.setattr(setting, "_ours", None)
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(INTERVAL)
    gc.set_threshold(*PYTHONS)
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*threshold)


def test_they_are_a_labs_until_the_last_one_has_ended() -> None:
    one, other = Settings(), Settings()
    assert sys.getswitchinterval() == pytest.approx(SHORT)
    assert gc.get_threshold() == (MANY, 10, 10)
    one.end()
    one.end()
    assert sys.getswitchinterval() == pytest.approx(SHORT)
    assert gc.get_threshold() == (MANY, 10, 10)
    other.end()
    assert sys.getswitchinterval() == INTERVAL
    assert gc.get_threshold() == PYTHONS


@pytest.mark.parametrize("users", [0.0001, 0.02])
@pytest.mark.parametrize("meanwhile", [False, True])
def test_an_interval_that_the_user_sets_stays(users: float, meanwhile: bool) -> None:
    one = Settings() if meanwhile else None
    sys.setswitchinterval(users)
    other = Settings()
    assert sys.getswitchinterval() == pytest.approx(users)
    other.end()
    if one is not None:
        one.end()
    assert sys.getswitchinterval() == pytest.approx(users)


@pytest.mark.parametrize("users", [(0, 10, 10), (50_000, 10, 10), (10, 2, 2)])
@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_threshold_that_the_user_sets_stays(users: tuple[int, int, int], meanwhile: bool) -> None:
    one = Settings() if meanwhile else None
    gc.set_threshold(*users)
    other = Settings()
    assert gc.get_threshold() == users
    other.end()
    if one is not None:
        one.end()
    assert gc.get_threshold() == users
