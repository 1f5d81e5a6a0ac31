"""A storm: real faults, one after the other, while client processes work.

``python -m tests.acceptance.storm --faults 200`` starts a lab of four hosts and
four client processes that compute on both islands and between them, and
breaks something at random again and again.  After every fault it looks whether
it came out as was said beforehand; at the end, whether every value of every
client came right or failed with a reason, and whether nothing is left on any
device.  It prints the times to detection and to recovery.

Some of what it does leaves no run failed (slow, stopped or partitioned hosts,
late messages, full memory, dying clients): it counts failures there.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pathways_lab as pw
from pathways_lab.client.chaos.fault_report import Fault
from pathways_lab.timeline.records import Sample

ROOT = Path(__file__).parents[2]
HOSTS = tuple(f"island{i}/host{h}" for i in range(2) for h in range(2))

Draw = Callable[[pw.Lab, random.Random], Fault]


def _host(chance: random.Random) -> str:
    return chance.choice(HOSTS)


def _ends(chance: random.Random) -> tuple[str, str]:
    """Two ends of a connection, of which hosts of one island are none."""
    a, b = chance.sample(("island0", "island1"), 2)
    return chance.choice(((a, b), (f"{a}/host{chance.randrange(2)}", b)))


KINDS: dict[str, Draw] = {
    "kill": lambda lab, c: lab.chaos.kill(_host(c)),
    "lose": lambda lab, c: lab.chaos.lose(c.choice(("island0", "island1"))),
    "hang": lambda lab, c: lab.chaos.hang(_host(c), c.choice((1.0, 5.0))),
    "slow": lambda lab, c: lab.chaos.slow(_host(c), c.choice((2, 5)), 3.0),
    "delay": lambda lab, c: lab.chaos.delay(*_ends(c), ms=c.choice((5, 80)), seconds=3.0),
    "delay control": lambda lab, c: lab.chaos.delay(_host(c), "control", ms=20, seconds=3.0),
    "partition": lambda lab, c: lab.chaos.partition(*_ends(c), seconds=c.choice((1.0, 4.0))),
    "drop": lambda lab, c: lab.chaos.drop(*_ends(c)),
    "drop control": lambda lab, c: lab.chaos.drop(*c.sample((_host(c), "control"), 2)),
    "duplicate": lambda lab, c: lab.chaos.duplicate(*_ends(c)),
    "duplicate control": lambda lab, c: lab.chaos.duplicate(*c.sample((_host(c), "control"), 2)),
    "fill memory": lambda lab, c: lab.chaos.fill_memory(_host(c)),
    "lose client": lambda lab, c: lab.chaos.lose_client(),
}


class Client:
    """One client process.  seen: what it has said last.  ended: its exit code."""

    def __init__(self, file: Path, number: int, seed: int) -> None:
        self.name = f"worker{number}"
        self.seen: dict[str, Any] = {
            "results": 0, "failed": {}, "last": {}, "wrong": [], "longest": 0.0,
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.acceptance.storm_client"]
        self._process = subprocess.Popen(
            [*command, str(file), self.name, str(seed * 100 + number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):
                self.seen = json.loads(line)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def results(self) -> int:
        return int(self.seen["results"])

    @property
    def failures(self) -> int:
        return sum(self.seen["failed"].values())

    def end(self, seconds: float) -> int | None:
        """Let it end; its exit code, None when it had to be killed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            code: int | None = self._process.wait(seconds)
            self._thread.join(5.0)
        except subprocess.TimeoutExpired:
            code = None
        if code is None:
            self._process.kill()
            self._process.wait()
        return code


