"""One run as planned against the same run as it was, and where the difference went.

Problem: "why is it slower than it should be" deserves numbers per device.  The
plan here is what an ideal machine does with the same program: the measured
computations in the same order, started as soon as their inputs exist, with
transfers and dispatch that take no time.

Rule for maintainers: the causes of a device's gap add up to the gap (tested for
arbitrary records).  Idle time that the ideal machine has too is the plan's,
and is taken from what a device waits for by nature: inputs, and work.  A run that was
submitted ahead has its turn on a device after the runs before it: that time is theirs,
by name, until the end of their gangs.

Paper: section 5.3 (pipeline bubbles), figure 10 (trace of a pipeline).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from pathways_lab.timeline import queries
from pathways_lab.timeline.flow import Flow, Flows
from pathways_lab.timeline.machine import Lane, lanes_of
from pathways_lab.timeline.records import ENDS, Event, Record, Span, own
from pathways_lab.timeline.waits import (
    CAUSES,
    INPUT,
    NOTHING,
    DeviceWaits,
    RowWaits,
    Waits,
    known_order,
)

PLAN, OTHERS = "idle by plan", "other runs"
GAP_CAUSES = (PLAN, OTHERS, *CAUSES)
"""The parts of a gap, beside the runs that were before it (:func:`behind`).

other runs: those whose gangs are not known any more.
"""


def behind(gang: Span) -> str:
    """The cause of a gap in which a device was for another run, whose *gang* this is."""
    run = f"run {own(gang.run)}"
    return f"{run} ({gang.program})" if gang.program else run


@dataclass(slots=True)
class RunSeen:
    """The known facts of one run.

    submitted, ended: seconds; ended is None while it goes on.  count: of its gangs that have ended.
    """

    run: int
    program: str = ""
    client: str = ""
    submitted: float = float("inf")
    ended: float | None = None
    outcome: str = ""
    transfers: list[Span] = field(default_factory=list)
    messages: list[Event] = field(default_factory=list)
    count: int = 0
    _begun: float = float("inf")
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
                self._begun = min(self._begun, record.start)
                self._last = max(self._last, record.end)
                self.count += 1
            elif record.kind == "transfer":
                self.transfers.append(record)
        elif isinstance(record, Event):
            if record.kind == "submitted":
                self.submitted = record.time
                self.program, self.client = record.program, record.client
            elif record.kind == "message":
                self.messages.append(record)
            elif record.kind in ENDS:
                self.ended, self.outcome = record.time, record.kind

    def add_row(self, waits: RowWaits) -> None:
        """Fold a row of this run, and the waits that its gangs ended."""
        about = waits.row.abouts[0]
        self.program, self.client = about.program, about.client
        self._rows.append(waits)
        self._begun = min(self._begun, waits.row.begun)
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
        return min(self.submitted, self._begun)

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
class Planned:
    """planned, actual: seconds that the run takes on an ideal machine, and took."""

    seen: RunSeen
    planned: float
    actual: float
    devices: tuple[Device, ...]

    def gap(self) -> dict[str, float]:
        """Lost device seconds by cause, of all devices."""
        out: dict[str, float] = {}
        for device in self.devices:
            for cause, seconds in device.gap.items():
                out[cause] = out.get(cause, 0.0) + seconds
        return out


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
    waited: dict[Lane, list[tuple[str, float, float]]] = {}
    for numbers, wait in seen.waits:
        for lane in lanes_of(wait.gang.island, wait.gang.host, numbers):
            waited.setdefault(lane, []).append((wait.cause, wait.start, wait.end))
    devices = []
    for lane, gangs in sorted(ran.items()):
        gap = _gap(gangs, waited.get(lane, []), meanwhile.get(lane, []), begin, end)
        busy = sum(plan[g.step][1] - plan[g.step][0] for g in gangs)
        devices.append(
            Device(
                lane,
                tuple((g.step, *plan[g.step]) for g in gangs),
                tuple((g.step, g.start - begin, g.end - begin) for g in gangs),
                _of_plan(gap, max(0.0, length - busy)),
            )
        )
    return Planned(seen, length, actual, tuple(devices))


def _gap(
    gangs: list[Span],
    waited: list[tuple[str, float, float]],
    others: list[Span],
    begin: float,
    end: float,
) -> dict[str, float]:
    """Seconds by cause between two moments in which none of *gangs* ran.

    others: gangs of other runs on the device.  *gangs* and *others* are in order of their starts.
    """
    waited = sorted(waited, key=lambda part: part[1])
    before = _Before(others)
    out: dict[str, float] = {}

    def count(cause: str, seconds: float) -> None:
        if seconds > 0:
            out[cause] = out.get(cause, 0.0) + seconds

    reached, at = begin, 0
    for gang in gangs:
        if gang.start > reached:
            while at < len(waited) and waited[at][1] < gang.start:
                cause, since, until = waited[at]
                since, until = max(since, reached), min(until, gang.start)
                if until > since:
                    before.count(reached, since, count)
                    count(cause, until - since)
                    reached = until
                if waited[at][2] > gang.start:
                    break
                at += 1
            before.count(reached, gang.start, count)
        reached = max(reached, gang.end)
    count(NOTHING, end - reached)
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

    def count(self, start: float, until: float, count: Callable[[str, float], None]) -> None:
        """Whom the time between two moments belongs to: whose gang ends first has it till then."""
        while self._next is not None and self._next.start < until:
            heappush(self._begun, (self._next.end, self._seen, self._next))
            self._next = next(self._later, None)
            self._seen += 1
        while self._begun and start < until:
            end, _, gang = self._begun[0]
            if end > start:
                count(behind(gang), min(end, until) - start)
                start = min(end, until)
            if end <= start:
                heappop(self._begun)
        count(OTHERS, until - start)


def _of_plan(gap: dict[str, float], idle: float) -> dict[str, float]:
    """Give the plan its own idle seconds, out of what is idle by nature."""
    out: dict[str, float] = {}
    for cause in (NOTHING, INPUT):
        taken = min(idle, gap.get(cause, 0.0))
        if taken > 0:
            idle -= taken
            out[PLAN] = out.get(PLAN, 0.0) + taken
            gap = {**gap, cause: gap[cause] - taken}
    return {**out, **{cause: seconds for cause, seconds in gap.items() if seconds > 0}}


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
