"""One run as planned against the same run as it was, and where the time of its devices went.

Problem: "why is it slower than it should be" deserves numbers per device.  The
plan here is what an ideal machine does with the same program: the measured
computations in the same order, started as soon as their inputs exist, with
transfers and dispatch that take no time.

Rule for maintainers: the causes of a device's gap add up to the gap (tested for
arbitrary records).  Idle time that the ideal machine has too is the plan's,
and is taken from what a device waits for by nature: inputs, and work.  A device that waits for a
late input waits for what the maker of the input waits for, and while that computes, for what
it was late for.  A run that was submitted ahead has
its turn on a device after the runs before it: that time is theirs,
by name, until the end of their gangs.

Paper: section 5.3 (pipeline bubbles), figure 10 (trace of a pipeline).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import NamedTuple

from pathways_lab.timeline import queries
from pathways_lab.timeline.flow import Flow, Flows
from pathways_lab.timeline.machine import Lane, lanes_of
from pathways_lab.timeline.packed import Granted
from pathways_lab.timeline.records import ENDS, Event, Record, Span, own
from pathways_lab.timeline.text_table import Tabled, TextTable
from pathways_lab.timeline.waits import (
    DISPATCH,
    INPUT,
    NOTHING,
    DeviceWaits,
    RowWaits,
    Waits,
    known_order,
)

PLAN, OTHERS = "idle by plan", "other runs"
"""Parts of a gap, beside :data:`.waits.CAUSES` and the runs that were before it (:func:`behind`).

