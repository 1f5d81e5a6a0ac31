"""Starting the control plane's process, and what its owner must remember of it.

Problem: the plugin in the Dask scheduler starts it, and so does the embedded
lab's scheduler process, before it even imports Dask; both must do the same.

Rule for maintainers: no Dask here.  Keys leave this record only over Dask's own
connections (to owners) and over lifelines (to children).
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathways_lab.runtime.processes.child_process import REMOVE, Child, ChildDied, spawn
from pathways_lab.transport.addresses import private_folder, remove_folder
from pathways_lab.transport.auth import HOSTS, key_of, new_key
from pathways_lab.transport.handshake import SILENCE

MODULE = "pathways_lab.runtime.control_plane.process"
_START_SECONDS = 30.0
_KEYS = ("key", "data_key")

ANY = "0"
"""The system chooses a port."""
IDLE = "(idle_close)"
"""In the last words of a control plane that closed itself because nobody used it."""


@dataclass(slots=True)
class ControlSettings:
    """Where a control plane listens, and its keys.

    host: None for Unix sockets in *folder*; else the interface's address for TCP.
    tls: PEM texts for connections that leave the machine, or that are Dask's comms.
    comms: listen for Dask's comms, see :mod:`pathways_lab.transport.dask_comms`.
    transcript: a file for what the core is told and answers, or "".
    idle: seconds without work and without a word of clients after which it ends; 0: never.
    kept: it is in use as long as a client is connected, even a silent one.
    plain_collectives: collectives between machines go in the clear.
    silence: seconds without a sign of a machine after which it counts as lost.
    ports: of doors for other machines, as addresses have them.
    """

    folder: Path
    key: bytes
    data_key: bytes
    host: str | None = None
    tls: dict[str, str] | None = None
    comms: bool = False
    transcript: str = ""
    idle: float = 0.0
    kept: bool = False
    plain_collectives: bool = False
    silence: float = SILENCE
    ports: str = ANY

    @classmethod
    def fresh(
        cls,
        folder: Path | None = None,
        host: str | None = None,
        tls: dict[str, str] | None = None,
    ) -> ControlSettings:
        """New keys, and a new private folder unless one is given."""
        return cls(folder or private_folder(), new_key(), new_key(), host, tls)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> ControlSettings:
        """The inverse of :meth:`plain`."""
        own = {each.name: plain[each.name] for each in dataclasses.fields(cls)}
        keys = {name: bytes.fromhex(plain[name]) for name in _KEYS}
        return cls(**{**own, **keys, "folder": Path(plain["folder"])})

    def plain(self) -> dict[str, Any]:
        """For a lifeline."""
        return {
            **dataclasses.asdict(self),
            **{name: getattr(self, name).hex() for name in _KEYS},
            "folder": str(self.folder),
            "listen": self.listen,
        }

    @property
    def host_key(self) -> bytes:
        """With which hosts come to its door."""
        return key_of(self.key, HOSTS)

    @property
    def listen(self) -> str:
        """Where its door is; a Unix one is also the address."""
        if self.comms:
            return f"dask+tls://{self.host or '127.0.0.1'}:0"
        if self.host is None:
            return f"unix:{self.folder}/control"
        return f"tcp://{self.host}:{self.ports}"


class ControlProcess:
    """A running control plane.

    address: known after :meth:`wait_ready`.  heard: somebody listens to it.
    """

    def __init__(self, settings: ControlSettings) -> None:
        self.settings = settings
        self.heard = False
        self.address = ""
        self._child: Child = spawn(
            MODULE,
            {**settings.plain(), REMOVE: [str(settings.folder)]},
            name="control plane",
            folder=settings.folder,
        )

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def alive(self) -> bool:
        return self._child.alive

    def wait_ready(self) -> None:
        """Until it listens.  Raises ChildDied with the end of its log."""
        if not self.address:
            report = self._child.hear(_START_SECONDS)
            self.address = report["address"]

    def worker_removed(self, worker: str, reason: str) -> None:
        """Dask says that the worker of this name is gone."""
        self.tell({"removed": worker, "reason": reason})

    def tell(self, plain: dict[str, Any]) -> None:
        """Something over its lifeline.  Raises ChildDied."""
        self._child.tell(plain)

    def listen(
        self, heard: Callable[[dict[str, Any]], object], ended: Callable[[], object]
    ) -> None:
        """heard(report) is called with all that it reports from now on, in a thread of its own.

        ended() is called there when it has ended, on purpose or not.  Once per process.
        """

        def work() -> None:
            with contextlib.suppress(ChildDied):
                while True:
                    for report in self._child.reports():
                        heard(report)
            ended()

        self.heard = True
        threading.Thread(target=work, name="control plane reports", daemon=True).start()

    def last_words(self) -> str:
        """The end of its log, for error messages."""
        return self._child.last_words()

    def close(self) -> None:
        """End it; its folder goes too.  Again is fine."""
        self._child.end()
        remove_folder(self.settings.folder)
