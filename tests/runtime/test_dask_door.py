"""Links through a server of Dask to a door behind it: TLS of their own from end to end."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed.core import Server

from pathways_lab.runtime.cluster import dask_private
from pathways_lab.transport import dask_comms
from pathways_lab.transport.dask_comms import OPERATION, scheduler_of, through
from pathways_lab.transport.link import Link
from pathways_lab.transport.reactor import Reactor
from pathways_lab.transport.tls import client_context, server_context
from tests.runtime.processes import until
from tests.runtime.test_tls import fresh_pems

KEY = bytes(range(32))
SECRET = b"OfNobody"
Handler = Callable[..., Any]


class Watched:
    """A comm that remembers what was read from it."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.seen = comm, b""

    async def read(self) -> Any:
        data = await self.comm.read()
        self.seen += data
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)


class Servers:
    """Servers of Dask in a loop of their own, with certificates of one authority."""

    def __init__(self) -> None:
        self.pems = fresh_pems()
        self._loop = asyncio.new_event_loop()
        self._all: list[Server] = []
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, handlers: dict[str, Handler]) -> str:
        async def begin() -> str:
            server = Server(handlers)
            context = server_context(self.pems)
            await server.listen("tls://127.0.0.1:0", ssl_context=context, require_encryption=True)
            self._all.append(server)
            return str(server.address)

        return asyncio.run_coroutine_threadsafe(begin(), self._loop).result(10)

    def close(self) -> None:
        async def end() -> None:
            for server in self._all:
                await server.close()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


class Ends:
    """A door, and a client of it."""

    def __init__(self, folder: Path, pems: dict[str, str]) -> None:
        self.came: list[tuple[Link, list[memoryview]]] = []
        self.opened: list[Link] = []
        self.closed: list[str] = []
        self.back: list[list[memoryview]] = []
        self.server = Reactor(
            "server",
            lambda link, op, fields, buffers: self.came.append((link, buffers)),
            lambda link, reason: self.closed.append(reason),
            lambda link, hello: self.opened.append(link),
        )
        self.client = Reactor(
            "client",
            lambda link, op, fields, buffers: self.back.append(buffers),
            lambda link, reason: self.closed.append(reason),
        )
        for each in (self.server, self.client):
            each.start()
        context = server_context(pems, invited=True)
        self.door = self.server.listen(f"unix:{folder}/door", KEY, {"name": "d"}, context=context)
        self.context = client_context(pems)

    def connect(self, address: str) -> Link:
        return self.client.connect(address, KEY, {"name": "c"}, 5.0, context=self.context)

    def close(self) -> None:
        self.client.close()
        self.server.close()


@pytest.fixture
def servers() -> Iterator[Servers]:
    made = Servers()
    yield made
    made.close()


@pytest.fixture
def ends(servers: Servers, tmp_path: Path) -> Iterator[Ends]:
    made = Ends(tmp_path, servers.pems)
    yield made
    made.close()


def test_a_link_goes_through_two_servers_that_see_nothing_of_it(
    servers: Servers, ends: Ends
) -> None:
    seen: list[Watched] = []

    async def host(comm: Any, door: str) -> str:
        seen.append(Watched(comm))
        return await dask_comms.bring(seen[-1], ends.door)

    worker = servers.start({OPERATION: host})
    security = dask_private.security_without_files(servers.pems)

    async def passes(comm: Any, door: str) -> str:
        arguments = security.get_connection_args("scheduler")
        return await dask_comms.pass_on(comm, worker, door, arguments)

    address = through(servers.start({OPERATION: passes}), "west/one")
    assert scheduler_of(address) == address.removeprefix("dask+").partition("#")[0]
    link = ends.connect(address)
    until(lambda: ends.opened)
    assert isinstance(link.sock, ssl.SSLSocket)
    assert ends.opened[0].certified
    data = SECRET * 500_000
    link.send("there", {}, [memoryview(data)])
    until(lambda: ends.came)
    back, buffers = ends.came[0]
    assert bytes(buffers[0]) == data
    back.send("back", {}, [buffers[0]])
    until(lambda: ends.back)
    assert bytes(ends.back[0][0]) == data
    assert len(seen[0].seen) > len(data)
    assert SECRET not in seen[0].seen
    assert b"PWLAB" not in seen[0].seen
    link.close()
    until(lambda: len(ends.closed) == 2)


def test_the_end_of_a_door_ends_the_link(servers: Servers, ends: Ends) -> None:
    async def host(comm: Any, door: str) -> str:
        return await dask_comms.bring(comm, ends.door)

    ends.connect(through(servers.start({OPERATION: host}), "control"))
    until(lambda: ends.opened)
    ends.opened[0].close()
    until(lambda: len(ends.closed) == 2)


def test_a_door_that_is_not_there_is_refused_in_words(servers: Servers, ends: Ends) -> None:
    async def host(comm: Any, door: str) -> str:
        return "no worker is called so" if door == "x" else await dask_comms.bring(comm, "unix:/x")

    server = servers.start({OPERATION: host})
    with pytest.raises(ConnectionRefusedError, match="no worker is called so"):
        ends.connect(through(server, "x"))
    with pytest.raises(ConnectionRefusedError, match=r"it does not listen: .*No such file"):
        ends.connect(through(server, "y"))
    with pytest.raises(ConnectionRefusedError, match="has no lab any more"):
        ends.connect(through(servers.start({}), "control"))


def test_nobody_goes_through_without_a_certificate(servers: Servers, ends: Ends) -> None:
    address = through(servers.start({}), "control")
    with pytest.raises(ValueError, match="certificates"):
        ends.client.connect(address, KEY, {}, 2.0)
    invited = client_context({"ca": servers.pems["ca"]})
    with pytest.raises(OSError):
        ends.client.connect(address, KEY, {}, 2.0, context=invited)
