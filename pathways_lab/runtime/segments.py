"""Large buffers between two processes of one machine: shared memory instead of a socket.

Problem: a socket copies every byte twice, in pieces; memory that both ends see
needs one copy.  But memory in files is left behind by processes that are
killed, a full ``/dev/shm`` shows only as a fatal signal at the first touch, and
a peer that shrinks such a file kills whoever reads it.

How: a :class:`Lender` makes anonymous segments (``memfd``), which have no name
to be left behind and are freed with the last process that has them.  It takes
their memory before anything relies on it and seals their size.  The first
message in a segment carries its descriptor over the Unix socket; the
:class:`Borrower` at the other end keeps it mapped, and gives it back by number
when nobody sees its content any more.  Both ends then use it again, warm.
Where there is no memory, no platform support or too much on loan already,
:meth:`Lender.lend` answers None and the bytes go through the socket.

Rule for maintainers: segments belong to one link, so that no peer sees what
another one gets.  What comes from the other end is checked before it is mapped.

Paper: section 4.5 (data between hosts).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from pathways_lab.runtime.budget import available_memory
from pathways_lab.runtime.pages import owned, size_class

SUPPORTED = (
    hasattr(os, "memfd_create") and hasattr(socket, "SCM_RIGHTS") and hasattr(fcntl, "F_ADD_SEALS")
)
SHARED_FROM = 128 * 1024
"""Buffers of one message from this many bytes in total go through a segment."""
MOST = 512 << 20
"""Bytes of segments that one end of one link lends at most."""
_SPARE = 4
"""A new segment is made while so many times its size is available."""
_PAUSE = 5.0
"""Seconds without new segments after one could not be made."""
_ALIGNMENT = 64
DESCRIPTORS = 8
"""Descriptors that may be on their way at once."""


Claim = tuple[int, int, bool, list[int]]
"""Number and size of a segment, whether its descriptor comes along, and numbers withdrawn."""


class SegmentError(Exception):
    """The other end said something about segments that cannot be."""


class Segment:
    """Shared memory that this end has made.  Its memory is taken already: writing cannot fail."""

    __slots__ = ("descriptor", "memory", "number", "sent", "size")

    def __init__(self, number: int, size: int) -> None:
        """Raises OSError when there is not enough memory."""
        self.number = number
        self.size = size
        self.sent = False
        self.descriptor = os.memfd_create("pathways-lab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, size)
        os.posix_fallocate(self.descriptor, 0, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
        self.memory = mmap.mmap(self.descriptor, size)

    def __del__(self) -> None:
        descriptor = getattr(self, "descriptor", None)
        if descriptor is not None:
            os.close(descriptor)


def offsets(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Where buffers of these lengths lie in a segment, and the end of the last."""
    starts, end = [], 0
    for length in lengths:
        starts.append(end)
        end += -(-length // _ALIGNMENT) * _ALIGNMENT
    return starts, end


class Lender:
    """The sending end of a link: segments that it has made, idle or lent.

    lent_messages: how many messages went through segments.
    """

    def __init__(self) -> None:
        self.lent_messages = 0
        self._idle: list[Segment] = []
        self._lent: dict[int, Segment] = {}
        self._numbers = 0
        self._total = 0
        self._not_before = 0.0
        self._withdrawn: list[int] = []

    def lend(self, buffers: Sequence[memoryview]) -> tuple[Segment, Claim] | None:
        """A segment with copies of *buffers*, and what to tell of it; None: there is no room.

        By one thread at a time.
        """
        starts, end = offsets([len(buffer) for buffer in buffers])
        size = size_class(end)
        segment = self._fitting(size) or self._new(size)
        if segment is None:
            return None
        # Here, because a process that lends nothing need not load it.
        import numpy as np

        whole = np.frombuffer(segment.memory, np.uint8)
        for start, buffer in zip(starts, buffers, strict=True):
            if buffer:
                # NumPy lets other threads run meanwhile.
                whole[start : start + len(buffer)] = np.frombuffer(buffer, np.uint8)
        withdrawn, self._withdrawn = self._withdrawn, []
        claim = (segment.number, segment.size, not segment.sent, withdrawn)
        self._lent[segment.number] = segment
        self.lent_messages += 1
        return segment, claim

    def keep(self, segment: Segment, claim: Claim) -> None:
        """It was not sent after all."""
        self.returned([segment.number])
        self._withdrawn += claim[3]

    def returned(self, numbers: Sequence[Any]) -> None:
        """The other end does not use these any more.  Raises SegmentError."""
        for number in numbers:
            segment = self._lent.pop(number, None) if type(number) is int else None
            if segment is None:
                raise SegmentError(f"segment {number!r:.40} was given back and is not on loan")
            self._idle.append(segment)

    def _fitting(self, size: int) -> Segment | None:
        for place, segment in enumerate(self._idle):
            if size <= segment.size <= 2 * size:
                return self._idle.pop(place)
        return None

    def _new(self, size: int) -> Segment | None:
        while self._idle and self._total + size > MOST:
            old = self._idle.pop(0)
            self._total -= old.size
            self._withdrawn.append(old.number)
        now = time.monotonic()
        if self._total + size > MOST or now < self._not_before:
            return None
        try:
            if available_memory() < _SPARE * size:
                raise MemoryError
            segment = Segment(self._numbers + 1, size)
        except (OSError, MemoryError):
            self._not_before = now + _PAUSE
            return None
        self._numbers += 1
        self._total += size
        return segment


class Borrower:
    """The receiving end of a link: segments of the other end that are mapped here.

    wants_return(): called, in any thread at any moment, when there is something to give back.
    """

    def __init__(self, wants_return: Callable[[], None]) -> None:
        self._wants_return = wants_return
        self._arrived: deque[int] = deque()
        self._mapped: dict[int, mmap.mmap] = {}
        self._on_loan: set[int] = set()
        self._unused: deque[int] = deque()

    def receive(self, sock: socket.socket, space: memoryview) -> int:
        """``recv_into`` that keeps descriptors.  Raises SegmentError, OSError."""
        count, ancillary, flags, _ = sock.recvmsg_into(
            [space], socket.CMSG_SPACE(4 * DESCRIPTORS), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                view = memoryview(data)
                self._arrived.extend(view[: len(view) // 4 * 4].cast("i"))
        if flags & socket.MSG_CTRUNC or len(self._arrived) > DESCRIPTORS:
            raise SegmentError("too many descriptors at once")
        return count

    def views(self, claim: Any, lengths: Sequence[int]) -> list[memoryview]:
        """The buffers of a message in a segment; *claim* is what its header says of it.

        Raises SegmentError.
        """
        try:
            number, size, new, withdrawn = claim
        except (TypeError, ValueError):
            raise SegmentError("the description of a segment is malformed") from None
        if type(number) is not int or type(size) is not int or not isinstance(withdrawn, list):
            raise SegmentError("the description of a segment is malformed")
        for old in withdrawn:
            if type(old) is not int or old in self._on_loan or not self._mapped.pop(old, None):
                raise SegmentError("a segment in use or unknown was withdrawn")
        if new:
            self._map(number, size)
        raw = self._mapped.get(number)
        starts, end = offsets(lengths)
        if raw is None or number in self._on_loan or end > len(raw):
            raise SegmentError(f"segment {number} is unknown, in use or too small")
        self._on_loan.add(number)
        whole = owned(raw, len(raw), lambda: self._gone(number))
        return [
            whole[start : start + length] for start, length in zip(starts, lengths, strict=True)
        ]

    def _map(self, number: int, size: int) -> None:
        if number in self._mapped or not self._arrived:
            raise SegmentError(f"segment {number} came twice or without its descriptor")
        descriptor = self._arrived.popleft()
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            # Unsealed, the other end could take the memory away from under us.
            if not seals & fcntl.F_SEAL_SHRINK or os.fstat(descriptor).st_size != size:
                raise SegmentError(f"segment {number} is not what was said, or not sealed")
            self._mapped[number] = mmap.mmap(descriptor, size)
        except (OSError, ValueError) as error:
            raise SegmentError(f"segment {number} cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)

    def _gone(self, number: int) -> None:
        self._unused.append(number)
        self._wants_return()

    def unused(self) -> list[int]:
        """Segments to give back now."""
        numbers = [self._unused.popleft() for _ in range(len(self._unused))]
        self._on_loan.difference_update(numbers)
        return numbers

    def close(self) -> None:
        """The link is closed.  What is still seen stays until nobody sees it."""
        self._mapped.clear()
        while self._arrived:
            os.close(self._arrived.popleft())
