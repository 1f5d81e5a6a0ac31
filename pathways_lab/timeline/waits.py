"""The causes for which a device waited, whenever it did not compute.

Problem: an idle device is the loss; a reader needs its cause.  Several things
are often awaited at once, and only the one that came last held the device up.

How: the gap before a gang is walked backwards from its start.  At each moment
the obstacle that ended last gets the blame, as far back as it reaches; before
the run was submitted there was nothing to do, as far as is known by then: another run may
have waited for that device already, and says so with its first gang there.

Rule for maintainers: the parts of a gap add up to the gap, to the last float
(tested for arbitrary records).  Unknown obstacles are left out, and what no
obstacle explains is dispatch: the time that our own machinery takes.  So a place
that is granted late is no obstacle of its own: the control plane withholds it while
something else is awaited, and only the rest of the time is its work.  The last
computation that had ended on the slices of a run before it had its first places, or for which those
of a run whose results it reads were withheld, counts as the one that its own were withheld for,
and the time from its end until they came as that of its report:
records do not say when a host told of an end, but places come when the control plane hears of it.
Later places of a run may come late for any of its ends, so that none of these is named.

Paper: section 5.1 (dispatch overheads), figure 12 (where time goes).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from pathways_lab.timeline.columns import Floats, Joined, StepTimes, Times
from pathways_lab.timeline.flow import Flows
from pathways_lab.timeline.machine import Lane, lanes_of
from pathways_lab.timeline.packed import Granted, Item, Packed, Row
from pathways_lab.timeline.records import ENDS, Event, Record, Sample, Span

RUNNING, NOTHING = "running", "nothing to do"
DISPATCH, ORDER, MEMORY, TURN = "dispatch", "gang order", "memory", "turn"
INPUT, TRANSFER, COMPILE = "earlier computation", "input transfer", "compiling"
REPORT = "late report"
CAUSES = (DISPATCH, ORDER, MEMORY, TURN, INPUT, TRANSFER, COMPILE, REPORT, NOTHING)
"""The causes for which a device may wait.

dispatch: the control plane's and the host's work until the gang is launched, while
    nothing else is awaited.
gang order: a gang that has its turn earlier, on devices that it shares.
memory: the run was ready, and the memory that it needs, of devices or of its client's quota,
    was not there.
turn: the run was ready, and the policy preferred others.
earlier computation: one that makes its inputs, elsewhere; or one on a slice of its run, on any
    host, that had to end before the run had its places: they are granted a little ahead only.
compiling: a host still made a function of the run, which begins when all of them are made.
late report: a computation for whose end the run had no places had ended, and for more than
    :data:`PROMPT` no host had told of it: its process had no processor, or its link was slow.
"""

LAST = 16
"""Gangs of each host that may be in the way of others, and transfers to it that may be inputs
where nobody knows which are."""

PROMPT = 0.01
"""Seconds within which hosts tell of an end that places are withheld for, and the control plane
gives these: all of that is dispatch."""

SKEW = 1e-3
"""Seconds by which what was told by another process may seem to come too late."""

KEEP = 1024
"""Runs, and compiled functions, of which obstacles are remembered."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Devices of one host that waited from *start* to *end* (seconds) before a gang."""

    cause: str
    start: float
    end: float
    gang: Span


DeviceWaits = list[tuple[tuple[int, ...], Wait]]
"""Waits, and the devices that had each."""

Part = tuple[tuple[int, ...], str, float, float]
"""Devices, and what they waited for from when until when (seconds)."""


