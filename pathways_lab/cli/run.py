"""``python -m pathways_lab run``: a script that only imports JAX, on a lab.

Rule for maintainers: the script is a process of its own, which is given nothing but its
environment; it ends as it would without a lab, and so does the command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from pathways_lab.client.lab import opening as labs
from pathways_lab.core.errors import PathwaysError


def run(
    command: list[str],
    islands: int,
    hosts_per_island: int | None,
    devices_per_host: int | None,
    memory: str | None,
    lab_file: Path | None,
    name: str,
    slice_index: bool,
) -> int:
    """Run a script with its arguments; its exit status.

    lab_file: of a lab that runs already; None: one is started for the script.
    """
    try:
        if lab_file is None:
            lab = labs.start(islands, hosts_per_island, devices_per_host, memory=memory)
        else:
            lab = labs.connect(lab_file)
        with lab, lab.door(name, slice_index=slice_index) as variables:
            # Ctrl-C is the script's, which has its own from the terminal.
            before = signal.signal(signal.SIGINT, lambda *_: None)
            try:
                status = subprocess.run([sys.executable, *command], env=os.environ | variables)
            finally:
                signal.signal(signal.SIGINT, before)
    except PathwaysError as error:
        print(error, file=sys.stderr)
        return 1
    code = status.returncode
    return 128 - code if code < 0 else code
