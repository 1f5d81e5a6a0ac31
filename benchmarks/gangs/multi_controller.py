"""Multi-controller JAX: a process per host, each with the user's whole loop in it.

Nobody sends anything to anybody but the collectives: the bar for every single
controller.  There is no Chained case: JAX has no programs of several nodes.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from benchmarks.gangs.work import Gang, Member, free_port
from benchmarks.harness.child import serve

Obey = Callable[..., Any]
"""A member's answer to an order."""


class Controllers:
    """A process for each host, which does what it is told until the pipe closes.

    made: called in each process with its number, their number and the address of the first
    (``host:port``); returns what obeys orders.
    """

    def __init__(self, made: Callable[[int, int, str], Obey], hosts: int) -> None:
        processes = multiprocessing.get_context("spawn")
        address = f"127.0.0.1:{free_port()}"
        self._orders: list[Connection] = []
        self._members: list[BaseProcess] = []
        for number in range(hosts):
            ours, theirs = processes.Pipe()
            process = processes.Process(
                target=_obey, args=(theirs, made, number, hosts, address), daemon=True
            )
            process.start()
            self._members.append(process)
            theirs.close()
            self._orders.append(ours)
        self._answers()

    def tell(self, *what: Any) -> list[Any]:
        """Give all the same order, and wait for their answers."""
        for orders in self._orders:
            orders.send(what)
        return self._answers()

    def stop(self) -> None:
        """Close their pipes, at which they end."""
        for orders in self._orders:
            orders.close()

    def _answers(self) -> list[Any]:
        try:
            return [orders.recv() for orders in self._orders]
        except (EOFError, ConnectionError):
            ended = wait([process.sentinel for process in self._members])
            first = next(process for process in self._members if process.sentinel in ended)
            first.join()
            raise RuntimeError(f"a member ended with exit code {first.exitcode}") from None


def _obey(
    orders: Connection, made: Callable[[int, int, str], Obey], number: int, of: int, address: str
) -> None:
    obey = made(number, of, address)
    orders.send(None)
    while True:
        try:
            told = orders.recv()
        except EOFError:
            return
        orders.send(obey(*told))


def member(number: int, of: int, address: str) -> Obey:
    """One that runs computations, and tells its value when it is told nothing."""
    made = Member(number, of, address)
    return lambda *told: made.run(*told) if told else made.value()


class MultiController(Gang):
    """Plain ``jax.distributed`` on this machine; collectives by Gloo, as in the lab."""

    def start(self) -> None:
        self._controllers = Controllers(member, self.hosts)

    def timed(self, work: str, mode: str, count: int) -> float:
        """The members take the time, each of its own loop; the slowest counts."""
        return float(max(self._controllers.tell(work, mode, count)))

    def calls(self, work: str, mode: str, count: int) -> None:
        self.timed(work, mode, count)

    def reset(self) -> None:
        """Every round begins with it, in the members."""

    def value(self) -> float:
        return float(self._controllers.tell()[0])

    def stop(self) -> None:
        self._controllers.stop()


if __name__ == "__main__":
    serve(MultiController)
