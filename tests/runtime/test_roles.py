"""At the rim: who may decide for all, and what becomes of malformed questions."""

from __future__ import annotations

from typing import Any

import pytest

from pathways_lab.core import messages as m
from pathways_lab.core.errors import Failure
from pathways_lab.transport.codec import unpack
from pathways_lab.transport.edge import Malformed
from tests.runtime.rim_kit import Lab, Peer


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_who_was_invited_decides_for_nobody_else(lab: Lab) -> None:
    """Code of a policy does not even get as far as its process."""
    guest, peer = lab.rim.new_client("guest", 9, holder=1), Peer()
    lab.rim.client_joined(guest, peer)
    rejected = lab.rim.rejected
    lab.rim.from_client("guest", "policy", {"id": 1, "name": "Mine"}, [memoryview(b"x")], 1)
    failure = unpack(Failure, peer.of("answered")[0]["failure"])
    assert "only its owners set policies" in failure.message
    assert not lab.asked
    assert lab.rim.rejected == rejected + 1
    assert [e.owner for e in lab.core.events if isinstance(e, m.ClientJoined)] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("op", "fields"),
    [
        ("race-go", {}),
        ("race", {"island": []}),
        ("stuck", {"seconds": "x", "id": 3}),
        ("accounts", {}),
        ("donation", {"buffers": ["x"], "id": 3}),
        ("memory", {}),
        ("quota", {"whom": 3, "devices": 1, "nbytes": None, "id": 1}),
        ("quota", {"whom": "x", "devices": -1, "nbytes": None, "id": 1}),
    ],
)
def test_malformed_questions_are_counted_and_lead_to_nothing(
    lab: Lab, op: str, fields: Any
) -> None:
    before = len(lab.core.events)
    with pytest.raises(Malformed):
        lab.say(1, op, **fields)
    assert (lab.rim.rejected, len(lab.core.events)) == (1, before)
