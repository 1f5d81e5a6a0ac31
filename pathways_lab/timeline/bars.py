"""Bars: what every device did when, as columns, and honestly made coarser.

Problem: a cluster runs more gangs in a second than a figure has pixels.  A
view must draw some thousands of bars, a frozen picture still fewer, and
neither may drop what it cannot draw: neighbours that are closer than a pixel
become one bar that knows how many gangs it stands for and how long its device
was really busy.

Rule for maintainers: ``count`` and ``busy`` add up to the records' numbers
whatever the resolution; a bar never mixes kinds, and mixes programs only where
nothing else fits (then its program is "").
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter, itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pathways_lab.timeline.columns import Floats, Joined, Told
from pathways_lab.timeline.machine import Lane, lanes_of
from pathways_lab.timeline.records import Record, Span

GANG, TRANSFER = 0, 1
"""Kinds of bar: a computation on the device, or bytes that arrive for it."""

Columns = dict[str, NDArray[np.generic]]


@dataclass(slots=True)
class Bar:
    """One bar in one row; times in seconds on the records' clock.

    node: the compiled function, or "" when several are merged.
    step: index in the plan, or -1 when several gangs are merged.
    count: gangs (or transfers) times devices that it stands for.
    busy: device seconds that were held between *start* and *end*.
    """

    row: float
    kind: int
    start: float
    end: float
    program: str
    node: str
    client: str
    line: str
    run: int
    step: int
    count: int = 1
    busy: float = 0.0
    failed: bool = False


_fields = attrgetter(*Bar.__slots__)


class Places:
    """The row of every device, asked again and again about the same few sets of them."""

    def __init__(self, rows: Mapping[Lane, float]) -> None:
        self.rows = rows
        self.counted = functools.lru_cache(maxsize=4096)(self._counted)

    def _counted(self, lanes: tuple[Lane, ...]) -> tuple[tuple[float, int], ...]:
        """The rows that show any of *lanes*, and how many of them each shows."""
        return tuple(Counter(self.rows[lane] for lane in lanes if lane in self.rows).items())

    def of_host(self, host: str) -> tuple[Lane, ...]:
        """All lanes of a host."""
        return tuple([lane for lane in self.rows if lane.host == host])


def bars_of(span: Span, places: Places) -> list[Bar]:
    """The bars of one span: one for each row that shows any of its devices.

    Devices that share a row share a bar, which counts them.  A transfer that names no devices
    is on all of its host's.
    """
    if span.kind == "gang":
        kind = GANG
    elif span.kind == "transfer":
        kind = TRANSFER
    else:
        return []
    if span.devices or kind == GANG:
        lanes = lanes_of(span.island, span.host, span.devices)
    else:
        lanes = places.of_host(span.host)
    return [
        Bar(
            row,
            kind,
            span.start,
            span.end,
            span.program,
            span.node,
            span.client,
            span.line,
            span.run,
            span.step,
            count,
            count * (span.end - span.start),
            bool(span.args.get("poisoned")),
        )
        for row, count in places.counted(lanes)
    ]


class _Part(NamedTuple):
    """Some gangs of a row that become one bar; seconds."""

    first: int
    many: int
    start: float
    end: float
    length: float
    busy: float
    told: Told


class Bars:
    """Bars in the order in which they were added, merged to a resolution.

    resolution: two neighbours of one row, kind and program become one bar
        when the gap between them, and each of them, is shorter than this many
        seconds; 0 merges nothing.
    mix: merge neighbours of different programs too.

    The same gang on several hosts that share a row is always one bar.
    """

    def __init__(self, resolution: float = 0.0, mix: bool = False) -> None:
        self.resolution = resolution
        self.mix = mix
        self.items: list[Bar] = []
        self._last: dict[tuple[float, int], Bar] = {}
        self._gangs: dict[tuple[float, int, int, int], Bar] = {}
        self._sealed = 0

    def add(self, bars: Iterable[Bar]) -> None:
        """Append *bars*, merging each with its neighbour where that is allowed."""
        for bar in bars:
            key = (bar.row, bar.kind)
            gang = (*key, bar.run, bar.step)
            same = self._gangs.get(gang)
            last = self._last.get(key)
            if same is not None and bar.start < same.end and bar.end > same.start:
                _absorb(same, bar)
            elif last is not None and self._close(last, bar):
                _absorb(last, bar)
            else:
                self.items.append(bar)
                self._last[key] = self._gangs[gang] = bar

    def add_many(
        self, places: Iterable[tuple[float, int]], kind: int, of: Joined, at: Sequence[int],
        start: Floats, end: Floats,
    ) -> None:  # fmt: skip
        """The same bars as of single gangs of *of*, one after the other.

        places: rows in which no other host is shown, and how many of the devices each shows.
        at: of each gang, which it is, from 0.
        """
        cut: dict[tuple[bool, bool], list[_Part]] = {}
        new: list[tuple[int, Bar]] = []
        for row, count in places:
            before = self._last.get((row, kind))
            late = before is not None and before.end > start[0]
            if (how := (count == 1, late)) not in cut:
                cut[how] = self._parts(of, at, start, end, *how)
            for first, many, since, until, length, busy, told in cut[how]:
                run, step, node, line = told
                alone = at[first] == at[first + many - 1]
                bar = Bar(
                    row, kind, since, until, of.program, node, of.client, line, run,
                    step if alone else -1, count * many, count * busy,
                )  # fmt: skip
                last = self._last.get((row, kind)) if late or not first else None
                if last is not None and self._close(last, bar, length):
                    _absorb(last, bar)
                else:
                    self._last[row, kind] = self._gangs[row, kind, run, step] = bar
                    new.append((first, bar))
        new.sort(key=itemgetter(0))
        self.items += [bar for _, bar in new]

    def _parts(
        self, of: Joined, at: Sequence[int], start: Floats, end: Floats, one: bool, late: bool
    ) -> list[_Part]:
        """Which of them become one bar.

        one: a bar stands for one device.  late: what is drawn already is not all before them.
        """
        limit, length = self.resolution, end - start
        heads = [0]
        if late:
            heads = list(range(len(at)))
        elif end[-1] - start[0] >= limit:
            apart = (start[1:] - end[:-1] >= limit) | (length[1:] >= limit)
            if one:
                apart |= length[:-1] >= limit
            heads += (np.flatnonzero(apart) + 1).tolist()
        held = np.add.reduceat(length, heads).tolist()
        return [
            _Part(
                first, after - first, float(start[first]), float(end[after - 1]),
                float(length[first]), busy, of.told(at[first:after]),
            )
            for (first, after), busy in zip(pairwise((*heads, len(at))), held, strict=True)
        ]  # fmt: skip

    def _close(self, last: Bar, bar: Bar, length: float | None = None) -> bool:
        """Whether *bar* goes on where *last* ends.  length: of its first part, in seconds."""
        limit = self.resolution
        return (
            bar.start - last.end < limit
            and last.start - bar.end < limit
            and (bar.end - bar.start if length is None else length) < limit
            and (last.end - last.start < limit or last.count > 1)
            and (self.mix or last.program == bar.program)
            and last.failed == bar.failed
        )

    @property
    def new(self) -> list[Bar]:
        """The bars since they were sealed last."""
        return self.items[self._sealed :]

    def seal(self) -> list[Bar]:
        """The bars since the last call; they will not change any more."""
        new = self.new
        self._sealed = len(self.items)
        self._last.clear()
        self._gangs.clear()
        return new

    @property
    def sealed(self) -> list[Bar]:
        """Those that will not change any more."""
        return self.items[: self._sealed]

    def forget_before(self, time: float) -> list[Bar]:
        """Drop the oldest bars that ended before *time*, and return them."""
        gone = 0
        while gone < self._sealed and self.items[gone].end < time:
            gone += 1
        oldest, self.items = self.items[:gone], self.items[gone:]
        self._sealed -= gone
        return oldest


def _absorb(last: Bar, bar: Bar) -> None:
    if bar.start < last.start:
        last.start = bar.start
    if bar.end > last.end:
        last.end = bar.end
    last.count += bar.count
    last.busy += bar.busy
    if last.program != bar.program:
        last.program = last.node = ""
    if last.node != bar.node:
        last.node = ""
    if last.line != bar.line:
        last.line = ""
    if (last.run, last.step) != (bar.run, bar.step):
        last.step = -1


def coarser(bars: Iterable[Bar], resolution: float, mix: bool = False) -> list[Bar]:
    """The same bars at a lower resolution (seconds); the originals are not touched."""
    out = Bars(resolution, mix)
    # Seven times as fast as copy.copy: thousands are made at once while somebody looks.
    out.add(Bar(*_fields(bar)) for bar in sorted(bars, key=lambda b: b.start))
    return out.items


def fitting(bars: list[Bar], limit: int, resolution: float) -> tuple[list[Bar], float]:
    """At most about *limit* bars, and the resolution (seconds) that this took.

    Starts from *resolution*, which must be positive, and doubles it until the
    bars fit or every row is one bar; from the sixth doubling on programs are
    mixed too.
    """
    bars = sorted(bars, key=lambda b: b.start)
    apart = _Apart(bars)
    whole = max((b.end for b in bars), default=0.0) - min((b.start for b in bars), default=0.0)
    doublings = 0
    while True:
        mix, last = doublings >= 6, resolution > whole
        if last or apart.least(resolution, mix) <= limit:
            out = coarser(bars, resolution, mix)
            if last or len(out) <= limit:
                return out, resolution
        resolution *= 2
        doublings += 1


class _Apart:
    """Bars that cannot become one with any before, counted without making any.

    bars: in the order of their starts.
    """

    def __init__(self, bars: Sequence[Bar]) -> None:
        rows = sorted(bars, key=lambda b: (b.row, b.kind))
        ends = [b.end for b in rows]
        heads = [(b.row, b.kind) != (a.row, a.kind) for a, b in pairwise(rows)]
        for at, head in enumerate(heads):
            if not head:
                ends[at + 1] = max(ends[at], ends[at + 1])
        starts = np.array([b.start for b in rows])
        self._heads = len(rows) and 1 + sum(heads)
        self._gap = np.where(heads, -np.inf, starts[1:] - np.array(ends[:-1]))
        self._length = np.array([b.end - b.start for b in rows[1:]])
        self._other = np.array([a.program != b.program for a, b in pairwise(rows)], bool)

    def least(self, resolution: float, mix: bool) -> int:
        """So many bars are left at that resolution (seconds), or more."""
        away = (self._gap >= resolution) | (self._length >= resolution)
        if not mix:
            away |= self._other
        return int(self._heads + np.count_nonzero(away & (self._gap >= 0)))


def columns(records: Iterable[Record], rows: Mapping[Lane, float]) -> Columns:
    """Every bar of *records* as numpy columns, unmerged.

    Columns: ``kind``, ``run``, ``step``, ``count`` (int64), ``row``, ``start``,
    ``end`` (float64, seconds), ``program``, ``node`` (text).
    """
    places = Places(rows)
    bars = [b for r in records if isinstance(r, Span) for b in bars_of(r, places)]
    out: Columns = {
        name: np.array([getattr(b, name) for b in bars], np.int64)
        for name in ("kind", "run", "step", "count")
    }
    for name in ("row", "start", "end"):
        out[name] = np.array([getattr(b, name) for b in bars], np.float64)
    for name in ("program", "node"):
        out[name] = np.array([getattr(b, name) for b in bars], np.str_)
    return out
