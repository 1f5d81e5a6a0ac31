"""Quotas: how much of a shared lab one client may have at a time.

Problem: thirty students share the devices of one lab, and one of them asks for
all.  An owner of the lab gives limits, for one client or for everybody who has
none of his own: on *devices* (those of slices that a client holds, each slice
counting) and on *bytes* (what the ledger counts for it, on all devices
together, see :mod:`pathways_lab.core.memory.accounts`).

This module decides only whether a limit stands against a request.  A request that the
limit can never hold is refused with the numbers.  A request that it cannot hold now waits:
slices in line (:mod:`pathways_lab.core.slices.slice_queue`), runs and uploads with the
others that wait for memory (:mod:`pathways_lab.core.scheduling.admission`).

Rule for maintainers: a limit never takes anything away from a client.  Only the module
that gives asks it, before it gives.

Paper: section 4.1 (resource manager: policies for allocation are future work there).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pathways_lab.core.errors import Failure
from pathways_lab.core.memory.accounts import Accounts
from pathways_lab.core.memory.ledger import Ledger
from pathways_lab.core.memory.liveness import Need

MORE = "ask an owner of the lab for more: lab.quota({client!r}, {what}=...)"


@dataclass(frozen=True, slots=True)
class Quota:
    """devices: of all slices together.  nbytes: on all devices together.  None: no limit."""

    devices: int | None = None
    nbytes: int | None = None


@dataclass(slots=True)
class Quotas:
    """usual: for clients that have no quota of their own.  own: by client."""

    accounts: Accounts
    usual: Quota = Quota()
    own: dict[str, Quota] = field(default_factory=dict)
    enforced: bool = True
    """See Rules.quotas."""
    on_bytes: bool = False
    """Whether there is any limit on bytes to look at."""

    def of(self, client: str) -> Quota:
        """The limits that hold for a client."""
        return self.own.get(client, self.usual)

    def give(self, client: str, quota: Quota) -> None:
        """For one client, or ("") for those that have none of their own."""
        if client:
            self.own[client] = quota
        else:
            self.usual = quota
        limits = [q.nbytes for q in (self.usual, *self.own.values())]
        self.on_bytes = self.enforced and any(most is not None for most in limits)

    def lacks(self, client: str, nbytes: int) -> bool:
        """Whether so many more bytes are more than a client may have now."""
        most = self.of(client).nbytes
        return most is not None and self.accounts.of(client).nbytes + nbytes > most

    def never(self, client: str, nbytes: int, what: str) -> Failure | None:
        """Why a client can never have so many bytes at a time, or None."""
        most = self.of(client).nbytes
        if not self.enforced or most is None or nbytes <= most:
            return None
        return Failure(
            "memory",
            f"{what} needs {nbytes:,} bytes on all its devices together, and the quota of"
            f" {client} is {most:,}",
            "donate inputs or run smaller programs, or " + MORE.format(client=client, what="bytes"),
        )

    def too_many(self, client: str, devices: int) -> Failure | None:
        """Why a client can never have so many devices at a time, or None."""
        most = self.of(client).devices
        if not self.enforced or most is None or devices <= most:
            return None
        return Failure(
            "refused",
            f"{devices} devices are more than the quota of {client}, which is {most}",
            "ask for fewer, or " + MORE.format(client=client, what="devices"),
        )


def bytes_of(need: Need, ledger: Ledger) -> int:
    """The bytes that an entry takes on all devices together when it is admitted."""
    return sum([line[0] * ledger.cells[cell].devices for cell, line in need])
