"""A table of devices: where they are, what they are, who holds them.

Rule for maintainers: a function of what the control plane told.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from pathways_lab.client.lab.topology_view import Island
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.timeline.records import own

HEAD = ("island", "host", "device", "kind", "memory", "held by", "client")
Row = tuple[str, ...]


class DeviceTable:
    """Rows of devices, as text and as HTML."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)

    def __repr__(self) -> str:
        rows = [HEAD, *self.rows]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
        return "\n".join(
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )

    def _repr_html_(self) -> str:
        def line(row: Row, tag: str) -> str:
            cells = "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in row)
            return f"<tr>{cells}</tr>"

        body = "".join(line(row, "td") for row in self.rows)
        return f"<table><thead>{line(HEAD, 'th')}</thead><tbody>{body}</tbody></table>"


def device_table(islands: Iterable[Island], slices: Iterable[SliceBinding]) -> DeviceTable:
    """One row per device.  slices: all that are bound, of all clients."""
    holders: dict[tuple[str, int], tuple[str, str]] = {}
    for binding in slices:
        sizes = "×".join(str(size) for size in binding.shape)
        name = f"slice s{own(binding.slice)} ({sizes}: {', '.join(binding.axes)})"
        for device in binding.devices:
            holders[device] = (name, binding.client)
    rows = []
    for island in islands:
        for host in island.hosts:
            kind = host.kind.upper() + (" (emulated)" if host.emulated else "")
            memory = f"{host.memory / 2**20:,.0f} MiB"
            for number in range(host.devices):
                holder = holders.get((host.name, number), ("free", ""))
                place = host.name.rsplit("/", 1)[-1]
                rows.append((island.name, place, str(number), kind, memory, *holder))
    return DeviceTable(rows)
