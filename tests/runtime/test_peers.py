"""Links between hosts: order is kept while connecting, slow hosts hold up nobody."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pathways_lab.runtime.host import peers as module
from pathways_lab.runtime.host.peers import Peers
from pathways_lab.transport.addresses import private_folder, remove_folder
from pathways_lab.transport.reactor import Reactor
from tests.runtime.processes import until

KEY = b"k" * 32


class Host:
    def __init__(self, name: str, folder: Path) -> None:
        self.got: list[tuple[str, int]] = []
        self.changed = threading.Condition()
        self.reactor = Reactor(name, self._message, lambda link, reason: None)
        self.reactor.start()
        self.address = f"unix:{folder}/{name}.sock"
        self.peers = Peers(self.reactor, KEY, name)
        self.name = name

    def listen(self) -> None:
        self.reactor.listen(self.address, KEY, {"role": "host", "name": self.name})

    def _message(self, link: Any, op: str, fields: dict[str, Any], buffers: Any) -> None:
        with self.changed:
            self.got.append((link.name, fields["n"]))
            self.changed.notify_all()

    def wait(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.got) >= count, 20)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    folder = private_folder()
    made = Host("a", folder), Host("b", folder)
    yield made
    for host in made:
        host.reactor.close()
    remove_folder(folder)


class Ends:
    """Notes how sends ended."""

    def __init__(self) -> None:
        self.results: list[Exception | None] = []
        self.changed = threading.Condition()

    def __call__(self, error: Exception | None) -> None:
        with self.changed:
            self.results.append(error)
            self.changed.notify_all()

    def wait(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.results) >= count, 20)


def test_letters_keep_their_order_while_the_link_is_made(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    b.listen()
    a.peers.members({"b": b.address})
    ends = Ends()
    for n in range(100):
        a.peers.send("b", "x", {"n": n}, [], ends)
    b.wait(100)
    assert b.got == [("a", n) for n in range(100)]
    ends.wait(100)
    assert ends.results == [None] * 100


def test_a_host_that_is_not_there_yet_is_tried_again(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    a.peers.members({"b": b.address})
    a.peers.send("b", "x", {"n": 1}, [], Ends())
    threading.Timer(0.3, b.listen).start()
    b.wait(1)


def test_a_host_that_never_comes_is_given_up(
    hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAUSE", 0.01)
    a, b = hosts
    a.peers.members({"b": b.address})
    ends = Ends()
    a.peers.send("b", "x", {"n": 1}, [], ends)
    ends.wait(1)
    assert isinstance(ends.results[0], Exception)


def test_a_host_that_leaves_fails_what_waits_for_it(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    a.peers.members({"b": b.address})
    ends = Ends()
    a.peers.send("b", "x", {"n": 1}, [], ends)
    a.peers.members({})
    ends.wait(1)
    assert "left the lab" in str(ends.results[0])
    a.peers.send("b", "x", {"n": 2}, [], ends)
    ends.wait(2)
    assert "not in the lab" in str(ends.results[1])


def test_a_broken_link_is_made_anew(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    b.listen()
    a.peers.members({"b": b.address})
    a.peers.send("b", "x", {"n": 1}, [], Ends())
    b.wait(1)
    for link in b.reactor.links:
        link.close("test")
    while any(link.closed is None for link in a.reactor.links):
        threading.Event().wait(0.01)
    a.peers.send("b", "x", {"n": 2}, [], Ends())
    b.wait(2)


def test_the_link_to_a_host_that_leaves_is_closed(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    b.listen()
    a.peers.members({"b": b.address})
    a.peers.send("b", "x", {"n": 1}, [], Ends())
    b.wait(1)
    a.peers.members({})
    until(lambda: not a.reactor.links)


def test_a_link_that_is_there_when_its_host_has_left_is_closed(
    hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = hosts
    b.listen()
    connecting: list[Any] = []
    monkeypatch.setattr(a.reactor, "connect_soon", lambda *how, **_: connecting.append(how[3]))
    a.peers.members({"b": b.address})
    ends = Ends()
    a.peers.send("b", "x", {"n": 1}, [], ends)
    until(lambda: connecting)
    a.peers.members({})
    ends.wait(1)
    link = a.reactor.connect(b.address, KEY, {"role": "host", "name": "a"})
    a.reactor.call_soon(connecting[0], link)
    until(lambda: link.closed)
    assert "left" in str(link.closed)
