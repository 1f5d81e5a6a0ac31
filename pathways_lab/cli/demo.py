"""``demo``: a notebook from top to bottom without a browser.

Rule for maintainers: the executed notebook is written also when a cell fails;
it is what one looks at to see why.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import time
from pathlib import Path
from typing import Any

from pathways_lab.cli import kernels, shipped

SECONDS_PER_CELL = 600
ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Progress:
    """One line per code cell: its first line, and how long it took."""

    def __init__(self, cells: int) -> None:
        self.cells = cells
        self.done = 0
        self.started = 0.0

    def begin(self, cell: Any, cell_index: int) -> None:
        """nbclient's ``on_cell_execute``."""
        self.started = time.monotonic()

    def end(self, cell: Any, cell_index: int, execute_reply: Any) -> None:
        """nbclient's ``on_cell_executed``: also for a cell that failed."""
        self.done += 1
        lines = [line for line in cell.source.splitlines() if line.strip()]
        first = lines[0] if lines else ""
        seconds = time.monotonic() - self.started
        print(f"[{self.done:2}/{self.cells}] {seconds:6.1f} s  {first[:70]}", flush=True)


def run(name: str, output: Path) -> int:
    """Execute the shipped notebook *name* and leave it in the folder *output*."""
    if importlib.util.find_spec("nbclient") is None:
        print("nbclient is not installed here. Remedy: pip install 'pathways-lab[notebook]'")
        return 1
    source = shipped.notebooks() / name
    if not source.is_file():
        names = ", ".join(sorted(path.name for path in source.parent.glob("*.ipynb")))
        print(f"There is no notebook {name!r}. There are: {names}")
        return 1
    # Who checks a notebook's form loads a grammar of addresses in all languages if it is there,
    # which takes two seconds.  Notebooks have no such addresses.
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError
    from traitlets.config import Config

    notebook = nbformat.read(source, as_version=4)
    output.mkdir(parents=True, exist_ok=True)
    target = output / name
    code = [c for c in notebook.cells if c.cell_type == "code" and c.source.strip()]
    progress = Progress(len(code))
    config = Config()
    if kernels.can_encrypt():
        config.KernelManager.transport_encryption = kernels.POLICY
    client = NotebookClient(
        notebook,
        config=config,
        timeout=SECONDS_PER_CELL,
        kernel_name="python3",
        resources={"metadata": {"path": str(output.resolve())}},
        # Live widgets would be shown by whoever opens the file, without a kernel behind them.
        store_widget_state=False,
        on_cell_execute=progress.begin,
        on_cell_executed=progress.end,
    )
    started = time.monotonic()
    failure = ""
    try:
        client.execute()
    except CellExecutionError as error:
        failure = ANSI.sub("", str(error)).strip()
    finally:
        nbformat.write(notebook, target)
    if failure:
        print(f"\n{failure}\n\nThe notebook up to there: {target.resolve()}")
        return 1
    print(f"Executed in {time.monotonic() - started:.0f} s: {target.resolve()}")
    return 0
