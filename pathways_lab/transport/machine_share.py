"""The memory and the processors that this process may take, of the machine's.

Problem: in a container or a job of a cluster the whole machine is not ours to take.

Rule for maintainers: read anew at each call; a limit that cannot be read limits nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files in the folder of a control group of Linux, in the second version and in the first: its
limit, its use, and the part of that in files (in ``memory.stat``)."""


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be taken without swapping, also inside a container or a cluster's job.

    root: where the system's files are.
    """
    available = int(psutil.virtual_memory().available)
    for group in groups(root):
        for limit, used, cache in _FILES:
            # A file that is not there, or says "max", limits nothing.
            with contextlib.suppress(OSError, ValueError):
                left = int((group / limit).read_text()) - int((group / used).read_text())
                if left < available:
                    counts = dict(line.split() for line in (group / "memory.stat").open())
                    # Files that nobody has read again make room for whoever asks.
                    available = min(available, max(0, left + int(counts.get(cache, 0))))
    return available


def processors(root: Path = Path("/")) -> int:
    """Processors on which this process may run, also inside a container or a cluster's job.

    root: where the system's files are.
    """
    count = os.cpu_count() or 1
    if sys.platform == "linux":
        count = len(os.sched_getaffinity(0))
    for group in groups(root, "cpu"):
        # A file that is not there, or says "max" or -1, limits nothing.
        with contextlib.suppress(OSError, ValueError):
            quota, period = _time_of(group)
            if quota > 0:
                count = min(count, max(1, quota // period))
    return count


def _time_of(group: Path) -> tuple[int, int]:
    """Microseconds of processors' time in so many microseconds, all of them together."""
    with contextlib.suppress(FileNotFoundError):
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota), int(period)
    quota, period = ((group / f"cpu.cfs_{each}_us").read_text() for each in ("quota", "period"))
    return int(quota), int(period)


def groups(root: Path, controller: str = "memory") -> Iterator[Path]:
    """The folders of the control groups that count something of this process, its own and above.

    A container may be told of groups that only its machine has: of those it sees none.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or controller in controllers.split(","):
                own = PurePosixPath(path.lstrip("/"))
                for part in (own, *own.parents):
                    yield root / "sys/fs/cgroup" / controllers / part
