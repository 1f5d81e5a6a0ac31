"""Shortens Python's switch interval, so that a thread soon gets a busy interpreter.

Problem: a thread beside the user's reads the links.  While the user's thread computes in Python
it lets go of the interpreter after :func:`sys.getswitchinterval`: 5 ms by default, ten times as
long as a small call takes.

How: while a lab wants it the interval is :data:`SECONDS`, where it was Python's own.  Where no
other thread wants the interpreter, nothing changes.

Rule for maintainers: the interval is the user's: another value stays, set before or meanwhile.

Paper: section 4.5 (dispatch that nothing holds up).
"""

from __future__ import annotations

import sys
import threading

PYTHONS, SECONDS = 0.005, 0.0005
"""For which a thread goes on that others wait for: in Python, and here."""


class Sooner:
    """Threads of this process get the interpreter sooner, until :meth:`end`."""

    _lock = threading.Lock()
    _wanted = 0
    _ours: float | None = None
    """The interval that was set, as the system has rounded it; None: none."""

    def __init__(self) -> None:
        self._open = True
        with Sooner._lock:
            if not Sooner._wanted and sys.getswitchinterval() == PYTHONS:
                sys.setswitchinterval(SECONDS)
                Sooner._ours = sys.getswitchinterval()
            Sooner._wanted += 1

    def end(self) -> None:
        """It is not wanted any more.  Again is fine."""
        with Sooner._lock:
            if not self._open:
                return
            self._open = False
            Sooner._wanted -= 1
            if not Sooner._wanted:
                if sys.getswitchinterval() == Sooner._ours:
                    sys.setswitchinterval(PYTHONS)
                Sooner._ours = None
