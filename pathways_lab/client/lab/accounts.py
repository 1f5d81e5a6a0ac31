"""The table of what everybody on a lab has used, and may have.

Problem: the control plane counts (:mod:`pathways_lab.core.memory.accounts`); people
want to read it, and to compute with it.

Rule for maintainers: looks only.  The total is the sum of the rows, and nothing
else is ever added to it.

Paper: section 4.1 (shared clusters).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pathways_lab.core.memory.accounts import Account
from pathways_lab.core.memory.quotas import Quota
from pathways_lab.timeline.text_table import Tabled, TextTable
from pathways_lab.transport.codec import unpack

_HEADS = (
    "client",
    "gangs",
    "device seconds",
    "DCN bytes",
    "GB seconds",
    "bytes now",
    "quota of bytes",
    "quota of devices",
)


@dataclass(frozen=True, slots=True, repr=False)
class Accounts(Tabled):
    """The use of each client since the lab began (:class:`Account`), and its quota.

    An Account has ``gangs``, ``device_seconds`` (seconds times devices),
    ``dcn_bytes`` (brought to other islands), ``byte_seconds`` (bytes on all its
    devices, over time) and ``nbytes`` (now).
    """

    clients: dict[str, Account] = field(default_factory=dict)
    quotas: dict[str, Quota] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Sequence[Any]) -> Accounts:
        """From what the control plane answered."""
        found = {name: (unpack(Account, used), unpack(Quota, may)) for name, used, may in rows}
        return cls(
            {name: used for name, (used, _) in found.items()},
            {name: quota for name, (_, quota) in found.items()},
        )

    @property
    def total(self) -> Account:
        """The use of all clients together."""
        total = Account()
        for account in self.clients.values():
            total.add(account)
        return total

    def rows(self) -> list[tuple[str, ...]]:
        """The table as text, whoever used most first, the total last."""
        ranked = sorted(self.clients.items(), key=lambda row: -row[1].device_seconds)
        rows = [_row(name or "(earlier ones)", used, self.quotas[name]) for name, used in ranked]
        return [*rows, _row("total", self.total, Quota())]

    def _table(self) -> TextTable:
        return TextTable(self.rows(), _HEADS, "<>")


def _row(name: str, used: Account, quota: Quota) -> tuple[str, ...]:
    return (
        name,
        f"{used.gangs:,}",
        f"{used.device_seconds:.3f}",
        f"{used.dcn_bytes:,}",
        f"{used.byte_seconds / 1e9:.3f}",
        f"{used.nbytes:,}",
        "" if quota.nbytes is None else f"{quota.nbytes:,}",
        "" if quota.devices is None else f"{quota.devices:,}",
    )
