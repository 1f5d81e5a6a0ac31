"""A short form of ``python -m tests.acceptance.hostile``."""

from __future__ import annotations

import pytest

from tests.acceptance.hostile import attack

pytestmark = pytest.mark.cluster


def test_a_hostile_client_ends_nobody_and_spoils_nothing() -> None:
    """Two others compute and check meanwhile; hosts and control plane are the same afterwards."""
    told = attack(minutes=0.1, phase_seconds=2.0)
    assert "'to hosts'" in told[1]
    assert "'to the control plane'" in told[1]
