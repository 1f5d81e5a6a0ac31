"""Collectives of a formation between machines: encrypted, and only between its hosts.

Problem: Gloo, with which CPU devices of several hosts compute together, sends in the clear, and
asks nobody who he is.  It has no setting for it; but it can be told at which address to listen,
and it tells the other hosts that address.

How: all of 127.0.0.0/8 is a machine itself.  Each host has Gloo listen at a loopback address of
its own, drawn by lot.  On every other machine of the formation a tunnel listens at that very
address and port.  It carries what comes over a *stream* to the host's data door: mutual TLS and the
lab's key.  There it is carried on to Gloo.  Hosts of one machine connect to each other directly.

Other accounts of a machine reach its loopback, too.  The tunnel takes connections of its own
account alone.  Where no other host of the formation is on this machine, the system drops
everything that comes to Gloo's own port but the connection that the tunnel makes at that moment.
Devices of one host connect to each other there, too: the system drops the first word of such a
connection, and the tunnel lets in the second one, a second later.

Rule for maintainers: Linux only, see :func:`why_clear`.  One TLS object is never used by two
threads at once.  A tunnel adds nothing to what it carries, and waits for one end at most, so the
limits that Gloo and the lab have hold through it.

Paper: section 4.5 (on accelerators nothing of it is used).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import cast

from pathways_lab.runtime.islands.disconnect import Endpoint, listener_at
from pathways_lab.transport.auth import AuthenticationError
from pathways_lab.transport.framing import WireError
from pathways_lab.transport.handshake import is_silence

_CHUNK = 1 << 18
_RECORD = 1 << 14
"""Bytes of a full TLS record."""
_GREETING_SECONDS = 10.0
_ATTACH_FILTER, _DETACH_FILTER = 26, 27
"""The numbers of Linux for the filter of a socket; Python has no names for them."""
_SYN_SENT, _ESTABLISHED = "02", "01"
_WATCH_SECONDS = 0.2
"""The system says a connection's first word again after 1, 3 and 7 s."""
Reach = Callable[[str], ssl.SSLSocket]
"""A stream to a host, of one formation; waits.  Raises OSError and what the handshake raises."""


def why_clear(system: str = sys.platform) -> str:
    """Why collectives between machines cannot be encrypted on a system; "" where they are."""
    return "" if system.startswith("linux") else f"{system} has one loopback address and no more"


def own_address() -> str:
    """A loopback address that hardly any other formation of this machine has."""
    return "127." + ".".join(str(64 + secrets.randbelow(190)) for _ in range(3))


