"""Dask's worker of ``cluster worker``: ``python -m pathways_lab.cli.worker --name NAME ...``.

Problem: a host is a Dask worker and its device process, and two interpreters that import what
they need take half as long again as one that imports it for both.

How: everything is imported, a copy is made that waits to become the first device process, and
then this is ``dask worker`` with these options.  Where there are accelerators, or JAX cannot be
imported, no copy is made, and the lab starts a device process as with any worker.

Rule for maintainers: nothing is started, and no thread begun, before the copy is made.

Paper: section 4.5 (one executor process per host).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path


def main() -> None:
    """Be Dask's worker."""
    from pathways_lab.runtime.processes.interpreter_settings import imports

    with imports():
        from distributed.cli import dask_worker

        from pathways_lab.runtime.cluster import dask_plugins  # noqa: F401 (the lab brings it)

        host = _host()
    if host is not None:
        _prepare(host)
    dask_worker.main()


def _host() -> Callable[[], None] | None:
    """The work of a device process, imported, where a copy of this process may do it."""
    from pathways_lab.runtime.cluster import accelerators
    from pathways_lab.runtime.processes.child_copies import can_fork

    if not can_fork() or accelerators.find() != accelerators.Found():
        return None
    try:
        from pathways_lab.runtime.host import process

        process.import_all()
    except Exception:
        return None  # the device process that the lab starts then says why
    return process.be_copy


def _prepare(host: Callable[[], None]) -> None:
    from pathways_lab.runtime.cluster import device_supervisor
    from pathways_lab.runtime.processes import child_copies
    from pathways_lab.transport.addresses import private_folder

    folder = private_folder()
    name = device_supervisor.label(sys.argv[sys.argv.index("--name") + 1])
    copy = child_copies.fork(functools.partial(_be_copy, host, folder), name=name, folder=folder)
    device_supervisor.prepared.append((copy, folder))


def _be_copy(host: Callable[[], None], folder: Path) -> None:
    from pathways_lab.runtime.processes import child_process
    from pathways_lab.transport.addresses import remove_folder

    child_process.at_end(functools.partial(remove_folder, folder))
    host()


if __name__ == "__main__":
    main()
