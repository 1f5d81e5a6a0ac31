"""A folder that is there as a whole or not at all: it takes its name when everything is in it.

Problem: the writer of a folder may die at any moment.  Its name must then be that of the old
folder or of the new one, and somebody must remove the remains.

How: it is written beside its name, as ``.NAME.*.part``, under a lock that goes when the process
goes.  The old one is set aside as ``.NAME.*.old``, the new one takes the name.  The next writer
finds the remains of dead ones: where only the last step is missing, it makes that step.

Rule for maintainers: nothing is removed that a living process writes; where a file system has no
locks, nothing is removed.

Paper: none; later systems' checkpoints.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_PART, _OLD = ".part", ".old"
LOCK = "_LOCK"


class Part:
    """A new folder that has not got its name yet.

    folder: its name.  path: where it is meanwhile.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}{_PART}")
        self._old = self.path.with_suffix(_OLD)
        self._lock: BinaryIO | None = None

    def begin(self) -> None:
        """Make it, empty.  Raises OSError."""
        self.path.mkdir(parents=True)
        unseen = self.path / f"{LOCK}.new"
        self._lock = unseen.open("wb")
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        unseen.rename(self.path / LOCK)  # nobody finds it free

    def finish(self) -> None:
        """Give it its name; the folder that had it goes.  Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            self.folder.rename(self._old)
        _name(self.path, self.folder)
        shutil.rmtree(self._old, ignore_errors=True)
        self._unlock()

    def give_up(self) -> None:
        """Remove it; a folder that had the name has it."""
        with contextlib.suppress(OSError):
            self._old.rename(self.folder)
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()


def tidy(folder: Path) -> None:
    """End what those began who died while they wrote a folder of this name."""
    with contextlib.suppress(OSError):
        for part in _beside(folder, _PART):
            if not _abandoned(part):
                continue
            if part.with_suffix(_OLD).exists() and not folder.exists():
                _name(part, folder)  # it was whole: the old one was set aside for it
            else:
                shutil.rmtree(part, ignore_errors=True)
        for old in _beside(folder, _OLD):
            if folder.exists() and not old.with_suffix(_PART).exists():
                shutil.rmtree(old, ignore_errors=True)


def _beside(folder: Path, suffix: str) -> Iterator[Path]:
    return folder.parent.glob(f".{glob.escape(folder.name)}.*{suffix}")


def _name(part: Path, folder: Path) -> None:
    part.rename(folder)
    (folder / LOCK).unlink(missing_ok=True)


def _abandoned(part: Path) -> bool:
    """Whether the process that wrote it is gone."""
    with contextlib.suppress(OSError), (part / LOCK).open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
