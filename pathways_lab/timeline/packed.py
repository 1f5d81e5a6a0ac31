"""Many records as one: gangs that were granted, or that ended, one after the other.

Problem: small gangs come by the ten thousand a second, with four records each.  They
travel in columns, and to make records of them takes longer than the gangs do; a
live picture must not.

Rule for maintainers: :meth:`records` gives exactly what single records would say, in
their order, and whoever does not know columns reads those (:func:`single`); whoever folds
columns folds the same from them (tested).

Paper: section 5 (timelines of single gangs).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from pathways_lab.timeline.records import Event, Record, Span
from pathways_lab.timeline.records_of import Placing


class About(NamedTuple):
    """The fields that all gangs of one step have in common on a host.  slice: -1 when unknown."""

    program: str
    node: str
    client: str
    line: str
    slice: int
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Granted:
    """The gangs that one window of a run places on an island, at *time* (seconds)."""

    time: float
    run: int
    epoch: int
    place: int
    placing: Placing

    def __len__(self) -> int:
        return len(self.placing.gangs)

    @property
    def program(self) -> str:
        return self.placing.program

    @property
    def known_at(self) -> float:
        return self.time

    def within(self, start: float, end: float) -> bool:
        return start <= self.time <= end

    @property
    def own(self) -> int:
        """Gangs that no other island counts."""
        return len(self) - len(self.placing.again)

    @property
    def parts(self) -> int:
        """Gangs, counted once for each of their hosts there."""
        return sum([len(gang[5]) for gang in self.placing.gangs])

    def records(self) -> Iterator[Record]:
        return self.placing.events(self.time, self.run, self.epoch, self.place)


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """Gangs of one run that ended on one host, one step after the other.

    abouts: what differs.  numbers: by gang, which of *abouts*; empty when there is one.
    step, seq: step and place of the first gang.  poisoned: which gangs, from 0.
    announced: so many from the first on had a ``launched`` event of their own, perhaps also some
        that have not ended.
    opens: its grant was received, began to be prepared, was prepared (*once*) for it.
    once: these and when it was handed to its devices, seconds.
    columns: when each was called, returned, started and ended: float64, seconds on the host's
        clock, to which *offset* is added.
    """

    island: str
    host: str
    emulated: bool
    abouts: tuple[About, ...]
    numbers: tuple[int, ...]
    run: int
    step: int
    seq: int
    poisoned: frozenset[int]
    announced: int
    opens: bool
    once: tuple[float, float, float, float]
    offset: float
    columns: tuple[bytes, bytes, bytes, bytes]

    def __len__(self) -> int:
        return 2 * self.opens + 3 * self.count - min(self.announced, self.count)

    @property
    def count(self) -> int:
        """How many gangs."""
        return len(self.columns[0]) // 8

    @property
    def program(self) -> str:
        return self.abouts[0].program

    @property
    def known_at(self) -> float:
        return self._column(3)[-1] + self.offset

    def within(self, start: float, end: float) -> bool:
        first = self.once[0] if self.opens else self._column(0)[0] + self.offset
        return start < first and self.known_at <= end

    def _column(self, number: int) -> memoryview[float]:
        return memoryview(self.columns[number]).cast("d")

    @property
    def begun(self) -> float:
        """When the first computation began."""
        return self._column(2)[0] + self.offset

    def about(self, at: int) -> About:
        """The known facts of one gang, from 0."""
        return self.abouts[self.numbers[at] if self.numbers else 0]

    def gangs(self) -> Iterator[Span]:
        """The computations of its gangs."""
        for at, (start, end) in enumerate(self._times(2, 3)):
            about = self.about(at)
            shared = in_common(self.seq + at, about.slice, at in self.poisoned, self.emulated)
            of = (self.run, self.step + at, *about[:3])
            yield computation(self.island, self.host, start, end, of, about, shared, self.once[3])

    def opening(self) -> list[Span]:
        """The host's work once, before the first gang, if this is of it."""
        return [r for r in islice(self.records(), 2 * self.opens) if isinstance(r, Span)]

    def records(self) -> Iterator[Record]:
        received, began, prepared, handed = self.once
        island, host = self.island, self.host
        for at, (called, returned, start, end) in enumerate(self._times(0, 1, 2, 3)):
            about, seq = self.about(at), self.seq + at
            of, line = (self.run, self.step + at, *about[:3]), about.line
            if self.opens and not at:
                for kind, since, until in (
                    ("receive", received, began),
                    ("prepare", began, prepared),
                ):
                    yield Span(kind, since, until, island, host, (), *of, line, {"seq": seq})
            shared = in_common(seq, about.slice, at in self.poisoned, self.emulated)
            if at >= self.announced:
                yield launched(island, host, called, of, line, about.devices, shared)
            args = {"seq": seq, "received": received, "prepared": prepared, "handed": handed}
            yield Span("launch", called, returned, island, host, (), *of, line, args)
            yield computation(island, host, start, end, of, about, shared, handed)

    def _times(self, *columns: int) -> Iterator[tuple[float, ...]]:
        """The times of each gang in some columns."""
        for stamps in zip(*map(self._column, columns), strict=True):
            yield tuple([stamp + self.offset for stamp in stamps])


Of = tuple[int, int, str, str, str]
"""Run, step, program, node and client, in the order in which records have them."""


def launched(
    island: str,
    host: str,
    time: float,
    of: Of,
    line: str,
    devices: tuple[int, ...],
    shared: Mapping[str, object],
) -> Event:
    """A gang is being handed to its devices."""
    args = {"devices": devices, "line": line, **shared}
    return Event("launched", time, island, host, *of, args)


def computation(
    island: str,
    host: str,
    start: float,
    end: float,
    of: Of,
    about: About,
    shared: Mapping[str, object],
    handed: float,
) -> Span:
    """A gang on its devices."""
    args = {**shared, "inputs_ready": handed}
    return Span("gang", start, end, island, host, about.devices, *of, about.line, args)


def in_common(seq: int, slice_id: int, poisoned: bool, emulated: bool) -> dict[str, object]:
    """The ``args`` that the records of a gang's launch and of its computation share."""
    return {"seq": seq, "slice": slice_id, "poisoned": poisoned, "emulated": emulated}


Packed = Granted | Row
"""Records of one run, in columns.

``len``: how many records.  known_at: when the last of them can be known (seconds).
within(start, end): whether all of it happened between two moments.  records(): one by one.
"""
Item = Record | Packed


def single(items: Iterable[Item]) -> list[Record]:
    """All of it as single records."""
    out: list[Record] = []
    for item in items:
        if isinstance(item, Packed):
            out += item.records()
        else:
            out.append(item)
    return out


def size(item: Item) -> int:
    """How many records it is."""
    return len(item) if isinstance(item, Packed) else 1
