"""The state of devices in a scene: their work, and the bytes in use on them.

Rule for maintainers: plain and bounded; the scene folds, these only hold.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from pathways_lab.notebook.kernel.line_index import source
from pathways_lab.timeline.gangs import GangKey

KNOWN = 4096
"""Rows of a catalogue."""

CHANGES = 4000
"""Changes of an island's memory that are told from each other."""


class What(NamedTuple):
    """The facts about a bar: one row of the catalogue that hover texts read."""

    node: str
    program: str
    client: str
    line: str


class Catalogue(dict[What, int]):
    """The facts that bars have in common, by their rows; row 0 is a catch-all for those of which
    there is no room for more."""

    def row(self, what: What) -> int:
        """The row for *what*."""
        if not self:
            self[What("several", "", "", "")] = 0
        if what not in self and len(self) < KNOWN:
            self[what] = len(self)
        return self.get(what, 0)

    def columns(self) -> dict[str, list[str]]:
        """All rows, for hover texts."""
        return {
            "node": [what.node or "several" for what in self],
            "program": [what.program or "several programs" for what in self],
            "client": [what.client for what in self],
            "line": [source(what.line) for what in self],
        }


@dataclass(slots=True)
class Waiting:
    """Gangs that a device was handed and has not finished, first in first out."""

    queue: deque[tuple[GangKey, float, What]] = field(default_factory=deque)
    ended: float = float("-inf")

    def over(self, gang: GangKey, time: float) -> None:
        """A gang ended at *time* (seconds)."""
        self.ended = max(self.ended, time)
        for place, (key, _, _) in enumerate(self.queue):
            if key == gang:
                del self.queue[place]
                break

    def head(self) -> tuple[GangKey, float, What] | None:
        """The gang that the device works on, and since when at the earliest (seconds)."""
        if not self.queue:
            return None
        key, launched, what = self.queue[0]
        return key, max(launched, self.ended), what


@dataclass(slots=True)
class Used:
    """Bytes in use on an island's devices.

    Samples of several hosts come in any order, so changes are kept, and added up by time.
    """

    changes: deque[tuple[float, float]] = field(default_factory=deque)
    before: float = 0.0

    def add(self, time: float, change: float) -> None:
        """So many bytes more at *time* (seconds)."""
        self.changes.append((time, change))
        if len(self.changes) > CHANGES:
            self.before += self.changes.popleft()[1]

    def levels(self, until: float) -> tuple[list[float], list[float]]:
        """Times (seconds, in order, none later than *until*) and the bytes in use from then on."""
        times, levels, level = [], [], self.before
        for time, change in sorted(self.changes):
            level += change
            if time <= until:
                times.append(time)
                levels.append(max(0.0, level))
        return times, levels
