"""The process that introduces hosts to each other, and the control plane's end of it.

Problem: processes that form one JAX runtime meet at a *coordination service*,
where they leave each other their addresses whenever a new group of devices
computes together.  It must be neither in a host (hosts die one by one, and
JAX ends every process whose service is gone) nor in the control plane (it is
native code with threads of its own that can end its process: an address that
it cannot bind is a crash).

How: a process of its own with one service per formation, a child of the
control plane: it shares its parent's fate through its lifeline; the control
plane alone asks it for anything and knows at once what is lost with it.  Were
it a child of the control plane's parent, every request would pass through the
Dask scheduler's event loop, which stalls under load.  Requests are lines on
the lifeline, so it opens no door of its own for them.

Rule for maintainers: it imports jaxlib and not JAX.  Nothing here waits in the
caller's thread.

Paper: section 4.5 (hosts are joined by the accelerator's own runtime).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pathways_lab.runtime.processes import child_process
from pathways_lab.runtime.processes.child_process import Child, ChildDied
from pathways_lab.transport import addresses

MODULE = "pathways_lab.runtime.islands.coordination_service"
_PATIENCE = 24 * 3600.0
_START_SECONDS = 60.0


class CoordinationLost(RuntimeError):
    """The coordination process ended, or could not do what it was asked."""


Opened = Callable[[str | CoordinationLost], object]
"""Called with the address of the service, or with why there is none."""


class _Incarnation:
    """One coordination process: who waits for it, and which formations it serves."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.waiting: dict[int, Opened] = {}
        self.open: set[int] = set()

    def ask(self, request: dict[str, Any]) -> None:
        # One that died is noticed by its listener.
        with contextlib.suppress(ChildDied):
            self.child.tell(request)


class Coordination:
    """The coordination process, started at the first need and again after a loss.

    folder: private, for its log and sockets.
        Hosts of other machines are brought to these by the control plane.
    on_lost(formations, why): these are open and their service is gone.  Gangs
        in them go on (:mod:`pathways_lab.runtime.islands.coordination_relay`); device groups
        that never computed together before cannot meet any more.

    Formations are numbers that are never used twice.  All callbacks run in a
    thread of this object's own.
    """

    def __init__(
        self,
        folder: Path,
        on_lost: Callable[[list[int], str], object] = lambda formations, why: None,
    ) -> None:
        self._folder = folder
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._now: _Incarnation | None = None
        self._ended = False

    @property
    def pid(self) -> int | None:
        """The process number, while there is a process."""
        now = self._now
        return now.child.pid if now is not None and now.child.alive else None

    def start(self) -> None:
        """Start it now, to save half a second later.  Again is fine."""
        with self._lock:
            self._alive()

    def open(self, formation: int, processes: int, done: Opened) -> None:
        """Open a service for a formation of *processes* hosts; *done* is told its address."""
        with self._lock:
            now = self._alive()
            now.waiting[formation] = done
        now.ask({"open": formation, "processes": processes})

    def close(self, formation: int) -> None:
        """Its hosts need no more introductions: the formation has ended."""
        with self._lock:
            now = self._now
            if now is None:
                return
            known = now.waiting.pop(formation, None) is not None or formation in now.open
            now.open.discard(formation)
        if known:
            now.ask({"close": formation})

    def end(self) -> None:
        """End the process; nothing is reported any more.  Again is fine."""
        with self._lock:
            self._ended = True
            now, self._now = self._now, None
            if now is not None:
                now.waiting.clear()
                now.open.clear()
        if now is not None:
            now.child.end()

    def _alive(self) -> _Incarnation:
        if self._ended:
            raise CoordinationLost("the lab is closing")
        if self._now is None or not self._now.child.alive:
            configuration = {"folder": str(self._folder)}
            child = child_process.spawn(
                MODULE, configuration, name="coordination", folder=self._folder
            )
            self._now = _Incarnation(child)
            threading.Thread(
                target=self._listen, args=(self._now,), name="coordination", daemon=True
            ).start()
        return self._now

    def _listen(self, now: _Incarnation) -> None:
        try:
            now.child.hear(_START_SECONDS)
            while True:
                report = now.child.hear(_PATIENCE)
                formation = report["formation"]
                with self._lock:
                    done = now.waiting.pop(formation, None)
                    if done is not None and "address" in report:
                        now.open.add(formation)
                if done is not None:
                    done(report.get("address") or CoordinationLost(report["refused"]))
        except ChildDied as death:
            why = str(death)
        now.child.end()
        with self._lock:
            waiting, lost = dict(now.waiting), sorted(now.open)
            now.waiting.clear()
            now.open.clear()
        for done in waiting.values():
            done(CoordinationLost(why))
        if lost:
            self._on_lost(lost, why)


# --- the process -------------------------------------------------------------------


def _new_address(folder: Path, number: int) -> str:
    """A free address, as gRPC takes it.  Raises OSError, ValueError where there is none."""
    path = str(folder / f"c{number}.sock")
    family, name = addresses.parse(f"unix:{path}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with socket.socket(family) as trial:
        trial.bind(name)
    os.unlink(path)
    return f"unix:{path}"


def main() -> None:
    """Serve until the control plane is gone."""
    child_process.begin()
    configuration = child_process.configuration()
    from pathways_lab.runtime.islands.jax_coordination import coordination_service

    folder = Path(configuration["folder"])
    services: dict[int, Any] = {}
    child_process.report(ready=True)
    while True:
        request = child_process.configuration()
        if "close" in request:
            service = services.pop(request["close"], None)
            if service is not None:
                # Seconds, where somebody still waits for a host that never came.
                threading.Thread(target=service.shutdown, daemon=True).start()
            continue
        formation = request["open"]
        try:
            if formation in services:
                raise ValueError(f"formation {formation} is open already")
            where = _new_address(folder, formation)
            services[formation] = coordination_service(where, request["processes"])
        except Exception as error:
            child_process.report(formation=formation, refused=f"{type(error).__name__}: {error}")
        else:
            child_process.report(formation=formation, address=where)


if __name__ == "__main__":
    main()
