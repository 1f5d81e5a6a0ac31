"""The memory that glibc keeps for a device process, and gives back.

Problem: a training step takes what the step before it freed, so it is to stay; a compiler takes
hundreds of megabytes that nobody takes again.

How: glibc reads variables when a process starts, so the one that starts it sets them: a worker,
or, where a worker copies itself, the process that starts the worker.

Rule for maintainers: nothing is imported that costs time, since the command line imports this.

Paper: none; these are settings of the C library.
"""

from __future__ import annotations

import os
import sys

from pathways_lab.transport import machine_share

_EACH, _MOST = 8, 32
"""Heaps for each processor, as glibc has them, and at most."""


def heaps() -> dict[str, str]:
    """How glibc keeps the memory of a device process, unless a user's variables say otherwise.

    Threads that share a heap wait for each other's allocations: with one for each processor a
    step of 230 arrays on four devices took a tenth longer.  More heaps than threads only take
    memory.  Each keeps up to 256 MB that were freed at its end, and takes memory in large pages
    where the system lends them: a training step takes what the step before it gave back, and small
    pages that the system clears anew cost a step up to a fifth of its time.
    """
    ours = {
        "MALLOC_ARENA_MAX": min(_EACH * machine_share.processors(), _MOST),
        "MALLOC_MMAP_THRESHOLD_": 1 << 25,  # the most that glibc takes
        "MALLOC_TRIM_THRESHOLD_": 1 << 28,
    }
    pages = ["glibc.malloc.hugetlb=1", *filter(None, [os.environ.get("GLIBC_TUNABLES")])]
    limits = {name: os.environ.get(name, str(value)) for name, value in ours.items()}
    return {**limits, "GLIBC_TUNABLES": ":".join(pages)}


def give_back() -> None:
    """Give the system what was freed between what is in use, where the C library can do that.

    It takes tens of milliseconds, in which other threads go on but for what they allocate.
    """
    if sys.platform == "linux":
        import ctypes

        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
