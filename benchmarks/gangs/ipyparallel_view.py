"""ipyparallel: an engine per host behind a direct view.

There is no Chained case: a direct view runs functions, not graphs.
"""

from __future__ import annotations

from benchmarks.gangs import work
from benchmarks.gangs.work import FUSED, WAIT, Gang, free_port
from benchmarks.harness.child import serve


class IPyParallel(Gang):
    """A controller and engines on this machine."""

    def start(self) -> None:
        import ipyparallel

        self._cluster = ipyparallel.Cluster(n=self.hosts, log_level=40)
        self._client = self._cluster.start_and_connect_sync(activate=False)
        self._view = self._client[:]
        address = f"127.0.0.1:{free_port()}"
        begun = [
            self._client[n].apply_async(work.begin, n, self.hosts, address)
            for n in range(self.hosts)
        ]
        for each in begun:
            each.get()

    def reset(self) -> None:
        self._view.apply_sync(work.reset)

    def calls(self, what: str, mode: str, count: int) -> None:
        for number in range(count):
            wait = mode == WAIT or number == count - 1
            last = self._view.apply_async(work.step, what, mode == FUSED, wait)
            if wait:
                last.get()

    def value(self) -> float:
        return float(self._client[0].apply_sync(work.value))

    def stop(self) -> None:
        self._client.close()
        self._cluster.stop_cluster_sync()


if __name__ == "__main__":
    serve(IPyParallel)
