"""A gang that goes on long after its formation has ended costs its host, and nothing else does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from pathways_lab.runtime.host.driver import HostRim
from pathways_lab.runtime.islands.multi_host_runtime import SpanningCpuRuntime


@pytest.mark.parametrize(
    ("oldest", "still", "stuck", "empty", "why"),
    [
        ("gang", "gang", False, False, "busy"),
        (None, None, True, True, "connected"),
        (None, None, True, False, ""),
        ("gang", "another", False, True, ""),
        ("gang", None, False, True, ""),
        (None, "new", False, True, ""),
    ],
)
def test_what_does_not_let_go_ends_the_process(
    oldest: str | None, still: str | None, stuck: bool, empty: bool, why: str
) -> None:
    """A gang in its lane at once; a thread that nobody needs only where it costs nobody."""
    ends: list[str] = []
    later: list[Any] = []
    rim: Any = SimpleNamespace(
        _fatal=ends.append,
        _stuck=None,
        tenants=SimpleNamespace(none_here=empty),
        reactor=SimpleNamespace(call_later=lambda seconds, *call: later.append(call)),
    )
    joint: Any = SimpleNamespace(stuck=stuck, formation="formation 7")
    job: Any = oldest
    lane: Any = SimpleNamespace(oldest=still)
    HostRim._stuck(rim, joint, lane, job, "h1 was lost")
    assert len(ends) == bool(why)
    assert bool(later) == (stuck and not empty), "it is looked at again"
    assert all(why in end and "h1 was lost" in end for end in ends)


def test_a_host_says_that_it_has_left_a_formation_when_it_has() -> None:
    """From then on the service may end."""
    said: list[str] = []
    runtime = Mock(spec=SpanningCpuRuntime)
    runtime.dissolve.side_effect = lambda number, reason: said.append(f"dissolved {number}")
    rim: Any = SimpleNamespace(
        runtime=runtime,
        tell_control=lambda op, fields: said.append(f"{op} {fields['number']}"),
    )
    HostRim._end_formation(rim, 7, "a host was lost")
    assert said == ["dissolved 7", "left 7"]
