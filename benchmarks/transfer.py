"""Bytes from one process to another of this machine: links, a lab, and what bounds them.

    python -m benchmarks.transfer

One transfer is: the buffer leaves, all of it is there, the other end says so.
The *links* are those of the lab, through shared memory, a Unix socket, TCP, and
Dask's comms with TLS.  *lab* is a whole run: a value on one host, its transfer to
another, and a computation there that reads it, waited for by the kernel.  Below
them are what the machine gives: plain sockets with warm buffers, a copy into
shared memory that both ends have touched before, and a copy inside one process.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.harness.child import ROOT
from benchmarks.harness.command import arguments, settings
from benchmarks.harness.figure import curves
from benchmarks.harness.numbers import spread
from benchmarks.harness.report import Report, grid, publish
from benchmarks.harness.rounds import Timed, measure
from pathways_lab.client.session.waiting import Board, Pending
from pathways_lab.runtime.cluster import dask_private
from pathways_lab.transport.link import Link, LinkClosed
from pathways_lab.transport.reactor import Reactor
from pathways_lab.transport.tls import client_context, server_context

SIZES = {
    f"{number} {unit}": number << shift
    for number, unit, shift in (
        (1, "KiB", 10), (16, "KiB", 10), (256, "KiB", 10),
        (4, "MiB", 20), (64, "MiB", 20), (256, "MiB", 20),
    )
}  # fmt: skip
SHARED, LAB = "link, shared memory", "lab, host to host"
LINKS = {
    SHARED: ("unix", True),
    "link, Unix socket": ("unix", False),
    "link, TCP": ("tcp://127.0.0.1:0", False),
    "link, Dask comm": ("dask+tls://127.0.0.1:0", False),
}
KEY = bytes(range(32))


def payload(size: int) -> np.ndarray[Any, Any]:
    """Bytes that have been touched."""
    return np.arange(size, dtype=np.uint32).view(np.uint8)[:size]


class Base:
    """A System that moves one buffer per unit."""

    cases: Sequence[str] = tuple(SIZES)

    def __init__(self, name: str) -> None:
        self.name = name
        self._data: dict[str, np.ndarray[Any, Any]] = {}

    def round(self, case: str, units: int) -> Timed:
        data = self._data.setdefault(case, payload(SIZES[case]))
        begun = time.perf_counter()
        for _ in range(units):
            self.move(data)
        return Timed(time.perf_counter() - begun, units)

    def move(self, data: np.ndarray[Any, Any]) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Nothing to prepare."""

    def stop(self) -> None:
        """Nothing to end."""


class Copy(Base):
    """A copy inside this process, into memory that was touched before."""

    def move(self, data: np.ndarray[Any, Any]) -> None:
        target = self._data.setdefault(f"to {len(data)}", np.zeros(len(data), np.uint8))
        np.copyto(target, data)


class Far(Base):
    """With a process at the other end that obeys :func:`receive`."""

    def begin(self, **how: Any) -> str:
        """Start it; the line with which it answers."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.transfer", "receive"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(how) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


class Links(Far):
    """A link as the lab has them."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._address, self._bulk = LINKS[name]
        if self._address.startswith("dask"):
            # The largest would take longer than all the rest.
            self.cases = tuple(SIZES)[:-2]

    def start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        place = self._address if ":" in self._address else f"unix:{self._folder.name}/s"
        pems = None
        if place.startswith("dask"):
            import distributed

            pems = dask_private.pems_of(distributed.Security.temporary(), "worker")
        address = self.begin(kind="link", address=place, bulk=self._bulk, tls=pems)
        self._wanted = Pending()
        self._reactor = Reactor("near", self._answered, lambda *_: None)
        self._board = Board(self._reactor)
        self._reactor.start()
        self._link = self._reactor.connect(
            address, KEY, {"name": "near"}, bulk=self._bulk, context=client_context(pems)
        )

    def _answered(self, *_: object) -> None:
        self._board.settle([self._wanted], None)

    def move(self, data: np.ndarray[Any, Any]) -> None:
        wanted = self._wanted = Pending()
        self._link.send("data", {}, [data.data])
        self._board.wait(lambda: wanted.done, 60.0, "the answer")

    def stop(self) -> None:
        self._reactor.close()
        super().stop()
        self._folder.cleanup()


class Plain(Far):
    """A plain socket that is read into one warm buffer."""

    def __init__(self, name: str, family: socket.AddressFamily) -> None:
        super().__init__(name)
        self._family = family

    def start(self) -> None:
        with tempfile.TemporaryDirectory() as folder, socket.socket(self._family) as door:
            unix = self._family == socket.AF_UNIX
            door.bind(f"{folder}/s" if unix else ("127.0.0.1", 0))
            door.listen()
            self.begin(kind="plain", place=door.getsockname())
            self._sock, _ = door.accept()
        if not unix:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def move(self, data: np.ndarray[Any, Any]) -> None:
        self._sock.sendall(len(data).to_bytes(8, "big"))
        self._sock.sendall(data.data)
        self._sock.recv(1)

    def stop(self) -> None:
        self._sock.close()
        super().stop()


