"""Memory for large arrays, used again once no view of it is left.

Problem: the first touch of a fresh page costs more than the copy that goes into
it, many times more on virtual machines.  Steps of a training loop need the same
sizes again and again.

How: memory is handed out behind an owner object to which all views refer
(those of memoryview, NumPy and JAX).  When the last view is gone, a weak
reference to the owner notes that, and the memory is put back by the next
:meth:`Pages.take`, or by :func:`tidy` when none follows.

Rule for maintainers: the last view may go anywhere, also inside :meth:`Pages.take`
of the same thread, and an exception of Ctrl-C is lost there.  So no Python code
runs then.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

_KEEP = 256 << 20
"""How many bytes may lie unused."""


def size_class(nbytes: int) -> int:
    """*nbytes* rounded up, by less than a quarter, so that similar sizes can follow each other."""
    step = max(mmap.PAGESIZE, 1 << max(0, nbytes.bit_length() - 3))
    return max(1, -(-nbytes // step)) * step


class Loan(weakref.ref[Any]):
    """Watches views of *nbytes* of *raw* from *start* on; whoever keeps it hears when all are gone.

    gone(loan) is called then, in any thread at any moment: a function of C's, as ``deque.append``.
    """

    __slots__ = ("nbytes", "raw", "start")
    # Those of weak references are about what they refer to, which has gone.
    __eq__ = object.__eq__
    __hash__ = object.__hash__
    raw: mmap.mmap
    nbytes: int
    start: int


def owned(
    raw: mmap.mmap, nbytes: int, gone: Callable[[Loan], object], start: int = 0
) -> tuple[memoryview, Loan]:
    """*nbytes* of *raw* from *start* on, and what has to be kept until no view of them is left."""
    owner = (ctypes.c_ubyte * nbytes).from_buffer(raw, start)
    loan = Loan(owner, gone)
    loan.raw, loan.nbytes, loan.start = raw, nbytes, start
    return memoryview(owner).cast("B"), loan


class Pages:
    """A pool of page-aligned memory.  allocated: bytes ever asked of the system."""

    def __init__(self, keep: int = _KEEP) -> None:
        self.allocated = 0
        self._keep = keep
        # By size; the sizes that were wanted last come last.
        self._free: dict[int, list[mmap.mmap]] = {}
        self._idle = 0
        self._taken: set[Loan] = set()
        self._gone: deque[Loan] = deque()
        self._lock = threading.Lock()
        _pools.add(self)

    def take(self, nbytes: int) -> memoryview:
        """Writable memory with anything in it; it comes back when nobody sees it any more."""
        size = size_class(nbytes)
        raw: mmap.mmap | None = None
        with self._lock:
            self._put_back()
            free = self._free.pop(size, None)
            if free:
                raw = free.pop()
                self._idle -= size
                if free:
                    self._free[size] = free
            if raw is None:
                raw = mmap.mmap(-1, size)
                self.allocated += size
            view, loan = owned(raw, nbytes, self._gone.append)
            self._taken.add(loan)
        return view

    def tidy(self) -> None:
        """Put back what nobody sees any more, where nobody has done so."""
        if self._gone:
            with self._lock:
                self._put_back()

    def _put_back(self) -> None:
        while self._gone:
            loan = self._gone.popleft()
            self._taken.discard(loan)
            size = len(loan.raw)
            free = self._free.pop(size, [])
            free.append(loan.raw)
            self._free[size] = free
            self._idle += size
        while self._idle > self._keep:
            oldest = next(iter(self._free))
            self._free[oldest].pop()
            self._idle -= oldest
            if not self._free[oldest]:
                del self._free[oldest]


_pools: weakref.WeakSet[Pages] = weakref.WeakSet()


def tidy() -> None:
    """The same of all pools of this process."""
    for pool in tuple(_pools):
        pool.tidy()
