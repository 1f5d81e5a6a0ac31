"""The way from Dask's web server to the process that draws the lab's pages.

Problem: pages of a lab belong on the dashboard of its Dask cluster, and drawing
them in the scheduler's process would stall its loop; most labs are never looked
at, and must not pay for it.

How: the scheduler listens on a Unix socket in the lab's private folder.  When
a request comes, it starts a process, hands it the listening socket and listens
no more; when that process ends, because no page was open for a while or
because it failed, the scheduler listens again.  Its own web server passes
requests for the pages on to that socket (:mod:`.dashboard_proxy`).

Rule for maintainers: the starter of the lab names the module that draws; this layer
imports none of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pathways_lab.runtime.cluster.start_control_plane import ControlProcess
from pathways_lab.runtime.processes.child_process import Child, ChildDied, spawn

log = logging.getLogger("pathways_lab")

SOCKET = "dashboard"
"""Name of the Unix socket in the lab's private folder, where Jupyter's server looks for it."""

_AGAIN = 5.0
"""Seconds before a process that failed is started once more."""


@dataclass(frozen=True, slots=True)
class Pages:
    """module: run as the process that draws.  names: title by path of each page."""

    module: str
    names: Mapping[str, str]

    def plain(self) -> dict[str, Any]:
        """For a lifeline."""
        return {"module": self.module, "names": dict(self.names)}


class Door:
    """The listening socket, and the process behind it while there is one.

    control: whose pages these are.
    Made and closed in the scheduler's event loop.
    """

    def __init__(self, pages: Pages, control: ControlProcess) -> None:
        self.path = control.settings.folder / SOCKET
        self.pages = pages
        self.control = control
        self._loop = asyncio.get_running_loop()
        self._child: Child | None = None
        self._closed = False
        self._socket = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self._socket.bind(str(self.path))
        self._socket.listen(64)
        self._listen()

    def _listen(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._socket, self._knock)

    def _knock(self) -> None:
        self._loop.remove_reader(self._socket)
        self._task = self._loop.create_task(self._serve())

    async def _serve(self) -> None:
        """Have a process answer until it ends."""
        if not await asyncio.to_thread(self._run) and not self._closed:
            await asyncio.sleep(_AGAIN)
        self._listen()

    def _run(self) -> bool:
        """Start the process and wait for its end; whether it ended in peace."""
        settings = self.control.settings
        configuration = {
            "listen": self._socket.fileno(),
            "address": self.control.address,
            "key": settings.key.hex(),
            "tls": settings.tls,
        }
        try:
            child = self._child = spawn(
                self.pages.module,
                configuration,
                name="dashboard",
                folder=settings.folder,
                pass_fds=(self._socket.fileno(),),
            )
        except ChildDied as death:
            log.warning("no process draws the lab's pages: %s", death)
            return False
        if self._closed:
            child.let_go()
        child.wait()
        peaceful = child.exit_code == 0
        if not peaceful:
            log.warning("the process that draws the lab's pages failed: %s", child.last_words())
        child.end()
        return peaceful

    def close(self) -> None:
        """End the process and listen no more."""
        self._closed = True
        self._loop.remove_reader(self._socket)
        self._socket.close()
        if self._child is not None:
            self._child.let_go()
