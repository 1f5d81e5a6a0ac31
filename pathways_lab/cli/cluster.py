"""``cluster``: a group's machines, by hand: certificates, a scheduler, workers, their state.

Problem: whoever outgrows one machine meets four programs of Dask with fifty options each, of
which a lab needs five, and a worker that ends for good when its machine was cut off for a
while.

How: the commands are Dask's own with these options.  A worker's process is started again for
ever, and its words are passed on.

Rule for maintainers: nothing here that Dask's own commands could not do as well; module-level
imports are the standard library and this folder.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pathways_lab.cli import certificates

PORT = 8786
PAUSE = 2.0
"""Seconds between two starts of a worker; a scheduler gives up a silent one in half a minute."""
TAKEN = "name taken"
"""Dask's words for a worker whose name another one has."""


def add_to(commands: Any) -> None:
    """The grammar of the command."""
    top = commands.add_parser(
        "cluster",
        help="make a lab's cluster of several machines",
        description="Certificates, a scheduler and workers for a lab of several machines.",
    )
    which = top.add_subparsers(dest="what", metavar="WHAT", required=True)
    certs = which.add_parser("certs", help="make certificates, and Dask's settings for them")
    certs.add_argument("folder", type=Path, help="where; all machines see it, or have a copy")
    certs.add_argument("--add", default="", metavar="NAME", help="a client's folder of his own")
    certs.add_argument("--renew", action="store_true", help="new ones of the same authority")
    scheduler = which.add_parser("scheduler", help="run the scheduler, on one machine")
    scheduler.add_argument("--host", default="", help="the address at which others reach it")
    scheduler.add_argument("--port", type=int, default=PORT, help="default: %(default)s")
    worker = which.add_parser("worker", help="run a worker, on each machine, for ever")
    worker.add_argument("address", help="of the scheduler: MACHINE or MACHINE:PORT")
    worker.add_argument("--island", default="", help="default: the machine is an island")
    worker.add_argument("--devices", type=int, help="default: what JAX finds")
    worker.add_argument(
        "--contact",
        default="",
        metavar="HOST",
        help="where others reach it, behind NAT or a tunnel that forwards --ports",
    )
    for each in (scheduler, worker):
        each.add_argument(
            "--ports", default="", metavar="A-B", help="of all doors here, but for the scheduler's"
        )
    status = which.add_parser("status", help="who is there")
    status.add_argument("address", help="of the scheduler: MACHINE or MACHINE:PORT")
    for each in (scheduler, worker, status):
        certified(each)


def certified(parser: argparse.ArgumentParser) -> None:
    """Add the option that says where certificates are."""
    parser.add_argument(
        "--certs", type=Path, metavar="DIR", help="default: Dask's own configuration"
    )


def run(options: argparse.Namespace) -> int:
    """Carry out one command; the exit status."""
    if options.what == "certs":
        try:
            print(*certificates.make(options.folder, options.add, options.renew), sep="\n")
        except (OSError, ValueError) as error:
            print(f"no certificates were made: {error}")
            return 1
        return 0
    if not _configured(options.certs):
        return 1
    if getattr(options, "ports", ""):
        from pathways_lab.transport import addresses

        try:
            os.environ["DASK_PATHWAYS__PORTS"] = addresses.port_range(options.ports)
        except ValueError as error:
            print(error)
            return 1
    if options.what in ("scheduler", "worker"):
        from pathways_lab.runtime.processes.dask_environment import IDLE

        os.environ.update({**IDLE, **os.environ})
    if options.what == "scheduler":
        host = ["--host", options.host] if options.host else []
        # Its pages have no login.
        pages = ["--dashboard-address", "127.0.0.1:8787"]
        os.execv(
            sys.executable,
            _python(
                *("distributed.cli.dask_scheduler", "--protocol", "tls"),
                *("--port", str(options.port), *host, *pages),
            ),
        )
    if options.what == "worker":
        own = _own_ports(options.ports, options.contact)
        if isinstance(own, str):
            print(own)
            return 1
        return work(whole(options.address), options.island, options.devices, own)
    from pathways_lab.cli import machines

    return machines.show(whole(options.address))


