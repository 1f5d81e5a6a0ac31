"""Hooks of the client for front ends, which the client does not know.

Problem: a lab shows live views and the progress of its start, but how depends
on where it is used (a notebook, a terminal, a script), and the client must not
import what draws.

Rule for maintainers: set by whoever stands above the client (the public
package, the notebook extension); the client works with all of them unset.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pathways_lab.core.errors import Failure
from pathways_lab.runtime.cluster.dashboard_socket import Pages
from pathways_lab.runtime.processes import start_progress
from pathways_lab.runtime.processes.start_progress import Show, Tell, in_terminal

lab_opened: Callable[[Path], None] | None = None
"""``lab_opened(folder)``: told the private folder of a lab of this machine that this kernel has."""

lab_closes: Callable[[Any], None] | None = None
"""``lab_closes(lab)``: told, in the closing thread, before a lab leaves its cluster."""

open_door: Callable[..., Any] | None = None
"""``open_door(lab, name, slice_index, lead)``: the door by which JAX has the lab's devices here."""

pages: Pages | None = None
"""Pages that a lab started here adds to its Dask cluster's dashboard."""

open_dashboard: Callable[..., Any] | None = None
"""``open_dashboard(lab, folder, page, height)``: shows a page of the lab's dashboard; folder: its
private one, when it is on this machine; height in pixels."""

show_progress: Callable[[], Show] | None = None
"""Makes a display of the start of a lab; None: one line in a terminal."""

show_line: Callable[[], Tell] | None = None
"""Makes a display of what a cell waits for, one line that changes; None: lines on stderr."""

open_notes: Callable[[], Callable[[str | Failure], None]] | None = None
"""Makes a place below the running cell for what is noticed later, by any thread."""


def display() -> Show:
    """A display of how far something is."""
    return start_progress.line() if show_progress is None else show_progress()


def line() -> Tell:
    """A display of what somebody waits for."""
    return in_terminal if show_line is None else show_line()
