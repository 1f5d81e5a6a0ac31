"""Children that are copies of this process, with all that is imported here.

Problem: a lab of eight hosts is sixteen processes, and each would spend a second on importing
the same libraries.  A copy is there in milliseconds, and shares their memory.

Rule for maintainers: only a process with one thread makes copies.  A lock of another thread
would be locked in the copy for ever; so copies are made before :func:`.child_process.begin`,
and of a process that has only imported modules: no client of JAX, no event loop.

Paper: section 4.5 (one executor process per host).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, NoReturn

from pathways_lab.runtime.processes.child_process import Child, ChildDied, log_of


def can_fork() -> bool:
    """Whether a copy of a process that has loaded libraries may go on as another one.

    Not on macOS, whose system libraries end such copies.
    """
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return sys.platform == "linux"


def fork(main: Callable[[], object], *, name: str, folder: Path) -> Child:
    """Start main() in a copy of this process, on a lifeline of this process.

    It is to :func:`begin` itself.  Raises ChildDied as :func:`spawn` does.
    """
    log = log_of(folder, name)
    ends: list[int] = []
    try:
        with open(log, "ab") as output:
            since = output.tell()
            ends += os.pipe()
            ends += os.pipe()
            pid = os.fork()
            if not pid:
                _be_copy(main, name, (ends[0], ends[3], output.fileno()), (ends[1], ends[2]))
    except OSError as error:
        for end in ends:
            os.close(end)
        raise ChildDied(f"{name} could not be started: {error}") from error
    os.close(ends[0])
    os.close(ends[3])
    return Child(_Copy(pid, ends[1], ends[2]), name, log, since)


def _be_copy(
    main: Callable[[], object], name: str, ends: tuple[int, int, int], others: tuple[int, int]
) -> NoReturn:
    """The rest of the life of a copy; ends: its standard streams, others: its parent's."""
    code = 1
    try:
        os.setsid()
        for number, end in enumerate(ends):
            os.dup2(end, number)
        for end in {*ends, *others}:
            os.close(end)
        main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class _Copy:
    """A copy of this process; as a ``subprocess.Popen``, from any thread."""

    def __init__(self, pid: int, stdin: int, stdout: int) -> None:
        self.pid = pid
        self.stdin: IO[bytes] = os.fdopen(stdin, "wb")
        self.stdout: IO[bytes] = os.fdopen(stdout, "rb", buffering=0)
        self._ended = os.pidfd_open(pid)
        self._code: int | None = None
        self._lock = threading.Lock()

    def __del__(self) -> None:
        os.close(self._ended)

    def poll(self) -> int | None:
        with self._lock:
            if self._code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._code = os.waitstatus_to_exitcode(status)
            return self._code

    def wait(self, timeout: float | None = None) -> int:
        select.select([self._ended], [], [], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)
