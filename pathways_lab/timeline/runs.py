"""The table of runs: who submitted which, and when each had its first place, began and ended.

Problem: how long runs wait under a policy is asked of labs and of simulations alike, and
nobody wants to gather it from records.

Rule for maintainers: folded from records, in columns where they come so; what no record says
is None, and nothing is guessed.

Paper: section 4.4 (policies), section 5.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, overload

from pathways_lab.timeline.export.frame import made_of
from pathways_lab.timeline.packed import Granted, Item, Packed, Row
from pathways_lab.timeline.records import ENDS, Event, Span, own
from pathways_lab.timeline.text_table import Tabled, TextTable

SHOWN = 40
"""Rows of the table as text: the newest."""


@dataclass(slots=True)
class RunTimes:
    """One run.  Times are seconds on the records' clock, None where no record says.

    run: its number in the records.  priority: that it was submitted with.
    data: what its client said of it (``pw.program(data=...)``).
    submitted: when the control plane had it.  granted: its first gang had its place.
    begun: its first computation.  ended: and with which *outcome*: ``"finished"``,
    ``"failed"``, ``"cancelled"``; "" while it goes on.
    """

    run: int
    client: str = ""
    program: str = ""
    priority: int | None = None
    data: dict[str, Any] | None = None
    submitted: float | None = None
    granted: float | None = None
    begun: float | None = None
    ended: float | None = None
    outcome: str = ""

    @property
    def waited(self) -> float | None:
        """Seconds from its submission to its first computation."""
        return _between(self.submitted, self.begun)

    @property
    def seconds(self) -> float | None:
        """Seconds from its submission to its end."""
        return _between(self.submitted, self.ended)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


class Runs(Sequence[RunTimes], Tabled):
    """Runs in the order of their submission.  ``print(runs)``, ``runs.to_dataframe()``."""

    def __init__(self, rows: Iterable[RunTimes]) -> None:
        def first(row: RunTimes) -> float:
            known = (row.submitted, row.granted, row.begun, row.ended)
            return min((time for time in known if time is not None), default=0.0)

        self._rows = sorted(rows, key=first)
        self._origin = first(self._rows[0]) if self._rows else 0.0

    @overload
    def __getitem__(self, at: int) -> RunTimes: ...

    @overload
    def __getitem__(self, at: slice) -> Runs: ...

    def __getitem__(self, at: int | slice) -> RunTimes | Runs:
        return Runs(self._rows[at]) if isinstance(at, slice) else self._rows[at]

    def __len__(self) -> int:
        return len(self._rows)

    def to_dataframe(self) -> Any:
        """A pandas frame: a row per run, columns as in :class:`RunTimes`.

        Raises ModuleNotFoundError where pandas is not installed.
        """
        names = [*(field.name for field in fields(RunTimes)), "waited", "seconds"]
        return made_of({name: [getattr(row, name) for row in self._rows] for name in names})

    def rows(self) -> list[tuple[str, ...]]:
        """The newest as text, below their heads; times in seconds since the first submission."""

        def time(at: float | None) -> str:
            return "" if at is None else f"{at - self._origin:.4f}"

        heads = ("run", "client", "program", "priority", "submitted", "granted", "begun", "ended")
        body = [
            (
                str(own(row.run)), row.client, row.program,
                "" if row.priority is None else str(row.priority),
                time(row.submitted), time(row.granted), time(row.begun), time(row.ended),
                row.outcome,
            )
            for row in self._rows[-SHOWN:]
        ]  # fmt: skip
        return [(*heads, "outcome"), *body]

    def _table(self) -> TextTable:
        more = len(self._rows) - SHOWN
        earlier = f"{more:,} earlier runs are not shown" if more > 0 else ""
        heads, *rows = self.rows()
        return TextTable(rows, heads, "><<>>>>><", earlier)


def runs(items: Iterable[Item]) -> Runs:
    """The table of all runs that *items* speak of."""
    found: dict[int, RunTimes] = {}

    def row(item: Event | Span | Packed, client: str) -> RunTimes:
        run = found.get(item.run)
        if run is None:
            run = found[item.run] = RunTimes(item.run)
        run.client, run.program = run.client or client, run.program or item.program
        return run

    for item in items:
        if isinstance(item, Granted):
            run = row(item, item.placing.client)
            run.granted = _earliest(run.granted, item.time)
        elif isinstance(item, Row):
            run = row(item, item.abouts[0].client)
            run.begun = _earliest(run.begun, item.begun)
        elif isinstance(item, Span):
            if item.run and item.kind == "gang":
                run = row(item, item.client)
                run.begun = _earliest(run.begun, item.start)
        elif isinstance(item, Event) and item.run:
            if item.kind == "submitted":
                run = row(item, item.client)
                run.submitted = item.time
                run.priority, run.data = item.args.get("priority"), item.args.get("data")
            elif item.kind == "granted":
                run = row(item, item.client)
                run.granted = _earliest(run.granted, item.time)
            elif item.kind in ENDS:
                run = row(item, item.client)
                run.ended, run.outcome = item.time, item.kind
    return Runs(found.values())


def _earliest(known: float | None, time: float) -> float:
    return time if known is None else min(known, time)
