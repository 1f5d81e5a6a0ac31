"""Waits for the workers that a Dask cluster was asked for, and says who is missing, and why.

Problem: workers come when their machines, or a queue, let them.  A lab that is made with the first
of three has a third of its devices.  A job that waits in a queue is no error; one that has ended
before its worker came is one at once.

How: the cluster object knows which workers it was asked for, and the jobs that it has submitted;
Slurm says how these are.

Rule for maintainers: Slurm is asked rarely (:mod:`pathways_lab.runtime.processes.slurm`).

Paper: section 4.1 (a resource manager below Dask owns the machines).
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Literal

from pathways_lab.core.errors import PathwaysError, refused
from pathways_lab.runtime.cluster import dask_private
from pathways_lab.runtime.cluster.scheduler_probe import PATIENCE, waiting
from pathways_lab.runtime.processes.job import State
from pathways_lab.runtime.processes.slurm import ask
from pathways_lab.runtime.processes.start_progress import Tell

if TYPE_CHECKING:
    import distributed

WORKER_SECONDS = 60.0
"""For so long a first worker is waited for, and after it the others, where nobody says how long."""
_AGAIN = 0.1
_ASK = 5.0
"""Seconds between two questions to Slurm."""
_NAMED = 3


def await_first(client: distributed.Client, timeout: float, tell: Tell) -> None:
    """Wait for any worker.  Raises PathwaysError when none has come."""
    try:
        client.wait_for_workers(1, timeout=min(timeout, PATIENCE))
        return
    except TimeoutError:
        pass
    left = max(0.0, timeout - PATIENCE)
    try:
        with waiting("a first worker of the Dask cluster", left, tell):
            client.wait_for_workers(1, timeout=left)
    except TimeoutError as error:
        raise _none(f"after {timeout:g} s", "start workers, or give a longer timeout") from error


def await_asked(client: distributed.Client, timeout: float | None, tell: Tell) -> None:
    """Wait for the workers that the client's cluster was asked for, and say who is missing.

    timeout: None: for a first one as long as there are jobs, else a minute; for others a minute.

    Raises PathwaysError when none has come.
    """
    if not dask_private.asked_workers(client.cluster):
        await_first(client, WORKER_SECONDS if timeout is None else timeout, tell)
        return
    began = time.monotonic()
    quiet, asked, said, some = began + PATIENCE, -math.inf, "", False
    states: Mapping[str, State] = {}
    while True:
        there = dask_private.names_of_workers(client)
        jobs = dask_private.asked_workers(client.cluster)
        missing, now = absent(jobs, there), time.monotonic()
        if there and not some:
            some, began = True, began if timeout is not None else now
        if missing and now > max(asked + _ASK, quiet):
            states, asked = ask({jobs[name] for name in missing} - {""}), now
        choice = outlook(len(there), missing, jobs, states, now - began, timeout)
        many = f"{len(missing)} of {len(jobs)} workers"
        names = ": ".join(filter(None, (many, story(missing, jobs, states))))
        if choice == "give up":
            raise _none(
                f"after {now - began:.0f} s, and was asked for {names}",
                "see the logs of its jobs, or its workers, or give a longer timeout",
            )
        if choice == "go on":
            if missing:
                tell(f"goes on without {names}: workers that come later become hosts, too")
            return
        text = f"waiting for {names}; Ctrl-C ends the wait"
        if text != said and now > quiet:
            tell(text)
            said = text
        time.sleep(_AGAIN)


def absent(asked: Collection[str], there: Collection[str]) -> list[str]:
    """The workers that are missing, by name.  Pure.

    The cluster object may know its workers by other names than they have; then as many are
    missing as there are fewer.
    """
    names = sorted(set(asked) - set(there))
    return names[: max(0, len(asked) - len(there))]


def outlook(
    there: int,
    missing: Collection[str],
    jobs: Mapping[str, str],
    states: Mapping[str, State],
    seconds: float,
    timeout: float | None,
) -> Literal["wait", "go on", "give up"]:
    """The next step of the wait.  Pure.

    there: how many workers.  missing: names of those that are not, of all that were asked for.
    jobs: their jobs, by name; "" for a worker in none.  states: by job, as far as it is known.
    seconds: since the beginning; where nobody has given a timeout, since there was a worker.
    """
    if there and not missing:
        return "go on"
    ended = missing and all(jobs[name] in states and states[jobs[name]].ended for name in missing)
    limit = WORKER_SECONDS if timeout is None else timeout
    if timeout is None and not there and any(jobs.values()):
        limit = math.inf  # a queue takes hours
    if not ended and seconds < limit:
        return "wait"
    return "go on" if there else "give up"


def story(missing: Collection[str], jobs: Mapping[str, str], states: Mapping[str, State]) -> str:
    """The missing workers in words, each with its job; "" where names say nothing.  Pure."""
    told: list[str] = []
    if any(name.isdecimal() and not jobs[name] for name in missing):
        return ""
    for name in sorted(missing)[:_NAMED]:
        state = f": {states[jobs[name]]}" if jobs[name] in states else ""
        told.append(f"{name} (job {jobs[name]}{state})" if jobs[name] else name)
    more = len(missing) - len(told)
    return ", ".join(told) + (f" and {more} more" if more else "")


def _none(when: str, remedy: str) -> PathwaysError:
    return refused(f"the Dask cluster has no workers {when}", remedy)
