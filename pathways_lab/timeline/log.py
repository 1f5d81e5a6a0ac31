"""The log: bounded, shared by threads, and never a burden on what it watches.

Problem: records arrive in batches on a thread of the client, several views and
tests read them at their own pace, and none of them may slow down or break the
others.

Rule for maintainers: an observer that raises is dropped, silently for whoever
reports and visibly in :attr:`Timeline.failures`; what the bound pushes out is
counted, because a picture that hides a loss lies.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathways_lab.timeline import busy, planned, queries, runs
from pathways_lab.timeline.entries import Entries
from pathways_lab.timeline.export import files, frame, perfetto, sql
from pathways_lab.timeline.flow import PLANS, RUNS
from pathways_lab.timeline.machine import Lane
from pathways_lab.timeline.packed import Item, Packed, single, size
from pathways_lab.timeline.queries import Flow, flows
from pathways_lab.timeline.records import ENDS, Event, Record, Sample, Span

Observer = Callable[[Sequence[Record]], None]

SETTLE = 2.0
"""Seconds that are waited for the last records of a stretch."""

PROGRAMS = 4096
"""Names of programs that keep their number, which decides their colour."""


open_view: Callable[..., Any] | None = None
"""``open_view(timeline, *panels, **options)``: set by whoever stands above and can draw."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The items that a reader has not seen yet.

    items: as they are kept, some of them many records in columns.
    version: pass it to the next :meth:`Timeline.since`.
    missed: records that the bound pushed out before this reader saw them.
    left: at least so many more have come, which nobody has read.
    """

    items: tuple[Item, ...]
    version: int
    missed: int
    left: int

    @property
    def records(self) -> tuple[Record, ...]:
        """One by one."""
        return tuple(single(self.items))


def _checked(capacity: int) -> int:
    """Raises ValueError for what is no number of records to keep."""
    if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
        raise ValueError(
            f"capacity of a timeline is {capacity!r}: how many records it keeps, a whole number"
            " from 1 on, like 2_000_000"
        )
    return capacity


class Recording:
    """The records between two moments of a timeline; records that arrive late count too.

    start, end: seconds on the records' clock; end is None while it goes on.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.start = timeline.clock()
        self.end: float | None = None

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self.end = self.timeline.clock()

    def settle(self, runs: int = 0, seconds: float = SETTLE) -> None:
        """Wait until every run that was submitted meanwhile has its end, but no longer than so.

        runs: so many were; the records of that may still be on their way.
        """
        until = time.monotonic() + seconds
        while self.timeline.grows and time.monotonic() < until:
            records = self.timeline.records
            events = [r for r in records if isinstance(r, Event) and r.time >= self.start]
            end = self.end if self.end is not None else float("inf")
            begun = {r.run for r in events if r.kind == "submitted" and r.time <= end}
            over = {r.run for r in events if r.kind in ENDS}
            started = {(r.run, r.step, r.host) for r in events if r.kind == "launched"}
            done = {(r.run, r.step, r.host) for r in records if isinstance(r, Span)}
            whole = {key for key in started if key[0] in begun} <= done
            if whole and begun <= over and len(begun) >= runs:
                return
            time.sleep(0.05)

    @property
    def records(self) -> tuple[Record, ...]:
        """Records of this stretch that are still known, and all of islands, hosts and slices."""
        end = self.end if self.end is not None else float("inf")
        return tuple(r for r in self.timeline.records if within(r, self.start, end))


def items_within(items: Iterable[Item], start: float, end: float = float("inf")) -> list[Item]:
    """Those that a picture of the time between *start* and *end* needs; see :func:`within`."""
    out: list[Item] = []
    for item in items:
        if not isinstance(item, Packed):
            if within(item, start, end):
                out.append(item)
        elif item.within(start, end):
            out.append(item)
        elif item.known_at >= start:
            out += [record for record in item.records() if within(record, start, end)]
    return out


def within(record: Record, start: float, end: float = float("inf")) -> bool:
    """Whether a picture of the time between *start* and *end* needs a record."""
    if isinstance(record, Span):
        return record.end > start and record.start < end
    if isinstance(record, Event) and record.kind.startswith(("host-", "slice-", "plan")):
        return record.time <= end
    if isinstance(record, Sample) and record.name == "clock":
        return record.time <= end
    return start <= record.time <= end


