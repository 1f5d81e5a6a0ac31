"""The control plane's memory of what happened, and who is told.

Problem: records come in bursts from many hosts; clients that watch must get
them soon, in few messages, and one that reads slowly must cost nobody
anything.

Rule for maintainers: everything is bounded; what is not sent is counted, and
the count is sent as a ``dropped`` sample, because a picture that hides a loss
lies.  Records stay packed: nobody looks into them here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from pathways_lab.timeline.records import Sample
from pathways_lab.transport import record_encoding
from pathways_lab.transport.framing import Letter
from pathways_lab.transport.link import Link

BATCH_SECONDS = 0.05
"""Watchers get at most one message per this many seconds."""
_BATCH = 20_000
"""Records in one message."""
_KEPT = 16 << 20
"""Bytes of records that are kept at most."""
_SLOW = 16 << 20
"""Bytes that may wait for a watcher that does not read, before records are left out."""


@dataclass(slots=True)
class _Reader:
    watcher: Link
    dropped: int = 0


class Broadcast:
    """A bounded log of packed records, and the watchers that follow it.

    capacity, nbytes: what is kept for watchers that come later: so many records, and bytes.
    """

    def __init__(self, capacity: int = 20_000, nbytes: int = _KEPT) -> None:
        self._capacity = capacity
        self._most = nbytes
        self._log: deque[bytes] = deque()
        self._nbytes = 0
        self._fresh: list[bytes] = []
        self._lost = 0
        self._readers: dict[str, _Reader] = {}

    def add(self, records: Iterable[bytes]) -> bool:
        """Remember packed records.  True when a flush is due that was not due before."""
        due = bool(self._fresh)
        for record in records:
            self._log.append(record)
            self._nbytes += len(record)
            while len(self._log) > self._capacity or self._nbytes > self._most:
                self._nbytes -= len(self._log.popleft())
                self._lost += 1
            if self._readers:
                self._fresh.append(record)
        return bool(self._fresh) and not due

    def watch(self, name: str, watcher: Link, time: float) -> None:
        """Tell *watcher* what is remembered now, and what comes from now on."""
        if name in self._readers:
            return
        self.flush(time)
        reader = self._readers[name] = _Reader(watcher, self._lost)
        for start in range(0, len(self._log), _BATCH):
            records = list(islice(self._log, start, start + _BATCH))
            self._send(reader, records, _letter(records), time)

    def unwatch(self, name: str) -> None:
        """Stop telling; an unknown name is fine."""
        self._readers.pop(name, None)
        if not self._readers:
            self._fresh.clear()

    def flush(self, time: float) -> None:
        """Send what is new to all watchers."""
        fresh, self._fresh = self._fresh, []
        # The newest are the ones that a live view can still use.
        newest = fresh[-_BATCH:]
        letter = _letter(newest)
        for reader in list(self._readers.values()) if fresh else ():
            reader.dropped += len(fresh) - len(newest)
            self._send(reader, newest, letter, time)

    def _send(self, reader: _Reader, records: Sequence[bytes], letter: Letter, time: float) -> None:
        """letter: what carries these records, and nothing else."""
        if reader.watcher.pending > _SLOW:
            reader.dropped += len(records)
            return
        if reader.dropped:
            dropped = record_encoding.write(Sample("dropped", time, float(reader.dropped)))
            letter = _letter([dropped, *records])
            reader.dropped = 0
        try:
            reader.watcher.forward(letter)
        except ConnectionError:
            # Its closing is on the way and will remove it.
            reader.dropped += len(records)


def _letter(records: Sequence[bytes]) -> Letter:
    return Letter("records", {"records": records})
