"""Lanes: devices that do alike share one, and a straggler has its own.

Problem: a gang computes on all devices of a slice at once, so a row per device says the same
thing many times, and the one device that differs is lost among its like.

Rule for maintainers: bars are kept for each row of :mod:`.row_layout`; a lane draws those of its
first row and counts them for all of its devices, so folding and unfolding lose nothing.  Devices
are alike that computed for the same slices, whose hosts differ by less than can be seen.  A host
differs from the middle one of the first three that told of a gang, so one host that is early
makes no other one late.

Paper: section 4.4 (gangs).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pathways_lab.notebook.scene.plot import LABELLED, wide
from pathways_lab.notebook.scene.row_layout import Rows, arranged, short
from pathways_lab.timeline.bars import GANG, Bar
from pathways_lab.timeline.machine import Lane, Machine, lanes_of
from pathways_lab.timeline.packed import Item, Row
from pathways_lab.timeline.records import Span, own

SEEN = 4.0
"""Pixels by which devices of a lane may differ: one does not see it."""

UNLIKE = 0.25
"""The share of a computation by which they may: hosts always differ a little."""

STEADY = 5.0
"""Seconds for which a straggler keeps its own row at least: a picture of the last steps would be
laid anew with every other of them."""

WORST = 3
"""Hosts that straggle most have rows of their own, where devices of many hosts share one."""

NAMED = 3
"""Slices of a lane, at most, where lanes are named after them: after all or none."""

TOLD = 4
"""Devices of a lane, at most, that are named where others of their host have another lane."""

KEPT = 4096
"""Computations that are compared with what other hosts say of them, at most."""

Of = tuple[int, Hashable]
"""A slice and the devices that it was bound to: slice -1 when it is unknown."""


class Fold(NamedTuple):
    """The facts that the devices of a lane have in common.

    apart: the host that they are on, if it differs from others; else "".
    """

    island: str
    used: frozenset[Of]
    apart: str

    @property
    def slices(self) -> set[int]:
        return {number for number, _ in self.used}

    def label(self, lanes: Collection[Lane], whole: bool, numbered: bool, host: str) -> str:
        """The name of a lane of these devices, as far as there is room.

        whole: they are all of their hosts.  numbered: with the numbers of its slices.  host: the
        one by which it is named, or "".
        """
        count = len(lanes)
        devices = f"{count} device{'s' * (count != 1)}"
        name = short(host)
        if not name and numbered:
            name = ", ".join(f"s{own(number)}" for number in sorted(self.slices))
        if not name and not whole and count <= TOLD and len({lane.host for lane in lanes}) == 1:
            return f"devices {', '.join(str(lane.device) for lane in lanes)}"
        full = f"{name} · {devices}" if name else devices
        fits = wide(full) + wide(self.island, bold=True) <= LABELLED
        return full if fits or not name else f"{name} ×{count}"


@dataclass(frozen=True, slots=True)
class Lanes:
    """The lanes of a picture.

    rows: how they are arranged.
    drawn: of every row of bars that is drawn, its lane, and how many rows it stands for.
    folds: of every lane, what is folded or unfolded by its name; lanes that are always one
        device have none.
    """

    rows: Rows
    drawn: Mapping[float, tuple[float, float]]
    folds: Mapping[float, Hashable]

    def turn(self, unfolded: set[Hashable], y: float | None) -> None:
        """Unfold what is folded at *y*, or fold it again; None: all of it."""
        if y is None:
            turned = unfolded.copy() or set(self.folds.values())
        else:
            turned = {fold for at, fold in self.folds.items() if abs(at - y) < 0.5}
        unfolded ^= turned


class _Took(NamedTuple):
    """When a host began a gang and ended it, in seconds."""

    host: str
    start: float
    end: float


@dataclass(slots=True)
class _Ends:
    """A gang, as its hosts tell of it.  first: the first three of them.  hosts: how many there
    are so far.  last: the newest one, which tells of each of its rows."""

    first: list[_Took] = field(default_factory=list)
    hosts: int = 0
    last: str = ""

    @property
    def usual(self) -> _Took:
        """The middle one of the first three; the earlier one of two."""
        in_order = sorted(self.first, key=lambda took: took[:0:-1])
        return in_order[(len(in_order) - 1) // 2]


NEWEST = 64
"""Differences of a host that are remembered."""

OWN = 0.5
"""Share of a host's lateness that must be of functions that take it longer."""

