"""Heat: which share of a host's devices computed, at each moment of what is shown.

Problem: a row for each of hundreds of hosts has no room, and a row for all hosts of an island
hides the one that all others wait for.  Strips of a few pixels show both, as intensity.

Rule for maintainers: computations are kept as they were told, for as long as the window is, and
binned when they are drawn, so that a strip is as sharp as what is shown is short.  The newest
:data:`MOST` are kept; an older part of a strip is empty, and not wrong.

Paper: section 5.3 (2,048 devices).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pathways_lab.notebook.scene.table import Table
from pathways_lab.timeline.busy import poured
from pathways_lab.timeline.columns import Floats, times
from pathways_lab.timeline.machine import Lane
from pathways_lab.timeline.packed import Item, Row
from pathways_lab.timeline.records import Span

MOST = 200_000
"""Computations on a host that are kept."""

HostKey = tuple[str, str]
"""An island, and the name of a host of it."""


class Heat:
    """The newest computations of all hosts."""

    def __init__(self) -> None:
        self._hosts: dict[HostKey, int] = {}
        self._table = Table(
            {"host": np.int32, "start": np.float64, "end": np.float64, "devices": np.float64}
        )

    def add(self, items: Iterable[Item]) -> None:
        """Fold what has become known."""
        new: list[tuple[int, float, float, int]] = []
        for item in items:
            if isinstance(item, Row):
                host, when = self._number(item.island, item.host), times(item)
                spans = zip(when.start.tolist(), when.end.tolist(), strict=True)
                new += [(host, *span, len(item.abouts[0].devices)) for span in spans]
            elif isinstance(item, Span) and item.kind == "gang":
                host = self._number(item.island, item.host)
                new.append((host, item.start, item.end, len(item.devices)))
        if new:
            columns = np.array(new).T
            self._table.append(dict(zip(("host", "start", "end", "devices"), columns, strict=True)))

    def _number(self, island: str, host: str) -> int:
        return self._hosts.setdefault((island, host), len(self._hosts))

    def forget_before(self, time: float) -> None:
        """Drop the oldest that ended before *time* (seconds), and what is too many."""
        ends = self._table.columns()["end"].astype(np.float64)
        over = np.flatnonzero(ends >= time)
        old = int(over[0]) if len(over) else len(ends)
        self._table.drop(max(old, len(ends) - MOST))

    def seconds(
        self, edges: Floats, running: Iterable[tuple[Lane, float]] = ()
    ) -> dict[HostKey, Floats]:
        """Device seconds of every host that computed, in each part between *edges* (seconds).

        running: devices that compute, and since when.
        """
        begin, end = float(edges[0]), float(edges[-1])
        columns = self._table.columns()
        host, devices = columns["host"].astype(np.int64), columns["devices"].astype(np.float64)
        start, until = (columns[name].astype(np.float64) for name in ("start", "end"))
        more = [(self._number(lane.island, lane.host), since) for lane, since in running]
        if more:
            late = np.array(more)
            host = np.concatenate((host, late[:, 0].astype(np.int64)))
            start = np.concatenate((start, late[:, 1]))
            until = np.concatenate((until, np.full(len(more), end)))
            devices = np.concatenate((devices, np.ones(len(more))))
        seen = (until > begin) & (start < end) & (until > start)
        if not seen.any():
            return {}
        host, devices = host[seen], devices[seen]
        start, until = np.maximum(start[seen], begin), np.minimum(until[seen], end)
        # All hosts one after the other on one axis, each as long as what is shown: one pass.
        length, count = end - begin, len(self._hosts)
        after = length * np.arange(count)[:, None] + (edges - begin)[None, :]
        shift = length * host - begin
        held = poured(after.ravel(), start + shift, until + shift, devices)
        held = np.append(held, 0.0).reshape(count, len(edges))[:, :-1]
        return dict(zip(self._hosts, held, strict=True))
