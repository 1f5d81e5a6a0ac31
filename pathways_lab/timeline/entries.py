"""What has not been read yet, kept as it came: for readers in other processes.

Problem: whoever draws a timeline in a process of its own needs the records as
bytes, and reading them here first would cost what that process was to save.

Rule for maintainers: nothing here knows what an entry says.  Bounded; what the
bound pushes out is counted for each reader.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from itertools import islice


class Entries:
    """The newest batches of entries, of about *capacity* records at most.  Any thread."""

    def __init__(self, capacity: int = 200_000) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._batches: deque[tuple[Sequence[bytes], int]] = deque()
        self._held = 0
        self._version = 0

    def add(self, batch: Sequence[bytes], records: int) -> None:
        """Remember a batch, which is not changed any more, of at least so many *records*."""
        with self._lock:
            self._batches.append((batch, records))
            self._held += records
            self._version += len(batch)
            while self._held > self.capacity and len(self._batches) > 1:
                self._held -= self._batches.popleft()[1]

    def since(self, version: int) -> tuple[list[bytes], int, int]:
        """``(entries, version, missed)``: what came after *version*, which the next call is given.

        missed: entries that were pushed out unseen.
        """
        with self._lock:
            asked = self._version - version
            new: list[Sequence[bytes]] = []
            held = 0
            for batch, _ in reversed(self._batches):
                if held >= asked:
                    break
                new.append(batch)
                held += len(batch)
            entries = [entry for batch in reversed(new) for entry in batch]
            surplus = max(0, held - asked)
            return list(islice(entries, surplus, None)), self._version, max(0, asked - held)