class Memory(Plain):
    """Shared memory that both ends have touched before; one byte each way says so."""

    def start(self) -> None:
        # Anonymous and shared, as with a child; who reads it makes no difference to the copy.
        self._shared = np.frombuffer(mmap.mmap(-1, max(SIZES.values())), np.uint8)
        self._shared[:] = 0
        super().start()

    def move(self, data: np.ndarray[Any, Any]) -> None:
        self._shared[: len(data)] = data
        self._sock.sendall((0).to_bytes(8, "big"))
        self._sock.recv(1)


class Runs(Base):
    """Runs of a program with one transfer between two hosts."""

    def __init__(self) -> None:
        super().__init__(LAB)
        self._held: dict[int, Any] = {}

    def start(self) -> None:
        import pathways_lab as pw

        self._lab = pw.start(
            islands=2, hosts_per_island=1, devices_per_host=1, memory="3 GiB", progress=False
        )
        near, far = self._lab.slice(1, island="island0"), self._lab.slice(1, island="island1")
        self._make = pw.jit(lambda x: x + 1, on=near)
        reads = pw.jit(lambda x: x[0], on=far)
        self._run = pw.program(lambda x: reads(x))

    def move(self, data: np.ndarray[Any, Any]) -> None:
        if len(data) not in self._held:
            self._held[len(data)] = self._make(data)
        self._run(self._held[len(data)]).block_until_ready()

    def stop(self) -> None:
        self._lab.close()


def receive() -> None:
    """The other end of a system, as one line of JSON says."""
    how = json.loads(sys.stdin.readline())
    if how["kind"] == "plain":
        place = how["place"]
        unix = isinstance(place, str)
        with socket.socket(socket.AF_UNIX if unix else socket.AF_INET) as sock:
            sock.connect(place if unix else tuple(place))
            buffer = memoryview(bytearray(max(SIZES.values())))
            print("ready", flush=True)
            while head := sock.recv(8):
                missing = int.from_bytes(head, "big")
                while missing:
                    missing -= sock.recv_into(buffer[:missing])
                sock.sendall(b"\0")
        return

    def answer(link: Link, *_: object) -> None:
        with contextlib.suppress(LinkClosed):
            link.send("there")

    reactor = Reactor("far", answer, lambda *_: None)
    print(
        reactor.listen(
            how["address"], KEY, {"name": "far"},
            bulk=how["bulk"], context=server_context(how["tls"]),
        ),
        flush=True,
    )  # fmt: skip
    reactor.start()
    sys.stdin.read()
    reactor.close()


def main() -> None:
    """Measure, print, publish."""
    parser = arguments(__doc__, rounds=7, budget=0.1)
    parser.add_argument("--largest", choices=SIZES, default=list(SIZES)[-1], help="buffer")
    chosen = parser.parse_args()
    how = settings(chosen)
    cases = [case for case, size in SIZES.items() if size <= SIZES[chosen.largest]]
    systems = [
        Copy("memcpy"),
        Memory("shared memory", socket.AF_UNIX),
        Plain("plain Unix socket", socket.AF_UNIX),
        Plain("plain TCP socket", socket.AF_INET),
        *(Links(name) for name in LINKS),
        Runs(),
    ]
    measured = measure(systems, cases, rounds=how.rounds, budget=how.budget, seed=how.seed)
    title = "Bytes from one process to another (one machine)"
    report = Report("transfer", title, "transfer", measured, "plain Unix socket")
    text = [f"Time per transfer, times that of a {report.reference}:", ""]
    text.append(grid(measured, {case: case for case in cases}, report.reference))
    lines = {
        system.name: [
            (float(SIZES[case]), SIZES[case] / spread(samples).median)
            for case in cases
            if (samples := measured.of(case, system.name))
        ]
        for system in systems
    }
    for name in (SHARED, "link, Unix socket", "link, TCP"):
        rates = [rate / 1e9 for _, rate in lines[name]]
        if rates:
            text += ["", f"{name}: up to {max(rates):.1f} GB/s."]
    drawn = curves(title, {k: v for k, v in lines.items() if v}, "bytes", "bytes per second")
    assert all(math.isfinite(rate) for line in lines.values() for _, rate in line)
    text += [f"Without {name}: {why}." for name, why in measured.missing.items()]
    publish(report, how.folder, "\n".join(text), drawn)


if __name__ == "__main__":
    receive() if sys.argv[1:] == ["receive"] else main()
