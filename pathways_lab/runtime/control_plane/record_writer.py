"""Records that the control plane itself adds to the timeline.

Problem: it handles some 10^5 messages a second, and a record of each would
cost more than the message; so messages are noted as plain tuples, written
together, and broadcast in batches.

Rule for maintainers: nothing here is read back; records are for others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pathways_lab.core.messages import Command, Event, Grant
from pathways_lab.core.program.program import Plan
from pathways_lab.runtime.control_plane.directory import Registry
from pathways_lab.runtime.control_plane.record_stream import Broadcast
from pathways_lab.timeline.records import Record
from pathways_lab.timeline.records_of import Placing, told, window_of
from pathways_lab.transport import record_encoding

_PLACINGS = 1024
"""Windows of programs of which it is remembered what all their runs have in common."""
_SENT = 4096
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
        self._sent: list[record_encoding.Sent] = []
        self._placings: dict[tuple[str, int, int, str], tuple[Plan | None, bytes]] = {}

    def remember(self, *records: Record) -> None:
        self.remember_packed([record_encoding.write(record) for record in records])

    def remember_packed(self, records: Sequence[bytes]) -> None:
        if self.broadcast.add(records):
            self._flush_due()

    def decided(self, event: Event, commands: Sequence[Command]) -> None:
        """Records an event of the core and its commands."""

        def granted(grant: Grant, island: str) -> Iterator[bytes]:
            placing = self._placing(grant, island)
            if placing:
                yield record_encoding.places(window_of(grant, event.time), placing)

        records = told(event, commands, self._registry, granted)
        self.remember_packed(
            [each if isinstance(each, bytes) else record_encoding.write(each) for each in records]
        )

    def moved(self) -> None:
        """Slices are elsewhere now, or gone, and plans with them."""
        self._placings.clear()

    def _placing(self, grant: Grant, island: str) -> bytes:
        key = (grant.plan, grant.first, grant.last, island)
        known = self._registry.plans.get(grant.plan)
        plan = known[1] if known is not None else None
        found = self._placings.get(key)
        if found is None or found[0] is not plan:
            places = Placing.of(grant, island, self._registry)
            packed = b"" if places is None else record_encoding.placing(places)
            if len(self._placings) >= _PLACINGS:
                self._placings.clear()
            found = self._placings[key] = plan, packed
        return found[1]

    def count(self, kind: str, source: str, targets: Sequence[str], size: int, run: int) -> None:
        """A message went over the wire, the same one to each target.  size: bytes of each."""
        known = self._registry.plans.get(self._registry.programs.get(run, ("", ""))[1])
        program = known[1].name if known else ""
        self._sent.append((self._clock(), kind, source, targets, size, run, program))
        if len(self._sent) == _SENT:
            self.flush()

    def flush(self) -> None:
        """Send new records to the watchers."""
        if self._sent:
            sent, self._sent = self._sent, []
            self.broadcast.add([record_encoding.messages(sent)])
        self.broadcast.flush(self._clock())
