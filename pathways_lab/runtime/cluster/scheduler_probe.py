"""Finds out whether a Dask scheduler answers, before a Dask client waits for it.

Problem: a Dask client waits for half a minute at an address without a listener, and for
ever at a listener that says nothing.  An interrupt leaves its thread behind, and the
interpreter waits for that at its end.

How: one connection of Dask's own, with a limit, in a thread that ends with it; a client is made
once the scheduler has answered.  Where the first attempt fails, a bare connection says whether
anybody listens, and if not, why.  A peer that has taken a connection is busy, and not absent: it
is waited for until the limit, and then it is silent.

The ways between machines are looked at likewise: each opens a port for a moment, at which the
others knock.  It takes nothing but the word that was agreed on.

Rule for maintainers: documented Dask API only (``distributed.comm``); the waiting thread shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pathways_lab.runtime.processes.start_progress import Tell
from pathways_lab.transport import addresses
from pathways_lab.transport.dask_comms import is_comm

PATIENCE = 1.0
"""Seconds after which whoever waits is told for what."""
REACH = 2.0
"""Seconds for a connection where nobody asked for a wait: a network answers in less."""
_AGAIN = 0.1
_AT_ONCE = 64
"""Peers that one process asks at the same time."""
BULK = 4 << 20
"""Bytes whose way is timed."""
WORD = 16
"""Bytes of the word that is agreed on."""
_In = TypeVar("_In")
_Out = TypeVar("_Out")
PORTS = "open the ports of these machines to each other: docs/machines.md says who connects to whom"
BY_DASK = 'pw.connect(..., transport="dask") needs nothing but the port of Dask\'s scheduler'


class Unreached(OSError):
    """Nobody took a connection, or has answered.  remedy: what may help."""

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(why)
        self.remedy = remedy


def unreached(error: OSError, host: str, port: int, at: str, seconds: float) -> Unreached:
    """An attempt to connect has failed, in words.

    at: the address that the host's name stands for; "" where it stands for none.
    """
    there = host if at in ("", host) else f"{host} ({at})"
    if isinstance(error, socket.gaierror):
        return Unreached(
            f"no machine is known here by the name {host!r}",
            "check the name, or give the machine's address",
        )
    if isinstance(error, ConnectionRefusedError):
        return Unreached(
            f"{there} refuses connections at port {port} (Connection refused): the machine is"
            " there, and no scheduler listens at that port",
            "start it, or check the port (a scheduler's log says it; its dashboard has another);"
            " timeout=60 waits for one that is still starting",
        )
    if isinstance(error, TimeoutError):
        return Unreached(
            f"nothing came back from {there} for {seconds:g} s: no machine has that address, it"
            f" is off, or a firewall swallows what comes to port {port}",
            "check the address, and that firewalls let the port through; timeout=60 waits for a"
            " machine that is still starting",
        )
    return Unreached(
        f"no way leads to {there}: {error.strerror or error}",
        "check the address, and this machine's network",
    )


def silent(who: str, seconds: float) -> Unreached:
    """The error for a peer that has taken a connection, and says nothing for so long."""
    return Unreached(
        f"{who} is silent: it has accepted a connection, and not answered for {seconds:.3g} s",
        "it may be busy, and timeout= waits longer; or another program listens there",
    )


class Wait:
    """The wait for a peer that has taken a connection and says nothing.

    who: the peer.  limit: the seconds for which it is waited for.  tell: takes the progress.
    """

    def __init__(self, who: str, limit: float, tell: Tell) -> None:
        self.who = who
        self._limit, self._tell, self._next = limit, tell, REACH

    def quiet(self, seconds: float) -> None:
        """It has said nothing for so long: told each time that this doubles.

        Raises Unreached at the limit.
        """
        if seconds >= self._limit:
            raise silent(self.who, seconds)
        if seconds >= self._next:
            self._next = 2 * seconds
            self._tell(
                f"waiting for {self.who}, which has accepted and not answered for {seconds:.0f} s"
            )


def reach(address: str, whose: str) -> None:
    """Return when somebody takes a connection at a door of the lab.

    whose: the door's owner, for the error.  Raises Unreached within :data:`REACH` seconds.
    """
    if is_comm(address) or isinstance(place := addresses.parse(address)[1], str):
        return  # by Dask, or on this machine
    host, port = place
    try:
        socket.create_connection((host, port), timeout=REACH).close()
    except OSError as error:
        why = str(error.strerror or error)
        if isinstance(error, TimeoutError):
            why = f"nothing came back for {REACH:g} s, as where a firewall swallows what comes"
        here = socket.gethostname()
        raise Unreached(
            f"{here} does not reach {whose} at {host}, port {port}: {why}", PORTS
        ) from None


def unreached_of(doors: Mapping[str, str]) -> list[Unreached]:
    """Those of these owners' doors at which nobody takes a connection; all tried at once."""
    found: list[Unreached] = []

    def one(whose: str, address: str) -> None:
        try:
            reach(address, whose)
        except Unreached as error:
            found.append(error)

    at_once(lambda each: one(*each), doors.items())
    return sorted(found, key=str)


