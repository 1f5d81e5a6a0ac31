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

from dataclasses import dataclass, field

from pathways_lab.timeline.records import Event, Record, Sample, Span

GangKey = tuple[int, int]
"""Run and step: one gang, on one island."""

RUNS = 4096
"""Runs of which it is remembered how many of their gangs are done, unless all are."""

STATES = ("granted", "launched", "done", "failed")
"""How far a gang has come, on one host or on all of them."""


@dataclass(slots=True, eq=False)
class Gang:
    """One node of one run on all devices of its slice.

    place: ``(epoch, number)`` in the island's order; number -1 when unknown.
    granted: time, or None when that record is not known.
    launched, started, ended: times by host.
    poisoned: an input was missing, so its results reach nobody.
    counted: it was counted as done.
    abandoned: its run failed or was cancelled; where it has not ended, it will not.
    """

    run: int
    step: int
    island: str = ""
    program: str = ""
    node: str = ""
    client: str = ""
    line: str = ""
    slice: int = -1
    place: tuple[int, int] = (0, -1)
    hosts: tuple[str, ...] = ()
    granted: float | None = None
    launched: dict[str, float] = field(default_factory=dict)
    started: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    poisoned: bool = False
    abandoned: bool = False
    counted: bool = False

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

    @property
    def key(self) -> tuple[int, int, float]:
        """Its place among the gangs of its island, those of unknown number last."""
        epoch, number = self.place
        return (epoch, number, 0.0) if number >= 0 else (epoch, 1 << 62, self.first_seen)

    @property
    def first_seen(self) -> float:
        """Earliest known time, to order gangs whose number is unknown."""
        times = [*self.launched.values(), *self.started.values()]
        if self.granted is not None:
            times.append(self.granted)
        return min(times, default=0.0)


class Gangs:
    """Folds records into gangs.

    keep: about so many gangs are remembered, the oldest go first; 0 = all.
    gone: how many have gone, by island.
    done: how many are done on all their hosts, by run; also those that have gone.
    all_done: how many of all runs.
    """

    def __init__(self, keep: int = 0) -> None:
        self.keep = keep
        self.by_key: dict[GangKey, Gang] = {}
        self.gone: dict[str, int] = {}
        self.done: dict[int, int] = {}
        self.all_done = 0
        self.version = 0
        self._ended_runs: dict[int, None] = {}
        self._orders: dict[str, list[Gang]] = {}
        self._unsorted: set[str] = set()

    def add(self, record: Record) -> None:
        """Fold one record."""
        if isinstance(record, Sample):
            return
        kind = record.kind
        if isinstance(record, Event) and kind in ("failed", "cancelled"):
            self._end_run(record.run)
            return
        if kind not in ("gang", "granted", "launched"):
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
            gang.hosts = tuple(str(host) for host in args.get("hosts", ())) or gang.hosts
            self._count(gang)
        else:
            gang.launched[record.host] = record.time
        self.version += 1

    def _gang(self, record: Span | Event) -> Gang:
        key = (record.run, record.step)
        gang = self.by_key.get(key)
        if gang is None:
            gang = self.by_key[key] = Gang(record.run, record.step)
            gang.abandoned = record.run in self._ended_runs
            self._forget_one()
        elif record.kind != "granted" and gang.granted is not None and gang.place[1] >= 0:
            return gang  # its grant has told all of it
        before = gang.island, gang.place
        gang.island = gang.island or record.island
        gang.program = gang.program or record.program
        gang.node = gang.node or record.node
        gang.client = gang.client or record.client
        number = int(record.args.get("seq", -1))
        if number >= 0:
            gang.place = (int(record.args.get("epoch", gang.place[0])), number)
        gang.slice = int(record.args.get("slice", gang.slice))
        if (gang.island, gang.place) != before:
            order = self._orders.setdefault(gang.island, [])
            if not before[0]:
                if gang.place[1] < 0 or (order and order[-1].key > gang.key):
                    self._unsorted.add(gang.island)
                order.append(gang)
            else:
                self._unsorted.add(gang.island)
        return gang

    def _forget_one(self) -> None:
        """Let the oldest go, but not while more is to come of it, up to twice *keep*."""
        held = len(self.by_key)
        if not self.keep or held <= self.keep:
            return
        key, oldest = next(iter(self.by_key.items()))
        if oldest.counted or oldest.abandoned or held > 2 * self.keep:
            del self.by_key[key]
            if oldest.island:
                self._orders[oldest.island].remove(oldest)
            self.gone[oldest.island] = self.gone.get(oldest.island, 0) + 1

    def _count(self, gang: Gang) -> None:
        # Whether it can be done at all is asked first: its state takes a look at every host.
        ended = len(gang.ended) >= len(gang.hosts)
        if ended and not gang.counted and gang.state == "done":
            gang.counted = True
            self.all_done += 1
            self.done[gang.run] = self.done.get(gang.run, 0) + 1
            if self.keep and len(self.done) > RUNS:
                del self.done[next(iter(self.done))]

    def _end_run(self, run: int) -> None:
        self._ended_runs[run] = None
        if self.keep and len(self._ended_runs) > self.keep:
            del self._ended_runs[next(iter(self._ended_runs))]
        for gang in self.by_key.values():
            if gang.run == run:
                gang.abandoned = True
        self.version += 1

    def order(self, island: str, last: int = 0) -> list[Gang]:
        """Gangs of an island in granted order; only the *last* ones unless 0."""
        gangs = self._orders.get(island, [])
        if island in self._unsorted:
            self._unsorted.discard(island)
            gangs.sort(key=lambda gang: gang.key)
            # A number that is not known yet leaves the place open.
            if gangs and gangs[-1].place[1] < 0:
                self._unsorted.add(island)
        return gangs[-last:] if last else list(gangs)
