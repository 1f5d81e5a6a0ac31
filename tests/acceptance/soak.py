"""A soak: an hour of mixed load with faults; is the memory of every process flat, and the pace?

``python -m tests.acceptance.soak --minutes 60`` starts a lab of four hosts and
three client processes.  Round after round another client joins, something
breaks (mostly what kills nobody), the other client leaves; then it is calm for a
while, in which the values that the three get are counted, and after which the
memory of every process is looked at.  Machines get slower and faster in an hour, so
a fixed piece of work is timed in every calm while too, and what the pace owes to that
(by least squares) is taken out of it.

At the end it says for every process, and for the pace, by how much it changes in an
hour, with the 95% interval.  A process that was replaced starts anew: its level
is its own, the slope is that of all of one name.  So does a host that computes on a set of
devices for the first time: it keeps a JAX client for each, some MiB, and there are few sets.
The first minutes of a process do not count, since caches and pools fill.  It ends with 0
only when nothing was broken and everything was flat, which a short run cannot tell: its
intervals are too wide.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
from scipy.special import stdtrit

import pathways_lab as pw
from pathways_lab.timeline.log import Timeline
from pathways_lab.timeline.records import Event, Span
from tests.acceptance.many import MIB, held
from tests.acceptance.storm import KINDS, Client, Outcome, get_going, strike, working

DEADLY = ("kill", "lose", "drop control", "duplicate control")
"""Faults that end processes of the lab: few, or no process would be old enough."""
SELDOM = 12
CALM = 8.0
HOUR = 3600.0
_PAGES = [bytearray(4 * MIB) for _ in range(3)]
BLOCKS = 12
"""Samples that follow each other are no independent ones; so many means at most, of the longest."""
Samples = Sequence[tuple[float, float]]
Life = tuple[int, float, int]
"""Number and birth of a process, and how many sets of devices it knows."""


class Slope(NamedTuple):
    """level: median.  per_hour: its change, give or take *spread* (95%; inf: not known)."""

    level: float
    per_hour: float
    spread: float

    def verdict(self, most: float) -> str:
        """Whether it changes by at most so much in an hour, up (or down, if *most* is negative)."""
        sign = math.copysign(1.0, most)
        if sign * self.per_hour + self.spread <= abs(most):
            return "flat"
        grows = sign * self.per_hour - self.spread > abs(most)
        return ("GROWS" if sign > 0 else "FALLS") if grows else "not decided"


def slope(lives: Sequence[Samples]) -> Slope:
    """The common slope of some series of (seconds, value), each of which has a level of its own."""
    lives = [life for life in lives if len(life) > 1]
    longest = max((life[-1][0] - life[0][0] for life in lives), default=0.0)
    blocks = [found for life in lives if len(found := _blocks(life, longest / BLOCKS)) > 1]
    centred: list[tuple[float, float]] = []
    for life in blocks:
        at, level = (statistics.fmean(column) for column in zip(*life, strict=True))
        centred += [(time - at, value - level) for time, value in life]
    above = sum(x * y for x, y in centred)
    below = sum(x * x for x, _ in centred)
    level = statistics.median([v for life in lives for _, v in life]) if lives else math.nan
    free = len(centred) - len(blocks) - 1
    if not below or free < 1:
        return Slope(level, math.nan, math.inf)
    rise = above / below
    error = math.sqrt(sum((y - rise * x) ** 2 for x, y in centred) / free / below)
    return Slope(level, rise * HOUR, float(stdtrit(free, 0.975)) * error * HOUR)


def _blocks(life: Samples, seconds: float) -> list[tuple[float, float]]:
    """Means of samples within so many seconds."""
    found: dict[int, list[tuple[float, float]]] = {}
    for sample in life:
        found.setdefault(int((sample[0] - life[0][0]) // seconds), []).append(sample)
    return [
        (statistics.fmean(t for t, _ in part), statistics.fmean(v for _, v in part))
        for part in found.values()
    ]


def written(pid: int) -> int:
    """Bytes of memory that a process has to itself and has written to; 0 when it is gone.

    Libraries that nobody else on the machine has loaded just now are no part of it.
    """
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except FileNotFoundError:
        return held([pid])
    except OSError:
        return 0
    return 1024 * sum(
        int(n) for n in re.findall(r"^Private_Dirty: +(\d+) kB$", rollup, re.MULTILINE)
    )


class Sets:
    """The sets of devices that hosts have computed on in their present lives."""

    def __init__(self) -> None:
        self._version = 0
        self._known: dict[str, tuple[int, set[object]]] = {}

    def count(self, timeline: Timeline, named: dict[int, str]) -> dict[str, int]:
        """How many there are, by the names of processes; named: these, by number."""
        batch = timeline.since(self._version)
        self._version = batch.version
        bound = [
            tuple(map(tuple, record.args["devices"]))
            for record in batch.records
            if isinstance(record, Event) and record.kind == "slice-bound"
        ]
        for pid, name in named.items():
            before = self._known.get(name)
            known = before[1] if before and before[0] == pid else set()
            known |= {devices for devices in bound if name in {host for host, _ in devices}}
            self._known[name] = pid, known
        return {name: len(known) for name, (_, known) in self._known.items()}


@dataclass
class Memory:
    """What processes take, sampled.  warm: seconds of each that do not count."""

    warm: float
    lives: dict[str, dict[Life, list[tuple[float, float]]]] = field(default_factory=dict)

    def sample(self, named: dict[int, str], sets: dict[str, int]) -> None:
        """Look at this process and all below it.

        named: what some are called; "": not at all.  sets: see :class:`Sets`.
        """
        me = psutil.Process()
        for process in (me, *me.children(recursive=True)):
            try:
                born, module = process.create_time(), process.cmdline()[2:3]
            except psutil.Error:
                continue
            name = named.get(process.pid, module[0].rpartition(".")[2] if module else "?")
            now, taken = time.time(), written(process.pid)
            if name and taken and now - born > self.warm:
                lives = self.lives.setdefault(name, {})
                life = process.pid, born, sets.get(name, 0)
                lives.setdefault(life, []).append((now, taken / MIB))

    def slopes(self) -> dict[str, Slope]:
        """By name."""
        return {name: slope(list(lives.values())) for name, lives in sorted(self.lives.items())}


def labour() -> float:
    """Processor seconds for a fixed piece of work in Python and in memory."""
    begun, total = time.thread_time(), 0
    for number in range(100_000):
        total += number * number
    for page in (_PAGES[0], _PAGES[1]) * 2:
        _PAGES[2][:] = page
    return time.thread_time() - begun


@dataclass
class Pace:
    """Values per second, and seconds of :func:`labour` at that time; by time."""

    rates: list[tuple[float, float]] = field(default_factory=list)
    labours: list[tuple[float, float]] = field(default_factory=list)

    def steady(self) -> Slope:
        """Without what follows the labour: as if that always took its median."""
        rates, labours = np.array(self.rates), np.array([seconds for _, seconds in self.labours])
        because = np.stack([np.ones_like(labours), rates[:, 0], labours], axis=1)
        because -= because.mean(axis=0) * (0, 1, 1)
        found, *_ = np.linalg.lstsq(because, rates[:, 1])
        rates[:, 1] -= found[2] * (labours - np.median(labours))
        return slope([[(float(at), float(rate)) for at, rate in rates]])


def names(lab: pw.Lab, workers: Sequence[Client], passing: Sequence[Client]) -> dict[int, str]:
    """What processes are called that there are several of."""
    found = {os.getpid(): "kernel"}
    for island in lab.islands:
        for host in island.hosts:
            found[host.pid] = host.name
            found[host.worker_pid] = f"worker of {host.name}"
    return found | {w.pid: w.name for w in workers} | {p.pid: "" for p in passing}


def fill(lab: pw.Lab) -> None:
    """As many records as the kernel's timeline holds, so that it does not grow by this later."""
    on = lab.slice(2)
    f = pw.jit(lambda x: x + 1, on=on)
    for _ in range(20):
        f(1.0).result(timeout=60)
    on.release()
    spans: list[Span] = []
    while len(spans) < 20:  # records come later than values
        time.sleep(0.05)
        spans = [record for record in lab.timeline.records if isinstance(record, Span)]
    for _ in range(lab.timeline.capacity // len(spans) + 1):
        lab.timeline.extend(replace(span, args=dict(span.args)) for span in spans)


def soak(
    lab: pw.Lab, seconds: float, seed: int, tell: Callable[[str], object]
) -> tuple[Outcome, Memory, Pace]:
    """Work for so long; what was broken, what was taken, and the values per second when calm."""
    chance, begun = random.Random(seed), time.monotonic()
    memory, sets = Memory(min(180.0, seconds / 4)), Sets()
    pace = Pace()
    harmless = [kind for kind in KINDS if kind not in DEADLY]
    todo: list[str] = []
    number = 0
    with working(lab, 3, seed) as (workers, outcome, file):
        while time.monotonic() < begun + seconds:
            number += 1
            guest = Client(file, 100 + number, seed)
            try:
                get_going([guest])
                if not todo:
                    todo = chance.sample(harmless, len(harmless))
                kind = chance.choice(DEADLY) if number % SELDOM == SELDOM // 2 else todo.pop()
                came = strike(lab, kind, chance, [*workers, guest], outcome)
            finally:
                code = guest.end(120.0)
            outcome.take(guest, code)
            start, before = time.monotonic(), sum(w.results for w in workers)
            labours = []
            while time.monotonic() < start + CALM:
                time.sleep(CALM / 20)
                labours.append(labour())
            rate = (sum(w.results for w in workers) - before) / (time.monotonic() - start)
            if start > begun + memory.warm:
                pace.rates.append((start, rate))
                pace.labours.append((start, statistics.median(labours)))
            named = names(lab, workers, [guest])
            memory.sample(named, sets.count(lab.timeline, named))
            tell(
                f"{number:>4} {came}; then {rate:.0f} values a second, "
                f"labour {1e3 * statistics.median(labours):.2f} ms"
            )
    return outcome, memory, pace


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--mib", type=float, default=32.0, help="most that a process may grow, an hour"
    )
    parser.add_argument(
        "--slower", type=float, default=20.0, help="most that the pace may fall, %% an hour"
    )
    chosen = parser.parse_args()
    with pw.start(islands=2, hosts_per_island=2, devices_per_host=2, progress=False) as lab:
        fill(lab)
        outcome, memory, pace = soak(
            lab, chosen.minutes * 60, chosen.seed, lambda text: print(text, flush=True)
        )
    print(outcome)
    verdicts = []
    print(f"{'':<24}{'lives':>6}{'median':>12}{'change in an hour':>28}")
    for name, found in memory.slopes().items():
        verdicts.append(found.verdict(chosen.mib))
        lives = len({life[:2] for life in memory.lives[name]})
        print(f"{name:<24}{lives:>6}{_row(found, 'MiB')}  {verdicts[-1]}")
    labours = slope([[(at, 1e3 * seconds) for at, seconds in pace.labours]])
    print(f"{'labour':<30}{_row(labours, 'ms')}")
    print(f"{'values when calm':<30}{_row(slope([pace.rates]), '/s')}")
    steady = pace.steady()
    verdicts.append(steady.verdict(-chosen.slower / 100 * steady.level))
    print(f"{'  on a steady machine':<30}{_row(steady, '/s')}  {verdicts[-1]}")
    flat = all(verdict == "flat" for verdict in verdicts)
    print("everything was flat" if flat else "NOT everything was flat, as far as this run can tell")
    return int(bool(outcome.broken) or not flat)


def _row(found: Slope, unit: str) -> str:
    change = f"{found.per_hour:+.1f} +- {found.spread:.1f} {unit}"
    return f"{f'{found.level:.1f} {unit}':>12}{change:>28}"


if __name__ == "__main__":
    sys.exit(main())
