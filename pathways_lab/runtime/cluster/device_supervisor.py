"""A worker's device process, kept alive: started, restarted, ended.

Problem: an abort inside XLA kills a whole process, so the devices live in one
that may die without taking the Dask worker along.  A new one takes its place
(a new incarnation under the same name), as soon as the machine has room for a
process.  A process that crashes again and again stays down until an owner restarts it.

Rule for maintainers: no Dask here; the thread that watches never outlives
:meth:`DeviceProcess.close`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pathways_lab.runtime.host.compile_marks import read
from pathways_lab.runtime.processes import stacks
from pathways_lab.runtime.processes.child_process import REMOVE, Child, ChildDied, spawn
from pathways_lab.runtime.processes.deaths import Records, story
from pathways_lab.runtime.processes.heaps import heaps
from pathways_lab.transport.addresses import private_folder, remove_folder

MODULE = "pathways_lab.runtime.host.process"
RETIRED = 71
"""Exit code of a device process that was sent away, and is not to be replaced."""
_READY_SECONDS = 60.0
PATIENCE = 25.0
"""Seconds that a host of a worker which leaves may go on with what is admitted there: Slurm kills
30 after it has told a job to end, where nobody has set another limit."""
_FAREWELL = 1.0
"""Seconds that the end of a lab may take to reach its hosts."""
_RESTARTS = 5
_RESTART_WINDOW = 60.0
"""More than so many restarts in so many seconds, and it stays down until somebody restarts it;
not counted are those that were asked for, and those of a process that had lived for a while."""
_LIVED = 10.0
_APART = 2.0
"""Seconds between two starts at least: the machine may have room for a process again by then."""


@dataclass(frozen=True, kw_only=True)
class DeviceSettings:
    """The settings of a device process; the keys are those of the control plane.

    devices: None means all that JAX finds.  memory: bytes per device, None means
    what the device has.  worker: Dask's name of the worker.  tls: PEM texts
    ``ca``, ``cert``, ``key``, or None.  members: hosts of the island whose
    accelerators start as one runtime.  stand_in: CPU devices that start as
    accelerators do, for tests.  processors, room (bytes): the most that CPU devices are made
    of; None: what the process finds.  plain_collectives: between machines in the clear.
    contact: the host at which others reach this one, where that is none of this machine's own.
    """

    control: str
    key: bytes
    data_key: bytes
    name: str
    island: str
    devices: int | None
    platform: str
    memory: int | None
    data_listen: str
    worker: str = ""
    tls: dict[str, str] | None = None
    members: int = 1
    stand_in: bool = False
    processors: int | None = None
    room: int | None = None
    plain_collectives: bool = False
    contact: str = ""

    def configuration(self) -> dict[str, Any]:
        """As the process reads it."""
        hexed = {"key": self.key.hex(), "data_key": self.data_key.hex()}
        return {**vars(self), **hexed, "worker_pid": os.getpid()}


def label(name: str) -> str:
    """The name of a host's device process, for people."""
    return f"device process {name}"


@dataclass(frozen=True, slots=True)
class Change:
    """A change in the state of a device process.

    state: ``"died"``: another one is started; ``"given up"``: none is, until an owner says so;
        ``"left out"``: none ever was, for the worker does not suit the lab.
    pid: of the incarnation, 0 for one that could not be started.
    code: its exit code, None for such a one.
    reason: one sentence, without a subject.  words: the end of its log.
    asked: it was ended on purpose.
    compiling: what it was compiling, see :func:`pathways_lab.runtime.host.compile_marks.read`.
    """

    state: Literal["ready", "died", "given up", "left out", "retired"]
    pid: int = 0
    code: int | None = None
    reason: str = ""
    words: str = ""
    asked: bool = False
    compiling: list[list[Any]] = field(default_factory=list)


