"""A gang that goes on long after its formation has ended costs its host, and nothing else does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pathways_lab.runtime.host_rim import HostRim


@pytest.mark.parametrize(
    ("oldest", "still", "stuck", "why"),
    [
        ("gang", "gang", False, "busy"),
        (None, None, True, "connected"),
        ("gang", "another", False, ""),
        ("gang", None, False, ""),
        (None, "new", False, ""),
    ],
)
def test_what_does_not_let_go_ends_the_process(
    oldest: str | None, still: str | None, stuck: bool, why: str
) -> None:
    ends: list[str] = []
    lanes = SimpleNamespace(oldest=lambda lane: still)
    rim: Any = SimpleNamespace(_lanes=lanes, _fatal=ends.append)
    joint: Any = SimpleNamespace(stuck=stuck, formation="formation 7")
    job: Any = oldest
    HostRim._stuck(rim, joint, "lane", job, "h1 was lost")
    assert len(ends) == bool(why)
    assert all(why in end and "h1 was lost" in end for end in ends)
