"""Leases: an island for one client alone.

Problem: some experiments are only fair, or only safe for others, when nobody
else computes on an island: hosts that run loops of their own, hosts that
launch in orders of their own.  Whoever leases an island has it until the block
ends, the client leaves, or the lab closes.

Rule for maintainers: the control plane grants, refuses and ends leases; this
is only how a client holds one.

Paper: section 2 (multi-controller systems own their devices), section 4.1.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from pathways_lab.client import failures
from pathways_lab.client.devices import Slice
from pathways_lab.client.session import Session


class Tenant(Protocol):
    """What a lease needs of its lab."""

    session: Session
    leases: dict[str, Lease]

    @property
    def closed(self) -> bool: ...


class Lease:
    """An island that this kernel has for itself; made by ``lab.lease``.

    island: its name.  order: whether its hosts launch in the control plane's one order.

    >>> with lab.lease("island0"):                           # doctest: +SKIP
    ...     s = lab.slice((2, 2), ("host", "device"), island="island0")
    ...     out = lab.multi_controller(step, x, on=s, steps=100)
    """

    def __init__(self, lab: Tenant, island: str, order: bool = True) -> None:
        self.island = island
        self.order = order
        self._lab = lab
        lab.session.connection.lease(island, order)
        lab.leases[island] = self

    @property
    def held(self) -> bool:
        """Whether the island is still this kernel's alone."""
        return self._lab.leases.get(self.island) is self and not self._lab.closed

    def release(self) -> None:
        """Give the island back; slices and handles there stay.  Again is fine."""
        if self.held:
            del self._lab.leases[self.island]
            self._lab.session.connection.return_lease(self.island)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "" if self.held else ", returned"
        return f"<Lease of {self.island}{'' if self.order else ' without order'}{state}>"


def require(lab: Tenant, on: Slice, what: str) -> Lease:
    """The lease of a slice's island.  Raises PathwaysError, which names *what* needs it."""
    island = on.binding.island
    lease = lab.leases.get(island)
    if lease is None:
        raise failures.failure(
            "refused",
            f"{what} needs {island} for itself, and this kernel has no lease of it",
            f"with lab.lease({island!r}): ...",
        )
    return lease
