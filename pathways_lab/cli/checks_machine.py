"""Checks of the machine: Python, compiler, sockets, memory.  Standard library only."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from pathways_lab.cli import platforms
from pathways_lab.cli.finding import Finding
from pathways_lab.core.errors import PathwaysError
from pathways_lab.transport import addresses

GB = 1e9
QUICKSTART = (2, 4)
"""Hosts, and devices of each, of the lab that the quickstart starts."""
BESIDE_THE_LAB = 600_000_000
"""Bytes of JupyterLab and a kernel with JAX and Bokeh."""
LEAST_FILES = 1024


def python_and_platform() -> Iterator[Finding]:
    """CPython 3.11 to 3.13 on a supported system."""
    machine = platforms.this_machine()
    what = f"Python {sys.version.split()[0]} on {platforms.name(machine)}"
    if refusal := platforms.refusal(machine):
        yield Finding("FAIL", what, refusal)
    elif doubt := platforms.doubt(machine):
        yield Finding("warn", what, doubt)
    else:
        yield Finding("ok", what)


def compiler() -> Iterator[Finding]:
    """A C++ compiler: optional, for emulated devices that use no core."""
    named = os.environ.get("CXX", "").split()
    for candidate in (*named[:1], "c++", "g++", "clang++"):
        if path := shutil.which(candidate):
            yield Finding("ok", f"C++ compiler: {path}")
            return
    yield Finding(
        "note",
        "C++ compiler: none (emulated devices will use a slower Python callback)",
        "install g++ or clang if you want to measure with emulated devices",
    )


def loopback() -> Iterator[Finding]:
    """A TCP port on 127.0.0.1 can be opened and reached."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError as error:
        yield Finding(
            "FAIL",
            f"loopback: no connection over 127.0.0.1 ({error})",
            "allow local TCP connections in the firewall or sandbox; the lab uses no other network",
        )
        return
    yield Finding("ok", "loopback: ports on 127.0.0.1 can be opened and reached")


def unix_sockets() -> Iterator[Finding]:
    """A Unix socket works in the kind of private folder that the lab makes."""
    folder = addresses.private_folder()
    path = folder / "island0-host0.sock"
    try:
        family, name = addresses.parse(f"unix:{path}")
        with socket.socket(family, socket.SOCK_STREAM) as server:
            server.bind(name)
        private = folder.stat().st_mode & 0o077 == 0
    except (OSError, ValueError) as error:
        yield Finding(
            "FAIL",
            f"Unix sockets: {error}",
            "set TMPDIR to a short path on a local disk (not a network or Windows drive)",
        )
        return
    finally:
        addresses.remove_folder(folder)
    if private:
        yield Finding("ok", f"Unix sockets: in private folders below {folder.parent}")
    else:
        yield Finding(
            "FAIL",
            f"Unix sockets: {folder.parent} does not keep folders private",
            "set TMPDIR to a folder on a file system with Unix permissions",
        )


def shared_memory(folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Room in /dev/shm, which containers often limit; macOS has no such folder."""
    if sys.platform != "linux":
        yield Finding("ok", "shared memory: provided by the system")
    elif not os.access(folder, os.W_OK):
        yield Finding(
            "warn",
            f"shared memory: {folder} is missing or not writable",
            "mount it: collectives between GPUs and headless browsers need it",
        )
    else:
        free = shutil.disk_usage(folder).free
        small = free < 0.06 * GB
        yield Finding(
            "warn" if small else "ok",
            f"shared memory: {free / 1e6:.0f} MB free in {folder}",
            "in a container: --shm-size=1g" if small else "",
        )


def memory() -> Iterator[Finding]:
    """Enough free memory for the quickstart's lab, JupyterLab and a kernel beside it."""
    try:
        from pathways_lab.runtime.processes import memory_budget
        from pathways_lab.transport import machine_share
    except ImportError:
        yield Finding("note", "memory: unknown until psutil is installed")
        return
    free = machine_share.available_memory()
    try:
        lab = memory_budget.plan_budget(*QUICKSTART, memory=None, available=free - BESIDE_THE_LAB)
    except PathwaysError as error:
        yield Finding("warn", f"memory: {error.failure.message}", error.failure.remedy)
        return
    yield Finding(
        "ok",
        f"memory: {free / GB:.1f} GB free, the quickstart's lab takes {lab.processes / GB:.1f} GB",
    )


def open_files() -> Iterator[Finding]:
    """The limit of open files, which is 256 on a fresh Mac."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        yield Finding("warn", f"open files: at most {soft}", f"ulimit -n {4 * LEAST_FILES}")
    else:
        yield Finding("ok", f"open files: at most {soft}")


def kept_labs() -> Iterator[Finding]:
    """Labs of this account that outlive their kernels: they take memory until they end."""
    from pathways_lab.runtime.cluster.attach import find_kept
    from pathways_lab.runtime.control_plane import observer
    from pathways_lab.runtime.processes import kept_labs

    for name in kept_labs.names():
        seconds = time.time() - kept_labs.record(name).stat().st_mtime
        found = f"kept lab: {name}, for {seconds / 60:.0f} min"
        with contextlib.suppress(OSError, PathwaysError):  # it may be starting, or ending
            there = observer.look(find_kept(name))
            if there["kept"]:
                found += f"; it keeps {', '.join(there['kept'])}"
            for client, runs in there["going"].items():
                found += f"; runs that go on without a kernel: {runs} of {client}"
        yield Finding(
            "note",
            found,
            f"pw.connect({name!r}) joins it, python -m pathways_lab stop {name} ends it",
        )
