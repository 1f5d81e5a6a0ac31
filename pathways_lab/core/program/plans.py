"""The index of a registered plan: everything that the core looks up in it, worked out once.

Problem: a grant, a report or a failure must cost the same few microseconds
for any plan.  So dependencies, the hosts of each step and the ends of windows are
computed when the plan is registered, by steps and hosts and never by devices.

Rule for maintainers: an index is immutable except for what it caches.

Paper: section 4.3 (compact sharded dataflow), section 4.5 (one message per
subgraph).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pathways_lab.core.memory.liveness import Need, Profile
from pathways_lab.core.program.functions import FunctionKey, Functions
from pathways_lab.core.program.layout import boxes
from pathways_lab.core.program.legality import donated_of, inputs_of, outputs_of
from pathways_lab.core.program.program import Call, Line, Node, Plan, SliceId, ValueId, When
from pathways_lab.core.scheduling.rules import Rules
from pathways_lab.core.slices.topology import SliceBinding


@dataclass(frozen=True, slots=True)
class Window:
    """Steps ``first <= i < last`` of a plan: what one grant covers.

    hosts: ``(host, island)`` of everyone with a step in it.
    islands: ``(island, number of its gangs)``.
    reads, donates: positions of plan inputs that its steps read, or consume.
    done: positions whose last reader is in it.
    makes: positions of plan outputs that its steps make.
    costs: estimated device microseconds of each step; slices: of each slice, with
        the number of its gangs.
    seconds: of the busiest slice.
    limit: device microseconds that may be granted and unfinished where it gets its places,
        its own included.  shared: some of its run's devices are (see
        :class:`~pathways_lab.core.scheduling.order.Pace`).
    version: of the estimates.  known: all of it was measured.
    """

    first: int
    last: int
    hosts: tuple[tuple[str, str], ...]
    islands: tuple[tuple[str, int], ...]
    reads: tuple[int, ...]
    donates: tuple[int, ...]
    done: tuple[int, ...]
    makes: tuple[int, ...]
    costs: tuple[int, ...]
    slices: tuple[tuple[SliceId, int, int], ...]
    seconds: float
    limit: int
    shared: bool
    version: int
    known: bool

    def on(self, island: str) -> Window:
        """The same as far as one island hears of it."""
        hosts = tuple(of for of in self.hosts if of[1] == island)
        return replace(self, hosts=hosts, islands=tuple(i for i in self.islands if i[0] == island))


class Kind(NamedTuple):
    """The properties that many steps share.  limit: device microseconds ahead that they allow."""

    function: FunctionKey | None
    slices: tuple[SliceId, ...]
    limit: int | None

    @classmethod
    def of(cls, node: Node, slices: tuple[SliceId, ...]) -> Kind:
        """The kind of a step with this node."""
        if not isinstance(node, Call):
            return cls(None, slices, None)
        limit = None if node.window is None else round(node.window * 1e6)
        return cls((node.function, node.slice), slices, limit)

    def least(self, limits: Callable[[SliceId], int]) -> int:
        """The window that the lab, the slices and the program allow ahead of such a step."""
        least = min([limits(slice_id) for slice_id in self.slices])
        return least if self.limit is None else min(least, self.limit)


@dataclass(slots=True)
class PlanIndex:
    """Per step: its slices, hosts, function, producers and consumers; per input: its readers.

    kinds: of steps that are alike; kind_of: per step, the number of its kind.
    results: per step, the output positions that it makes; touches: makes or reads.
    lines: per output position, the user's line that makes it.
    uses: per output position, how many steps touch it.
    inner: per step, whether it is a gang that only other steps of the plan know.
    gates: steps that may be granted only when their inputs are resident.
    whens: per step, its condition.  decides: per step that makes some, the values that decide.
    deciders: by value that decides, the step that makes it, and the number of its cases.
    bits: one bit per host; masks: per step, those of its hosts.
    shared: hosts that have the plan.  home: island by host.  devices: by slice.
    bindings: of all its slices.
    kept: its runs go on when nobody can read their results any more.
    profiles: bytes along the order, by the inputs that the run accounts for.
    needs: the same by cell, with the version of the cells that they hold for,
        and whether such a run surely fits when it is alone.
    """

    plan: Plan
    client: str
    hosts: tuple[str, ...]
    step_slices: tuple[tuple[SliceId, ...], ...]
    bits: Mapping[str, int]
    masks: tuple[int, ...]
    step_hosts: tuple[tuple[str, ...], ...]
    step_islands: tuple[tuple[str, ...], ...]
    functions: tuple[FunctionKey, ...]
    step_function: tuple[FunctionKey | None, ...]
    kinds: tuple[Kind, ...]
    kind_of: tuple[int, ...]
    producers: tuple[tuple[int, ...], ...]
    consumers: tuple[tuple[int, ...], ...]
    reads: tuple[tuple[int, ...], ...]
    readers: tuple[tuple[int, ...], ...]
    donors: Mapping[int, int]
    results: tuple[tuple[int, ...], ...]
    touches: tuple[tuple[int, ...], ...]
    lines: tuple[Line, ...]
    uses: tuple[int, ...]
    inner: tuple[bool, ...]
    waits: tuple[int, ...]
    gates: frozenset[int]
    whens: tuple[When | None, ...]
    decides: Mapping[int, tuple[ValueId, ...]]
    deciders: Mapping[ValueId, tuple[int, int]]
    home: Mapping[str, str]
    devices: Mapping[SliceId, int]
    bindings: Mapping[SliceId, SliceBinding]
    kept: bool
    shared: set[str] = field(default_factory=set)
    profiles: dict[frozenset[int], Profile] = field(default_factory=dict)
    needs: dict[frozenset[int], tuple[int, Need, bool]] = field(default_factory=dict)
    _crossing: dict[int, int] = field(default_factory=dict)
    _windows: dict[tuple[int, bool], Window] = field(default_factory=dict)
    _estimates: int = -1
    _remaining: tuple[int, list[float]] | None = None

    def window(
        self,
        first: int,
        functions: Functions,
        rules: Rules,
        limits: Callable[[SliceId], int],
        shared: bool = False,
    ) -> Window:
        """The window that begins at step *first*.  limits, shared: see :class:`Window`."""
        if self._estimates != functions.version:
            self._windows.clear()
            self._estimates = functions.version
        found = self._windows.get((first, shared))
        if found is None:
            found = self._cut(first, functions, rules, limits, shared)
            self._windows[first, shared] = found
        return found

    def remaining(self, position: int, functions: Functions) -> float:
        """Estimated device seconds of the steps from *position* on, on the busiest slice."""
        if self._remaining is None or self._remaining[0] != functions.version:
            slices: dict[SliceId, float] = {}
            found = [0.0]
            for key in reversed(self.step_function):
                if key is not None:
                    slices[key[1]] = slices.get(key[1], 0.0) + functions.seconds(key)
                found.append(max(slices.values(), default=0.0))
            self._remaining = functions.version, found[::-1]
        return self._remaining[1][position]

    def crossing(self, step: int) -> int:
        """Bytes that a transfer brings to hosts of another island: each box once per host."""
        found = self._crossing.get(step)
        if found is None:
            found = self._crossing[step] = self._crosses(step)
        return found

    def _crosses(self, step: int) -> int:
        node = self.plan.steps[step].node
        if isinstance(node, Call):
            return 0
        source, target = self.plan.values[node.input], self.plan.values[node.output]
        if source.slice is None or target.slice is None or target.layout is None:
            return 0
        to = self.bindings[target.slice]
        near = self.bindings[source.slice].islands
        if to.islands == near:
            return 0
        where = boxes(target.layout, target.shape)
        assembled = {
            (host, box)
            for (host, _), box in zip(to.devices, where, strict=True)
            if self.home[host] not in near
        }
        return len(assembled) * target.nbytes

    def _cut(
        self,
        first: int,
        functions: Functions,
        rules: Rules,
        limits: Callable[[SliceId], int],
        shared: bool,
    ) -> Window:
        @functools.cache
        def of(number: int) -> tuple[FunctionKey | None, int, int]:
            kind = self.kinds[number]
            return kind.function, functions.microseconds(kind.function), kind.least(limits)

        limit = of(self.kind_of[first])[2]
        most = min(round(rules.window * 1e6), limit // 2)
        if shared:
            most = min(most, round(rules.close * 1e6) // 2)
        slices: dict[SliceId, int] = {}
        gangs: dict[SliceId, int] = {}
        costs: list[int] = []
        last = first
        while last < len(self.kind_of):
            key, cost, least = of(self.kind_of[last])
            total = slices.get(key[1], 0) + cost if key else 0
            if last > first and (
                total > most or least != limit or last in self.gates or not rules.peak
                or self.whens[last] != self.whens[first]
            ):  # fmt: skip
                break
            if key:
                slices[key[1]] = total
                gangs[key[1]] = gangs.get(key[1], 0) + 1
            costs.append(cost)
            last += 1
        known = all(functions.known(key) for key in {*self.step_function[first:last]} if key)
        by_slice = tuple((s, cost, gangs[s]) for s, cost in slices.items())
        return self._covering(first, last, costs, by_slice, limit, shared, functions.version, known)

    def skipping(self, first: int, last: int) -> Window:
        """The same steps, none of which is launched."""
        return self._covering(first, last, (), (), 0, False, self._estimates, True)

    def _covering(
        self,
        first: int,
        last: int,
        costs: Sequence[int],
        slices: tuple[tuple[SliceId, int, int], ...],
        limit: int,
        shared: bool,
        version: int,
        known: bool,
    ) -> Window:
        hosts: dict[str, str] = {}
        islands: dict[str, int] = {}
        reads: dict[int, None] = {}
        for step in range(first, last):
            for host in self.step_hosts[step]:
                hosts[host] = self.home[host]
            for island in self.step_islands[step]:
                islands[island] = islands.get(island, 0) + 1
            reads.update(dict.fromkeys(self.reads[step]))
        return Window(
            first,
            last,
            tuple(hosts.items()),
            tuple(islands.items()),
            tuple(reads),
            tuple(p for p in reads if first <= self.donors.get(p, -1) < last),
            tuple(p for p in reads if self.readers[p][-1] < last),
            tuple(p for step in range(first, last) for p in self.results[step]),
            tuple(costs),
            slices,
            max([cost for _, cost, _ in slices], default=0) / 1e6,
            limit,
            shared,
            version,
            known,
        )


def index_plan(plan: Plan, client: str, bindings: Mapping[SliceId, SliceBinding]) -> PlanIndex:
    """Work out everything about a checked *plan*; *bindings* holds all its slices."""
    makers: dict[ValueId, list[int]] = {}
    position = {value: p for p, value in enumerate(plan.inputs)}
    slices: list[tuple[SliceId, ...]] = []
    kinds: dict[Kind, int] = {}
    kind_of: list[int] = []
    producers: list[tuple[int, ...]] = []
    consumers: list[list[int]] = [[] for _ in plan.steps]
    reads: list[tuple[int, ...]] = []
    readers: list[list[int]] = [[] for _ in plan.inputs]
    donors: dict[int, int] = {}
    gates = set()
    for index, step in enumerate(plan.steps):
        node = step.node
        used = dict.fromkeys(inputs_of(node))
        touched = [plan.values[v].slice for v in (*used, *outputs_of(node))]
        touched += [node.slice] if isinstance(node, Call) else []
        slices.append(tuple(dict.fromkeys(s for s in touched if s is not None)))
        kind_of.append(kinds.setdefault(Kind.of(node, slices[-1]), len(kinds)))
        asked = (*used, node.when.value) if node.when is not None else used
        producers.append(tuple(dict.fromkeys(m for v in asked for m in makers.get(v, ()))))
        for producer in producers[-1]:
            consumers[producer].append(index)
        reads.append(tuple(position[v] for v in used if v in position))
        for p in reads[-1]:
            readers[p].append(index)
        donors.update({position[v]: index for v in donated_of(node) if v in position})
        for value in outputs_of(node):
            makers.setdefault(value, []).append(index)
        if isinstance(node, Call) and not node.ahead:
            gates.add(index)
    known = tuple(kinds)
    step_function = tuple([known[number].function for number in kind_of])
    result = {value: p for p, value in enumerate(plan.outputs)}
    results = [[result[v] for v in outputs_of(s.node) if v in result] for s in plan.steps]
    touches = [
        made + [result[v] for v in dict.fromkeys(inputs_of(s.node)) if v in result]
        for made, s in zip(results, plan.steps, strict=True)
    ]
    slice_hosts = {s: bindings[s].hosts for s in plan.slices}
    home = {h: island for s in plan.slices for h, island in bindings[s].home.items()}
    step_hosts = tuple(
        tuple(dict.fromkeys(h for s in touched for h in slice_hosts[s])) for touched in slices
    )
    bits = {host: 1 << number for number, host in enumerate(home)}
    deciders = {
        when.value: (makers[when.value][0], when.cases)
        for when in (step.node.when for step in plan.steps)
        if when is not None
    }
    return PlanIndex(
        plan=plan,
        client=client,
        hosts=tuple(home),
        bits=bits,
        masks=tuple(sum(bits[h] for h in hosts) for hosts in step_hosts),
        step_slices=tuple(slices),
        step_hosts=step_hosts,
        step_islands=tuple(
            tuple(dict.fromkeys(i for s in touched for i in bindings[s].islands))
            for touched in slices
        ),
        functions=tuple(dict.fromkeys(f for f in step_function if f is not None)),
        step_function=step_function,
        kinds=known,
        kind_of=tuple(kind_of),
        producers=tuple(producers),
        consumers=tuple(map(tuple, consumers)),
        reads=tuple(reads),
        readers=tuple(map(tuple, readers)),
        donors=donors,
        results=tuple(map(tuple, results)),
        touches=tuple(map(tuple, touches)),
        lines=tuple(plan.steps[makers[v][0]].node.line for v in plan.outputs),
        uses=tuple(sum(p in step for step in touches) for p in range(len(plan.outputs))),
        inner=tuple(
            key is not None and not reading and not touching
            for key, reading, touching in zip(step_function, reads, touches, strict=True)
        ),
        waits=tuple(1 + len(p) + len(r) for p, r in zip(producers, reads, strict=True)),
        gates=frozenset(gates),
        whens=tuple(step.node.when for step in plan.steps),
        decides=_by_step(deciders),
        deciders=deciders,
        home=home,
        devices={s: len(bindings[s].devices) for s in plan.slices},
        bindings={s: bindings[s] for s in plan.slices},
        kept=any(isinstance(step.node, Call) and step.node.keep for step in plan.steps),
    )


def _by_step(deciders: Mapping[ValueId, tuple[int, int]]) -> dict[int, tuple[ValueId, ...]]:
    found: dict[int, tuple[ValueId, ...]] = {}
    for value, (step, _) in deciders.items():
        found[step] = (*found.get(step, ()), value)
    return found
