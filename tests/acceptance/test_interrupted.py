"""Ctrl-C at a few random moments; ``tests.acceptance.interrupted`` does it a thousand times."""

from __future__ import annotations

import pytest

from tests.acceptance.interrupted import interrupts

pytestmark = pytest.mark.cluster


def test_interrupted_or_not_nothing_stays() -> None:
    made = interrupts({"upload": 30, "download": 30, "start": 2, "close": 2})
    assert made.stayed == []
    assert sum(made.struck.values()) > 5
