"""Ray: an actor per host, called as actors or through a Compiled Graph."""

from __future__ import annotations

from collections import deque
from typing import Any

from benchmarks.gangs.work import CHAIN, FUSED, NODES, WAIT, Gang, Member, free_port
from benchmarks.harness.child import serve

IN_FLIGHT = 64
"""Executions of a Compiled Graph that may be unfinished; Ray wants a bound."""


class Actor(Member):
    """A member that can be a node of a graph."""

    def call(self, kind: tuple[str, bool, bool]) -> tuple[str, bool, bool]:
        """kind: the arguments of step; returned for the next node."""
        self.step(*kind)
        return kind


class Ray(Gang):
    """One Ray on this machine.  compiled: calls go through Compiled Graphs."""

    def __init__(self, hosts: int, compiled: bool) -> None:
        super().__init__(hosts)
        self._compiled = compiled

    def start(self) -> None:
        import ray

        self._get = ray.get
        ray.init(
            address="local", num_cpus=4 * self.hosts, include_dashboard=False, log_to_driver=False
        )
        self._actors = self._members()
        # An actor belongs to one Compiled Graph: the chain has actors of its own.
        self._chained = self._members() if self._compiled else self._actors
        self._active = self._actors
        self._chain = self._graph(self._chained, NODES)
        if self._compiled:
            self._one = self._graph(self._actors, 1)

    def reset(self) -> None:
        for actors in (self._actors, self._chained):
            self._get([actor.reset.remote() for actor in actors])

    def calls(self, work: str, mode: str, count: int) -> None:
        wait = mode == WAIT
        kind = (work, mode == FUSED, wait)
        self._active = self._chained if mode == CHAIN else self._actors
        if mode == CHAIN or self._compiled:
            self._run(self._chain if mode == CHAIN else self._one, kind, count, wait)
        else:
            for _ in range(count):
                last = [actor.call.remote(kind) for actor in self._actors]
                if wait:
                    self._get(last)
            self._get(last)
        if not wait:
            self._finish()

    def value(self) -> float:
        return float(self._get(self._active[0].value.remote()))

    def stop(self) -> None:
        import ray

        ray.shutdown()

    def _members(self) -> list[Any]:
        import ray

        made = ray.remote(num_cpus=1)(Actor)
        address = f"127.0.0.1:{free_port()}"
        actors = [made.remote(n, self.hosts, address) for n in range(self.hosts)]
        self._get([actor.reset.remote() for actor in actors])
        return actors

    def _graph(self, actors: list[Any], nodes: int) -> Any:
        from ray.dag import InputNode, MultiOutputNode

        with InputNode() as given:
            ends = []
            for actor in actors:
                last = given
                for _ in range(nodes):
                    last = actor.call.bind(last)
                ends.append(last)
            graph = MultiOutputNode(ends)
        if not self._compiled:
            return graph
        return graph.experimental_compile(_max_inflight_executions=IN_FLIGHT)

    def _run(self, graph: Any, kind: tuple[str, bool, bool], count: int, wait: bool) -> None:
        flying: deque[Any] = deque()
        for _ in range(count):
            flying.append(graph.execute(kind))
            if wait or len(flying) >= IN_FLIGHT:
                self._get(flying.popleft())
        while flying:
            self._get(flying.popleft())

    def _finish(self) -> None:
        """Calls return when a computation was handed to JAX; wait until the last is done."""
        self._get([actor.value.remote() for actor in self._active])


if __name__ == "__main__":
    serve(Ray)
