"""The memory that this process may still take: of the machine, and of its control groups.

Problem: in a container or a job of a cluster the machine's free memory is not ours to take.

Rule for maintainers: read anew at each call; a limit that cannot be read limits nothing.
"""

from __future__ import annotations

import contextlib
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


def groups(root: Path, controller: str = "memory") -> Iterator[Path]:
    """The folders of the control groups that count something of this process, its own and above.

    A container may be told of groups that only its machine has: of those it sees none.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", controller):
                own = PurePosixPath(path.lstrip("/"))
                for part in (own, *own.parents):
                    yield root / "sys/fs/cgroup" / controllers / part
