"""Tests that have the machine for themselves, although others run in a second process; and
in which order the processes take the files; and tests that failed beside others.

Problem: some tests look at how long things took, or wait for what gives up early; what a
second process of tests does meanwhile makes them fail.  Groups of pytest-xdist do not help:
they keep tests in one process, not others out, and with pytest 9.2 they are not heeded at all.

Rule: who wants to be alone waits for the tests under way, and nobody starts past who waits.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DOOR, ROOM = HERE / "alone.py", HERE / "conftest.py"
"""Files that are locked, never written: all processes of one checkout meet at them."""
FEW = 2
"""So many tests of real processes may fail beside others, if they pass alone."""
RIM = "tests/runtime/"
"""Tests here use threads, sockets and clocks of the machine also where they start no process."""


@contextmanager
def machine(*, alone: bool) -> Iterator[None]:
    """While this lasts nobody is alone; or, with ``alone``, nobody else is here."""
    with ExitStack() as until_done:
        with _locked(DOOR, fcntl.LOCK_EX):
            until_done.enter_context(_locked(ROOM, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        yield


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    """Unlocked by word: closing does not, while a forked child has the file open too."""
    with path.open() as file:
        fcntl.flock(file, how)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def turns_of_files(tests: Iterable[tuple[Path, set[str]]]) -> dict[Path, int]:
    """When each file of *tests* (file, marks) has its turn, where processes share the files.

    Whole files are dealt out: fast ones last, so that all processes end together.  Tests that
    are alone wait for what others are doing, so they come when the others do what is short.
    """
    turns: dict[Path, int] = {}
    for path, marks in tests:
        turn = 1 if "alone" in marks else 0 if marks & {"cluster", "browser"} else 2
        before = turns.get(path, turn)
        turns[path] = 1 if 1 in (turn, before) else min(turn, before)
    return turns


def once_more(stats: dict[str, list[Any]], exitstatus: int) -> list[str]:
    """The tests that failed, if they may run once more alone: few, and of real processes or
    threads.
    """
    failed = {
        r.nodeid: set(getattr(r, "keywords", ()))
        for kind in ("failed", "error")
        for r in stats.get(kind, [])
    }
    real = all(
        marks & {"cluster", "browser"} or name.startswith(RIM) for name, marks in failed.items()
    )
    return list(failed) if exitstatus == 1 and len(failed) <= FEW and real else []
