"""Room for large arguments: a loop that uploads faster than is computed waits.

Problem: an upload has its memory as soon as there is any, and a run only when its
whole peak fits beside.  A loop of calls with large NumPy arguments would fill the
devices with arguments, so that no run that reads them fits any more.

How: the arguments of runs that are not over may take a part of a device's memory;
who wants to upload more waits for some of them to end.  One alone is never held
up: what does not fit at all, the control plane says with the numbers.

Rule for maintainers: only runs that were sent are waited for.  They end or fail
without this thread: the control plane gives up what can never move.

Paper: section 4.6 (back-pressure).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.session.connection import Connection
from pathways_lab.client.session.pending import Buffer, Run

_SHARE = 4
"""Large arguments under way may take this part of a device's memory."""
_LARGE = 64
"""An argument that takes less than this part of it is not counted."""


class Large(NamedTuple):
    """An argument of *nbytes* on each of some devices, (host, number)."""

    devices: frozenset[tuple[str, int]]
    nbytes: int


class Room:
    """Large arguments of runs under way."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._taken: list[tuple[Run, tuple[Large, ...]]] = []
        self._changing = threading.Lock()

    def wait(self, on: Slice, nbytes: int) -> Large | None:
        """Wait until *nbytes* more on each device of *on* are not too much.  Ctrl-C gets through.

        None when it is nothing large, or in a race of controllers, whose runs may wait
        for each other.
        """
        connection = self._connection
        memory = self._memory({host for host, _ in on.binding.devices})
        if nbytes * _LARGE < memory or connection.racing.enter is not None:
            return None
        large = Large(frozenset(on.binding.devices), nbytes)

        def fits() -> bool:
            used = sum(
                other.nbytes
                for run, taken in self._taken
                for other in taken
                if not run.done and not large.devices.isdisjoint(other.devices)
            )
            return not used or used + nbytes <= memory // _SHARE or connection.closed is not None

        connection.board.wait(fits, None, "room for a large argument")
        return large

    def take(self, made: Iterable[Buffer], larges: Iterable[Large]) -> None:
        """The run that makes these has such arguments.  It is sent, if it waits to be."""
        connection = self._connection
        connection.flush()
        run = next(filter(None, map(connection.maker, made)), None)
        with self._changing:
            self._taken = [entry for entry in self._taken if not entry[0].done]
            if run is not None:
                self._taken.append((run, tuple(larges)))

    def _memory(self, hosts: set[str]) -> int:
        """The memory of the smallest device of some hosts."""
        islands = self._connection.topology["islands"]
        every = (entry for island in islands for entry in island["hosts"])
        return min((entry["memory"] for entry in every if entry["name"] in hosts), default=0)
