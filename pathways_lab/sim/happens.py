"""Hosts and islands of a simulated machine that are lost, and that come: a list of what happens.

Problem: a policy, or the size of a machine, is chosen for the days on which something breaks;
what breaks then shall be said in a line and be the same every time.

Rule for maintainers: checked whole before anything begins.  An island that
comes before it was ever lost is not there at the beginning.

Paper: section 4.1 (devices that come and go).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from pathways_lab.sim.machine import Machine
from pathways_lab.sim.world import World

LOST, JOINED = "lost", "joined"

Happening = tuple[float, str, str]
"""Seconds from the beginning, :data:`LOST` or :data:`JOINED`, and a host or an island."""


def hosts_of(happens: Iterable[Any], machine: Machine) -> list[Happening]:
    """The same in order of time, host by host.  Raises ValueError for what cannot happen."""
    if isinstance(happens, str) or not isinstance(happens, Iterable):
        raise ValueError(f"happens={happens!r:.80} is not a list: [(2.0, 'lost', 'island1/host0')]")
    known = machine.hosts()
    found: list[Happening] = []
    for what in happens:
        if not isinstance(what, tuple | list) or len(what) != 3:
            raise ValueError(f"{what!r:.80} is not (seconds, 'lost' or 'joined', host or island)")
        time, kind, name = what
        if not isinstance(time, int | float) or not 0 <= time < math.inf:
            raise ValueError(f"{what!r:.80} happens at {time!r}: seconds from 0 on")
        if kind not in (LOST, JOINED):
            raise ValueError(f"{what!r:.80} says {kind!r}: 'lost' or 'joined'")
        hosts = [host for host, island in known if name in (host, island)]
        if not hosts:
            some = ", ".join(host for host, _ in known[:4])
            raise ValueError(f"{what!r:.80} names {name!r}: the machine's hosts are {some} ...")
        found += [(float(time), kind, host) for host in hosts]
    return sorted(found, key=lambda each: each[0])


def absent(happens: Iterable[Happening]) -> frozenset[str]:
    """Hosts that are not there at the beginning."""
    first: dict[str, str] = {}
    for _, kind, host in happens:
        first.setdefault(host, kind)
    return frozenset(host for host, kind in first.items() if kind == JOINED)


def schedule(world: World, happens: Iterable[Happening]) -> None:
    """Have all of it happen."""
    for time, kind, host in happens:
        if kind == LOST:
            world.agenda.at(time, world.lose, host)
        else:
            world.agenda.at(time, world.join, host, host.partition("/")[0])