class Tunnel:
    """Connections of one formation's collectives between this host and others.

    reach: opens a stream to another host.
    why: why hosts do not reach each other, in words, once a connection broke by silence.
    """

    def __init__(self, reach: Reach) -> None:
        self.why = ""
        self._reach = reach
        self._doors: list[socket.socket] = []
        self._lone: socket.socket | None = None
        self._inside: set[Endpoint] = set()
        """Ends of connections of this process to itself that Gloo has not accepted yet."""
        self._calling = threading.Lock()
        self._closed = threading.Event()

    def stand_for(self, host: str, at: Endpoint) -> None:
        """Take connections at the address of a host on another machine, and carry them there.

        Raises OSError where another account listens at it.
        """
        door = socket.socket()
        # Another host of the formation may be here: the system lets one account share an address.
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            door.bind(at)
            door.listen()
        except OSError:
            door.close()
            raise
        self._doors.append(door)
        _start(self._take, door, host)

    def shut(self, own: Endpoint, devices: int) -> None:
        """From now on nobody but this tunnel is let in at Gloo's own address.

        devices: of this host in the formation; several of them connect to each other there.
        """
        self._lone = listener_at(own)
        let_in(self._lone)
        if devices > 1:
            _start(self._watch, own)

    def open(self) -> None:
        """Let in whoever comes to Gloo's own address, since a host of this machine is to come."""
        with self._calling:
            if self._lone is not None:
                self._lone.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
                self._lone.close()
                self._lone = None

    def admit(self, sealed: ssl.SSLSocket, host: str, own: Endpoint) -> None:
        """Carry a stream of another host to Gloo, which listens at *own*; at once."""
        _start(self._bring, sealed, host, own)

    def _bring(self, sealed: ssl.SSLSocket, host: str, own: Endpoint) -> None:
        try:
            plain = self._call(own)
        except OSError:  # the formation has ended
            sealed.close()
            return
        self._carry(plain, sealed, host)

    def close(self) -> None:
        """Take no connections any more; those that are end with Gloo's own.  Again is fine."""
        self._closed.set()
        for door in self._doors:
            with contextlib.suppress(OSError):
                door.shutdown(socket.SHUT_RDWR)
        if self._lone is not None:
            self._lone.close()

    def _take(self, door: socket.socket, host: str) -> None:
        with door:
            while True:
                try:
                    plain, far = door.accept()
                except OSError:
                    return
                if owner_of(far) == os.getuid():
                    _start(self._dial, plain, host)
                else:
                    plain.close()

    def _dial(self, plain: socket.socket, host: str) -> None:
        _at_once(plain)
        try:
            sealed = self._reach(host)
        except (OSError, AuthenticationError, WireError) as error:
            self.why = f"{host} is not reached: {error}"
            plain.close()
            return
        self._carry(plain, sealed, host)

    def _watch(self, own: Endpoint) -> None:
        while not self._closed.wait(_WATCH_SECONDS):
            with self._calling, contextlib.suppress(OSError):  # it was closed just now
                if self._lone is None:
                    return
                inside = own_calls(own, self._inside)
                if inside != self._inside:
                    self._inside = inside
                    let_in(self._lone, *inside)

    def _call(self, own: Endpoint) -> socket.socket:
        sock = socket.socket()
        _at_once(sock)
        try:
            with self._calling:
                if self._lone is not None:
                    # It has this address and port alone, so nobody else can call from there.
                    sock.bind((own_address(), 0))
                    let_in(self._lone, caller := sock.getsockname(), *self._inside)
                sock.connect(own)
                if self._lone is not None:
                    _wait_accepted(own, caller)
                    let_in(self._lone, *self._inside)
        except OSError:
            sock.close()
            raise
        return sock

    def _carry(self, plain: socket.socket, sealed: ssl.SSLSocket, host: str) -> None:
        at = ""
        with contextlib.suppress(OSError):  # it has broken already
            at = f" ({sealed.getpeername()[0]})"

        def silent(error: OSError) -> None:
            self.why = f"no word from {host}{at}, {error.strerror}"

        carry(plain, sealed, silent)


class _Sealed:
    """The socket of a stream, over which TLS begins anew after the hellos, with records in memory.

    Python's own TLS sockets take a system call or two for each record of 16 KiB.  The last hello
    is the accepting end's, so nothing of the first TLS is under way any more.
    """

    def __init__(self, sealed: ssl.SSLSocket) -> None:
        self._came, self._to_go = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = sealed.context.wrap_bio(self._came, self._to_go, bool(sealed.server_side))
        self._using = threading.Lock()
        self._buffer = memoryview(bytearray(_CHUNK))
        self.sock = socket.socket(fileno=sealed.detach())

    def greet(self) -> None:
        """Wait until both ends have shown their certificates.  Raises OSError."""
        self.sock.settimeout(_GREETING_SECONDS)
        greeted = False
        while not greeted:
            try:
                self._tls.do_handshake()
                greeted = True
            except ssl.SSLWantReadError:
                pass
            self.sock.sendall(self._to_go.read())
            if not greeted and not self._hear():
                raise ConnectionError("the other end closed the connection")
        # The door takes invited clients, too, who have none.
        if not self._tls.getpeercert(True):
            raise ConnectionError("the other end shows no certificate")
        self.sock.settimeout(None)

    def send(self, data: memoryview) -> None:
        """Waits until the system has taken all of it.  Raises OSError."""
        with self._using:
            self._tls.write(data)
            records = self._to_go.read()
        self.sock.sendall(records)

    def receive(self, buffer: memoryview) -> int:
        """Wait for bytes, at least a record where one is full; 0: the end.  Raises OSError."""
        count = 0
        while not count:
            if not self._came.pending and not self._hear():
                return 0
            with self._using, contextlib.suppress(ssl.SSLWantReadError):
                while self._came.pending and count + _RECORD <= len(buffer):
                    # It counts bytes where it is given a place for them.
                    count += cast(int, self._tls.read(_RECORD, buffer[count:]))
        return count

    def _hear(self) -> int:
        count = self.sock.recv_into(self._buffer)
        self._came.write(self._buffer[:count])
        return count


