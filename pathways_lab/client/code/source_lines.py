"""Which line is the user's own.

Problem: between the user's code and the place where something is noticed lie
frames of JAX, of Pathways Lab and of libraries.  Errors, nodes and records
name the innermost line of the *user*: of a file or a notebook cell; if there
is none, of a library that is neither JAX nor Pathways Lab.

Rule for maintainers: the only place that judges files by their path.
"""

from __future__ import annotations

import csv
import linecache
import pathlib
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import FrameType, TracebackType
from typing import Any

import jax
import numpy as np

from pathways_lab.core.program.program import Line
from pathways_lab.runtime import jax_private

_PACKAGE = pathlib.Path(__file__).resolve().parents[2]


_LAYERS = (
    "client",
    "core",
    "door",
    "executor",
    "notebook",
    "pipeline",
    "runtime",
    "timeline",
    "transport",
)


def _folder(path: str | pathlib.Path) -> str:
    return str(path).rstrip("/") + "/"


_OWN = tuple(_folder(_PACKAGE / part) for part in _LAYERS)
_WAITING = (
    *_OWN,
    _folder(pathlib.Path(jax.__file__).parent),
)
"""Where a thread may wait for a value of the lab."""
_MACHINERY = (
    *_WAITING,
    _folder(pathlib.Path(np.__file__).parent),
    "<frozen",
    "<__array_function__",
)
_SITES = {"site-packages", "dist-packages"}
"""Folders of libraries only: of this environment, the system, the user, another Python."""
_STANDARD = tuple(_folder(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))

Place = tuple[str, int]
"""File and line number."""


@lru_cache(maxsize=4096)
def _rank(file: str) -> int:
    """0: the user's own, 1: a library, 2: JAX, NumPy, the standard library, Pathways Lab itself."""
    if file.startswith(_MACHINERY):
        return 2
    if _is_installed(pathlib.Path(file)):
        return 1
    return 2 if file.startswith(_STANDARD) else 0


def _is_installed(file: pathlib.Path) -> bool:
    """Whether it is of a library, wherever that lies: ``PYTHONPATH``, ``pip --target``, a ``.pth``.

    A folder that is not of libraries only may have the user's own files beside them.
    """
    if not _SITES.isdisjoint(file.parts):
        return True
    return any(file.relative_to(folder).parts[0] in _installed(folder) for folder in file.parents)


@lru_cache(maxsize=4096)
def _installed(folder: pathlib.Path) -> frozenset[str]:
    """The packages and modules that were installed into a folder."""
    try:
        records = [each / "RECORD" for each in folder.glob("*.dist-info")]
        entries = [line for record in records if record.exists() for line in _rows(record)]
    except (OSError, ValueError):
        return frozenset()
    return frozenset(entry.partition("/")[0] for entry in entries)


def _rows(record: pathlib.Path) -> list[str]:
    """Paths of installed files, relative to the folder."""
    return [row[0] for row in csv.reader(record.read_text().splitlines()) if row]


def is_own(file: str) -> bool:
    """Whether a file is the user's own: no library, and no part of JAX or Pathways Lab."""
    return _rank(file) == 0


def best(places: Iterable[Place]) -> Line:
    """The user's line among *places*, which go from the innermost outwards."""
    library: Place | None = None
    for place in places:
        rank = _rank(place[0])
        if rank == 0:
            return line_at(place)
        if rank == 1 and library is None:
            library = place
    return Line() if library is None else line_at(library)


def line_at(place: Place) -> Line:
    """A place, with its text."""
    file, number = place
    return Line(file, number, linecache.getline(file, number).strip())


def with_text(line: Line) -> Line:
    """A line that was noticed where its file cannot be read, with its text."""
    return line_at((line.file, line.number)) if line.number and not line.text else line


def of_caller() -> Line:
    """The user's line that called into Pathways Lab."""
    return best(_outwards(sys._getframe(1)))


def place_of_caller() -> Place | None:
    """The same without its text: cheap enough for every call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not _rank(file):
            return file, frame.f_lineno
        frame = frame.f_back
    return None


def place_of_thread(thread: int) -> Place | None:
    """The user's line that a thread works at; None: it is in JAX or in Pathways Lab, or in no code
    of the user's."""
    if thread == threading.get_ident():  # a frame that knows itself would stay, with all it has
        return None
    frame = sys._current_frames().get(thread)
    while frame is not None:
        file = frame.f_code.co_filename
        if not _rank(file):
            return file, frame.f_lineno
        if file.startswith(_WAITING):
            return None
        frame = frame.f_back
    return None


def _outwards(frame: FrameType | None) -> Iterator[Place]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _inwards(trace: TracebackType | None) -> Iterator[Place]:
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next


def of_traceback(trace: TracebackType | None) -> Line:
    """The user's line at which an exception passed or began."""
    return best(reversed(list(_inwards(trace))))


def without_machinery(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of JAX and Pathways Lab between the user's own."""
    kept = []
    while trace is not None:
        if _rank(trace.tb_frame.f_code.co_filename) < 2:
            kept.append(trace)
        trace = trace.tb_next
    rest: TracebackType | None = None
    for entry in reversed(kept):
        rest = TracebackType(rest, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return rest


def passes_the_lab(trace: TracebackType | None) -> bool:
    """Whether an exception came by a function of Pathways Lab."""
    return any(file.startswith(_OWN) for file, _ in _inwards(trace))


def raised_by_user(trace: TracebackType | None) -> bool:
    """Whether an exception was raised by user or library code, not by JAX under it."""
    places = list(_inwards(trace))
    return bool(places) and _rank(places[-1][0]) < 2


def of_equation(equation: Any) -> Line:
    """The user's line that made an equation of a captured program."""
    return best(jax_private.user_frames(equation.source_info))


def of_node(equation: Any) -> Line:
    """The same; where all that made it is Pathways Lab's, the user's line that had it captured."""
    line = of_equation(equation)
    return line if line.number else of_caller()


def of_function(function: Any) -> Line:
    """The line at which a Python function is defined."""
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    return Line() if code is None else line_at((code.co_filename, code.co_firstlineno))