other runs: those whose gangs are not known any more.
"""
COMPUTING, LATE = "computing", "late hosts"
IMBALANCE, BUBBLE = "imbalance", "bubble"
MOSTLY = 2
"""Functions that the table of an explanation names with each cause."""


def behind(gang: Span) -> str:
    """The cause of a gap in which a device was for another run, whose *gang* this is."""
    run = f"run {own(gang.run)}"
    return f"{run} ({gang.program})" if gang.program else run


@dataclass(slots=True)
class RunSeen:
    """The known facts of one run.

    submitted, begun, ended: seconds; begun is when the first of its gangs that are over had begun,
    ended is None while it goes on.  count: of its gangs that have ended.  waited: the line at which
    its client waited for a value since its run before, and worked: at which it was seen at work
    between calls; "" for none.  windows: of its places.
    """

    run: int
    program: str = ""
    client: str = ""
    submitted: float = float("inf")
    begun: float = float("inf")
    ended: float | None = None
    outcome: str = ""
    transfers: list[Span] = field(default_factory=list)
    messages: list[Event] = field(default_factory=list)
    count: int = 0
    waited: str = ""
    worked: str = ""
    windows: list[Granted] = field(default_factory=list)
    _places: dict[int, float] = field(default_factory=dict)
    _last: float = float("-inf")
    _gangs: list[Span] = field(default_factory=list)
    _waits: DeviceWaits = field(default_factory=list)
    _rows: list[RowWaits] = field(default_factory=list)

    def add(self, record: Record, waits: DeviceWaits) -> None:
        """Fold a record of this run, and the waits that it ended."""
        if isinstance(record, Span):
            self.program, self.client = record.program, record.client
            if record.kind == "gang":
                self._unpack()
                self._gangs.append(record)
                self._waits += waits
                self.begun = min(self.begun, record.start)
                self._last = max(self._last, record.end)
                self.count += 1
            elif record.kind == "transfer":
                self.transfers.append(record)
        elif isinstance(record, Event):
            if record.kind == "submitted":
                self.submitted = record.time
                self.waited = record.args.get("waited", "")
                self.worked = record.args.get("worked", "")
                self.program, self.client = record.program, record.client
            elif record.kind == "granted":
                self._places[record.step] = record.time
            elif record.kind == "message":
                self.messages.append(record)
            elif record.kind in ENDS:
                self.ended, self.outcome = record.time, record.kind

    def add_row(self, waits: RowWaits) -> None:
        """Fold a row of this run, and the waits that its gangs ended."""
        about = waits.row.abouts[0]
        self.program, self.client = about.program, about.client
        self._rows.append(waits)
        self.begun = min(self.begun, waits.row.begun)
        self._last = max(self._last, waits.row.known_at)
        self.count += waits.row.count

    def _unpack(self) -> None:
        """The rows, gang by gang."""
        for waits in self._rows:
            self._gangs += waits.row.gangs()
            self._waits += waits.all()
        self._rows.clear()

    @property
    def gangs(self) -> list[Span]:
        """Its computations, as they became known."""
        self._unpack()
        return self._gangs

    @property
    def placed(self) -> bool:
        """Whether any of its gangs had a place."""
        return bool(self.count or self.windows or self._places)

    @property
    def granted(self) -> dict[int, float]:
        """By step, when it got its places, in seconds."""
        columns = (
            (gang[1], window.time) for window in self.windows for gang in window.placing.gangs
        )
        return {**self._places, **dict(columns)}

    @property
    def stretches(self) -> list[Span]:
        """When it had its devices: as *gangs*, but of gangs in a row one for all of them."""
        rows = [waits.row for waits in self._rows]
        return [*self._gangs, *(replace(next(row.gangs()), end=row.known_at) for row in rows)]

    @property
    def waits(self) -> DeviceWaits:
        """The causes for which devices waited before each."""
        self._unpack()
        return self._waits

    @property
    def begin(self) -> float:
        """The first moment, in seconds."""
        return min(self.submitted, self.begun)

    @property
    def end(self) -> float:
        """The end of its last computation, in seconds."""
        return self._last if self.count else self.begin


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a run; times in seconds since its submission.

    planned, actual: ``(step, start, end)``.  gap: seconds by cause.
    """

    lane: Lane
    planned: tuple[tuple[int, float, float], ...]
    actual: tuple[tuple[int, float, float], ...]
    gap: Mapping[str, float]

    @property
    def lost(self) -> float:
        """Seconds of the run in which this device did not compute for it."""
        return sum(self.gap.values())


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the time of a run's devices.

    seconds: of all devices.  share: 0 to 1.  functions: seconds by name and line, where it is
    about functions: those that computed, or before which devices waited; the largest first.
    """

    cause: str
    seconds: float
    share: float
    functions: Mapping[tuple[str, str], float]


@dataclass(frozen=True, slots=True, repr=False)
class Planned(Tabled):
    """A run on an ideal machine, and as it was; ``print`` says where the time of its devices went.

    planned, actual: seconds that the run takes on an ideal machine, and took.
    functions: by cause, device seconds by name and line of the function that computed, or before
        which devices waited.
    """

    seen: RunSeen
    planned: float
    actual: float
    devices: tuple[Device, ...]
    functions: Mapping[str, Mapping[tuple[str, str], float]]

    def gap(self) -> dict[str, float]:
        """Lost device seconds by cause, of all devices."""
        out: dict[str, float] = {}
        for device in self.devices:
            for cause, seconds in device.gap.items():
                out[cause] = out.get(cause, 0.0) + seconds
        return out

    def parts(self) -> tuple[Part, ...]:
        """The whole time of all its devices, by cause, the largest first; they add up to it.

        computing: what the fastest host of each gang took.  late hosts: what others took more,
            which waited inside the gang.  imbalance: idle by plan, because another device has
            more to compute.  bubble: idle by plan for the order of the program.  The rest as in
            :data:`.waits.CAUSES`, and other runs by name.
        """
        whole = self.actual * len(self.devices)
        busy = [_busy(device) for device in self.devices]
        out = self.gap()
        idle = out.pop(PLAN, 0.0)
        computing = min(sum(busy), whole - sum(out.values()) - idle)
        uneven = max(busy, default=0.0) * len(busy) - sum(busy)
        free = self.planned * len(busy) - sum(busy)
        out[IMBALANCE] = idle * uneven / free if free > 0 else 0.0
        out[BUBBLE] = idle - out[IMBALANCE]
        out[COMPUTING] = computing
        out[LATE] = max(0.0, whole - sum(out.values()))
        return tuple(
            Part(cause, seconds, seconds / whole, self.functions.get(cause, {}))
            for cause, seconds in sorted(out.items(), key=lambda part: -part[1])
            if seconds > 1e-9 * whole
        )

    def _table(self) -> TextTable:
        rows = [
            (
                part.cause, f"{part.share:.1%}", f"{1e3 * part.seconds:,.1f}",
                ", ".join(
                    f"{name} ({line.partition(': ')[0]})" if line else name
                    for name, line in list(part.functions)[:MOSTLY]
                ),
            )
            for part in self.parts()
        ]  # fmt: skip
        seen = self.seen
        caption = (
            f"run {own(seen.run)} of {seen.program or 'a program'}: {1e3 * self.actual:,.1f} ms on"
            f" {len(self.devices)} devices, {1e3 * self.planned:,.1f} ms on an ideal machine"
        )
        return TextTable(rows, ("cause", "share", "device ms", "mostly"), "<>><", caption)


def _busy(device: Device) -> float:
    """Seconds that a device computes by plan."""
    return sum(end - start for _, start, end in device.planned)


def ideal(gangs: Iterable[Span], flow: Flow) -> dict[int, tuple[float, float]]:
    """When an ideal machine starts and ends every step, in seconds.

    Gangs take what their fastest host took: the others waited for it inside.
    """
    seconds: dict[int, float] = {}
    where: dict[int, set[Lane]] = {}
    for gang in gangs:
        long = gang.end - gang.start
        seconds[gang.step] = min(seconds.get(gang.step, long), long)
        lanes = lanes_of(gang.island, gang.host, gang.devices)
        where.setdefault(gang.step, set()).update(lanes)
    free: dict[Lane, float] = {}
    out: dict[int, tuple[float, float]] = {}
    for step in range(max([len(flow), *(s + 1 for s in seconds)])):
        after = flow[step].after if step < len(flow) else ()
        start = max((out[a][1] for a in after if a in out), default=0.0)
        if step in seconds:
            start = max([start, *(free.get(lane, 0.0) for lane in where[step])])
        elif not (step < len(flow) and flow[step].transfer):
            continue
        end = start + seconds.get(step, 0.0)
        out[step] = start, end
        free.update(dict.fromkeys(where.get(step, ()), end))
    return out


def compare(seen: RunSeen, flow: Flow, others: Iterable[Span] = ()) -> Planned:
    """The run as planned and as it was.  others: when other runs had its devices."""
    plan = ideal(seen.gangs, flow)
    begin, end = seen.begin, seen.end
    actual = end - begin
    length = max((end for _, end in plan.values()), default=0.0)
    ran = queries.lanes(seen.gangs)
    meanwhile = queries.lanes(g for g in others if g.end > begin and g.start < end)
    waited: dict[Lane, list[Tile]] = {}
    for numbers, wait in seen.waits:
        for lane in lanes_of(wait.gang.island, wait.gang.host, numbers):
            waited.setdefault(lane, []).append(Tile(wait.start, wait.end, wait.cause, wait.gang))
    tiles = {
        lane: _tiles(gangs, waited.get(lane, []), meanwhile.get(lane, []), begin, end)
        for lane, gangs in ran.items()
    }
    reasons = _Reasons(seen.gangs, flow, tiles, seen.granted)
    devices = []
    for lane, gangs in sorted(ran.items()):
        busy = sum(plan[g.step][1] - plan[g.step][0] for g in gangs)
        devices.append(
            Device(
                lane,
                tuple((g.step, *plan[g.step]) for g in gangs),
                tuple((g.step, g.start - begin, g.end - begin) for g in gangs),
                _of_plan(reasons.gap(lane), max(0.0, length - busy)),
            )
        )
    return Planned(seen, length, actual, tuple(devices), reasons.functions())


class Tile(NamedTuple):
    """A time of a device, in seconds.  gang: that ran, or that the device waited for to run."""

    start: float
    end: float
    cause: str
    gang: Span | None = None


def _tiles(
    gangs: list[Span], waited: list[Tile], others: list[Span], begin: float, end: float
) -> list[Tile]:
    """All of a device's time between two moments.

    others: gangs of other runs on the device.  *gangs* and *others* are in order of their starts.
    """
    waited = sorted(waited, key=lambda tile: tile.start)
    before = _Before(others)
    out: list[Tile] = []
    reached, at = begin, 0
    for gang in gangs:
        if gang.start > reached:
            while at < len(waited) and waited[at].start < gang.start:
                tile = waited[at]
                since, until = max(tile.start, reached), min(tile.end, gang.start)
                if until > since:
                    out += before.parts(reached, since)
                    out.append(tile._replace(start=since, end=until))
                    reached = until
                if tile.end > gang.start:
                    break
                at += 1
            out += before.parts(reached, gang.start)
        if gang.end > reached:
            out.append(Tile(max(gang.start, reached), gang.end, COMPUTING, gang))
            reached = gang.end
    if end > reached:
        out.append(Tile(reached, end, NOTHING))
    return out


class _Before:
    """Gangs of other runs on a device, asked about one stretch of time after the other.

    They may overlap: what is known of many gangs as one goes from the first to the last.
    """

    def __init__(self, gangs: Sequence[Span]) -> None:
        self._later = iter(gangs)
        self._next = next(self._later, None)
        self._begun: list[tuple[float, int, Span]] = []
        self._seen = 0

    def parts(self, start: float, until: float) -> Iterator[Tile]:
        """Whom the time between two moments belongs to: whose gang ends first has it till then."""
        while self._next is not None and self._next.start < until:
            heappush(self._begun, (self._next.end, self._seen, self._next))
            self._next = next(self._later, None)
            self._seen += 1
        while self._begun and start < until:
            end, _, gang = self._begun[0]
            if end > start:
                yield Tile(start, min(end, until), behind(gang))
                start = min(end, until)
            if end <= start:
                heappop(self._begun)
        if start < until:
            yield Tile(start, until, OTHERS)


class _Reasons:
    """The reasons for waits: where an earlier computation is late, what it waited for itself."""

    def __init__(
        self,
        gangs: Iterable[Span],
        flow: Flow,
        tiles: Mapping[Lane, list[Tile]],
        granted: Mapping[int, float],
    ) -> None:
        self._flow = flow
        self._tiles = tiles
        self._granted = granted
        self._last: dict[int, Span] = {}
        for gang in gangs:
            known = self._last.get(gang.step)
            if known is None or gang.end > known.end:
                self._last[gang.step] = gang
        self._ended = sorted(self._last.values(), key=lambda gang: gang.end)
        self._functions: dict[str, dict[tuple[str, str], float]] = {}

    def gap(self, lane: Lane) -> dict[str, float]:
        """Seconds by cause in which a device did not compute for the run; each device once."""
        out: dict[str, float] = {}
        for tile in self._tiles[lane]:
            for cause, start, end in self._of(tile, tile.start, tile.end, len(self._tiles)):
                if cause != COMPUTING:
                    out[cause] = out.get(cause, 0.0) + end - start
                if tile.gang is not None:
                    of, key = (
                        self._functions.setdefault(cause, {}),
                        (tile.gang.node, tile.gang.line),
                    )
                    of[key] = of.get(key, 0.0) + end - start
        return out

    def functions(self) -> dict[str, dict[tuple[str, str], float]]:
        """By cause, seconds of the devices so far by function and line, the largest first."""
        return {
            cause: dict(sorted(of.items(), key=lambda part: -part[1]))
            for cause, of in self._functions.items()
        }

    def _of(
        self, tile: Tile, start: float, end: float, depth: int
    ) -> Iterator[tuple[str, float, float]]:
        """A tile between two moments.  depth: of devices that waited for each other, at most."""
        awaited = self._awaited(tile) if depth else None
        if awaited is None:
            yield tile.cause, start, end
            return
        # A place is given when a computation has ended somewhere in the run.
        cause, until = (INPUT, end) if tile.cause == INPUT else (DISPATCH, min(end, awaited.end))
        tiles = self._tiles[lanes_of(awaited.island, awaited.host, awaited.devices)[0]]
        for at in range(bisect(tiles, start, key=lambda tile: tile.end), len(tiles)):
            if tiles[at].start >= until or start >= until:
                break
            edge = min(tiles[at].end, until)
            if tiles[at].cause in (COMPUTING, NOTHING):
                yield from self._late(tiles, at, edge - start, depth - 1)
            else:
                yield from self._of(tiles[at], start, edge, depth - 1)
            start = edge
        if start < end:
            yield cause, start, end

    def _late(
        self, tiles: list[Tile], at: int, seconds: float, depth: int
    ) -> Iterator[tuple[str, float, float]]:
        """A wait for a gang that computes: so much earlier it could have been, but for what its
        device waited for before it; for the rest of the time it is what is awaited."""
        while at and seconds > 0 and tiles[at - 1].cause not in (COMPUTING, NOTHING):
            at -= 1
            since = max(tiles[at].start, tiles[at].end - seconds)
            yield from self._of(tiles[at], since, tiles[at].end, depth)
            seconds -= tiles[at].end - since
        if seconds > 0:
            yield INPUT, 0.0, seconds

    def _awaited(self, tile: Tile) -> Span | None:
        """The gang that one waits for: it makes its last input, or its end gave it its place."""
        if tile.gang is None or tile.cause not in (INPUT, DISPATCH):
            return None
        if tile.cause == INPUT:
            return self._maker(tile.gang)
        granted = self._granted.get(tile.gang.step, tile.start)
        if granted <= tile.start:
            return None
        before = bisect(self._ended, granted, key=lambda gang: gang.end) - 1
        return self._ended[before] if before >= 0 else None

    def _maker(self, gang: Span) -> Span | None:
        """The gang that makes the last input of one."""
        todo = [gang.step]
        found: Span | None = None
        while todo:
            step = todo.pop()
            for before in self._flow[step].after if step < len(self._flow) else ():
                made = self._last.get(before)
                if made is None:
                    todo.append(before)  # a transfer
                elif found is None or made.end > found.end:
                    found = made
        return found


def _of_plan(gap: dict[str, float], idle: float) -> dict[str, float]:
    """Give the plan its own idle seconds: first those that are idle by nature.

    The rest of its idle time went to other causes, and had to pass anyhow.
    """
    gap, plan = dict(gap), min(idle, sum(gap.values()))
    left = plan
    for cause in (NOTHING, INPUT):
        taken = min(left, gap.get(cause, 0.0))
        gap[cause] = gap.get(cause, 0.0) - taken
        left -= taken
    rest = sum(gap.values())
    spared = left / rest if rest > 0 else 0.0
    out = {PLAN: plan, **{cause: seconds * (1 - spared) for cause, seconds in gap.items()}}
    return {cause: seconds for cause, seconds in out.items() if seconds > 0}


def planned(records: Iterable[Record], run: int) -> Planned:
    """One run of *records* as planned against what happened.

    run: its number, or its client's own where no other client has one of that number.
    Raises as :func:`.queries.run_meant` does.
    """
    ranked = sorted(records, key=known_order)
    gangs = [r.run for r in ranked if isinstance(r, Span) and r.kind == "gang"]
    run = queries.run_meant(run, gangs, "gang")
    flows = Flows()
    fold, seen = Waits(flows), RunSeen(run)
    others: list[Span] = []
    for record in ranked:
        flows.add(record)
        waits = fold.add(record)
        if getattr(record, "run", 0) == run:
            seen.add(record, waits)
        elif isinstance(record, Span) and record.kind == "gang":
            others.append(record)
    return compare(seen, flows.run(run), others)
