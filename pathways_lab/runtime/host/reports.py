"""Reports of a host to the control plane: batched, and never late.

Problem: a gang can take 50 us, a message costs as much; a user waits for the
last one.  So events are collected and sent in one message: every :data:`PERIOD`
while work is under way, within :data:`QUICK` of a run's end or of an end that the
next grants wait for, and at once when the host is idle or has sent nothing for that
long.  The end of a run of which the host has told the waiting client hurries nobody:
it travels with the next report, a :data:`PERIOD` later at most.  Records that are no more than
the story of what goes on wait for the next report, too, while work is under way, for
:data:`STORY` at most.

Rule for maintainers: in the reactor's thread only.

Paper: section 4.5 (batched host-to-controller messages).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import HostReport
from pathways_lab.core.program.program import SliceId, ValueId
from pathways_lab.executor.actions import Report
from pathways_lab.executor.ends import Ends
from pathways_lab.executor.launcher import Launcher
from pathways_lab.runtime.host.host_records import Story
from pathways_lab.timeline.records import Record, Sample
from pathways_lab.transport import record_encoding
from pathways_lab.transport.codec import pack_fields

PERIOD = 0.020
QUICK = 0.001
STORY = 0.100
MEMORY_PERIOD = 0.050
"""Seconds between two samples of the memory while it changes."""


class Reports:
    """One host's outgoing reports.

    send(op, fields): to the control plane, from any thread; nothing when that is gone.
    later(seconds, function): run it in the reactor's thread, after a look at what has ended.
    """

    def __init__(
        self,
        host: str,
        island: str,
        clock: Callable[[], float],
        send: Callable[[str, dict[str, Any]], Any],
        later: Callable[..., None],
        launcher: Launcher,
        story: Story,
    ) -> None:
        self._host = host
        self._island = island
        self._clock = clock
        self._send = send
        self._later = later
        self._launcher = launcher
        self._memory = launcher.memory
        self._story = story
        self._ends = Ends()
        self._ended: list[record_encoding.Ended] = []
        self._resident: list[int] = []
        self._compiled: list[tuple[str, SliceId, int, Failure | None]] = []
        self._crossing: list[tuple[str, SliceId, int]] = []
        self._parked: list[SliceId] = []
        self._moved: list[SliceId] = []
        self._decided: list[tuple[int, ValueId, int]] = []
        self._records: list[bytes] = []
        self._flushed = 0.0
        self._waiting = False
        self._over = False
        self._hurried = self._told = False
        # Since due() was last called: runs of which something ended, and those that are over.
        self._ending: set[int] = set()
        self._runs_over: set[int] = set()
        self._prompt: set[int] = set()
        self._sampled: dict[int, int] = {}
        self._sampling = False
        self._sampled_at = 0.0

    # --- what happened ------------------------------------------------------------------

    def over(self, report: Report) -> None:
        self._ends.add(report)
        self._ending.add(report.run)

    def resident(self, buffer: int) -> None:
        self._resident.append(buffer)

    def compiled(
        self, function: str, slice_id: SliceId, temporary: int, failure: Failure | None
    ) -> None:
        self._compiled.append((function, slice_id, temporary, failure))

    def crosses(self, function: str, slice_id: SliceId, nbytes: int) -> None:
        self._crossing.append((function, slice_id, nbytes))

    def parked(self, slice_id: SliceId) -> None:
        self._parked.append(slice_id)

    def moved(self, slice_id: SliceId) -> None:
        self._moved.append(slice_id)

    def unmoved(self, slice_id: SliceId, reason: str) -> None:
        """A value of it could not be taken from its devices, or sent on.  From any thread."""
        self._send("unmoved", {"slice": slice_id, "reason": reason})

    def decided(self, run: int, value: ValueId, case: int) -> None:
        """The control plane waits for it: :meth:`due` tells it, with others of the same gang."""
        self._decided.append((run, value, case))

    def hurry(self, run: int) -> None:
        """Others wait for whatever of this run ends."""
        self._prompt.add(run)

    def hurried(self, run: int) -> bool:
        """Whether they do; from any thread."""
        return run in self._prompt

    def run_over(self, run: int) -> None:
        """Somebody may wait for what was reported."""
        self._runs_over.add(run)

    def told(self) -> None:
        """The waiting client has heard from this host of the end that was just reported."""
        self._told = True

    def record(self, record: Record) -> None:
        """Remember it in the timeline; :meth:`due` has it sent."""
        self._records.append(record_encoding.write(record))

    def ended(self, gangs: list[record_encoding.Ended]) -> None:
        """The same for gangs that are over."""
        self._ended += gangs

    # --- sending --------------------------------------------------------------------------

    def due(self, *, now: bool = True) -> None:
        """Something was added: send it now, or soon.  now: this thread has nothing else to do."""
        idle, since = self._launcher.idle, time.monotonic() - self._flushed
        # With several runs it is not known which end was waited for.
        heard = self._told and len(self._ending) == 1 and self._ending == self._runs_over
        waited_for = not self._prompt.isdisjoint(self._ending)
        self._prompt -= self._runs_over
        # The core waits for uploads and parked values, whatever is launched meanwhile.
        needed = bool(self._resident or self._parked)
        period = PERIOD if self._news else STORY
        if self._decided:
            self.flush()
        elif not heard or waited_for or needed:
            self._over |= bool(self._runs_over) or waited_for
            if (now or needed) and (since >= period or idle or (self._over and since >= QUICK)):
                self.flush()
            elif (self._over or idle) and not self._hurried:
                self._hurried = True
                self._later(QUICK, self.flush)
        self._told = False
        self._ending.clear()
        self._runs_over.clear()
        if (heard or not idle) and not self._waiting:
            self._waiting = True
            self._later(PERIOD, self._period)

    @property
    def _news(self) -> bool:
        """Whether there is anything that the core must hear."""
        return bool(
            self._ends or self._resident or self._compiled or self._parked or self._moved
            or self._decided
        )  # fmt: skip

    def _period(self) -> None:
        self._waiting = False
        if self._news or self._launcher.idle:
            self.flush()
        if not self._launcher.idle:
            self.due()

    def flush(self) -> None:
        """Send everything that was added, if anything was."""
        self._sample_memory()
        # Also when there is nothing: a timer that found nothing is over too.
        self._hurried = False
        if not (self._news or self._records or self._ended):
            return
        report = HostReport(
            0.0,
            "",
            self._host,
            self._ends.ended,
            tuple(self._ends.failed),
            tuple(self._resident),
            tuple(self._compiled),
            tuple(self._parked),
            tuple(self._moved),
            tuple(self._decided),
            tuple(self._crossing),
        )
        fields = pack_fields(report)
        for name in ("time", "cause", "host"):
            del fields[name]
        if self._ended:
            self._records.append(self._story.segments(self._ended))
        fields["records"] = self._records
        self._records, self._ended, self._over = [], [], False
        self._ends, self._resident, self._compiled, self._crossing = Ends(), [], [], []
        self._parked, self._moved, self._decided = [], [], []
        self._flushed = time.monotonic()
        self._send("report", fields)

    def _sample_later(self) -> None:
        self._sampling = False
        self._sample_memory()
        self.due()

    def _sample_memory(self) -> None:
        memory, before = self._memory, self._sampled
        if memory.used == before == memory.most:
            return
        now = time.monotonic()
        if now - self._sampled_at < MEMORY_PERIOD:
            if not self._sampling:
                self._sampling = True
                self._later(MEMORY_PERIOD, self._sample_later)
            return
        self._sampled, self._sampled_at = dict(memory.used), now
        for device, most in sorted(memory.look().items()):
            used = self._sampled[device]
            if not used == most == before.get(device, 0):
                self.record(
                    Sample(
                        "memory",
                        self._clock(),
                        float(used),
                        self._island,
                        self._host,
                        {"device": device, "most": most},
                    )
                )
