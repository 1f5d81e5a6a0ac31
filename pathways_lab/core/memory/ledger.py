"""Bytes per cell: what is held, what is reserved, what fits.

Problem: several runs that each hold a part of what they need can wait for each
other for ever.  So a run takes the whole peak of its remaining order when it
is admitted, and gives back as its gangs are granted: the ledger counts along
the *order of grants*, and hosts wait at launch until earlier gangs have really
freed what the ledger already gave away.  Every such wait points to an earlier
grant, so it ends.

Rule for maintainers: numbers only; who owns a buffer and why is the store's.
A cell is a set of devices that the same slices cover.

Paper: section 4.6 (back-pressure).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pathways_lab.core.memory.accounts import Accounts
from pathways_lab.core.memory.liveness import Need, Profile, peaks
from pathways_lab.core.program.program import SliceId
from pathways_lab.core.slices.slices import Cell


@dataclass(slots=True)
class Reservation:
    """The bytes that one admitted run of a client may still need."""

    client: str
    profile: Profile
    need: Need
    position: int = 0


@dataclass(slots=True)
class Ledger:
    """used: per cell, held and reserved bytes of each of its devices.

    payers: by slice, the client whose bytes they are, and its devices.
    accounts: what is counted for each client.
    by_gang: without reserved peaks (see Rules.peak): a reservation then covers
        only what the granted gangs of the run have.
    """

    by_gang: bool = False
    cells: tuple[Cell, ...] = ()
    cells_of: Mapping[SliceId, tuple[int, ...]] = field(default_factory=dict)
    payers: Mapping[SliceId, tuple[str, int]] = field(default_factory=dict)
    accounts: Accounts = field(default_factory=Accounts)
    used: list[int] = field(default_factory=list)
    held: dict[SliceId, int] = field(default_factory=dict)
    reserved: dict[int, Reservation] = field(default_factory=dict)
    released: bool = False
    """Whether bytes were given back since this was last looked at."""

    def divide(
        self,
        cells: tuple[Cell, ...],
        cells_of: Mapping[SliceId, tuple[int, ...]],
        owners: Mapping[SliceId, str],
    ) -> None:
        """The slices changed: count again over the new cells.  owners: clients by slice."""
        self.cells, self.cells_of = cells, cells_of
        self.payers = {
            s: (owners[s], sum([cells[c].devices for c in of])) for s, of in cells_of.items()
        }
        self.held = {s: n for s, n in self.held.items() if s in cells_of}
        for reservation in self.reserved.values():
            reservation.need = self.need(reservation.profile)
        self.used = self.recount()
        self.accounts.recount(self.by_client())
        self.released = True

    def by_client(self) -> dict[str, int]:
        """Each client's bytes, as the accounts must have them."""
        found: dict[str, int] = {}
        for slice_id, nbytes in self.held.items():
            client, devices = self.payers[slice_id]
            found[client] = found.get(client, 0) + nbytes * devices
        for mine in self.reserved.values():
            found[mine.client] = found.get(mine.client, 0) + self.reserves(mine)
        return found

    def recount(self) -> list[int]:
        """The right value of *used*."""
        used = [sum(self.held.get(s, 0) for s in cell.slices) for cell in self.cells]
        for reservation in self.reserved.values():
            for cell, line in reservation.need:
                used[cell] += line[reservation.position]
        return used

    def need(self, lines: Profile, *, upload: bool = False) -> Need:
        """The peaks of a profile on every cell that its slices touch."""
        touched = {cell for s in lines for cell in self.cells_of.get(s, ())}
        by_cover: dict[frozenset[SliceId], Sequence[int]] = {}
        found = []
        for cell in sorted(touched):
            cover = self.cells[cell].slices.intersection(lines)
            if cover not in by_cover:
                several = [lines[s] for s in cover]
                by_gang = self.by_gang and not upload
                by_cover[cover] = _granted(several) if by_gang else peaks(several)
            found.append((cell, by_cover[cover]))
        return tuple(found)

    def hold(self, slice_id: SliceId, nbytes: int) -> None:
        """Bytes per device of a slice are taken (or given back, when negative)."""
        if slice_id not in self.cells_of:
            return
        self.held[slice_id] = self.held.get(slice_id, 0) + nbytes
        for cell in self.cells_of[slice_id]:
            self.used[cell] += nbytes
        client, devices = self.payers[slice_id]
        self.accounts.change(client, nbytes * devices)
        if nbytes < 0:
            self.released = True

    def reserves(self, mine: Reservation) -> int:
        """Bytes that a reservation holds now, on all devices together."""
        return sum([line[mine.position] * self.cells[c].devices for c, line in mine.need])

    def lacking(self, need: Need, given: Mapping[int, int]) -> tuple[int, ...]:
        """Cells on which a run does not fit now.  given: held bytes that it takes over."""
        return tuple(
            cell
            for cell, line in need
            if self.used[cell] + line[0] - given.get(cell, 0) > self.cells[cell].limit
        )

    def reserve(self, run: int, client: str, lines: Profile, need: Need) -> None:
        """The run is admitted."""
        self.reserved[run] = Reservation(client, lines, need)
        total = 0
        for cell, line in need:
            self.used[cell] += line[0]
            total += line[0] * self.cells[cell].devices
        self.accounts.change(client, total)

    def can_advance(self, run: int, to: int) -> bool:
        """Whether memory allows the gangs before *to*: always, when peaks are reserved."""
        if not self.by_gang:
            return True
        mine = self.reserved[run]
        at = mine.position
        for cell in {c for s in mine.profile for c in self.cells_of.get(s, ())}:
            lines = [mine.profile[s] for s in self.cells[cell].slices.intersection(mine.profile)]
            most = max(sum(line[step] for line in lines) for step in range(at, to))
            now = dict(mine.need)[cell][at]
            if self.used[cell] - now + most > self.cells[cell].limit:
                return False
        return True

    def advance(self, run: int, to: int) -> None:
        """The gangs before *to* have their places: what only they needed is given back."""
        mine = self.reserved[run]
        at, mine.position = mine.position, to
        total = 0
        for cell, line in mine.need:
            change = line[to] - line[at]
            if change:
                self.used[cell] += change
                total += change * self.cells[cell].devices
                self.released = True
        if total:
            self.accounts.change(mine.client, total)

    def release(self, run: int) -> None:
        """The run's reservation ends; what it leaves behind is held from now on."""
        mine = self.reserved.pop(run, None)
        if mine is not None:
            for cell, line in mine.need:
                self.used[cell] -= line[mine.position]
            self.accounts.change(mine.client, -self.reserves(mine))
            self.released = True


def _granted(lines: Sequence[Sequence[int]]) -> list[int]:
    """By position, what the last granted gang has (for granting memory gang by gang)."""
    during = [sum(column) for column in zip(*lines, strict=True)]
    return [0, *during[:-2], during[-1]]
