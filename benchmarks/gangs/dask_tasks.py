"""Plain Dask: a worker per host; calls are futures, chains are graphs."""

from __future__ import annotations

from typing import Any

from benchmarks.gangs import work
from benchmarks.gangs.work import CHAIN, FUSED, NODES, WAIT, Gang, free_port
from benchmarks.harness.child import serve


class Dask(Gang):
    """A local cluster with Dask's defaults, without dashboard; one thread per worker."""

    def start(self) -> None:
        from distributed import Client, LocalCluster

        self._cluster = LocalCluster(
            n_workers=self.hosts,
            threads_per_worker=1,
            processes=True,
            dashboard_address="",
            memory_limit=0,
        )
        self._client = Client(self._cluster)
        self._workers = list(self._client.scheduler_info()["workers"])
        address = f"127.0.0.1:{free_port()}"
        self._chains = 0
        self._everywhere([(work.begin, n, self.hosts, address) for n in range(self.hosts)])

    def reset(self) -> None:
        self._everywhere([(work.reset,)] * self.hosts)

    def calls(self, what: str, mode: str, count: int) -> None:
        if mode == CHAIN:
            for _ in range(count):
                self._chain(what)
            return
        from distributed import wait

        last: list[Any] = [None] * self.hosts
        for number in range(count):
            must_wait = mode == WAIT or number == count - 1
            last = [
                self._client.submit(
                    work.step, what, mode == FUSED, must_wait, before, workers=[where], pure=False
                )
                for before, where in zip(last, self._workers, strict=True)
            ]
            if must_wait:
                wait(last)

    def value(self) -> float:
        return float(self._everywhere([(work.value,)] * self.hosts)[0])

    def stop(self) -> None:
        self._client.close()
        self._cluster.close()

    def _chain(self, what: str) -> None:
        """One graph: a chain of 128 tasks per worker, submitted at once and waited for."""
        from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

        self._chains += 1
        layers, ends = {}, []
        for host, where in enumerate(self._workers):
            name = f"chain-{self._chains}-{host}"
            tasks = {
                (name, n): (work.step, what, False, n == NODES - 1, (name, n - 1) if n else None)
                for n in range(NODES)
            }
            layers[name] = MaterializedLayer(tasks, annotations={"workers": [where]})
            ends.append((name, NODES - 1))
        graph = HighLevelGraph(layers, {name: set() for name in layers})
        self._client.get(graph, ends)

    def _everywhere(self, calls: list[Any]) -> list[Any]:
        return self._client.gather(  # type: ignore[no-any-return]
            [
                self._client.submit(*call, workers=[where], pure=False)
                for call, where in zip(calls, self._workers, strict=True)
            ]
        )


if __name__ == "__main__":
    serve(Dask)
