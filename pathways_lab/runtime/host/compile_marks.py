"""Notes of the functions that a device process compiles right now, for its parent to find.

Problem: some functions make XLA end the process that compiles them.  That process can say no
more which function it was; and compiled again after the restart, the function would end the next
process too.

How: while a function is compiled there is a small file in the process's private folder, which
the parent reads before it removes the folder of a process that has died.

Rule for maintainers: writing costs microseconds, compiling milliseconds at least; a note that
cannot be written holds up nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pathways_lab.core.messages.elastic import Compiling
from pathways_lab.core.program.program import Line

_PREFIX = "compiling-"


class Notes:
    """Those of one process.  folder: where; None: none are written."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def of(self, function: str, name: str, line: Line) -> Iterator[None]:
        """While this function is compiled."""
        if self._folder is None:
            yield
            return
        path = self._folder / f"{_PREFIX}{next(self._numbers)}"
        note = [function, name, line.file, line.number, line.text]
        with contextlib.suppress(OSError):
            path.write_text(json.dumps(note))
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


NO_NOTES = Notes(None)


def read(folder: Path) -> list[list[Any]]:
    """The function that a dead process was compiling."""
    notes = []
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob(f"{_PREFIX}*")):
            with contextlib.suppress(OSError, ValueError):  # it was being written
                notes.append(json.loads(path.read_text()))
    return notes


def told(notes: list[list[Any]]) -> tuple[Compiling, ...]:
    """The same as the core knows it.  Raises ValueError, TypeError for what is malformed."""
    return tuple(
        Compiling(str(function), str(name), Line(str(file), int(number), str(text)))
        for function, name, file, number, text in notes
    )