class DeviceProcess:
    """One device process after the other, under one name.

    folder: of its parent.  Each incarnation keeps its compiled functions there for the next one.
    environment: variables to set in addition to this process's own.
    first: the first one, if it was started already and waits for its configuration.
    data_address: where others reach the present one; "" before it is ready.  listens: where it
        listens itself.
    on_change: called in the watching thread.
    """

    def __init__(
        self,
        configuration: dict[str, Any],
        folder: Path,
        on_change: Callable[[Change], None] = lambda change: None,
        module: str = MODULE,
        environment: dict[str, str] | None = None,
        first: Child | None = None,
    ) -> None:
        self.name: str = configuration["name"]
        self.restarts = 0
        self.data_address = self.listens = ""
        compiled = folder / f"compiled-{self.name.replace('/', '-')}"
        self._configuration = {**configuration, "compiled": str(compiled)}
        self._folder = folder
        self._on_change = on_change
        self._module = module
        self._environment = {**heaps(), **(environment or {})}
        self._closing = threading.Event()
        self._revived = threading.Event()
        self._settled = threading.Event()
        self._failure = ""
        self._asked = False
        self._child = self._start(first)
        _here[self.name] = self
        self._thread = threading.Thread(target=self._watch, name=f"watch {self.name}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The process number of the present incarnation."""
        return self._child.pid

    def wait_ready(self) -> None:
        """Until the first incarnation is known to the control plane.  Raises ChildDied."""
        self._settled.wait()
        if self._failure:
            raise ChildDied(self._failure)

    def tell(self, plain: dict[str, Any]) -> None:
        """Something for the present incarnation, over its lifeline.  Raises ChildDied."""
        self._child.tell(plain)

    def kill(self, pid: int) -> bool:
        """Kill the incarnation with this pid, whatever it does; another one takes its place.

        Whether it was there.
        """
        if self._child.pid != pid or not self._child.alive:
            return False
        self._asked = True
        os.kill(pid, signal.SIGKILL)
        return True

    def stacks(self, native: bool) -> dict[str, Any]:
        """Where its threads stand; *native*: also in native code.  ``wrong`` says why not."""
        child, wrong, text = self._child, "", ""
        pid = child.pid
        try:
            if native:
                text = stacks.native(pid)
            else:
                text = stacks.ask(pid, child.log, lambda: child.tell({"stacks": True}))
        except (OSError, ChildDied) as error:
            wrong = str(error)
        return {"pid": pid, "state": stacks.state(pid), "text": text, "wrong": wrong}

    def restart(self) -> None:
        """Start another incarnation, if none is started by itself any more."""
        self._revived.set()

    def retire(self, patience: float, lab_lost: bool = False, why: str = "") -> None:
        """Its worker leaves: let it end what it has begun.

        The control plane tells it when it may go.  patience: seconds, after which it is
        ended all the same.  why: for clients who lose what is there; "": Dask takes the worker
        away.  lab_lost: the worker goes because its Dask scheduler is gone, and with it the lab:
        the control plane ends everything and says why, so nothing is asked of it here, nor waited
        for long.
        """
        self._stop()
        with contextlib.suppress(ChildDied):  # it may have ended already
            if not lab_lost:
                worker = self._configuration["worker"]
                self._child.tell({"leave": why or f"Dask removed the worker {worker}"})
            self._thread.join(min(patience, _FAREWELL) if lab_lost else patience)
        self.close()

    def close(self) -> None:
        """End it and do not restart it.  Again is fine."""
        self._stop()
        self._child.end()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _stop(self) -> None:
        self._closing.set()
        self._revived.set()

    def _start(self, there: Child | None = None) -> Child:
        # Its own, for sockets: it removes it when this process dies, and this one when it does.
        self._private = private_folder()
        remove = [*self._configuration.get(REMOVE, ()), str(self._private)]
        configuration = {**self._configuration, "private": str(self._private), REMOVE: remove}
        if there is not None:
            there.tell(configuration)
            return there
        return spawn(
            self._module,
            configuration,
            name=label(self.name),
            folder=self._folder,
            environment=self._environment,
        )

    def _watch(self) -> None:
        starts: list[float] = []
        while True:
            began, before = time.monotonic(), Records.read()
            starts.append(began)
            ended, failed, silent = None, "", False
            try:
                if self.restarts:
                    self._child = self._start()
                    if self._closing.is_set():
                        self._child.end()
                        remove_folder(self._private)
                        return
                ended = self._child
                report = ended.hear(_READY_SECONDS)
                self.data_address = report.get("data_address", "")
                self.listens = report.get("listens", "")
                self._settled.set()
                self._on_change(Change("ready", ended.pid))
                ended.wait()
            except ChildDied as death:
                failed, silent = str(death), ended is not None and ended.alive
                self._child.end()
            compiling = read(self._private)
            remove_folder(self._private)
            if self._closing.is_set():
                self._settled.set()
                return
            if self._child.exit_code == RETIRED:
                self._on_change(Change("retired"))
                return
            pid, code, words = 0, None, failed
            if ended is not None:
                pid, words = ended.pid, words if silent else ended.last_words()
                code = None if silent else ended.exit_code
            told = words.removeprefix(f"{label(self.name)} ")  # the subject of the sentence
            reason = story(code, told, before, Records.read())
            if not self._settled.is_set():
                # The first start failed: the reason is for whoever waits.
                self._failure = failed
                self._settled.set()
                self._on_change(Change("given up", pid, code, reason, words))
                return
            now = time.monotonic()
            if self._asked or now - began > _LIVED:
                starts.pop()
            asked, self._asked = self._asked, False
            starts = [start for start in starts if start > now - _RESTART_WINDOW]
            self._child.end()
            self.restarts += 1
            if len(starts) > _RESTARTS:
                self._revived.clear()
                if self._closing.is_set():
                    return
                reason += f", for the {len(starts)}th time in {now - starts[0]:.0f} s"
                self._on_change(Change("given up", pid, code, reason, words, asked, compiling))
                starts.clear()
                self._revived.wait()
            else:
                self._on_change(Change("died", pid, code, reason, words, asked, compiling))
                self._closing.wait(max(0.0, began + _APART - now))
            if self._closing.is_set():
                return


prepared: list[tuple[Child, Path]] = []
"""Processes that wait for the configuration of a device process, each with the folder of its log:
the worker's own copies, made before it began."""

_here: weakref.WeakValueDictionary[str, DeviceProcess] = weakref.WeakValueDictionary()


def find(name: str) -> DeviceProcess | None:
    """The device process of this host, if it is a child of this process."""
    return _here.get(name)


def stacks_of(name: str, native: bool) -> dict[str, Any] | None:
    """For ``Client.run``: :meth:`DeviceProcess.stacks` of this host, if it is one of here."""
    process = find(name)
    return None if process is None else process.stacks(native)
