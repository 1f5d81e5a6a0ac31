"""Large buffers between two processes of one machine: shared memory instead of a socket.

Problem: a socket copies every byte twice, in pieces; memory that both ends see
needs one copy.  But memory in files is left behind by processes that are
killed, a full ``/dev/shm`` shows only as a fatal signal at the first touch, a
peer that shrinks such a file kills whoever reads it, and one file for each
array takes all descriptors that the process, and its user, may have.

How: a :class:`Lender` makes one anonymous :class:`Arena` (``memfd``), which has
no name to be left behind and is freed with the last process that has it.  It is
address space; a part of it gets memory before anything relies on it, and its
size is sealed.  The arena is offered with its descriptor over the Unix socket,
and used once the :class:`Borrower` at the other end says that it has mapped it.
A message then names the part in which its buffers lie, and the borrower gives
that part back when no view of its content is left.  Both ends use it again,
warm.  Where there is no memory, no platform support, too much on loan already
or no descriptor to spare at either end, the bytes go through the socket.

Rule for maintainers: an arena belongs to one link, so that no peer sees what
another one gets.  An offer of the other end is checked before it is mapped.
Nothing here takes a descriptor for a message.

Paper: section 4.5 (data between hosts).
"""

from __future__ import annotations

import bisect
import errno
import fcntl
import mmap
import os
import resource
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from pathways_lab.transport.buffer_pool import Loan, owned, size_class
from pathways_lab.transport.machine_share import available_memory

SUPPORTED = (
    hasattr(os, "memfd_create") and hasattr(socket, "SCM_RIGHTS") and hasattr(fcntl, "F_ADD_SEALS")
)
SHARED_FROM = 128 * 1024
"""Buffers of one message from this many bytes in total go through an arena."""
MOST = 1 << 30
"""Bytes of memory that one end of one link lends at most."""
SPAN = 2 * MOST
"""Bytes of address space of an arena: gaps between parts that are on loan cost nothing else."""
_SPARE = 4
"""A part gets memory while so many times its size is available."""
_PAUSE = 5.0
"""Seconds without another try after an arena, or memory for a part, could not be had."""
_ALIGNMENT = 64
DESCRIPTORS = 8
"""Descriptors that may be on their way at once."""
_SHARE = 4
"""Arenas take descriptors while less than one of so many is in use: the others are the user's."""


Claim = int
"""The place in the arena at which the buffers of a message begin."""


class SegmentError(Exception):
    """The other end said something about shared memory that cannot be."""


