"""Waiting for devices, with the place in the line shown.

Problem: a request that waits must not look like a hang: whoever waits sees his
place and what he waits for, and can give up with Ctrl-C or after some seconds.

Rule for maintainers: shown by the thread that waits, never by another.

Paper: section 4.1 (resource manager).
"""

from __future__ import annotations

import time

from pathways_lab.client.lab import hooks
from pathways_lab.client.session import failures
from pathways_lab.client.session.pending import SliceAnswer
from pathways_lab.client.session.waiting import Board


def stay(board: Board, answer: SliceAnswer, seconds: float | None) -> None:
    """Return when there is an answer.  seconds: give up after so many (None: never).

    Raises PathwaysError that says what it waited for.
    """
    show = hooks.line()
    begun, shown = time.monotonic(), ""
    try:
        while not answer.done:
            shown = answer.waits
            show(shown)
            left = None if seconds is None else max(0.0, begun + seconds - time.monotonic())
            try:
                board.wait(lambda: answer.done or answer.waits != shown, left, "")  # noqa: B023
            except TimeoutError:
                raise failures.refused(
                    f"there were no devices for this slice within {seconds:g} s: {shown}",
                    "wait longer, or ask for another island or fewer devices",
                ) from None
    finally:
        took = time.monotonic() - begun
        outcome = "got devices" if answer.done and answer.failure is None else "got no devices"
        show(f"{outcome} after {took:.1f} s in line")
