"""Links over TLS keep all their promises, and strangers' certificates open nothing."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
import time
from typing import Any

import pytest

from pathways_lab.runtime.cluster import dask_private
from pathways_lab.transport.auth import AuthenticationError, key_of, new_key
from pathways_lab.transport.link import Link
from pathways_lab.transport.reactor import Reactor
from pathways_lab.transport.tls import client_context, server_context
from tests.runtime.processes import until

distributed = pytest.importorskip("distributed")
KEY = new_key()


def fresh_pems() -> dict[str, str]:
    pems = dask_private.pems_of(distributed.Security.temporary(), "worker")
    assert pems is not None
    return pems


@pytest.fixture(scope="module")
def pems() -> dict[str, str]:
    return fresh_pems()


def test_no_credentials_mean_no_context() -> None:
    assert server_context(None) is None
    assert client_context(None) is None


def test_flooding_in_both_directions_from_several_threads(pems: dict[str, str]) -> None:
    got: dict[str, list[tuple[int, int]]] = {"server": [], "client": []}

    def end(name: str) -> Reactor:
        def take(link: Link, op: str, fields: dict[str, Any], buffers: list[memoryview]) -> None:
            assert not any(buffers[0][:: 1 << 16]) if buffers else True
            got[name].append((fields["thread"], fields["number"]))

        reactor = Reactor(name, take, lambda *_: None, lambda link, peer: back.append(link))
        reactor.start()
        return reactor

    back: list[Link] = []
    server, client = end("server"), end("client")
    address = server.listen("tcp://127.0.0.1:0", KEY, {}, context=server_context(pems))
    out = client.connect(address, KEY, {}, context=client_context(pems))
    assert isinstance(out.sock, ssl.SSLSocket)
    assert out.sock.version() == "TLSv1.3"
    until(lambda: back)

    def flood(link: Link, thread: int) -> None:
        for number in range(20):
            link.send("x", {"thread": thread, "number": number}, [bytes(1 << 20)])
            link.send("x", {"thread": thread, "number": number})

    threads = [
        threading.Thread(target=flood, args=(link, thread))
        for thread in range(3)
        for link in (out, back[0])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: len(got["server"]) == len(got["client"]) == 120, 60)
    for messages in got.values():
        for number in range(3):
            own = [n for thread, n in messages if thread == number]
            assert own == sorted(own)
    client.close()
    server.close()


def test_a_stranger_with_the_key_but_no_certificate_is_turned_away(pems: dict[str, str]) -> None:
    server = Reactor("server", lambda *m: None, lambda link, reason: None)
    client = Reactor("client", lambda *m: None, lambda link, reason: None)
    server.start()
    client.start()
    address = server.listen("tcp://127.0.0.1:0", KEY, {}, context=server_context(pems))
    with pytest.raises(ssl.SSLError):
        client.connect(address, KEY, {}, context=client_context(fresh_pems()))
    started = time.monotonic()
    with pytest.raises((OSError, TimeoutError)):
        client.connect(address, KEY, {}, timeout=1.0)  # in the clear
    assert time.monotonic() - started < 5
    until(lambda: server.rejected == 2)
    client.close()
    server.close()


def test_who_was_invited_needs_no_certificate_and_sees_the_one_of_the_lab(
    pems: dict[str, str],
) -> None:
    server = Reactor("server", lambda *m: None, lambda link, reason: None)
    client = Reactor("client", lambda *m: None, lambda link, reason: None)
    server.start()
    client.start()
    place, hello = "tcp://127.0.0.1:0", {"name": "x"}
    door = server.listen(place, KEY, hello, context=server_context(pems, invited=True))
    hosts = server.listen(place, KEY, hello, context=server_context(pems))
    guest = client_context({"ca": pems["ca"]})
    link = client.connect(door, key_of(KEY, 7), hello, context=guest, holder=7)
    assert isinstance(link.sock, ssl.SSLSocket)
    with pytest.raises((OSError, AuthenticationError)):
        client.connect(hosts, KEY, hello, timeout=2.0, context=guest)
    strangers = client_context({"ca": fresh_pems()["ca"]})
    with pytest.raises(ssl.SSLError):  # it does not talk to whoever pretends to be the lab
        client.connect(door, key_of(KEY, 7), hello, context=strangers, holder=7)
    with pytest.raises((OSError, TimeoutError)):
        client.connect(door, key_of(KEY, 7), hello, timeout=1.0, holder=7)  # in the clear
    client.close()
    server.close()


def test_a_connection_that_is_reset_is_not_called_closed(pems: dict[str, str]) -> None:
    """As by the machine of the other end when it has booted."""
    back: list[Link] = []
    reasons: list[str] = []
    server = Reactor("server", lambda *_: None, lambda *_: None, lambda link, _: back.append(link))
    client = Reactor("client", lambda *_: None, lambda _, reason: reasons.append(reason))
    for reactor in (server, client):
        reactor.start()
    address = server.listen("tcp://127.0.0.1:0", KEY, {}, context=server_context(pems))
    client.connect(address, KEY, {}, name="west/one", context=client_context(pems))
    until(lambda: back)
    back[0].sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    back[0].sock.close()
    until(lambda: reasons)
    assert reasons[0].startswith("west/one was killed, or its machine has started anew")
    for reactor in (client, server):
        reactor.close()
