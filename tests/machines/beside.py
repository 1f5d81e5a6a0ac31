"""Small calls beside a big transfer, over machines: by how much they take longer.

``python -m tests.machines.beside`` has one client wait for each of its calls on a slice, in turns
alone and beside another client, which sends large arrays to the same host: from its own machine,
then from a slice of another machine.  It prints the medians and their ratios, of several turns.

The numbers mean something on idle processors only: all machines share those of this one.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from tests.machines.bench import Machines
from tests.machines.group import Group, hear, tell

COMMON = """
import json, os, sys, time
import distributed, jax, numpy as np, pathways_lab as pw
with distributed.Client(sys.argv[1]) as client: client.wait_for_workers(2)
lab = pw.connect(sys.argv[1], transport=os.environ["TRANSPORT"])
def say(**what): print(json.dumps(what), flush=True)
"""
CALLS = (
    COMMON
    + """
add = pw.jit(lambda x: x + 1, on=lab.slice(1, island="west"))
value = add(np.zeros(8, np.float32))
for _ in range(300): value = add(value); value.result()
say(ready=True)
for order in sys.stdin:
    end, took = time.monotonic() + float(order), []
    while (begun := time.monotonic()) < end:
        value = add(value)
        value.result()
        took.append(time.monotonic() - begun)
    say(took=took)
"""
)
BULK = (
    COMMON
    + """
here, there = lab.slice(1, island="west"), lab.slice(1, island="east")
data = np.ones(int(os.environ["BYTES"]) // 4, np.float32)
far = pw.device_put(data, there)
def upload(): pw.device_put(data, here).block_until_ready()
def transfer(): pw.device_put(far, here).block_until_ready()
upload(), transfer()
say(ready=True)
for order in sys.stdin:
    kind, seconds = order.split()
    begun, count = time.monotonic(), 0
    say(begun=True)
    while time.monotonic() < begun + float(seconds):
        {"upload": upload, "transfer": transfer}[kind]()
        count += 1
    say(rate=count * data.nbytes / (time.monotonic() - begun))
"""
)


class Bench:
    """Two hosts and two clients, each on a machine."""

    def __init__(self, folder: Path, size: int, rate: float, transport: str) -> None:
        self.machines = Machines(("sched", "one", "two", "ann", "bob"), folder, rate=rate)
        self._group = Group(self.machines)
        for machine, island in (("one", "west"), ("two", "east")):
            self._group.worker(machine, "--devices", "2", "--island", island)
        self.clients = {
            "ann": self._group.client("ann", CALLS, TRANSPORT=transport),
            "bob": self._group.client("bob", BULK, BYTES=str(size), TRANSPORT=transport),
        }
        for client in self.clients.values():
            hear(client)

    def calls(self, seconds: float) -> list[float]:
        """Seconds that each of the calls took."""
        tell(self.clients["ann"], str(seconds))
        took: list[float] = hear(self.clients["ann"])["took"]
        return took

    def close(self) -> None:
        self._group.close()
        self.machines.close()


def measure(bench: Bench, kind: str, turns: int, seconds: float) -> None:
    """Print the ratio of calls beside transfers of a kind to calls alone."""
    bob = bench.clients["bob"]
    alone, beside, rates = [], [], []
    for _ in range(turns):
        alone.append(bench.calls(seconds))
        tell(bob, f"{kind} {seconds + 1}")
        hear(bob)
        beside.append(bench.calls(seconds))
        rates.append(hear(bob)["rate"])
    pairs = [
        statistics.median(b) / statistics.median(a) for a, b in zip(alone, beside, strict=True)
    ]
    for name, all_turns in (("alone", alone), (kind, beside)):
        took = sorted(1e3 * each for turn in all_turns for each in turn)
        p50, p90, p99 = (took[int(share * len(took))] for share in (0.5, 0.9, 0.99))
        print(f"{name:9} {len(took)} calls: {p50:.2f} ms, p90 {p90:.2f}, p99 {p99:.2f}", flush=True)
    ratios = " ".join(f"{pair:.2f}" for pair in sorted(pairs))
    print(f"beside {statistics.median(rates) / 1e6:.0f} MB/s: {ratios}", flush=True)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=64, help="of one array")
    parser.add_argument("--rate", type=float, default=40.0, help="MB/s of each machine's link")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn, with and without")
    parser.add_argument("--transport", default="sockets", help="of both clients")
    parser.add_argument("--kinds", nargs="+", default=["upload", "transfer"])
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size, rate = chosen.megabytes << 20, 1e6 * chosen.rate
        bench = Bench(Path(folder), size, rate, chosen.transport)
        try:
            for kind in chosen.kinds:
                measure(bench, kind, chosen.turns, chosen.seconds)
        finally:
            bench.close()


if __name__ == "__main__":
    main()
