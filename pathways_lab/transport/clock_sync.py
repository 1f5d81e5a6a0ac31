"""One clock for the records of many processes.

Problem: times in the timeline are seconds on the control plane's monotonic
clock.  Processes of one machine share that clock already; others estimate the
difference from the round trip of the hello: the middle of sending and
receiving is taken as the moment of the stamp, so the error is at most half the
round trip.

Rule for maintainers: never wall-clock time; stamps travel in hellos only.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any, NamedTuple


@functools.cache
def machine() -> str:
    """An id of this boot of this machine; "" where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def stamp() -> dict[str, Any]:
    """The clock in a hello: this process's monotonic clock, and its machine."""
    return {"clock": time.monotonic(), "machine": machine()}


class Difference(NamedTuple):
    """Between two clocks, in seconds.

    offset: what to add to this process's clock to get the other one.
    error: how far off that may be.
    """

    offset: float = 0.0
    error: float = 0.0


def difference(hello: dict[str, Any], sent: float, received: float) -> Difference:
    """Between this process's clock and that of the hello's sender.

    sent, received: this clock before asking for the hello and on getting it.
    """
    clock = hello.get("clock")
    if not isinstance(clock, float):
        return Difference()
    if machine() and hello.get("machine") == machine() and sent <= clock <= received:
        # The same clock (and not another one in a container of its own).
        return Difference()
    return Difference(clock - (sent + received) / 2, (received - sent) / 2)
