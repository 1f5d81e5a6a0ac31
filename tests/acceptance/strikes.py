"""Ctrl-C at a moment that the test chooses, and an end of what never ends."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

HANG = 30
"""Seconds after which whatever a test does is taken to hang."""


class Wrong(AssertionError):
    """What may not be."""


def hear_interrupts() -> None:
    """Shells without job control start what runs in the background with SIGINT ignored.

    Tests interrupt themselves: without a handler they would wait for ever, or strike nothing.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def alarm(what: str) -> Iterator[None]:
    """What takes longer than HANG seconds is a finding."""

    def rings(number: int, frame: FrameType | None) -> None:
        raise Wrong(f"{what} took {HANG} s")

    before = signal.signal(signal.SIGALRM, rings)
    signal.setitimer(signal.ITIMER_REAL, HANG)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def unkept() -> Iterator[None]:
    """An interrupt inside a callback of the garbage collector is lost, and keeps no frame.

    A hook that remembers it would keep the frames below it, and the handles in them.
    """
    before = sys.unraisablehook

    def told(lost: sys.UnraisableHookArgs) -> None:
        if lost.exc_type is not KeyboardInterrupt:
            before(lost)

    sys.unraisablehook = told
    try:
        yield
    finally:
        sys.unraisablehook = before


def struck(delay: float, do: Callable[[], Any]) -> Any:
    """do(), interrupted after *delay* ms: its result, or None if the interrupt came first."""
    main = threading.get_ident()
    hear_interrupts()

    def strike() -> None:
        time.sleep(delay / 1000)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=strike)
    found = None
    with unkept(), contextlib.suppress(KeyboardInterrupt):
        thread.start()
        found = do()
        thread.join()
        time.sleep(0.001)  # its handler runs here at the latest
    thread.join()
    return found