@dataclass(frozen=True, slots=True, eq=False)
class RowWaits:
    """A row, and what its devices waited for: before its first gang *first*, before each of the
    others from *since* until it started (*until*), for an earlier computation until *cut*, if there
    is one, then for dispatch."""

    row: Row
    when: Times
    first: list[Part]
    cut: Floats | None

    @property
    def since(self) -> Floats:
        return self.when.end[:-1]

    @property
    def until(self) -> Floats:
        return self.when.start[1:]

    def all(self) -> DeviceWaits:
        """One by one."""
        gangs, devices = self.row.gangs(), self.row.abouts[0].devices
        gang = next(gangs)
        out = [(part[0], Wait(*part[1:], gang)) for part in self.first]
        cuts = self.since if self.cut is None else self.cut
        parts = zip(self.since.tolist(), cuts.tolist(), self.until.tolist(), strict=True)
        for gang, (since, cut, until) in zip(gangs, parts, strict=True):
            if cut < until:
                out.append((devices, Wait(DISPATCH, cut, until, gang)))
            if since < cut:
                out.append((devices, Wait(INPUT, since, cut, gang)))
        return out


class _Gang(NamedTuple):
    run: int
    step: int
    host: str
    node: str
    devices: tuple[int, ...]


class _Held(NamedTuple):
    """Gangs that had the same devices, in order."""

    devices: tuple[int, ...]
    start: Sequence[float] | Floats
    end: Sequence[float] | Floats


class Ended(NamedTuple):
    """When a computation ended (seconds), its node, the slice, and which it is."""

    time: float
    node: str = ""
    slice: int = -1
    run: int = 0
    step: int = -1


_NEVER = Ended(float("-inf"))


@dataclass(slots=True)
class _Run:
    """ended: by step, on the last host that is known to have ended it.

    first: when it had its first places.  places: the slices that have these.  ahead: the last
    computation that had ended there before, once a gang of the run is folded: until then a slow
    host may tell of a later one.  arrived: transfers by host and step.  over: the last known end.
    """

    submitted: float = float("-inf")
    first: float = float("inf")
    places: tuple[int, ...] = ()
    ahead: Ended | None = None
    admitted: tuple[str, float, float] | None = None
    compiling: list[tuple[float, float]] | None = None
    hosts: set[str] = field(default_factory=set)
    ended: StepTimes = field(default_factory=StepTimes)
    over: float = float("-inf")
    arrived: dict[str, dict[int, Span]] = field(default_factory=dict)

    def placed(self, time: float, slices: Iterable[int]) -> None:
        """It had places on *slices* at *time*."""
        if time < self.first:
            self.first, self.places = time, ()
        if time == self.first:
            self.places = (*self.places, *slices)

    def ends(self, steps: Iterable[int]) -> list[float]:
        """When *steps* ended, as far as that is known."""
        return [end for step in steps if (end := self.ended[step]) > float("-inf")]


