"""Native threads that do not push aside the thread that wakes them.

Problem: a host that sends to another wakes that one's thread in the middle of the call
that sends, while it holds the lock of the connection.  Where processors are scarce the
thread woken takes the sender's place at once, and Gloo's own thread, which must not wait
for a lock, asks the kernel for the same message again and again until the sender runs and
lets go of it.  Four hosts on two cores spent a quarter of their processor time on that.

Rule for maintainers: only for threads that serve one call of ours after the other, and
that others wait for anyway.  Threads that launch or read messages keep their place.

Paper: section 4.5 (collectives among CPU hosts; on accelerators nothing of it is used).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def giving_way() -> Iterator[None]:
    """Threads that the calling thread makes meanwhile let whoever wakes them go on first.

    They get as much of the processors as others.  Where the system has no such threads
    (Linux has), or does not allow them, they are like any other.
    """
    try:
        ours = os.sched_getscheduler(0)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except (AttributeError, OSError):
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, ours, os.sched_param(0))
