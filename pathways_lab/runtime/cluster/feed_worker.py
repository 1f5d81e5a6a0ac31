"""A Dask worker that owns no devices: ``python -m pathways_lab.runtime.cluster.feed_worker``.

Problem: host computations (the elements of feeds) are Dask tasks.  Beside a process that
launches gangs they would take its cores and its interpreter at the wrong moment, so they run
on workers of their own, which Dask knows by the resource :data:`FEEDS`.

Rule for maintainers: a worker with this resource never gets a device process, and nothing but
feeds asks for the resource.

Paper: section 4.2 (host computations run beside the accelerators, and launch nothing).
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from pathways_lab.runtime.processes import child_process

FEEDS = "pathways-feed"
"""The Dask resource: ``dask worker --resources "pathways-feed=1"`` on clusters of one's own."""


def main() -> None:
    """The process: configuration in, a report when Dask has the worker, then serve."""
    child_process.begin()
    config = child_process.configuration()
    from pathways_lab.runtime.cluster.worker_main import serve

    work = serve(config["name"], Path(config["folder"]), config["cluster"], {FEEDS: 1})
    asyncio.run(work)
    child_process.leave()


if __name__ == "__main__":
    main()
