"""The values on devices: the size of each, its origin, and the reason why it is kept.

Problem: a device is full, and somebody must find out what fills it.  The ledger
knows sums; the store knows which buffers it counts and who still needs each of
them, runs know what they reserve.  Only together do they explain every byte.

Rule for maintainers: computed when somebody asks and never on the way, in one pass
over values, runs and devices.  The values on a device and what runs reserve there add up
to what the ledger counts.  A client reads names and lines of its own values only.

Paper: section 4.2 (handles), section 4.6 (object store, back-pressure).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from pathways_lab.core.memory.store import BufferRecord
from pathways_lab.core.program.program import NO_LINE, Line, SliceId
from pathways_lab.core.scheduling.runs import RunRecord
from pathways_lab.core.slices.topology import Owned, SliceBinding
from pathways_lab.core.state import State

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
        values that it has taken.
    slices: where those values lie.
    clients: bytes on all devices, by client; the sum of everything that devices hold.
    """

    values: tuple[Holding, ...]
    runs: tuple[Reserved, ...]
    slices: tuple[SliceBinding, ...]
    devices: tuple[DeviceUse, ...]
    clients: dict[str, int]


def holdings(state: State, client: str, owner: bool) -> Holdings:
    """The memory of the lab as *client* may read it; *owner*: it is an owner of the lab."""
    readers = _readers(state.runs.values())
    values = []
    for buffer in state.store.buffers.values():
        number = buffer.id
        if buffer.owner != client:
            mine = (n for n, taker in buffer.references.items() if taker == client)
            number = next(mine, buffer.id if owner else 0)
        if number and (where := _state_of(state, buffer)):
            values.append(_holding(state, buffer, number, where, client, owner, readers))
    ledger = state.store.ledger
    runs = tuple(
        Reserved(number, mine.client, state.runs[number].index.plan.name, ledger.reserves(mine))
        for number, mine in ledger.reserved.items()
        if owner or mine.client == client
    )
    slices = state.resources.slices
    return Holdings(
        tuple(values),
        runs,
        tuple(slices[s].binding for s in dict.fromkeys(value.slice for value in values)),
        tuple(_devices(state)),
        {name: account.nbytes for name, account in state.accounts.rows.items() if account.nbytes},
    )


def _state_of(state: State, buffer: BufferRecord) -> str:
    """How it lies on devices, or "" when nothing of it does by itself."""
    if not buffer.counted:
        return ""
    return SUSPENDED if state.resources.slices[buffer.slice].away else buffer.state


def _holding(
    state: State,
    buffer: BufferRecord,
    number: int,
    where: str,
    client: str,
    owner: bool,
    readers: Mapping[int, list[RunRecord]],
) -> Holding:
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


def _readers(runs: Iterable[RunRecord]) -> dict[int, list[RunRecord]]:
    """By buffer, the runs that have not ended with it."""
    found: dict[int, list[RunRecord]] = {}
    for run in runs:
        for position, buffer in enumerate(run.inputs):
            if buffer is not None and run.reads[position]:
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
