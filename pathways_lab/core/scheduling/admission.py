"""Admission of runs and uploads: each waits until its memory is free.

Problem: memory is given to whole runs, with their peak.  A run that does not fit
waits; others may pass it, but not for ever.  When no running run can give anything
back, waiting is a hang, and the core must say so.

Rule for maintainers: entries come here only when nothing but memory keeps them
waiting.  An upload is an entry without gangs.

Paper: section 4.6 (back-pressure).
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from pathways_lab.core.errors import Failure
from pathways_lab.core.memory.ledger import Ledger
from pathways_lab.core.memory.liveness import Need, Profile
from pathways_lab.core.memory.quotas import Quotas, bytes_of
from pathways_lab.core.memory.store import BufferRecord, Store
from pathways_lab.core.program.program import SliceId, slice_name
from pathways_lab.core.scheduling.runs import RunRecord


@dataclass(slots=True, eq=False)
class Entry:
    """A run or an upload (then *run* is None) that waits for memory.

    kind: entries of one kind need the same bytes on the same devices.
    lines, need: the bytes that it adds.
    since: when it began to wait (seconds).  lacked: whether memory was ever missing for it.
    hopeless: since when nothing can make room for it; infinity: something still can.
    """

    order: int
    kind: Hashable
    buffer: BufferRecord | None
    run: RunRecord | None
    lines: Profile
    need: Need
    since: float
    overtaken: int = 0
    lacked: bool = False
    hopeless: float = math.inf

    @property
    def client(self) -> str:
        """The client that it belongs to."""
        if self.run is not None:
            return self.run.client
        assert self.buffer is not None
        return self.buffer.owner


def _by_order(entry: Entry) -> int:
    return entry.order


@dataclass(slots=True)
class Admission:
    """Entries by kind, each kind in order of submission: only the first of it is looked at.

    overtaking: how often one may be passed.  changed: whether there is anything
    to try again.  settled: True once some waiting entry is known to be admissible later.
    """

    overtaking: int | None
    kinds: dict[Hashable, list[Entry]] = field(default_factory=dict)
    changed: bool = False
    settled: bool = False

    def put(self, entry: Entry) -> None:
        """An entry waits for memory from now on."""
        insort(self.kinds.setdefault(entry.kind, []), entry, key=_by_order)
        self.changed = True
        self.settled = False

    def remove(self, run: RunRecord | None = None, buffer: BufferRecord | None = None) -> None:
        """A run or an upload ended before it was admitted."""
        for kind, entries in list(self.kinds.items()):
            for entry in entries:
                if (entry.run, entry.buffer) == (run, buffer):
                    self._take(kind, entry)
                    self.changed = True
                    self.settled = False
                    return

    def _take(self, kind: Hashable, entry: Entry) -> None:
        self.kinds[kind].remove(entry)
        if not self.kinds[kind]:
            del self.kinds[kind]

    def heads(self) -> list[Entry]:
        """The first entry of every kind, in order of submission."""
        heads = [entries[0] for entries in self.kinds.values()]
        if len(heads) > 1:
            heads.sort(key=_by_order)
        return heads

    def next(
        self,
        ledger: Ledger,
        active: Mapping[SliceId, int],
        pick: Callable[[list[RunRecord]], RunRecord | None] | None,
        quotas: Quotas | None = None,
    ) -> Entry | None:
        """An entry that fits, taken out; None when none does.

        active: slices that unfinished admitted runs use.  Where such a run may
        still make room for an entry that was overtaken too often, nobody passes
        it any more.
        pick: the policy's choice among runs (None while it is being asked), None
        for FIFO.  Uploads go first: their bytes are on the hosts already.
        """
        barred: set[int] = set()
        bounded: set[int] = set()
        heads = self.heads()
        fitting: list[Entry] = []
        for entry in heads:
            if barred and any(cell in barred for cell, _ in entry.need):
                continue
            if quotas is not None and over_quota(entry, ledger, quotas):
                bounded.add(entry.order)
                entry.lacked = True
                continue
            lacking = ledger.lacking(entry.need, given(entry, ledger))
            if not lacking:
                fitting.append(entry)
                if entry.run is None or pick is None:
                    break
                continue
            entry.lacked = True
            if (
                self.overtaking is not None
                and entry.overtaken >= self.overtaking
                and any(s in active for cell in lacking for s in ledger.cells[cell].slices)
            ):
                barred.update(cell for cell, _ in entry.need)
        if not fitting:
            self.changed = ledger.released = False
            return None
        chosen = fitting[-1]
        if pick is not None and chosen.run is not None:
            run = pick([e.run for e in fitting if e.run is not None])
            if run is None:
                return None
            chosen = next(e for e in fitting if e.run is run)
        cells = {cell for cell, _ in chosen.need}
        for entry in heads:
            if (
                entry.order < chosen.order
                and entry.order not in bounded
                and any(cell in cells for cell, _ in entry.need)
            ):
                entry.overtaken += 1
        self._take(chosen.kind, chosen)
        return chosen


def given(entry: Entry, ledger: Ledger) -> dict[int, int]:
    """Held bytes per cell that the run takes over, because it donates them."""
    found: dict[int, int] = {}
    if entry.run is not None:
        for p in entry.run.index.donors:
            buffer = entry.run.inputs[p]
            if buffer is not None and buffer.counted:
                for cell in ledger.cells_of.get(buffer.slice, ()):
                    found[cell] = found.get(cell, 0) + buffer.nbytes
    return found


def over_quota(entry: Entry, ledger: Ledger, quotas: Quotas) -> bool:
    """Whether its client would have more bytes than it may."""
    taken = given(entry, ledger).items()
    held = sum([nbytes * ledger.cells[cell].devices for cell, nbytes in taken])
    return quotas.lacks(entry.client, bytes_of(entry.need, ledger) - held)


def beyond_quota(entry: Entry, ledger: Ledger, quotas: Quotas) -> Failure | None:
    """Why the quota of its client could not hold the entry even if it had nothing else."""
    own = [b for b in _beside(entry).values() if b.owner == entry.client]
    inputs = sum([b.nbytes * ledger.payers[b.slice][1] for b in own if b.slice in ledger.payers])
    return quotas.never(entry.client, bytes_of(entry.need, ledger) + inputs, describe(entry))


def _beside(entry: Entry) -> dict[int, BufferRecord]:
    """Buffers that must be there while the run is, and that it does not account for."""
    if entry.run is None:
        return {}
    index = entry.run.index
    return {
        buffer.id: buffer
        for p, buffer in enumerate(entry.run.inputs)
        if buffer is not None and index.readers[p] and p not in index.donors
    }


def too_large(entry: Entry, ledger: Ledger) -> Failure | None:
    """Why the entry could not be admitted even if it were alone."""
    beside = _beside(entry)
    for cell, _ in entry.need:
        cover = ledger.cells[cell].slices
        lines = [entry.lines[s] for s in cover if s in entry.lines]
        own = max(sum(column) for column in zip(*lines, strict=True))
        inputs = sum(b.nbytes for b in beside.values() if b.slice in cover)
        limit = ledger.cells[cell].limit
        if own + inputs > limit:
            return Failure(
                "memory",
                f"{describe(entry)} needs {own + inputs:,} bytes per device of"
                f" {ledger.cells[cell].island} ({inputs:,} of inputs and at most {own:,} more"
                f" along its order) and they have {limit:,}",
                "cut the arrays over more devices, donate inputs, run smaller programs, or start"
                " a lab with more memory= per device",
            )
    return None


def describe(entry: Entry) -> str:
    """A name for messages."""
    if entry.run is not None:
        return f"a run of {entry.run.index.plan.name!r}"
    assert entry.buffer is not None
    return f"upload {entry.buffer.name!r}"


def lacks(entry: Entry, ledger: Ledger, quotas: Quotas) -> set[int | str]:
    """The causes of an entry's wait: cells, and its client's name where that is at its quota."""
    found: set[int | str] = {*ledger.lacking(entry.need, given(entry, ledger))}
    if quotas.on_bytes and over_quota(entry, ledger, quotas):
        found.add(entry.client)
    return found


def hopeless(
    entries: Iterable[Entry],
    others: Iterable[RunRecord],
    running: Iterable[RunRecord],
    moving: Iterable[SliceId],
    ledger: Ledger,
    quotas: Quotas,
) -> list[Entry]:
    """Entries for which nothing can ever make room, none of *entries* fitting now.

    others: queued runs that wait for something else than memory.
    running: unfinished admitted runs; moving: slices that they use, or that are put aside.
    Room can come on cells that these slices cover, and on those of waiting
    work that will itself find room; and for a client's quota likewise.
    """
    hope: set[int | str] = {c for s in moving for c in ledger.cells_of.get(s, ())}
    for run in others:
        hope.update(c for s in run.index.plan.slices for c in ledger.cells_of.get(s, ()))
        hope.add(run.client)
    hope.update(run.client for run in running)
    left = list(entries)
    while True:
        stuck = [e for e in left if not hope.issuperset(lacks(e, ledger, quotas))]
        if len(stuck) == len(left):
            return stuck
        for entry in left:
            if entry not in stuck:
                hope.update(c for c, _ in entry.need)
                hope.add(entry.client)
        left = stuck


def stalemate(
    victim: Entry | RunRecord, stuck: Iterable[Entry], store: Store, quotas: Quotas
) -> Failure:
    """Nothing moves any more: who needs what, and who holds it."""
    ledger = store.ledger
    stories = []
    cells: set[int] = set()
    bounded: set[str] = set()
    for entry in list(stuck)[:4]:
        lacking = ledger.lacking(entry.need, given(entry, ledger))
        cells.update(lacking)
        most = quotas.of(entry.client).nbytes
        if most is not None and entry.client in lacks(entry, ledger, quotas):
            bounded.add(entry.client)
            free = most - quotas.accounts.of(entry.client).nbytes
            stories.append(
                f"{describe(entry)} needs {bytes_of(entry.need, ledger):,} bytes of the quota of"
                f" {entry.client}, {max(0, free):,} of {most:,} are free"
            )
        for cell, line in entry.need:
            if cell in lacking:
                limit, used = ledger.cells[cell].limit, ledger.used[cell]
                stories.append(
                    f"{describe(entry)} needs {line[0]:,} bytes per device of"
                    f" {ledger.cells[cell].island}, {limit - used:,} of {limit:,} are free"
                )
                break
    alike: dict[tuple[str, str, SliceId, int], list[BufferRecord]] = {}
    for b in store.largest(cells, bounded):
        key = b.name or f"buffer {b.id}", b.owner, b.slice, b.nbytes
        alike.setdefault(key, []).append(b)
    most_first = sorted(alike.values(), key=lambda found: -found[0].nbytes * len(found))
    holders = [_holders(found) for found in most_first[:8]]
    name = describe(victim) if isinstance(victim, Entry) else f"a run of {victim.index.plan.name!r}"
    return Failure(
        "stalemate",
        f"{name} was given up: nothing is running that could free memory, and nothing that"
        f" waits fits. {'; '.join(stories)}. Held by {', '.join(holders) or 'nobody'}.",
        "drop handles that are no longer needed, donate inputs, or use more devices"
        + (", or ask an owner of the lab for a larger quota" if bounded else ""),
    )


def _holders(alike: list[BufferRecord]) -> str:
    """Buffers of one name, client, slice and size, in words."""
    first, several = alike[0], len(alike) > 1
    return (
        f"{f'{len(alike):,} times ' * several}{first.name or f'buffer {first.id}'} of {first.owner}"
        f" ({first.nbytes:,} bytes{' each' * several} on slice {slice_name(first.slice)},"
        f" kept by {keepers(first)})"
    )


def keepers(buffer: BufferRecord) -> str:
    """The reason why a buffer is kept, in words."""
    found = ["its handle"] if buffer.kept else []
    found += [f"its name {name!r}" for name in sorted(buffer.names)]
    found += [f"{client}, to whom it was given" for client in sorted({*buffer.gifts})]
    found += [f"{client}, who has taken it" for client in sorted({*buffer.references.values()})]
    return " and ".join(found) or "waiting runs"