class Timeline:
    """The record of all that happened on a lab, newest last, at most *capacity* records.

    Columns stay columns until somebody asks for single records.

    clock: seconds on the same clock as the records' times (the control
        plane's); the client passes one that is aligned with it.
    loaded: the file that it comes from, or "".
    over: nothing more will happen: its lab is gone (:meth:`end`).
    written: the same records as bytes, where they come so: for other processes.
    """

    def __init__(
        self, capacity: int = 200_000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._capacity = _checked(capacity)
        self.clock = clock
        self.loaded = ""
        self.over = False
        self.written: Entries | None = None
        self.failures: list[str] = []
        self.operations: dict[str, str] = {}
        self._lock = threading.RLock()
        self._items: deque[Item] = deque()
        self._held = self._version = 0
        self._lost = 0
        self._programs: dict[str, int] = {}
        self._named = 0
        self._plans: dict[str, Event] = {}
        self._submitted: dict[int, Event] = {}
        self._observers: list[Observer] = []
        self._later: deque[tuple[int, Callable[[], Iterable[Item]]]] = deque()
        self._waiting = 0

    @property
    def capacity(self) -> int:
        """How many records are kept; what newer ones push out counts as :attr:`dropped`.

            lab.timeline.capacity = 2_000_000  # some 500 bytes each

        Holds from now on, also for views that are opened later.  Raises ValueError for what is
        no whole number from 1 on.
        """
        return self._capacity

    @capacity.setter
    def capacity(self, records: int) -> None:
        with self._lock:
            self._capacity = _checked(records)
            if self.written is not None:
                self.written.capacity = self._capacity
            self._bound()

    def extend(self, records: Iterable[Item]) -> None:
        """Remember *records* and tell the observers.  Any thread."""
        new = tuple(records)
        if not new:
            return
        with self._lock:
            self._read()
            self._add(new)
            observers = tuple(self._observers)
        told = single(new) if observers else ()
        for observer in observers:
            try:
                observer(told)
            except Exception as error:
                self.failures.append(f"{observer!r} was dropped: {type(error).__name__}: {error}")
                self._forget(observer)

    def extend_later(self, least: int, read: Callable[[], Iterable[Item]]) -> None:
        """The same for at least *least* records that are read when somebody looks.  Any thread.

        At once when somebody observes; never when the bound would push them all out.
        When *read* raises, they are lost, and counted.
        """
        with self._lock:
            if not self._observers:
                self._later.append((least, read))
                self._waiting += least
                self._bound()
                return
        self.extend(self._made(least, read))

    @property
    def grows(self) -> bool:
        """Whether more may happen."""
        return not (self.loaded or self.over)

    def end(self) -> None:
        """Nothing more will happen: it is over, and its clock stands."""
        now = self.clock()
        self.clock, self.over = lambda: now, True

    def _made(self, least: int, read: Callable[[], Iterable[Item]]) -> tuple[Item, ...]:
        """The records of *read*, or that so many records could not be read."""
        try:
            return tuple(read())
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            self.failures.append(f"{least} records could not be read: {why}")
            return (Sample("dropped", self.clock(), float(least)),)

    def _bound(self) -> None:
        """Push out what is too old: what was read first, for what waits is newer."""
        while self._items and self._held + self._waiting > self.capacity:
            self._held -= size(self._items.popleft())
        while self._later and self._waiting - self._later[0][0] >= self.capacity:
            gone, _ = self._later.popleft()
            self._waiting -= gone
            self._version += gone

    def _read(self, most: float = float("inf")) -> None:
        """Look at what waits to be read, until that are *most* items or more."""
        with self._lock:
            while self._later and most > 0:
                least, read = self._later.popleft()
                self._waiting -= least
                new = self._made(least, read)
                self._add(new)
                most -= len(new)

    def _add(self, new: Sequence[Item]) -> None:
        self._items.extend(new)
        many = sum([size(item) for item in new])
        self._held += many
        self._version += many
        self._bound()
        for item in new:
            if isinstance(item, Sample):
                if item.name == "dropped":
                    self._lost += int(item.value)
            elif item.program and item.program not in self._programs:
                self._programs[item.program] = self._named
                self._named += 1
                if len(self._programs) > PROGRAMS:
                    del self._programs[next(iter(self._programs))]
            if isinstance(item, Event) and item.kind in ("plan", "submitted"):
                self._plan(item)
            if isinstance(item, Event) and item.kind == "submitted":
                self._submitted[item.run] = item
                if len(self._submitted) > RUNS:
                    del self._submitted[next(iter(self._submitted))]

    def _plan(self, event: Event) -> None:
        """A plan is known, or one that is known is used."""
        key = str(event.args.get("plan", ""))
        known = self._plans.pop(key, None)
        if event.kind == "plan":
            known = event
        if known is not None:
            self._plans[key] = known
            if len(self._plans) > PLANS:
                del self._plans[next(iter(self._plans))]

    def recording(self) -> Recording:
        """``with timeline.recording() as run: ...``: keeps what happens inside."""
        return Recording(self)

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Call *observer* with every new batch, in the thread that reports it.

        Returns a function that ends it.  Observers must be quick and must not
        print; one that raises is dropped.
        """
        with self._lock:
            self._read()
            self._observers.append(observer)
        return lambda: self._forget(observer)

    def _forget(self, observer: Observer) -> None:
        with self._lock:
            if observer in self._observers:
                self._observers.remove(observer)

    def since(self, version: int, most: int = 0) -> Batch:
        """The items after the first *version* records, as far as still known.

        most: read no more than it takes to have about so many items; 0: everything.
        """
        with self._lock:
            new = self._after(version)
            if not most or len(new) < most:
                self._read(most - len(new) if most else float("inf"))
                new = self._after(version)
            missed = max(0, self._version - version) - sum([size(item) for item in new])
            return Batch(tuple(new), self._version, missed, self._waiting)

    def _after(self, version: int) -> list[Item]:
        """The known records after the first *version* ones."""
        asked, new = self._version - version, list[Item]()
        for item in reversed(self._items):
            if asked <= 0:
                break
            asked -= size(item)
            new.append(item)
        new.reverse()
        if asked < 0:  # the first one has records that came before
            new[:1] = single(new[:1])[-asked:]
        return new

    @property
    def items(self) -> tuple[Item, ...]:
        """All that is still known, oldest first, as it is kept."""
        with self._lock:
            self._read()
            return tuple(self._items)

    @property
    def records(self) -> tuple[Record, ...]:
        """All records that are still known, oldest first."""
        return tuple(single(self.items))

    def messages(self, run: int | None = None) -> dict[tuple[str, str, str], Flow]:
        """Messages and bytes between client, control plane and hosts, by kind and both ends.

        run: of one run only; a report about several runs counts for none of them.
        """
        return flows(self.records, run)

    @property
    def version(self) -> int:
        """How many records were ever remembered."""
        self._read()
        return self._version

    @property
    def evicted(self) -> int:
        """Records that were remembered and pushed out by newer ones."""
        with self._lock:
            self._read()
            return self._version - self._held

    @property
    def dropped(self) -> int:
        """Records that are missing here: pushed out, or lost before they arrived."""
        with self._lock:
            self._read()
            return self._version - self._held + self._lost

    @property
    def programs(self) -> dict[str, int]:
        """Programs in the order in which they were first seen, of the last :data:`PROGRAMS` names.

        It decides their colours, so that a program looks the same in every view.
        """
        with self._lock:
            self._read()
            return dict(self._programs)

    @property
    def plans(self) -> tuple[Event, ...]:
        """The plans of the programs that were last in use, one record each.

        The bound does not push these out.
        """
        return tuple(item for item in self.kept if item.kind == "plan")

    @property
    def kept(self) -> tuple[Event, ...]:
        """Records that the bound does not push out: :attr:`plans`, and the submissions of the last
        :data:`~.flow.RUNS` runs, which say whose plans they are."""
        with self._lock:
            self._read()
            return (*self._plans.values(), *self._submitted.values())

    # --- to keep ---------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write all records to a file of columns (see :mod:`.files`); returns its path."""
        return files.save(path, self.with_kept(), self.clock(), self.dropped)

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """A timeline from a file; its clock stands at the moment of saving.

        Its records are those that were saved, but for their ``args``, which are as in JSON:
        what was a tuple is a list.

        Raises ValueError when the file is none, and OSError when there is none.
        """
        saved = files.load(path)
        made = cls(max(1, len(saved.records)), clock=lambda: saved.clock)
        made.loaded = str(path)
        made.extend(saved.records)
        made._lost = saved.dropped
        return made

    def to_perfetto(self, path: str | Path) -> Path:
        """Write it as trace events that Perfetto opens (see :mod:`.perfetto`)."""
        return perfetto.save(path, self.with_kept(), self.dropped)

    def to_dataframe(self) -> Any:
        """A pandas frame: a row per record, columns as in :mod:`.records` and ``type``.

        Raises ModuleNotFoundError where pandas is not installed.
        """
        return frame.frame(self.records)

    def view(self, *panels: str, **options: Any) -> Any:
        """Show it: live while it grows, a static picture of all of it when it was loaded or its
        lab is gone.

        With ``replay=True`` such a one stays live too: any moment of it, zoom, clicks.
        """
        if open_view is None:
            raise RuntimeError(
                "no front end is there to show a view; import pathways_lab and use a name of it"
            )
        return open_view(self, *panels, **options)

    def with_kept(self) -> tuple[Record, ...]:
        """All records, and before them what the bound has pushed out and they still need."""
        records = self.records
        if not self.evicted:
            return records
        held = {id(record) for record in records}
        runs = {record.run for record in records if not isinstance(record, Sample)}
        needed = [r for r in self.kept if r.kind == "plan" or r.run in runs]
        return (*[record for record in needed if id(record) not in held], *records)

    # --- questions --------------------------------------------------------------------

    def story(self, run: int | None = None, step: int | None = None) -> list[Record]:
        """Everything known about one run, or one gang of it, oldest first.

        run: as in the records, or as views count: a client's own number, where no other's is.
        Raises TypeError for what is no number, and KeyError for one that no run has.
        """
        return queries.story(self.records, run, step)

    @property
    def runs(self) -> runs.Runs:
        """A table of all runs: client, program, priority, when submitted, granted, begun, ended.

            print(lab.timeline.runs)
            lab.timeline.runs.to_dataframe().groupby("client").waited.mean()

        Times are seconds on the records' clock; see :class:`~.runs.RunTimes`.
        """
        return runs.runs((*self.kept, *self.items))

    def utilisation(
        self, start: float | None = None, end: float | None = None
    ) -> dict[Lane, float]:
        """Busy share (0 to 1) of every device that ran anything, between two times (seconds).

        Default: from where the first gang starts to where the last one ends.
        """
        return busy.utilisation(self.records, *self._between(start, end))

    def waits(
        self, start: float | None = None, end: float | None = None
    ) -> dict[Lane, dict[str, float]]:
        """Seconds by cause, ``"running"`` included, of every device between two times.

        Default: from where the first gang starts to where the last one ends.
        """
        found = queries.waits(self.with_kept(), *self._between(start, end))
        return {lane: queries.shares(parts) for lane, parts in found.items()}

    def _between(self, start: float | None, end: float | None) -> tuple[float, float]:
        """The two times; where nothing ran any will do."""
        if start is None or end is None:
            gangs = [r for r in self.records if isinstance(r, Span) and r.kind == "gang"]
            if start is None:
                start = min((gang.start for gang in gangs), default=0.0)
            if end is None:
                end = max((gang.end for gang in gangs), default=start + 1.0)
        return start, end

    def sql(self, query: str = "") -> sql.QueryRows:
        """The answer to a query in SQL: rows, as a table.

            lab.sql("select client, cause, sum(seconds) from waits group by all order by 3 desc")

        query: one statement that selects, in DuckDB's SQL.  Without one the answer has the
            tables and their columns.  It reads these tables and no files.

        Raises ValueError for any other statement and for one that is wrong, and
        ModuleNotFoundError where DuckDB is not installed (``pip install 'pathways-lab[sql]'``).
        """
        return sql.query(query, self.with_kept())

    def planned(self, run: int) -> planned.Planned:
        """One run as an ideal machine does it against what happened, and where the gap went.

            print(lab.timeline.planned(run))       # the time of all its devices, by cause

        run: as for :meth:`story`.
        """
        return planned.planned(self.with_kept(), run)

    def __len__(self) -> int:
        self._read()
        return self._held

    def __repr__(self) -> str:
        lost = f", {self.dropped} dropped" if self.dropped else ""
        return f"Timeline({len(self)} records{lost})"


def load(path: str | Path) -> Timeline:
    """A timeline that ``lab.timeline.save(path)`` wrote; it needs no cluster.

    Raises ValueError when the file is none, and OSError when there is none.
    """
    return Timeline.load(path)
