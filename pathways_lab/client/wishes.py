"""What a kernel wishes about the machine, and waits for: suspend, resume, take away.

Problem: such a wish is met when what is admitted has ended, which may take as
long as somebody's computation; and whoever waits must be able to leave.

Rule for maintainers: one number, one answer; nothing is decided here.

Paper: section 4.1 (resource manager).
"""

from __future__ import annotations

from typing import Any

from pathways_lab.client.questions import Asking
from pathways_lab.client.waiting import Pending
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.runtime.codec import unpack


class WishAnswer(Pending):
    """The answer to a wish.  lines: what it was done to."""

    __slots__ = ("lines",)

    def __init__(self) -> None:
        super().__init__()
        self.lines: tuple[str, ...] = ()


class Wishes:
    """The open wishes of one connection."""

    def __init__(self, connection: Asking) -> None:
        self._connection = connection
        self._open: dict[int, WishAnswer] = {}

    def wish(
        self, op: str, fields: dict[str, Any], what: str, timeout: float | None
    ) -> tuple[str, ...]:
        """Wish for something and wait until it is done; what it was done to, in words.

        Raises PathwaysError when it is refused, or the lab is gone; TimeoutError
        after *timeout* seconds, and the wish stays.
        """
        connection = self._connection
        identity, answer = connection.new_id("question"), WishAnswer()
        self._open[identity] = answer
        try:
            connection.send(op, {**fields, "request": identity})
            connection.board.wait(
                lambda: answer.done or connection.closed is not None, timeout, what
            )
        finally:
            self._open.pop(identity, None)
        failure = answer.failure if answer.done else connection.closed
        if failure is not None:
            raise PathwaysError(failure)
        return answer.lines

    def refused(self, identity: int, failure: Failure) -> None:
        """It was not even understood.  In the reactor's thread."""
        answer = self._open.get(identity)
        if answer is not None:
            self._connection.board.settle((answer,), failure)

    def answered(self, fields: dict[str, Any]) -> None:
        """In the reactor's thread."""
        answer = self._open.get(fields["id"])
        if answer is not None:
            answer.lines = tuple(fields["lines"])
            packed = fields["failure"]
            failure = None if packed is None else unpack(Failure, packed)
            self._connection.board.settle((answer,), failure)
