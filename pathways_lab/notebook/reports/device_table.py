"""A table of devices: where they are, what they are, who holds them.

Rule for maintainers: a function of what the control plane told.
"""

from __future__ import annotations

from collections.abc import Iterable

from pathways_lab.client.lab.topology_view import Island
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.timeline.records import own
from pathways_lab.timeline.text_table import TextTable

HEAD = ("island", "host", "device", "kind", "memory", "held by", "client")


def device_table(islands: Iterable[Island], slices: Iterable[SliceBinding]) -> TextTable:
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
    return TextTable(rows, HEAD, "<<<<><")
