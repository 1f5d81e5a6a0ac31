"""``python -m pathways_lab stop``: the end of a lab that outlives its kernels.

Rule for maintainers: a word for :mod:`pathways_lab.runtime.processes.kept_labs`.
"""

from __future__ import annotations

import sys

from pathways_lab.core.errors import PathwaysError
from pathways_lab.runtime.processes import kept_labs


def run(name: str) -> int:
    """End the lab that is kept under a name; the exit status."""
    try:
        kept_labs.stop(name)
    except PathwaysError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"the lab {name!r} has ended")
    return 0
