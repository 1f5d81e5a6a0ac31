"""What a host tells the control plane: batched, and never late.

Problem: a gang can take 50 us, a message costs as much; a user waits for the
last one.  So what happens is collected and sent in one message at least every
:data:`PERIOD`, and at once when nothing is under way any more or nothing was
sent for that long.

Rule for maintainers: :meth:`Reports.record_soon` may be called in any thread,
the rest in the reactor's.  Times are on the control plane's clock.

Paper: section 4.5 (batched host-to-controller messages).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import HostReport
from pathways_lab.core.program import SliceId
from pathways_lab.runtime.codec import pack, pack_fields
from pathways_lab.runtime.link import LinkClosed
from pathways_lab.runtime.memory import Memory
from pathways_lab.timeline.records import Record, Sample

PERIOD = 0.010
MEMORY_PERIOD = 0.050
"""Seconds between two samples of the memory while it changes."""


class Reports:
    """One host's outgoing reports.

    send(op, fields): to the control plane.  soon(function), later(seconds, function):
        run it in the reactor's thread.
    idle(): whether no step is under way.  memory: the account of its devices.
    """

    def __init__(
        self,
        host: str,
        island: str,
        clock: Callable[[], float],
        send: Callable[[str, dict[str, Any]], Any],
        soon: Callable[..., None],
        later: Callable[..., None],
        idle: Callable[[], bool],
        memory: Memory[Any],
    ) -> None:
        self._host = host
        self._island = island
        self._clock = clock
        self._send = send
        self._soon = soon
        self._later = later
        self._idle = idle
        self._memory = memory
        self._finished: list[tuple[int, int, float]] = []
        self._failed: list[tuple[int, int, Failure]] = []
        self._resident: list[int] = []
        self._compiled: list[tuple[str, SliceId, int, Failure | None]] = []
        self._records: deque[Record] = deque()
        self._flushed = 0.0
        self._waiting = False
        self._poked = False
        self._sampled: dict[int, int] = {}
        self._sampled_at = 0.0

    # --- what happened ------------------------------------------------------------------

    def finished(self, run: int, step: int, seconds: float, failure: Failure | None) -> None:
        self._finished.append((run, step, seconds))
        if failure is not None:
            self._failed.append((run, step, failure))

    def resident(self, buffer: int) -> None:
        self._resident.append(buffer)

    def compiled(
        self, function: str, slice_id: SliceId, temporary: int, failure: Failure | None
    ) -> None:
        self._compiled.append((function, slice_id, temporary, failure))

    def record(self, record: Record) -> None:
        """Remember it in the timeline; :meth:`due` has it sent."""
        self._records.append(record)

    def record_soon(self, record: Record) -> None:
        """The same from any thread, and it will be sent."""
        self._records.append(record)
        if not self._poked:
            self._poked = True
            self._soon(self.due)

    # --- sending --------------------------------------------------------------------------

    def due(self) -> None:
        """Something was added: send it now, or soon."""
        self._poked = False
        if self._idle() or time.monotonic() - self._flushed >= PERIOD:
            self.flush()
        elif not self._waiting:
            self._waiting = True
            self._later(PERIOD, self._timer)

    def _timer(self) -> None:
        self._waiting = False
        self.flush()

    def flush(self) -> None:
        """Send everything that was added, if anything was."""
        self._sample_memory()
        if not (
            self._finished or self._failed or self._resident or self._compiled or self._records
        ):
            return
        report = HostReport(
            0.0,
            "",
            self._host,
            tuple(self._finished),
            tuple(self._failed),
            tuple(self._resident),
            tuple(self._compiled),
        )
        fields = pack_fields(report)
        for name in ("time", "cause", "host"):
            del fields[name]
        fields["records"] = [pack(self._records.popleft()) for _ in range(len(self._records))]
        self._finished, self._failed, self._resident, self._compiled = [], [], [], []
        self._flushed = time.monotonic()
        try:
            self._send("report", fields)
        except LinkClosed:
            # The control plane is gone; the process ends by its lifeline.
            return

    def _sample_memory(self) -> None:
        memory = {device: used for device, used in self._memory.used.items() if used}
        now = time.monotonic()
        if memory == self._sampled:
            return
        if now - self._sampled_at < MEMORY_PERIOD and not self._idle():
            if not self._waiting:
                self._waiting = True
                self._later(MEMORY_PERIOD, self._timer)
            return
        for device in sorted(memory.keys() | self._sampled.keys()):
            if memory.get(device, 0) != self._sampled.get(device, 0):
                self._records.append(
                    Sample(
                        "memory",
                        self._clock(),
                        float(memory.get(device, 0)),
                        self._island,
                        self._host,
                        {"device": device, "most": self._memory.most.get(device, 0)},
                    )
                )
        self._sampled, self._sampled_at = memory, now
