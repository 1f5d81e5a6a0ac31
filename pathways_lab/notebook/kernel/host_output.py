"""Output of user code on hosts, below the cell that ran it.

Problem: ``jax.debug.print`` runs in another process, any time after its cell
was left; printed from a thread it would land below the cell that runs then.

Rule for maintainers: nothing is printed; each program's cell has an output of
its own, which is updated.  Bounded: the newest lines are kept, the number of omitted ones
is said.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from pathways_lab.client.session.session import Session, labelled
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.notebook.kernel.errors import render

LINES = 200
PERIOD = 0.2
"""Seconds between two updates of an output."""

CELLS = 64
"""Cells that are remembered; text for older ones is not ours any more."""


class Pane:
    """The printed lines of one cell.  show: replaces its output by a text; any thread."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._lines: deque[str] = deque(maxlen=LINES)
        self._count = 0
        self._lock = threading.Lock()
        self._due = 0.0
        self._timer: threading.Timer | None = None

    def add(self, text: str) -> None:
        """Append lines; the output follows within :data:`PERIOD` seconds."""
        lines = text.splitlines()
        with self._lock:
            self._lines.extend(lines)
            self._count += len(lines)
            if self._timer is None:
                self._timer = threading.Timer(max(0.0, self._due - time.monotonic()), self._flush)
                self._timer.daemon = True
                self._timer.start()

    def _flush(self) -> None:
        with self._lock:
            self._timer = None
            self._due = time.monotonic() + PERIOD
            text = self.text
        self._show(text)

    @property
    def text(self) -> str:
        """All that is kept, oldest first."""
        missing = self._count - len(self._lines)
        head = [f"... {missing} earlier lines"] if missing else []
        return "\n".join([*head, *self._lines])


class Printed:
    """Gives text from hosts to the cell of its run.

    in_notebook: False where outputs cannot be updated; then text is printed by
        whoever waits for a value.
    """

    def __init__(self, in_notebook: bool) -> None:
        self.in_notebook = in_notebook
        self._panes: OrderedDict[int, Pane] = OrderedDict()
        self._lock = threading.Lock()

    def adopt(self, session: Session, runs: frozenset[int], pane: Pane) -> None:
        """Text of these runs goes to *pane*, also what has come already."""
        with self._lock:
            for run in runs:
                self._panes[run] = pane
            while len(self._panes) > CELLS:
                self._panes.popitem(last=False)
        session.show_output = self.show
        for _ in range(len(session.outputs)):
            fields = session.outputs.popleft()
            if not self.show(fields):
                session.outputs.append(fields)

    def show(self, fields: dict[str, Any]) -> bool:
        """Take one message; False when its run is not one of a cell.  Any thread."""
        with self._lock:
            pane = self._panes.get(int(fields.get("run", 0)))
        if pane is None:
            return False
        pane.add(labelled(fields))
        return True


def pane_below_cell() -> Pane:
    """An output below the running cell, empty until something is printed."""
    from IPython import display as ipython

    display: Any = ipython.display
    handle = display({"text/plain": ""}, raw=True, display_id=True)
    return Pane(lambda text: handle.update({"text/plain": text}, raw=True))


def notes_below_cell(place_name: Callable[[str], str]) -> Callable[[str | Failure], None]:
    """The same for what is noticed after the cell has ended.

    place_name: what a file or a cell is called.
    """
    pane = pane_below_cell()

    def note(what: str | Failure) -> None:
        if isinstance(what, str):
            pane.add(what)
        else:  # without the offer to show more: there is no more
            pane.add("\n".join(render(PathwaysError(what), place_name)[:-1]))

    return note
