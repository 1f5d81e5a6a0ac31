"""Simulated timelines whose causes of waiting are known beforehand.

Problem: a picture that names a wrong cause teaches something false, and records alone do not say
what is right.  So a scenario injects each cause, for seconds that it knows, into the simulator: the
real control plane and the real launcher decide, and records come as they come.

    python -m tests.timeline.truth 500        # so many scenarios; the first one that is wrong

Rule for maintainers: what is expected is worked out from what was injected, never from records.

Paper: section 5.1 (dispatch overheads), figure 12 (where time goes).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.program import Call, Program, Signature, Value
from pathways_lab.sim.machine import Costs, FunctionCost, Machine
from pathways_lab.sim.simulate import Load, simulate
from pathways_lab.timeline.machine import Lane
from pathways_lab.timeline.queries import waits
from pathways_lab.timeline.records import Span
from pathways_lab.timeline.waits import (
    COMPILE,
    DISPATCH,
    INPUT,
    MEMORY,
    NOTHING,
    ORDER,
    RUNNING,
    TRANSFER,
)

FREE = Costs(**{f.name: 1e18 if f.metadata["unit"] == "bytes/s" else 0.0 for f in fields(Costs)})
"""Nothing but what is injected takes time."""

RATE = 1e6
"""Bytes that come to a host in a second."""

MEMORY_LIMIT = 10_000_000
"""Bytes of a device."""

LEAST = 1e-4
"""Seconds that are not told: a few bytes take some millionths."""

KINDS = ("chain", "intruder", "memory", "order")

Part = tuple[str, float]
"""A cause, and its seconds."""


class Block(NamedTuple):
    """What is expected of both devices."""

    parts: tuple[Sequence[Part], Sequence[Part]]
    client: str | None = None


@dataclass(frozen=True)
class Scenario:
    """What was injected.

    expected: of both devices of the second island, block by block, cause by cause.  Where a
        client is named, the first of the two devices is that which it has.
    """

    loads: tuple[Load, ...]
    machine: Machine
    expected: tuple[Block, ...]
    names: tuple[str, ...]

    def parts(self, device: int, having: dict[str, int]) -> list[Part]:
        """What is expected of a device.  having: the one device that a client has."""
        swapped = [block.client is not None and having[block.client] for block in self.expected]
        blocks = zip(self.expected, swapped, strict=True)
        return joined(part for block, other in blocks for part in block.parts[device ^ other])


class Making:
    """One scenario, block after block."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.launch = self.long() if self.chance.random() < 0.5 else 0.0
        self.now = 0.0
        self.loads: list[Load] = []
        self.functions: dict[str, FunctionCost] = {}
        self.expected: list[Block] = []
        self.names: list[str] = []

    def long(self, least: int = 1) -> float:
        """Some eighths of a second."""
        return self.chance.randrange(least, 17) / 8

    def function(self, seconds: float, compiling: float = 0.0) -> str:
        name = f"f{len(self.functions)}"
        self.functions[name] = FunctionCost(seconds, compile=compiling)
        return name

    def client(self, program: Program, start: float) -> str:
        name, islands = f"client {len(self.loads)}", {0: "island0", 1: "island1"}
        self.loads.append(Load(program, name, start=start, islands=islands))
        return name

    def expect(self, *parts: Part) -> None:
        self.expected.append(Block((parts, parts)))

    def made(self) -> Scenario:
        kinds = self.chance.choices(KINDS, k=self.chance.randrange(1, 5))
        if "memory" in kinds:
            self.launch = 0.0
        for kind in kinds:
            nothing = self.long()
            self.expect((NOTHING, nothing))
            self.now += nothing
            self.names.append(kind)
            getattr(self, kind)()
        machine = Machine(
            2, 1, 2, memory=MEMORY_LIMIT, functions=self.functions,
            costs=replace(FREE, launch=self.launch, dcn=RATE),
        )  # fmt: skip
        return Scenario(tuple(self.loads), machine, tuple(self.expected), tuple(self.names))

    # --- blocks ------------------------------------------------------------------

    def chain(self) -> None:
        """Compiling, a computation on the first island, a transfer, dispatch, a computation."""
        compiling = [self.long() if self.chance.random() < 0.5 else 0.0 for _ in range(2)]
        made, sent, busy = self.long(), self.long(), self.long()
        first, second = self.function(made, compiling[0]), self.function(busy, compiling[1])
        self.client(chain([first], second, sent), self.now)
        self.expect(
            (COMPILE, max(compiling)), (INPUT, self.launch + made), (TRANSFER, sent),
            (DISPATCH, self.launch), (RUNNING, busy),
        )  # fmt: skip
        self.now += max(compiling) + self.launch + made + sent + self.launch + busy

    def intruder(self) -> None:
        """Another client computes while the device waits for an earlier computation."""
        before, theirs, after = self.long(), self.long(), self.long()
        sent, busy = self.long(), self.long()
        first, least = before + self.launch + theirs + after, 1 / 16
        # The last of the three has its place when the first has ended, and is launched then.
        rest = max(least, self.launch) + least
        # Three before it, so that its place is not granted yet: two are granted ahead.
        made = [self.function(first), self.function(least), self.function(least)]
        self.client(chain(made, self.function(busy), sent), self.now)
        self.client(one(self.function(theirs), 2), self.now + self.launch + before)
        self.expect(
            (INPUT, self.launch + before), (DISPATCH, self.launch), (RUNNING, theirs),
            (INPUT, after + rest), (TRANSFER, sent), (DISPATCH, self.launch),
            (RUNNING, busy),
        )  # fmt: skip
        self.now += self.launch + first + rest + sent + self.launch + busy

    def memory(self) -> None:
        """A client holds, on one device, what another one's run needs on both.

        The place of what lets it go comes late, and is of no length: what hosts themselves wait
        for memory is not recorded.
        """
        ready, held, more, busy = self.long(), self.long(), self.long(), self.long()
        big = MEMORY_LIMIT * 6 // 10
        elsewhere = [self.function(held + more), *(self.function(0.0) for _ in range(2))]
        program = held_by(self.function(ready), elsewhere, self.function(0.0), big)
        having = self.client(program, self.now)
        self.client(one(self.function(busy), 2, big), self.now + ready + held)
        holding = (RUNNING, ready), (INPUT, held + more)
        other = (NOTHING, ready + held), (MEMORY, more)
        self.expected.append(Block((holding, other), having))
        self.expect((RUNNING, busy))
        self.now += ready + held + more + busy

    def order(self) -> None:
        """One of the devices waits for the other, which another client has."""
        theirs, later, busy = self.long(2), 1 / 16, self.long()
        having = self.client(one(self.function(theirs), 1), self.now)
        self.client(one(self.function(busy), 2), self.now + self.launch + later)
        busy_one = (DISPATCH, self.launch), (RUNNING, theirs)
        free_one = (NOTHING, self.launch + later), (ORDER, theirs - later)
        self.expected.append(Block((busy_one, free_one), having))
        self.expect((DISPATCH, self.launch), (RUNNING, busy))
        self.now += self.launch + theirs + self.launch + busy


