"""Files that are written behind the computations that made their bytes.

Problem: a device that hands over its part of an array would wait for the disk, and with it all
that comes after it.

How: a few threads write copies.  The one who hands over waits only while the copies take more than
their share of the machine's memory.  Somebody asks later whether all is written.

Rule for maintainers: an error belongs to the folder in which it happened, and the next question
about this folder raises it.  Threads never keep a process alive: a folder without its last file
is nobody's.

Paper: none; later systems' checkpoints.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(eq=False, slots=True)
class _Job:
    folder: Path
    nbytes: int
    write: Callable[[], None] | None
    over: bool = False
    error: Exception | None = None


class WriteBehind:
    """most: bytes of copies.  threads: that write; they begin with the first job."""

    def __init__(self, most: int, threads: int = 4) -> None:
        self._most = most
        self._threads = threads
        self._held = 0
        self._jobs: list[_Job] = []
        self._todo: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._changed = threading.Condition()

    def add(self, folder: Path, nbytes: int, write: Callable[[], None]) -> None:
        """Have *write* called, which keeps so many bytes, once there is room for them."""
        job = _Job(folder, nbytes, write)
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._held + nbytes <= self._most)
            self._held += nbytes
            self._jobs.append(job)
            if self._threads:
                self._threads -= 1
                threading.Thread(target=self._work, name="write behind", daemon=True).start()
        self._todo.put(job)

    def done(self, folder: Path) -> bool:
        """Whether all is written in a folder and below it.  Raises the first error."""
        with self._changed:
            asked = [job for job in self._jobs if job.folder.is_relative_to(folder)]
            over = [job for job in asked if job.over]
            gone = set(over)
            self._jobs = [job for job in self._jobs if job not in gone]
        for job in over:
            if job.error is not None:
                raise job.error
        return len(over) == len(asked)

    def _work(self) -> None:
        while True:
            job = self._todo.get()
            assert job.write is not None
            try:
                job.write()
            except Exception as error:
                job.error = error
            with self._changed:
                job.over, job.write = True, None
                self._held -= job.nbytes
                self._changed.notify_all()