def _affordable(descriptor: int) -> bool:
    """Whether this process can spare a descriptor and the address space of an arena.

    The system gives the lowest number that is free, so a number tells how many are in use.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    return space == resource.RLIM_INFINITY and (
        limit == resource.RLIM_INFINITY or descriptor < limit // _SHARE
    )


class Arena:
    """Address space that this end has made and the other may map.  Its parts need memory first."""

    __slots__ = ("descriptor", "memory", "size")

    def __init__(self, size: int = SPAN) -> None:
        """Raises OSError when it cannot be had."""
        self.size = size
        self.descriptor = os.memfd_create("pathways-lab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        if not _affordable(self.descriptor):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        os.ftruncate(self.descriptor, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
        self.memory = mmap.mmap(self.descriptor, size)

    def fill(self, start: int, size: int) -> None:
        """Take memory for a part: from then on writing cannot fail.  Raises OSError."""
        try:
            os.posix_fallocate(self.descriptor, start, size)
        except OSError:
            self.empty(start, size)
            raise

    def empty(self, start: int, size: int) -> None:
        """Give the memory of a part back to the system, at both ends."""
        self.memory.madvise(mmap.MADV_REMOVE, start, size)

    def __del__(self) -> None:
        descriptor = getattr(self, "descriptor", None)
        if descriptor is not None:
            os.close(descriptor)


class _Gaps:
    """The stretches of an arena that no part takes, in ascending order; neighbours are one."""

    def __init__(self, size: int) -> None:
        self._starts = [0]
        self._ends = [size]

    def take(self, size: int) -> int | None:
        """A place for so many bytes: the first that is large enough."""
        for number, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start > size:
                self._starts[number] = start + size
                return start
            if end - start == size:
                del self._starts[number], self._ends[number]
                return start
        return None

    def give(self, start: int, size: int) -> None:
        number = bisect.bisect(self._starts, start)
        self._starts.insert(number, start)
        self._ends.insert(number, start + size)
        for first in (number, number - 1):
            if 0 <= first < len(self._starts) - 1 and self._ends[first] == self._starts[first + 1]:
                del self._ends[first], self._starts[first + 1]


def offsets(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Where buffers of these lengths lie in a part, and the end of the last."""
    starts, end = [], 0
    for length in lengths:
        starts.append(end)
        end += -(-length // _ALIGNMENT) * _ALIGNMENT
    return starts, end


class Lender:
    """The sending end of a link: an arena that it has made, with parts that are idle or lent.

    lent_messages: how many messages went through the arena.
    """

    def __init__(self) -> None:
        self.lent_messages = 0
        self._arena: Arena | None = None
        self._shared = False
        self._gaps = _Gaps(SPAN)
        # Parts with memory: those on loan by their start, those that came back and are not
        # sorted in yet, and idle ones by size; the sizes that were wanted last come last.
        self._lent: dict[int, int] = {}
        self._back: deque[tuple[int, int]] = deque()
        self._idle: dict[int, list[int]] = {}
        self._total = 0
        self._not_before = 0.0

    def offer(self) -> Arena | None:
        """An arena that the other end has to be told of; None: it was, or there is none.

        By one thread at a time, as :meth:`lend`.
        """
        now = time.monotonic()
        if self._arena is not None or now < self._not_before:
            return None
        try:
            self._arena = Arena()
        except OSError:
            self._not_before = now + _PAUSE
        return self._arena

    def answered(self, taken: Any) -> None:
        """The other end has mapped the arena, or cannot."""
        if taken is True:
            self._shared = self._arena is not None
        elif not self._shared:
            self._not_before = time.monotonic() + _PAUSE
            self._arena = None

    def lend(self, buffers: Sequence[memoryview]) -> Claim | None:
        """Where copies of *buffers* lie in the arena; None: there is no room."""
        if self._arena is None or not self._shared:
            return None
        starts, end = offsets([len(buffer) for buffer in buffers])
        size = size_class(end)
        claim = self._part(self._arena, size)
        if claim is None:
            return None
        # Here, because a process that lends nothing need not load it.
        import numpy as np

        whole = np.frombuffer(self._arena.memory, np.uint8, size, claim)
        for start, buffer in zip(starts, buffers, strict=True):
            if buffer:
                # NumPy lets other threads run meanwhile.
                whole[start : start + len(buffer)] = np.frombuffer(buffer, np.uint8)
        self._lent[claim] = size
        self.lent_messages += 1
        return claim

    def returned(self, claims: Sequence[Any]) -> None:
        """The other end does not use these any more.  From any thread.  Raises SegmentError."""
        for claim in claims:
            size = self._lent.pop(claim, None) if type(claim) is int else None
            if size is None:
                raise SegmentError(f"part {claim!r:.40} was given back and is not on loan")
            self._back.append((claim, size))

    def _part(self, arena: Arena, size: int) -> int | None:
        """A part of so many bytes, with memory."""
        while self._back:
            start, came = self._back.popleft()
            self._idle.setdefault(came, []).append(start)
        idle = self._idle.pop(size, None)
        if not idle:
            return self._new(arena, size)
        start = idle.pop()
        if idle:
            self._idle[size] = idle
        return start

    def _new(self, arena: Arena, size: int) -> int | None:
        while self._idle and self._total + size > MOST:
            self._let_go(arena)
        now = time.monotonic()
        if self._total + size > MOST or now < self._not_before:
            return None
        start = self._gaps.take(size)
        if start is None:
            while self._idle:
                self._let_go(arena)
            start = self._gaps.take(size)
        if start is None:
            return None
        try:
            if available_memory() < _SPARE * size:
                raise MemoryError
            arena.fill(start, size)
        except (OSError, MemoryError):
            self._gaps.give(start, size)
            self._not_before = now + _PAUSE
            return None
        self._total += size
        return start

    def _let_go(self, arena: Arena) -> None:
        """Give back an idle part, of the size that was not wanted for longest."""
        size = next(iter(self._idle))
        start = self._idle[size].pop()
        if not self._idle[size]:
            del self._idle[size]
        arena.empty(start, size)
        self._gaps.give(start, size)
        self._total -= size


class Borrower:
    """The receiving end of a link: the arena of the other end, mapped here."""

    def __init__(self) -> None:
        self._arrived: deque[int] = deque()
        self._memory: mmap.mmap | None = None
        self._on_loan: dict[int, Loan] = {}
        self._unused: deque[Loan] = deque()

    def receive(self, sock: socket.socket, space: memoryview) -> int:
        """``recv_into`` that keeps descriptors.  Raises SegmentError, OSError.

        The system drops a descriptor that finds no room in this process: its arena is refused.
        """
        count, ancillary, _, _ = sock.recvmsg_into(
            [space], socket.CMSG_SPACE(4 * (DESCRIPTORS + 1)), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                view = memoryview(data)
                self._arrived.extend(view[: len(view) // 4 * 4].cast("i"))
        if len(self._arrived) > DESCRIPTORS:
            raise SegmentError("too many descriptors at once")
        return count

    def take(self, size: Any) -> bool:
        """The other end offers an arena of so many bytes: whether it is mapped here now.

        Raises SegmentError.
        """
        if self._memory is not None or type(size) is not int:
            raise SegmentError("an arena came twice, or without its size")
        if size > SPAN:
            # Address space costs its maker nothing, and its reader memory.
            raise SegmentError(f"an arena of {size:,} bytes; {SPAN:,} are allowed")
        if not self._arrived:
            return False
        descriptor = self._arrived.popleft()
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            # Unsealed, the other end could take the memory away from under us.
            if not seals & fcntl.F_SEAL_SHRINK or os.fstat(descriptor).st_size != size:
                raise SegmentError("an arena is not what was said, or not sealed")
            if not _affordable(descriptor):
                return False
            self._memory = mmap.mmap(descriptor, size)
        except ValueError as error:
            raise SegmentError(f"an arena cannot be mapped: {error}") from error
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True

    def views(self, claim: Any, lengths: Sequence[int]) -> list[memoryview]:
        """The buffers of a message in the arena; *claim* is what its header says of it.

        Raises SegmentError.
        """
        raw = self._memory
        starts, end = offsets(lengths)
        if type(claim) is not int or raw is None or claim in self._on_loan:
            raise SegmentError(f"the place {claim!r:.40} of its buffers is none, or in use")
        if not (0 <= claim < claim + end <= len(raw)) or claim % mmap.PAGESIZE:
            raise SegmentError(f"its buffers, {end} bytes at {claim}, are not in the arena")
        whole, self._on_loan[claim] = owned(raw, end, self._unused.append, claim)
        return [
            whole[start : start + length] for start, length in zip(starts, lengths, strict=True)
        ]

    def unused(self) -> list[int]:
        """Parts to give back now."""
        claims = [self._unused.popleft().start for _ in range(len(self._unused))]
        for claim in claims:
            del self._on_loan[claim]
        return claims

    def close(self) -> None:
        """The link is closed.  Memory in view stays until the last view of it is gone."""
        raw, self._memory = self._memory, None
        while self._arrived:
            os.close(self._arrived.popleft())
        if raw is None:
            return
        self.unused()
        # Watched no longer: who watches would keep the mapping.
        loans, self._on_loan = self._on_loan, {}
        place = 0
        for claim, loan in sorted(loans.items()):
            _remove(raw, place, claim)
            place = claim + loan.nbytes
        _remove(raw, place, len(raw))


def _remove(raw: mmap.mmap, start: int, end: int) -> None:
    """Give the memory of whole pages between these places back to the system."""
    start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    end = end // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end:
        raw.madvise(mmap.MADV_REMOVE, start, end - start)
