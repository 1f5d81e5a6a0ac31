"""The network between machines of a test: a switch in user space.

Problem: kernels without ``tc netem`` cannot delay or lose packets, and a cut between two
machines that leaves both connected with a third is no setting of a bridge.

How: every machine has a TAP device, whose other end is a file here.  Frames go by the last
byte of their target's address, after the delay, at the rate of the sender's link, if luck
lets them.  Orders come over standard input, one JSON list a line, each answered by one in JSON;
its end ends the switch.

Rule for maintainers: the standard library only, since this is a program of its own.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time
from collections.abc import Collection
from typing import Any

TUNSETIFF, TAP, BARE = 0x400454CA, 0x0002, 0x1000
LONGEST = 65536
TCP, SYN, ACK = 6, 2, 16
ARP = b"\x08\x06"
BACKLOG = 0.5
"""Seconds of traffic that may stand before a slow link; more is lost."""


def mac(number: int) -> str:
    """The Ethernet address of a machine's end."""
    return f"02:00:00:00:00:{number:02x}"


def tap(name: str) -> int:
    """A new TAP device; gone when its file is closed."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH", name.encode(), TAP | BARE))
    return descriptor


def opens(frame: bytes, but: Collection[int]) -> bool:
    """Whether a frame asks for a TCP connection (IPv4) at another port than these."""
    ip = frame[14:]
    if frame[12:14] != b"\x08\x00" or ip[9] != TCP:
        return False
    tcp = ip[4 * (ip[0] & 15) :]
    return tcp[13] & (SYN | ACK) == SYN and int.from_bytes(tcp[2:4], "big") not in but


class Switch:
    """delay: seconds one way.  loss: the share of frames.  rate: bytes/s a machine; 0: any."""

    def __init__(self, delay: float, loss: float, rate: float) -> None:
        self.delay, self.loss, self.rate = delay, loss, rate
        self._ends: dict[int, int] = {}
        self._free: dict[int, float] = {}
        self._apart: set[frozenset[int]] = set()
        self._unplugged: set[int] = set()
        self._walls: dict[int, list[int]] = {}
        self._sniffed: dict[str, int] = {}
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._count = 0
        self._luck = random.Random(1)
        self._epoll = select.epoll()

    def obey(self, order: str, *numbers: Any) -> object:
        """One order, and what it asks for; machines are numbers from 1."""
        if order == "add":
            (number,) = numbers
            if number in self._ends:  # of a machine that is gone
                self._epoll.unregister(self._ends[number])
                os.close(self._ends[number])
            self._unplugged.discard(number)
            self._ends[number] = tap(f"pw{os.getpid()}.{number}")
            self._epoll.register(self._ends[number], select.EPOLLIN)
        elif order == "unplug":
            self._unplugged |= set(numbers)
        elif order == "plug":
            self._unplugged -= set(numbers)
            self._apart = {pair for pair in self._apart if not pair & set(numbers)}
        elif order == "cut":
            self._apart.add(frozenset(numbers))
        elif order == "wall":
            machine, *ports = numbers
            self._walls[machine] = ports
        elif order == "sniff":
            found, self._sniffed = self._sniffed, dict.fromkeys(numbers, 0)
            return found
        return None

    def run(self) -> None:
        """Until standard input ends."""
        self._epoll.register(0, select.EPOLLIN)
        orders = b""
        while True:
            wait = self._under_way[0][0] - time.monotonic() if self._under_way else -1
            sources = {end: number for number, end in self._ends.items()}
            for ready, _ in self._epoll.poll(max(0.0, wait) if self._under_way else -1):
                if ready:
                    self._take(sources[ready])
                    continue
                if not (data := os.read(0, LONGEST)):
                    return
                orders += data
                *lines, orders = orders.split(b"\n")
                for line in lines:
                    print(json.dumps(self.obey(*json.loads(line))), flush=True)
            now = time.monotonic()
            while self._under_way and self._under_way[0][0] <= now:
                self._deliver(*heapq.heappop(self._under_way)[2:])

    def _take(self, source: int) -> None:
        for _ in range(64):
            try:
                frame = os.read(self._ends[source], LONGEST)
            except OSError:  # nothing more, or the machine is gone
                return
            for pattern in self._sniffed:
                self._sniffed[pattern] += pattern.encode() in frame
            # Who asks all machines for an address (ARP) is answered by one: many ask at once.
            meant = frame[41] if frame[12:14] == ARP else frame[5]
            targets = [meant] if meant in self._ends else [*self._ends]
            for target in targets:
                walled = target in self._walls and opens(frame, self._walls[target])
                if target != source and not walled and self._passes(source, target):
                    self._send(source, target, frame)

    def _passes(self, source: int, target: int) -> bool:
        if {source, target} & self._unplugged or frozenset((source, target)) in self._apart:
            return False
        return not self.loss or self._luck.random() >= self.loss

    def _send(self, source: int, target: int, frame: bytes) -> None:
        now = time.monotonic()
        leaves = now
        if self.rate:
            leaves = max(now, self._free.get(source, 0.0)) + len(frame) / self.rate
            if leaves > now + BACKLOG:
                return
            self._free[source] = leaves
        if self.delay or self.rate:
            self._count += 1
            due = leaves + self.delay
            heapq.heappush(self._under_way, (due, self._count, target, frame))
        else:
            self._deliver(target, frame)

    def _deliver(self, target: int, frame: bytes) -> None:
        try:
            os.write(self._ends[target], frame)
        except OSError:  # its machine is gone, or takes no more
            return


if __name__ == "__main__":
    # A real network does not slow down when the machines on it compute.
    os.setpriority(os.PRIO_PROCESS, 0, -20)
    Switch(*map(float, sys.argv[1:])).run()
