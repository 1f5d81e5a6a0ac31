"""Multi-controller JAX: a process per host, each with the user's whole loop in it.

Nobody sends anything to anybody but the collectives: the bar for every single
controller.  There is no Chained case: JAX has no programs of several nodes.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from benchmarks.gangs.work import Gang, Member, free_port
from benchmarks.harness.child import serve


def member(orders: Connection, number: int, of: int, address: str) -> None:
    """The process of one host: does what it is told until the pipe closes."""
    made = Member(number, of, address)
    orders.send(0.0)
    while True:
        try:
            told = orders.recv()
        except EOFError:
            return
        orders.send(made.run(*told) if told else made.value())


class MultiController(Gang):
    """Plain ``jax.distributed`` on this machine; collectives by Gloo, as in the lab."""

    def start(self) -> None:
        processes = multiprocessing.get_context("spawn")
        address = f"127.0.0.1:{free_port()}"
        self._orders: list[Connection] = []
        self._members: list[BaseProcess] = []
        for number in range(self.hosts):
            ours, theirs = processes.Pipe()
            what = (theirs, number, self.hosts, address)
            process = processes.Process(target=member, args=what, daemon=True)
            process.start()
            self._members.append(process)
            theirs.close()
            self._orders.append(ours)
        self._answers()

    def timed(self, work: str, mode: str, count: int) -> float:
        """The members take the time, each of its own loop; the slowest counts."""
        self._tell(work, mode, count)
        return max(self._answers())

    def calls(self, work: str, mode: str, count: int) -> None:
        self.timed(work, mode, count)

    def reset(self) -> None:
        """Every round begins with it, in the members."""

    def value(self) -> float:
        self._tell()
        return self._answers()[0]

    def stop(self) -> None:
        for orders in self._orders:
            orders.close()

    def _tell(self, *what: str | int) -> None:
        for orders in self._orders:
            orders.send(what)

    def _answers(self) -> list[float]:
        try:
            return [orders.recv() for orders in self._orders]
        except (EOFError, ConnectionError):
            ended = wait([process.sentinel for process in self._members])
            first = next(process for process in self._members if process.sentinel in ended)
            first.join()
            raise RuntimeError(f"a member ended with exit code {first.exitcode}") from None


if __name__ == "__main__":
    serve(MultiController)
