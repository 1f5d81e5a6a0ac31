"""A short form of ``python -m tests.runtime.fuzz``, and that it sees what it looks for."""

from __future__ import annotations

from typing import Any

import pytest

from pathways_lab.core.store import BufferRecord, Store
from pathways_lab.runtime import intake
from pathways_lab.runtime.rim import Rim
from tests.runtime.fuzz import ROUND, Fuzz


def test_wrong_messages_raise_nothing_and_nobody_else_notices() -> None:
    fuzz = Fuzz(0)
    for _ in range(6):
        fuzz.round()
    assert fuzz.inputs == 6 * ROUND
    assert fuzz.lab.rim.rejected > ROUND


def test_without_the_checks_of_owners_the_other_client_is_harmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def anybodys(self: Store, number: int, client: str) -> BufferRecord | None:
        return self.buffers.get(number)

    monkeypatch.setattr(intake, "_own", lambda client, identities, what: None)
    monkeypatch.setattr(Store, "find", anybodys)
    fuzz = Fuzz(0)

    def several() -> None:
        for _ in range(20):
            fuzz.round()

    with pytest.raises(AssertionError):
        several()


def test_a_check_that_raises_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Rim, *args: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Rim, "_race_go", broken)
    monkeypatch.setitem(Rim._from_client.__globals__["_QUESTIONS"], "race-go", broken)
    with pytest.raises(ZeroDivisionError):
        Fuzz(0).round()
