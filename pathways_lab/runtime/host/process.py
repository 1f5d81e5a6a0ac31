"""The device process: ``python -m pathways_lab.runtime.host.process``.

Problem: devices live in a process of their own, with an environment that is
right before JAX is imported, whatever the Dask worker beside it has loaded;
and it may die, by an abort inside XLA, without taking the worker along.

How: the parent writes the configuration as one JSON line to standard input,
which stays open as lifeline (see :mod:`pathways_lab.runtime.processes.child_process`).

Rule for maintainers: nothing that imports JAX is imported before
:func:`set_environment` has run.  The process ends at once when it cannot go
on: it tells the control plane why, and the log of its parent has the details.

Paper: section 4.5 (one executor process per host).
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pathways_lab.runtime.cluster.device_supervisor import RETIRED
from pathways_lab.runtime.processes import child_process, job, stacks
from pathways_lab.runtime.processes.deaths import ENDS, FAILED
from pathways_lab.runtime.processes.interpreter_settings import Settings, imports

if TYPE_CHECKING:
    from pathways_lab.runtime.devices import IslandRuntime
    from pathways_lab.runtime.host.driver import HostRim

_COLLECTIVES = (
    "--xla_cpu_collective_timeout_seconds=86400",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=60",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)
"""How long devices wait for each other in a collective.  These bound how *uneven*
their work may be, so they are long: between processes, where one may have much
earlier work to do, the control plane finds the dead and the hung; within one,
minutes must be enough."""

_FLUSH_SECONDS = 0.2

_WORTH_KEEPING = 0.1
"""Seconds of a compilation whose outcome is kept for the host's next incarnation."""


def set_environment(platform: str, devices: int | None, stand_in: bool = False) -> None:
    """The environment that JAX reads when it is imported and when its clients are made.

    ``NPROC`` is for clients that span hosts; others have what they need
    (:func:`.jax_private.make_cpu_client`).  A user's own ``XLA_FLAGS`` come last, and so win.
    """
    cores = os.cpu_count() or 1
    os.environ["NPROC"] = str(max(cores, 2 * (devices or cores) + 2))
    if platform == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    flags = [*_COLLECTIVES, os.environ.get("XLA_FLAGS", "")]
    if stand_in:
        flags.append(f"--xla_force_host_platform_device_count={devices}")
        os.environ["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")


