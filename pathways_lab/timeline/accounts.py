"""Accounts: what each client has used, from the records of what happened.

Problem: on a shared lab somebody asks who used how much, and the answers of all
must add up to what the machine did.

How: one pass over the records.  Device seconds are those for which a gang held
devices; DCN bytes are those that arrived from hosts of another island, counted
where they arrived.  Both belong to the client of the run.

Rule for maintainers: every gang and every transfer belongs to exactly one row,
also when nobody knows its client any more (``""``), so that rows add up.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass, field

from pathways_lab.timeline.records import Record, Span

_HEADS = ("client", "gangs", "device seconds", "DCN bytes")


@dataclass(slots=True)
class Account:
    """What one client has used.

    gangs: counted once for each host that took part.  device_seconds: seconds times
    devices.  dcn_bytes: bytes that arrived from other islands.
    """

    gangs: int = 0
    device_seconds: float = 0.0
    dcn_bytes: int = 0


@dataclass(slots=True)
class Accounts:
    """A row for each client that used anything, and what all used together.

    missing: records of which nothing is known any more (they were pushed out).
    """

    clients: dict[str, Account] = field(default_factory=dict)
    total: Account = field(default_factory=Account)
    missing: int = 0

    def rows(self) -> list[tuple[str, str, str, str]]:
        """The table as text, whoever used most first, the total last."""
        ranked = sorted(self.clients.items(), key=lambda row: -row[1].device_seconds)
        named = [(name or "(unknown)", account) for name, account in ranked]
        return [
            (name, f"{used.gangs:,}", f"{used.device_seconds:.3f}", f"{used.dcn_bytes:,}")
            for name, used in (*named, ("total", self.total))
        ]

    def __str__(self) -> str:
        table = [_HEADS, *self.rows()]
        widths = [max(len(row[column]) for row in table) for column in range(len(_HEADS))]
        lines = [
            "  ".join(
                row[0].ljust(widths[0]) if not at else text.rjust(widths[at])
                for at, text in enumerate(row)
            )
            for row in table
        ]
        return "\n".join(lines + ([self._note()] if self.missing else []))

    def _note(self) -> str:
        return f"({self.missing:,} older records are not known any more, and not counted)"

    def _repr_html_(self) -> str:
        heads = "".join(f"<th>{head}</th>" for head in _HEADS)
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(text)}</td>' for text in row)}</tr>"
            for row in self.rows()
        )
        note = f"<caption>{self._note()}</caption>" if self.missing else ""
        return f"<table>{note}<tr>{heads}</tr>{body}</table>"


def accounts_of(records: Iterable[Record], missing: int = 0) -> Accounts:
    """What each client used, and all together.  missing: records that are not among these."""
    records = tuple(records)
    island_of = {r.host: r.island for r in records if r.host and r.island}
    found = Accounts(missing=missing)
    for span in records:
        if not isinstance(span, Span) or span.kind not in ("gang", "transfer"):
            continue
        account = found.clients.setdefault(span.client, Account())
        for row in (account, found.total):
            if span.kind == "gang":
                row.gangs += 1
                row.device_seconds += (span.end - span.start) * len(span.devices)
            elif _over_dcn(span, island_of):
                row.dcn_bytes += int(span.args.get("nbytes", 0))
    return found


def _over_dcn(span: Span, island_of: dict[str, str]) -> bool:
    """Whether a transfer came from another island.  All its sources are on one."""
    sources = str(span.args.get("source", "")).split(", ")
    return any(island_of.get(host, "") not in ("", span.island) for host in sources)
