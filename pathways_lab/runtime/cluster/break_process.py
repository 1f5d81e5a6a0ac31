"""Faults of a worker's own device process, as an owner orders them: kill, stop, slow down...

Problem: faults must be tried on real hosts, wherever they are, and the control
plane must be able to end a device process that hears nothing any more.  Only
the worker beside it can: it is its parent.

How: functions for ``Client.run``; so every caller holds the credentials of the
Dask cluster and is an owner of the lab.

Rule for maintainers: every fault ends by itself, also when no client asks for
it; the device process imports nothing of this module.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any

from pathways_lab.runtime.cluster.device_supervisor import DeviceProcess, find
from pathways_lab.runtime.processes.child_process import ChildDied

_PERIOD = 0.02
"""Seconds of one stop and one go of a process that is slowed down."""


def act(name: str, wish: dict[str, Any]) -> bool:
    """Do something to the device process of the host *name*; False: it is not a child of this.

    wish["do"]: ``"kill"`` (the incarnation *pid*), ``"restart"`` (another one, where it was
    given up), ``"hang"`` (for *seconds*), ``"slow"``
    (*factor* times, for *seconds*), ``"heal"`` (end of both), ``"trouble"`` (*rule*, see
    :class:`pathways_lab.runtime.fault_injection.Rule`), ``"flip"`` (*rule*, see
    :class:`pathways_lab.runtime.host.bit_flips.Flips`).
    """
    process = find(name)
    if process is None:
        return False
    match wish["do"]:
        case "kill":
            return process.kill(wish["pid"])
        case "restart":
            process.restart()
        case "hang":
            _begin(process, float("inf"), wish["seconds"])
        case "slow":
            _begin(process, wish["factor"], wish["seconds"])
        case "heal":
            _stops.pop(name, threading.Event()).set()
        case "trouble" | "flip" as kind:
            with contextlib.suppress(ChildDied):
                process.tell({kind: wish["rule"]})
    return True


_stops: dict[str, threading.Event] = {}
"""By host: set, what is done to it ends."""


def _begin(process: DeviceProcess, factor: float, seconds: float) -> None:
    _stops.pop(process.name, threading.Event()).set()
    stop = _stops[process.name] = threading.Event()
    args = (process, process.pid, factor, time.monotonic() + seconds, stop)
    threading.Thread(target=_brake, args=args, name=f"slow {process.name}", daemon=True).start()


def _stopped(factor: float) -> float:
    """How long a process stands still in one period; for ever, if it shall not run at all."""
    return factor if factor == float("inf") else _PERIOD * (1 - 1 / factor)


def _brake(
    process: DeviceProcess, pid: int, factor: float, until: float, stop: threading.Event
) -> None:
    """Let a process run a part of the time, as long as it is this incarnation."""
    pause = _stopped(factor)
    with contextlib.suppress(ProcessLookupError):
        while not stop.is_set() and process.pid == pid and time.monotonic() < until:
            os.kill(pid, signal.SIGSTOP)
            stop.wait(min(pause, max(0.0, until - time.monotonic())))
            if factor != float("inf"):
                os.kill(pid, signal.SIGCONT)
                stop.wait(_PERIOD / factor)
        if process.pid == pid:
            os.kill(pid, signal.SIGCONT)
