"""Real timelines whose causes of waiting are known beforehand, from a lab on this machine.

Problem: a simulation shows that the causes are right where records are as the simulator writes
them; hosts write them late, in batches, and by clocks of their own.

    python -m tests.timeline.real 50          # so many runs; those that are wrong

How: each run injects one cause, for seconds that it knows, and its gap is looked at: the time
before its last computation, on the devices that wait for it.

Rule for maintainers: what is expected is what was injected.  A machine may be slow, so a cause may
be told for longer than it was injected, by what the machinery took; never for less, and no cause
that was not injected may be told at all.

Paper: section 5.1 (dispatch overheads), figure 12 (where time goes).
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np

import pathways_lab as pw
from pathways_lab.timeline import queries, waits
from pathways_lab.timeline.machine import Lane
from pathways_lab.timeline.records import Event, Span

MEMORY_LIMIT = 24 << 20
"""Bytes of a device."""

LEAST = 0.02
"""Seconds of a cause that are not worth a word: by so much clocks and reports may be off."""

Told = dict[str, float]
"""Seconds by cause."""


class Runs:
    """A lab, a second client of it, and what both call again and again."""

    def __init__(self, lab: pw.Lab, other: pw.Lab) -> None:
        self.lab, self.other = lab, other
        self.left, self.right = (
            lab.slice((2,), ("x",), island=island) for island in ("island0", "island1")
        )
        self.elsewhere, self.theirs = (
            other.slice((1,), ("x",), island=island) for island in ("island0", "island1")
        )
        self.x, self.one = np.zeros(2, np.float32), np.zeros(1, np.float32)
        self.numbers = itertools.count()
        self.big = pw.jit(lambda v: jnp.zeros((14 << 18,), jnp.float32) + v[0], on=self.right)
        self.least = pw.jit(lambda v: v + 1, on=self.right)
        self.next = pw.jit(lambda v: v + 1, on=self.left)
        jax.block_until_ready([self.least(self.x), self.next(self.x)])
        self.big(self.x).block_until_ready()
        chain = self.program(lambda v: self.least(self.next(v)))
        chain(self.x).block_until_ready()

    def program(self, of: Callable[[object], object]) -> pw.Program:
        """A program of a name of its own."""
        return pw.program(of, name=f"run{next(self.numbers)}")

    def gap(self, program: str) -> Told:
        """Seconds by cause of the devices that waited longest before the last computation of
        *program*, since it was submitted."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            records = self.lab.timeline.records
            mine = [r for r in records if isinstance(r, Span | Event) and r.program == program]
            if any(isinstance(r, Event) and r.kind == "finished" for r in mine):
                break
            time.sleep(0.02)
        time.sleep(0.3)  # hosts report in batches
        records = self.lab.timeline.records
        mine = [r for r in records if isinstance(r, Span | Event) and r.program == program]
        since = min(r.time for r in mine if isinstance(r, Event) and r.kind == "submitted")
        gangs = [r for r in mine if isinstance(r, Span) and r.kind == "gang"]
        last = max((g for g in gangs if g.island == "island1"), key=lambda g: g.start)
        told = queries.waits(records, since, last.start)
        found: list[Told] = []
        for device in last.devices:
            sums: Told = {}
            for cause, start, end in told[Lane(last.island, last.host, device)]:
                sums[cause] = sums.get(cause, 0.0) + end - start
            found.append(sums)
        return min(found, key=lambda sums: sums.get(waits.RUNNING, 0.0))

    # --- each: what it injects, and how long, and the program that waited --------------------

    def input(self, seconds: float) -> tuple[Told, str]:
        """An earlier computation, on the other island."""
        slow = pw.jit(pw.emulated(1e3 * seconds), on=self.left)
        slow(self.x).block_until_ready()
        step = self.program(lambda v: self.least(slow(v)))
        step(self.x).block_until_ready()
        return {waits.INPUT: seconds}, step.name

    def withheld(self, seconds: float) -> tuple[Told, str]:
        """Places that are granted late, since the devices would only wait: that is no dispatch."""
        slow = pw.jit(pw.emulated(1e3 * seconds / 4), on=self.left)
        slow(self.x).block_until_ready()
        self.lab.window = 0.0
        try:
            step = self.program(lambda v: self.least(slow(slow(slow(slow(v))))))
            step(self.x).block_until_ready()
        finally:
            self.lab.window = 0.1
        return {waits.INPUT: seconds}, step.name

    def transfer(self, seconds: float) -> tuple[Told, str]:
        """An input that takes long to come."""
        step = self.program(lambda v: self.least(self.next(v)))
        self.lab.dcn(latency=seconds)
        try:
            step(self.x).block_until_ready()
        finally:
            self.lab.dcn()
        return {waits.TRANSFER: seconds}, step.name

    def compile(self, seconds: float) -> tuple[Told, str]:
        """A function that nobody has compiled: how long that takes, compilers know."""
        size = 300 + next(self.numbers)

        def long(v: jax.Array) -> jax.Array:
            for n in range(size):
                v = jnp.sin(v) * n
            return v

        of = pw.jit(long, on=self.right)
        step = self.program(lambda v: of(v))
        step(self.x).block_until_ready()
        return {waits.COMPILE: 0.1}, step.name

    def order(self, seconds: float) -> tuple[Told, str]:
        """Another client has one of the devices."""
        slow = pw.jit(pw.emulated(2e3 * seconds), on=self.theirs)
        slow(self.one).block_until_ready()
        before = self.launches()
        busy = slow(self.one)
        self.until_it_runs(before, 1)
        step = self.program(lambda v: self.least(v))
        step(self.x).block_until_ready()
        busy.block_until_ready()
        return {waits.ORDER: seconds}, step.name

    def behind(self, seconds: float) -> tuple[Told, str]:
        """One of the devices is another client's next, whose input is not there yet."""
        slow = pw.jit(pw.emulated(2e3 * seconds), on=self.elsewhere)
        last = pw.jit(lambda v: v + 1, on=self.theirs)
        theirs = self.program(lambda v: last(slow(v)))
        theirs(self.one).block_until_ready()
        before = self.launches()
        first = theirs(self.one)
        self.until_it_runs(before, 1)
        step = self.program(lambda v: self.least(v))
        step(self.x).block_until_ready()
        first.block_until_ready()
        return {waits.ORDER: seconds}, step.name

    def memory(self, seconds: float) -> tuple[Told, str]:
        """Memory of one device that another client's run has, which computes elsewhere."""
        large = pw.jit(lambda v: jnp.zeros((16 << 18,), jnp.float32) + v[0], on=self.theirs)
        slow = pw.jit(pw.emulated(2e3 * seconds), on=self.elsewhere)
        join = pw.jit(lambda a, b: a[:1] + b, on=self.theirs)
        least = pw.jit(lambda v: v + 1, on=self.elsewhere)
        hold = self.program(lambda v: join(large(v), least(least(slow(v)))))
        hold(self.one).block_until_ready()
        before = self.launches()
        self.lab.window = 0.0  # the place of what frees the memory is not granted ahead
        try:
            held = hold(self.one)
            self.until_it_runs(before, 2)
            step = self.program(lambda v: self.big(v))
            step(self.x).block_until_ready()
            held.block_until_ready()
        finally:
            self.lab.window = 0.1
        return {waits.MEMORY: seconds}, step.name

    def launches(self) -> int:
        """How many computations of the other client have been launched."""
        return sum(
            isinstance(r, Event) and r.kind == "launched" and r.client == "bob"
            for r in self.lab.timeline.records
        )

    def until_it_runs(self, before: int, more: int) -> None:
        """Until the other client has launched so many *more* than *before*."""
        while self.launches() < before + more:
            time.sleep(0.005)


