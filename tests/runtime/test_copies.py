"""Copies of a process are children like all others: on a lifeline, with last words and a code."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pathways_lab.runtime.processes.child_copies import can_fork
from pathways_lab.runtime.processes.child_process import Child, spawn
from tests.runtime.processes import gone, runs

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not can_fork(), reason="copies of processes go on as others on Linux only"),
]
Start = Callable[..., Child]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[Child] = []

    def make(**config: object) -> Child:
        module = "tests.runtime.copies_root"
        config = {"folder": str(tmp_path), **config}
        made.append(spawn(module, config, name="root", folder=tmp_path))
        return made[-1]

    yield make
    for child in made:
        child.end()


def copies_of(root: Child) -> list[dict[str, Any]]:
    copies: list[dict[str, Any]] = root.hear(30)["copies"]
    return copies


def test_they_go_when_the_root_is_killed(start: Start) -> None:
    root = start(copies=3)
    pids = [copy["pid"] for copy in copies_of(root)]
    assert all(runs(pid) for pid in pids)
    os.kill(root.pid, signal.SIGKILL)
    assert gone(pids, 20.0) == []


def test_each_has_its_own_log_session_and_number(start: Start, tmp_path: Path) -> None:
    copies = copies_of(start(copies=2))
    assert [copy["number"] for copy in copies] == [0, 1]
    assert [os.getsid(copy["pid"]) for copy in copies] == [copy["pid"] for copy in copies]
    assert [(tmp_path / f"copy-{n}.log").read_text() for n in range(2)] == [
        "copy 0 printed\n", "copy 1 printed\n",
    ]  # fmt: skip


def test_none_holds_the_lifeline_of_another(start: Start) -> None:
    """The one that was made last holds no more than the first, but what its parent reads."""
    first, *_, last = (len(copy["open"]) for copy in copies_of(start(copies=4)))
    assert last <= first + 2 * 3


def test_one_that_fails_says_why_and_the_others_go_on(start: Start) -> None:
    root = start(copies=2)
    _, other = copies_of(root)
    root.tell({"copy": 0, "fail": True})
    reason = root.hear(20)["reason"]
    for part in ("copy/0", "exit code 1", "a reason on standard error", "copy 0 printed"):
        assert part in reason
    assert root.hear(20) == {"code": 1, "alive": False}
    assert runs(other["pid"])


def test_one_that_does_not_end_is_killed(start: Start) -> None:
    root = start(copies=1)
    copies_of(root)
    root.tell({"copy": 0, "deaf": True})
    assert root.hear(20) == {"code": -signal.SIGKILL, "alive": False}


def test_device_processes_that_are_copies_draw_other_random_numbers(start: Start) -> None:
    told = start(draw=True).hear(60)
    one, two = told["drawn"]
    assert one != two
    assert told["codes"] == [0, 0]
