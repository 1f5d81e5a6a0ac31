"""What the control plane itself adds to the timeline.

Problem: it handles some 10^5 messages a second, and a record of each would
cost more than the message; so messages are noted as plain tuples, written
together, and broadcast in batches.

Rule for maintainers: nothing here is read back; records are for others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pathways_lab.runtime import chronicle
from pathways_lab.runtime.broadcast import Broadcast
from pathways_lab.runtime.registry import Registry
from pathways_lab.timeline.records import Record

_LETTERS = 4096
"""Wire messages that are remembered as one record at most."""


class Diary:
    """clock: the time of every record.  flush_due: called when records wait for :meth:`flush`."""

    def __init__(
        self, registry: Registry, clock: Callable[[], float], flush_due: Callable[[], None]
    ) -> None:
        self.broadcast = Broadcast()
        self._registry = registry
        self._clock = clock
        self._flush_due = flush_due
        self._letters: list[chronicle.Letter] = []

    def remember(self, *records: Record) -> None:
        self.remember_packed([chronicle.write(record) for record in records])

    def remember_packed(self, records: Sequence[bytes]) -> None:
        if self.broadcast.add(records):
            self._flush_due()

    def count(self, kind: str, source: str, target: str, size: int, run: int) -> None:
        """A message went over the wire."""
        known = self._registry.plans.get(self._registry.programs.get(run, ("", ""))[1])
        program = known[1].name if known else ""
        self._letters.append((self._clock(), kind, source, target, size, run, program))
        if len(self._letters) == _LETTERS:
            self.flush()

    def flush(self) -> None:
        """Send new records to the watchers."""
        if self._letters:
            letters, self._letters = self._letters, []
            self.broadcast.add([chronicle.messages(letters)])
        self.broadcast.flush(self._clock())
