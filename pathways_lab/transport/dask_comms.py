"""Links over Dask's own comms, for where nothing else gets through.

Problem: some clusters let only Dask's connections pass, or bring a transport of
their own; links must run there as they do on sockets, with the same guarantees.

How: a comm carries the bytes of one link in messages, one message for all that
was written meanwhile.  A thread with an event loop moves them between the comm
and one end of a socket pair; the other end is the link's socket.  So everything
above (framing, authentication, limits, queues, interrupts) is the same code on
both transports, and a slow reader fills a socket, not memory.

Rule for maintainers: documented Dask API only (``distributed.comm``).  Dask's
protocol unpickles what a peer sends before anything of ours can check it, so
there is no listening and no connecting without the cluster's certificates.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from pathways_lab.transport import addresses
from pathways_lab.transport.addresses import PREFIX

T = TypeVar("T")

OPERATION = "pathways-door"
"""The operation of Dask's scheduler and workers by which a comm becomes the stream of a link."""
CONTROL = "control"
"""The door of the control plane; those of hosts are called as Dask's workers are."""
_CHUNK = 1 << 20
"""Bytes of one message of a comm at most."""
_START_SECONDS = 30.0


def is_comm(address: str) -> bool:
    """Whether an address is reached over a comm: ``dask+tls://host:port``."""
    return address.startswith(PREFIX)


def through(scheduler: str, door: str) -> str:
    """The address of a door of the lab, of which only Dask's *scheduler* is reached from here.

    ``dask+tls://sched:8786#control``; a link through it has TLS of its own from end to end.
    """
    return f"{PREFIX}{scheduler}#{door}"


def scheduler_of(address: str) -> str:
    """The scheduler through which an address leads; "" where it leads through none."""
    scheduler, _, door = address.removeprefix(PREFIX).partition("#")
    return scheduler if door else ""


class Comms:
    """The comms of one reactor, and the thread that serves them; started when first needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listeners: list[Any] = []
        self._porters: set[asyncio.Task[None]] = set()

    def listen(
        self,
        address: str,
        context: ssl.SSLContext | None,
        accept: Callable[[socket.socket], object],
    ) -> str:
        """Call accept(socket), in any thread, for every connection; the real address."""
        return self._run(self._listen(address, _arguments(address, context), accept))

    def dial(self, address: str, context: ssl.SSLContext | None, timeout: float) -> socket.socket:
        """A socket at whose other end is *address*.  Raises OSError."""
        return self._run(self._dial(address, _arguments(address, context), timeout))

    def close(self) -> None:
        """End everything; what was written to the sockets is still delivered, if that is quick."""
        with self._starting:
            loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._end(), loop).result(_START_SECONDS)
            loop.call_soon_threadsafe(loop.stop)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=self._loop.run_forever, name=f"{self._name}-comms", daemon=True
                ).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # --- in the thread of the loop -------------------------------------------------

    async def _listen(
        self, address: str, arguments: dict[str, Any], accept: Callable[[socket.socket], object]
    ) -> str:
        import distributed.comm.core as dask

        async def arrived(comm: Any) -> None:
            accept(self._carry(comm))

        listener = await dask.listen(
            address.removeprefix(PREFIX), arrived, deserialize=False, **arguments
        )
        self._listeners.append(listener)
        return PREFIX + str(listener.contact_address)

    async def _dial(self, address: str, arguments: dict[str, Any], timeout: float) -> socket.socket:
        import distributed.comm.core as dask

        server, _, door = address.removeprefix(PREFIX).partition("#")
        if server.startswith("gateway:"):  # known once this is loaded
            importlib.import_module("dask_gateway")
        async with asyncio.timeout(timeout):
            comm = await dask.connect(server, timeout=timeout, deserialize=False, **arguments)
            if door:
                await comm.write({"op": OPERATION, "door": door})
                refusal = await comm.read()
                if refusal != "":
                    comm.abort()
                    raise ConnectionRefusedError(refusal or f"{server} has no lab any more")
        return self._carry(comm)

    def _carry(self, comm: Any) -> socket.socket:
        """The link's socket; bytes go between it and *comm* until either ends."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _CHUNK)
        task = asyncio.get_running_loop().create_task(_porter(comm, ours))
        self._porters.add(task)
        task.add_done_callback(self._porters.discard)
        return theirs

    async def _end(self) -> None:
        for listener in self._listeners:
            stopped = listener.stop()
            if isinstance(stopped, Awaitable):
                await stopped
        if self._porters:
            await asyncio.wait(self._porters, timeout=1.0)
        for porter in tuple(self._porters):
            porter.cancel()
        await asyncio.gather(*self._porters, return_exceptions=True)


_STREAMS = Comms("streams")


def dial(address: str, context: ssl.SSLContext | None, timeout: float) -> socket.socket:
    """As :meth:`Comms.dial`, for a socket that is no link's."""
    return _STREAMS.dial(address, context, timeout)


async def bring(comm: Any, address: str) -> str:
    """In a server of Dask: carry a comm's bytes to a door of this machine, and back.

    When that is over; what it returns is what Dask answers: why the door does not open.
    """
    family, place = addresses.parse(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, place)
    except OSError as error:
        sock.close()
        return f"it does not listen: {error}"
    await comm.write("")
    await _porter(comm, sock)
    return ""


async def pass_on(comm: Any, server: str, door: str, arguments: dict[str, Any]) -> str:
    """In a server of Dask: the same with a door of another one, to which *arguments* connect."""
    import distributed.comm.core as dask

    try:
        other = await dask.connect(server, deserialize=False, **arguments)
        await other.write({"op": OPERATION, "door": door})
    except OSError as error:
        return f"Dask does not reach its worker: {error}"

    async def onward(source: Any, to: Any) -> None:
        while True:
            await to.write(await source.read())

    try:
        await _first_of(onward(comm, other), onward(other, comm))
    finally:
        for each in (comm, other):
            with contextlib.suppress(Exception):
                await each.close()
    return ""


async def _porter(comm: Any, ours: socket.socket) -> None:
    loop = asyncio.get_running_loop()

    async def out() -> None:
        while data := await loop.sock_recv(ours, _CHUNK):
            await comm.write(data)

    async def back() -> None:
        while type(data := await comm.read()) is bytes:
            await loop.sock_sendall(ours, data)

    try:
        await _first_of(out(), back())
    finally:
        ours.close()
        with contextlib.suppress(Exception):
            await comm.close()


async def _first_of(*ways: Coroutine[Any, Any, None]) -> None:
    """Until one has ended, and with it all; it does not matter why: a link sees the end."""
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _arguments(address: str, context: ssl.SSLContext | None) -> dict[str, Any]:
    known = context is not None and context.verify_mode is ssl.CERT_REQUIRED
    if not known or not address.startswith((f"{PREFIX}tls://", f"{PREFIX}gateway://")):
        raise ValueError(
            f"{address!r} cannot be used without the cluster's certificates: Dask's comms unpickle "
            f"what anybody sends them; use {PREFIX}tls:// and a TLS context"
        )
    return {"ssl_context": context, "require_encryption": True}
