"""How a device process ended, in words that help: signal, kernel's records, last words.

Problem: a connection that closes says nothing.  The parent of a process knows its exit code
and its log, and the kernel keeps records of what it ended for want of memory and of what it
did not let begin; together they are the reason that users need.

How: the kernel only counts, for a whole control group or machine; so the counts are read
when a process begins and again when it has ended, and what is told is the difference.

Rule for maintainers: one sentence, true also where nothing is known; nothing here raises.
"""

from __future__ import annotations

import contextlib
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from pathways_lab.core.diagnosis.stacks import frames
from pathways_lab.transport.machine_share import groups

FAILED = 70
"""Exit code of a device process that could not go on, and has said why."""
ENDS = "the device process ends: "
"""The beginning of its last words, in its log."""
ASSERTION = re.compile(r"^F\d{4,}.*?\] ?(.*?)\.?$", re.MULTILINE)
"""An assertion in native code that did not hold."""
_NO_PROCESS = re.compile(
    r"can't start new thread|Resource temporarily unavailable|Errno 11\b|pthread_create\(\) failed"
)


@dataclass(frozen=True, slots=True)
class Records:
    """The kernel's counts so far.

    memory: processes of this control group that it ended for want of memory.
    machine: the same of the whole machine, or of all containers on it.
    processes: how often it let none begin in this group, because of ``pids.max``.
    """

    memory: int = 0
    machine: int = 0
    processes: int = 0

    @classmethod
    def read(cls, root: Path = Path("/")) -> Records:
        """root: where the system's files are."""
        memory = [
            _count(group / name, "oom_kill")
            for group in groups(root)
            for name in ("memory.events", "memory.oom_control")
        ]
        processes = [_count(group / "pids.events", "max") for group in groups(root, "pids")]
        machine = _count(root / "proc/vmstat", "oom_kill")
        return cls(max(memory, default=0), machine, max(processes, default=0))


def story(code: int | None, words: str, before: Records, after: Records) -> str:
    """Why a process is gone: one sentence without a subject.

    code: its exit code, negative for the signal that ended it; None: it never began.
    words: the end of its log, or why it could not be started.
    before, after: what the kernel had counted when it began, and when it had ended.
    """
    if code is None:
        told = words.splitlines()[0] if words else "could not be started"
    elif code < 0:
        told = f"was ended by {_signal(-code)}"
    elif code == FAILED and ENDS in words:
        told = f"ended itself: {words.rpartition(ENDS)[2].strip().splitlines()[-1]}"
    else:
        told = f"ended with exit code {code}"
    if code == -signal.SIGKILL and after.memory > before.memory:
        told += ": the kernel ended it for want of memory (oom_kill in its control group)"
    elif code == -signal.SIGKILL and after.machine > before.machine:
        told += ": the kernel has ended processes of this machine for want of memory meanwhile"
    elif code is not None and code != FAILED:
        told += _where(words)
    if _NO_PROCESS.search(words):
        told += _no_process(before, after)
    return told


def _signal(number: int) -> str:
    with contextlib.suppress(ValueError):
        return f"signal {number} ({signal.Signals(number).name}, {signal.strsignal(number)})"
    return f"signal {number}"


def _where(words: str) -> str:
    """The assertion that did not hold, and the user's line that was being executed."""
    fatal = ASSERTION.search(words)
    told = f": {fatal[1][:300]}" if fatal else ""
    users = next((frame for frame in frames(words) if frame.is_users), None)
    return told if users is None else f"{told}, in {users}"


def _no_process(before: Records, after: Records) -> str:
    if after.processes > before.processes:
        return ": its control group has as many processes and threads as it may (pids.max)"
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        if limit != resource.RLIM_INFINITY:
            return f": this account may have {limit} processes and threads (ulimit -u)"
    return ": the machine lets no more processes and threads begin"


def _count(file: Path, name: str) -> int:
    """A number in a file of ``name number`` lines; 0 where there is none."""
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0
