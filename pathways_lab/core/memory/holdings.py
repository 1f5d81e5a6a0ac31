"""The values on devices: the size of each, its origin, and the reason why it is kept.

Problem: a device is full, and somebody must find out what fills it.  The ledger
knows sums; the store knows which buffers it counts and who still needs each of
them, runs know what they reserve.  Only together do they explain every byte.

Nothing else happens in the control plane meanwhile.  So of many values only the largest are
described, and the others are counted.

Rule for maintainers: computed when somebody asks and never on the way, in one pass
over values, runs and devices, which does next to nothing for a value that is not described.
The values on a device and what runs reserve there add up to what the ledger counts.  A client
reads names and lines of its own values only.

Paper: section 4.2 (handles), section 4.6 (object store, back-pressure).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter

from pathways_lab.core.memory.store import BufferRecord
from pathways_lab.core.program.program import NO_LINE, Line, SliceId
from pathways_lab.core.scheduling.runs import RunRecord
from pathways_lab.core.slices.topology import Owned, SliceBinding
from pathways_lab.core.state import State

MOST = 5000
"""Values that are described in one answer at most: this takes some 50 ms."""
SUSPENDED = "suspended"
"""The state of a value whose slice holds no devices; the others are a buffer's own."""


@dataclass(frozen=True, slots=True)
class Holding:
    """One value.

    buffer: its number, as the client that asked calls it.
    nbytes: on each device of *slice*; of a suspended one, in its hosts' memory instead.
    state: ``"promised"``, ``"resident"`` or :data:`SUSPENDED`.
    program, name, line: the program and the output, or the upload, that it is.
    why: what keeps it, one text each.
    """

    buffer: int
    owner: str
    slice: SliceId
    nbytes: int
    state: str
    program: str
    name: str
    line: Line
    why: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reserved:
    """The memory that an admitted run may still need.  nbytes: on all its devices together."""

    run: int
    owner: str
    program: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """One device.  values, reserved, limit: bytes."""

    device: Owned
    values: int
    reserved: int
    limit: int


@dataclass(frozen=True, slots=True)
class Holdings:
    """The memory of a lab, as far as one client may read it.

    values, runs: all of them for an owner of the lab, else the client's own, and
        values that it has taken.  The values that take most, the largest first.
    others, others_bytes: how many more values there are, and their bytes on all devices.
    slices: where those values lie.
    clients: bytes on all devices, by client; the sum of everything that devices hold.
    """

    values: tuple[Holding, ...]
    runs: tuple[Reserved, ...]
    slices: tuple[SliceBinding, ...]
    devices: tuple[DeviceUse, ...]
    clients: dict[str, int]
    others: int = 0
    others_bytes: int = 0


def holdings(state: State, client: str, owner: bool, most: int = MOST) -> Holdings:
    """The memory of the lab as *client* may read it.

    owner: it is an owner of the lab.  most: so many values are described, from one on.
    """
    count = nbytes = 0

    def readable() -> Iterator[tuple[int, int, BufferRecord]]:
        # One by one: a list of all would set off collections of garbage.
        nonlocal count, nbytes
        for number, buffer in _readable(state, client, owner):
            size = buffer.nbytes * devices[buffer.slice]
            count, nbytes = count + 1, nbytes + size
            yield size, number, buffer

    slices = state.resources.slices
    devices = {number: len(record.binding.devices) for number, record in slices.items()}
    shown = heapq.nlargest(most, readable(), key=itemgetter(0))
    needed = {buffer.id for _, _, buffer in shown if buffer.reads}
    readers = _readers(state.runs.values(), needed) if needed else {}
    values = [_holding(state, b, number, client, owner, readers) for _, number, b in shown]
    ledger = state.store.ledger
    runs = tuple(
        Reserved(number, mine.client, state.runs[number].index.plan.name, ledger.reserves(mine))
        for number, mine in ledger.reserved.items()
        if owner or mine.client == client
    )
    return Holdings(
        tuple(values),
        runs,
        tuple(slices[s].binding for s in dict.fromkeys(value.slice for value in values)),
        tuple(_devices(state)),
        {name: account.nbytes for name, account in state.accounts.rows.items() if account.nbytes},
        count - len(shown),
        nbytes - sum(map(itemgetter(0), shown)),
    )


