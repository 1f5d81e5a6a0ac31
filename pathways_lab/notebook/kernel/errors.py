"""Errors in a cell: the user's own lines, what went wrong, what to do.

Problem: an error that began in another process, or inside JAX, arrives with a
traceback of machinery.  In a notebook the first thing to see is the own line.

Rule for maintainers: nothing is thrown away, it is only not shown first;
``%pw_traceback`` shows all of it.
"""

from __future__ import annotations

import linecache
import re
import sys
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from pathways_lab.client.code import source_lines
from pathways_lab.core.diagnosis.stall_story import Stuck
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.program.program import Line

RED, DIM, RESET = "\x1b[31m", "\x1b[2m", "\x1b[0m"
HINT = f"{DIM}  (%pw_traceback shows everything){RESET}"
AROUND = 2
"""Lines of the source shown before and after the user's own."""

HOOK = "_render_traceback_"
"""IPython asks an exception for this before it makes a traceback of its own."""

NO_ROOM = ("memory", "stalemate")
"""The kinds of failures that come of too little memory."""


def render(error: PathwaysError, place_name: Callable[[str], str] = str) -> list[str]:
    """The error in a few lines.  place_name: what a file or cell is called."""
    failure = error.failure
    out = [f"{RED}{type(error).__name__}{RESET}: {failure.message}"]
    if failure.story is None:
        out += excerpt(failure.line, place_name)
    else:
        for gang in failure.story.gangs:
            out += [f"  {gang}, program {gang.program!r}:", *excerpt(gang.line, place_name)]
    if failure.where:
        out.append(f"  in {failure.where}")
    if failure.remedy:
        out.append(f"  remedy: {failure.remedy}")
    out += [f"  note: {note}" for note in getattr(error, "__notes__", ())]
    out.append(HINT)
    return out


def excerpt(line: Line, place_name: Callable[[str], str] = str) -> list[str]:
    """The user's line, marked, between its neighbours; nothing when it is not known."""
    if not line.number:
        return []
    out = [f"  {place_name(line.file)}, line {line.number}"]
    if not linecache.getline(line.file, line.number):
        return [*out, f"{RED}---->{RESET} {line.number:4d}  {line.text}"] if line.text else out
    for number in range(max(1, line.number - AROUND), line.number + AROUND + 1):
        text = linecache.getline(line.file, number).rstrip()
        if number == line.number:
            out.append(f"{RED}---->{RESET} {number:4d}  {text}")
        elif text:
            out.append(f"      {number:4d}  {text}")
    return out


def cell_name(shell: Any) -> Callable[[str], str]:
    """Calls a cell's pseudo file what the user calls it: ``"Cell In[3]"``."""

    def name(file: str) -> str:
        found = shell.compile.format_code_name(file)
        return " ".join(found) if found else file

    return name


def running_cell(shell: Any) -> int:
    """The number of the cell that is running, as its prompt shows it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = shell.compile.format_code_name(frame.f_code.co_filename)
        digits = re.search(r"\d+", found[1]) if found else None
        if digits:
            return int(digits[0])
        frame = frame.f_back
    return int(shell.execution_count)


def _show(story: Stuck) -> None:
    """As the shell shows it."""
    from IPython import display as ipython

    show: Any = ipython.display
    show(story)


def _let_go(error: BaseException | None) -> None:
    """Drop the variables of the functions that an error has ended.

    Its traceback keeps them, with all their handles: no memory would be free for another try.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        for frame, _ in traceback.walk_tb(error.__traceback__):
            _copied = frame.f_locals  # Python 3.11 renews a frame's older copy of them
        error = error.__context__


class Renderer:
    """Shows errors compactly in one shell, wherever they are raised.

    last: the newest error that was shown, with its traceback.
    """

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.last: BaseException | None = None
        self._every_frame = shell.InteractiveTB.structured_traceback

    def install(self) -> None:
        """IPython asks every PathwaysError how it looks from now on, and this of all others."""
        renderer = self

        def rendered(error: PathwaysError) -> list[str]:
            # It is asked for more than once for one error; the picture comes once.
            before, renderer.last = renderer.last, error
            if error.failure.kind in NO_ROOM:
                _let_go(before)
                _let_go(error)
            if (
                error is not before
                and error.failure.story is not None
                and hasattr(renderer.shell, "kernel")
            ):
                _show(error.failure.story)
            return render(error, cell_name(renderer.shell))

        setattr(PathwaysError, HOOK, rendered)
        self.shell.InteractiveTB.structured_traceback = self._own_frames

    def remove(self) -> None:
        """The inverse of :meth:`install`."""
        if HOOK in vars(PathwaysError):
            delattr(PathwaysError, HOOK)
        vars(self.shell.InteractiveTB).pop("structured_traceback", None)

    def _own_frames(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> list[str]:
        """IPython's traceback; the user's frames only, if any is of Pathways Lab."""
        self.last = error
        if not source_lines.passes_the_lab(trace):
            return list(self._every_frame(kind, error, trace, *args, **kwargs))
        own = source_lines.without_machinery(trace)
        out = list(self._every_frame(kind, error, own, *args, **kwargs))
        return [*out, HINT] if isinstance(error, Exception) else out

    def everything(self) -> str:
        """The newest error with every frame, and what its host said."""
        error = self.last or getattr(sys, "last_value", None)
        if error is None:
            return "no error yet"
        text = "\n".join(self._every_frame(type(error), error, error.__traceback__))
        failure = getattr(error, "failure", None)
        # A failure in this process is in the frames above already.
        if isinstance(failure, Failure) and failure.details and error.__cause__ is None:
            text += f"\n\n--- where it happened ---\n{failure.details}"
        return text
