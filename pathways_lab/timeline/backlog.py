"""Gangs of submitted runs that have no place yet: what is still to come.

Problem: places are granted a little ahead of the devices, so a count of granted gangs
says "27 of 29 done" where a loop has submitted a hundred.  A reader wants to know how
much of what was submitted is done.

Rule for maintainers: a run counts from its submission to its end, with the computations
of its program; runs whose program or submission is not known count nothing.

Paper: section 4.5 (a client submits ahead of the devices).
"""

from __future__ import annotations

from pathways_lab.timeline.flow import Flows
from pathways_lab.timeline.records import ENDS, Event, Record


class Backlog:
    """Folds records into what is still to come.

    gangs: without a place, of runs that are not over.
    """

    def __init__(self, flows: Flows) -> None:
        self._flows = flows
        self._left: dict[int, int] = {}
        self.gangs = 0

    def add(self, record: Record) -> None:
        """Fold one record; *flows* has it already."""
        if not isinstance(record, Event) or not record.run:
            return
        if record.kind == "submitted":
            flow = self._flows.run(record.run)
            calls = sum([not stage.transfer for stage in flow])
            self.gangs += calls - self._left.pop(record.run, 0)
            if calls:
                self._left[record.run] = calls
        elif record.kind == "granted" and not record.args.get("again"):
            self.placed(record.run, 1)
        elif record.kind in ENDS:
            self.gangs -= self._left.pop(record.run, 0)

    def placed(self, run: int, count: int) -> None:
        """So many gangs of a run have their places."""
        left = self._left.pop(run, 0)
        now = max(0, left - count)
        self.gangs -= left - now
        if now:
            self._left[run] = now

    def lose(self) -> None:
        """Records are missing: nobody can tell of what is left."""
        self._left.clear()
        self.gangs = 0
