"""Which step of a program feeds which: the edges along which data move.

Problem: the picture of a program, the question why a device waited, and flows
in an export all need the edges, and records of single gangs do not have them.
One record per registered program does.

Rule for maintainers: what is written must be plain data; a reader must work
with records of programs that it does not know, and then has no edges.

Paper: section 4.2 (programs as sharded dataflow).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pathways_lab.core.program.program import Call, Plan, ValueId
from pathways_lab.timeline.records import Event, Record

PLANS = 1000
"""Programs whose steps are remembered: those that were in use last."""
RUNS = 4096
"""Runs of which it is remembered what they are runs of."""
MADE = 16_384
"""Buffers of which it is remembered which run makes them."""
FEW = 32
"""Buffers that a run reads, and makes, that its record names, at most: the first ones."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a program.

    slice: where it computes, or where a transfer arrives.
    nbytes: bytes of its outputs on one device.
    after: the steps that make its inputs.
    reads, makes: the inputs of the program that it reads, and the results that it makes, by their
    places among the first :data:`FEW`.
    """

    transfer: bool
    node: str
    slice: int
    nbytes: int
    after: tuple[int, ...]
    line: str = ""
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()


Flow = tuple[Stage, ...]
"""A program's steps, in its linear order."""

Result = tuple[int, int]
"""A run, and a place among its results."""


def described(plan: Plan) -> list[list[Any]]:
    """The steps of *plan* as plain data, for the record of its registration."""
    made: dict[ValueId, int] = {}
    inputs = {value: place for place, value in enumerate(plan.inputs[:FEW])}
    outputs: dict[ValueId, list[int]] = {}
    for place, value in enumerate(plan.outputs[:FEW]):
        outputs.setdefault(value, []).append(place)
    out: list[list[Any]] = []
    for number, step in enumerate(plan.steps):
        node = step.node
        call = isinstance(node, Call)
        read = node.inputs if isinstance(node, Call) else (node.input,)
        wrote = node.outputs if isinstance(node, Call) else (node.output,)
        where = node.slice if isinstance(node, Call) else plan.values[node.output].slice
        after = sorted({made[value] for value in read if value in made})
        nbytes = sum(plan.values[value].nbytes for value in wrote)
        line = str(node.line) if node.line.number else ""
        about = [not call, node.name, -1 if where is None else where, nbytes, after, line]
        reads = sorted({inputs[value] for value in read if value in inputs})
        makes = [place for value in wrote for place in outputs.get(value, ())]
        out.append([*about, reads, makes] if reads or makes else about)
        made.update(dict.fromkeys(wrote, number))
    return out


def read(event: Event) -> Flow:
    """The steps in a ``plan`` record."""
    return _stages(event.args.get("steps", ()))


def flow_of(plan: Plan) -> Flow:
    """The steps of a plan, as its record has them."""
    return _stages(described(plan))


def _stages(steps: Iterable[Sequence[Any]]) -> Flow:
    return tuple(
        Stage(
            bool(transfer),
            str(node),
            int(where),
            int(nbytes),
            tuple(map(int, after)),
            str(line),
            *(tuple(map(int, places)) for places in few),
        )
        for transfer, node, where, nbytes, after, line, *few in steps
    )


class _Known(NamedTuple):
    """A program: its steps, which of them makes each of its results, and the computations of each
    slice."""

    flow: Flow
    makers: dict[int, int]
    computations: dict[int, list[int]]


_UNKNOWN = _Known((), {}, {})


class Flows:
    """Folds records into what is known of programs' steps.

    run: the flow of a run, () when its program is not known.
    """

    def __init__(self) -> None:
        self._plans: dict[str, Event | _Known] = {}
        self._runs: dict[int, str] = {}
        self._made: dict[int, Result] = {}
        self._before: dict[int, dict[int, Result]] = {}

    def add(self, record: Record) -> None:
        """Fold one record."""
        if not isinstance(record, Event):
            return
        key = str(record.args.get("plan", ""))
        if record.kind == "plan":
            self._use(key, record)
        elif record.kind == "submitted":
            self._runs[record.run] = key
            self._use(key, self._plans.get(key))
            if len(self._runs) > RUNS:
                gone = next(iter(self._runs))
                del self._runs[gone]
                self._before.pop(gone, None)
            made, reads = self._made, enumerate(record.args.get("reads", ()))
            if found := {place: made[buffer] for place, buffer in reads if buffer in made}:
                self._before[record.run] = found
            results = enumerate(record.args.get("makes", ()))
            made.update((buffer, (record.run, place)) for place, buffer in results)
            while len(made) > MADE:
                del made[next(iter(made))]

    def _use(self, key: str, plan: Event | _Known | None) -> None:
        self._plans.pop(key, None)
        if plan is not None:
            self._plans[key] = plan
            if len(self._plans) > PLANS:
                del self._plans[next(iter(self._plans))]

    def before(self, run: int) -> tuple[int, ...]:
        """The runs whose results a run reads, as far as is remembered."""
        return tuple(dict.fromkeys(other for other, _ in self._before.get(run, {}).values()))

    def sources(self, run: int, step: int) -> list[tuple[int, int]]:
        """The steps of other runs whose results a step reads, as far as is remembered."""
        found, flow = self._before.get(run, {}), self.run(run)
        reads = flow[step].reads if found and step < len(flow) else ()
        results = [found[place] for place in reads if place in found]
        made = ((other, self._known(other).makers.get(place, -1)) for other, place in results)
        return [(other, n) for other, n in made if n >= 0]

    def users(self, run: int, step: int) -> list[tuple[int, int]]:
        """The steps of other runs that read results of a step, as far as is remembered."""
        makes = {(run, place) for place in self.run(run)[step].makes}
        return [
            (other, n)
            for other, found in self._before.items()
            if makes and (places := {place for place, result in found.items() if result in makes})
            for n, stage in enumerate(self.run(other))
            if not places.isdisjoint(stage.reads)
        ]

    def run(self, run: int) -> Flow:
        """The steps of a run's program."""
        return self._known(run).flow

    def computations(self, run: int) -> dict[int, list[int]]:
        """The steps of a run that compute, in order, by slice."""
        return self._known(run).computations

    def _known(self, run: int) -> _Known:
        key = self._runs.get(run, "")
        known = self._plans.get(key, _UNKNOWN)
        if isinstance(known, Event):  # read when somebody asks: most are never asked for
            flow = read(known)
            makers = {place: n for n, stage in enumerate(flow) for place in stage.makes}
            computations: dict[int, list[int]] = {}
            for n, stage in enumerate(flow):
                if not stage.transfer:
                    computations.setdefault(stage.slice, []).append(n)
            known = self._plans[key] = _Known(flow, makers, computations)
        return known


def flows(records: Iterable[Record]) -> Flows:
    """All that *records* say."""
    out = Flows()
    for record in records:
        out.add(record)
    return out
