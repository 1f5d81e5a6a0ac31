"""Bytes of arrays beside a session, by numbers that its client chooses.

Problem: a request speaks of bytes that may come later, and a client asks for bytes that are not
there yet.

How: the thread that needs bytes reads on until they are there; whoever asks for some is called
back.

Rule for maintainers: bytes that nobody fetches take no more than a part of memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import psutil

from pathways_lab.door.protocol.status import EXHAUSTED, NOT_FOUND, UNAVAILABLE, Status

PATIENCE = 600.0
"""Seconds that bytes may take to follow what speaks of them."""
ROOM = psutil.virtual_memory().total // 2
"""Most bytes of arrays on their way between a client and the lab."""
_EACH = 1024
"""Bytes that even empty ones take."""

Found = bytes | Status
"""The bytes of a number, or why they will never be there."""


class Buffers:
    """Bytes on their way: of arrays that come, and of those that are read.

    read_on: has the session's thread read on, for so many seconds at most; False when the session
    is over.  wake: ends that, for bytes may come by another connection of the client.
    """

    def __init__(
        self, read_on: Callable[[float], bool], wake: Callable[[], None] = lambda: None
    ) -> None:
        self._read_on = read_on
        self._wake = wake
        self._needed: int | None = None
        self._lock = threading.Lock()
        self._known: dict[int, Found] = {}
        self._asked: dict[int, list[Callable[[Found], None]]] = {}
        self._taken = 0
        self._ended = False

    def put(self, number: int, data: Found) -> None:
        """They are there, or will never be.  Raises Status when there is no room for them."""
        size = _size(data)
        with self._lock:
            if number in self._known or self._ended:
                return
            refused = None
            if self._taken + size > ROOM:
                # Whoever waits for them hears it; nobody else can.
                text = f"{self._taken:,} bytes of arrays are on their way, {size:,} are too many"
                data = refused = Status(EXHAUSTED, text)
            if refused is None or number == self._needed:
                self._known[number] = data
                self._taken += _size(data)
            asked = self._asked.pop(number, ())
        if number == self._needed:
            self._wake()
        for call in asked:
            call(data)
        if refused is not None:
            raise refused

    def take(self, number: int) -> bytes:
        """The bytes of that number, once; in the session's thread.

        Raises Status when they do not come.
        """
        until = time.monotonic() + PATIENCE
        self._needed = number
        try:
            while (data := self._known.get(number)) is None:
                left = until - time.monotonic()
                if left <= 0:
                    text = f"the bytes {number} have not come within {PATIENCE:g} s"
                    raise Status(NOT_FOUND, text)
                if not self._read_on(left) or self._ended:
                    raise _ended()
        finally:
            self._needed = None
            self.forget(number)
        if isinstance(data, Status):
            raise data
        return data

    def when(self, number: int, call: Callable[[Found], None]) -> None:
        """Call with the bytes of that number, now or once they are there; in any thread."""
        with self._lock:
            data = _ended() if self._ended else self._known.get(number)
            if data is None:
                self._asked.setdefault(number, []).append(call)
        if data is not None:
            call(data)

    def forget(self, number: int) -> None:
        with self._lock:
            data = self._known.pop(number, None)
            if data is not None:
                self._taken -= _size(data)

    def end(self) -> None:
        """The session has ended: nobody waits for bytes any more."""
        with self._lock:
            self._ended = True
            self._known.clear()
            asked = [call for several in self._asked.values() for call in several]
            self._asked.clear()
        for call in asked:
            call(_ended())


def _size(data: Found) -> int:
    return _EACH + (0 if isinstance(data, Status) else len(data))


def _ended() -> Status:
    return Status(UNAVAILABLE, "this session has ended")
