"""Ctrl-C that waits for a good moment.

Problem: a thread that reads links itself runs handlers that must not stop
half-way, and neither may a call that is being sent; in the main thread Ctrl-C raises
between any two instructions.

How: while such work goes on, the main thread's handler of SIGINT is replaced by
one that only remembers; afterwards the signal is raised again, for the handler
that was there before.

Rule for maintainers: nothing inside waits for anybody, unless it is woken.  Other threads get
no signals and pay nothing; a handler that is not Python's stays untouched.  This surrounds every
call and every wait for a value, so microseconds count: the C functions behind :mod:`signal` are
called, for its own spend ten times as long on turning numbers into enumerations.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_SIGINT = _signal.SIGINT


class HeldBack:
    """``with HeldBack() as it``: inside, SIGINT sets struck and calls wake(); then it counts.

    An interrupt between two instructions of entering or leaving counts before or after.
    """

    __slots__ = ("_before", "_wake", "struck")

    def __init__(self, wake: Callable[[], object] = bool) -> None:
        self.struck = False
        self._wake = wake
        self._before: Any = None

    def __enter__(self) -> HeldBack:
        if threading.current_thread() is threading.main_thread():
            before = _signal.getsignal(_SIGINT)
            if callable(before):
                # Remembered first: what has been replaced is always put back.
                self._before = before
                _signal.signal(_SIGINT, self._strike)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before is not None:
            _signal.signal(_SIGINT, self._before)
            if self.struck:
                _signal.raise_signal(_SIGINT)

    def _strike(self, _number: int, _frame: FrameType | None) -> None:
        self.struck = True
        self._wake()
