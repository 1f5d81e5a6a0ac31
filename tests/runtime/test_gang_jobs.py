"""A gang as its lane sees it: how long is one waited for that never ends?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.runtime.host import gang_job
from pathways_lab.runtime.host.gang_job import GangJob, Work


class Receipt:
    """Ready after so many looks, or never."""

    def __init__(self, looks: int | None) -> None:
        self.looks = looks
        self.blocked = False

    def is_ready(self) -> bool:
        if self.looks is None:
            return False
        self.looks -= 1
        return self.looks < 0

    def block_until_ready(self) -> None:
        self.blocked = True


def job(*, free: bool) -> GangJob:
    launch: Any = SimpleNamespace(stamp=Work(0.0, 0.0, free=free))
    place: Any = SimpleNamespace(locals=(0,))
    executable: Any = SimpleNamespace(calls_python=False, check=None)
    return GangJob(launch, place, executable, "host", lambda _: None, lambda *_: None, 0.0)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang_job, "_LOOK", 1e-6)
    monkeypatch.setattr(gang_job, "_LEFT_BEHIND", 1e-4)


def test_in_order_a_gang_is_waited_for_without_looking() -> None:
    receipt = Receipt(None)
    job(free=False).wait(receipt)
    assert receipt.blocked


def test_a_doomed_gang_that_never_ends_is_left_behind_with_its_reason() -> None:
    doomed = job(free=True)
    doomed.doomed = Failure("deadlock", "these wait for each other for ever")
    with pytest.raises(PathwaysError, match="for each other"):
        doomed.wait(Receipt(None))


def test_a_doomed_gang_that_ends_after_all_says_itself_what_happened() -> None:
    doomed, receipt = job(free=True), Receipt(5)
    doomed.doomed = Failure("deadlock", "these wait for each other for ever")
    doomed.wait(receipt)
    assert receipt.blocked


def test_without_order_a_gang_that_nobody_ended_may_take_as_long_as_it_likes() -> None:
    receipt = Receipt(1000)
    job(free=True).wait(receipt)
    assert receipt.blocked
