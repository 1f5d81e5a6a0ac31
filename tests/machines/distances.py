"""Calls and transfers between machines that are far from each other.

``python -m tests.machines.distances`` has a client far from an island of two machines, and these
far from another one.  Of calls it prints how many there are in a second, for each delay: those
that nothing waits for should not follow it.  Of transfers it prints their share of what plain TCP
carries over the same network (megabits a second, milliseconds one way, percent of frames that are
lost, megabytes of an array).

The numbers mean something on idle processors only: all machines share those of this one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from tests.machines.bench import Machines
from tests.machines.group import Group, hear, tell

NETWORKS = ("100,0,0,64", "100,25,0,32", "0,5,1,8")
CLIENT = """
import json, sys, time
import distributed, jax, numpy as np, pathways_lab as pw
with distributed.Client(sys.argv[1]) as client: client.wait_for_workers(3)
lab = pw.connect(sys.argv[1])
def say(**what): print(json.dumps(what), flush=True)
wide, one = lab.slice(4, island="west"), lab.slice(1, island="east")
other = lab.slice(1, island="west")
cut = wide.sharding(jax.sharding.PartitionSpec("x"))
def plus(on): return pw.jit(lambda x: x + 1, on=on)
on_one, on_wide, on_other = map(plus, (one, wide, other))
reduce = pw.jit(lambda x: x * 0.0 + x.sum(), on=wide, out_shardings=cut)
zeros = np.zeros(8, np.float32)
class Chain:
    def __init__(self, step, on, each=False):
        self.value, self.step, self.each = pw.device_put(zeros, on), step, each
    def __call__(self, count):
        for _ in range(count):
            self.value = self.step(self.value)
            if self.each: self.value.block_until_ready()
        self.value.block_until_ready()
def around(x): return on_one(on_other(x))
first = pw.device_put(zeros, one)
def apart(count): jax.block_until_ready([around(first) for _ in range(count)])
CALLS = {
    "one host": (Chain(on_one, one), 8000),
    "two hosts": (Chain(on_wide, wide), 4000),
    "one host, each waited for": (Chain(on_one, one, each=True), 20),
    "all-reduce over two hosts, chained": (Chain(reduce, cut), 20),
    "island to island and back, chained": (Chain(around, one), 20),
    "island to island and back, not chained": (apart, 60),
}
TARGETS = {"host to host": other, "to two hosts, cut": cut, "to two hosts, whole": wide}
def transfer(kind, size):
    data = np.arange(size // 4, dtype=np.float32)
    far = None if kind == "client, up" else on_one(pw.device_put(data, one)).block_until_ready()
    begun = time.monotonic()
    if kind == "client, down": np.asarray(far)
    elif far is None: pw.device_put(data, one).block_until_ready()
    else: pw.device_put(far, TARGETS[kind]).block_until_ready()
    return time.monotonic() - begun
say(calls=list(CALLS), transfers=[*TARGETS, "client, up", "client, down"])
for line in sys.stdin:
    kind, what = json.loads(line)
    if kind in CALLS:
        run, count = CALLS[kind]
        run(count)
        begun, done = time.monotonic(), 0
        while time.monotonic() < begun + what:
            run(count)
            done += count
        say(rate=done / (time.monotonic() - begun))
    else:
        say(seconds=transfer(kind, what))
"""
PLAIN = """
import json, socket, sys, time
if sys.argv[2] == "take":
    listener = socket.create_server(("", 7000))
    print("{}", flush=True)
    conn, _ = listener.accept()
    room = memoryview(bytearray(1 << 20))
    while size := int.from_bytes(conn.recv(8, socket.MSG_WAITALL), "big"):
        while size: size -= conn.recv_into(room[:size])
        conn.sendall(b"1")
else:
    conn = socket.create_connection(("one", 7000))
    for line in sys.stdin:
        data = bytes(int(line))
        begun = time.monotonic()
        conn.sendall(len(data).to_bytes(8, "big") + data)
        conn.recv(1)
        print(json.dumps({"seconds": time.monotonic() - begun}), flush=True)
"""


class Bench:
    """An island of two machines, one of one, and a client, as far from each other as is said."""

    def __init__(
        self, folder: Path, delay: float = 0.0, loss: float = 0.0, rate: float = 0.0
    ) -> None:
        names = "sched", "one", "two", "three", "note"
        self.machines = Machines(names, folder, delay=delay, loss=loss, rate=rate)
        self._group = Group(self.machines)
        for machine, island in (("one", "west"), ("two", "west"), ("three", "east")):
            self._group.worker(machine, "--devices", "2", "--island", island)
        self.client = self._group.client("note", CLIENT)
        self.kinds = hear(self.client)

    def ask(self, kind: str, what: float) -> dict[str, float]:
        """What the client says of so many seconds of calls, or of a transfer of so many bytes."""
        tell(self.client, json.dumps([kind, what]))
        return hear(self.client)

    def plain(self) -> subprocess.Popen[str]:
        """Sends as many bytes as it is told over TCP, from one island to the other."""
        hear(self._group.client("one", PLAIN, "take"))
        return self._group.client("three", PLAIN, "send")

    def close(self) -> None:
        self._group.close()
        self.machines.close()


def calls(delays: list[float], seconds: float, rounds: int) -> None:
    """Print a row for each kind of call.  delays: milliseconds one way."""
    found: dict[str, list[float]] = {}
    for delay in delays:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(Path(folder), delay=delay / 1e3)
            try:
                for kind in bench.kinds["calls"]:
                    rates = [bench.ask(kind, seconds)["rate"] for _ in range(rounds)]
                    found.setdefault(kind, []).append(statistics.median(rates))
            finally:
                bench.close()
    print(f"calls a second, one way: {', '.join(f'{delay:g} ms' for delay in delays)}")
    for kind, row in found.items():
        print(f"{kind:40}", *(f"{rate:10,.1f}" for rate in row), flush=True)


def transfers(network: str, rounds: int) -> None:
    """Print what plain TCP carries, and the shares of transfers; the kinds take turns."""
    megabits, milliseconds, percent, megabytes = map(float, network.split(","))
    size = int(megabytes * 1e6)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), milliseconds / 1e3, percent / 100, megabits * 1e6 / 8)
        try:
            plain = bench.plain()
            took: dict[str, list[float]] = {kind: [] for kind in ("", *bench.kinds["transfers"])}
            for turn in range(max(rounds, 2) + 1):
                for kind, seconds in took.items():
                    if kind:
                        answer = bench.ask(kind, size)
                    else:
                        tell(plain, str(size))
                        answer = hear(plain)
                    if turn:  # before that connections are made, and functions compiled
                        seconds.append(answer["seconds"])
        finally:
            bench.close()
    usual = statistics.median(took.pop(""))
    print(
        f"{megabits:g} Mbit/s, {milliseconds:g} ms, {percent:g} % lost, {megabytes:g} MB:"
        f" plain TCP {size / usual / 1e6:.1f} MB/s"
    )
    for kind, seconds in took.items():
        shares = sorted(100 * usual / each for each in seconds)
        print(
            f"{kind:24} {statistics.median(shares):4.0f} %  ({shares[0]:.0f} to {shares[-1]:.0f})"
        )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--delays", type=float, nargs="*", default=[0, 10, 50])
    parser.add_argument("--networks", nargs="*", default=NETWORKS)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each kind of call")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    if chosen.delays:
        calls(chosen.delays, chosen.seconds, chosen.rounds)
    for network in chosen.networks:
        transfers(network, chosen.rounds)


if __name__ == "__main__":
    main()
