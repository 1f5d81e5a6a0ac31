"""Hosts in processes of their own, joined by a real coordination process, for tests."""

from __future__ import annotations

import itertools
import os
import queue
import signal
import time
from pathlib import Path
from typing import Any

from pathways_lab.runtime.islands.coordination_service import Coordination
from pathways_lab.runtime.processes.child_process import Child, spawn

TIMEOUT = 60.0
LONG = "--xla_cpu_collective_timeout_seconds=3600"


class Error(AssertionError):
    """What a host raised."""


class Host:
    """One device process of the tests; requests by method name."""

    def __init__(self, name: str, folder: Path, flags: str, **environment: str) -> None:
        self.name = name
        self._answers: list[dict[str, Any]] = []
        self.child: Child = spawn(
            "tests.runtime.formation_child",
            {"host": name, "folder": str(folder)},
            name=f"host {name} {next(_names)}",
            folder=folder,
            environment={"XLA_FLAGS": flags, "NPROC": "16", "JAX_PLATFORMS": "cpu"} | environment,
        )

    def ready(self) -> Host:
        self.child.hear(60)
        return self

    def ask(self, do: str, thread: str | None = None, **arguments: Any) -> None:
        request = {"do": do, **arguments}
        self.child.tell(request | {"thread": thread} if thread else request)

    def answer(self, thread: str | None = None, timeout: float = TIMEOUT) -> dict[str, Any]:
        """The next answer from the main thread, or from the named one."""
        deadline = time.monotonic() + timeout
        while True:
            for index, answer in enumerate(self._answers):
                if answer["thread"] == thread:
                    return self._answers.pop(index)
            self._answers.append(self.child.hear(max(0.01, deadline - time.monotonic())))

    def waits(self, thread: str, seconds: float = 0.3) -> bool:
        """Whether the named thread has not answered after some time."""
        try:
            answer = self.answer(thread, seconds)
        except Exception:
            return True
        self._answers.append(answer)
        return False

    def do(self, do: str, **arguments: Any) -> Any:
        self.ask(do, **arguments)
        return self.value()

    def value(self, thread: str | None = None, timeout: float = TIMEOUT) -> Any:
        answer = self.answer(thread, timeout)
        if "error" in answer:
            raise Error(f"{self.name}: {answer['error']}")
        return answer["value"]

    def kill(self) -> None:
        os.kill(self.child.pid, signal.SIGKILL)
        self.child.wait()


_names = itertools.count()


class Fates:
    """A book of formations that notes the fate of their services; in any thread.

    answers: of the formations asked for, the address or why there is none, in order.
    """

    def __init__(self, folder: Path) -> None:
        self.coordination = Coordination(folder, lambda function, *args: function(*args))
        self.answers: queue.Queue[tuple[str, str]] = queue.Queue()
        self.lost: list[int] = []

    def opened(self, number: int, address: str) -> None:
        self.answers.put((address, ""))

    def refused(self, number: int, reason: str) -> None:
        self.answers.put(("", reason))

    def orphaned(self, numbers: list[int]) -> None:
        self.lost += numbers

    def open(self, number: int, processes: int) -> str:
        """The address of a new formation's service.  Raises :class:`Error`."""
        self.coordination.open(number, processes, self)
        address, refusal = self.answers.get(timeout=TIMEOUT)
        if refusal:
            raise Error(refusal)
        return address


class Island:
    """Hosts ``h0``, ``h1`` … and a coordination process."""

    def __init__(self, folder: Path, hosts: int = 2, flags: str = LONG) -> None:
        self.folder, self.flags = folder, flags
        self.fates = Fates(folder)
        self.coordination = self.fates.coordination
        self.hosts = [Host(f"h{index}", folder, flags) for index in range(hosts)]
        self._numbers = itertools.count()
        for host in self.hosts:
            host.ready()

    def open(self, processes: int) -> tuple[int, str]:
        """A new formation's number and address."""
        number = next(self._numbers)
        return number, self.fates.open(number, processes)

    def form(self, parts: dict[int, list[int]]) -> int:
        """Form, on all its hosts: ``{host index: local device numbers}``; its number."""
        number, address = self.open(len(parts))
        named = [(self.hosts[index].name, locals_) for index, locals_ in sorted(parts.items())]
        for index in parts:
            self.hosts[index].ask("join", number=number, parts=named, address=address)
        for index in parts:
            self.hosts[index].value()
        return number

    def all(self, do: str, hosts: list[int] | None = None, **arguments: Any) -> list[Any]:
        """Ask all (or some) hosts at once; their answers."""
        chosen = [self.hosts[index] for index in hosts or range(len(self.hosts))]
        for host in chosen:
            host.ask(do, **arguments)
        return [host.value() for host in chosen]

    def leave(self, number: int, hosts: list[int]) -> list[int]:
        """End a formation and forget it; the threads that each host has left."""
        self.all("end", hosts, number=number)
        self.coordination.close(number)
        threads: list[int] = self.all("drop", hosts, number=number)
        return threads

    def replace(self, index: int) -> None:
        """A new process in the place of one that died."""
        self.hosts[index].child.end()
        self.hosts[index] = Host(self.hosts[index].name, self.folder, self.flags).ready()

    def close(self) -> None:
        for host in self.hosts:
            host.child.let_go()
        for host in self.hosts:
            host.child.end()
        self.coordination.end()
