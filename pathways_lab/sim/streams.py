"""Deadlock of crossed programs on paper, the other cure, and its limit.

Problem: two programs with collectives over the same devices, launched in another
order on each host, wait for each other for ever.  One cure is one order.  Another
one is devices that run several computations at once (*streams*): with two, two
such programs pass each other.  It only moves the limit: more programs than
streams hang again.

    streams.table()                                 # programs against streams
    print(streams.crossed(3, streams=2).story())    # who waits for whom, on which device

Rule for maintainers: every program meets every other one on every host, each
host's first one is another.  So what hangs here is the worst case, not chance.

Paper: section 2 (why gangs need one order), section 4.4.
"""

from __future__ import annotations

from pathways_lab.core.messages import Grant
from pathways_lab.core.scheduling.policies import FIFO
from pathways_lab.sim.machine import Costs, FunctionCost, Machine
from pathways_lab.sim.result import Simulated
from pathways_lab.sim.simulate import Load, chain, simulate
from pathways_lab.timeline.text_table import TextTable

SECONDS = 0.010
"""The seconds that each collective takes."""

_LATE = 1.0
"""Seconds within which all grants are there, whatever their order."""


def crossed(programs: int = 2, streams: int = 1, *, order: bool = False) -> Simulated:
    """Programs of one collective each, over as many hosts, begun in another order on each.

    streams: computations that a device runs at once.
    order: whether the hosts are told one order.
    """
    machine = Machine(
        1, programs, 1, streams=streams, default=FunctionCost(SECONDS), costs=Costs(jitter=0.0)
    )
    names = [chr(ord("A") + n) for n in range(programs)]
    loads = [Load(chain(n, programs, [f"{n}.sum"]), client=f"client {n}") for n in names]
    seen: list[int] = []

    def lag(grant: Grant) -> float:
        if grant.run not in seen:
            seen.append(grant.run)
        turn = seen.index(grant.run) - int(grant.host.rpartition("host")[2])
        return _LATE + 0.001 * (turn % programs)

    return simulate(loads, machine, FIFO(), lag=None if order else lag)


def table(most: int = 4) -> TextTable:
    """Whether two to *most* crossed programs hang on devices with one to *most* streams."""
    streams = range(1, most + 1)
    rows = [
        (f"{p} programs", *("hangs" if crossed(p, s).open else "ends" for s in streams))
        for p in range(2, most + 1)
    ]
    heads = ("", *(f"{s} stream{'s' * (s > 1)}" for s in streams))
    return TextTable(rows, heads, caption="simulated, without one order")
