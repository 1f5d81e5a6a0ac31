"""Settings of the interpreter that are others while a lab is open.

Problem: a thread beside the user's reads the links.  While the user's thread computes in Python
it lets go of the interpreter after :func:`sys.getswitchinterval`: 5 ms by default, ten times as
long as a small call takes.  And a call with a thousand arrays makes a thousand handles while as
many go: Python looks for garbage among them several times a call, and there is none.

How: while a lab wants it a setting is ours where it was Python's own.  Where no other thread
wants the interpreter, and where few objects are made, nothing changes.

Rule for maintainers: the settings are the user's: another value stays, set before or meanwhile.

Paper: section 4.5 (dispatch that nothing holds up).
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

INTERVAL, SHORT = 0.005, 0.0005
"""Seconds for which a thread goes on that others wait for: in Python, and here."""
OBJECTS, MANY = (700, 2_000), 10_000
"""New objects after which garbage is looked for: in Pythons (until 3.12, from 3.13), and here."""

T = TypeVar("T")


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """While modules are imported, and no thread runs: what they make stays.

    Python would look for garbage among it a hundred times, a fifth of the time that JAX's and
    Dask's imports take; and later it would take 60 ms each time, in which no gang begins.  A copy
    of the process shares what nobody looks at.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class _Setting(Generic[T]):
    """One setting.  better(now): ours, or None where it is the user's already."""

    def __init__(
        self, read: Callable[[], T], write: Callable[[T], None], better: Callable[[T], T | None]
    ) -> None:
        self._read, self._write, self._better = read, write, better
        self._pythons: T | None = None
        self._ours: T | None = None

    def change(self) -> None:
        """Set ours where it was Python's own."""
        now = self._read()
        wanted = self._better(now)
        if wanted is not None:
            self._write(wanted)
            self._pythons, self._ours = now, self._read()  # as it was rounded

    def back(self) -> None:
        """Set Python's own where it is ours."""
        if self._pythons is not None and self._read() == self._ours:
            self._write(self._pythons)
        self._pythons = self._ours = None


def _interval(now: float) -> float | None:
    return SHORT if now == INTERVAL else None


def _garbage(now: tuple[int, int, int]) -> tuple[int, int, int] | None:
    return (MANY, *now[1:]) if now[0] in OBJECTS else None


class Settings:
    """Has the interpreter of this process as a lab wants it, until :meth:`end`."""

    wanted = 0
    """So many want it."""
    _lock = threading.Lock()
    _all = (
        _Setting(sys.getswitchinterval, sys.setswitchinterval, _interval),
        _Setting(gc.get_threshold, lambda now: gc.set_threshold(*now), _garbage),
    )

    def __init__(self) -> None:
        self._open = True
        with Settings._lock:
            if not Settings.wanted:
                for setting in Settings._all:
                    setting.change()
            Settings.wanted += 1

    def end(self) -> None:
        """It is not wanted any more.  Again is fine."""
        with Settings._lock:
            if not self._open:
                return
            self._open = False
            Settings.wanted -= 1
            if not Settings.wanted:
                for setting in Settings._all:
                    setting.back()
