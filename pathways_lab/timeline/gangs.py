"""The order of gangs on every island, and how far each of them has come.

Problem: a gang is spoken of by many records, from the control plane and from
every host of its island, and they arrive in any order because hosts report in
batches.  A view wants one line per gang.

Rule for maintainers: folding the same records in another order gives the same
gangs.  The place in the island's order is the control plane's number, never
the order of arrival.

Paper: section 4.4 (gang-scheduled dispatch).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pathways_lab.timeline.machine import natural
from pathways_lab.timeline.packed import Granted, Row, single
from pathways_lab.timeline.records import Event, Record, Sample, Span

GangKey = tuple[int, int]
"""Run and step: one gang."""

RUNS = 4096
"""Runs of which it is remembered how many of their gangs are done, unless all are."""

RECENT = 64
"""The newest gangs, which are told from each other also where they come in columns: more than a
picture shows."""

WAITING = 1024
"""Gangs in columns that no question has asked for, at most."""

UNKNOWN = 0, -1
"""Epoch and number of a place that nobody has told."""

_KINDS = frozenset(("gang", "granted", "launched", "failed", "cancelled"))
"""Kinds of records about gangs; events and spans share no kind of these."""

STATES = ("granted", "launched", "done", "failed")
"""How far a gang has come, on one host or on all of them."""


@dataclass(slots=True, eq=False)
class Gang:
    """One node of one run on all devices of its slice.

    places: by island, ``(epoch, number)`` in its order; number -1 when unknown.
    granted: time, or None when that record is not known.
    launched, started, ended: times by host.
    poisoned: an input was missing, so its results reach nobody.
    counted: it was counted as done.
    abandoned: its run failed or was cancelled; where it has not ended, it will not.
    """

    run: int
    step: int
    program: str = ""
    node: str = ""
    client: str = ""
    line: str = ""
    slice: int = -1
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    granted: float | None = None
    launched: dict[str, float] = field(default_factory=dict)
    started: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    poisoned: bool = False
    abandoned: bool = False
    counted: bool = False

    @property
    def placed(self) -> str:
        """Its places, in words."""
        return " and ".join(f"#{self.places[island][1]} of {island}" for island in self.islands)

    @property
    def islands(self) -> list[str]:
        """The islands that it has a place on, as people count."""
        return sorted(self.places, key=natural)

    def place_on(self, island: str) -> tuple[int, int]:
        """Epoch and number in an island's order."""
        return self.places.get(island, UNKNOWN)

    @property
    def where(self) -> tuple[str, ...]:
        """The hosts that take part, as far as known."""
        return self.hosts or tuple(dict.fromkeys((*self.launched, *self.ended)))

    def state_on(self, host: str) -> str:
        """One of :data:`STATES` for one host."""
        if self.poisoned:
            return "failed"
        if host in self.ended:
            return "done"
        if self.abandoned:
            return "failed"
        return "launched" if host in self.launched else "granted"

    @property
    def state(self) -> str:
        """One of :data:`STATES` for the whole gang: its slowest host's."""
        states = {self.state_on(host) for host in self.where}
        if self.poisoned or "failed" in states or (self.abandoned and not states):
            return "failed"
        if states == {"done"}:
            return "done"
        return "launched" if states & {"launched", "done"} else "granted"

    @property
    def over(self) -> bool:
        """Whether nothing more is to come of it: cheaper to ask than its state."""
        return self.counted or self.poisoned or self.abandoned

    def key(self, island: str) -> tuple[int, int, float]:
        """Its place among the gangs of an island, those of unknown number last."""
        epoch, number = self.place_on(island)
        return (epoch, number, 0.0) if number >= 0 else (epoch, 1 << 62, self.first_seen)

    @property
    def first_seen(self) -> float:
        """Earliest known time, to order gangs whose number is unknown."""
        times = [*self.launched.values(), *self.started.values()]
        if self.granted is not None:
            times.append(self.granted)
        return min(times, default=0.0)


_Later = Granted | Row | Span | Event


