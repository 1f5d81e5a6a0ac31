"""Memory for large arrays that is used again once nobody sees it any more.

Problem: the first touch of a fresh page costs more than the copy that goes into
it, many times more on virtual machines.  Steps of a training loop need the same
sizes again and again.

How: memory is handed out behind an owner object to which all views refer,
whoever makes them (memoryview, NumPy, JAX); when the last is gone, the owner's
finalizer puts the memory back.

Rule for maintainers: a finalizer may run anywhere, also inside :meth:`Pages.take`
of the same thread: it never waits for a lock.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Callable

_KEEP = 256 << 20
"""How many bytes may lie unused."""


def size_class(nbytes: int) -> int:
    """*nbytes* rounded up, by less than a quarter, so that similar sizes can follow each other."""
    step = max(mmap.PAGESIZE, 1 << max(0, nbytes.bit_length() - 3))
    return max(1, -(-nbytes // step)) * step


def owned(raw: mmap.mmap, nbytes: int, gone: Callable[[], object], start: int = 0) -> memoryview:
    """*nbytes* of *raw* from *start* on; gone() is called when no view of them is left.

    gone runs as a finalizer, in any thread at any moment.
    """
    owner = (ctypes.c_ubyte * nbytes).from_buffer(raw, start)
    weakref.finalize(owner, gone).atexit = False
    return memoryview(owner).cast("B")


class Pages:
    """A pool of page-aligned memory.  allocated: bytes ever asked of the system."""

    def __init__(self, keep: int = _KEEP) -> None:
        self.allocated = 0
        self._keep = keep
        # By size; the sizes that were wanted last come last.
        self._free: dict[int, list[mmap.mmap]] = {}
        self._idle = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> memoryview:
        """Writable memory with anything in it; it comes back when nobody sees it any more."""
        size = size_class(nbytes)
        raw: mmap.mmap | None = None
        with self._lock:
            free = self._free.pop(size, None)
            if free:
                raw = free.pop()
                self._idle -= size
                if free:
                    self._free[size] = free
        if raw is None:
            raw = mmap.mmap(-1, size)
            self.allocated += size
        kept = raw
        return owned(kept, nbytes, lambda: self._give_back(kept))

    def _give_back(self, raw: mmap.mmap) -> None:
        if not self._lock.acquire(blocking=False):
            # Then it goes back to the system.
            return
        try:
            size = len(raw)
            free = self._free.pop(size, [])
            free.append(raw)
            self._free[size] = free
            self._idle += size
            while self._idle > self._keep:
                oldest = next(iter(self._free))
                self._free[oldest].pop()
                self._idle -= oldest
                if not self._free[oldest]:
                    del self._free[oldest]
        finally:
            self._lock.release()
