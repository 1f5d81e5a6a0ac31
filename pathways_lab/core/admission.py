"""Who may begin: runs and uploads that wait for memory.

Problem: memory is given to whole runs, with their peak; whoever does not fit
waits, others may pass, but not for ever; and when nobody who is running can
give anything back, waiting is a hang and must be told.

Rule for maintainers: entries come here only when nothing but memory keeps them
waiting.  An upload is an entry without gangs.

Paper: section 4.6 (back-pressure).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from pathways_lab.core.errors import Failure
from pathways_lab.core.ledger import Ledger
from pathways_lab.core.liveness import Need, Profile
from pathways_lab.core.program import SliceId
from pathways_lab.core.runs import RunRecord
from pathways_lab.core.store import BufferRecord, Store


@dataclass(slots=True, eq=False)
class Entry:
    """A run or an upload (then *run* is None) that waits for memory.

    kind: entries of one kind need the same bytes on the same devices.
    lines, need: the bytes that it adds.
    """

    order: int
    kind: Hashable
    buffer: BufferRecord | None
    run: RunRecord | None
    lines: Profile
    need: Need
    overtaken: int = 0


def _by_order(entry: Entry) -> int:
    return entry.order


@dataclass(slots=True)
class Admission:
    """Entries by kind, each kind in order of submission: only the first of it is looked at.

    overtaking: how often one may be passed.  changed: whether there is anything
    to try again.  settled: whether it is known that waiting has a sense.
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
    ) -> Entry | None:
        """An entry that fits, taken out; None when none does.

        active: slices that unfinished admitted runs use.  Where such a run may
        still make room for an entry that was overtaken too often, nobody passes
        it any more.
        pick: the policy's choice among runs (None while it is being asked), None
        for FIFO.  Uploads go first: their bytes are on the hosts already.
        """
        barred: set[int] = set()
        heads = self.heads()
        fitting: list[Entry] = []
        for entry in heads:
            if barred and any(cell in barred for cell, _ in entry.need):
                continue
            lacking = ledger.lacking(entry.need, given(entry, ledger))
            if not lacking:
                fitting.append(entry)
                if entry.run is None or pick is None:
                    break
            elif (
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
            if entry.order < chosen.order and any(cell in cells for cell, _ in entry.need):
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


def too_large(entry: Entry, ledger: Ledger) -> Failure | None:
    """Why the entry could not be admitted even if it were alone."""
    beside: dict[int, BufferRecord] = {}
    if entry.run is not None:
        for p, buffer in enumerate(entry.run.inputs):
            index = entry.run.index
            if buffer is not None and index.readers[p] and p not in index.donors:
                beside[buffer.id] = buffer
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
                "cut the arrays over more devices, donate inputs, or run smaller programs",
            )
    return None


def describe(entry: Entry) -> str:
    """A name for messages."""
    if entry.run is not None:
        return f"a run of {entry.run.index.plan.name!r}"
    return f"upload {entry.buffer.name!r}" if entry.buffer else "nothing"


def hopeless(
    entries: Iterable[Entry], others: Iterable[RunRecord], active: Iterable[SliceId], ledger: Ledger
) -> list[Entry]:
    """Entries for which nothing can ever make room, none of *entries* fitting now.

    others: queued runs that wait for something else than memory.
    active: slices that unfinished admitted runs use.
    Room can come on cells that running work covers, and on those of waiting
    work that will itself find room.
    """
    hope = {c for s in active for c in ledger.cells_of.get(s, ())}
    hope |= {c for run in others for s in run.index.plan.slices for c in ledger.cells_of.get(s, ())}
    left = list(entries)
    while True:
        stuck = [e for e in left if not hope.issuperset(ledger.lacking(e.need, given(e, ledger)))]
        if len(stuck) == len(left):
            return stuck
        hope |= {c for e in left if e not in stuck for c, _ in e.need}
        left = stuck


def stalemate(victim: Entry | RunRecord, stuck: Iterable[Entry], store: Store) -> Failure:
    """Nothing moves any more: who needs what, and who holds it."""
    ledger = store.ledger
    stories = []
    cells: set[int] = set()
    for entry in list(stuck)[:4]:
        lacking = ledger.lacking(entry.need, given(entry, ledger))
        cells.update(lacking)
        for cell, line in entry.need:
            if cell in lacking:
                limit, used = ledger.cells[cell].limit, ledger.used[cell]
                stories.append(
                    f"{describe(entry)} needs {line[0]:,} bytes per device of"
                    f" {ledger.cells[cell].island}, {limit - used:,} of {limit:,} are free"
                )
                break
    holders = [
        f"{b.name or f'buffer {b.id}'} of {b.owner} ({b.nbytes:,} bytes on slice {b.slice},"
        + f" kept by {keepers(b)})"
        for b in store.largest(cells)[:8]
    ]
    name = describe(victim) if isinstance(victim, Entry) else f"a run of {victim.index.plan.name!r}"
    return Failure(
        "stalemate",
        f"{name} was given up: nothing is running that could free memory, and nothing that"
        f" waits fits. {'; '.join(stories)}. Held by {', '.join(holders) or 'nobody'}.",
        "drop handles that are no longer needed, donate inputs, or use more devices",
    )


def keepers(buffer: BufferRecord) -> str:
    """What keeps a buffer, in words."""
    found = ["its handle"] if buffer.kept else []
    found += [f"its name {name!r}" for name in sorted(buffer.names)]
    found += [f"{client}, who has taken it" for client in sorted({*buffer.references.values()})]
    return " and ".join(found) or "waiting runs"