IDLE = 0.5
"""Share of a computation's time for which a host must have been idle before it to begin late for
another reason than its own computations."""


class Differed(NamedTuple):
    """A host ended or began a gang of *node* earlier or later than usual, by so many seconds.

    since: when it began.  until: when that is shown.  longer: seconds that it computed longer than
    usual.
    """

    by: float
    since: float
    until: float
    longer: float
    node: str


Differing = dict[str, deque[Differed]]
"""By host, the newest times that it differed."""


@dataclass(slots=True)
class Alike:
    """Which devices do alike, as computations tell.

    of: the slices that each device computed for.  late, early: hosts that differed from what is
    usual for a gang.  worst: some late ones, which have rows of their own.
    """

    of: dict[Lane, frozenset[Of]] = field(default_factory=dict)
    late: Differing = field(default_factory=dict)
    early: Differing = field(default_factory=dict)
    worst: tuple[str, ...] = ()
    version: int = 0
    _told: set[tuple[int, str, tuple[Lane, ...]]] = field(default_factory=set)
    _ended: dict[tuple[int, int], _Ends] = field(default_factory=dict)
    _pairs: dict[tuple[int, int], tuple[str, Differed]] = field(default_factory=dict)
    """The later one of two hosts, where no third one has told yet, as in *late*."""

    def computed(self, slice_id: int, lanes: tuple[Lane, ...], machine: Machine) -> None:
        """*lanes*, all of one host, computed for a slice."""
        if not lanes or (told := (slice_id, lanes[0].host, lanes)) in self._told:
            return
        self._told.add(told)
        bound = machine.slices.get(slice_id)
        devices: Hashable = lanes if slice_id < 0 else ()
        if bound is not None and {lane[1:] for lane in lanes} <= set(bound.devices):
            devices = bound.devices
            if all((slice_id, devices) in self.of.get(lane, ()) for lane in lanes):
                return  # the first of its hosts has told of all of them
            lanes = bound.lanes
        self.version += 1
        for lane in lanes:
            self.of[lane] = self.of.get(lane, frozenset()) | {(slice_id, devices)}

    def compare(self, bars: Iterable[Bar], hosts: Mapping[float, str]) -> None:
        """Compare computations that ended with what other hosts said of them.

        hosts: the host of each row that is of one only.
        """
        for bar in bars:
            host = hosts.get(bar.row)
            if bar.kind != GANG or bar.step < 0 or host is None:
                continue
            self._ends(bar, host)

    def _ends(self, gang: Bar | Span, host: str) -> None:
        key = gang.run, gang.step
        ends = self._ended.get(key)
        if ends is None:
            ends = self._ended[key] = _Ends()
        if host == ends.last or any(host == told.host for told in ends.first):
            return
        took, ends.last = _Took(host, gang.start, gang.end), host
        ends.hosts += 1
        if ends.hosts <= 3:
            ends.first.append(took)
        if ends.hosts == 2:
            one = ends.usual
            other = next(each for each in ends.first if each is not one)
            if by := _by(one, other):
                usual, later = (one, other) if by > 0 else (other, one)
                self._pairs[key] = later.host, _differed(usual, later, abs(by), gang.node)
        elif ends.hosts > 2:
            self._pairs.pop(key, None)
            for each in ends.first if ends.hosts == 3 else (took,):
                self._differ(ends.usual, each, gang.node)
        elif len(self._ended) > KEPT:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            if oldest in self._pairs:
                _note(self.late, *self._pairs.pop(oldest))

    def parts(
        self, items: Iterable[Item], machine: Machine, now: float, start: float, seen: float
    ) -> bool:
        """Compare computations where devices of many hosts share rows; whether they have other
        rows from now on: see :meth:`stragglers`."""
        before = self.version, self.worst
        for item in items:
            gangs = item.gangs() if isinstance(item, Row) else (item,)
            for gang in gangs:
                if isinstance(gang, Span) and gang.kind == "gang" and gang.step >= 0:
                    lanes = lanes_of(gang.island, gang.host, gang.devices)
                    self.computed(int(gang.args.get("slice", -1)), lanes, machine)
                    self._ends(gang, gang.host)
        late = self.behind(min(start, now - STEADY), seen)
        most = sorted(late, key=lambda host: -late[host])
        self.worst = tuple(sorted(most[:WORST]))
        return before != (self.version, self.worst)

    def behind(self, start: float, seen: float) -> dict[str, float]:
        """Hosts that were later than usual by more than *seen*, from *start* on, by how much."""
        out: dict[str, float] = {}
        for host, differed in self._later(start):
            if differed.by > seen:
                out[host] = max(differed.by, out.get(host, 0.0))
        return out

    def to_blame(self, start: float, seen: float) -> dict[str, float]:
        """Those of them whose own computations took longer, and did not only begin late."""
        own: dict[str, float] = {}
        busy: dict[str, float] = {}
        latest: dict[str, tuple[float, float]] = {}
        for host, differed in self._later(float("-inf")):
            idle = differed.since - busy.get(host, float("-inf"))
            if idle > IDLE * (differed.until - differed.since):
                own[host] = 0.0  # it waited for something else, and no longer for itself
            busy[host] = differed.until
            # One that begins late ends late: what computations took it longer adds up until then.
            added = max(0.0, own.get(host, 0.0) + differed.longer)
            own[host] = min(differed.by, added)
            if differed.until >= start:
                latest[host] = max(latest.get(host, (0.0, 0.0)), (differed.by, own[host]))
        return {h: by for h, (by, longer) in latest.items() if by > seen and longer >= OWN * by}

    def slowest(self, host: str, start: float) -> tuple[str, float]:
        """The function that took a late host most time beyond what is usual, from *start* on, all
        its computations together, and the most that one of them took it longer (seconds)."""
        longer: dict[str, list[float]] = {}
        for each, differed in self._later(start):
            if each == host:
                longer.setdefault(differed.node, []).append(differed.longer)
        node = max(longer, key=lambda node: sum(longer[node]), default="")
        return node, max(longer[node], default=0.0) if node else 0.0

    def _later(self, start: float) -> Iterator[tuple[str, Differed]]:
        told = ((host, each) for host, times in self.late.items() for each in times)
        for host, differed in (*told, *self._pairs.values()):
            if differed.until >= start:
                yield host, differed

    def kind(self, lane: Lane) -> Hashable:
        """Devices of many hosts that are drawn in one row: all of one kind."""
        slices = frozenset(number for number, _ in self.of.get(lane, ()))
        return slices, lane.host if lane.host in self.worst else ""

    def _differ(self, usual: _Took, took: _Took, node: str) -> None:
        if by := _by(usual, took):
            differed = _differed(usual, took, abs(by), node)
            _note(self.late if by > 0 else self.early, took.host, differed)

    def stragglers(
        self, running: Iterable[tuple[Lane, tuple[int, int], float, object]], now: float,
        start: float, seen: float,
    ) -> frozenset[str]:  # fmt: skip
        """Hosts that differ from others by more than *seen*, in what is shown from *start* on, or
        did so of late.

        running: what devices work on at *now*; another host may have ended it.  All in seconds.
        """
        start = min(start, now - STEADY)
        for differing in (self.late, self.early):
            for host, times in tuple(differing.items()):
                if times[-1].until < start:
                    del differing[host]
        self._pairs = {key: pair for key, pair in self._pairs.items() if pair[1].until >= start}
        out = {*self.behind(start, seen)}
        out |= {
            host for host, times in self.early.items()
            if any(each.by > seen and each.until >= start for each in times)
        }  # fmt: skip
        still: dict[tuple[int, int], set[str]] = {}
        for lane, key, _, _ in running:
            still.setdefault(key, set()).add(lane.host)
        for key, hosts in still.items():
            ends = self._ended.get(key)
            if ends is None or len(hosts) > ends.hosts:
                continue  # most of its hosts work on it
            _, begun, ended = ends.usual
            if now - ended > max(seen, UNLIKE * (ended - begun)):
                out |= hosts
        return frozenset(out)

    def lanes(self, rows: Rows, apart: Collection[str], unfolded: Collection[Hashable]) -> Lanes:
        """The rows of bars, folded.

        apart: hosts whose devices share no lane with others.  unfolded: folds of which each row
        has a lane of its own.
        """
        members: dict[float, list[Lane]] = {}
        for lane, row in rows.of.items():
            members.setdefault(row, []).append(lane)
        folds = {row: self._fold(lanes, apart) for row, lanes in members.items()}
        together: dict[Hashable, list[float]] = {}
        for row, fold in folds.items():
            together.setdefault(row if fold in unfolded else fold, []).append(row)
        first = {row: group[0] for group in together.values() for row in group}
        within = {group[0]: [lane for row in group for lane in members[row]]
                  for group in together.values()}  # fmt: skip
        sizes = {row: len(lanes) for row, lanes in within.items()}
        hosts = Counter(lane.host for lane in rows.of)

        differ = {fold.island for fold in folds.values() if fold.apart}
        slices = {number for fold in folds.values() for number in fold.slices}
        # Each client counts its own.
        numbered = len({number >> 32 for number in slices}) == 1 and min(slices) >= 0
        numbered &= max((len(fold.slices) for fold in folds.values()), default=0) <= NAMED

        def label(lane: Lane) -> str:
            row = first[rows.of[lane]]
            alone = row in together or sizes[row] == 1
            lanes = within[row]
            of = {lane.host for lane in lanes}
            whole, fold = sizes[row] == sum(hosts[host] for host in of), folds[row]
            beside = fold.island in differ and len(of) == 1
            host = min(of) if beside else fold.apart
            return (alone and rows.labels[row]) or fold.label(lanes, whole, numbered, host)

        found = arranged(rows.level, {lane: first[row] for lane, row in rows.of.items()}, label)
        drawn = {row: (found.of[members[row][0]], size / len(members[row]))
                 for row, size in sizes.items()}  # fmt: skip
        named = {drawn[group[0]][0]: folds[group[0]] for group in together.values()
                 if len(group) > 1 or group[0] in together}  # fmt: skip
        return Lanes(found, drawn, named)

    def _fold(self, lanes: list[Lane], apart: Collection[str]) -> Fold:
        hosts = {lane.host for lane in lanes}
        used = frozenset().union(*[self.of.get(lane, frozenset()) for lane in lanes])
        return Fold(lanes[0].island, used, lanes[0].host if hosts <= set(apart) else "")


def _by(usual: _Took, took: _Took) -> float:
    """Seconds by which a host was later than usual, below 0 earlier; 0: hosts differ always."""
    begun, ended = took.start - usual.start, took.end - usual.end
    by = ended if abs(ended) >= abs(begun) else begun
    longest = max(took.end - took.start, usual.end - usual.start)
    return by if abs(by) > UNLIKE * longest else 0.0


def _differed(usual: _Took, took: _Took, by: float, node: str) -> Differed:
    longer = (took.end - took.start) - (usual.end - usual.start)
    return Differed(by, took.start, max(usual.end, took.end), longer, node)


def _note(differing: Differing, host: str, differed: Differed) -> None:
    differing.setdefault(host, deque(maxlen=NEWEST)).append(differed)
