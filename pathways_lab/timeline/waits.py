"""What a device waited for, whenever it did not compute.

Problem: an idle device is the loss; a reader needs its cause.  Several things
are often awaited at once, and only the one that came last held the device up.

How: the gap before a gang is walked backwards from its start.  At each moment
the obstacle that ended last gets the blame, as far back as it reaches; before
the run was submitted there was nothing to do.

Rule for maintainers: the parts of a gap add up to the gap, to the last float
(tested for arbitrary records).  Unknown obstacles are left out, and what no
obstacle explains is dispatch: the time that our own machinery takes.

Paper: section 5.1 (dispatch overheads), figure 12 (where time goes).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pathways_lab.timeline.flow import Flows
from pathways_lab.timeline.machine import Lane, lanes_of
from pathways_lab.timeline.records import Event, Record, Sample, Span

RUNNING, NOTHING = "running", "nothing to do"
DISPATCH, ORDER, MEMORY = "dispatch", "gang order", "admission (memory, turn)"
INPUT, TRANSFER, COMPILE = "earlier computation", "input transfer", "compiling"
CAUSES = (DISPATCH, ORDER, MEMORY, INPUT, TRANSFER, COMPILE, NOTHING)
"""What a device may wait for.

dispatch: the control plane's and the host's work until the gang is launched.
gang order: a gang that has its turn earlier, on devices that it shares.
admission: the run was not admitted while others were unfinished (their memory, or
    the policy), or its bytes were not free on the host.
earlier computation: one that makes its inputs, elsewhere.
compiling: its host still made the function, which is so before a first run.
"""

KEEP = 1024
"""Runs, and compiled functions, of which obstacles are remembered."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Devices of one host that waited from *start* to *end* (seconds) before a gang."""

    cause: str
    start: float
    end: float
    gang: Span


@dataclass(slots=True)
class _Run:
    submitted: float = float("-inf")
    first: float = float("inf")
    others: bool = False
    granted: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    launched: dict[tuple[int, str], Span] = field(default_factory=dict)
    arrived: dict[tuple[str, int], Span] = field(default_factory=dict)


class Waits:
    """Folds records, in the order in which they become known, into waits."""

    def __init__(self, flows: Flows | None = None) -> None:
        self._own = flows is None
        self._flows = flows or Flows()
        self._runs: dict[int, _Run] = {}
        self._compiled: dict[tuple[str, str], Span] = {}
        self._open: set[int] = set()
        self.free: dict[Lane, float] = {}
        self._busy: dict[str, list[Span]] = {}

    def add(self, record: Record) -> list[tuple[tuple[int, ...], Wait]]:
        """Fold one record; of a gang, ``(devices, wait)`` of each part of the gaps before it."""
        if self._own:
            self._flows.add(record)
        if isinstance(record, Span) and record.kind == "compile":
            self._compiled[record.host, record.node] = record
            if len(self._compiled) > KEEP:
                del self._compiled[next(iter(self._compiled))]
        if isinstance(record, Sample) or not record.run:
            return []
        run = self._runs.get(record.run)
        if run is None:
            run = self._runs[record.run] = _Run()
            if len(self._runs) > KEEP:
                del self._runs[next(iter(self._runs))]
        if isinstance(record, Event):
            self._event(record, run)
        elif record.kind == "launch":
            run.launched[record.step, record.host] = record
        elif record.kind == "transfer":
            run.arrived[record.host, record.step] = record
        elif record.kind == "gang":
            return list(self._gang(record, run))
        return []

    def _event(self, event: Event, run: _Run) -> None:
        if event.kind == "submitted":
            run.submitted = event.time
            run.others = bool(self._open)
            self._open.add(event.run)
        elif event.kind == "granted":
            run.granted[event.step] = event.time
            run.first = min(run.first, event.time)
        elif event.kind in ("finished", "failed", "cancelled"):
            self._open.discard(event.run)

    def _gang(self, gang: Span, run: _Run) -> Iterator[tuple[tuple[int, ...], Wait]]:
        gaps: dict[float, list[int]] = {}
        free, over = self.free, gang.end
        for lane in lanes_of(gang.island, gang.host, gang.devices):
            since = free.get(lane, run.submitted)
            if float("-inf") < since < gang.start:
                gaps.setdefault(since, []).append(lane.device)
            if free.get(lane, over) <= over:
                free[lane] = over
        obstacles = tuple(self._obstacles(gang, run)) if gaps else ()
        for since, devices in gaps.items():
            for cause, start, end in blame(since, gang.start, run.submitted, obstacles):
                yield tuple(devices), Wait(cause, start, end, gang)
        run.ended[gang.step] = max(gang.end, run.ended.get(gang.step, gang.end))
        recent = self._busy.setdefault(gang.host, [])
        recent.append(gang)
        if len(recent) > 16:
            del recent[0]

    def _obstacles(self, gang: Span, run: _Run) -> Iterator[tuple[str, float, float]]:
        """``(cause, from, until)`` of everything that had to happen before *gang*."""
        begin = run.submitted
        if run.first < float("inf"):
            yield MEMORY if run.others else DISPATCH, begin, run.first
        granted = run.granted.get(gang.step)
        if granted is not None:
            yield DISPATCH, run.first, granted
        flow = self._flows.run(gang.run)
        if gang.step < len(flow):
            made = flow[gang.step].after
            arrivals = [run.arrived.get((gang.host, step)) for step in made]
            ends = [run.ended[step] for step in made if step in run.ended]
        else:
            arrivals = [a for (host, _), a in run.arrived.items() if host == gang.host]
            ends = []
        for arrival in arrivals:
            if arrival is not None and arrival.end <= gang.start:
                yield TRANSFER, arrival.start, arrival.end
                yield INPUT, begin, arrival.start
        for end in ends:
            yield INPUT, begin, end
        compiled = self._compiled.get((gang.host, gang.node))
        if compiled is not None:
            yield COMPILE, compiled.start, compiled.end
        launch = run.launched.get((gang.step, gang.host))
        for earlier in self._busy.get(gang.host, ()):
            if set(earlier.devices) & set(gang.devices) and earlier.devices != gang.devices:
                yield ORDER, earlier.start, earlier.end
        room = launch.args.get("room") if launch is not None else None
        if room is not None:
            yield MEMORY, begin, float(room)


