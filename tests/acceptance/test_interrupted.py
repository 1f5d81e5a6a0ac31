"""Ctrl-C at a few random moments; ``tests.acceptance.interrupted`` does it a thousand times."""

from __future__ import annotations

import pytest

from tests.acceptance.interrupted import interrupts

pytestmark = pytest.mark.cluster


def test_interrupted_or_not_nothing_stays() -> None:
    made = interrupts({"upload": 15, "download": 15, "start": 1, "close": 1})
    assert made.stayed == []
    assert sum(made.struck.values()) > 2