def at_once(ask: Callable[[_In], _Out], peers: Iterable[_In]) -> list[_Out]:
    """The answers of peers, which are asked side by side, so many as a machine bears."""
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="probe") as pool:
        return list(pool.map(ask, peers))


@dataclass
class _Attempt:
    """refusals: why attempts failed.  at: the machine that has taken a bare connection."""

    refusals: list[BaseException] = field(default_factory=list)
    at: str = ""


def knock(address: str, security: Any, seconds: float, tell: Tell, wait: bool = False) -> None:
    """Return when a Dask scheduler answers at *address*.

    wait: also for somebody to take a connection.

    Raises OSError when none does within so many seconds, and TypeError or ValueError for
    what can be no address, or where something else answers.
    """
    loop, attempt, began = asyncio.new_event_loop(), _Attempt(), time.monotonic()
    reach = seconds if wait else min(REACH, seconds)
    quiet = PATIENCE if wait else reach + _AGAIN
    task = loop.create_task(_meet(address, security, seconds, reach, attempt))
    thread = threading.Thread(target=_run, args=(loop, task), name="knocking", daemon=True)
    thread.start()
    try:
        thread.join(quiet)
        if thread.is_alive():
            why = f" ({attempt.refusals[-1]})" if attempt.refusals else ""
            with waiting(f"a Dask scheduler at {address}{why}", seconds - quiet, tell):
                silence = Wait("", seconds, tell)
                while thread.is_alive():
                    thread.join(_AGAIN)
                    if attempt.at and thread.is_alive():
                        silence.who = attempt.at
                        silence.quiet(time.monotonic() - began)
                task.result()
    finally:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it is over
            loop.call_soon_threadsafe(task.cancel)
        thread.join()
    task.result()


@contextlib.contextmanager
def waiting(what: str, seconds: float, tell: Tell) -> Iterator[None]:
    """Say for what the block waits, and until when; in the end, whether it came."""
    until = time.localtime(time.time() + seconds)
    tell(f"waiting for {what}, until {time.strftime('%H:%M:%S', until)}; Ctrl-C ends the wait")
    outcome = "waited in vain for"
    try:
        yield
        outcome = "found"
    finally:
        tell(f"{outcome} {what}")


