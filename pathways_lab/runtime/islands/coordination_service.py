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

Rule for maintainers: the process imports jaxlib and not JAX.  Nothing here
waits in the caller's thread or decides: the book of formations is pure, lives
in the reactor's thread, and hears everything through *post*.

Paper: section 4.5 (hosts are joined by the accelerator's own runtime).
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathways_lab.runtime.islands.coordination_relay import to_service
from pathways_lab.runtime.islands.process_groups import Book
from pathways_lab.runtime.islands.tls_tunnel import carry
from pathways_lab.runtime.processes import child_process
from pathways_lab.runtime.processes.child_process import Child, ChildDied
from pathways_lab.transport import addresses

MODULE = "pathways_lab.runtime.islands.coordination_service"
_PATIENCE = 24 * 3600.0
_START_SECONDS = 60.0


@dataclass(slots=True)
class _Served:
    """A formation: its coordination process, the book that asked, the service's address."""

    child: Child
    book: Book
    address: str = ""

    def ask(self, request: dict[str, Any]) -> None:
        # A process that died is noticed by its listener.
        with contextlib.suppress(ChildDied):
            self.child.tell(request)


class Coordination:
    """Implements :class:`pathways_lab.runtime.islands.process_groups.Services` with a process.

    The first formation starts the process, and the first after a loss starts
    another: a lab whose slices all lie on one host never has it.

    folder: private, for its log and sockets.
        Hosts of other machines are brought to these by the control plane.
    post(function, *args): run it in the reactor's thread; books hear everything there.
        Gangs of an orphaned formation go on
        (:mod:`pathways_lab.runtime.islands.coordination_relay`); device groups
        that never computed together before cannot meet any more.

    Formations are numbers that are never used twice.
    """

    def __init__(self, folder: Path, post: Callable[..., None]) -> None:
        self._folder = folder
        self._post = post
        self._lock = threading.Lock()
        self._served: dict[object, _Served] = {}
        self._child: Child | None = None
        self._ended = False

    @property
    def pid(self) -> int | None:
        """The process number, while there is a process."""
        child = self._child
        return child.pid if child is not None and child.alive else None

    def open(self, formation: int, processes: int, book: Book) -> None:
        """The book hears :meth:`Book.opened` or :meth:`Book.refused` later."""
        try:
            with self._lock:
                served = self._served[formation] = _Served(self._alive(), book)
        except ChildDied as error:  # no memory or no process left, or the lab closes
            self._post(book.refused, formation, str(error))
        else:
            served.ask({"open": formation, "processes": processes})

    def bring(self, formation: object, sealed: ssl.SSLSocket) -> None:
        """Carry a stream of a host on another machine to a service."""
        try:
            service = to_service(self._served[formation].address)
        except (LookupError, TypeError, OSError):  # it has ended meanwhile
            sealed.close()
        else:
            carry(service, sealed)

    def close(self, formation: int) -> None:
        """Its hosts need no more introductions: the formation has ended."""
        with self._lock:
            served = self._served.pop(formation, None)
        if served is not None:
            served.ask({"close": formation})

    def end(self) -> None:
        """End the process; nothing is reported any more.  Again is fine."""
        with self._lock:
            self._ended = True
            self._served.clear()
            child, self._child = self._child, None
        if child is not None:
            child.end()

    def _alive(self) -> Child:
        if self._ended:
            raise ChildDied("the lab is closing")
        if self._child is None or not self._child.alive:
            self._child = child_process.spawn(
                MODULE, {"folder": str(self._folder)}, name="coordination", folder=self._folder
            )
            threading.Thread(
                target=self._listen, args=(self._child,), name="coordination", daemon=True
            ).start()
        return self._child

    def _listen(self, child: Child) -> None:
        try:
            child.hear(_START_SECONDS)
            while True:
                self._reported(**child.hear(_PATIENCE))
        except ChildDied as death:
            why = str(death)
        child.end()
        with self._lock:
            lost = [(number, it) for number, it in self._served.items() if it.child is child]
            for number, _ in lost:
                del self._served[number]
        for number, served in lost:
            if served.address:
                self._post(served.book.orphaned, [number])
            else:
                self._post(served.book.refused, number, why)

    def _reported(self, formation: int, address: str = "", refused: str = "") -> None:
        with self._lock:
            served = self._served.get(formation)
            if served is None:  # closed meanwhile
                return
            served.address = address
            if refused:
                del self._served[formation]
        if refused:
            self._post(served.book.refused, formation, refused)
        else:
            self._post(served.book.opened, formation, address)


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
