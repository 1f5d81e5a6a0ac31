"""Random faults of machines and networks, for as long as one likes: nothing but the dead is lost.

``python -m tests.machines.storm 600`` has two clients compute on four machines, two of which are
one island, while links are unplugged, machines cut off from each other and booted.  It must
hold that

* only values of a machine that was booted are lost, and the reason names that machine;
* whatever is waited for ends, and is right;
* a machine that was booted is used again, by both clients.

Rule for maintainers: a fault that shall cost nothing is shorter than the lab's patience.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from tests.machines.bench import Machines
from tests.machines.group import Group

SILENCE = 12
SHORT = 5.0
"""Seconds of faults that cost nothing: TCP tries again after up to twice as long."""
WORKERS = {"one": "west", "two": "west", "three": "east", "four": "north"}
REMEMBERED = 90.0
"""Seconds after its boot for which values of a machine may be lost."""

CLIENT = """
import json, os, sys, time
import distributed, jax, numpy as np, pathways_lab as pw
from jax.sharding import PartitionSpec as P
with distributed.Client(sys.argv[1]) as client: client.wait_for_workers(4)
lab = pw.connect(sys.argv[1], silence=float(os.environ["SILENCE"]))
def say(**what): print(json.dumps(what), flush=True)
class Place:
    def __init__(self, island, devices):
        self.island, self.devices = island, devices
        self.slice = lab.slice(devices, axes=("x",), island=island)
        spec = P("x") if devices > 1 else P()
        self.add = pw.jit(lambda x: x + 1, on=self.slice, in_shardings=spec, out_shardings=spec)
        self.total = pw.jit(lambda x: x.sum(), on=self.slice, in_shardings=spec)
        self.value, self.count = self.add(np.arange(8.0)), 1
    def step(self):
        value = self.add(self.value)
        right = float(np.asarray(self.total(value))) == 28.0 + 8.0 * (self.count + 1)
        if self.count % 10 == 0:
            right = right and (value.result() == np.arange(8.0) + self.count + 1).all()
        if not right: say(wrong=repr(self.slice), count=self.count)
        self.value, self.count = value, self.count + 1
    def again(self):
        while True:
            try: return self.__init__(self.island, self.devices)  # when its machine is back
            except pw.PathwaysError: time.sleep(0.5)
places = [Place("west", 2), Place("east", 1), Place("north", 1)]
say(ready=True)
end, done, lost = time.monotonic() + float(os.environ["SECONDS"]), 0, 0
while time.monotonic() < end:
    for place in places:
        began = time.monotonic()
        try: place.step()
        except pw.PathwaysError as error:
            say(lost=error.failure.message, island=place.island)
            lost += 1
            place.again()
            say(back=place.island, after=time.monotonic() - began)
            began = time.monotonic()
        took = time.monotonic() - began
        if took > 30.0: say(slow=took, of=place.island)
        done += 1
say(done=done, lost=lost)
"""


class Storm:
    """One run.  wrong: what must not have been."""

    def __init__(self, seed: int, seconds: float, folder: Path) -> None:
        self.wrong: list[str] = []
        self.counts: dict[str, int] = {}
        self._seconds = seconds
        self._luck = random.Random(seed)
        self._booted: dict[str, float] = {}
        self._machines = Machines(("sched", *WORKERS, "ann", "bob"), folder)
        self._group = Group(self._machines, "--host", "10.77.0.1")

    def run(self) -> None:
        """Until the time is over and the clients have ended."""
        for machine in WORKERS:
            self._work(machine)
        clients = []
        for name in ("ann", "bob"):
            clients.append(self._client(name))
            self._hear(name, clients[-1], ready=True)
        hearing = [
            threading.Thread(target=self._hear, args=each)
            for each in zip(("ann", "bob"), clients, strict=True)
        ]
        for thread in hearing:
            thread.start()
        end = time.monotonic() + self._seconds - 2 * SILENCE
        while time.monotonic() < end and not self.wrong:
            self._fault()
            time.sleep(self._luck.uniform(1.0, 2 * SHORT))
        for thread, client in zip(hearing, clients, strict=True):
            thread.join(self._seconds + 60.0)
            if client.poll() is None and thread.is_alive():
                self.wrong.append("a client still waits")

    def close(self) -> None:
        self._group.close()
        self._machines.close()

    def _work(self, machine: str) -> None:
        self._group.worker(machine, "--devices", "1", "--island", WORKERS[machine])

    def _client(self, name: str) -> subprocess.Popen[str]:
        told = {"SECONDS": str(self._seconds), "SILENCE": str(SILENCE)}
        return self._group.client(name, CLIENT, **told)

    def _fault(self) -> None:
        kind = self._luck.choice(("unplug", "cut", "cut", "boot"))
        one, other = self._luck.sample([*WORKERS, "ann", "bob", "sched"], 2)
        lasts = self._luck.uniform(0.5, SHORT)
        if kind == "boot":
            one = self._luck.choice([*WORKERS])
            if time.monotonic() - max(self._booted.values(), default=-REMEMBERED) < REMEMBERED / 3:
                return  # it takes a while until they are back
            self._booted[one] = time.monotonic()
            self._machines.boot(one)
            self._work(one)
        elif kind == "unplug":
            self._machines.unplug(one)
            time.sleep(lasts)
            self._machines.plug(one)
        else:
            self._machines.cut(one, other)
            time.sleep(lasts)
            self._machines.plug(one)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        print(f"{kind} {one} {other if kind == 'cut' else ''} {lasts:.1f} s", flush=True)

    def _hear(self, name: str, client: subprocess.Popen[str], ready: bool = False) -> None:
        assert client.stdout
        for line in client.stdout:
            if not line.startswith("{"):
                print(name, line, end="", flush=True)
                continue
            said = json.loads(line)
            if "ready" in said and ready:
                return
            print(name, line, end="", flush=True)
            if "wrong" in said or "slow" in said:
                self.wrong.append(f"{name}: {line}")
            elif "island" in said:
                self._lost(name, said)
        if client.wait():
            self.wrong.append(f"{name} ended with {client.returncode}")

    def _lost(self, name: str, said: dict[str, str]) -> None:
        recent = [m for m, at in self._booted.items() if time.monotonic() - at < REMEMBERED]
        hosts = [f"{WORKERS[machine]}/{machine}" for machine in recent]
        if said["island"] not in [WORKERS[machine] for machine in recent]:
            self.wrong.append(f"{name}: nothing of {said['island']} was booted: {said['lost']}")
        elif not any(host in said["lost"] for host in hosts):
            self.wrong.append(f"{name}: the reason names none of {hosts}: {said['lost']}")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds", type=float)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="storm-") as folder:
        storm = Storm(options.seed, options.seconds, Path(folder))
        try:
            storm.run()
        finally:
            storm.close()
    print(storm.counts, *(storm.wrong or ["nothing is wrong"]), sep="\n")
    raise SystemExit(bool(storm.wrong))


if __name__ == "__main__":
    main()
