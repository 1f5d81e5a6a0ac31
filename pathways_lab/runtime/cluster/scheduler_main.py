"""The embedded lab's Dask scheduler: ``python -m pathways_lab.runtime.cluster.scheduler_main``.

Problem: the scheduler must not share the notebook kernel's process, and the
lab must be there in seconds although importing Dask takes one by itself.

How: the control plane is started before Dask is imported; the plugin in the
scheduler adopts it.  Credentials are made here and reported to the parent.

Rule for maintainers: no work before :func:`pathways_lab.runtime.processes.child_process.begin`;
everything listens on loopback and demands the temporary credentials.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from pathways_lab.runtime.cluster.start_control_plane import ControlProcess, ControlSettings
from pathways_lab.runtime.processes import child_process

if TYPE_CHECKING:
    from distributed import Scheduler


def main() -> None:
    """The process: configuration in, addresses out, then serve until the parent is gone."""
    child_process.begin()
    config = child_process.configuration()
    settings = ControlSettings.from_plain(config["control"])
    if settings.comms:
        # The control plane itself needs the credentials: Dask first, this once.
        settings.tls = _credentials()
    control = ControlProcess(settings)
    child_process.at_end(control.close)
    control.wait_ready()
    child_process.report(stage="control", pid=control.pid, address=control.address)

    asyncio.run(_serve(control, settings.tls or _credentials(), config["pages"]))
    child_process.leave()


def _credentials() -> dict[str, str]:
    from distributed import Security

    from pathways_lab.runtime.cluster import dask_private

    made = dask_private.pems_of(Security.temporary(), "worker")
    assert made is not None
    return made


async def _serve(
    control: ControlProcess, pems: dict[str, str], plain: dict[str, Any] | None
) -> None:
    from distributed import Scheduler

    from pathways_lab.runtime.cluster import dask_private
    from pathways_lab.runtime.cluster.dashboard_socket import Pages
    from pathways_lab.runtime.cluster.dask_plugins import ControlPlugin, adopt, mark_embedded

    pages = Pages(**plain) if plain else None
    scheduler: Scheduler = dask_private.unheard(Scheduler)(
        host="127.0.0.1",
        port=0,
        protocol="tls",
        security=dask_private.security_without_files(pems),
        # Its pages are loaded when somebody asks for them, and its web server listens then.
        dashboard=False,
        plugins=[ControlPlugin(None, pages)],
        # Else Dask makes one for all its schedulers, and leaves files there.
        local_directory=str(control.settings.folder),
    )
    adopt(scheduler, control)
    mark_embedded(scheduler)
    async with scheduler:
        child_process.report(
            stage="scheduler",
            address=scheduler.address,
            tls=pems,
            control=control.address,
        )
        loop = asyncio.get_running_loop()
        threading.Thread(target=_fulfil, args=(scheduler, loop), daemon=True).start()
        await scheduler.finished()


def _fulfil(scheduler: Scheduler, loop: asyncio.AbstractEventLoop) -> None:
    """Serve the parent's later request: the dashboard."""
    from pathways_lab.runtime.cluster import dask_private
    from pathways_lab.runtime.cluster.dask_plugins import publish

    def load() -> None:
        address = dask_private.load_dashboard(scheduler)
        publish(scheduler)
        child_process.report(stage="dashboard", address=address)

    child_process.configuration()
    dask_private.import_dashboard()  # not in the loop, which it would hold up for a second
    loop.call_soon_threadsafe(load)


if __name__ == "__main__":
    main()