class Gangs:
    """Folds records into gangs.

    keep: about so many gangs are remembered, the oldest go first; 0 = all.
    """

    def __init__(self, keep: int = 0) -> None:
        self.keep = keep
        self._by_key: dict[GangKey, Gang] = {}
        self._of_run: dict[int, dict[int, Gang]] = {}
        self._gone: dict[str, int] = {}
        self._done: dict[int, int] = {}
        self._all_done = 0
        self._later: list[_Later] = []
        self._ahead = 0
        self._ends: dict[tuple[int, str], list[range]] = {}
        self._ended_runs: dict[int, None] = {}
        self._orders: dict[str, list[Gang]] = {}
        self._unsorted: set[str] = set()

    def add(self, record: Record) -> None:
        """Fold one record."""
        if isinstance(record, Sample) or record.kind not in _KINDS:
            return
        if record.kind in ("failed", "cancelled"):
            self._settle()
        if self._later:
            self._later.append(record)
            if isinstance(record, Span):
                self._ending(record, 1)
        else:
            self._fold(record)

    def _fold(self, record: Span | Event) -> None:
        kind = record.kind
        if kind in ("failed", "cancelled"):
            self._end_run(record.run)
            return
        gang = self._gang(record)
        args = record.args
        if isinstance(record, Span):
            gang.started[record.host] = record.start
            gang.ended[record.host] = record.end
            gang.line = gang.line or record.line
            if args.get("poisoned"):
                gang.poisoned = True
            self._count(gang)
        elif kind == "granted":
            gang.granted = record.time
            gang.line = gang.line or str(args.get("line", ""))
            there = map(str, args.get("hosts", ()))
            gang.hosts = tuple(dict.fromkeys((*gang.hosts, *there)))
            self._count(gang)
        else:
            gang.launched[record.host] = record.time

    def add_packed(self, packed: Granted | Row) -> None:
        """Fold what came in columns, when somebody asks: most of it is forgotten by then."""
        self._later.append(packed)
        if isinstance(packed, Row):
            self._ending(packed, packed.count)
        if len(self._later) > self._ahead + WAITING:
            self._settle()

    def _ending(self, later: Row | Span, count: int) -> None:
        steps = range(later.step, later.step + count)
        self._ends.setdefault((later.run, later.host), []).append(steps)

    def ended(self, key: GangKey, host: str) -> bool:
        """Whether a gang is known to have ended on a host."""
        known, (run, step) = self._by_key.get(key), key
        later = self._ends.get((run, host), ())
        return (known is not None and host in known.ended) or any(step in steps for steps in later)

    def _settle(self) -> None:
        """Fold what waits, but for what would be forgotten at once, or is far ahead."""
        if len(self._later) == self._ahead:
            return
        later, self._later, self._ends = self._later, [], {}
        ended: dict[int, Counter[str]] = {}
        begun = {run for run, _ in self._by_key} | self._ended_runs.keys()
        for item in later:
            if isinstance(item, Row) and not item.poisoned:
                ended.setdefault(item.run, Counter())[item.host] += item.count
            elif not isinstance(item, Granted) and (
                isinstance(item, Row) or item.kind != "launched"
            ):
                begun.add(item.run)
        past = self._past(later, ended, begun) if self.keep else {}
        open_now = {
            island: sum([not gang.over and gang.run not in ended for gang in order])
            for island, order in self._orders.items()
        }
        ahead: set[int] = set()
        for item in later:
            if item.run in past:
                continue
            if isinstance(item, Granted) and self.keep:
                island = item.placing.island
                if item.run not in ended and item.run not in begun:
                    if open_now.get(island, 0) >= RECENT:
                        ahead.add(item.run)
                    open_now[island] = open_now.get(island, 0) + len(item)
            if item.run in ahead:
                self._later.append(item)
                continue
            for record in single([item]):
                if not isinstance(record, Sample) and record.kind in _KINDS:
                    self._fold(record)
        self._ahead = len(self._later)
        for run, (own, islands) in past.items():
            for island, count in islands.items():
                self._gone[island] = self._gone.get(island, 0) + count
            self._count_done(run, own)

    def leave_out(self, over: Iterable[Gang]) -> None:
        """Add finished gangs that another fold has listed to the count of forgotten ones."""
        for gang in over:
            self._left(gang)
            if gang.counted:
                self._count_done(gang.run, 1)

    def _past(
        self, later: Sequence[_Later], ended: Mapping[int, Counter[str]], begun: Container[int]
    ) -> dict[int, tuple[int, dict[str, int]]]:
        """Runs that are over on all hosts and not among the newest, with their gangs, in all and
        by island.

        ended: of each run, how many of its gangs each host has ended.  begun: runs that are told
        apart already, or have to be.
        Only while the picture of an island's order does not hang on them: it begins
        with the first gang that is not over.
        """
        granted: dict[int, list[Granted]] = {}
        island: dict[int, str] = {}
        for item in later:
            if isinstance(item, Granted):
                granted.setdefault(item.run, []).append(item)
            elif isinstance(item, Row):
                island[item.run] = item.island
        short = {name for name in island.values() if len(self._orders.get(name, ())) < self.keep}
        begins = {name for name in short if any(not g.over for g in self._orders.get(name, ()))}
        done: dict[int, int] = {}
        past: dict[int, tuple[int, dict[str, int]]] = {}
        for run in dict.fromkeys([item.run for item in later]):
            gangs: dict[str, int] = {}
            if run in granted:
                for window in granted[run]:
                    where = window.placing.island
                    gangs[where] = gangs.get(where, 0) + len(window)
                own = sum([window.own for window in granted[run]])
                parts = sum([window.parts for window in granted[run]])
                over = run in ended and ended[run].total() == parts
            elif over := run in ended:  # its grant was lost
                own = gangs[island[run]] = max(ended[run].values())
            if not over:
                begins |= short & gangs.keys()
                continue
            if run not in begun:
                done[run] = own
                if begins.isdisjoint(gangs):
                    past[run] = own, gangs
        newer = 0
        for run in reversed(done):
            if newer < RECENT:
                past.pop(run, None)
            newer += done[run]
        return past

    @property
    def ahead(self) -> list[Granted]:
        """Places that were granted so far ahead that their gangs are not told apart yet."""
        self._settle()
        return [item for item in self._later if isinstance(item, Granted)]

    def known(self, island: str | None = None) -> int:
        """How many gangs are known of an island, or of all, also those that have gone."""
        ahead = [g for g in self.ahead if island in (None, g.placing.island)]
        gone = sum(self._gone.values()) if island is None else self._gone.get(island, 0)
        told = len(self._by_key) if island is None else len(self._orders.get(island, ()))
        return told + gone + sum(map(len, ahead))

    @property
    def open(self) -> bool:
        """Whether any that has its place is not over."""
        return bool(self.ahead) or not all(gang.over for gang in self.by_key.values())

    @property
    def by_key(self) -> dict[GangKey, Gang]:
        """Those that are remembered."""
        self._settle()
        return self._by_key

    @property
    def gone(self) -> dict[str, int]:
        """How many have gone, by island."""
        self._settle()
        return self._gone

    @property
    def done(self) -> dict[int, int]:
        """How many are done on all their hosts, by run; also those that have gone."""
        self._settle()
        return self._done

    @property
    def all_done(self) -> int:
        """How many of all runs."""
        self._settle()
        return self._all_done

    def lose(self) -> None:
        """Records are missing: what is not over may long have ended, and nobody will say so."""
        self._settle()
        self._later.clear()
        self._ahead = 0
        for key in [key for key, gang in self._by_key.items() if not gang.over]:
            self._forget(key)

    def _gang(self, record: Span | Event) -> Gang:
        key = (record.run, record.step)
        gang = self._by_key.get(key)
        if gang is None:
            gang = self._by_key[key] = Gang(record.run, record.step)
            self._of_run.setdefault(record.run, {})[record.step] = gang
            gang.abandoned = record.run in self._ended_runs
            self._forget_one()
        island, before = record.island, gang.places.get(record.island)
        if record.kind != "granted" and gang.granted is not None and (before or UNKNOWN)[1] >= 0:
            return gang  # its grant has told all of it
        gang.program = gang.program or record.program
        gang.node = gang.node or record.node
        gang.client = gang.client or record.client
        gang.slice = int(record.args.get("slice", gang.slice))
        epoch, number = before or UNKNOWN
        told = int(record.args.get("seq", -1))
        if told >= 0:
            epoch, number = int(record.args.get("epoch", epoch)), told
        if island and (epoch, number) != before:
            gang.places[island] = epoch, number
            order = self._orders.setdefault(island, [])
            if before is None:
                if number < 0 or (order and order[-1].key(island) > gang.key(island)):
                    self._unsorted.add(island)
                order.append(gang)
            else:
                self._unsorted.add(island)
        return gang

    def _forget_one(self) -> None:
        """Let the oldest go, but not while more is to come of it, up to twice *keep*."""
        held = len(self._by_key)
        if not self.keep or held <= self.keep:
            return
        key, oldest = next(iter(self._by_key.items()))
        if oldest.counted or oldest.abandoned or held > 2 * self.keep:
            self._forget(key)

    def _forget(self, key: GangKey) -> None:
        gang, (run, step) = self._by_key.pop(key), key
        del self._of_run[run][step]
        if not self._of_run[run]:
            del self._of_run[run]
        for island in gang.places:
            self._orders[island].remove(gang)
        self._left(gang)

    def _left(self, gang: Gang) -> None:
        for island in gang.places or ("",):
            self._gone[island] = self._gone.get(island, 0) + 1

    def _count(self, gang: Gang) -> None:
        # Whether it can be done at all is asked first: its state takes a look at every host.
        ended = len(gang.ended) >= len(gang.hosts)
        if ended and not gang.counted and gang.state == "done":
            gang.counted = True
            self._count_done(gang.run, 1)

    def _count_done(self, run: int, count: int) -> None:
        self._all_done += count
        self._done[run] = self._done.get(run, 0) + count
        if self.keep and len(self._done) > RUNS:
            del self._done[next(iter(self._done))]

    def _end_run(self, run: int) -> None:
        self._ended_runs[run] = None
        if self.keep and len(self._ended_runs) > self.keep:
            del self._ended_runs[next(iter(self._ended_runs))]
        for gang in self._of_run.get(run, {}).values():
            gang.abandoned = True

    def order(self, island: str) -> list[Gang]:
        """Gangs of an island in granted order."""
        self._settle()
        gangs = self._orders.get(island, [])
        if island in self._unsorted:
            self._unsorted.discard(island)
            gangs.sort(key=lambda gang: gang.key(island))
            # A number that is not known yet leaves the place open.
            if gangs and gangs[-1].place_on(island)[1] < 0:
                self._unsorted.add(island)
        return list(gangs)
