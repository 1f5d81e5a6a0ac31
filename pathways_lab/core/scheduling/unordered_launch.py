"""Launches without the order: grants reach hosts in orders of the user's choice.

Problem: to show what happens without one order, the hosts of a leased island
must really launch in different orders, as if controllers that know nothing of
each other had sent them work; while the core goes on numbering gangs, and
no other client notices.

How: from the moment in which a *race* is opened, everything in order that the
control plane would send to the hosts of that island waits here.  When every run of
the race has its places (or has ended), each host gets the grants of the race in
its own order, then the rest.

Rule for maintainers: pure.  Only for a client with a lease without order; a
race that does not come off is sent on in the one order.

Paper: section 2 (gang-scheduling deadlocks), section 4.4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_HELD = frozenset(("grant", "free", "abort", "unbind"))
"""Commands that hosts must get in the order in which they are sent."""
_SECONDS = 5.0
"""How long a race waits for the places of its runs."""

Send = Callable[[str, str, dict[str, Any], Sequence[Any]], object]
"""``(host, operation, fields, buffers)``."""
_Letter = tuple[str, dict[str, Any], Sequence[Any]]


@dataclass(slots=True)
class _Race:
    """orders: by host, the numbers of controllers.  controllers: by run, who submitted it.

    closed: when everything was submitted.  waiting: runs without places.
    """

    client: str
    island: str
    orders: dict[str, tuple[int, ...]]
    controllers: dict[int, int] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    closed: float | None = None
    letters: dict[str, list[_Letter]] = field(default_factory=dict)


class Races:
    """Races that wait for their places, and the runs of those that were started."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._open: dict[int, _Race] = {}
        self._running: dict[int, str] = {}

    def __contains__(self, run: int) -> bool:
        """Whether a run was launched without order, and has not ended."""
        return run in self._running

    def __bool__(self) -> bool:
        return bool(self._open or self._running)

    def open(
        self, number: int, client: str, island: str, orders: Mapping[str, Sequence[int]]
    ) -> None:
        """Hold back what these hosts would be sent."""
        told = {host: tuple(order) for host, order in orders.items()}
        self._open[number] = _Race(client, island, told)

    def entered(self, number: int, run: int, controller: int) -> None:
        """A run belongs to a race.  Call before the core hears of it."""
        race = self._open.get(number)
        if race is not None:
            race.controllers[run] = controller
            race.waiting.add(run)
            self._running[run] = race.island

    def close(self, number: int, now: float) -> None:
        """Everything was submitted."""
        race = self._open.get(number)
        if race is not None:
            race.closed = now
            self._start_ready()

    def hold(self, host: str, op: str, fields: dict[str, Any], buffers: Sequence[Any] = ()) -> bool:
        """Whether a message to a host waits here from now on."""
        if not self._open or op not in _HELD:
            return False
        for race in self._open.values():
            if host in race.orders:
                race.letters.setdefault(host, []).append((op, fields, buffers))
                if op == "grant":
                    race.waiting.discard(fields["run"])
                return True
        return False

    def ended(self, run: int) -> None:
        """A run is over, perhaps without ever having had places."""
        if self._running.pop(run, None) is not None:
            for race in self._open.values():
                race.waiting.discard(run)

    def settle(self, now: float) -> None:
        """Start what is complete, and what has waited too long."""
        if self._open:
            for race in self._open.values():
                if race.closed is not None and now - race.closed > _SECONDS:
                    race.waiting.clear()
            self._start_ready()

    def abandon(self, client: str, island: str | None = None) -> None:
        """A client or a lease is gone: what waits goes on in the one order."""
        for number, race in list(self._open.items()):
            if race.client == client and island in (None, race.island):
                race.controllers.clear()
                self._start(number)

    def _start_ready(self) -> None:
        for number, race in list(self._open.items()):
            if race.closed is not None and not race.waiting:
                self._start(number)

    def _start(self, number: int) -> None:
        race = self._open.pop(number)
        for host, letters in race.letters.items():
            for op, fields, buffers in _ordered(letters, race.controllers, race.orders[host]):
                # Its number is not the next one that the host expects.
                extra = {"free": True} if op == "grant" else {}
                self._send(host, op, {**fields, **extra}, buffers)


def _ordered(
    letters: Sequence[_Letter], controllers: Mapping[int, int], order: Sequence[int]
) -> list[_Letter]:
    """The grants of the race, one controller after the other; then the rest."""

    def rank(letter: _Letter) -> int:
        op, fields, _ = letter
        controller = controllers.get(fields["run"]) if op == "grant" else None
        return order.index(controller) if controller in order else len(order)

    return sorted(letters, key=rank)
