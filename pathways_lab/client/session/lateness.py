"""Waiting for a value, and saying why it is late when it does not come in time.

Problem: "took longer than 5 s" leaves the user alone.  The lab knows what stands still: a
transfer between islands that cannot reach each other, a host that does not answer, one that
is down.

How: shortly before the time is over the lab is asked, as :meth:`Lab.stuck` does; nobody waits
for that longer than for the value.

Rule for maintainers: short waits ask nobody, for whoever polls must not pay for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathways_lab.client.session.connection import Connection

_ASKED = 1.5
"""Seconds before the end at which the lab is asked; hosts have one for their answer."""
_WORTH = 3.0
"""Seconds of waiting below which nobody is asked."""


def wait(
    connection: Connection,
    done: Callable[[], bool],
    left: float | None,
    what: str,
    timeout: float | None,
) -> None:
    """Return when *done()*.  left: seconds of *timeout* that are not over; None: no limit.

    Raises TimeoutError that says what the lab knows to be late.  Ctrl-C gets through.
    """
    board = connection.board
    if not isinstance(left, int | float):
        board.wait(done, left, what)
        return
    why = ""
    try:
        if left >= _WORTH:
            with contextlib.suppress(TimeoutError):
                board.wait(done, left - _ASKED, what)
                return
            with connection.questions.wondering(seconds=1.0) as story:
                try:
                    board.wait(done, _ASKED, what)
                    return
                finally:
                    told = story()
                    why = "" if told is None else f"; {told}"
        board.wait(done, left, what)
    except TimeoutError:
        raise TimeoutError(f"{what} took longer than {timeout} s; it goes on{why}") from None