class Waits:
    """Folds records, in the order in which they become known, into waits.

    since: devices of which nothing is known are free since then (seconds).
    """

    def __init__(self, flows: Flows | None = None, since: float = float("-inf")) -> None:
        self._own = flows is None
        self._since = since
        self._flows = flows or Flows()
        self._runs: dict[int, _Run] = {}
        self._compiled: dict[tuple[int, str], tuple[float, float]] = {}
        self._last_compiled = float("-inf")
        self._ended: dict[int, dict[tuple[int, int], tuple[float, str]]] = {}
        self._together: dict[str, tuple[Lane, ...]] = {}
        self._free: dict[Lane, float] = {}
        self._idle: dict[Lane, list[tuple[float, float]]] = {}
        self._busy: dict[str, list[_Held]] = {}

    def add(self, record: Record) -> DeviceWaits:
        """Fold one record; of a gang, ``(devices, wait)`` of each part of the gaps in which devices
        waited for it, the latest first."""
        if self._own:
            self._flows.add(record)
        if isinstance(record, Span) and record.kind == "compile":
            self._compile(record)
        if isinstance(record, Sample) or not record.run:
            return []
        run = self._run(record.run)
        if isinstance(record, Event):
            self._event(record, run)
        elif record.kind == "transfer":
            run.arrived.setdefault(record.host, {})[record.step] = record
        elif record.kind == "gang":
            return list(self._gang(record, run))
        return []

    def add_granted(self, granted: Granted) -> None:
        """Fold a window of places."""
        slices = {gang[3] for gang in granted.placing.gangs}
        self._run(granted.run).placed(granted.time, slices)

    def add_row(self, row: Row, when: Times) -> RowWaits | None:
        """Fold a plain row; None, and nothing is folded, where only single gangs will do.

        That is where anything but the gangs before it may have been in the way of its second.
        """
        run, about = self._run(row.run), row.abouts[0]
        over = float(when.end[0])
        lanes = self._as_one(lanes_of(row.island, row.host, about.devices))
        if (
            run.arrived
            or max(run.submitted, self._last_compiled) > over
            or over < run.first < float("inf")
            or any(self._free.get(lane, over) > over for lane in lanes)
            or any(
                held.devices != about.devices and held.end[-1] > over
                for held in self._busy.get(row.host, ())
            )
        ):
            return None
        gang = _Gang(row.run, row.step, row.host, row.about(0).node, about.devices)
        first = list(self._before(gang, run, lanes, float(when.start[0]), over))
        cut = None
        if row.count > 1 and run.hosts - {row.host}:
            inputs = self._inputs(row, run, row.count - 1)
            cut = np.clip(inputs, when.end[:-1], when.start[1:])
        run.hosts.add(row.host)
        run.ended.add_many(row.step, when.end)
        run.over = max(run.over, float(when.end[-1]))
        for at in range(max(0, row.count - LAST), row.count):
            gang_of = row.run, row.step + at
            self._end(about.slice, gang_of, float(when.end[at]), row.about(at).node)
        self._free.update(dict.fromkeys(lanes, float(when.end[-1])))
        self._held(row.host, _Held(about.devices, when.start[-LAST:], when.end[-LAST:]))
        return RowWaits(row, when, first, cut)

    def ahead(self, run: int) -> Ended:
        """The computation until whose end a run had no places, as far as is remembered."""
        return self._ahead(run, self._runs[run]) if run in self._runs else _NEVER

    def _ahead(self, number: int, run: _Run) -> Ended:
        if run.ahead is not None:
            return run.ahead
        before = [
            Ended(end, node, s, *gang)
            for s in run.places
            for gang, (end, node) in self._ended.get(s, {}).items()
        ]
        for maker in self._flows.before(number):
            if maker in self._runs and (ahead := self._runs[maker].ahead) is not None:
                before.append(ahead)
        known = [each for each in before if each.time < run.first + SKEW]
        found = max(known, default=_NEVER)
        return found._replace(time=min(found.time, run.first))

    def _end(self, slice_id: int, gang: tuple[int, int], time: float, node: str) -> None:
        """A gang has ended on a host.  The newest gangs are kept, by their numbers: so rows tell as
        much as single gangs."""
        ends = self._ended.setdefault(slice_id, {})
        ends[gang] = max(ends.get(gang, (time, node)), (time, node))
        if len(ends) > LAST:
            del ends[min(ends)]
        if len(self._ended) > KEEP:
            del self._ended[next(iter(self._ended))]

    def _as_one(self, lanes: tuple[Lane, ...]) -> tuple[Lane, ...]:
        """The first one for all *lanes*, of one host, if that never used them but together."""
        known = self._together.setdefault(lanes[0].host, lanes) if lanes else ()
        if known == lanes:
            return lanes[:1]
        for state in (self._free, self._idle) if known else ():
            if known[0] in state:
                told: Any = state[known[0]]
                state.update((lane, copy(told)) for lane in known)
        self._together[lanes[0].host] = ()
        return lanes

    def _inputs(self, row: Row, run: _Run, count: int) -> Floats:
        """When all hosts had ended what makes the inputs of the *count* gangs after the first."""
        flow = self._flows.run(row.run)
        steps = range(row.step + 1, row.step + 1 + count)
        made = [flow[step].after if step < len(flow) else () for step in steps]
        latest = [max(run.ends(after), default=float("-inf")) for after in made]
        return np.array(latest, np.float64)

    def _run(self, number: int) -> _Run:
        run = self._runs.get(number)
        if run is None:
            run = self._runs[number] = _Run()
            if len(self._runs) > KEEP:
                del self._runs[next(iter(self._runs))]
        return run

    def _compile(self, span: Span) -> None:
        """Hosts that make one function for one slice at the same time make it once."""
        key = int(span.args.get("slice", -1)), span.node
        since, until = self._compiled.pop(key, (span.start, span.end))
        if since <= span.end and span.start <= until:
            span_of_all = min(since, span.start), max(until, span.end)
        else:
            span_of_all = span.start, span.end
        self._compiled[key] = span_of_all
        self._last_compiled = max(self._last_compiled, span.end)
        if len(self._compiled) > KEEP:
            del self._compiled[next(iter(self._compiled))]

    def compiled(self, run: int, until: float) -> str:
        """The function of a run that was made last by some moment (seconds), as is remembered."""
        nodes = {(stage.slice, stage.node): stage.node for stage in self._flows.run(run)}
        made = {node: self._compiled[key][1] for key, node in nodes.items()
                if key in self._compiled and self._compiled[key][1] < until + SKEW}  # fmt: skip
        return max(made, key=lambda node: made[node], default="")

    def _compiling(self, number: int, run: _Run) -> list[tuple[float, float]]:
        """When functions of a run were made after it was submitted, without overlaps."""
        if run.compiling is None:
            keys = {(stage.slice, stage.node) for stage in self._flows.run(number)}
            found = sorted(self._compiled[key] for key in keys if key in self._compiled)
            run.compiling = []
            for since, until in found:
                if run.compiling and since <= run.compiling[-1][1]:
                    since, before = run.compiling.pop()
                    until = max(before, until)
                if until > run.submitted:
                    run.compiling.append((since, until))
        return run.compiling

    def _held(self, host: str, held: _Held) -> None:
        """Remember the last :data:`LAST` gangs of a host."""
        recent = self._busy.setdefault(host, [])
        recent.append(held)
        many = sum([len(block.end) for block in recent]) - LAST
        while many > 0:
            devices, start, end = recent[0]
            if many >= len(end):
                del recent[0]
            else:
                recent[0] = _Held(devices, start[many:], end[many:])
            many -= len(end)

    def _event(self, event: Event, run: _Run) -> None:
        if event.kind == "submitted":
            run.submitted = event.time
        elif event.kind == "admitted":
            cause = MEMORY if event.args.get("waited_for") == "memory" else TURN
            run.admitted = cause, float(event.args.get("since", event.time)), event.time
        elif event.kind == "granted":
            run.placed(event.time, [int(event.args.get("slice", -1))])

    def _gang(self, span: Span, run: _Run) -> Iterator[tuple[tuple[int, ...], Wait]]:
        gang = _Gang(span.run, span.step, span.host, span.node, span.devices)
        lanes = self._as_one(lanes_of(span.island, span.host, span.devices))
        for devices, cause, start, end in self._before(gang, run, lanes, span.start, span.end):
            yield devices, Wait(cause, start, end, span)
        run.hosts.add(span.host)
        run.ended.add(span.step, span.end)
        run.over = max(run.over, span.end)
        self._end(int(span.args.get("slice", -1)), (span.run, span.step), span.end, span.node)
        self._held(span.host, _Held(span.devices, (span.start,), (span.end,)))

    def _before(
        self, gang: _Gang, run: _Run, lanes: tuple[Lane, ...], start: float, end: float
    ) -> Iterator[Part]:
        """The waits of a gang's devices for it; then it has them until its end.

        lanes: as :meth:`_as_one` has them.
        """
        gaps: dict[tuple[float, float], list[Lane]] = {}
        free, submitted = self._free, run.submitted
        for lane in lanes:
            since = free.get(lane, self._since)
            if since < start and max(since, submitted) > float("-inf"):
                gaps.setdefault((since, start), []).append(lane)
            if lane in self._idle:
                for gap in self._unclaimed(lane, submitted):
                    gaps.setdefault(gap, []).append(lane)
            free[lane] = max(since, end)
        obstacles: tuple[tuple[str, float, float], ...] = ()
        if gaps:
            run.ahead = self._ahead(gang.run, run)
            obstacles = tuple(_reported(run, list(self._obstacles(gang, run, start))))
        whole = len(lanes) < len(gang.devices)
        for (since, until), of in gaps.items():
            devices = gang.devices if whole else tuple([lane.device for lane in of])
            for cause, begun, over in blame(since, until, submitted, obstacles):
                if cause != NOTHING:
                    yield devices, cause, begun, over
                    continue
                for lane in of:
                    idle = self._idle.setdefault(lane, [])
                    idle.append((begun, over))
                    del idle[:-LAST]

    def so_far(
        self, run: int, step: int, node: str, lanes: tuple[Lane, ...], lane: Lane, start: float,
        more: Iterable[tuple[str, float]] = (),
    ) -> list[tuple[str, float, float]]:  # fmt: skip
        """The waits of *lane* before a gang that it began at *start* (seconds) with *lanes* of its
        host, as known, and for *more* until then: ``(cause, from, until)``.  Nothing is folded."""
        known = self._runs.get(run)
        first = (self._together.get(lane.host) or lanes)[0]  # see _as_one
        since = self._free.get(lane, self._free.get(first, self._since))
        if known is None or known.submitted == since == -np.inf:
            return []
        gang = _Gang(run, step, lanes[0].host, node, tuple([lane.device for lane in lanes]))
        obstacles = _reported(known, list(self._obstacles(gang, known, start, more)))
        parts = blame(since, start, known.submitted, obstacles)
        return [part for part in parts if part[0] != NOTHING]

    def _unclaimed(self, lane: Lane, submitted: float) -> list[tuple[float, float]]:
        """Take the times after *submitted* for which nobody has said that the lane was awaited."""
        idle = self._idle[lane]
        found = [gap for gap in idle if gap[1] > submitted > float("-inf")]
        if found:
            self._idle[lane] = [gap for gap in idle if gap not in found]
        return found[::-1]

    def _obstacles(
        self, gang: _Gang, run: _Run, start: float, more: Iterable[tuple[str, float]] = ()
    ) -> Iterator[tuple[str, float, float]]:
        """``(cause, from, until)`` of everything that had to happen before *gang*."""
        begin = run.submitted
        begun = run.first if run.first < float("inf") else begin
        yield from ((cause, begun, end) for cause, end in more)
        if run.admitted is not None:
            yield run.admitted
        yield INPUT, begin, self._ahead(gang.run, run).time
        flow, arrived = self._flows.run(gang.run), run.arrived.get(gang.host, {})
        arrivals: list[Span | None]
        if gang.step < len(flow):
            made = flow[gang.step].after
            arrivals, ends = [arrived.get(step) for step in made], run.ends(made)
        else:
            arrivals, ends = list(islice(reversed(arrived.values()), LAST)), []
        for arrival in arrivals:
            if arrival is not None and arrival.end <= start:
                yield TRANSFER, arrival.start, arrival.end
                yield INPUT, begun, arrival.start
        for end in ends:
            yield INPUT, begun, end
        for maker, step in self._flows.sources(gang.run, gang.step):
            moved = self._runs.get(maker)
            arrival = moved.arrived.get(gang.host, {}).get(step) if moved else None
            if arrival is not None and arrival.end <= start:
                yield TRANSFER, arrival.start, arrival.end
                yield INPUT, begin, arrival.start
        for maker in self._flows.before(gang.run):
            # No place would have helped: the run has waited for its results since it was submitted.
            if maker in self._runs and self._runs[maker].over <= start:
                yield INPUT, begin, self._runs[maker].over
        if self._last_compiled > begin:
            for since, until in self._compiling(gang.run, run):
                yield COMPILE, since, until
        for earlier in self._busy.get(gang.host, ()):
            if earlier.devices != gang.devices and set(earlier.devices) & set(gang.devices):
                for since, end in zip(earlier.start, earlier.end, strict=True):
                    # Hosts launch in order: it was in the way also while it waited itself.
                    yield ORDER, min(float(since), begun), float(end)


