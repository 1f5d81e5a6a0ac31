"""Which kernels have a lab: for JupyterLab's side panel, which shows a notebook its own.

Problem: Jupyter's server lists all labs of a user, and knows a kernel by a number
only; which lab is whose, only the kernels know, and they are busy.

How: a kernel leaves an empty file, called by that number, in the private folder of
each lab that it opens on this machine; it goes with the lab.

Rule for maintainers: a note and no more; a lab works without it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

FOLDER = "kernels"
"""In a lab's private folder; Jupyter's server reads it."""


def note(folder: Path) -> None:
    """This kernel has the lab with that folder, from now on."""
    number = _number()
    if number:
        with contextlib.suppress(OSError):
            (folder / FOLDER).mkdir(exist_ok=True)
            (folder / FOLDER / number).touch()


def _number() -> str:
    """The name of this process in Jupyter's server; "" where it is no kernel."""
    try:
        from ipykernel.connect import get_connection_file

        return Path(get_connection_file()).stem.removeprefix("kernel-")
    except (ImportError, RuntimeError):
        return ""
