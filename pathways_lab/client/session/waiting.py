"""Things that end once, and waiting for them.

Problem: user threads, asyncio loops and the reactor's thread meet at values
that are not there yet.  A :class:`Pending` ends exactly once, with or without
a failure; anybody may wait for any number of them, and be interrupted.

How: the thread that waits reads the links itself (see
:meth:`pathways_lab.transport.reactor.Reactor.lead`).  When another one reads
already, it sleeps until something has ended.

Rule for maintainers: one lock for all; it is held for bookkeeping only, never
while sending, and callbacks run outside of it.  Only locks and queues of C
here: an interrupt inside Python's own Condition can leave it locked.

Paper: section 4.2 (handles to future results).
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from pathways_lab.client.session import failures
from pathways_lab.core.errors import Failure
from pathways_lab.transport.reactor import Reactor


class Pending:
    """Ends once.  done: it has ended; failure: why it has no value, or None."""

    __slots__ = ("_callbacks", "done", "failure")

    def __init__(self) -> None:
        self.done = False
        self.failure: Failure | None = None
        self._callbacks: list[Callable[[], None]] | None = None


class _InTurn:
    """Waits for one entry after the other: what is made together ends together.

    An object and no function that names itself: such a function would keep what *callback* keeps,
    handles among it, until somebody looks for garbage.
    """

    __slots__ = ("_board", "_callback", "_left")

    def __init__(self, board: Board, left: Iterator[Pending], callback: Callable[[], None]) -> None:
        self._board, self._left, self._callback = board, left, callback

    def __call__(self) -> None:
        for entry in self._left:
            if not entry.done:
                return self._board.when_done(entry, self)
        self._callback()


class Board:
    """Where pending things are settled and waited for.  reactor: reads what settles them."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._settling = threading.Lock()
        self._sleepers: list[queue.SimpleQueue[None]] = []

    def settle(self, entries: Iterable[Pending], failure: Failure | None) -> None:
        """End *entries*; those that have ended may only get worse (a value may be lost)."""
        called: list[Callable[[], None]] = []
        with self._settling:
            for entry in entries:
                if entry.done and (failure is None or entry.failure is not None):
                    continue
                entry.failure = failure
                entry.done = True
                if entry._callbacks:
                    called += entry._callbacks
                entry._callbacks = None
        self._reactor.nudge()
        self._wake_sleepers()
        for callback in called:
            callback()

    def when_done(self, entry: Pending, callback: Callable[[], None]) -> None:
        """Call *callback* once *entry* has ended: now, or later in another thread."""
        with self._settling:
            if not entry.done:
                entry._callbacks = [*(entry._callbacks or ()), callback]
                return
        callback()

    def when_all(self, entries: Iterable[Pending], callback: Callable[[], None]) -> None:
        """Call *callback* once all have ended: now, or later in another thread."""
        _InTurn(self, iter(entries), callback)()

    def wait(self, done: Callable[[], bool], timeout: float | None, what: str) -> None:
        """Return when *done()*; it is asked again whenever something has ended.

        Raises TimeoutError after *timeout* seconds.  Ctrl-C gets through.
        """
        try:
            deadline = None if timeout is None else time.monotonic() + timeout
        except (TypeError, OverflowError):
            deadline = math.nan
        if deadline != deadline:
            raise failures.refused(
                f"timeout={timeout!r} is not a number of seconds",
                "give seconds, or None to wait as long as it takes",
            )
        while not done():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"{what} took longer than {timeout} s; it goes on")
            if self._reactor.lead(done, left):
                # Somebody else who waits may read from now on.
                self._wake_sleepers()
            else:
                self._sleep(done, None if left is None else min(left, threading.TIMEOUT_MAX))

    def _sleep(self, done: Callable[[], bool], seconds: float | None) -> None:
        mine: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._sleepers.append(mine)
        try:
            if not done():
                with contextlib.suppress(queue.Empty):
                    mine.get(timeout=seconds)
        finally:
            self._sleepers.remove(mine)

    def _wake_sleepers(self) -> None:
        for sleeper in tuple(self._sleepers):
            sleeper.put(None)