def _reported(
    run: _Run, obstacles: list[tuple[str, float, float]]
) -> list[tuple[str, float, float]]:
    """The same and, where its places came late after the end of a computation that was the last
    thing before them, that nobody had told of it."""
    known = [(end, cause) for cause, _, end in obstacles if end < run.first + SKEW]
    end, cause = max(known, default=(float("inf"), ""))
    late = cause in (INPUT, ORDER) and run.submitted < end and run.first < float("inf")
    if late and run.first - end > PROMPT:
        obstacles.append((REPORT, end, run.first))
    return obstacles


def marks(
    waits: Sequence[RowWaits], rows: Joined
) -> Iterator[tuple[str, tuple[int, ...], list[int], Floats, Floats]]:
    """The waits of devices for the gangs of rows: cause and devices, and in order of time for
    which gangs, from when and until when.

    waits: of each of *rows*.
    """
    found: dict[tuple[str, tuple[int, ...]], list[tuple[Floats, Floats, Floats]]] = {}
    for each, head in zip(waits, rows.heads, strict=False):
        for devices, cause, since, until in reversed(each.first):
            one = np.array([[head], [since], [until]], np.float64)
            found.setdefault((cause, devices), []).append((one[0], one[1], one[2]))
        after = np.arange(head + 1.0, head + each.row.count)
        cut = each.since if each.cut is None else each.cut
        found.setdefault((DISPATCH, rows.devices), []).append((after, cut, each.until))
        if each.cut is not None:
            found.setdefault((INPUT, rows.devices), []).append((after, each.since, each.cut))
    for (cause, devices), parts in found.items():
        at, start, end = [np.concatenate(column) for column in zip(*parts, strict=True)]
        there = start < end
        if there.any():
            yield cause, devices, at[there].astype(int).tolist(), start[there], end[there]


