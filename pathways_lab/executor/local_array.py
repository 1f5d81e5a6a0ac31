"""One logical array on this host, from its promise to its last use.

Problem: the same array is a value of a run, an output buffer of that run, an
input of the next one, the source of a transfer and the answer to a fetch; it
may not exist yet, may never exist, and may be given away by a donation.  A
:class:`Slot` is that one array (the shards on this host's devices), with
every name and every use of it.

Rule for maintainers: no JAX, no threads, no clock.  States change along
:data:`TRANSITIONS` and nowhere else.

Paper: section 4.2 (sharded buffers), section 4.6 (per-host object stores).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pathways_lab.core.errors import Failure, InvalidTransition
from pathways_lab.core.program.program import Value

PENDING = "pending"
ISSUED = "issued"
READY = "ready"
FAILED = "failed"
DONATED = "donated"

TRANSITIONS: dict[str, tuple[str, ...]] = {
    PENDING: (ISSUED, READY, FAILED),
    ISSUED: (READY, FAILED, DONATED),
    READY: (DONATED,),
    FAILED: (),
    DONATED: (FAILED,),
}
"""pending: nobody has made it yet.  issued: its gang is on its lane, so gangs
behind it on that lane may use it.  ready: its bytes are there.  failed: it
will never have a value.  donated: a later gang was given its memory (and may
learn only afterwards that there was no value)."""

Waiter = Callable[[], None]


class Reader:
    """A transfer or a client that reads a slot: a donation waits until it is over."""

    __slots__ = ("when_over",)

    def __init__(self) -> None:
        self.when_over: list[Waiter] = []


class Slot:
    """One logical array on this host.

    value: its shape, type, slice, layout and bytes per device.
    locals: numbers of the host's own devices that hold a shard.
    payload: the driver's object; None before it exists and after it is dropped.
    failure: why it has no value, when it is failed or donated.
    buffers: ids under which clients know it.
    names: how many buffers and values of runs call it.
    users: how many gangs, transfers and fetches in progress need it.
    counted: whether its bytes are in the host's account.
    holder: number of the client that has uploaded it, while its bytes lie in the host's own
        memory; else None.
    """

    __slots__ = (
        "_when_issued",
        "_when_settled",
        "buffers",
        "counted",
        "failure",
        "holder",
        "locals",
        "names",
        "payload",
        "readers",
        "state",
        "users",
        "value",
    )

    def __init__(self, value: Value, local_devices: tuple[int, ...]) -> None:
        self.value = value
        self.locals = local_devices
        self.state = PENDING
        self.payload: Any = None
        self.failure: Failure | None = None
        self.buffers: set[int] = set()
        self.names = 0
        self.users = 0
        self.counted = False
        self.holder: int | None = None
        self.readers: list[Reader] = []
        self._when_issued: list[Waiter] = []
        self._when_settled: list[Waiter] = []

    def __repr__(self) -> str:
        return f"<Slot {self.value.dtype}{list(self.value.shape)} {self.state}>"

    @property
    def settled(self) -> bool:
        """Whether it is known for good that the bytes are there, or will never be."""
        return self.state in (READY, FAILED, DONATED)

    @property
    def lacking(self) -> bool:
        """Whether there is no value to be had."""
        return self.state in (FAILED, DONATED)

    @property
    def awaited(self) -> bool:
        """Whether somebody waits until it is settled."""
        return bool(self._when_settled)

    def when_issued(self, call: Waiter) -> bool:
        """Call once the slot is not pending any more.  False: it is not already."""
        if self.state == PENDING:
            self._when_issued.append(call)
            return True
        return False

    def when_settled(self, call: Waiter) -> bool:
        """Call once the slot is settled.  False: it is already."""
        if self.settled:
            return False
        self._when_settled.append(call)
        return True

    def become(self, state: str, failure: Failure | None = None) -> None:
        """Change the state, and tell those who waited for it."""
        if state not in TRANSITIONS[self.state]:
            raise InvalidTransition(f"{self!r} cannot become {state}")
        self.state = state
        if failure is not None:
            self.failure = failure
        if state == FAILED:
            self.payload = None
        waiting, self._when_issued = self._when_issued, []
        if self.settled:
            waiting += self._when_settled
            self._when_settled = []
        for call in waiting:
            call()
