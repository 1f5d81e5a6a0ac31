"""Leases: an island for one client alone.

Problem: some experiments are only fair, or only safe for others, when nobody
else computes on an island: hosts that run loops of their own, hosts that
launch in orders of their own.  A client that leases an island has it until the block
ends, the client leaves, or the lab closes.

Rule for maintainers: the control plane grants, refuses and ends leases; this
is only how a client holds one.

Paper: section 2 (multi-controller systems own their devices), section 4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from pathways_lab.client.lab import slice_request
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.parts import Parts
from pathways_lab.client.session import failures
from pathways_lab.client.session.handles import Handle
from pathways_lab.client.session.pending import Buffer


class Lease:
    """An island that this kernel has for itself; made by ``lab.lease``.

    island: its name.  order: whether its hosts launch in the control plane's one order.
    patience: seconds after which a deadlock there, where order is off, is ended.

    >>> with lab.lease("island0"):                           # doctest: +SKIP
    ...     s = lab.slice((2, 2), ("host", "device"), island="island0")
    ...     out = lab.multi_controller(step, x, on=s, steps=100)
    """

    def __init__(self, lab: Parts, island: str, order: bool = True, patience: float = 3.0) -> None:
        self.island = slice_request.name("island", island)
        self.order = bool(order)
        self.patience = slice_request.seconds("patience", patience)
        self._lab = lab
        fields = {"island": island, "order": self.order, "patience": self.patience}
        lab.session.connection.questions.ask("lease", fields, what=f"the lease of {island}")
        lab.leases[island] = self

    @property
    def held(self) -> bool:
        """Whether the island is still this kernel's alone."""
        return self._lab.leases.get(self.island) is self and not self._lab.closed

    def race(
        self,
        *controllers: Callable[[], Any],
        orders: Sequence[str] | Mapping[str, str] | None = None,
        rehearse: bool = True,
    ) -> tuple[Any, ...]:
        """Launch what several controllers ask for, as if they knew nothing of each other.

        Needs a lease without order.  Each host launches the work of one controller
        after the other, in an order of its own; the hosts really do so, and what
        comes of it is real: right results, wrong ones, or a deadlock, which the lab
        notices, explains and ends after *patience* seconds.

        controllers: functions without arguments that call programs or compiled
            functions; called "a", "b", ... in orders.  None may use the results of
            another's.
        orders: per host, in the island's order of hosts or by name, e.g.
            ``("ab", "ba")``; by default every second host goes backwards.
        rehearse: run each first, in order, one after the other: so that what is
            launched for the first time has its hosts introduced.

        Returns what the controllers returned: handles, at once.

        >>> with lab.lease("island0", order=False) as lease:     # doctest: +SKIP
        ...     total, rows = lease.race(lambda: a(x), lambda: b(x))
        ...     total.result()                     # PathwaysError: ... waits for ...
        """
        if self.order or not self.held:
            raise failures.refused(
                f"{self!r} cannot launch without order",
                f"with lab.lease({self.island!r}, order=False) as lease: ...",
            )
        told = _orders(self._hosts(), len(controllers), orders)
        if rehearse:
            for controller in controllers:
                for leaf in jax.tree.leaves(controller()):
                    if isinstance(leaf, Handle):
                        leaf.block_until_ready()
        connection = self._lab.session.connection
        number = connection.new_id("race")
        connection.send("race", {"race": number, "island": self.island, "orders": told})
        entries = _Entries(number)
        results = []
        try:
            connection.racing.enter = entries.enter
            for entries.controller, controller in enumerate(controllers):
                results.append(controller())
        finally:
            connection.racing.enter = None
            connection.send("race-go", {"race": number})
        return tuple(results)

    def _hosts(self) -> tuple[str, ...]:
        islands = {island.name: island for island in self._lab.islands}
        return tuple(host.name for host in islands[self.island].hosts)

    def release(self) -> None:
        """Give the island back; slices and handles there stay.  Again is fine."""
        if self.held:
            del self._lab.leases[self.island]
            self._lab.session.connection.questions.ask("return-lease", {"island": self.island})

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "" if self.held else ", returned"
        return f"<Lease of {self.island}{'' if self.order else ' without order'}{state}>"


class _Entries:
    """The runs of one race.  controller: whose are submitted now."""

    def __init__(self, number: int) -> None:
        self.controller = 0
        self._number = number
        self._runs: dict[int, int] = {}

    def enter(self, run: int, inputs: Sequence[Buffer | None]) -> tuple[int, int]:
        """The race's number and the controller's.  Raises PathwaysError for dependent runs."""
        for buffer in inputs:
            if (
                buffer is not None
                and self._runs.get(buffer.run, self.controller) != self.controller
            ):
                raise failures.refused(
                    f"controller {_letter(self.controller)!r} uses a result of controller"
                    f" {_letter(self._runs[buffer.run])!r} in the same race",
                    "controllers in a race know nothing of each other: use values from before it",
                )
        self._runs[run] = self.controller
        return self._number, self.controller


def _letter(controller: int) -> str:
    return chr(ord("a") + controller)


def _orders(
    hosts: Sequence[str], count: int, orders: Sequence[str] | Mapping[str, str] | None
) -> dict[str, list[int]]:
    """By host, the numbers of controllers in the order in which it launches their work."""
    letters = "".join(map(_letter, range(count)))
    if orders is None:
        told = {h: letters if n % 2 == 0 else letters[::-1] for n, h in enumerate(hosts)}
    elif isinstance(orders, Mapping):
        told = {host: orders.get(host, letters) for host in hosts}
    else:
        told = dict(zip(hosts, orders, strict=False))
    strange = set(orders) - set(hosts) if isinstance(orders, Mapping) else set()
    wrong = [order for order in told.values() if sorted(order) != sorted(letters)]
    if strange or wrong or len(told) != len(hosts):
        raise failures.refused(
            f"orders={orders!r} does not say for each of {', '.join(hosts)} in which order it"
            f" launches {', '.join(map(repr, letters))}",
            f"for example orders=({letters!r}, {letters[::-1]!r})",
        )
    return {host: [letters.index(letter) for letter in order] for host, order in told.items()}


def require(lab: Parts, on: Slice, what: str) -> Lease:
    """The lease of a slice's island.  Raises PathwaysError, which names *what* needs it."""
    for island in on.islands:
        if island not in lab.leases:
            raise failures.refused(
                f"{what} needs {island} for itself, and this kernel has no lease of it",
                f"with lab.lease({island!r}): ...",
            )
    lease: Lease = lab.leases[on.island]
    return lease
