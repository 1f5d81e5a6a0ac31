"""How soon a thread gets the interpreter that another one keeps busy.

Problem: what comes over links is read by a thread beside the user's.  While that one computes in
Python it lets go of the interpreter when it was asked to for :func:`sys.getswitchinterval`: 5 ms
if nobody set it, ten times as long as a small call takes.

How: while anybody wants it the interval is :data:`SECONDS`, if it was longer.  Where no other
thread wants the interpreter, nothing changes.

Rule for maintainers: the interval is the user's.  A shorter one stays, and so does whatever is set
meanwhile; at the end the one that was there comes back.

Paper: section 4.5 (dispatch that nothing holds up).
"""

from __future__ import annotations

import sys
import threading

SECONDS = 0.0005
"""For which a thread goes on that others wait for."""


class Sooner:
    """Threads of this process get the interpreter sooner, until :meth:`end`."""

    _lock = threading.Lock()
    _wanted = 0
    _before: tuple[float, float] | None = None
    """What was there, and what was set (the system keeps microseconds)."""

    def __init__(self) -> None:
        self._open = True
        with Sooner._lock:
            before = sys.getswitchinterval()
            if not Sooner._wanted and before > SECONDS:
                sys.setswitchinterval(SECONDS)
                Sooner._before = before, sys.getswitchinterval()
            Sooner._wanted += 1

    def end(self) -> None:
        """It is not wanted any more.  Again is fine."""
        with Sooner._lock:
            if not self._open:
                return
            self._open = False
            Sooner._wanted -= 1
            if not Sooner._wanted and Sooner._before is not None:
                before, ours = Sooner._before
                Sooner._before = None
                if sys.getswitchinterval() == ours:
                    sys.setswitchinterval(before)
