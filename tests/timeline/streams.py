"""Streams of items as a lab sends them, in columns where it does so, with what may go wrong."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

from pathways_lab.timeline.packed import About, Granted, Item, Row
from pathways_lab.timeline.records import Event, Span
from pathways_lab.timeline.records_of import Placing

ISLAND, CLIENT = "island0", "kernel-1"
Columns = tuple[list[float], list[float], list[float], list[float]]


def row(
    columns: Columns, run: int = 1, step: int = 0, host: str = f"{ISLAND}/host0", *,
    devices: tuple[int, ...] = (0, 1), nodes: Sequence[str] = ("f",), announced: int = 0,
    poisoned: frozenset[int] = frozenset(), opens: bool = False, program: str = "p",
    offset: float = 0.0,
) -> Row:  # fmt: skip
    """Gangs of one host; columns: when called, returned, started, ended."""
    kinds = tuple(dict.fromkeys(nodes))
    abouts = tuple(About(program, n, CLIENT, f"a.py:{i}: {n}(x)", 7, devices)
                   for i, n in enumerate(kinds))  # fmt: skip
    numbers = tuple(kinds.index(nodes[at % len(nodes)]) for at in range(len(columns[0])))
    first = columns[0][0]
    called, returned, start, end = (array("d", column).tobytes() for column in columns)
    return Row(
        ISLAND, host, True, abouts, numbers if len(kinds) > 1 else (), run, step, 100 * run + step,
        poisoned, announced, opens, (first - 3e-5, first - 2e-5, first - 1e-5, first), offset,
        (called, returned, start, end),
    )  # fmt: skip


def granted(
    time: float, run: int, steps: int, hosts: Sequence[str], first: int = 0, program: str = "p",
    node: str = "f",
) -> Granted:  # fmt: skip
    """Places for the steps of a run from *first* on."""
    gangs = tuple(
        (at - first, at, node, 7, "a.py:0: f(x)", tuple(hosts)) for at in range(first, steps)
    )
    return Granted(time, run, 0, 100 * run + first, Placing(ISLAND, program, CLIENT, gangs))


class Stream:
    """Runs on two slices of one island, one after the other.

    calm: nothing is out of the ordinary, so that everything can be folded in columns.
    """

    def __init__(self, seed: int, hosts: int = 2, calm: bool = False) -> None:
        self.chance, self.calm = random.Random(seed), calm
        self.hosts = [f"{ISLAND}/host{n}" for n in range(hosts)]
        self.items: list[Item] = [
            Event("host-joined", 0.0, ISLAND, host, args={"devices": 2}) for host in self.hosts
        ]
        self.free = dict.fromkeys(self.hosts, 1.0)
        self.now = 1.0

    def seldom(self, share: float) -> bool:
        return not self.calm and self.chance.random() < share

    def run(self, run: int, steps: int) -> None:
        """One more run of so many steps."""
        chance = self.chance
        hosts = [self.hosts[0]] if self.seldom(0.3) else self.hosts
        devices = (0,) if self.seldom(0.2) else (0, 1)
        program = f"p{run % 2}"
        known = not self.seldom(0.2)
        if known:
            edges = [[at - 1] if at and chance.random() < 0.8 else [] for at in range(steps)]
            told = [[False, "f", 7, 4, after, "a.py:0: f(x)"] for after in edges]
            self.items.append(
                Event("plan", self.now, program=program, client=CLIENT,
                      args={"plan": f"k{run}", "steps": told})
            )  # fmt: skip
        of = {"run": run, "program": program, "client": CLIENT}
        if not self.seldom(0.1):
            self.items.append(Event("submitted", self.now, **of, args={"plan": f"k{run}"}))
        if not self.seldom(0.1):
            at = self.now + (chance.uniform(0, 0.2) if self.seldom(0.2) else 0.0)
            window = granted(at, run, steps, hosts, program=program)
            self.items += window.records() if self.seldom(0.2) else [window]
        if self.seldom(0.1):
            at = self.now + chance.uniform(0, 0.1)
            self.items.append(Span("compile", self.now, at, ISLAND, hosts[0], node="f"))
        if self.seldom(0.15):
            at = self.now + chance.uniform(0, 0.1)
            self.items.append(
                Span("transfer", self.now, at, ISLAND, hosts[0], devices, run, 0, program, "f")
            )
        pieces = [piece for host in hosts for piece in self._pieces(run, steps, host, devices)]
        if self.seldom(0.3):
            chance.shuffle(pieces)
        self.items += [part for piece in pieces for part in piece]
        self.now = max(self.free.values()) - chance.uniform(0, 0.01)
        if not self.seldom(0.2):
            kind = "failed" if self.seldom(0.1) else "finished"
            self.items.append(Event(kind, self.now, **of))

    def _pieces(
        self, run: int, steps: int, host: str, devices: tuple[int, ...]
    ) -> list[list[Item]]:
        chance, out = self.chance, []
        nodes = ("f", "g") if self.seldom(0.3) else ("f",)
        first = 0
        while first < steps:
            last = steps if chance.random() < 0.6 else chance.randrange(first, steps) + 1
            columns: Columns = ([], [], [], [])
            time = max(self.free[host], self.now) + self._gap()
            for _ in range(first, last):
                start = time + self._gap()
                end = start + chance.choice((0.0, 2e-5, 1e-4, 0.003, 0.06))
                if self.seldom(0.02):
                    start -= 0.01
                called = columns[1][-1] if columns[0] else start
                if chance.random() < 0.8:
                    called = max(called, start)
                for column, value in zip(columns, (called, called + 1e-6, start, end), strict=True):
                    column.append(value)
                time = end
            self.free[host] = time
            announced = chance.randrange(last - first + 1) if self.seldom(0.2) else 0
            poisoned = frozenset({0}) if self.seldom(0.05) else frozenset[int]()
            made = row(
                columns, run, first, host, devices=devices, nodes=nodes, announced=announced,
                poisoned=poisoned, opens=not first, program=f"p{run % 2}", offset=0.0,
            )  # fmt: skip
            told = [
                Event("launched", columns[0][at], ISLAND, host, run, first + at, f"p{run % 2}",
                      made.about(at).node, CLIENT,
                      {"devices": devices, "line": made.about(at).line, "slice": 7,
                       "seq": made.seq + at})
                for at in range(announced)
            ]  # fmt: skip
            body: list[Item] = list(made.records()) if self.seldom(0.15) else [made]
            out.append([*told, *body])
            first = last
        return out

    def _gap(self) -> float:
        return self.chance.choice((0.0, 1e-6, 5e-5, 0.001, 0.05))


def stream(seed: int, runs: int = 8, hosts: int = 2, calm: bool = False) -> list[Item]:
    """All that *runs* runs say."""
    made = Stream(seed, hosts, calm)
    for run in range(1, runs + 1):
        made.run(run, made.chance.randrange(1, 12))
    return made.items
