"""``lab.dcn``: as if islands were far from each other.

Problem: on one machine, bytes between islands are as fast as bytes inside of one, so
what a slow network does to a program, and what overlap saves, cannot be seen.

How: hosts hold back what has come from hosts of other islands for as long as a network
of that latency and bandwidth would have taken, and the devices of a slice that spans
islands after a gang, for as long as its collectives between islands would have
(:mod:`pathways_lab.runtime.islands.dcn_collectives`).  It is as slow as told, never
faster than the machine; and it is emulated, which is said wherever it is shown.

Between machines there is a network: it is measured, as the doctor of a cluster does it.

Rule for maintainers: only owners of the Dask cluster get here; what is held back stays
in order.

Paper: section 5.3 (islands connected over the DCN), figures 10 and 12.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pathways_lab.client.lab.topology_view import Island
from pathways_lab.client.session import failures
from pathways_lab.runtime.cluster.break_process import act
from pathways_lab.runtime.cluster.scheduler_probe import (
    PORTS,
    WORD,
    Way,
    close_doors,
    knock_at,
    open_door,
)
from pathways_lab.transport.addresses import machine, parse

if TYPE_CHECKING:
    import distributed

FOR_EVER = 1e9
"""Seconds."""


@dataclass(frozen=True)
class Dcn:
    """latency: seconds, one way.  bandwidth: bytes per second, host to host; 0: no limit.

    measured: of the network that is there, the slowest way between two machines.
    """

    latency: float
    bandwidth: float
    measured: bool = False

    @classmethod
    def of(cls, latency: float, bandwidth: float) -> Dcn:
        """A number that a user gave, checked.  Raises PathwaysError below 0 and for other types."""
        for name, given in (("latency", latency), ("bandwidth", bandwidth)):
            if not isinstance(given, int | float) or not 0 <= given < math.inf:
                raise failures.refused(
                    f"{name}={given!r} of the DCN is not a number from 0 on",
                    "for example lab.dcn(latency=0.001, bandwidth=1e9): seconds, bytes per second",
                )
        return cls(latency, bandwidth)

    def seconds(self, nbytes: float) -> float:
        """How long so many bytes take from one host to another, at least."""
        return self.latency + (nbytes / self.bandwidth if self.bandwidth else 0.0)

    def __repr__(self) -> str:
        if not self.latency and not self.bandwidth:
            return "DCN: as fast as this machine"
        rate = (
            f"{self.bandwidth / 1e6:.4g} MB/s from host to host" if self.bandwidth else "no limit"
        )
        how = "measured" if self.measured else "emulated"
        return f"DCN ({how}): latency {self.latency * 1e3:.4g} ms, {rate}"


def emulate(dask: distributed.Client, islands: tuple[Island, ...], dcn: Dcn) -> None:
    """Have every host be so far from the hosts of other islands.  Hosts that come later are not."""
    of = {host.name: island.name for island in islands for host in island.hosts}
    rules = {
        host: {
            "kind": "delay",
            "name": "dcn",
            "peers": [other for other, at in of.items() if at != island],
            "lasts": FOR_EVER,
            "seconds": dcn.latency,
            "rate": dcn.bandwidth,
        }
        for host, island in of.items()
    }
    dask.run(_begin, rules)


def measure(dask: distributed.Client) -> Dcn | None:
    """The network between the hosts' machines; None: they are on one.

    Raises PathwaysError where one does not reach another.
    """
    from pathways_lab.runtime.cluster.dask_plugins import door_of_host

    found = {w: door for w, door in dask.run(door_of_host).items() if door is not None}
    there = dask.run(machine, workers=list(found))
    if len(set(there.values())) < 2:
        return None
    word = secrets.token_bytes(WORD)
    doors: dict[str, tuple[str, int]] = {}
    ways: list[Way] = []
    try:
        for worker, (_, address) in found.items():
            _, place = parse(address)
            port = dask.run(open_door, place[0], word, workers=[worker])[worker]
            doors[worker] = str(place[0]), port
        for worker in found:  # one after the other, or they share what is measured
            others = {other: doors[other] for other in found if there[other] != there[worker]}
            ways += dask.run(knock_at, others, word, workers=[worker])[worker].values()
    finally:
        dask.run(close_doors, workers=list(found))
    if closed := next((way.failure for way in ways if way.failure), ""):
        raise failures.refused(f"the network cannot be measured: {closed}", PORTS)
    return Dcn(max(way.seconds for way in ways) / 2, min(way.rate for way in ways), measured=True)


def _begin(rules: Mapping[str, Any]) -> None:
    """On a worker: tell its own device process."""
    for host, rule in rules.items():
        with contextlib.suppress(LookupError):
            act(host, {"do": "trouble", "rule": rule})
