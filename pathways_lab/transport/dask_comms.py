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
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

PREFIX = "dask+"
_CHUNK = 1 << 20
"""Bytes of one message of a comm at most."""
_START_SECONDS = 30.0


def is_comm(address: str) -> bool:
    """Whether an address is reached over a comm: ``dask+tls://host:port``."""
    return address.startswith(PREFIX)


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

        comm = await dask.connect(
            address.removeprefix(PREFIX), timeout=timeout, deserialize=False, **arguments
        )
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


async def _porter(comm: Any, ours: socket.socket) -> None:
    loop = asyncio.get_running_loop()

    async def out() -> None:
        while data := await loop.sock_recv(ours, _CHUNK):
            await comm.write(data)

    async def back() -> None:
        while type(data := await comm.read()) is bytes:
            await loop.sock_sendall(ours, data)

    ways = [loop.create_task(out()), loop.create_task(back())]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        # Whatever ended it, a closed comm or bytes that are none: the link sees its end.
        await asyncio.gather(*ways, return_exceptions=True)
        ours.close()
        with contextlib.suppress(Exception):
            await comm.close()


def _arguments(address: str, context: ssl.SSLContext | None) -> dict[str, Any]:
    known = context is not None and context.verify_mode is ssl.CERT_REQUIRED
    if not known or not address.startswith(f"{PREFIX}tls://"):
        raise ValueError(
            f"{address!r} cannot be used without the cluster's certificates: Dask's comms unpickle "
            f"what anybody sends them; use {PREFIX}tls:// and a TLS context"
        )
    return {"ssl_context": context, "require_encryption": True}
