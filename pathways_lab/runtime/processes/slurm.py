"""Asks Slurm how jobs are.

Problem: a job that is killed says nothing itself: not that its memory was too little, not that its
time was over.  Its scheduler knows.

Rule for maintainers: Slurm is asked rarely, for everybody asks it; where it cannot be asked,
nothing is known of the jobs.

Paper: section 4.1 (a resource manager below Dask owns the machines).
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Collection

from pathways_lab.runtime.processes import job
from pathways_lab.runtime.processes.job import State, states_of

LIMIT = 5.0
"""Seconds for an answer."""
_AGAIN = 0.25
"""Seconds after which a job that has just lost a process is asked for once more."""
_END = 4096
"""Bytes at the end of a job's log that are read."""


def ask(numbers: Collection[str], limit: float = LIMIT) -> dict[str, State]:
    """How the jobs of these numbers are; nothing where Slurm cannot be asked."""
    if not numbers:
        return {}
    states = ("squeue", "--noheader", "--states=all", "--format=%i %T %r", "--jobs")
    return states_of(_told(limit, *states, ",".join(sorted(numbers))))


def explain(number: str) -> str:
    """Why a job has ended, or ends, in a sentence; "" where Slurm does not say within a second."""
    state = None
    for pause in (_AGAIN, 0.0):
        state = ask([number], _AGAIN).get(number)
        if state is None:
            return ""
        if why := state.why_ended(number) or (state.ended and job.why_killed(number, _log(number))):
            return why
        time.sleep(pause)
    return f"its job {number} has ended ({state})" if state is not None and state.ended else ""


def _log(number: str) -> str:
    """The end of a job's log, where this machine sees the file."""
    shown = _told(_AGAIN, "scontrol", "--oneliner", "show", "job", number)
    found = re.search(r" StdErr=(\S+)", shown)
    if found is None:
        return ""
    with contextlib.suppress(OSError), open(found[1], "rb") as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - _END))
        return log.read().decode(errors="replace")
    return ""


def _told(limit: float, *command: str) -> str:
    try:
        told = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return told.stdout.decode(errors="replace")
