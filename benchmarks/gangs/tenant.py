"""One of many clients of a lab, and the loops without a controller that they are compared with.

Every client depends only on itself: a call on all devices of the lab, again on its
result, as fast as calls return.  Devices hold for the time that a case names, and the
processor does not, so that devices and not cores are what clients share.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness.child import serve


def milliseconds(case: str) -> float:
    """What a case is called by."""
    return float(case.split()[0])


class Tenant:
    """A client process of a lab that others use too.

    file: the invitation.  client: as which it comes.  held: cases, ``"0.33 ms"`` and the like.
    devices: of the lab's only island.
    """

    def __init__(self, file: str, client: str, held: list[str], devices: int) -> None:
        self.name = client
        self._file, self._cases, self._devices = file, held, devices

    def start(self) -> None:
        import pathways_lab as pw

        self._begin(pw.connect(self._file, name=self.name))

    def _begin(self, lab: Any) -> None:
        import jax
        import numpy as np
        from jax.sharding import NamedSharding, PartitionSpec

        import pathways_lab as pw

        self._lab = lab
        where = lab.slice((self._devices,), axes=("x",))
        spread = PartitionSpec("x")
        zero = np.zeros(self._devices, np.float32)
        self._zero = pw.device_put(zero, NamedSharding(where.mesh, spread))
        self._wait: Callable[[Any], Any] = jax.block_until_ready

        def compiled(case: str) -> Any:
            hold = pw.emulated(milliseconds(case))
            return pw.jit(
                lambda x: hold(x) + 1, on=where, in_shardings=spread, out_shardings=spread
            )

        self._functions = {case: compiled(case) for case in self._cases}

    def round(self, case: str, units: int) -> tuple[float, float]:
        """So many calls.  Raises RuntimeError when the value is wrong."""
        begun = time.perf_counter()
        found = self._calls(case, units)
        seconds = time.perf_counter() - begun
        if float(found.result(timeout=60)[0]) != units:
            raise RuntimeError(f"{self.name} has {found.result()[0]} after {units} calls")
        return seconds, units

    def _calls(self, case: str, units: int) -> Any:
        function, x = self._functions[case], self._zero
        for _ in range(units):
            x = function(x)
        return self._wait(x)

    def stop(self) -> None:
        self._lab.close()


class Alone(Tenant):
    """A loop per host on a lab of its own: multi-controller JAX, which knows no other clients."""

    def __init__(self, held: list[str], hosts: int, devices: int) -> None:
        super().__init__("", "alone", held, devices)
        self._hosts = hosts
        self._prepared: set[tuple[str, int]] = set()

    def start(self) -> None:
        import pathways_lab as pw

        lab = pw.start(
            islands=1, hosts_per_island=self._hosts, progress=False,
            devices_per_host=self._devices // self._hosts,
        )  # fmt: skip
        lab.lease("island0")
        self._begin(lab)

    def round(self, case: str, units: int) -> tuple[float, float]:
        """The same; to begin the loop and to hear of its end is no part of it."""
        units = max(2, units)
        for steps in (1, units):
            if (case, steps) not in self._prepared:
                # A loop of another length is another program, prepared at its first use.
                self._prepared.add((case, steps))
                self._calls(case, steps)
        single, _ = super().round(case, 1)
        seconds, _ = super().round(case, units)
        return (seconds - single) * units / (units - 1), units

    def _calls(self, case: str, units: int) -> Any:
        loop = self._lab.multi_controller(
            self._functions[case], self._zero, steps=units, records=False
        )
        return self._wait(loop)


def made(file: str = "", client: str = "", hosts: int = 0, **options: Any) -> Tenant:
    """file: of the lab that is shared; "": one of its own, of so many hosts."""
    return Tenant(file, client, **options) if file else Alone(hosts=hosts, **options)


if __name__ == "__main__":
    serve(made)