def blame(
    since: float, until: float, submitted: float, obstacles: Iterable[tuple[str, float, float]]
) -> list[tuple[str, float, float]]:
    """The time between two moments (seconds) divided among causes, latest part first.

    obstacles: ``(cause, from, until)``; of those that end together the first has the blame.  Times
    of one cause that follow each other are one wait.
    """
    out: list[tuple[str, float, float]] = []

    def put(cause: str, start: float) -> None:
        nonlocal until
        start = max(start, since)
        if start < until:
            over = out.pop()[2] if out and out[-1][0] == cause else until
            out.append((cause, start, over))
            until = start

    for cause, begin, end in sorted(obstacles, key=lambda o: -o[2]):
        begin = max(begin, submitted)
        if min(end, until) > begin and until > since:
            put(DISPATCH, min(max(end, begin), until))
            put(cause, begin)
    put(DISPATCH, submitted)
    put(NOTHING, since)
    return out


def known_at(record: Item) -> float:
    """When a record can be known: a span at its end."""
    if isinstance(record, Packed):
        return record.known_at
    return record.end if isinstance(record, Span) else record.time


def known_order(record: Item) -> tuple[float, int]:
    """A key to sort by: the order in which records are folded.

    Hosts report in batches, so what a gang waited for may come after it.
    """
    gang = isinstance(record, Row) or (isinstance(record, Span) and record.kind == "gang")
    over = isinstance(record, Event) and record.kind in ENDS
    return known_at(record), 2 * over + gang
