"""How the control plane hears, from the worker, why a device process has ended.

Problem: the control plane sees a link that closes and no more; exit code, signal and last
words are known to the worker that is the process's parent, and so is whether another one
will be there soon.

How: over Dask's own connection between worker and scheduler, as an event; the plugin on the
scheduler hands it to the control plane.

Rule for maintainers: no Dask is imported here; embedded workers load it later than this.

Paper: section 4.1.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from pathways_lab.runtime.cluster.device_supervisor import Change

TOPIC = "pathways-lab-device-processes"
"""Topic of the events in Dask."""


class DeathReports:
    """Those of one host.  configuration: of its device process."""

    def __init__(self, configuration: dict[str, Any]) -> None:
        self._who = {name: configuration[name] for name in ("name", "island")}
        # Dask itself adds the worker's address, as "worker".
        self._who["worker_name"] = configuration["worker"]
        self._worker: Any = None
        self._waiting: list[dict[str, Any]] = []

    def attach(self, worker: Any) -> None:
        """From now on they go over this Dask worker; so does what came before it."""
        self._worker = worker
        waiting, self._waiting = self._waiting, []
        for report in waiting:
            self._send(report)

    def changed(self, change: Change) -> None:
        """Any thread."""
        if change.state in ("died", "given up", "left out"):
            report = {**self._who, **dataclasses.asdict(change)}
            if self._worker is None:
                self._waiting.append(report)
            else:
                self._send(report)

    def _send(self, report: dict[str, Any]) -> None:
        with contextlib.suppress(RuntimeError):  # its loop has ended, and the lab for it
            self._worker.log_event(TOPIC, report)
