"""Unread records as the bytes that came, for readers in other processes.

Problem: a process that draws a timeline needs the records as
bytes, and reading them here first would cost what that process was to save.

Rule for maintainers: nothing here knows the content of an entry.  Bounded; entries that
the bound pushes out are counted for each reader.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

Counted = tuple[Sequence[bytes], int]
"""Entries that came together, and at least how many records are in them."""


class Entries:
    """The newest batches of entries, of about *capacity* records at most.  Any thread."""

    def __init__(self, capacity: int = 200_000) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._batches: deque[Counted] = deque()
        self._held = 0
        self._version = 0

    def add(self, batch: Sequence[bytes], records: int) -> None:
        """Remember a batch, which is not changed any more, of at least so many *records*."""
        with self._lock:
            records = max(1, records)
            self._batches.append((batch, records))
            self._held += records
            self._version += records
            while self._held > self.capacity and len(self._batches) > 1:
                self._held -= self._batches.popleft()[1]

    def since(self, version: int) -> tuple[list[Counted], int, int]:
        """``(batches, version, missed)``: what came after *version*, which the next call is given.

        missed: records that were pushed out unseen, as far as they were counted.
        """
        with self._lock:
            new: list[Counted] = []
            reached = self._version
            for batch in reversed(self._batches):
                if reached <= version:
                    break
                new.append(batch)
                reached -= batch[1]
            return new[::-1], self._version, max(0, reached - version)
