"""The result of a simulation: a timeline like a real one.

Problem: a simulated run must be read, drawn and compared like a real one, and
nobody may take it for one.

Rule for maintainers: all numbers are computed from the records, by the
questions that real timelines are asked.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pathways_lab.core.diagnosis.wait_cycles import Wait
from pathways_lab.core.errors import Failure
from pathways_lab.sim.machine import Costs, Machine
from pathways_lab.sim.world import World
from pathways_lab.timeline import queries
from pathways_lab.timeline.busy import utilisation
from pathways_lab.timeline.log import Recording, Timeline
from pathways_lab.timeline.records import Record, Span
from pathways_lab.timeline.text_table import TextTable


@dataclass(frozen=True)
class Simulated:
    """A simulation, and what came of it.  Times are seconds from its beginning.

    records: what happened.  ended: by run, when, and why it failed if it did.
    start, end: of the first submission, and of the last run's end.
    events: how many the control plane handled.
    open: runs that never ended, or were never submitted, for there were no devices any more.
    world: everything, for whoever wants to look closer.
    """

    records: tuple[Record, ...]
    ended: Mapping[int, tuple[float, Failure | None]]
    start: float
    end: float
    events: int
    open: int
    world: World

    @property
    def seconds(self) -> float:
        """The makespan: from the first submission to the end of the last run."""
        return self.end - self.start

    @property
    def machine(self) -> Machine:
        """The machine that was simulated."""
        return self.world.machine

    @functools.cached_property
    def timeline(self) -> Timeline:
        """The same timeline that a real lab has; its clock stands at the end."""
        last = max((queries.time_of(r) for r in self.records), default=0.0)
        made = Timeline(max(1, len(self.records)), clock=lambda: max(last, self.end))
        made.extend(self.records)
        made.end()
        return made

    @property
    def recording(self) -> Recording:
        """All of it, for ``pw.compare_timelines``."""
        made = Recording(self.timeline)
        made.start, made.end = self.start, self.end
        return made

    @functools.cached_property
    def stuck(self) -> tuple[Wait, ...]:
        """The cycle in which gangs wait for each other for ever, or ()."""
        return self.world.stuck() if self.open else ()

    def story(self) -> str:
        """The waits that never end, a line each; "" when everything ended."""
        runs = self.world.control.state.runs

        def name(gang: object) -> str:
            run = runs.get(gang[0]) if isinstance(gang, tuple) else None
            return run.index.plan.name if run is not None else str(gang)

        def place(at: object) -> str:
            return f"{at[0]} device {at[1]}" if isinstance(at, tuple) else str(at)

        return "\n".join(
            f"{name(w.gang)} waits for its turn on {place(w.at)}, which {name(w.behind)} holds"
            if w.behind is not None
            else f"{name(w.gang)} waits for a part of it that {place(w.at)} was never told of"
            for w in self.stuck
        )

    def busy(self, since: float = 0.0) -> dict[str, float]:
        """Device seconds by client, of gangs that began after *since*."""
        found: dict[str, float] = {}
        for r in self.records:
            if isinstance(r, Span) and r.kind == "gang" and r.start >= since:
                found[r.client] = found.get(r.client, 0.0) + (r.end - r.start) * len(r.devices)
        return found

    def utilisation(self) -> dict[str, float]:
        """Busy share (0 to 1) of all devices of each island, over the makespan."""
        machine = self.machine
        found = {island: 0.0 for _, island in machine.hosts()}
        if self.end > self.start:
            for lane, share in utilisation(self.records, self.start, self.end).items():
                found[lane.island] += share
        count = Counter[str]()
        for _, island in machine.hosts():
            count[island] += machine.of(island).devices_per_host
        return {island: held / count[island] for island, held in found.items()}

    def facts(self) -> tuple[tuple[str, str], ...]:
        """The most important results, in words."""
        machine = self.machine
        failed = sum(failure is not None for _, failure in self.ended.values())
        runs = f"{len(self.ended)} ended"
        runs += f", {failed} of them failed" if failed else ""
        runs += f", {self.open} never" if self.open else ""
        busy = self.utilisation()
        shown = ", ".join(f"{name} {share:.0%}" for name, share in list(busy.items())[:8])
        shown += f" and {len(busy) - 8} more" if len(busy) > 8 else ""
        costs = "default costs" if machine.costs == Costs() else f"costs {machine.origin}"
        found = [
            ("machine", f"{machine.devices:,} devices ({machine.size}), {costs}"),
            ("makespan", f"{self.seconds:.6g} s"),
            ("devices busy", shown),
            ("runs", runs),
        ]
        if self.open:
            found.append(("stuck", self.story().replace("\n", "; ") or "no gang waits for another"))
        return tuple(found)

    def __repr__(self) -> str:
        return "<simulated: " + "; ".join(f"{k} {v}" for k, v in self.facts()) + ">"

    def _repr_html_(self) -> str:
        return TextTable(self.facts(), caption="simulated")._repr_html_()
