"""Ending waits in native code by cutting the connections that they wait on.

Problem: a collective whose partner died, hangs or entered another collective
waits in native code until its timeout, which is long because it bounds the
skew between healthy hosts.  Nothing in JAX ends such a wait.  But it waits for
sockets of this very process, and when these are shut down the wait ends at
once with an ordinary error.  A partner whose machine cannot be reached any more is the same, but
for the connections, which only the operating system can find broken: it is told to look.

How: a communicator listens on one port, known when it is made; a connection
belongs to it if its own port is that one, or its far end is the one of a
partner.  Sockets are found among the open files of the process.

Rule for maintainers: shut down connections, never listeners (their loss ends
the process), and only those that are certainly meant.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Collection, Iterator, Mapping

from pathways_lab.transport.handshake import tune

_SILENT = re.compile(
    r"\[([\da-f.:]+)\]:\d+: (Connection timed out|No route to host|Network is unreachable)"
)
Endpoint = tuple[str, int]
"""Numeric address and port."""


def listeners() -> set[Endpoint]:
    """Where this process accepts TCP connections."""
    return {own for _, own, _, accepts in _sockets() if accepts}


def listener_at(endpoint: Endpoint) -> socket.socket:
    """A handle of one's own of what listens there in this process.  Raises LookupError."""
    for sock, own, _, accepts in _sockets():
        if accepts and own == endpoint:
            # Python's own copy would have its owner wait in it.
            return socket.socket(fileno=os.dup(sock.fileno()))
    raise LookupError(f"nothing listens at {endpoint[0]}:{endpoint[1]}")


def sever(endpoints: Collection[Endpoint]) -> int:
    """Shut down this process's connections from and to these listeners; how many there were."""
    count = 0
    for sock, own, peer, accepts in _sockets():
        if not accepts and (own in endpoints or peer in endpoints):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def bear(endpoints: Collection[Endpoint], silence: float) -> None:
    """Let connections from and to these listeners break when a machine is silent for so long.

    By itself the operating system gives one up after a quarter of an hour, or never.
    """
    for sock, own, peer, accepts in _sockets():
        if not accepts and (own in endpoints or peer in endpoints):
            with contextlib.suppress(OSError):
                tune(sock, silence)


def reason(message: str, hosts: Mapping[str, str]) -> str:
    """Why the connections of a group of hosts broke, of the *message* of a collective, in words.

    hosts: by their addresses.
    """
    found = _SILENT.search(message)
    if found is None or found[1] not in hosts:
        return f"the connections between its hosts broke: {message}"
    silent = f"{hosts[found[1]]} ({found[1]})"
    return f"its hosts do not reach each other: no word from {silent}, {found[2]}"


def _sockets() -> Iterator[tuple[socket.socket, Endpoint, Endpoint | None, bool]]:
    """TCP sockets: a short-lived second handle, own end, far end, whether it listens."""
    for entry in os.listdir("/dev/fd"):
        try:
            # A handle of our own: the owner may close his at any moment.
            handle = os.dup(int(entry))
        except OSError:
            continue
        try:
            sock = socket.socket(fileno=handle)
        except OSError:
            os.close(handle)
            continue
        with sock, contextlib.suppress(OSError):
            if sock.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if sock.type != socket.SOCK_STREAM:
                continue
            accepts = bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            peer = None if accepts else _endpoint(sock.getpeername())
            yield sock, _endpoint(sock.getsockname()), peer, accepts


def _endpoint(name: tuple[str, int]) -> Endpoint:
    return name[0], name[1]
