"""The first late gang of a stalled lab, and the hosts that have not ended it.

Problem: a cluster that stands still looks the same from everywhere.  The
control plane knows the order, so it can name the first gang that is late and
the hosts that it waits for, with the user's line.

Rule for maintainers: asked for, never computed on the way; the driver says how
long is late, for it knows the usual times.

Paper: section 4.4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pathways_lab.core.program.program import Line
from pathways_lab.core.scheduling.runs import RunRecord
from pathways_lab.core.state import State

GangId = tuple[int, int]
"""Run and step."""


@dataclass(frozen=True, slots=True)
class Overdue:
    """A granted step that has not ended.  hosts: that have not reported it.

    since: seconds since it was granted.  ready: everything that it depends on
    has ended, so it is this step that is late and not an earlier one.
    needs: granted and unfinished steps whose results it reads, also of other runs.
    """

    run: int
    client: str
    program: str
    step: int
    node: str
    line: Line
    hosts: tuple[str, ...]
    since: float
    ready: bool
    needs: tuple[GangId, ...] = ()

    @property
    def id(self) -> GangId:
        return self.run, self.step


def overdue(state: State, seconds: float, now: float) -> tuple[Overdue, ...]:
    """Steps granted at least so long before *now* that hosts have not reported, oldest first."""
    found = []
    for run in state.runs.values():
        index = run.index
        for step, mask in run.waiting.items():
            granted = next(time for last, time in run.granted if step < last)
            if not mask or now - granted < seconds:
                continue
            node = index.plan.steps[step].node
            hosts = tuple(h for h in index.step_hosts[step] if index.bits[h] & mask)
            found.append(
                Overdue(
                    run.id,
                    run.client,
                    index.plan.name,
                    step,
                    node.name,
                    node.line,
                    hosts,
                    now - granted,
                    run.left[step] == 1,
                    tuple(_needs(state, run, step)),
                )
            )
    return tuple(sorted(found, key=lambda o: (-o.since, o.run, o.step)))


def _needs(state: State, run: RunRecord, step: int) -> Iterator[GangId]:
    for producer in run.index.producers[step]:
        if run.waiting.get(producer):
            yield run.id, producer
    for p, readers in enumerate(run.index.readers):
        buffer = run.inputs[p]
        maker = state.runs.get(buffer.maker) if buffer is not None and step in readers else None
        if maker is None:
            continue
        for number, made in enumerate(maker.outputs):
            if made is buffer:
                steps = (s for s, results in enumerate(maker.index.results) if number in results)
                yield from ((maker.id, s) for s in steps if maker.waiting.get(s))
