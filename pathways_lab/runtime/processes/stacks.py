"""The stacks of all threads of a process, also of one that hangs.

Problem: a device process that answers nothing cannot say in which line it stands.

How: its main thread, which has nothing else to do, writes them to the process's log.  Where it
cannot, because something holds the interpreter, a signal has C code of Python's write them.
Native frames need a debugger: py-spy, where it is installed.

Rule for maintainers: the signal is for processes that hang.  It reads the frames of threads
without the interpreter, and where they run, that may end the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

from pathways_lab.core.diagnosis.stacks import STOPPED

SIGNAL = signal.SIGUSR1
"""It asks for the stacks."""
_PATIENCE, _LAST, _QUIET = 5.0, 2.0, 0.05
"""Seconds for which an answer is waited for; for which one of the signal; and after which one that
does not grow is whole."""
_DEBUGGER = 20.0
"""Seconds that a debugger may take."""


def answer_signal() -> None:
    """Let this process write its stacks to its log when it hangs."""
    faulthandler.register(SIGNAL, all_threads=True)


def write() -> None:
    """Write the stacks of this process to its log: no thread moves meanwhile."""
    faulthandler.dump_traceback(all_threads=True)


def ask(pid: int, log: Path, tell: Callable[[], None]) -> str:
    """The stacks as faulthandler writes them, innermost line first, "" without an answer.

    log: the file in which all goes that the process prints.  tell(): asks it to :func:`write`.
    """
    since = log.stat().st_size
    if state(pid) in STOPPED:
        return ""
    tell()
    if not _grows(log, since, _PATIENCE) and state(pid) not in STOPPED and _heeds(pid):
        os.kill(pid, SIGNAL)
        _grows(log, since, _LAST)
    with log.open("rb") as file:
        file.seek(since)
        return file.read().decode(errors="replace")


def _grows(log: Path, since: int, seconds: float) -> bool:
    """Whether something has come within so many seconds; all of it is there then."""
    deadline, before = time.monotonic() + seconds, since
    while time.monotonic() < deadline:
        time.sleep(_QUIET)
        now = log.stat().st_size
        if now == before > since:
            return True
        before = now
    return before > since


def state(pid: int) -> str:
    """A letter of the system's for what a process does, "?" where it does not tell."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "?"


def native(pid: int) -> str:
    """The stacks with native frames.  Raises OSError with the reason and the remedy."""
    own = Path(sysconfig.get_path("scripts")) / "py-spy"
    found = str(own) if own.exists() else shutil.which("py-spy")
    if found is None:
        raise OSError("native frames need py-spy beside the host's worker: pip install py-spy")
    command = [found, "dump", "--native", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEBUGGER)
    except subprocess.TimeoutExpired:
        raise OSError(f"py-spy said nothing for {_DEBUGGER:g} s: ask without native=True") from None
    if done.returncode:
        told = next((line for line in done.stderr.splitlines() if line.strip()), "no reason")
        raise OSError(f"py-spy could not look: {told}; ask without native=True")
    return done.stdout


def _heeds(pid: int) -> bool:
    """Whether the process has a handler for the signal.  Where there is no /proc: it has."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return os.name == "posix" and not Path("/proc/self/status").exists()
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt")), "0")
    return bool(int(caught, 16) >> (SIGNAL - 1) & 1)
