"""The ends of steps on one host, gathered for its next report.

Problem: gangs end one by one, and a message costs as much as a gang; the control plane
settles many gangs as cheaply as one when they come in one stretch.

Rule for maintainers: steps stay in the order in which they ended.

Paper: section 4.5 (batched host-to-controller messages).
"""

from __future__ import annotations

from pathways_lab.core.errors import Failure
from pathways_lab.executor.actions import Report


class Ends:
    """The ends and failures of a :class:`pathways_lab.core.messages.HostReport`."""

    def __init__(self) -> None:
        self._ended: list[tuple[int, int, list[float]]] = []
        self.failed: list[tuple[int, int, Failure]] = []

    def __bool__(self) -> bool:
        return bool(self._ended)

    def add(self, report: Report) -> None:
        """Steps are over."""
        run, first, times = self._ended[-1] if self._ended else (0, 0, [])
        if run == report.run and first + len(times) == report.first:
            times += report.times
        else:
            self._ended.append((report.run, report.first, list(report.times)))
        self.failed += [(report.run, step, why) for step, why in report.failures.items()]

    @property
    def ended(self) -> tuple[tuple[int, int, tuple[float, ...]], ...]:
        """Run, first step and device seconds of each, of steps one after the other."""
        return tuple([(run, first, tuple(times)) for run, first, times in self._ended])
