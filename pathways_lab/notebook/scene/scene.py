"""The scene: what the panels show, folded from records as they arrive.

Problem: ten times a second every panel needs its columns, for the price of the
new records only.  The scene keeps what a picture needs and no more.

Rule for maintainers: fed with records only, and with the time; it never looks
at a lab.  Folding all records at once or a few at a time must give the same
picture (tested).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import NDArray

from pathways_lab.notebook.scene.balance import Balance
from pathways_lab.notebook.scene.device_state import Catalogue, Used, Waiting, What
from pathways_lab.notebook.scene.heat import Heat
from pathways_lab.notebook.scene.lanes import SEEN, STEADY, Alike
from pathways_lab.notebook.scene.overview import Profile
from pathways_lab.notebook.scene.palette import ARRIVES, CAUSE_PAINTS, PAINTS, WORK_PAINTS, Palette
from pathways_lab.notebook.scene.plot import FRAME
from pathways_lab.notebook.scene.row_layout import MOST, Rows, rows
from pathways_lab.notebook.scene.steps import Steps, Window
from pathways_lab.notebook.scene.strips import Strip, by_kind, mark, shared_row
from pathways_lab.notebook.scene.table import Table
from pathways_lab.timeline.backlog import Backlog
from pathways_lab.timeline.bars import GANG, Bar, bars_of
from pathways_lab.timeline.busy import Busy
from pathways_lab.timeline.columns import Joined, alike, follows, plain, times
from pathways_lab.timeline.compiling import Compiling
from pathways_lab.timeline.flow import Flows
from pathways_lab.timeline.gangs import GangKey, Gangs
from pathways_lab.timeline.machine import FEEDS, Lane, Machine, lanes_of
from pathways_lab.timeline.packed import Granted, Item, Packed, Row, size
from pathways_lab.timeline.planned import RunSeen
from pathways_lab.timeline.records import ENDS, Event, Record, Sample, Span, own
from pathways_lab.timeline.waits import (
    CAUSES,
    INPUT,
    NOTHING,
    DeviceWaits,
    RowWaits,
    Wait,
    Waits,
    known_at,
    marks,
)

BUDGET = 6000
"""Bars that a live queue panel holds."""

MARGIN = 0.2
"""Seconds shown before the first computation, when it came later than that."""

BINS = 1000
"""Bins in which the bytes that move between islands are counted, over the whole window."""

WAITS = tuple(cause for cause in CAUSES if cause != NOTHING)
"""The causes that are drawn for a device that waits; nothing to do is an empty row."""

UNKNOWN = "cause not known yet"

MARKS = (*WAITS, UNKNOWN)
"""The marks of waiting, by kind: while a device waits its cause may not be known yet."""

WORK = ("receive", "prepare", "launch", "send")
"""Kinds of control work of a host."""

RUNS, PARTS = 256, 200_000
"""Runs that are over and remembered whole: the newest ones that have so many gangs together, each
counted once for each of its hosts, but always the last one."""

AHEAD = 2_000
"""Runs that are remembered at all: more than are submitted ahead."""

_OF_RUNS = frozenset(("submitted", "admitted", "granted", "finished"))
"""Kinds of event that say nothing of what is drawn of devices."""

_ASIDE = frozenset(("message", "resolved", "rows"))
"""Kinds of event that say nothing of devices, gangs and programs: there are many."""

GANGS = 2000
"""Gangs that are remembered for the order panel."""


class Scene:
    """Folds records into what is drawn.

    origin: time (seconds, records' clock) that the axis calls 0.
    window: seconds that a running view looks back.
    final: the picture is of something that is over: numbers are over all of it.
    level: what a row stands for (see ``rows``); "" picks.
    budget: bars that the queue panel may hold before it goes coarser.
    machine: what is known already of islands, hosts and slices.
    unfolded: folds of lanes that somebody has unfolded; whoever holds it may change it.
    stepwise: the last steps of a program that repeats are shown, in place of the whole window.
    """

    def __init__(
        self,
        origin: float = 0.0,
        window: float = 20.0,
        palette: Palette | None = None,
        final: bool = False,
        budget: int = BUDGET,
        level: str = "",
        machine: Machine | None = None,
        unfolded: set[Hashable] | None = None,
        stepwise: bool = False,
    ) -> None:
        self.origin, self.window, self.final, self.budget = origin, window, final, budget
        self.level, self.stepwise = level, stepwise
        self.steps, self.profile, self.heat, self.balance = Steps(), Profile(), Heat(), Balance()
        self.shown: Window | None = None
        self.palette = palette or Palette()
        self.machine = machine or Machine()
        self.gangs = Gangs(keep=GANGS)
        self.waiting: defaultdict[Lane, Waiting] = defaultdict(Waiting)
        self.recent: dict[Lane, What] = {}
        self.catalogue = Catalogue()
        self.resolution = 0.0
        self.by_dcn = Busy(window / BINS, BINS + 1, origin)
        self.flows = Flows()
        self.backlog = Backlog(self.flows)
        self.waits = Waits(self.flows)
        self.compiling = Compiling()
        self.runs: dict[int, RunSeen] = {}
        self._over: deque[tuple[int, int]] = deque()
        self._held = 0
        self.memory: dict[Lane, float] = {}
        self.used: dict[str, Used] = {}
        about = self._what_of
        self.computed = Strip(
            origin, ((-0.40, 0.30), (0.36, 0.48)), budget, about, self.paint,
            alpha=(np.float32, lambda b: 0.75 if b.kind else 1.0),
            run=(np.float64, lambda b: float(own(b.run))),
        )  # fmt: skip
        causes = shared_row(-0.40, 0.30, len(WAITS), thick=0.2)  # disjoint, so they may overlap
        works = shared_row(-0.44, 0.44, len(WORK))
        causes.append(causes[WAITS.index(INPUT)])  # the usual cause, when it is known
        self.waited, self.worked = (
            Strip(
                origin, edges, budget, about,
                by_kind(paints), kind=(np.float32, lambda b: float(b.kind)),
            )
            for paints, edges in ((CAUSE_PAINTS, causes), (WORK_PAINTS, works))
        )  # fmt: skip
        self.clients: dict[str, str] = {}
        self.longest: dict[tuple[str, str], float] = {}
        self.ended: dict[int, str] = {}
        self.dropped = 0
        self.clocks: dict[str, float] = {}
        self.first, self.last = float("inf"), float("-inf")
        self.earlier: float | None = None
        """Seconds between the newest gang that is too old to be shown and the picture's start."""
        self.alike = Alike()
        self.unfolded = unfolded if unfolded is not None else set()
        self._folded: dict[str, list[RowWaits]] = {}
        self._rows = self._arranged()
        self._host_rows = self._rows
        self._structure = -1
        self._laid: tuple[Rows, int, frozenset[str], frozenset[Hashable]] | None = None
        self.lanes = self.alike.lanes(self._rows, (), ())
        self.so_far: dict[float, tuple[list[Bar], dict[str, NDArray[np.generic]]]] = {}
        """By moment, the waits that go on, for all that ask before more is known."""
        self._strips = self.computed, self.waited, self.worked
        self._draw_lanes()

    @property
    def rows(self) -> Rows:
        """The rows of the queue panel, for the machine as it is known now."""
        if self._structure != self.machine.structure:
            self._structure = self.machine.structure
            before, self._rows = self._rows, self._arranged()
            rest = sorted(before.of, key=lambda lane: lane.host not in self.alike.worst)
            moved = {before.of[lane]: self._rows.of[lane] for lane in rest}
            if any(old != new for old, new in moved.items()):
                self.computed.move(moved)
                self.waited.move(moved)
            level = "host" if len(self.machine.hosts) <= MOST else "island"
            old = self._host_rows
            self._host_rows = rows(self.machine, level, feeders=True)
            moved = {row: self._host_rows.of[lane] for lane, row in old.of.items()}
            if any(a != b for a, b in moved.items()):
                self.worked.move(moved)
        return self._rows

    def _arranged(self) -> Rows:
        return rows(self.machine, self.level, False, self.alike.kind, self.alike.worst)

    @property
    def host_rows(self) -> Rows:
        """The rows of the panel of hosts: one per host, or per island where they are many."""
        assert self.rows is not None  # looks whether the machine has changed
        return self._host_rows

    def add(self, items: Iterable[Item], now: float) -> None:
        """Fold *items*, which are all that is known at *now* (seconds)."""
        items = tuple(items)
        self.so_far.clear()
        # The resolution depends on what is shown, and so on where computations are.
        self.steps.add(items)
        self.profile.add(items)
        self.balance.add(items)
        self.first = min(self.first, self.steps.first)
        self._look(now)
        for strip in self._strips:
            strip.refine((self.shown.usual if self.shown else self.span(now)) / FRAME)
        self.machine.join(items)  # how many hosts there are decides who shares a row
        if self.rows.level == "island" and self.alike.parts(items, self.machine, *self._seen(now)):
            self._structure = -1
        for item in items:
            try:
                self._fold(item)
            except Exception:
                # It is not what this version writes.  All others are shown.
                self.dropped += size(item)
        self.heat.add(items)
        self._draw_rows()
        self._look(now)
        self.resolution = max(self.span(now) / FRAME, self.computed.bars.resolution)
        self._lay(now)
        for strip in self._strips:
            strip.seal()
        self._forget(now)

    def _look(self, now: float) -> None:
        """Find the window that is shown *now*."""
        heads = [waiting.queue[0][2] for waiting in self.waiting.values() if waiting.queue]
        running = {(what.client, what.program) for what in heads}
        self.shown = self.steps.window(now, running, self.window) if self.stepwise else None

    def _lay(self, now: float) -> None:
        """Fold the lanes as devices are alike *now*, and draw anew what has another place then."""
        rows = self.rows
        self.alike.compare(self.computed.bars.new, rows.hosts)
        apart = {host.name for host in self.machine.hosts.values() if host.lost}
        apart |= self.alike.stragglers(self.running(), *self._seen(now))
        state = rows, self.alike.version, frozenset(apart), frozenset(self.unfolded)
        if state != self._laid:
            self._laid = state
            before, self.lanes = self.lanes, self.alike.lanes(rows, apart, self.unfolded)
            if self.lanes.drawn != before.drawn:
                self._draw_lanes()

    def _seen(self, now: float) -> tuple[float, float, float]:
        start = self.range(now)[0] + self.origin
        return now, start, SEEN * max(self.resolution, self.span(now) / FRAME)

    def _draw_lanes(self) -> None:
        self.computed.lay(self.lanes.drawn)
        self.waited.lay(self.lanes.drawn)

    def _fold(self, item: Item) -> None:
        if isinstance(item, Granted):
            self._granted(item)
        elif isinstance(item, Row):
            self._row(item)
        elif not isinstance(item, Packed):
            self._add(item)

    def _add(self, record: Record) -> None:
        kind = "" if isinstance(record, Sample) else record.kind
        if kind in _ASIDE:
            self.last = max(self.last, known_at(record))
            self._of_run(record, [])
            return
        if self._folded and kind and kind not in _OF_RUNS:
            self._draw_rows()
        if isinstance(record, Span) and kind in WORK:
            self._of_run(record, [])
            self._work(record)
            return
        self.machine.add(record)
        self.gangs.add(record)
        self.flows.add(record)
        self.backlog.add(record)
        self.compiling.add(record)
        self._remember(record, self.waits.add(record))
        if isinstance(record, Span):
            self._span(record)
        elif isinstance(record, Event):
            self._event(record)
        else:
            self._sample(record)

    def _granted(self, granted: Granted) -> None:
        """As its records one by one."""
        self.gangs.add_packed(granted)
        self.backlog.placed(granted.run, granted.own)
        self.waits.add_granted(granted)
        self._run(granted.run, granted.program, granted.placing.client).windows.append(granted)
        self.last = max(self.last, granted.time)

    def _row(self, row: Row) -> None:
        """As its records one by one; in columns where that is the same."""
        shared = self.many or self.rows.level == "island"
        if shared or not plain(row, when := times(row)):
            waits = None
        else:
            waits = self.waits.add_row(row, when)
        if waits is None:
            for record in row.records():
                self._add(record)
            return
        about = row.abouts[0]
        self.machine.add_row(row)
        self.gangs.add_packed(row)
        run = self._run(row.run, about.program, about.client)
        run.add_row(waits)
        before = self._folded.get(row.host)
        if before and not (
            follows(before[-1].when, when) and alike(before[-1].row.abouts[0], about)
        ):
            self._draw_rows()
        self._folded.setdefault(row.host, []).append(waits)

    def _draw_rows(self) -> None:
        """Draw the folded rows: as many as there are at once."""
        folded, self._folded = self._folded, {}
        for waits in folded.values():
            self._draw_joined(waits, Joined([w.row for w in waits], [w.when for w in waits]))

    def _draw_joined(self, waits: list[RowWaits], rows: Joined) -> None:
        when, lanes = rows.when, lanes_of(rows.island, rows.host, rows.devices)
        places, length = self.rows.places.counted(lanes), when.end - when.start
        self.alike.computed(rows.rows[0].abouts[0].slice, lanes, self.machine)
        for cause, devices, at, since, until in marks(waits, rows):
            kind = WAITS.index(cause)
            where = self.rows.places.counted(lanes_of(rows.island, rows.host, devices))
            self.waited.bars.add_many(where, kind, rows, at, since, until)
        self._worked_on(rows)
        self.computed.bars.add_many(places, GANG, rows, range(len(rows)), when.start, when.end)
        end = float(when.end[-1])
        self.first = min(self.first, float(when.called[0]))
        self.last = max(self.last, float(when.called[-1]), end)
        for about, most in rows.longest(length).items():
            node = (about.program, about.node)
            self.longest[node] = max(most, self.longest.get(node, most))
        last = rows.about(len(rows) - 1)
        what = What(last.node, last.program, last.client, last.line)
        told = {(r.run, r.step + n) for r in rows.rows for n in range(min(r.announced, r.count))}
        self.recent.update(dict.fromkeys(lanes, what))
        for lane in lanes:
            waiting = self.waiting[lane]
            waiting.ended = max(waiting.ended, end)
            if told and waiting.queue:
                waiting.queue = deque([w for w in waiting.queue if w[0] not in told])

    def _worked_on(self, rows: Joined) -> None:
        """The work of the host's process for rows."""
        (lane,) = lanes_of(rows.island, rows.host, (0,))
        place = self.host_rows.of.get(lane)
        if place is None:
            return
        for span in [span for row in rows.rows for span in row.opening()]:
            self._work(span)
        launch, each = WORK.index("launch"), range(len(rows))
        called, returned = rows.when.called, rows.when.returned
        self.worked.bars.add_many([(place, 1)], launch, rows, each, called, returned)

    def _sample(self, sample: Sample) -> None:
        if sample.name == "dropped":
            self.lose(int(sample.value))
        elif sample.name == "clock":
            self.clocks[sample.host] = sample.value
        elif sample.name == "memory":
            lane = Lane(sample.island, sample.host, int(sample.args.get("device", 0)))
            before, self.memory[lane] = self.memory.get(lane, 0.0), sample.value
            self.used.setdefault(sample.island, Used()).add(sample.time, sample.value - before)

    def lose(self, count: int) -> None:
        """So many records are missing: what devices work on may long have ended."""
        self.dropped += count
        self.gangs.lose()
        self.backlog.lose()
        for waiting in self.waiting.values():
            waiting.queue.clear()

    def _remember(self, record: Record, waits: DeviceWaits) -> None:
        """Keep what is known of the newest runs, and draw what devices waited for."""
        if isinstance(record, Span) and record.kind == "host-computation":
            self._feed(record)
        self._of_run(record, waits)
        for devices, wait in reversed(waits):  # the earliest first
            self._wait(devices, wait)

    def _of_run(self, record: Record, waits: DeviceWaits) -> None:
        if not isinstance(record, Sample) and record.run:
            self._run(record.run, record.program, record.client).add(record, waits)

    def _work(self, span: Span) -> None:
        """A host's process worked for a gang."""
        (lane,) = lanes_of(span.island, span.host, (0,))
        row = self.host_rows.of.get(lane)
        if row is not None:
            self.worked.add([mark(row, WORK.index(span.kind), span.start, span.end, span)])

    def _run(self, number: int, program: str, client: str) -> RunSeen:
        """The memory of a run."""
        self.clients.setdefault(program, client)
        run = self.runs.get(number)
        if run is None:
            run = self.runs[number] = RunSeen(number)
            if len(self.runs) > AHEAD:
                del self.runs[next(iter(self.runs))]
        return run

    def _run_ended(self, number: int) -> None:
        """A run is over: of such ones only the newest are remembered whole."""
        run = self.runs.get(number)
        if run is None:
            return
        self._over.append((number, run.count))
        self._held += run.count
        while len(self._over) > RUNS or (self._held > PARTS and len(self._over) > 1):
            oldest, count = self._over.popleft()
            self._held -= count
            self.runs.pop(oldest, None)

    def _feed(self, span: Span) -> None:
        """An element was made, and sent to its hosts."""
        row = self.host_rows.of[Lane(FEEDS, span.host, 0)]
        made = min(max(span.start, float(span.args.get("made", span.end))), span.end)
        for kind, start, end in (("prepare", span.start, made), ("send", made, span.end)):
            self.worked.add([mark(row, WORK.index(kind), start, end, span)])

    def _wait(self, devices: tuple[int, ...], wait: Wait) -> None:
        gang = wait.gang
        lanes = lanes_of(gang.island, gang.host, devices)
        self.waited.add(
            mark(row, WAITS.index(wait.cause), wait.start, wait.end, gang, count)
            for row, count in self.rows.places.counted(lanes)
        )

    def _what_of(self, bar: Bar) -> int:
        return self.catalogue.row(What(bar.node, bar.program, bar.client, bar.line))

    def _event(self, event: Event) -> None:
        self.last = max(self.last, event.time)
        if event.kind == "launched":
            key = (event.run, event.step)
            if self.gangs.ended(key, event.host):
                return
            self.first = min(self.first, event.time)
            line = str(event.args.get("line", ""))
            what = What(event.node, event.program, event.client, line)
            lanes = lanes_of(event.island, event.host, tuple(event.args.get("devices", ())))
            self.alike.computed(int(event.args.get("slice", -1)), lanes, self.machine)
            for lane in lanes:
                self.waiting[lane].queue.append((key, event.time, what))
        elif event.kind == "host-lost":
            for lane, waiting in self.waiting.items():
                if lane.host == event.host:
                    waiting.queue.clear()
        elif event.kind in ENDS:
            self.ended[event.run] = event.kind
            self._run_ended(event.run)
            while len(self.ended) > GANGS:
                del self.ended[next(iter(self.ended))]

    def _span(self, span: Span) -> None:
        self.last = max(self.last, span.end)
        if span.kind == "transfer" and span.end > span.start:
            origin = str(span.args.get("source", "")).partition("/")[0]
            if origin and origin != span.island:
                rate = float(span.args.get("nbytes", 0)) / (span.end - span.start)
                self.by_dcn.add(span.island, span.start, span.end, rate)
        self.computed.bars.add(bars_of(span, self.rows.places))
        if span.kind != "gang":
            return
        what = What(span.node, span.program, span.client, span.line)
        took, node = span.end - span.start, (span.program, span.node)
        self.longest[node] = max(took, self.longest.get(node, took))
        key = (span.run, span.step)
        lanes = lanes_of(span.island, span.host, span.devices)
        self.alike.computed(int(span.args.get("slice", -1)), lanes, self.machine)
        self.recent.update(dict.fromkeys(lanes, what))
        for lane in lanes:
            self.waiting[lane].over(key, span.end)

    def paint(self, bar: Bar) -> int:
        """Index into the palette of a bar."""
        if bar.failed:
            return 1
        return PAINTS.index(ARRIVES) if bar.kind else self.palette.code(bar.program, bar.node)

    def _forget(self, now: float) -> None:
        """Keep to the window, and go coarser when too many bars are in it."""
        before = now - 1.1 * self.window
        self.heat.forget_before(before)
        for strip in self._strips:
            strip.forget_before(before, self._kept)
        self.resolution = max(self.resolution, self.computed.bars.resolution)

    @property
    def many(self) -> bool:
        """Whether there are more hosts than have rows."""
        return self.host_rows.level == "island"

    def late(self, now: float, lately: bool = False) -> dict[str, float]:
        """Hosts that end computations later than others in what is shown, by so many seconds, and
        not for their inputs; lately: a while before that counts, too."""
        _, start, seen = self._seen(now)
        return self.alike.to_blame(min(start, now - STEADY) if lately else start, seen)

    def slowest(self, host: str, now: float) -> tuple[str, float]:
        """The function that takes such a host longer, and by how much (seconds): of what is shown,
        else of late."""
        _, start, _ = self._seen(now)
        shown = self.alike.slowest(host, start)
        return shown if shown[1] > 0 else self.alike.slowest(host, min(start, now - STEADY))

    @property
    def _kept(self) -> float:
        """Bars that ended before (seconds) go coarser first: the others are looked at."""
        return self.shown.start if self.shown else float("inf")

    def coarsen(self, most: int) -> None:
        """Merge bars until there are at most about *most*."""
        for strip, share in zip(self._strips, (1, 2, 2), strict=True):
            if len(strip.table) > most // share:
                strip.coarsen(most // share, self._kept)
        self.resolution = max(self.resolution, self.computed.bars.resolution)

    @property
    def bars(self) -> Table:
        """The computations and transfers that are drawn."""
        return self.computed.table

    @property
    def lead(self) -> float:
        """Seconds before the first computation that are not shown: nothing is in them."""
        wait = self.first - self.origin - MARGIN
        return wait if MARGIN < wait < float("inf") else 0.0

    def span(self, now: float) -> float:
        """Seconds that the time axis covers at *now*."""
        start, end = self.range(now)
        return end - start

    def range(self, now: float) -> tuple[float, float]:
        """The time axis at *now*: seconds since the origin."""
        if self.shown:
            return self.shown.start - self.origin, self.shown.end - self.origin
        return self.lately(now)

    def lately(self, now: float) -> tuple[float, float]:
        """The whole window that ends *now*: seconds since the origin."""
        end = max(now - self.origin, self.lead + min(0.2, self.window))
        return max(self.lead, end - self.window), end

    def elapsed(self, now: float) -> tuple[float, float]:
        """The part of the time axis that is over *now*: the time of every number of a picture."""
        start, end = self.range(now)
        return start, max(start, min(end, now - self.origin))

    def running(self) -> list[tuple[Lane, GangKey, float, What]]:
        """``(device, gang, since, what)`` of everything that devices work on."""
        heads = [(lane, waiting.head()) for lane, waiting in self.waiting.items()]
        return [(lane, *head) for lane, head in heads if head is not None]

    def work_of(self, lane: Lane) -> What | None:
        """The computation that a device works on, or else its last one."""
        head = self.waiting[lane].head() if lane in self.waiting else None
        return head[2] if head else self.recent.get(lane)

    def drawn_at(self, lane: Lane) -> float | None:
        """The lane in which a device is drawn; None: another one is drawn for it."""
        place = self.lanes.drawn.get(self.rows.of.get(lane, -1.0))
        return place and place[0]

    @property
    def marks(self) -> int:
        """How many bars and marks are drawn."""
        return len(self.bars) + len(self.waited.table) + len(self.worked.table)

    @property
    def merged(self) -> bool:
        """Whether any bar that is shown stands for several in a row."""
        devices, start = self.rows.devices, self.shown.start if self.shown else float("-inf")
        return any(
            bar.count > devices.get(bar.row, 1)
            for bar in self.computed.bars.items
            if bar.end > start
        )

    @property
    def busy(self) -> bool:
        """Whether any device has work."""
        return any(waiting.queue for waiting in self.waiting.values())

    @property
    def started(self) -> bool:
        """Whether any gang was seen."""
        return bool(self.gangs.by_key)
