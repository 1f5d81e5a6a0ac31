"""The store: whose buffer is where, who still needs it, and when it is freed.

Problem: a client counts references per logical buffer, hosts hold its shards,
runs read it in an order that is fixed long before it is executed.  So every
buffer has two ends of life: in the *order of grants* (its bytes are given back
in the ledger when its handle is dropped and its last reader has its place) and
in *reality* (hosts forget it when its last reader has ended).

A buffer may have readers beside its owner: then each of them has a *reference*
of its own, under a number of its own, and the buffer stays while anybody has
one, or could still ask for one by a name.

Rule for maintainers: the store knows runs by number only.  It owns bytes on
devices; devices are the resource manager's, order is the gang scheduler's.

Paper: section 4.2 (sharded logical buffers, handles), section 4.6 (object
store, ownership, garbage collection).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pathways_lab.core.errors import Failure
from pathways_lab.core.memory.ledger import Ledger
from pathways_lab.core.program.program import NO_LINE, Line, SliceId
from pathways_lab.core.scheduling.lifecycles import BUFFER


@dataclass(slots=True, eq=False)
class BufferRecord:
    """One logical buffer.

    nbytes: on each device of *slice*.
    program, line: the program that makes it; the user's line that does, or that uploaded it.
    kept: its owner has a handle.  names: under which it is published.
    gifts: clients to which it was given that have not taken it yet.
    references: of other clients, by their own numbers for it.
    apart: the reservation of the run that makes it covers it no longer.
    counted: the ledger holds its bytes.
    admitted: the run that makes it (or the upload) has its memory.
    granted: the gang that makes it has its place.
    made: that run has ended with it, in reality, so that it may be forgotten.
    stored: hosts have something to forget.
    arriving: of an upload, the hosts that do not have all their parts.
    claims: runs, in order of submission, that read it and are not granted that
        far, with the number of arguments that it is.
    used: a run was submitted that reads it.
    reads: arguments of runs that it is and that have not ended that far.
    donor: the run that consumes it; taken: the donor's reservation covers it.
    unread: it was noted that nobody will read what its maker has not begun to make.
    watched: runs to look at again when something of this changes.
    listeners: ``(run, input position)`` to tell when it is resolved.
    """

    id: int
    owner: str
    slice: SliceId
    nbytes: int
    name: str
    maker: int = 0
    program: str = ""
    line: Line = NO_LINE
    state: str = BUFFER.start
    failure: Failure | None = None
    kept: bool = True
    names: set[str] = field(default_factory=set)
    gifts: list[str] = field(default_factory=list)
    references: dict[int, str] = field(default_factory=dict)
    apart: bool = False
    counted: bool = False
    admitted: bool = False
    granted: bool = False
    made: bool = False
    stored: bool = False
    arriving: set[str] = field(default_factory=set)
    claims: dict[int, int] = field(default_factory=dict)
    used: bool = False
    reads: int = 0
    donor: int = 0
    taken: bool = False
    unread: bool = False
    watched: list[int] = field(default_factory=list)
    listeners: list[tuple[int, int]] = field(default_factory=list)

    @property
    def held(self) -> bool:
        """Whether anybody has a handle, or can still get one."""
        return self.kept or bool(self.names or self.gifts or self.references)

    @property
    def readable(self) -> bool:
        """Whether anybody can read it, or will."""
        return self.held or self.reads > 0

    def move(self, move: str) -> None:
        """Go to the next state of the life cycle."""
        self.state = BUFFER.next(self.state, move, self.id)


@dataclass(slots=True)
class Store:
    """All buffers.  references: those that clients have taken, by the takers' numbers.

    freed: per slice, what hosts are to forget since this was last taken.
    unwanted: uploads that nobody can use any more and that have not come.
    unread: results without a place that nobody will read, or that have failed, likewise.
    """

    ledger: Ledger
    buffers: dict[int, BufferRecord] = field(default_factory=dict)
    by_slice: dict[SliceId, set[int]] = field(default_factory=dict)
    freed: dict[SliceId, list[int]] = field(default_factory=dict)
    references: dict[int, BufferRecord] = field(default_factory=dict)
    unwanted: list[BufferRecord] = field(default_factory=list)
    unread: list[BufferRecord] = field(default_factory=list)

    def find(self, number: int, client: str) -> BufferRecord | None:
        """The buffer that a client calls *number*: one of its own, or one that it has taken."""
        buffer = self.buffers.get(number)
        if buffer is not None:
            return buffer if buffer.owner == client else None
        taken = self.references.get(number)
        return taken if taken is not None and taken.references[number] == client else None

    def in_use(self, number: int) -> bool:
        """Whether no new buffer or reference can have this number."""
        return number in self.buffers or number in self.references

    def create(
        self,
        buffer: int,
        owner: str,
        slice_id: SliceId,
        nbytes: int,
        name: str,
        maker: int = 0,
        program: str = "",
        line: Line = NO_LINE,
    ) -> BufferRecord:
        """A promised buffer: an upload, or an output of run *maker*."""
        record = BufferRecord(buffer, owner, slice_id, nbytes, name, maker, program, line)
        self.buffers[buffer] = record
        self.by_slice.setdefault(slice_id, set()).add(buffer)
        return record

    def count(self, record: BufferRecord) -> None:
        """Its maker's reservation ends: the ledger holds what somebody can still use."""
        if record.state == "freed":
            return
        record.apart = True
        if not record.counted and not record.taken and record.failure is None:
            record.counted = True
            self.ledger.hold(record.slice, record.nbytes)
            self.settle(record)

    def take(self, record: BufferRecord) -> None:
        """The reservation of its donor covers the buffer from now on."""
        record.taken = True
        self.uncount(record)

    def give_back(self, record: BufferRecord) -> None:
        """Its donor will never consume it."""
        record.donor = 0
        record.taken = False
        if record.apart:
            self.count(record)

    def uncount(self, record: BufferRecord) -> None:
        """The ledger holds the buffer's bytes no longer."""
        if record.counted:
            record.counted = False
            self.ledger.hold(record.slice, -record.nbytes)

    def claim(self, record: BufferRecord, run: int) -> None:
        """A run was submitted that reads the buffer."""
        record.claims[run] = record.claims.get(run, 0) + 1
        record.reads += 1
        record.used = True

    def pass_by(self, record: BufferRecord, run: int) -> None:
        """The run's last reader of the buffer is granted, or never will be."""
        record.claims[run] -= 1
        if not record.claims[run]:
            del record.claims[run]
            self.settle(record)

    def read(self, record: BufferRecord) -> None:
        """A run will not touch the buffer again, in reality."""
        record.reads -= 1
        self.settle(record)

    def make(self, record: BufferRecord) -> None:
        """The run that makes the buffer will not touch it again; an upload has come."""
        record.made = True
        self.settle(record)

    def drop(self, record: BufferRecord) -> None:
        """The owner's handle is gone."""
        record.kept = False
        self.settle(record)

    def refer(self, record: BufferRecord, client: str, number: int) -> None:
        """Another client has taken the buffer, and calls it *number*."""
        record.references[number] = client
        self.references[number] = record

    def end_reference(self, number: int) -> BufferRecord:
        """A taker's handle is gone; the buffer that it meant."""
        record = self.references.pop(number)
        del record.references[number]
        self.settle(record)
        return record

    def fail(self, record: BufferRecord, failure: Failure) -> None:
        """The buffer will never have a value (any more)."""
        record.move("fail")
        record.failure = failure
        self.settle(record)

    def settle(self, record: BufferRecord) -> None:
        """Give back what nobody needs: the bytes in the ledger, then those on hosts."""
        known = record.granted or record.unread or not record.maker
        if not known and (record.failure is not None or not record.readable):
            record.unread = True
            self.unread.append(record)
        if record.claims or record.state == "freed":
            return
        wanted = record.held and record.failure is None
        coming = not record.maker and record.state == "promised"
        if not wanted and not coming:
            self.uncount(record)
        if wanted or record.reads or not record.made:
            if coming and not record.held and not record.reads and not record.made:
                self.unwanted.append(record)
            return
        if record.stored:
            record.stored = False
            self.freed.setdefault(record.slice, []).append(record.id)
        if not record.held:
            self._forget(record)

    def _forget(self, record: BufferRecord) -> None:
        self.uncount(record)
        record.move("free")
        del self.buffers[record.id]
        self.by_slice[record.slice].discard(record.id)

    def owned(self, client: str) -> list[BufferRecord]:
        """Every buffer of a client."""
        return [b for b in self.buffers.values() if b.owner == client]

    def largest(self, cells: Iterable[int], clients: Iterable[str] = ()) -> list[BufferRecord]:
        """Counted buffers on these cells, and of these clients, the largest first."""
        slices = {s for c in cells for s in self.ledger.cells[c].slices}
        slices |= {s for s, (client, _) in self.ledger.payers.items() if client in clients}
        found = [self.buffers[b] for s in slices for b in self.by_slice.get(s, ())]
        return sorted((b for b in found if b.counted), key=lambda b: (-b.nbytes, b.id))
