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
from itertools import islice
from typing import Any

from pathways_lab.core.program.program import Call, Plan, ValueId
from pathways_lab.timeline.records import Event, Record

PLANS = 1000
"""Programs whose steps are remembered: those that were in use last."""
RUNS = 4096
"""Runs of which it is remembered what they are runs of."""
MADE = 16_384
"""Buffers of which it is remembered which run makes them."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a program.

    slice: where it computes, or where a transfer arrives.
    nbytes: bytes of its outputs on one device.
    after: the steps that make its inputs.
    """

    transfer: bool
    node: str
    slice: int
    nbytes: int
    after: tuple[int, ...]
    line: str = ""


Flow = tuple[Stage, ...]
"""A program's steps, in its linear order."""


def described(plan: Plan) -> list[list[Any]]:
    """The steps of *plan* as plain data, for the record of its registration."""
    made: dict[ValueId, int] = {}
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
        out.append([not call, node.name, -1 if where is None else where, nbytes, after, line])
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
        Stage(bool(transfer), str(node), int(where), int(nbytes), tuple(map(int, after)), str(line))
        for transfer, node, where, nbytes, after, line in steps
    )


class Flows:
    """Folds records into what is known of programs' steps.

    run: the flow of a run, () when its program is not known.
    """

    def __init__(self) -> None:
        self._plans: dict[str, Event | Flow] = {}
        self._runs: dict[int, str] = {}
        self._made: dict[int, int] = {}
        self._before: dict[int, tuple[int, ...]] = {}

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
            made = self._made
            found = [made[buffer] for buffer in record.args.get("reads", ()) if buffer in made]
            if found:
                self._before[record.run] = tuple(dict.fromkeys(found))
            made.update(dict.fromkeys(record.args.get("makes", ()), record.run))
            while len(made) > MADE:
                del made[next(iter(made))]

    def _use(self, key: str, plan: Event | Flow | None) -> None:
        self._plans.pop(key, None)
        if plan is not None:
            self._plans[key] = plan
            if len(self._plans) > PLANS:
                del self._plans[next(iter(self._plans))]

    def before(self, run: int) -> tuple[int, ...]:
        """The runs whose results a run reads, as far as is remembered."""
        return self._before.get(run, ())

    def after(self, run: int) -> list[int]:
        """The runs that read results of a run, as far as is remembered."""
        return [reader for reader, before in self._before.items() if run in before]

    def run(self, run: int) -> Flow:
        """The steps of a run's program."""
        key = self._runs.get(run, "")
        known = self._plans.get(key, ())
        if isinstance(known, Event):  # read when somebody asks: most are never asked for
            known = self._plans[key] = read(known)
        return known


def only(flow: Flow) -> int:
    """The step of a program that is its only computation, -1 where there are none or more."""
    found = list(islice((n for n, stage in enumerate(flow) if not stage.transfer), 2))
    return found[0] if len(found) == 1 else -1


def flows(records: Iterable[Record]) -> Flows:
    """All that *records* say."""
    out = Flows()
    for record in records:
        out.add(record)
    return out
