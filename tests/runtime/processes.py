"""Helpers for tests that start real processes: trees, and whether they are gone."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil


def runs(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def gone(pids: Iterable[int], seconds: float) -> list[int]:
    """Those that still run after *seconds*; returns as soon as there are none."""
    left = list(pids)
    deadline = time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        left = [pid for pid in left if runs(pid)]
    return left


def tree(pid: int) -> list[int]:
    """The descendants of a process."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def children(pid: int, module: str) -> list[psutil.Process]:
    """The children of a process that run a module; one that is just ending is none."""
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):
            if module in child.cmdline():
                found.append(child)
    return found


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait until the condition holds; the time is for a busy machine."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def stop(pid: int) -> None:
    """Stop a process, and wait until it stands: its threads go on for a moment after the signal."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    if not threads.exists():  # not Linux
        until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        return
    until(lambda: {_state(thread) for thread in threads.iterdir()} <= {"T", ""})


def _state(thread: Path) -> str:
    """A letter; "" when it has ended."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