KINDS = ("input", "withheld", "transfer", "compile", "order", "behind", "memory")


def wrong(runs: Runs, kind: str, seed: int) -> str:
    """What is wrong about the causes of a run; "" for nothing."""
    injected, program = getattr(runs, kind)(random.Random(seed).uniform(0.25, 0.6))
    told = runs.gap(program)
    short = [cause for cause, least in injected.items() if told.get(cause, 0.0) < least - LEAST]
    may = {*injected, waits.DISPATCH, waits.NOTHING, waits.RUNNING} | (
        {waits.INPUT} if kind == "transfer" else set()
    )
    false = [cause for cause, many in told.items() if many > LEAST and cause not in may]
    if short or false:
        return f"{kind} {seed}: injected {injected}, told {told}"
    return ""


@contextmanager
def machine() -> Iterator[Runs]:
    """A lab of two islands, with two clients."""
    with pw.start(2, 1, 2, memory=MEMORY_LIMIT, platform="cpu", progress=False) as lab:
        assert lab.embedded is not None
        with pw.Lab(lab.embedded.control, name="bob") as other:
            yield Runs(lab, other)


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    with machine() as made:
        said = [
            told for number in range(count)
            if (told := wrong(made, KINDS[number % len(KINDS)], number))
        ]  # fmt: skip
    sys.exit("\n".join(said) if said else f"{count} runs: all causes are right")
