"""Ctrl-C at any instruction of a send leaves the byte stream intact.

The exhaustive tests put an exception at every place where CPython looks for
signals (after a call, at a backward jump, on entering a function), one place
per run, over a socket that takes bytes in small bites.
"""

from __future__ import annotations

import dis
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest

from pathways_lab.runtime.cluster import dask_private
from pathways_lab.transport import link as link_module
from pathways_lab.transport.auth import new_key
from pathways_lab.transport.framing import Decoder
from pathways_lab.transport.link import Link
from pathways_lab.transport.reactor import Reactor
from pathways_lab.transport.tls import client_context, server_context


class Bites:
    """A socket that takes a few bytes at a time and now and then none."""

    family = socket.AF_UNIX

    def __init__(self) -> None:
        self.taken = bytearray()
        self.calls = 0

    def setblocking(self, flag: bool) -> None: ...

    def sendmsg(self, pieces: list[memoryview]) -> int:
        self.calls += 1
        if self.calls % 5 == 0:
            raise BlockingIOError
        data = b"".join(pieces)[: 1 + 37 * (self.calls % 3)]
        self.taken += data
        return len(data)


class Desk:
    """An owner that writes later, like a reactor."""

    def __init__(self) -> None:
        self.asked = 0

    def wants_write(self, link: Link) -> None:
        self.asked += 1

    def wants_close(self, link: Link, reason: str, broken: bool = False) -> None: ...

    def is_current(self) -> bool:
        return False


@contextmanager
def interrupt_at(place: int) -> Iterator[Callable[[], int]]:
    """Raise KeyboardInterrupt at the place-th look for signals inside link.py; count places."""
    seen = 0
    before: dict[FrameType, str] = {}

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal seen
        if event == "opcode":
            last = before.get(frame, "RESUME")
            code = frame.f_code.co_code[frame.f_lasti]
            before[frame] = dis.opname[code]
            if last.startswith(("CALL", "JUMP_BACKWARD", "RESUME")):
                seen += 1
                if seen == place:
                    raise KeyboardInterrupt
        return local

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename == link_module.__file__:
            frame.f_trace_opcodes = True
            return local
        return None

    old = sys.gettrace()
    sys.settrace(enter)
    try:
        yield lambda: seen
    finally:
        sys.settrace(old)


def run_once(place: int, kind: type[Link]) -> tuple[bool, list[int], list[int]]:
    """Send three messages, one interrupted; (interrupted, certainly sent, received)."""
    sock, desk = Bites(), Desk()
    link = kind(desk, sock, "peer", {}, Decoder())  # type: ignore[arg-type]
    certain: list[int] = []
    interrupted = False
    for number, size in enumerate((10, 40_000, 0)):
        with interrupt_at(place if number == 1 else -1):
            try:
                link.send("n", {"number": number}, [bytes(size)] if size else [])
                certain.append(number)
            except KeyboardInterrupt:
                interrupted = True
                assert desk.asked or not link.backlog, "nobody was asked to write the rest"
    assert not link._writing.locked()
    while not link.unblock():
        pass
    received = [m.fields["number"] for m in Decoder().feed(bytes(sock.taken))]
    return interrupted, certain, received


def torn_places(kind: type[Link]) -> tuple[int, list[int]]:
    """How many places exist, and those after which the stream was not intact.

    In a thread that ends with the search: an exception that a trace function raises
    between the instructions that leave an ``except`` block stays "being handled" in its
    thread for ever, and would be the context of every later exception there.
    """
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(search, kind).result()
    assert sys.exc_info() == (None, None, None)
    return found


def search(kind: type[Link]) -> tuple[int, list[int]]:
    """Interrupt one place after another, until there is none left."""
    torn, place = [], 1
    while True:
        try:
            interrupted, certain, received = run_once(place, kind)
            if not interrupted:
                return place, torn
            if not (set(certain) <= set(received) and received == sorted(set(received))):
                torn.append(place)
        except Exception:
            torn.append(place)
        place += 13 if place > 200 else 1


def test_no_instruction_is_a_bad_moment() -> None:
    places, torn = torn_places(Link)
    assert places > 60
    assert torn == []


class Naive(Link):
    """Takes the count out of the system call and adds it up: two steps, one too many."""

    def _pump(self) -> None:
        with self._writing:
            while not self._blocked and self._queue:
                frame = self._queue[0]
                try:
                    count = self._write(frame.pieces)
                except BlockingIOError:
                    self._blocked = True
                    self._owner.wants_write(self)
                    return
                while count:
                    part = min(count, len(frame.pieces[0]))
                    frame.pieces[0] = frame.pieces[0][part:]
                    count -= part
                    if not frame.pieces[0]:
                        frame.pieces.pop(0)
                if not frame.pieces:
                    self._queue.popleft()


def test_the_search_finds_a_writer_that_is_not_safe() -> None:
    link_file = link_module.__file__
    code = Naive._pump.__code__.replace(co_filename=link_file)
    Naive._pump.__code__ = code
    _, torn = torn_places(Naive)
    assert torn


def _ignore(*_: object) -> None: ...


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers here")
@pytest.mark.parametrize("transport", ["unix", "dask"])
def test_ten_thousand_real_interrupts(transport: str, tmp_path: Any) -> None:
    """Signals at random moments, real connections, both buffers full at times."""
    got: list[int] = []
    key, draw = new_key(), random.Random(1)
    server = Reactor("server", lambda *message: got.append(message[2]["number"]), _ignore)
    client = Reactor("client", _ignore, _ignore)
    place = f"unix:{tmp_path}/s" if transport == "unix" else "dask+tls://127.0.0.1:0"
    pems = None
    if transport == "dask":
        distributed = pytest.importorskip("distributed")
        pems = dask_private.pems_of(distributed.Security.temporary(), "worker")
    address = server.listen(place, key, {"name": "server"}, context=server_context(pems))
    server.start()
    client.start()
    link = client.connect(address, key, {"name": "client"}, context=client_context(pems))
    sent, interrupts, number = [], 0, 0

    def strike(*_: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, strike)
    try:
        deadline, going = time.monotonic() + 100, True
        while going:
            # The system may tell another thread of a signal, and then it comes late.
            with suppress(KeyboardInterrupt):
                while interrupts < 10_000 and time.monotonic() < deadline:
                    number += 1
                    size = draw.choice([0, 10, 10, 10, 10, 100_000])
                    try:
                        signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, 2e-5))
                        link.send("n", {"number": number}, [bytes(size)] if size else [])
                        sent.append(number)
                        signal.setitimer(signal.ITIMER_REAL, 0)
                    except KeyboardInterrupt:
                        interrupts += 1
                going = False
    finally:
        while True:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, old)
                break
            except KeyboardInterrupt:
                continue
    link.send("n", {"number": number + 1})
    deadline = time.monotonic() + 60
    while (not got or got[-1] != number + 1) and time.monotonic() < deadline:
        time.sleep(0.005)
    client.close()
    server.close()
    assert interrupts == 10_000
    assert got == sorted(set(got))
    assert set(sent) <= set(got)