@dataclass
class Outcome:
    """What a storm has shown.  broken: what was not as it must be."""

    faults: list[tuple[str, Fault]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    results: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    longest: float = 0.0

    def take(self, client: Client, code: int | None) -> None:
        """What a client has seen that ended with *code*."""
        seen = client.seen
        self.results += seen["results"]
        self.longest = max(self.longest, seen["longest"])
        for reason, times in seen["failed"].items():
            self.failed[reason] = self.failed.get(reason, 0) + times
            if reason.startswith("unexplained"):
                self.broken.append(f"{client.name}: {reason}")
        self.broken += [f"{client.name}: {wrong}" for wrong in seen["wrong"]]
        if code != 0:
            self.broken.append(f"{client.name} ended with {code}")

    def __str__(self) -> str:
        lines = [f"{'fault':<20}{'times':>6}{'noticed after, s':>24}{'well again after, s':>24}"]
        for kind in (*KINDS, "all"):
            mine = [f for k, f in self.faults if kind in (k, "all")]
            if mine:
                noticed = _times([f.detected for f in mine])
                well = _times([f.recovered for f in mine])
                lines.append(f"{kind:<20}{len(mine):>6}{noticed:>24}{well:>24}")
        lines.append("(median, worst)")
        lines.append(
            f"{self.results} values came right, {sum(self.failed.values())} failed with a reason"
            f" {self.failed}; nobody waited longer than {self.longest:.1f} s for one"
        )
        lines += [f"BROKEN: {what}" for what in self.broken] or ["nothing was broken"]
        return "\n".join(lines)


def _times(seconds: list[float | None]) -> str:
    known = [s for s in seconds if s is not None]
    return f"{statistics.median(known):.2f}, {max(known):.2f}" if known else "-"


@contextlib.contextmanager
def working(lab: pw.Lab, count: int, seed: int) -> Iterator[tuple[list[Client], Outcome, Path]]:
    """So many clients at work; afterwards the outcome has what they saw and what they left.

    With the invitation, for clients that come later.
    """
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lab.json"
        lab.invite(file)
        clients = [Client(file, n, seed) for n in range(count)]
        try:
            get_going(clients)
            yield clients, outcome, file
        finally:
            codes = [client.end(120.0) for client in clients]
    for client, code in zip(clients, codes, strict=True):
        outcome.take(client, code)
    outcome.broken += left_behind(lab)


def get_going(clients: list[Client]) -> None:
    """Wait until each has got some values."""
    until = time.monotonic() + 300.0
    while min(client.results for client in clients) < 5:
        assert time.monotonic() < until, "the clients do not get going"
        time.sleep(0.05)


def left_behind(lab: pw.Lab, seconds: float = 15.0) -> list[str]:
    """What is there still although all others have left."""
    until = time.monotonic() + seconds
    while True:
        used: dict[tuple[str, int], float] = {}
        for record in lab.timeline.records:
            if isinstance(record, Sample) and record.name == "memory":
                used[record.host, int(record.args["device"])] = record.value
        bytes_ = {place: held for place, held in used.items() if held}
        slices = lab.session.connection.topology["slices"]
        others = [name for name in lab.clients if name != lab.name]
        if not (bytes_ or slices or others):
            return []
        if time.monotonic() > until:
            return [f"left behind: bytes {bytes_}, {len(slices)} slices, clients {others}"]
        time.sleep(0.1)


def storm(
    lab: pw.Lab,
    faults: int,
    clients: int = 4,
    seed: int = 0,
    kinds: tuple[str, ...] = tuple(KINDS),
    tell: Callable[[str], object] = lambda text: None,
) -> Outcome:
    """So many faults under the load of so many clients; all *kinds* in turn, in random order."""
    chance = random.Random(seed)
    todo: list[str] = []
    with working(lab, clients, seed) as (workers, outcome, _):
        for number in range(faults):
            if not todo:
                todo = list(kinds)
                chance.shuffle(todo)
            kind = todo.pop()
            try:
                said = strike(lab, kind, chance, workers, outcome)
            except pw.PathwaysError as error:
                said = f"{kind} could not be begun: {error}"
                outcome.broken.append(said)
            tell(f"{number + 1:>4} {said}")
    return outcome


def strike(
    lab: pw.Lab, kind: str, chance: random.Random, workers: list[Client], outcome: Outcome
) -> str:
    """One fault, until all go on; what came of it, in words and in the outcome."""
    failed, results = (-sum(w.failures for w in workers), -sum(w.results for w in workers))
    with contextlib.redirect_stdout(io.StringIO()):
        fault = KINDS[kind](lab, chance)
        fault.report()
    outcome.faults.append((kind, fault))
    _until_results(workers, outcome, kind)
    failed += sum(w.failures for w in workers)
    results += sum(w.results for w in workers)
    if not fault.ok:
        outcome.broken.append(repr(fault))
    if fault.expected.spares and failed:
        why = {w.name: w.seen["last"] for w in workers if w.failures}
        outcome.broken.append(f"{failed} values failed, and nothing was to: {fault.title}; {why}")
    return (
        f"{fault.title}: {'ok' if fault.ok else 'NOT OK'},"
        f" noticed {_times([fault.detected])}, well again {_times([fault.recovered])};"
        f" clients: {results} right, {failed} failed"
    )


def _until_results(workers: list[Client], outcome: Outcome, kind: str) -> None:
    """Every client goes on: it gets two more values right."""
    enough = [w.results + 2 for w in workers]
    until = time.monotonic() + 100.0
    while any(w.results < n for w, n in zip(workers, enough, strict=True)):
        if time.monotonic() > until:
            stuck = [w.name for w, n in zip(workers, enough, strict=True) if w.results < n]
            outcome.broken.append(f"after {kind}: {', '.join(stuck)} got no values for 100 s")
            return
        time.sleep(0.05)


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", choices=tuple(KINDS), default=tuple(KINDS))
    chosen = parser.parse_args()
    with pw.start(islands=2, hosts_per_island=2, devices_per_host=2, progress=False) as lab:
        outcome = storm(
            lab, chosen.faults, chosen.clients, chosen.seed, tuple(chosen.kinds),
            lambda text: print(text, flush=True),
        )  # fmt: skip
    print(outcome)
    return int(bool(outcome.broken))


if __name__ == "__main__":
    sys.exit(main())
