"""``lab``: JupyterLab with the quickstart open.

Rule for maintainers: JupyterLab takes over this process, so that signals, the
terminal and the exit status are its own and nothing of us lingers above it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pathways_lab.cli import kernels, shipped

CONFIGURATION = Path(__file__).resolve().parent / "jupyter_config"
"""Defaults of this JupyterLab alone: it does not ask whether it may fetch news."""

QUIET = (
    # No request leaves the machine: no news, no check for updates, no list of extensions.
    "--LabApp.news_url=None",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    "--LabApp.extension_manager=readonly",
)


def command(notebook: Path, rest: Sequence[str], root: bool, encrypt: bool) -> list[str]:
    """The command line of JupyterLab.

    root: running as the superuser, as in containers.  encrypt: the channels of kernels.
    """
    line = [
        *(sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={notebook.parent}"),
        # Not as an argument: so the printed links lead to the notebook too, for those who have to
        # open one by hand (WSL2, a remote machine).
        f"--LabApp.default_url=/lab/tree/{notebook.name}",
        *QUIET,
    ]
    if root:
        # JupyterLab refuses the superuser unless told; it still listens on loopback, with a token.
        line.append("--allow-root")
    if encrypt:
        line.append(f"--KernelManager.transport_encryption={kernels.POLICY}")
    return [*line, *rest]


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of JupyterLab: *inherited*, with our defaults in the search path."""
    paths = [str(CONFIGURATION), inherited.get("JUPYTER_CONFIG_PATH", "")]
    return {**inherited, "JUPYTER_CONFIG_PATH": os.pathsep.join(filter(None, paths))}


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
    quickstart = folder.resolve() / shipped.QUICKSTART
    line = command(quickstart, rest, root=os.geteuid() == 0, encrypt=kernels.can_encrypt())
    os.execve(sys.executable, line, environment(os.environ))
