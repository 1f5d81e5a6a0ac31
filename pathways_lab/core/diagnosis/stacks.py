"""The stacks of a host's threads: what ``lab.stacks(host)`` answers.

Problem: a device process has dozens of threads, nearly all of which wait for work; the reader
looks for the one line of their own at which one stands.

Rule for maintainers: plain data and how it looks; :mod:`pathways_lab.runtime.processes.stacks`
asks the process.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

STOPPED = "Tt"
"""The states of a process that does nothing until it is told to go on."""
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+ ", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (\S+)$')
_LIBRARIES = ("/lib/python", "<frozen ", __file__.rpartition("core")[0])
"""No file of a user has this in its name."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One line that is being executed."""

    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """Whether it is neither Python's, nor a package's, nor the lab's."""
        return not any(part in self.file for part in _LIBRARIES)

    def __str__(self) -> str:
        return f"{self.function} at {self.file}:{self.line}"


Thread = tuple[Frame, ...]
"""The lines of one thread, innermost first."""


def frames(text: str) -> Iterator[Frame]:
    """Lines of Python that were being executed, innermost first, as faulthandler writes them."""
    for line in text.splitlines():
        if found := _FRAME.match(line):
            yield Frame(found[1], int(found[2]), found[3])


@dataclass(frozen=True, slots=True, repr=False)
class Stacks:
    """Where the threads of a host's device process stand.

    host: its name.  pid: of the process.  state: the system's letter for it, ``"T"`` where it is
        stopped.  text: all that was said, with native frames where they were asked for.
    """

    host: str
    pid: int
    state: str
    text: str

    @property
    def threads(self) -> tuple[Thread, ...]:
        """Python's stacks; those with a line of a user's first."""
        _, *texts = _THREAD.split(self.text)
        found = [tuple(frames(text)) for text in texts]
        return tuple(sorted(filter(None, found), key=lambda thread: not _is_users(thread)))

    @property
    def lines(self) -> tuple[Frame, ...]:
        """The innermost line of a user's in each thread that has one."""
        return tuple(
            next(frame for frame in thread if frame.is_users)
            for thread in self.threads
            if _is_users(thread)
        )

    def __repr__(self) -> str:
        head = f"{self.host}, process {self.pid}"
        if self.state in STOPPED:
            return f"{head} is stopped: it does nothing until it is told to go on (SIGCONT)"
        if not self.threads:
            return f"{head}:\n{self.text}" if self.text else f"{head} did not answer"
        shown = [
            f"{head}, {len(self.threads)} threads"
            + ("; lines of yours first" if self.lines else "; none is in code of yours")
        ]
        for thread, count in Counter(self.threads).items():
            times = f" ({count} threads)" if count > 1 else ""
            users = [at for at, frame in enumerate(thread) if frame.is_users]
            first, *others = thread[: max(users, default=0) + 1]  # the rest is the lab's
            mark = ">" if users else "-"
            shown += [f"{mark} {first}{times}", *(f"    {frame}" for frame in others)]
        return "\n".join(shown)


def _is_users(thread: Iterable[Frame]) -> bool:
    return any(frame.is_users for frame in thread)
