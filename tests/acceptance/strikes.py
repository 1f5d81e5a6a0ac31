"""Ctrl-C at a moment that the test chooses, and an end of what never ends."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

HANG = 30
"""Seconds after which whatever a test does is taken to hang."""


class Wrong(AssertionError):
    """What may not be."""


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


def struck(delay: int, do: Callable[[], Any]) -> Any:
    """What do() gives, with Ctrl-C after so many ms; None if that came before it was over."""
    main = threading.get_ident()

    def strike() -> None:
        time.sleep(delay / 1000)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=strike)
    found = None
    with contextlib.suppress(KeyboardInterrupt):
        thread.start()
        found = do()
        thread.join()
        time.sleep(0.001)  # its handler runs here at the latest
    thread.join()
    return found
