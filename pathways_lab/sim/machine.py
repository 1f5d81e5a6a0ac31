"""The simulated machine: what exists, and what everything costs.

Problem: a picture drawn from invented figures misleads.  So each default says
where it comes from: *measured* (on two shared cores with JAX CPU devices, see
the benchmarks), *published* (Pathways, MLSys 2022), or *assumed*.

Rule for maintainers: every figure is a field with its source beside it; what
depends on a function is in :class:`FunctionCost`.

Paper: section 5 (configurations A, B and C).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FunctionCost:
    """seconds: of each device.  collective: whether its devices wait for each other.

    temporary: bytes per device beside inputs and outputs.  compile: seconds.
    """

    seconds: float = 0.001
    collective: bool = True
    temporary: int = 0
    compile: float = 0.05


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, and bytes per second.

    ``control_latency``   one way between control plane and host or client
                          (measured: 19 us round trip on one machine; assumed
                          for a network: 50 us)
    ``decision``          control plane, per run and other requests (measured: 30 us)
    ``hearing``           control plane, per report of a host (measured: 2 to 10 us)
    ``launch``            host, per gang (measured: 0.1 to 0.3 ms for a launch on
                          several devices)
    ``report``            a host gathers reports for so long (10 ms at most; it
                          flushes earlier when idle: assumed 0.5 ms)
    ``local``             bytes per second inside a host (measured: 3e9)
    ``island``            bytes per second into a host from its island (assumed)
    ``dcn``               the same from another island (assumed: 100 Gbit/s)
    ``island_latency``, ``dcn_latency``   first byte (assumed)
    ``jitter``            relative spread of every delay and duration (assumed)
    """

    control_latency: float = 50e-6
    decision: float = 30e-6
    hearing: float = 3e-6
    launch: float = 150e-6
    report: float = 500e-6
    local: float = 3e9
    island: float = 50e9
    dcn: float = 12.5e9
    island_latency: float = 10e-6
    dcn_latency: float = 200e-6
    jitter: float = 0.05


@dataclass(frozen=True, slots=True)
class Machine:
    """Islands of hosts of devices.

    block: how a host's devices are wired (() for a row).
    memory: bytes per device.  streams: computations that a device runs at once.
    depth: launches in flight per device.
    functions: costs by function key; others cost *default*.
    """

    islands: int = 2
    hosts_per_island: int = 2
    devices_per_host: int = 4
    block: tuple[int, ...] = ()
    memory: int = 16 * 2**30
    kind: str = "simulated"
    streams: int = 1
    depth: int = 8
    costs: Costs = field(default_factory=Costs)
    functions: Mapping[str, FunctionCost] = field(default_factory=dict)
    default: FunctionCost = field(default_factory=FunctionCost)

    def cost(self, function: str) -> FunctionCost:
        """What a function costs."""
        return self.functions.get(function, self.default)

    def hosts(self) -> list[tuple[str, str]]:
        """``(host, island)`` of every host."""
        return [
            (f"island{i}/host{h}", f"island{i}")
            for i in range(self.islands)
            for h in range(self.hosts_per_island)
        ]
