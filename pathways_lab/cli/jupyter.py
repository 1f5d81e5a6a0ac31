"""``lab``: JupyterLab with the quickstart open.

Rule for maintainers: JupyterLab takes over this process, so that signals, the
terminal and the exit status are its own and nothing of us lingers above it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pathways_lab.cli import shipped

QUIET = (
    # No request leaves the machine: no news, no check for updates, no list of extensions.
    "--LabApp.news_url=None",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    "--LabApp.extension_manager=readonly",
)


def command(notebook: Path, rest: Sequence[str], root: bool) -> list[str]:
    """The command line of JupyterLab.  root: running as the superuser, as in containers."""
    line = [sys.executable, "-m", "jupyterlab", str(notebook), *QUIET]
    # JupyterLab refuses the superuser unless told; it still listens on loopback, with a token.
    return [*line, *(["--allow-root"] if root else []), *rest]


def run(folder: Path, fresh: bool, in_place: bool, rest: Sequence[str]) -> int:
    """Prepare the folder and become JupyterLab; returns only when that cannot start."""
    if importlib.util.find_spec("jupyterlab") is None:
        print("JupyterLab is not installed here. Remedy: pip install 'pathways-lab[notebook]'")
        return 1
    source = shipped.notebooks()
    if in_place:
        folder = source
    else:
        for remark in shipped.copy(source, folder, fresh):
            print(remark)
    print(f"Notebooks: {folder.resolve()}", flush=True)
    line = command(folder.resolve() / shipped.QUICKSTART, rest, root=os.geteuid() == 0)
    os.execv(sys.executable, line)
