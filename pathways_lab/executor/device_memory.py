"""The bytes on this host's devices: claims hold them, or wait for them in the order of grants.

Problem: the control plane's ledger counts along the *order of grants*: a free
counts as soon as the last reader has its place.  In reality that reader may
not have run yet, so a step that was granted behind it must wait here until the bytes
are really free, or devices would hold more than they have.  And a wait for
memory must never be a wait for a step that was granted later: that one may
itself stand behind the waiter.

How: a gang lodges a claim for its outputs, a transfer for its receive buffer, when
it is granted.  A claim may begin when there is
room for it *and for every earlier claim on the same devices that has not begun
yet*.  So a later one may pass an earlier one that still waits for its data,
but can never take the bytes that the earlier one needs: once there is room beside all
earlier claims, there always will be.  The earliest claim waits for claims that began
before it, and those end.

While memory is plentiful nothing is ever looked up: the claims that have not
begun and the bytes in use, added up, stay within the limit.

Rule for maintainers: pure numbers; no JAX, no threads, no clock.  A claim's
:meth:`Claim.need` may shrink while it waits and never grow.

Paper: section 4.6 (back-pressure: computations wait for memory).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar


class Claim(Protocol):
    """Something granted that will take memory when it begins.

    locals: the host's own numbers of its devices.  room: the most that it can
    take on each of them, in bytes, known when it is granted.
    """

    @property
    def locals(self) -> tuple[int, ...]: ...

    @property
    def room(self) -> int: ...

    def need(self) -> int:
        """Bytes on each of its devices that it would take if it began now."""


AnyClaim = TypeVar("AnyClaim", bound=Claim)


class Memory(Generic[AnyClaim]):
    """The account of one host.  limit: bytes per device; None: count only, never wait.

    used: bytes in use by local device.  most: the most that were since the last :meth:`look`.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.used: dict[int, int] = {}
        self.most: dict[int, int] = {}
        self._promised: dict[int, int] = {}
        self._queues: dict[int, dict[AnyClaim, None]] = {}
        """By device: claims that have not begun, in the order of their grants."""
        self._waiting: dict[AnyClaim, None] = {}
        self._changed = False

    # --- bytes ------------------------------------------------------------------------

    def take(self, devices: Iterable[int], nbytes: int) -> None:
        """Bytes on each of these devices are in use from now on."""
        for device in devices:
            now = self.used[device] = self.used.get(device, 0) + nbytes
            if now > self.most.get(device, 0):
                self.most[device] = now

    def give(self, devices: Iterable[int], nbytes: int) -> None:
        """Bytes on each of these devices are really free."""
        for device in devices:
            self.used[device] -= nbytes
        self._changed = True

    def look(self) -> dict[int, int]:
        """By device, the most bytes that were in use since the last look."""
        most, self.most = self.most, dict(self.used)
        return most

    # --- claims -----------------------------------------------------------------------

    def lodge(self, claim: AnyClaim) -> None:
        """A claim was granted: in the order of the grants, before it can begin."""
        if self.limit is None:
            return
        for device in claim.locals:
            self._promised[device] = self._promised.get(device, 0) + claim.room
            self._queues.setdefault(device, {})[claim] = None

    def plenty(self, claim: AnyClaim) -> bool:
        """Whether a claim, if lodged now, would find room beside all others at any time."""
        if self.limit is None:
            return True
        promised, used = self._promised, self.used
        taken = max(used.get(d, 0) + promised.get(d, 0) for d in claim.locals)
        return taken + claim.room <= self.limit

    def begin(self, claim: AnyClaim) -> bool:
        """Whether a claim that waits for nothing else may take its bytes, now, at once.

        If not, it waits here, until :meth:`freed` gives it back.
        """
        if self.limit is not None and not self._fits(claim):
            self._waiting[claim] = None
            return False
        self.withdraw(claim)
        return True

    def withdraw(self, claim: AnyClaim) -> None:
        """It has begun, or never will."""
        if self.limit is None:
            return
        self._waiting.pop(claim, None)
        for device in claim.locals:
            self._promised[device] -= claim.room
            del self._queues[device][claim]
        self._changed = True

    def freed(self) -> list[AnyClaim]:
        """Claims that waited and may perhaps begin now: try them again, in this order."""
        if not self._changed:
            return []
        self._changed = False
        return [claim for claim in self._waiting if self._fits(claim)]

    def waits(self, claim: AnyClaim) -> bool:
        """Whether nothing but memory keeps the claim from beginning."""
        return claim in self._waiting

    @property
    def short(self) -> bool:
        """Whether claims wait for memory alone.  Any thread: it may be so a moment later."""
        return bool(self._waiting)

    def story(self, claim: AnyClaim) -> str:
        """The bytes that a waiting claim waits for, with the numbers: for people."""
        full = max(claim.locals, key=lambda device: self.used.get(device, 0))
        return (
            f"waits for memory: needs {claim.need():,} bytes on device {full}, where"
            f" {self.used.get(full, 0):,} of {self.limit or 0:,} are in use"
        )

    def _fits(self, claim: AnyClaim) -> bool:
        assert self.limit is not None
        used, promised = self.used, self._promised
        for device in claim.locals:
            if used.get(device, 0) + promised[device] > self.limit:
                break
        else:
            return True
        if not claim.need():
            return True
        for device in claim.locals:
            left = self.limit - used.get(device, 0)
            for earlier in self._queues[device]:
                left -= earlier.need()
                if left < 0:
                    return False
                if earlier is claim:
                    break
        return True