def _readable(state: State, client: str, owner: bool) -> Iterator[tuple[int, BufferRecord]]:
    """The values that a client may read, each with its own number for it."""
    for buffer in state.store.buffers.values():
        if buffer.counted:
            number = buffer.id
            if buffer.owner != client:
                mine = (n for n, taker in buffer.references.items() if taker == client)
                number = next(mine, buffer.id if owner else 0)
            if number:
                yield number, buffer


def _holding(
    state: State,
    buffer: BufferRecord,
    number: int,
    client: str,
    owner: bool,
    readers: Mapping[int, list[RunRecord]],
) -> Holding:
    where = SUSPENDED if state.resources.slices[buffer.slice].away else buffer.state
    open_to = owner or buffer.owner == client
    return Holding(
        number,
        buffer.owner,
        buffer.slice,
        buffer.nbytes,
        where,
        buffer.program if open_to else "",
        buffer.name if open_to else "",
        buffer.line if open_to else NO_LINE,
        tuple(_why(state, buffer, where, readers.get(buffer.id, ()), None if owner else client)),
    )


def _readers(runs: Iterable[RunRecord], wanted: Collection[int]) -> dict[int, list[RunRecord]]:
    """By buffer, of those *wanted*, the runs that have not ended with it."""
    found: dict[int, list[RunRecord]] = {}
    for run in runs:
        for position, buffer in enumerate(run.inputs):
            if buffer is not None and buffer.id in wanted and run.reads[position]:
                readers = found.setdefault(buffer.id, [])
                if not readers or readers[-1] is not run:
                    readers.append(run)
    return found


def _why(
    state: State,
    buffer: BufferRecord,
    where: str,
    readers: Iterable[RunRecord],
    client: str | None,
) -> Iterator[str]:
    """The reasons why a value is kept.  client: reads nothing of others' programs; None: it may."""
    if buffer.kept:
        yield "a handle is held" if client in (None, buffer.owner) else "its owner has a handle"
    for name in sorted(buffer.names):
        yield f"published as {name!r}"
    if buffer.gifts:
        yield f"given to {', '.join(sorted({*buffer.gifts}))}"
    if buffer.references:
        yield f"taken by {', '.join(sorted(set(buffer.references.values())))}"
    if buffer.maker in state.runs and buffer.state == "promised":
        yield f"{_called(state.runs[buffer.maker], client)} makes it"
    groups: dict[tuple[str, str], list[RunRecord]] = {}
    for run in readers:
        stage = "waiting " if run.id in buffer.claims else ""
        groups.setdefault((stage, run.index.plan.name), []).append(run)
    for (stage, _), alike in groups.items():
        more = f" and {len(alike) - 1:,} more of it" if len(alike) > 1 else ""
        verb = "read" if more else "reads"
        yield f"{stage}{_called(alike[0], client)}{more} {verb} it"
    if not buffer.maker and not buffer.used:
        yield "uploaded, and no run has read it"
    if where == SUSPENDED:
        yield "its slice is suspended: it is in its hosts' memory"


def _called(run: RunRecord, client: str | None) -> str:
    if client not in (None, run.client):
        return f"a run of {run.client}"
    return f"run {run.id & 0xFFFFFFFF} of {run.index.plan.name!r}"


def _devices(state: State) -> Iterator[DeviceUse]:
    """Every device of the lab, also those that no slice covers."""
    resources, ledger = state.resources, state.store.ledger
    cover: dict[Owned, list[SliceId]] = {}
    for slice_id, record in resources.slices.items():
        if ledger.cells_of.get(slice_id):
            for device in record.binding.devices:
                cover.setdefault(device, []).append(slice_id)
    counted = zip(ledger.cells, ledger.used, strict=True)
    cells = {(cell.slices, cell.limit, cell.island): used for cell, used in counted}
    for name, host in resources.hosts.items():
        info = host.info
        for number in range(info.devices):
            slices = frozenset(cover.get((name, number), ()))
            used = cells.get((slices, info.memory, info.island), 0)
            values = sum([ledger.held.get(s, 0) for s in slices])
            yield DeviceUse((name, number), values, used - values, info.memory)


def size(nbytes: float) -> str:
    """A number of bytes in few characters: ``"1.5 MiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"
