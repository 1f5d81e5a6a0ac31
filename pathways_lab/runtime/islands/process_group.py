"""The processes that form one JAX runtime, and the devices that each brings.

Problem: a slice that spans hosts needs a JAX client of several processes, and
all of them must agree on the members, on their order, and on the relation of that
order to the slice's mesh.  Every set of devices has a formation of its own,
so that disjoint sets compute at the same time; slices that are cut in other
orders from the same set share one.

Rule for maintainers: pure data.  Ranks follow the names of the hosts, devices
follow rank and local number; no other module numbers devices.

Paper: section 4.1 (virtual slices), section 4.5.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from pathways_lab.core.errors import Failure
from pathways_lab.core.slices.topology import SliceBinding


@dataclass(frozen=True, slots=True)
class Formation:
    """One JAX client of several processes.

    number: never used twice; a formation that is formed again has a new one.
    island, epoch: where and when it was formed.  It ends with any of its hosts.
    parts: ``(host, its local device numbers)``, by rank; numbers ascend.
    """

    number: int
    island: str
    epoch: int
    parts: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, binding: SliceBinding, number: int, epoch: int) -> Formation:
        """The formation that a slice needs."""
        parts: dict[str, list[int]] = {}
        for host, local in sorted(binding.devices):
            parts.setdefault(host, []).append(local)
        return cls(
            number,
            binding.island,
            epoch,
            tuple((host, tuple(locals_)) for host, locals_ in parts.items()),
        )

    @property
    def footprint(self) -> tuple[tuple[str, int], ...]:
        """``(host, local number)`` of its devices, in the order in which JAX numbers them."""
        return tuple((host, local) for host, locals_ in self.parts for local in locals_)

    @property
    def hosts(self) -> tuple[str, ...]:
        """By rank."""
        return tuple(host for host, _ in self.parts)

    def rank(self, host: str) -> int:
        """Raises ValueError for a host that takes no part."""
        return self.hosts.index(host)

    def __str__(self) -> str:
        parts = " + ".join(f"{host}{list(locals_)}" for host, locals_ in self.parts)
        return f"formation {self.number} of {parts}"


def why_hosts_stay_apart(platform: str, system: str = "") -> Failure | None:
    """Why hosts on this system, with this jaxlib, cannot compute together; None if they can.

    platform: ``"cpu"``, or what JAX calls accelerators.  system: as ``sys.platform``,
    which it is by default.
    """
    if platform != "cpu":
        return None
    # Here, because the control plane knows formations and loads no JAX.
    from pathways_lab.runtime import jax_private

    missing = jax_private.missing_cpu_collectives(system or sys.platform)
    if not missing:
        return None
    return Failure(
        "refused",
        f"CPU devices of several hosts cannot compute together: {missing}",
        "start with hosts_per_island=1 and more devices_per_host and take slices of one island, "
        "or run the lab in Linux (on Windows: WSL 2)",
    )