def chain(first: list[str], last: str, sent: float) -> Program:
    """Functions on the first island, and one on the second, whose input takes so long to come."""
    row, nbytes, many = Layout((("x", 2),), ((),)), round(sent * RATE), len(first)
    values = [Value((4,), "uint8", 0, row, 4) for _ in range(many)]
    values.append(Value((nbytes,), "uint8", 0, row, nbytes))
    values.append(Value((4,), "uint8", 1, row, 4))
    calls = [Call(name, 0, (n,), (n + 1,), name=name) for n, name in enumerate(first)]
    calls.append(Call(last, 1, (many,), (many + 1,), name=last))
    signatures = {name: Signature(name, 0, (row,), (row,)) for name in (*first, last)}
    return Program("chain", tuple(values), tuple(calls), (0,), (many + 1,), signatures)


def one(function: str, devices: int, nbytes: int = 4, where: int = 1) -> Program:
    """A function on one island."""
    row = Layout((("x", devices),), ((),))
    values = Value((4,), "uint8", where, row, 4), Value((nbytes,), "uint8", where, row, nbytes)
    call = Call(function, where, (0,), (1,), name=function)
    signatures = {function: Signature(function, 0, (row,), (row,))}
    return Program("one", values, (call,), (0,), (1,), signatures)


def held_by(first: str, elsewhere: list[str], last: str, nbytes: int) -> Program:
    """One device of the second island holds a large result of *first* until *last* has it and what
    comes from the first island."""
    row, single, many = Layout((("x", 2),), ((),)), Layout((("x", 1),), ((),)), len(elsewhere)
    on_one = [Value((size,), "uint8", 1, single, size) for size in (4, nbytes, 4, 4)]
    on_two = [Value((4,), "uint8", 0, row, 4) for _ in range(many)]
    calls = [Call(first, 1, (0,), (1, 2), name=first)]
    calls += [
        Call(name, 0, (3 + n if n else 2,), (4 + n,), name=name) for n, name in enumerate(elsewhere)
    ]
    calls.append(Call(last, 1, (1, 3 + many), (3,), name=last))
    signatures = {name: Signature(name, 0, (row,), (row,)) for name in elsewhere}
    signatures[first] = Signature(first, 0, (single,), (single, single))
    signatures[last] = Signature(last, 0, (single, single), (single,))
    return Program("holds", (*on_one, *on_two), tuple(calls), (0,), (3,), signatures)


def joined(parts: Iterable[Part]) -> list[Part]:
    """Neighbours of one cause as one, without those of no length."""
    out: list[Part] = []
    for cause, seconds in parts:
        if seconds > LEAST:
            before = out.pop()[1] if out and out[-1][0] == cause else 0.0
            out.append((cause, before + seconds))
    return out


def wrong(seed: int) -> str:
    """What is wrong about the causes of a scenario; "" for nothing."""
    scenario = Making(seed).made()
    found = simulate(list(scenario.loads), scenario.machine)
    if found.open:
        return f"scenario {seed} ({scenario.names}): {found.open} runs never end"
    gangs = [r for r in found.records if isinstance(r, Span) and r.kind == "gang"]
    having = {gang.client: gang.devices[0] for gang in gangs}
    end = max(gang.end for gang in gangs)
    told = waits(found.records, 0.0, end)
    for device in (0, 1):
        seen = told[Lane("island1", "island1/host0", device)]
        right = scenario.parts(device, having)
        parts = joined((cause, until - since) for cause, since, until in seen)
        if [c for c, _ in right] != [c for c, _ in parts] or any(
            abs(a - b) > LEAST for (_, a), (_, b) in zip(right, parts, strict=True)
        ):
            names = ", ".join(scenario.names)
            return f"scenario {seed} ({names}), device {device}:\n  right {right}\n  told  {parts}"
    return ""


if __name__ == "__main__":
    for number in range(int(sys.argv[1]) if len(sys.argv) > 1 else 500):
        if said := wrong(number):
            sys.exit(said)
