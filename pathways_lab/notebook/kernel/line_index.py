"""Where in the notebook a source line is.

Problem: records name the user's line by the pseudo file as which the kernel compiled
its cell; a page, whose editors shall show that line, knows cells by their ids.

How: a front end sends a cell's id with its text, so before a cell runs, its file, its id and its
number are kept together.  A text that was run from several cells belongs to the last one.

Rule for maintainers: a line that is in no known cell has no place; never guess one.
"""

from __future__ import annotations

import re
from typing import Any

_LINE = re.compile(r"(.*?):(\d+): ?(.*)", re.DOTALL)

_PSEUDO = re.compile(r"^<|ipykernel_")

_cells: dict[str, str] = {}
"""Id of the cell by the pseudo file of its text; IPython keeps the texts as long."""

numbers: dict[str, int] = {}
"""The same for the number of the cell that its prompt shows; the process that draws is told."""


def split(line: str) -> tuple[str, int, str] | None:
    """File, number and text of a record's line; None: it is not known."""
    found = _LINE.fullmatch(line)
    return (found[1], int(found[2]), found[3]) if found else None


def source(line: str) -> str:
    """A record's line as readers know it, with its cell or its file by name; of a cell that is not
    known there is only a pseudo file."""
    known = split(line)
    if known is None:
        return line
    file, number, text = known
    name = "" if _PSEUDO.search(file) else file.rpartition("/")[2]
    name = f"cell [{numbers[file]}]" if file in numbers else name
    return f"{number}{' of ' * bool(name)}{name}: {text}"


def note(shell: Any, file: str = "") -> None:
    """Remember which cell runs now.  file: as which it was compiled, if not by the shell."""
    kernel = getattr(shell, "kernel", None)
    asked = kernel.get_parent() if kernel is not None else {}
    cell = asked.get("metadata", {}).get("cellId", "")
    text = asked.get("content", {}).get("code", "")
    file = file or shell.compile.get_code_name(text, text, shell.execution_count)
    numbers[file] = shell.execution_count
    if cell:
        _cells[file] = cell


def place_of(line: str) -> dict[str, Any] | None:
    """Where a page finds a record's line: ``cell`` (its id), ``number``, ``text``."""
    known = split(line)
    if known is None or known[0] not in _cells:
        return None
    file, number, text = known
    return {"cell": _cells[file], "number": number, "text": text}
