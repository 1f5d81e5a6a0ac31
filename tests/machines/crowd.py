"""Many machines: what it takes to form their lab, to join it, and to call one island of it.

The forming begins when the machines are up, with the start of the scheduler.  Clients have imported
what ``pw.connect`` needs before they connect.

``python -m tests.machines.crowd 4 32`` makes labs of so many machines, one after the other; each
machine is an island with one device.  Three clients work on islands of their own, and the first of
them on one more, whose machine is killed and comes back.  It must hold that nobody but that client
loses anything, that the reason names the machine, and that all results are right.

The numbers mean something on idle processors only: all machines share those of this one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.machines.bench import Machines
from tests.machines.group import Group, hear, tell

CLIENTS = 3
CALLS = 3 * 500 + 300 + 9 * 500
CLIENT = """
import json, os, statistics, sys, time
import distributed, numpy as np, pathways_lab as pw
connect = pw.connect
with distributed.Client(sys.argv[1]) as dask: dask.wait_for_workers(int(os.environ["COUNT"]))
def say(**what): print(json.dumps(what), flush=True)
begun = time.monotonic()
lab = connect(sys.argv[1])
say(connected=time.monotonic() - begun, islands=len(lab.islands))
def taken(call):
    begun = time.monotonic()
    call()
    return time.monotonic() - begun
class Place:
    def __init__(self, island):
        self.island, self.slice = island, lab.slice(1, island=island)
        self.add = pw.jit(lambda x: x + 1, on=self.slice)
        self.again()
    def again(self): self.value, self.count = self.add(np.zeros(8, np.float32)), 1
    def step(self):
        self.value, self.count = self.add(self.value), self.count + 1
    def wait(self): return bool((self.value.result() == self.count).all())
    def waited(self):
        self.step()
        self.wait()
    def many(self):
        for _ in range(500): self.step()
        self.wait()
places = [Place(island) for island in os.environ["ISLANDS"].split(",")]
for order in sys.stdin:
    if order == "cost\\n":
        for _ in range(3): places[0].many()
        begun = time.process_time()
        waited = [taken(places[0].waited) for _ in range(300)]
        many = [taken(places[0].many) / 500 for _ in range(9)]
        own = (time.process_time() - begun) / (300 + 9 * 500)
        say(waited=statistics.median(waited), pipelined=statistics.median(many), own=own)
        continue
    end, steps, wrong, lost, back = time.monotonic() + float(order), 0, 0, [], []
    while time.monotonic() < end:
        for place in places:
            try:
                place.step()
                wrong += not place.wait()
                steps += 1
            except pw.PathwaysError as error:
                lost.append(error.failure.message)
                gone = time.monotonic()
                while place.island not in [island.name for island in lab.islands]: time.sleep(0.2)
                place.slice.rebind()
                place.again()
                back.append(time.monotonic() - gone)
    say(steps=steps, wrong=wrong, lost=lost, back=back)
"""


LISTENS = """
import socket, time
while True:
    try: socket.create_connection(("sched", 8786)).close(); break
    except OSError: time.sleep(0.05)
"""
"""Dask's workers would wait for a scheduler that starts beside them for up to ten seconds."""


def imports(count: int) -> float:
    """Seconds in which so many processes import JAX and Dask, as many at a time as processors."""
    cores = os.cpu_count() or 1
    sample = min(count, 4 * cores)
    command = [sys.executable, "-c", "import jax, distributed"]
    begun = time.monotonic()
    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(lambda _: subprocess.run(command, check=True), range(sample)))
    return (time.monotonic() - begun) * count / sample


class Crowd:
    """A lab of so many machines, and its clients."""

    def __init__(self, count: int, folder: Path) -> None:
        self._names = [f"m{number}" for number in range(count)]
        self.machines = Machines(("sched", "note", *self._names), folder)
        self.begun = time.monotonic()
        self._group = Group(self.machines)
        self.clients: list[subprocess.Popen[str]] = []
        self.machines["note"].run(sys.executable, "-c", LISTENS)
        for name in self._names:
            self.work(name)

    def work(self, name: str) -> None:
        """Start the worker of a machine."""
        self._group.worker(name, "--island", name, "--devices", "1")

    def join(self, *islands: int) -> dict[str, Any]:
        """One more client, with slices on these islands; how long it took to connect."""
        names = ",".join(self._names[number] for number in islands)
        environment = {"COUNT": str(len(self._names)), "ISLANDS": names}
        self.clients.append(self._group.client("note", CLIENT, **environment))
        return hear(self.clients[-1])

    def busy(self) -> float:
        """Seconds of a processor that the control plane has taken so far."""
        network = os.readlink(f"/proc/{self.machines['sched'].pid}/ns/net")
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (
                    os.readlink(process / "ns/net") == network
                    and b"control_plane.process" in (process / "cmdline").read_bytes()
                ):
                    told = (process / "stat").read_text().rpartition(")")[2].split()
                    return (int(told[11]) + int(told[12])) / os.sysconf("SC_CLK_TCK")
        raise RuntimeError("the control plane has ended")

    def close(self) -> None:
        """End everything."""
        self._group.close()
        self.machines.close()


def measure(count: int, seconds: float) -> list[str]:
    """Form a lab, say what it took, lose a machine; the problems."""
    alone = imports(count)
    with tempfile.TemporaryDirectory() as folder:
        crowd = Crowd(count, Path(folder))
        try:
            last = count - 1
            first = crowd.join(0, last)
            formed = time.monotonic() - crowd.begun
            print(f"{count} machines: {first['islands']} islands after {formed:.1f} s;", end=" ")
            print(f"importing JAX and Dask so often takes {alone:.1f} s ({formed / alone:.2f})")
            for number in range(1, CLIENTS):
                print(f"client {number + 1} connected in {crowd.join(number)['connected']:.2f} s")
            busy = crowd.busy()
            tell(crowd.clients[0], "cost")
            cost = hear(crowd.clients[0])
            control = (crowd.busy() - busy) / CALLS
            print(f"a call on one island: {1e6 * cost['pipelined']:.0f} us pipelined,", end=" ")
            print(f"{1e3 * cost['waited']:.2f} ms waited for;", end=" ")
            print(f"{1e6 * cost['own']:.0f} us of the client's processor,", end=" ")
            print(f"{1e6 * control:.0f} us of the control plane's", flush=True)
            for client in range(CLIENTS):
                tell(crowd.clients[client], str(seconds))
            time.sleep(seconds / 10)
            victim = f"m{last}"
            crowd.machines.kill(victim)
            crowd.machines.boot(victim)
            crowd.work(victim)
            done = [hear(client) for client in crowd.clients[:CLIENTS]]
        finally:
            crowd.close()
    print(f"{victim} was lost and came back: {done}", flush=True)
    problems = [f"client {n + 1} has wrong results" for n, each in enumerate(done) if each["wrong"]]
    problems += [
        f"client {n + 1} lost {each['lost']}" for n, each in enumerate(done[1:], 1) if each["lost"]
    ]
    if not done[0]["back"]:
        problems.append(f"{victim} did not come back")
    problems += [f"a wrong reason: {why}" for why in done[0]["lost"] if victim not in why]
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("counts", type=int, nargs="+", help="of machines, four at least")
    parser.add_argument("--seconds", type=float, default=30.0, help="of work beside a loss")
    chosen = parser.parse_args()
    problems = [text for count in chosen.counts for text in measure(count, chosen.seconds)]
    sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