def keep_compiled(folder: str) -> None:
    """A compilation is read from there after a restart, unless the user keeps it elsewhere."""
    import jax

    if not jax.config.values["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_KEEPING)


def find_runtime(settings: dict[str, Any], end: _End) -> IslandRuntime:
    """The devices of this process: accelerators where JAX finds them, else emulated ones.

    Waits for other hosts where the accelerators of an island start together.
    """
    from pathways_lab.runtime.cluster import accelerators
    from pathways_lab.runtime.devices import PlatformRuntime
    from pathways_lab.runtime.islands.coordination_relay import through_control
    from pathways_lab.runtime.islands.multi_host_runtime import (
        JoinedPlatformRuntime,
        SpanningCpuRuntime,
    )
    from pathways_lab.runtime.islands.tls_tunnel import why_clear
    from pathways_lab.runtime.jax_private import read_flags
    from pathways_lab.transport.addresses import parse
    from pathways_lab.transport.machine_share import processors

    folder = Path(settings["private"])
    beyond = settings["data_listen"].startswith("tcp")
    service = functools.partial(through_control, settings) if beyond else None
    accelerators.unrestrained()
    if settings["platform"] != "cpu" or settings.get("stand_in"):
        there = accelerators.find() != accelerators.Found()
        if settings.get("members", 1) > 1 and (there or settings.get("stand_in")):
            from pathways_lab.runtime.islands.await_island import wait_for_island

            address, number, hosts = wait_for_island(settings, end)
            name, memory = settings["name"], settings["memory"]
            meet = address if service is None else functools.partial(service, number)
            return JoinedPlatformRuntime(name, hosts, meet, folder, memory)
        import jax

        if jax.default_backend() != "cpu":
            return PlatformRuntime(settings["name"], settings["memory"])
    read_flags()
    _, place = parse(settings["data_listen"])
    # Other hosts of the island reach this one where they reach its data address.
    interface = "127.0.0.1" if isinstance(place, str) else place[0]
    sealed = beyond and not settings["plain_collectives"] and not why_clear()
    devices = settings["devices"] or min(settings.get("processors") or sys.maxsize, processors())
    return SpanningCpuRuntime(
        settings["name"],
        folder,
        devices,
        settings["memory"],
        None if sealed else interface,
        room=settings.get("room"),
        service=service,
    )


class _End:
    """Ends the process once, saying why."""

    def __init__(self) -> None:
        self.rim: HostRim | None = None
        self._once = threading.Lock()

    def __call__(self, reason: str, code: int = FAILED) -> None:
        if not self._once.acquire(blocking=False):
            return
        print(f"{ENDS}{reason}", file=sys.stderr, flush=True)
        if self.rim is not None:
            with contextlib.suppress(Exception):
                last = reason.strip().splitlines()[-1]
                self.rim.tell_control("closing", {"reason": last})
                time.sleep(_FLUSH_SECONDS)
        if code == RETIRED:
            child_process.leave(code)  # nothing stays behind
        os._exit(code)


def main() -> None:
    """Serve until the parent is gone."""
    child_process.begin()
    # The last words of a process that a fatal signal ends: the user's line, in the log.
    faulthandler.enable(all_threads=False)
    stacks.answer_signal()
    # The thread that launches must not wait long for the one that prepares what comes next, nor
    # for looks at arrays that are no garbage.
    Settings()
    settings: dict[str, Any] = child_process.configuration()
    stand_in = settings.get("stand_in", False)
    set_environment(settings["platform"], settings["devices"], stand_in)

    # Only now: these import JAX.
    with imports():
        from pathways_lab.runtime import jax_private
        from pathways_lab.runtime.fault_injection import Troubles
        from pathways_lab.runtime.host.bit_flips import Flips
        from pathways_lab.runtime.host.compile_marks import Notes
        from pathways_lab.runtime.host.driver import HostRim
        from pathways_lab.runtime.islands import dcn_collectives
        from pathways_lab.runtime.islands.multi_host_runtime import (
            JoinedPlatformRuntime,
            SpanningCpuRuntime,
        )
        from pathways_lab.transport.dask_comms import is_comm
        from pathways_lab.transport.tls import client_context, server_context

    jax_private.share_contexts()
    if settings.get("compiled"):
        keep_compiled(settings["compiled"])
    end = _End()
    tls = settings.get("tls")
    over_network = not settings["data_listen"].startswith("unix")
    rim = end.rim = HostRim(
        settings["name"],
        settings["island"],
        find_runtime(settings, end),
        bytes.fromhex(settings["data_key"]),
        settings["data_listen"],
        end,
        client_context=client_context(tls) if over_network else None,
        # Dask's comms unpickle what comes, so nobody comes to them without a certificate.
        server_context=server_context(tls, invited=not is_comm(settings["data_listen"]))
        if over_network
        else None,
        retire=lambda reason: end(reason, RETIRED),
        notes=Notes(Path(settings["private"])),
        contact=settings.get("contact", ""),
    )
    assembled = isinstance(rim.runtime, JoinedPlatformRuntime)
    rim.start(
        settings["control"],
        bytes.fromhex(settings["key"]),
        worker_pid=settings["worker_pid"],
        worker=settings.get("worker", ""),
        job=job.number_of(os.environ),
        assembled=assembled,
        clear=assembled or (isinstance(rim.runtime, SpanningCpuRuntime) and rim.runtime.plain),
    )
    child_process.report(
        ready=True, pid=os.getpid(), data_address=rim.data_address, listens=rim.listens
    )
    troubles = Troubles(rim.reactor)
    dcn_collectives.slowed_by(functools.partial(troubles.lateness, "dcn"))
    flips = Flips(rim.tenants, rim.reactor.call_later)
    while True:
        news = child_process.configuration()
        if "leave" in news:
            rim.tell_control("leaving", {"reason": news["leave"]})
        elif "stacks" in news:
            stacks.write()
        elif "flip" in news:
            rim.reactor.call_soon(flips.begin, news["flip"])
        else:
            rim.reactor.call_soon(troubles.begin, news["trouble"])


def import_all() -> None:
    """Import what the work of a device process needs, for the copies of this process."""
    import pathways_lab.runtime.host.driver
    import pathways_lab.runtime.islands.multi_host_runtime  # noqa: F401

    with contextlib.suppress(ImportError):
        importlib.import_module("scipy.linalg")  # JAX does with the first function that it lowers


def be_copy() -> None:
    """The work of :func:`main`, in a copy of a process."""
    import numpy as np

    np.random.seed()
    main()


if __name__ == "__main__":
    main()
