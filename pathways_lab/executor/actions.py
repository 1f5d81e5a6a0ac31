"""Actions: the answers of the launcher, which the driver of a host carries out.

Problem: the decision which step may start is tested without threads and
without JAX.  So the launcher returns *actions*; device queues, the transfer engine
and links carry them out.

Rule for maintainers: plain data.  Slots are shared with the driver on purpose:
a device queue reads and writes their payloads, the launcher never looks into them.

Paper: section 4.5 (asynchronous dispatch on the hosts).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from pathways_lab.core.errors import Failure
from pathways_lab.core.program.program import Plan, Transfer, ValueId
from pathways_lab.executor.local_array import Reader, Slot
from pathways_lab.executor.steps import Key, Segment


@dataclass(frozen=True, slots=True)
class Decision:
    """Asks for a value that decides (see :class:`Serve`): the control plane waits for it.

    step: makes it.  at: which of its values that decide this is.
    """

    run: int
    value: ValueId
    plan: Plan
    step: int
    at: int
    cases: int


@dataclass(slots=True, eq=False)
class Send:
    """The source of a transfer is settled: send its parts, or why there are none."""

    key: Key
    plan: Plan
    node: Transfer
    source: Slot
    failure: Failure | None
    seq: int


@dataclass(slots=True, eq=False)
class Receive:
    """Parts of a transfer will come; they make the payload of *target*."""

    key: Key
    plan: Plan
    node: Transfer
    target: Slot
    seq: int


@dataclass(frozen=True, slots=True)
class CancelReceive:
    """Nobody waits for the parts of this transfer any more."""

    key: Key


@dataclass(slots=True, eq=False)
class Serve:
    """Answer a fetch: the bytes are there.  Tell the launcher when they were read."""

    fetch: Hashable
    slot: Slot
    reader: Reader


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer a fetch: the buffer has no value here, and why."""

    fetch: Hashable
    failure: Failure


@dataclass(slots=True)
class Report:
    """Steps from *first* on are over on this host, one after the other.

    times: device seconds of each.  failures: by step, why it has no results.
    """

    run: int
    first: int
    times: Sequence[float]
    failures: Mapping[int, Failure]


@dataclass(frozen=True, slots=True)
class RunOver:
    """Nothing of this run will happen here any more."""

    run: int


@dataclass(frozen=True, slots=True)
class Broken:
    """The order is not known any more (a grant is missing): the host must end."""

    message: str


Action = Segment | Send | Receive | CancelReceive | Serve | Refuse | Report | RunOver | Broken
"""A segment as an action: hand its gangs to its lane, one after the other."""
