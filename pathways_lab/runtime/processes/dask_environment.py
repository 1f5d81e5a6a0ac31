"""Settings of Dask's processes in which hosts live: they compute no tasks, and idle cheaply.

Problem: an idle worker of Dask takes 3% of a processor, and 32 of them on one machine all of it.
It samples its stacks, and its event loop ticks fifty times a second.

Rule for maintainers: the standard library only, since the command line imports this.

Paper: none; these are Dask's own settings.
"""

from __future__ import annotations

IDLE = {
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "1s",
    "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__INTERVAL": "5s",
}
"""No samples of stacks, a tick a second instead of fifty, and a look at the machine in five."""

QUIET = {
    **IDLE,
    "DASK_LOGGING__DISTRIBUTED": "error",
    "DASK_DISTRIBUTED__WORKER__MEMORY__TARGET": "False",
    "DASK_DISTRIBUTED__WORKER__MEMORY__SPILL": "False",
    "DASK_DISTRIBUTED__WORKER__MEMORY__PAUSE": "False",
    "DASK_DISTRIBUTED__WORKER__MEMORY__TERMINATE": "False",
    "DASK_DISTRIBUTED__DIAGNOSTICS__NVML": "False",
}
"""In our own cluster there are no warnings in notebooks, either."""
