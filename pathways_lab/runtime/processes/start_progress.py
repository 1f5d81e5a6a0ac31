"""The progress of a lab's start, for the front end that shows it.

Problem: the start takes seconds; a terminal shows a line, a notebook a bar,
a script nothing.

Rule for maintainers: shown from the thread that waits, never from another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple, TextIO


class Progress(NamedTuple):
    """text: what is happening or done.  done of total parts.  seconds since the start."""

    text: str
    done: int
    total: int
    seconds: float

    def __str__(self) -> str:
        bar = "█" * self.done + "░" * (self.total - self.done)
        return f"{bar} {self.text} ({self.seconds:.1f} s)"


Show = Callable[[Progress], object]

Tell = Callable[[str], object]
"""Shows a line of text, in place of the one before it where that can be."""


def in_terminal(text: str) -> None:
    """One line for each text, where nothing can show it better."""
    print(text, file=sys.stderr, flush=True)


def line(stream: TextIO | None = None) -> Show:
    """One line that is rewritten in a terminal; nothing where there is no terminal."""
    out = stream or sys.stderr

    def show(progress: Progress) -> None:
        if out.isatty():
            end = "\n" if progress.done == progress.total else ""
            out.write(f"\r\x1b[K{progress}{end}")
            out.flush()

    return show
