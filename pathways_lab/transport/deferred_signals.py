"""Ctrl-C, and what else may raise in the main thread, waits for a good moment.

Problem: a thread that reads links itself runs handlers that must not stop
half-way, and neither may a call that is being sent; in the main thread a signal's handler raises
between any two instructions: Ctrl-C, an alarm that ends what takes too long, a request to end.

How: while such work goes on, the main thread's handlers of these signals are replaced by
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

_SIGNALS: tuple[int, ...] = tuple(
    getattr(_signal, name) for name in ("SIGINT", "SIGALRM", "SIGTERM") if hasattr(_signal, name)
)
"""Those whose handlers raise, where they do.  To ask for one takes 0.03 µs."""


class HeldBack:
    """``with HeldBack() as it``: inside, a signal is noted in struck and calls wake(); then it
    counts.

    An interrupt between two instructions of entering or leaving counts before or after.
    """

    __slots__ = ("_before", "_wake", "struck")

    def __init__(self, wake: Callable[[], object] = bool) -> None:
        self.struck: list[int] = []
        self._wake = wake
        self._before: list[tuple[int, Any]] = []

    def __enter__(self) -> HeldBack:
        if threading.current_thread() is threading.main_thread():
            try:
                for number in _SIGNALS:
                    before = _signal.getsignal(number)
                    if callable(before):
                        # Remembered first: what has been replaced is always put back.
                        self._before.append((number, before))
                        _signal.signal(number, self._strike)
            except BaseException:
                self._put_back()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before:
            self._put_back()
            for number in self.struck:
                _signal.raise_signal(number)

    def _put_back(self) -> None:
        try:
            for number, before in self._before:
                _signal.signal(number, before)
        except BaseException:
            # One that is back has struck: the others must not stay away.
            for number, before in self._before:
                _signal.signal(number, before)
            raise

    def _strike(self, number: int, _frame: FrameType | None) -> None:
        self.struck.append(number)
        self._wake()