def carry(
    plain: socket.socket,
    sealed: ssl.SSLSocket,
    silent: Callable[[OSError], object] = lambda error: None,
) -> None:
    """Carry bytes between two connections, both ways, until one of them ends; then both do.

    silent(error): the other machine was silent for too long.  Two threads, which wait for one end
    each: so neither direction holds up the other.  At the far end, too, the stream is carried.
    """
    far = _Sealed(sealed)

    def outward() -> None:
        buffer = memoryview(bytearray(_CHUNK))
        while count := plain.recv_into(buffer):
            far.send(buffer[:count])

    def inward() -> None:
        far.greet()
        other.start()
        buffer = memoryview(bytearray(_CHUNK))
        while count := far.receive(buffer):
            plain.sendall(buffer[:count])

    def until_end(work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            if is_silence(error):
                silent(error)
        for sock in (plain, far.sock):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def whole() -> None:
        until_end(inward)
        if other.ident is not None:
            other.join()
        plain.close()
        far.sock.close()

    other = threading.Thread(target=until_end, args=(outward,), name="tunnel", daemon=True)
    _start(whole)


def owner_of(endpoint: Endpoint) -> int:
    """The account whose connection has this own end (IPv4) on this machine; -1: there is none."""
    return next((int(row[7]) for row in _connections() if row[1] == _as_listed(endpoint)), -1)


def _connections() -> list[list[str]]:
    """The system's table of connections: own end, far end, state and account are 1, 2, 3 and 7."""
    return [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]


def _as_listed(endpoint: Endpoint) -> str:
    host, port = endpoint
    return f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"


def _from_listed(end: str) -> Endpoint:
    host, _, port = end.partition(":")
    return socket.inet_ntoa(int(host, 16).to_bytes(4, sys.byteorder)), int(port, 16)


def own_calls(own: Endpoint, known: Collection[Endpoint] = ()) -> set[Endpoint]:
    """Ends of this account's connections to *own* that begin, and of *known* ones until *own* has
    accepted them."""
    rows, listed = _connections(), _as_listed(own)
    accepted = {row[2] for row in rows if row[1] == listed and row[3] == _ESTABLISHED}
    found = set()
    for _, here, there, state, _, _, _, account, *_ in rows:
        if there == listed and account == str(os.getuid()):
            end = _from_listed(here)
            if state == _SYN_SENT or (end in known and here not in accepted):
                found.add(end)
    return found


def _wait_accepted(own: Endpoint, caller: Endpoint) -> None:
    """The last word of a connection's handshake, too, passes the filter of the listening socket."""
    wanted = [_as_listed(own), _as_listed(caller), _ESTABLISHED]
    end = time.monotonic() + 1.0
    while not any(row[1:4] == wanted for row in _connections()):
        if time.monotonic() > end:
            raise ConnectionError(f"{own[0]}:{own[1]} does not take a connection")
        time.sleep(0.001)


def let_in(listener: socket.socket, *callers: Endpoint) -> None:
    """From now on the system drops what comes to a listening socket (IPv4) from anywhere else."""
    load_word, load_half, if_equal, answer = 0x20, 0x28, 0x15, 0x06
    network_header = (1 << 32) - 0x100000
    lines = []
    for host, port in callers:
        lines += [
            (load_word, 0, 0, network_header + 12),
            (if_equal, 0, 3, int.from_bytes(socket.inet_aton(host), "big")),
            (load_half, 0, 0, 0),
            (if_equal, 0, 1, port),
            (answer, 0, 0, 0xFFFFFFFF),
        ]
    program = b"".join(struct.pack("=HBBI", *line) for line in [*lines, (answer, 0, 0, 0)])
    memory = ctypes.create_string_buffer(program, len(program))
    what = struct.pack("HP", len(program) // 8, ctypes.addressof(memory))
    listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, what)


def _at_once(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _start(work: Callable[..., None], *args: object) -> None:
    threading.Thread(target=work, args=args, name="tunnel", daemon=True).start()