def first_cause(error: BaseException) -> BaseException:
    """The exception at the end of a chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


async def _meet(
    address: str, security: Any, seconds: float, reach: float, attempt: _Attempt
) -> None:
    from distributed.comm.core import connect

    arguments = security.get_connection_args("client")
    # The first is short, so that there is a reason to tell.
    patience = min(PATIENCE, seconds) / 2
    began = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    # Dask's own limit is for the connection, and not for the answer. It says
                    # only of what the last attempt failed, which the limit may have cut short.
                    async with asyncio.timeout(None if attempt.at else patience):
                        comm = await connect(address, timeout=patience, **arguments)
                    break
                except TimeoutError:
                    pass  # somebody may have accepted, or nobody
                except OSError as error:
                    # What a certificate shows now it shows later.
                    if error.__cause__ is None or isinstance(first_cause(error), ssl.SSLError):
                        raise
                    if not isinstance(error.__cause__, TimeoutError):
                        attempt.refusals.append(first_cause(error))
                except (TypeError, ValueError):
                    raise
                except Exception:
                    # Dask takes the first bytes for lengths: even a MemoryError may come of them.
                    raise ValueError("what answers there is no Dask scheduler") from None
                if not attempt.at:
                    own = len(attempt.refusals)
                    at = await _reached(address, began + reach, reach, attempt.refusals)
                    del attempt.refusals[own:]  # they are of the time before it listened
                    attempt.at = at
                patience = seconds
    except TimeoutError:
        if attempt.refusals:
            raise OSError(f"no connection within {seconds:g} s") from attempt.refusals[-1]
        if attempt.at:
            raise silent(attempt.at, seconds) from None
        raise OSError(f"nobody has answered for {seconds:g} s") from None
    comm.abort()


async def _reached(address: str, end: float, seconds: float, refusals: list[BaseException]) -> str:
    """The machine that takes a bare connection.

    Raises Unreached when that does not happen before *end*, so many seconds after the first try.
    """
    from distributed.comm.addressing import parse_address, parse_host_port

    scheme, place = parse_address(address)
    if scheme not in ("tcp", "tls"):
        return str(place)
    host, port = parse_host_port(place)
    loop, at = asyncio.get_running_loop(), ""
    while True:
        failure: OSError = TimeoutError()
        try:
            async with asyncio.timeout_at(end):
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                for family, kind, protocol, _, to in found:
                    at = str(to[0])
                    with socket.socket(family, kind, protocol) as sock:
                        sock.setblocking(False)
                        try:
                            await loop.sock_connect(sock, to)
                            return at
                        except OSError as error:
                            failure = error
        except OSError as error:
            failure = error
        if loop.time() + _AGAIN >= end:
            raise unreached(failure, host, port, at, seconds)
        refusals.append(failure)
        await asyncio.sleep(_AGAIN)


def _run(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    with contextlib.suppress(BaseException):  # it is the task's
        loop.run_until_complete(task)
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def is_own(host: str) -> bool:
    """For ``Client.run_on_scheduler``: whether that is an address of this machine to others."""
    if ipaddress.ip_address(host).is_loopback:
        return False
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, 0), family=family).close()
    except OSError:
        return False
    return True


# --- ports that are opened for a moment --------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """From one process to another's port.  seconds: a round trip.  rate: bytes/s."""

    seconds: float = 0.0
    rate: float = 0.0
    failure: str = ""


_doors: list[socket.socket] = []


def open_door(host: str, word: bytes) -> int:
    """For ``Client.run``: listen at *host*; the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    door = socket.create_server((host, 0), family=family)
    _doors.append(door)
    threading.Thread(target=_serve, args=(door, word), name="probe", daemon=True).start()
    port: int = door.getsockname()[1]
    return port


def close_doors() -> None:
    """For ``Client.run``."""
    while _doors:
        # Closing alone wakes nobody who waits for a connection.
        door = _doors.pop()
        with contextlib.suppress(OSError):
            door.shutdown(socket.SHUT_RDWR)
        door.close()


def _serve(door: socket.socket, word: bytes) -> None:
    while True:
        try:
            sock, _ = door.accept()
        except OSError:
            return
        threading.Thread(target=_answer, args=(sock, word), name="probe", daemon=True).start()


def _answer(sock: socket.socket, word: bytes) -> None:
    try:
        with sock:
            sock.settimeout(REACH)
            if sock.recv(WORD, socket.MSG_WAITALL) == word:
                sock.sendall(b".")
                left = BULK
                while left and (data := sock.recv(1 << 16)):
                    left -= len(data)
                sock.sendall(b".")
    except OSError:
        return


def knock_at(doors: Mapping[str, tuple[str, int]], word: bytes) -> dict[str, Way]:
    """For ``Client.run``: the ways from here to ports of others, all at the same time."""
    ways = at_once(lambda place: _way(place, word), doors.values())
    return dict(zip(doors, ways, strict=True))


def _way(place: tuple[str, int], word: bytes) -> Way:
    try:
        with socket.create_connection(place, timeout=REACH) as sock:
            began = time.monotonic()
            sock.sendall(word)
            answered = sock.recv(1)
            met = time.monotonic()
            sock.sendall(bytes(BULK))
            answered += sock.recv(1)
            ended = time.monotonic()
    except TimeoutError:
        return Way(failure=f"no answer from {place[0]} for {REACH:g} s")
    except OSError as error:
        return Way(failure=f"{place[0]}: {error.strerror or error}")
    if answered != b"..":
        return Way(failure=f"somebody else answers at {place[0]}")
    return Way(met - began, BULK / max(ended - met, 1e-9))
