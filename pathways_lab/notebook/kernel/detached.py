"""Cells whose runs go on without their kernel, and the next kernel, which finds them again.

Problem: a kernel that restarts in the middle of a long run loses names and picture, though the run
goes on (:mod:`pathways_lab.core.slices.keeping`).  The names that the cell assigns are kept under
the name of its program, and the lab's records say when the run began and what it consists of.

Rule for maintainers: shows nothing itself; what the records have lost is left out.

Paper: none.
"""

from __future__ import annotations

from typing import Any

from pathways_lab.client.lab.lab import Lab
from pathways_lab.notebook.kernel.cell_runner import Done, handles_in
from pathways_lab.timeline import flow
from pathways_lab.timeline.records import Event


def detach(lab: Lab, name: str, done: Done) -> None:
    """Have a run go on without this kernel, and keep what the cell assigned under a name."""
    lab.detach(**{name: {key: each for key, each in done.assigned.items() if _holds(each)}})


def _holds(value: Any) -> bool:
    return next(handles_in(value), None) is not None


def attach(lab: Lab, name: str) -> Done:
    """Handles of this kernel's to everything that is kept under a name, and the run that makes it.

    Raises PathwaysError: nothing is kept under this name, or why its run has failed.
    """
    value = lab.kept[name]
    names = isinstance(value, dict) and all(str(key).isidentifier() for key in value)
    done = Done(assigned=dict(value) if names else {name: value})
    done.buffers = [handle.pending for handle in handles_in(value)]
    for run in reversed(lab.timeline.runs):
        if (run.client, run.program) == (lab.name, name):
            done.runs, done.since = frozenset([run.run]), run.submitted
            done.gangs = _gangs(lab.timeline.kept, run.run)
            break
    return done


def _gangs(records: tuple[Event, ...], run: int) -> int:
    """How many gangs a run has; 0: that is not known any more."""
    key = next((r.args["plan"] for r in records if r.kind == "submitted" and r.run == run), "")
    plans = (r for r in records if r.kind == "plan" and r.args["plan"] == key)
    return sum(not stage.transfer for plan in plans for stage in flow.read(plan))
