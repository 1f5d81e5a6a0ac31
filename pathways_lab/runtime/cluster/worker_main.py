"""One Dask worker of the embedded lab: ``python -m pathways_lab.runtime.cluster.worker_main``.

Problem: a host is a Dask worker and its device process; both take long to be there, and
neither needs the other for it.

How: the device process is started first (all that it must know is decided by
the parent), then Dask is imported, then the scheduler's address is awaited on
the lifeline.  Usually this process is a copy of one that has imported everything
(:mod:`pathways_lab.runtime.cluster.workers_main`), and the device process a copy of it.

Rule for maintainers: no work before :func:`.child_process.begin`, but for a copy;
what is started here ends here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pathways_lab.runtime.cluster.death_reports import DeathReports
from pathways_lab.runtime.cluster.device_supervisor import PATIENCE, DeviceProcess, label
from pathways_lab.runtime.host import process
from pathways_lab.runtime.processes import child_copies, child_process
from pathways_lab.runtime.processes.child_process import Child, ChildDied


def main() -> None:
    """The process: configuration in, progress out, then serve until the parent is gone."""
    child_process.begin()
    work(child_process.configuration(), None)


def be_copy(config: dict[str, Any], copied: bool) -> None:
    """The work of :func:`main`, in a copy of a process; copied: so is the device process."""
    device = None
    if copied:
        name, folder = label(config["device"]["name"]), Path(config["folder"])
        device = child_copies.fork(process.be_copy, name=name, folder=folder)
    child_process.begin()
    work(config, device)


def work(config: dict[str, Any], first: Child | None) -> None:
    """Progress out, then serve until the parent is gone.

    first: the first device process, if it is there already and waits for its configuration.
    """
    folder = Path(config["folder"])
    settings = {**config["device"], "worker_pid": os.getpid()}
    cluster: dict[str, Any] = {}
    if not settings["control"]:
        # Links over Dask's comms need the cluster's certificates, so they wait for Dask.
        cluster = child_process.configuration()
        settings |= {"control": cluster["control"], "tls": cluster["tls"]}
    reports = DeathReports(settings)
    device = DeviceProcess(
        settings,
        folder,
        reports.changed,
        module=config["module"],
        environment=config["environment"],
        first=first,
    )
    child_process.at_end(device.close)
    threading.Thread(target=_tell_when_ready, args=(device,), daemon=True).start()

    import asyncio

    import distributed  # noqa: F401 (loaded while the scheduler starts)

    cluster = cluster or child_process.configuration()
    lost = asyncio.run(serve(settings["name"], folder, cluster, there=reports.attach))
    device.retire(PATIENCE, lab_lost=lost)
    child_process.leave()


def _tell_when_ready(device: DeviceProcess) -> None:
    try:
        device.wait_ready()
    except ChildDied as death:
        child_process.report(stage="failed", reason=str(death))
    else:
        child_process.report(stage="device", pid=device.pid)


async def serve(
    name: str,
    folder: Path,
    cluster: dict[str, Any],
    resources: dict[str, float] | None = None,
    there: Callable[[Any], object] = lambda worker: None,
) -> bool:
    """Until the worker has ended; whether because its scheduler is gone.

    there(worker): called when Dask has it.
    """
    from distributed import Worker

    from pathways_lab.runtime.cluster import dask_private

    async with dask_private.unheard(Worker)(
        cluster["address"],
        name=name,
        nthreads=1,
        # Bytes are the store's business, and Dask's tasks here are small.
        memory_limit=0,
        local_directory=str(folder / name.replace("/", "-")),
        security=dask_private.security_without_files(cluster["tls"]),
        host="127.0.0.1",
        dashboard=False,
        resources=resources,
    ) as worker:
        there(worker)
        child_process.report(stage="worker", pid=os.getpid())
        await worker.finished()
    return not dask_private.has_scheduler(worker)


if __name__ == "__main__":
    main()
