"""A connection that outlives its far end, and connections that are cut on purpose."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from pathways_lab.runtime.islands import disconnect
from pathways_lab.runtime.islands.coordination_relay import Relay, to_service
from pathways_lab.transport.addresses import private_folder, remove_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    made = private_folder()
    yield made
    remove_folder(made)


class Echo:
    """A service that returns what it gets."""

    def __init__(self, folder: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(folder / "echo"))
        self.listener.listen()
        self.address = f"unix:{folder}/echo"
        self.accepted: list[socket.socket] = []
        self.closed = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        sock, _ = self.listener.accept()
        self.accepted.append(sock)
        with contextlib.suppress(OSError):  # it died
            while data := sock.recv(65536):
                sock.sendall(data)
            self.closed.set()

    def die(self) -> None:
        self.listener.close()
        for sock in self.accepted:
            sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def connect(relay: Relay) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(relay.address.removeprefix("unix:"))
    sock.settimeout(5)
    return sock


def ask(sock: socket.socket, data: bytes) -> bytes:
    sender = threading.Thread(target=sock.sendall, args=(data,))
    sender.start()
    got = b""
    while len(got) < len(data):
        got += sock.recv(65536)
    sender.join()
    return got


@pytest.mark.parametrize("elsewhere", [True, False])
def test_bytes_pass_both_ways_and_the_near_end_closes_the_far_one(
    folder: Path, elsewhere: bool
) -> None:
    service = Echo(folder)
    relay = Relay(partial(to_service, service.address) if elsewhere else service.address, folder)
    with connect(relay) as sock:
        data = os.urandom(1 << 20)
        assert ask(sock, data) == data
    assert service.closed.wait(5)
    assert not relay.lost
    relay.close()
    service.listener.close()


def test_the_loss_of_the_far_end_is_silence(folder: Path) -> None:
    """Also for connections made afterwards; closing the relay ends the silence."""
    service = Echo(folder)
    relay = Relay(service.address, folder)
    with connect(relay) as sock:
        assert ask(sock, b"hello") == b"hello"
        service.die()
        sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        sock.sendall(b"anybody?")
        assert relay.lost
        with connect(relay) as later:
            later.sendall(b"hello")
            later.settimeout(0.1)
            with pytest.raises(TimeoutError):
                later.recv(1)
            relay.close()
            later.settimeout(5)
            # Closed with unread bytes, or without.
            with contextlib.suppress(ConnectionResetError):
                assert later.recv(1) == b""
    relay.close()
    assert not any(path.name.startswith("r") for path in folder.iterdir())


def pair(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    for sock in (ours, theirs):
        sock.settimeout(5)
    return ours, theirs


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has this setting")
def test_only_the_connections_of_a_listener_end_with_a_silent_machine() -> None:
    near, far = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    meant, spared = pair(near), pair(far)
    disconnect.bear({near.getsockname()}, 7.0)
    limits = [
        [sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for sock in ends]
        for ends in (meant, spared)
    ]
    assert limits == [[7000, 7000], [0, 0]]
    assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
    for sock in (*meant, *spared, near, far):
        sock.close()


def test_a_silent_host_is_named_where_its_address_is_known() -> None:
    read = "f failed: Gloo all-reduce failed: [tcp/pair.cc:538] Read error [10.0.0.3]:7: Connection"
    hosts = {"10.0.0.3": "west/two"}
    told = disconnect.reason(f"{read} timed out", hosts)
    assert told.endswith("no word from west/two (10.0.0.3), Connection timed out")
    for message, known in ((f"{read} timed out", {}), (f"{read} reset by peer", hosts)):
        told = disconnect.reason(message, known)
        assert told == f"the connections between its hosts broke: {message}"


def test_only_the_connections_of_a_listener_are_severed() -> None:
    before = disconnect.listeners()
    doomed = socket.create_server(("127.0.0.1", 0))
    (endpoint,) = disconnect.listeners() - before
    assert endpoint == doomed.getsockname()
    other = socket.create_server(("127.0.0.1", 0))
    cut, spared = pair(doomed), pair(other)
    unix = socket.socketpair()
    files = len(os.listdir("/dev/fd"))
    # Both ends are in this process.
    assert disconnect.sever({endpoint}) == 2
    assert len(os.listdir("/dev/fd")) == files, "a handle was left open"
    assert cut[0].recv(1) == b""
    assert cut[1].recv(1) == b""
    for one, two in (spared, unix):
        one.sendall(b"x")
        assert two.recv(1) == b"x"
    again = pair(doomed)
    again[0].sendall(b"x")
    assert again[1].recv(1) == b"x", "the listener did not survive"
    for sock in (doomed, other, *cut, *spared, *unix, *again):
        sock.close()


def test_who_waits_is_woken() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    ours, theirs = pair(listener)
    ours.settimeout(None)
    ended = threading.Event()
    threading.Thread(target=lambda: (ours.recv(1), ended.set()), daemon=True).start()
    assert not ended.wait(0.05)
    disconnect.sever({listener.getsockname()})
    assert ended.wait(5)
    for sock in (listener, ours, theirs):
        sock.close()
