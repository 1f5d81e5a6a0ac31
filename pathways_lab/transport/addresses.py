"""Addresses of the lab's own sockets, and the folders that belong to its user alone.

Problem: every account that may enter its folder can reach a Unix socket, and the
path may have about a hundred bytes on some systems, while temporary folders
can be long.

Rule for maintainers: three forms only, ``unix:/folder/name.sock``,
``tcp://host:port`` and, over Dask's comms, ``dask+tls://host:port``; folders
belong to this user alone (mode 0700).  A listener's address may have a range of
ports, ``tcp://host:9000-9015``, of which it gets the first free one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path

PREFIX = "dask+"
"""Addresses that begin so are reached over Dask's comms."""
_LONGEST = 100
"""Bytes of a Unix socket path that every supported system takes (macOS: 104 with the end)."""


def private_folder() -> Path:
    """A new folder that only this user can enter, with a short path.  The caller removes it."""
    for base in ("/tmp", None):
        if base is None or os.access(base, os.W_OK | os.X_OK):
            return Path(tempfile.mkdtemp(prefix="pwlab-", dir=base))
    raise AssertionError("unreachable: mkdtemp raises when there is no temporary folder")


def remove_folder(folder: Path) -> None:
    """Remove a folder made by :func:`private_folder`; absent is fine."""
    shutil.rmtree(folder, ignore_errors=True)


def cache_folder() -> Path:
    """A folder that outlives labs and that only this user can write, made if need be.

    Its files may be loaded as code, so a folder of another account is refused, and a
    temporary one taken instead.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(base) / "pathways_lab"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.stat()
        if info.st_uid == os.getuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return path
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="pathways_lab-"))


def machine() -> str:
    """This machine and its network: equal for two processes whose loopback is the same one.

    A machine's own name proves nothing: many call themselves 127.0.1.1.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # no Linux, and so no namespaces
        return socket.gethostname()


def parse(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """The socket family of an address and what ``bind`` and ``connect`` take.

    Raises ValueError that says which forms are legal.
    """
    scheme, _, rest = address.removeprefix(PREFIX).partition(":")
    if scheme == "unix" and rest.startswith("/"):
        if len(os.fsencode(rest)) > _LONGEST:
            raise ValueError(
                f"the path of a Unix socket may have {_LONGEST} bytes, this one has "
                f"{len(os.fsencode(rest))}: {rest!r}; put it into a shorter folder"
            )
        return socket.AF_UNIX, rest
    host, _, ports = rest.removeprefix("//").rpartition(":")
    port = ports.partition("-")[0]
    if scheme in ("tcp", "tls") and rest.startswith("//") and host and port.isdecimal():
        host = host.removeprefix("[").removesuffix("]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return family, (host, int(port))
    raise ValueError(
        f"address {address!r} is neither unix:/path/to.sock nor tcp://host:port nor "
        f"{PREFIX}tls://host:port"
    )


def port_range(given: object) -> str:
    """Ports in the form of addresses, of a number, ``"9000-9015"``, or a first and a last one.

    Raises ValueError that says which forms are legal.
    """
    ends = given if isinstance(given, tuple | list) else str(given).split("-")
    with contextlib.suppress(TypeError, ValueError):
        first, last = int(ends[0]), int(ends[-1])
        if 0 < len(ends) <= 2 and 0 < first <= last < 1 << 16:
            return f"{first}-{last}"
    raise ValueError(
        f"ports is {given!r:.60}: ports are a first and a last one of 1 to 65535, (9000, 9015) or"
        ' "9000-9015"'
    )


def listening(address: str) -> socket.socket:
    """A socket that listens there, and waits for nobody.

    Raises OSError; it names the ports where none of a range is free.
    """
    family, place = parse(address)
    _, _, last = address.rpartition("-")
    if isinstance(place, str) or not last.isdecimal():
        return _bound(family, place)
    host, first = place
    for port in range(first, int(last) + 1):
        try:
            return _bound(family, (host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"none of the ports {first}-{last} of {host} is free")


def _bound(family: socket.AddressFamily, place: str | tuple[str, int]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_UNIX:
            clear_stale(place)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        sock.listen(128)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def clear_stale(path: str | tuple[str, int]) -> None:
    """Remove a Unix socket at *path* that a killed process left behind; a live one stays."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(str(path))
        except OSError:
            return


def of_listener(sock: socket.socket) -> str:
    """The address under which a listening socket is reached from its own machine."""
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if sock.family == socket.AF_INET6 else name[0]
    return f"tcp://{host}:{name[1]}"