def _own_ports(ports: str, contact: str) -> list[str] | str:
    """Options with which Dask's worker listens at these ports; a text says what cannot be."""
    if not contact:
        return ["--worker-port", ports.replace("-", ":")] if ports else []
    first, _, last = ports.partition("-")
    if not last or int(first) == int(last):
        return (
            f"--contact {contact} needs two ports or more, which are forwarded to here from there:"
            " for example --ports 9000-9001"
        )
    # Dask tells others one port, so it gets the first one and the lab the rest.
    os.environ["DASK_PATHWAYS__PORTS"] = f"{int(first) + 1}-{last}"
    os.environ["DASK_PATHWAYS__CONTACT"] = contact
    told = ["--contact-address", f"tls://{contact}:{first}"]
    return ["--listen-address", f"tls://0.0.0.0:{first}", *told]


def examine(options: argparse.Namespace) -> int:
    """``doctor ADDRESS``."""
    if not _configured(options.certs):
        return 1
    from pathways_lab.cli import doctor, machines

    address = whole(options.address)
    checks = [lambda: machines.examine(address)]
    return doctor.run(checks=checks, start=f"pathways_lab.connect({address!r})")


def _configured(certs: Path | None) -> bool:
    """Have Dask, not yet imported, use these certificates; whether they are there."""
    if certs is None:
        return True
    if not (certs / "dask.yaml").exists():
        make = f"python -m pathways_lab cluster certs {certs}"
        print(f"there are no certificates in {certs}: {make}")
        return False
    os.environ["DASK_CONFIG"] = str(certs.absolute())
    return True


def whole(address: str) -> str:
    """``"sched"`` and ``"sched:8786"`` to ``"tls://sched:8786"``."""
    scheme, _, rest = address.rpartition("://")
    return f"{scheme or 'tls'}://{rest}" + ("" if ":" in rest else f":{PORT}")


def work(
    address: str,
    island: str,
    devices: int | None,
    own: Sequence[str] = (),
    machine: str = "",
) -> int:
    """One worker after the other, until this process is told to end."""
    from pathways_lab.runtime.processes.heaps import heaps

    machine = machine or socket.gethostname()
    name = f"{island or machine}/{machine}"
    # In a job its devices are as many as Dask's threads, where nobody says how many.
    few = [] if devices is None else ["--nthreads", "1", "--resources", f"devices={devices}"]
    # Its web server asks nobody who he is.
    quiet = ["--no-nanny", "--no-dashboard", "--dashboard-address", "127.0.0.1:0"]
    command = _python("pathways_lab.cli.worker", address, "--name", name, *quiet, *few, *own)
    environment = {**os.environ, **heaps()}
    ended = threading.Event()
    process: subprocess.Popen[str] | None = None

    def end(*_: object) -> None:
        ended.set()
        if process is not None:
            process.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    while not ended.is_set():
        # Ctrl-C of a terminal reaches every process there; this one passes it on.
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment
        )
        if ended.is_set():  # told while it started: nobody has told it
            end()
        why = ""
        for line in _lines(process):
            if TAKEN in line:
                why = f"another worker is called {name}, or this one's past is not over yet"
            elif not why:
                print(line, end="", file=sys.stderr, flush=True)
        status = process.wait()
        if not ended.is_set():
            why = why or f"the worker has ended, with status {status}"
            print(f"{name}: {why}; it is started again", file=sys.stderr, flush=True)
            time.sleep(PAUSE)
    return 0


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stderr is not None
    with process.stderr as lines:
        yield from lines


def _python(module: str, *options: str) -> list[str]:
    return [sys.executable, "-m", module, *options]
