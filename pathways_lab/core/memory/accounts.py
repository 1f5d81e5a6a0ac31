"""Accounts: the use of every client, counted where it is decided.

Problem: days later somebody asks which client of a shared lab used how much, and
all answers must add up to the work of the machine.  Newer records push out older
ones; so the sums are kept here, as work is done.

* *bytes*: what the ledger counts for a client, on all devices together: buffers
  that it keeps and memory that is reserved for its runs; over time they make
  byte seconds.  A buffer that others have taken is still its maker's.
* *device seconds*: seconds for which its gangs held devices, times devices.
* *DCN bytes*: what its transfers, and its collectives over islands, brought to hosts of
  other islands.

Rule for maintainers: constant work per change, no matter how many clients there
are; everything belongs to exactly one row, so rows add up.

Paper: section 4.1 (shared clusters); the paper has no accounts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

_ROWS = 1000
"""Clients that have a row of their own; the oldest ones without bytes share the row ""."""


@dataclass(slots=True)
class Account:
    """The use of one client.

    gangs, device_seconds, dcn_bytes: of what has ended.
    nbytes: counted now, on all devices; byte_seconds: over time, up to *since*.
    """

    gangs: int = 0
    device_seconds: float = 0.0
    dcn_bytes: int = 0
    nbytes: int = 0
    byte_seconds: float = 0.0
    since: float = 0.0

    def settle(self, time: float) -> None:
        """Count the bytes up to now."""
        self.byte_seconds += self.nbytes * (time - self.since)
        self.since = time

    def add(self, other: Account) -> None:
        """Put another's use, up to the same time, on this row."""
        self.gangs += other.gangs
        self.device_seconds += other.device_seconds
        self.dcn_bytes += other.dcn_bytes
        self.nbytes += other.nbytes
        self.byte_seconds += other.byte_seconds


@dataclass(slots=True)
class Accounts:
    """A row for each client.  time: of the event at hand."""

    rows: dict[str, Account] = field(default_factory=dict)
    time: float = 0.0

    def of(self, client: str) -> Account:
        """The row of a client."""
        row = self.rows.get(client)
        return row if row is not None else self._open(client)

    def change(self, client: str, nbytes: int) -> None:
        """The ledger counts more bytes (or fewer, when negative) for a client."""
        row = self.rows.get(client) or self._open(client)
        row.byte_seconds += row.nbytes * (self.time - row.since)
        row.since = self.time
        row.nbytes += nbytes

    def recount(self, nbytes: Mapping[str, int]) -> None:
        """Devices have come or gone: what every client has now, nothing where it is missing."""
        for client in {*self.rows, *nbytes}:
            row = self.of(client)
            if row.nbytes != nbytes.get(client, 0):
                row.settle(self.time)
                row.nbytes = nbytes.get(client, 0)

    def gang(self, client: str, device_seconds: float, gangs: int = 1) -> None:
        """A gang has ended, or several."""
        row = self.rows.get(client) or self._open(client)
        row.gangs += gangs
        row.device_seconds += device_seconds

    def moved(self, client: str, nbytes: int) -> None:
        """A transfer between islands has ended, or gangs that compute over them."""
        self.of(client).dcn_bytes += nbytes

    def statement(self, now: float) -> dict[str, Account]:
        """A copy of all rows, with bytes counted up to *now*."""
        found = {client: replace(row) for client, row in self.rows.items()}
        for row in found.values():
            row.settle(now)
        return found

    def _open(self, client: str) -> Account:
        if len(self.rows) >= _ROWS and client:
            oldest = next((c for c, row in self.rows.items() if c and not row.nbytes), "")
            if oldest:
                self.of("").add(self.rows.pop(oldest))
        row = self.rows[client] = Account(since=self.time)
        return row
