"""Variables with which glibc keeps the memory of a device process.

Problem: glibc reads them when a process starts, so the one that starts it sets them: a worker,
or, where a worker copies itself, the process that starts the worker.

Rule for maintainers: nothing is imported that costs time, since the command line imports this.

Paper: none; these are settings of the C library.
"""

from __future__ import annotations

import os

from pathways_lab.transport import machine_share


def heaps() -> dict[str, str]:
    """How glibc keeps the memory of a device process, unless a user's variables say otherwise.

    Clients of JAX come and go with their threads, and so does what compiles.  Where each
    thread has a heap of its own, what they have freed stays with the process: some 100 MB.
    So there are as many as processors, and two at least: with fewer, threads that compute wait
    for each other's allocations, an eighth of a step of 230 arrays on 16 processors.  Each keeps
    up to 256 MB that were freed at its end, and takes memory in large pages where the system lends
    them: a training step takes what the step before it gave back, and small pages that the system
    clears anew cost a step up to a fifth of its time.
    """
    ours = {
        "MALLOC_ARENA_MAX": max(2, machine_share.processors()),
        "MALLOC_MMAP_THRESHOLD_": 1 << 25,  # the most that glibc takes
        "MALLOC_TRIM_THRESHOLD_": 1 << 28,
    }
    pages = ["glibc.malloc.hugetlb=1", *filter(None, [os.environ.get("GLIBC_TUNABLES")])]
    limits = {name: os.environ.get(name, str(value)) for name, value in ours.items()}
    return {**limits, "GLIBC_TUNABLES": ":".join(pages)}
