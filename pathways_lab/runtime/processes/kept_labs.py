"""Labs of this account that outlive their kernels, on this machine, by name.

Problem: a kernel that restarts must find the lab that it has left, nobody else may, and a lab that
has died must not be mistaken for one that lives, whatever else has its process's number since.

How: a kept lab has a *record*, a lab file in a folder that only this account can enter.  Its keeper
(:mod:`.processes.keeper`) holds a lock on the record as long as it lives; the system gives the lock
back however the keeper ends.  So a record without a lock is stale, and the first to see it removes
it.

Rule for maintainers: the standard library and this project's errors only, for ``doctor`` looks here
where nothing else works.  A record is removed by who holds its lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pathways_lab.core.errors import PathwaysError, refused

_MOMENT = 0.02
"""Seconds after which a lock is tried again that somebody holds who only looks."""
_END_SECONDS = 30.0


def folder() -> Path:
    """Where the records are: mode 0700.  Raises PathwaysError when another account has it."""
    base = "/tmp" if os.access("/tmp", os.W_OK | os.X_OK) else tempfile.gettempdir()
    path = Path(base) / f"pwlab-kept-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise refused(
            f"{path} is not a folder that only this account can enter: the records of kept labs"
            " would be other people's to read",
            "have its owner remove it",
        )
    return path


def record(name: str) -> Path:
    """The lab file of the lab that is kept under this name, if there is one."""
    return folder() / f"{name}.json"


def claim(name: str) -> int | None:
    """The right to be the lab of this name: an open file, as long as it is open.

    None: somebody else is.
    """
    for _ in range(10):
        descriptor = os.open(record(name), os.O_RDWR | os.O_CREAT, 0o600)
        if _lock(descriptor) and _is(descriptor, record(name)):
            return descriptor
        os.close(descriptor)
        time.sleep(_MOMENT)
    return None


def give_up(name: str, descriptor: int) -> None:
    """Remove the record; the right ends when the file is closed, or with the process."""
    if _is(descriptor, record(name)):
        record(name).unlink()
    record(name).with_suffix(".log").unlink(missing_ok=True)


def is_there(name: str) -> bool:
    """Whether a lab of this name lives; the record of a dead one is removed."""
    with _opened(record(name)) as descriptor:
        if descriptor is None:
            return False
        if not _lock(descriptor):
            return True
        give_up(name, descriptor)
    return False


def names() -> list[str]:
    """The labs that live."""
    return sorted(path.stem for path in folder().glob("*.json") if is_there(path.stem))


def wait_ready(name: str, seconds: float) -> bool:
    """Wait until a lab that somebody has begun to start can be joined; whether it can."""
    deadline = time.monotonic() + seconds
    while is_there(name) and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if record(name).stat().st_size:
                return True
        time.sleep(0.05)
    return False


def find(name: str) -> Path:
    """The lab file of a lab that lives.  Raises PathwaysError that says which ones do."""
    if is_there(name):
        return record(name)
    raise none(name)


def none(name: str) -> PathwaysError:
    """There is no such lab."""
    there, path = ", ".join(repr(each) for each in names()), os.path.abspath(name)
    return refused(
        f"there is no lab file {path!r}, and no lab is kept as {name!r} by this account on this"
        f" machine; kept {'are ' + there if there else 'is none'}",
        f"pw.start(keep={name!r}) starts one; a lab of others is joined with a file of theirs"
        " (lab.invite(path))",
    )


def stop(name: str) -> None:
    """End a kept lab, and wait until nothing of it is left.  Raises PathwaysError."""
    with _opened(find(name)) as descriptor:
        if descriptor is None:
            raise none(name)
        keeper, deadline = 0, time.monotonic() + _END_SECONDS
        while not _lock(descriptor):
            # While it starts and ends the record is empty.  Its number is its own as long as it
            # holds the lock.
            if not keeper and (written := os.pread(descriptor, 1 << 20, 0)):
                keeper = int(json.loads(written)["keeper"])
                os.kill(keeper, signal.SIGTERM)
            if time.monotonic() > deadline:
                raise refused(
                    f"the lab {name!r} has not ended within {_END_SECONDS:g} s",
                    f"end its keeper, process {keeper}: all others go with it"
                    if keeper
                    else "wait until it has started",
                )
            time.sleep(0.05)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Take the lock of an open record, unless somebody has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is(descriptor: int, path: Path) -> bool:
    """Whether an open file is the one that the path means now."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