def blame(
    since: float, until: float, submitted: float, obstacles: Iterable[tuple[str, float, float]]
) -> list[tuple[str, float, float]]:
    """The time between two moments (seconds) divided among causes, latest part first.

    obstacles: ``(cause, from, until)``; of those that end together the first has the blame.
    """
    out: list[tuple[str, float, float]] = []

    def put(cause: str, start: float) -> None:
        nonlocal until
        start = max(start, since)
        if start < until:
            out.append((cause, start, until))
            until = start

    for cause, begin, end in sorted(obstacles, key=lambda o: -o[2]):
        begin = max(begin, submitted)
        if min(end, until) > begin and until > since:
            put(DISPATCH, min(max(end, begin), until))
            put(cause, begin)
    put(DISPATCH, submitted)
    put(NOTHING, since)
    return out


def known_at(record: Record) -> float:
    """When a record can be known: a span at its end."""
    return record.end if isinstance(record, Span) else record.time


def waits(
    records: Iterable[Record], start: float, end: float
) -> dict[Lane, list[tuple[str, float, float]]]:
    """What every device did between two times (seconds): ``(cause, from, until)`` without gaps.

    The first of the causes is :data:`RUNNING`; the others are :data:`CAUSES`.
    Devices that never ran anything are not in the answer.
    """
    if end <= start:
        raise ValueError(f"the range must have a length: {start} to {end}")
    fold = Waits()
    out: dict[Lane, list[tuple[str, float, float]]] = {}
    # A transfer may be known only after the gang that it was for, when hosts report in batches.
    ranked = sorted(records, key=lambda r: (known_at(r), isinstance(r, Span) and r.kind == "gang"))
    for record in ranked:
        if isinstance(record, Span) and record.kind == "gang":
            for lane in lanes_of(record.island, record.host, record.devices):
                fold.free.setdefault(lane, start)
        for devices, wait in fold.add(record):
            for lane in lanes_of(wait.gang.island, wait.gang.host, devices):
                out.setdefault(lane, []).append((wait.cause, wait.start, wait.end))
        if isinstance(record, Span) and record.kind == "gang":
            for lane in lanes_of(record.island, record.host, record.devices):
                out.setdefault(lane, []).append((RUNNING, record.start, record.end))
    return {lane: _tiled(parts, start, end) for lane, parts in out.items()}


def _tiled(
    parts: list[tuple[str, float, float]], start: float, end: float
) -> list[tuple[str, float, float]]:
    """Cut to a range, without overlaps, the rest filled: nobody asked for more."""
    out: list[tuple[str, float, float]] = []
    reached = start
    for cause, a, b in sorted(parts, key=lambda part: (part[1], part[2])):
        a, b = max(a, reached), min(b, end)
        if b <= a:
            continue
        if a > reached:
            out.append((NOTHING, reached, a))
        out.append((cause, a, b))
        reached = b
    if reached < end:
        out.append((NOTHING, reached, end))
    return out


def shares(parts: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Seconds by cause."""
    out: dict[str, float] = {}
    for cause, start, end in parts:
        out[cause] = out.get(cause, 0.0) + end - start
    return out
