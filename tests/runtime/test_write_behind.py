"""Law: all that is handed over is written once, in bounded memory, and its error is told once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pathways_lab.runtime.write_behind import WriteBehind
from tests.runtime.processes import until

A, B = Path("/a"), Path("/b")


def test_a_folder_is_done_when_all_below_it_is_written() -> None:
    behind, go, seen = WriteBehind(100), threading.Event(), []
    assert behind.done(A)
    behind.add(A / "x", 10, lambda: seen.append("x"))
    behind.add(A / "y", 10, lambda: (go.wait(), seen.append("y"))[1])
    behind.add(B, 10, lambda: seen.append("b"))
    until(lambda: behind.done(B))
    assert not behind.done(A)
    go.set()
    until(lambda: behind.done(A))
    assert sorted(seen) == ["b", "x", "y"]


def test_who_hands_over_waits_for_room_and_a_job_that_is_too_large_goes_alone() -> None:
    behind, go = WriteBehind(100), threading.Event()
    behind.add(A, 250, go.wait)
    handed = threading.Event()
    threading.Thread(target=lambda: (behind.add(B, 1, bool), handed.set())).start()
    assert not handed.wait(0.05)
    go.set()
    assert handed.wait(10)
    until(lambda: behind.done(B))


def test_an_error_is_told_to_who_asks_for_its_folder() -> None:
    def fails() -> None:
        raise OSError("no room")

    behind = WriteBehind(100, threads=1)
    behind.add(A, 10, fails)
    behind.add(B, 10, bool)
    until(lambda: behind.done(B))
    with pytest.raises(OSError, match="no room"):
        behind.done(A)
    assert behind.done(A), "once"
