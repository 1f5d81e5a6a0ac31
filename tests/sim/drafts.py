"""Random programs for the search: calls on random slices, decisions, exchanges.

Problem: the rules of order and memory must hold for programs nobody thought of.

Rule for maintainers: sizes are units of memory (a few), not real bytes; everything comes from the
given generator, in the same order as before: the search remembers seeds.

Paper: none.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.lowering import lower
from pathways_lab.core.program.program import Call, Plan, Program, Signature, SliceId, Value, When


@dataclass(frozen=True, slots=True)
class Shape:
    """How wild a workload is.  Probabilities are per run, step, handle or program.

    wide: programs that make many values first, and use them one by one later.
    spread: how unequal delays are (0: equal).
    limit: that the first client sets quotas.  lease: that a client leases an island
        for a while.  share: that a client publishes a result, and that one takes it.
    stay: of a result, that its client keeps it, when it is there or ahead.
    kill: that an upload is the last thing a client does, and reaches some hosts only.
    cancel: of a run, that it, some of its results or all of its client's runs are cancelled.
    keep: of a call, that its run goes on for its sake.  release: of a run, that one of its
        client's slices is given back a while after.
    straight: of a call, that it is where the one before it is, and donates nothing.
    decide: of a call, that two calls take its place, of which a value on a device skips one.
    span: of a slice, that it spans islands.
    exchange: of a program, that it sends rows of several slices to experts, and back.
    stop: of a host, that it stands still for a while.  repeat: of a report, that it
        comes twice.  forget: of a program, after each run, that it is dropped.
    """

    islands: int = 2
    hosts: int = 2
    devices: int = 2
    clients: int = 2
    slices: int = 3
    programs: int = 2
    nodes: int = 5
    runs: int = 6
    memory: tuple[int, int] = (10, 28)
    donate: float = 0.2
    reuse: float = 0.6
    drop: float = 0.8
    cancel: float = 0.05
    fail: float = 0.02
    lose: float = 0.1
    leave: float = 0.05
    blocking: float = 0.05
    urgent: float = 0.2
    wide: float = 0.3
    spread: float = 3.0
    limit: float = 0.0
    lease: float = 0.0
    share: float = 0.0
    stay: float = 0.0
    kill: float = 0.0
    stop: float = 0.0
    repeat: float = 0.0
    forget: float = 0.0
    keep: float = 0.4
    release: float = 0.0
    straight: float = 0.0
    decide: float = 0.0
    exchange: float = 0.0
    span: float = 0.0


def layout(devices: int) -> Layout:
    """Replicated over a row of devices."""
    return Layout((("x", devices),), ((),))


class Draft:
    """A program while it is drawn at random.  free: values that may still be used."""

    def __init__(self, rng: random.Random, slices: dict[SliceId, int], name: str) -> None:
        self.rng = rng
        self.slices = slices
        self.name = name
        self.values: list[Value] = []
        self.nodes: list[Call] = []
        self.signatures: dict[str, Signature] = {}
        self.free: list[int] = []

    def value(self, slice_id: SliceId, units: int, kind: str) -> int:
        """A new value."""
        devices = self.slices[slice_id]
        name = f"{kind}{len(self.values)}"
        self.values.append(Value((units,), "uint8", slice_id, layout(devices), units, name))
        self.free.append(len(self.values) - 1)
        return self.free[-1]

    def lowered(self, inputs: list[int], outputs: list[int]) -> Plan:
        """The plan of the program."""
        return lower(
            Program(
                self.name, tuple(self.values), tuple(self.nodes), tuple(inputs), tuple(outputs),
                self.signatures,
            )
        )  # fmt: skip

    def call(self, used: list[int], sizes: tuple[int, ...], shape: Shape) -> None:
        """A call on some slice, which may consume some of what it uses."""
        rng, number = self.rng, len(self.nodes)
        where = rng.choice(sorted(self.slices))
        straight = bool(shape.straight) and rng.random() < shape.straight
        if straight and self.nodes:
            where = self.nodes[-1].slice
            here = [v for v in self.free if self.values[v].slice == where]
            used = [v for v in used if v in here] or here[-1:] or used
        local = [p for p, v in enumerate(used) if self.values[v].slice == where]
        donated = tuple(p for p in local if not straight and rng.random() < shape.donate)
        key = f"{self.name}.f{number}"
        row = layout(self.slices[where])
        self.signatures[key] = Signature(key, where, (row,) * len(used), (row,) * len(sizes))
        made = tuple(self.value(where, units, "v") for units in sizes)
        ahead = rng.random() >= shape.blocking
        keep = rng.random() < shape.keep
        window = None if straight else rng.choice((None, None, 0.0, 0.004))
        call = Call(key, where, tuple(used), made, donated, f"f{number}", ahead=ahead, keep=keep)
        self.nodes.append(replace(call, window=window))
        for p in donated:
            self.free.remove(used[p])

    def decide(self) -> None:
        """Values that one of two calls makes, as values on a device say; one call makes these."""
        rng, read, where = self.rng, list(self.free), self.rng.choice(sorted(self.slices))
        one = Layout(layout(self.slices[where]).mesh, ())
        decisions = [len(self.values) + n for n in range(rng.randint(1, 2))]
        self.values += [Value((), "int32", where, one, 4, "decision") for _ in decisions]
        self._under(where, rng.sample(read, 1), decisions, None)
        later, somewhere = [], lambda: rng.choice(sorted(self.slices))
        for decision in decisions:
            joined = self.value(somewhere(), rng.randint(1, 4), "joined")
            for when in (When(decision, case, 2) for case in range(2)):
                used = rng.sample(read, min(len(read), rng.randint(1, 2)))
                if rng.random() < 0.5:
                    own = self.value(somewhere(), 2, "own")
                    self.free.remove(own)  # nobody else may read it
                    self._under(self.values[own].slice, used, [own], when)
                    used = [own]
                later.append((used, joined, when))
        # Nodes of one condition need not follow each other.
        for used, joined, when in later:
            self._under(self.values[joined].slice, used, [joined], when)

    def exchange(self) -> list[int]:
        """Rows of several senders for experts, each of which runs or does not; returns the sums.

        An expert begins when all senders have sent it their rows, and sends its own to all.
        """
        rng, places = self.rng, sorted(self.slices)
        xs = [self.value(rng.choice(places), 2, "x") for _ in range(rng.randint(2, 3))]
        homes = [self._slice(x) for x in xs]
        counts = [self._made(home, [x], None) for home, x in zip(homes, xs, strict=True)]
        one = Layout(layout(self.slices[homes[0]]).mesh, ())
        numbers = [len(self.values) + n for n in range(rng.randint(1, 4))]
        self.values += [Value((), "int32", homes[0], one, 4, "decision") for _ in numbers]
        self._under(homes[0], counts, numbers, None)
        whens = [When(number, 1, 2) for number in numbers]
        sent = [[self._made(home, [x], when) for home, x in zip(homes, xs, strict=True)]
                for when in whens]  # fmt: skip
        experts = [self._made(rng.choice(places), rows, when)
                   for rows, when in zip(sent, whens, strict=True)]  # fmt: skip
        sums = xs
        for expert, when in zip(experts, whens, strict=True):
            sums, before = [self.value(home, 2, "sum") for home in homes], sums
            for total, old in zip(sums, before, strict=True):
                self._under(self._slice(old), [old, expert], [total], when)
                self._under(self._slice(old), [old], [total], replace(when, case=0))
        self.free = sums
        return xs

    def _slice(self, value: int) -> SliceId:
        where = self.values[value].slice
        assert where is not None
        return where

    def _made(self, where: SliceId, used: list[int], when: When | None) -> int:
        """What a call there makes, for readers under the same condition."""
        made = self.value(where, 2, "rows")
        self._under(where, used, [made], when)
        return made

    def _under(
        self, where: SliceId | None, used: list[int], made: list[int], when: When | None
    ) -> None:
        """A call under a condition."""
        assert where is not None
        key, row = f"{self.name}.f{len(self.nodes)}", layout(self.slices[where])
        given = tuple(self.values[value].layout or row for value in made)
        self.signatures[key] = Signature(key, where, (row,) * len(used), given)
        self.nodes.append(Call(key, where, tuple(used), tuple(made), name=key, when=when))


def random_plan(rng: random.Random, slices: dict[SliceId, int], shape: Shape, name: str) -> Plan:
    """A program of up to *shape.nodes* calls on random slices.

    slices: number of devices by slice.
    """
    draft = Draft(rng, slices, name)
    if shape.exchange and rng.random() < shape.exchange:
        inputs = draft.exchange()
        return draft.lowered(inputs, draft.free)
    inputs = [
        draft.value(rng.choice(sorted(slices)), rng.randint(1, 4), "in")
        for _ in range(rng.randint(1, 3))
    ]
    count = rng.randint(1, shape.nodes)
    if rng.random() < shape.wide:
        for _ in range(count // 2):
            draft.call(
                [rng.choice([v for v in inputs if v in draft.free] or draft.free)], (3,), shape
            )
        made = [v for v in draft.free if v not in inputs]
        for value in made:
            if value not in draft.free:
                continue  # donated as the companion of another one
            draft.call([value] + draft.free[-1:] * (draft.free[-1] != value), (1,), shape)
            if value in draft.free:
                draft.free.remove(value)
    else:
        for _ in range(count):
            if shape.decide and rng.random() < shape.decide:
                draft.decide()
                continue
            used = rng.sample(draft.free, min(len(draft.free), rng.randint(1, 2)))
            sizes = tuple(rng.randint(1, 4) for _ in range(rng.choice((1, 1, 2))))
            draft.call(used, sizes, shape)
    return draft.lowered(inputs, rng.sample(draft.free, rng.randint(1, min(4, len(draft.free)))))
