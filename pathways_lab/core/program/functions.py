"""Compiled functions: where they are ready, what memory they need, how long they take.

Problem: hosts compile in the background; a gang may be granted only when every
host of its slice has compiled it, and the peak of a run is known only when
they have said how many temporary bytes the function needs.  The measured
device times decide how far grants run ahead.

Rule for maintainers: a function is known per slice.  A published estimate
changes only when the measured time has moved by a quarter, so that windows
that were cut from it stay valid meanwhile.

Compiling may end the process of a host.  A function that has done so is *condemned*: no host
is asked to compile it any more, wherever it is wanted.

Paper: section 4.2 (compilation in the background), section 4.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages.elastic import Compiling
from pathways_lab.core.program.program import SliceId

FunctionKey = tuple[str, SliceId]

SMOOTHING = 0.25
TOLERANCE = 0.25


@dataclass(slots=True)
class FunctionRecord:
    """pending: hosts that have not compiled it.  waiting: queued runs that need it.

    gangs: how many were measured, as far as that matters.
    crossing: by host, bytes that each gang brings there from other islands; empty mostly.
    """

    pending: set[str]
    temporary: int = 0
    failure: Failure | None = None
    waiting: set[int] = field(default_factory=set)
    gangs: int = 0
    measured: float = 0.0
    published: float | None = None
    crossing: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Functions:
    """assumed: seconds of what was never measured.  version: changes with every estimate.

    condemned: by key of content, why nobody compiles it any more.
    refused: condemned ones that were wanted, and about which nobody was told yet.
    """

    assumed: float
    records: dict[FunctionKey, FunctionRecord] = field(default_factory=dict)
    version: int = 0
    condemned: dict[str, Failure] = field(default_factory=dict)
    refused: list[FunctionKey] = field(default_factory=list)
    _suspected: set[str] = field(default_factory=set)

    def announce(self, key: FunctionKey, hosts: tuple[str, ...]) -> bool:
        """Whether *hosts* must compile it now: not when they did, or are at it."""
        record = self.records.get(key)
        if record is not None and record.failure is None:
            return False
        self.records[key] = FunctionRecord(set(hosts))
        return self.wanted(key)

    def compiling(self, key: FunctionKey) -> bool:
        """Whether hosts that compile it have not said yet how that went."""
        record = self.records.get(key)
        return record is not None and bool(record.pending) and record.failure is None

    def wanted(self, key: FunctionKey) -> bool:
        """Whether hosts may be asked to compile it."""
        if key[0] in self.condemned:
            self.refused.append(key)
            return False
        return True

    def blame(self, compiling: Sequence[Compiling], host: str, how: str, *, surely: bool) -> None:
        """A process has ended while these were compiled.

        surely: nothing else can have ended it.  Else a function is only suspected,
        and condemned when it happens again.
        """
        for each in compiling:
            if surely or each.function in self._suspected:
                name = each.name or "a compiled function"
                self.condemned[each.function] = Failure(
                    "compile",
                    f"{name} is not compiled again: the process of {host} compiled it and {how}",
                    "change the function: what is changed is tried as a new one",
                    node=each.name,
                    line=each.line,
                    host=host,
                )
            self._suspected.add(each.function)

    def compiled(
        self, key: FunctionKey, host: str, temporary: int, failure: Failure | None
    ) -> set[int]:
        """One host is done; returns the runs that need not wait for this function any more."""
        record = self.records.get(key)
        if record is None:
            return set()
        record.pending.discard(host)
        record.temporary = max(record.temporary, temporary)
        if failure is not None and record.failure is None:
            record.failure = replace(failure, host=failure.host or host)
        if record.pending and record.failure is None:
            return set()
        waiting, record.waiting = record.waiting, set()
        return waiting

    def crosses(self, key: FunctionKey, host: str, nbytes: int) -> None:
        """Each gang of a function brings so many bytes to a host from other islands."""
        if key in self.records:
            self.records[key].crossing[host] = nbytes

    def crossing(self, key: FunctionKey) -> int:
        """Bytes that each gang brings to hosts from other islands."""
        record = self.records.get(key)
        return sum(record.crossing.values()) if record is not None else 0

    def measure(self, key: FunctionKey, times: Sequence[float]) -> None:
        """Gangs of this function took so many seconds of their devices' time."""
        record = self.records.get(key)
        if record is None:
            return
        new = record.measured
        early = times[: max(0, 2 - record.gangs)]
        for seconds in early:  # what only a first gang does is no part of the estimate
            new = min(new, seconds) if record.gangs else seconds
            record.gangs += 1
        for seconds in times[len(early) :] if early else times:
            new += SMOOTHING * (seconds - new)
        record.measured = new
        shown = record.published
        if shown is None or abs(new - shown) > TOLERANCE * shown:
            record.published = new
            self.version += 1

    def seconds(self, key: FunctionKey) -> float:
        """Estimated device seconds of one gang."""
        record = self.records.get(key)
        if record is None or record.published is None:
            return self.assumed
        return record.published

    def microseconds(self, key: FunctionKey | None) -> int:
        """The same, whole ones; a step without a function takes none."""
        return 0 if key is None else round(self.seconds(key) * 1e6)

    def known(self, key: FunctionKey) -> bool:
        """Whether a gang of it was measured."""
        record = self.records.get(key)
        return record is not None and record.gangs > 0

    def forget(self, slice_id: SliceId) -> None:
        """The slice is gone, and its executables with it."""
        for key in [k for k in self.records if k[1] == slice_id]:
            del self.records[key]
