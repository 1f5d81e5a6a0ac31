"""Reads how much of a machine a Dask worker was given: by a scheduler of jobs, and by Dask.  Pure.

Problem: a queueing system lends a part of a machine, and not every one shuts a job up in it; a
lab that counts the whole machine makes devices that the job cannot run, and is killed for memory
that it never had.

The rule: the least that anybody says counts.  Slurm says it by variables, Dask by the worker's
threads and its memory limit; the process's affinity and control groups
(:mod:`pathways_lab.transport.machine_share`) count anyway.  Dask's threads count in a job only:
elsewhere a worker often has one thread, and a machine to itself.

Rule for maintainers: nothing here decides how many devices an accelerator's runtime finds.

Paper: section 4.1 (a resource manager below Dask owns the machines).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from pathways_lab.runtime.processes.memory_budget import DEVICE_PROCESS, MIB, WORKER

NUMBERS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "OAR_JOB_ID", "JOB_ID")
"""Variables with the number of a job: of Slurm, PBS, LSF, OAR, and Grid Engine."""
ALIVE = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "REQUEUED", "RESIZING", "SIGNALING")
"""States of Slurm's jobs whose workers may come, or come again."""
_WHY = {
    "OUT_OF_MEMORY": (killed := "was killed by Slurm for want of memory: ask for more (memory=)"),
    "OutOfMemory": killed,
    "TIMEOUT": (late := "has reached its time limit"),
    "TimeLimit": late,
    "PREEMPTED": "was preempted",
    "CANCELLED": "was cancelled",
    "NODE_FAIL": (lost := "has lost its node"),
    "NodeDown": lost,
    "BOOT_FAIL": lost,
}
"""By states of Slurm's jobs, and by reasons for them."""
_MEMORY = re.compile(r"^slurmstepd.*(exceeded memory limit|oom.kill)", re.MULTILINE | re.IGNORECASE)
_PROCESSES = WORKER + DEVICE_PROCESS
_LEAST = 32 * MIB


class State(NamedTuple):
    """The state of a job in Slurm's words; the reason is ``"None"`` where there is none."""

    word: str
    reason: str

    @property
    def ended(self) -> bool:
        return self.word not in ALIVE

    def why_ended(self, number: str) -> str:
        """Why the job of this number has ended, or ends, in a sentence; "" where nobody says so.

        A job that still ends has another word, and the same reason.
        """
        for told in (self.word, self.reason):
            if told in _WHY:
                return f"its job {number} {_WHY[told]}"
        return ""

    def __str__(self) -> str:
        word = self.word.lower().replace("_", " ")
        return word if self.reason == "None" else f"{word}, {self.reason}"


def states_of(told: str) -> dict[str, State]:
    """States of jobs by number, read from lines of Slurm: number, state and reason."""
    lines = (line.split(maxsplit=2) for line in told.splitlines())
    return {line[0]: State(line[1], line[2]) for line in lines if len(line) == 3}


def why_killed(number: str, log: str) -> str:
    """Why a job of this number was killed, as the end of its log says; "" where it does not.

    Where Slurm itself measures memory, and not a control group, only the log says it.
    """
    return f"its job {number} {_WHY['OUT_OF_MEMORY']}" if _MEMORY.search(log) else ""


def number_of(environment: Mapping[str, str]) -> str:
    """The number of the job in which this is the environment; "" in none."""
    return next((environment[name] for name in NUMBERS if environment.get(name)), "")


def processors_of(environment: Mapping[str, str], threads: int) -> int | None:
    """The processors of a worker with so many threads, as its job says; None: it has no job."""
    if not number_of(environment):
        return None
    told = (_count(environment, f"SLURM_CPUS_{which}") for which in ("ON_NODE", "PER_TASK"))
    return max(1, min([threads, *filter(None, told)]))


def room_of(environment: Mapping[str, str], limit: int | None) -> int | None:
    """Bytes that a device process has for its devices; None: nobody says.

    limit: that of the Dask worker, None where it has none.

    Raises ValueError where they do not suffice for the processes themselves.
    """
    node = _count(environment, "SLURM_MEM_PER_NODE") or 0
    each = _count(environment, "SLURM_MEM_PER_CPU") or 0
    cores = _count(environment, "SLURM_CPUS_ON_NODE") or 1
    given = min(filter(None, (limit, node * MIB, each * cores * MIB)), default=0)
    if not given:
        return None
    if given < _PROCESSES + _LEAST:
        job = number_of(environment)
        raise ValueError(
            f"{f'its job {job}' if job else 'Dask'} gives it {given // MIB} MiB of memory, and"
            f" the processes of a host alone take {_PROCESSES // MIB} MiB; ask for"
            f" {2 * _PROCESSES // MIB} MiB at least (memory= of the Dask cluster)"
        )
    return given - _PROCESSES


def notice(environment: Mapping[str, str], now: float) -> str:
    """Why a worker with this environment leaves that is told to end (SIGTERM) at *now*."""
    number = number_of(environment)
    if not number:
        return "its worker was told to end (SIGTERM)"
    end = _count(environment, "SLURM_JOB_END_TIME")
    if end is not None and now >= end:
        return f"its job {number} has reached its time limit"
    over = "cancelled or preempted" if end else "cancelled, preempted, or is out of time"
    return f"its job {number} was told to end (SIGTERM): it was {over}"


def _count(environment: Mapping[str, str], name: str) -> int | None:
    """A number above 0 in a variable, or None: Slurm has variables for what nobody asked for."""
    text = environment.get(name, "")
    return int(text) or None if text.isdecimal() else None
