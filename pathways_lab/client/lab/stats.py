"""Counters of what the client does, for tests and for the curious.

Problem: "the second run lowers nothing" and "one message per run" are promises
that must be counted, not believed.

Rule for maintainers: plain integers, incremented where the work is done; no
decision reads them.

Paper: section 4.2 (re-lowering only when the mapping changed).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Work:
    """Counters of this kernel since it started.

    captured: programs captured.  traced: compiled functions run with stand-ins.
    lowered: programs lowered to plans.  exported: functions turned into code.
    """

    captured: int = 0
    traced: int = 0
    lowered: int = 0
    exported: int = 0


work = Work()
"""The one counter of this kernel: capture and lowering need no lab."""


@dataclass(frozen=True)
class Stats:
    """A snapshot: :class:`Work`, and what one lab's connection has carried.

    sent: messages to the control plane by kind (``"submit"``, ``"function"`` ...).
    received: messages from it by kind.
    uploads, fetches: messages to and from hosts that carried values.
    runs: programs run.  compiled: functions compiled on hosts for this client.
    """

    captured: int
    traced: int
    lowered: int
    exported: int
    runs: int = 0
    compiled: int = 0
    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    uploads: int = 0
    fetches: int = 0


@dataclass
class Traffic:
    """Counters of one connection."""

    runs: int = 0
    uploads: int = 0
    fetches: int = 0
    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)

    def snapshot(self, compiled: int = 0) -> Stats:
        """The counters as they are now."""
        return Stats(
            **dataclasses.asdict(work),
            runs=self.runs,
            compiled=compiled,
            sent=dict(self.sent),
            received=dict(self.received),
            uploads=self.uploads,
            fetches=self.fetches,
        )
