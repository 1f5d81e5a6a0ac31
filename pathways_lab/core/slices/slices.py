"""The resource manager: which devices exist, and which slice holds which.

Problem: users ask for virtual devices with a mesh shape and wishes; islands
have hosts that come and go.  This machine binds slices to physical devices, of
one island or in equal parts of several, spreads them (a device may be shared by
several slices), takes them back, and says clearly why a wish cannot be met.  It
also divides the devices into *cells*, the sets of devices that the same slices
cover: bytes and pace are counted per cell, so that nothing else in the core
looks at devices.

Rule for maintainers: slices own *devices*; bytes belong to the store, order to
the gang scheduler.  Work here may grow with devices: it happens when a slice
is bound, never when a gang is granted.

Paper: section 4.1 (resource manager), section 3 (virtual device sets).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import HostJoined
from pathways_lab.core.messages.elastic import HostDown
from pathways_lab.core.program.program import SliceId, slice_name
from pathways_lab.core.scheduling.lifecycles import SLICE
from pathways_lab.core.scheduling.policies import Place
from pathways_lab.core.slices.placement import Choice, Grid, place
from pathways_lab.core.slices.topology import (
    HostInfo,
    Owned,
    SliceBinding,
    SliceRequest,
)

AGAIN = "get other devices for the slice (slice.rebind()) and compute the values again"
"""The remedy for what was on a slice that is lost."""
_START = "lab.restart({island!r}) starts it again; its own log says more"
"""The remedy where a host was given up."""
_LOOSE = (
    "{island} is leased without order, and a gang of a slice that spans islands needs the order of"
    " all of them"
)


@dataclass(slots=True)
class SliceRecord:
    """A slice: where it lies, in what state it is, and why it was lost.

    hosts: who has something of it; while it moves, also those that it leaves.
    told: its hosts were told to forget it.
    away: it holds no devices, for it was suspended.
    """

    binding: SliceBinding
    hosts: tuple[str, ...]
    request: SliceRequest
    state: str = SLICE.start
    failure: Failure | None = None
    told: bool = False
    away: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """Devices that exactly these slices cover.  limit: bytes per device."""

    slices: frozenset[SliceId]
    limit: int
    devices: int
    island: str


@dataclass(frozen=True, slots=True)
class Lease:
    """An island that one client has for itself.  order: see :class:`LeaseRequested`."""

    client: str
    order: bool = True


@dataclass(frozen=True, slots=True)
class _Down:
    """A host without a device process.  until: see :class:`HostDown`.  remedy: what helps then."""

    island: str
    reason: str
    until: float
    remedy: str


@dataclass(slots=True)
class _Host:
    info: HostInfo
    loads: list[int]


@dataclass(slots=True)
class ResourceManager:
    """Hosts, islands, slices.  *cells* and *cells_of* follow every change of slices.

    leases: by island, who has it for himself.
    leaving: hosts that take no new slices, for they will be taken away.
    down: hosts whose device process has ended, and whose worker lives.
    version: changes whenever the cells or the hosts do.
    """

    hosts: dict[str, _Host] = field(default_factory=dict)
    slices: dict[SliceId, SliceRecord] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)
    down: dict[str, _Down] = field(default_factory=dict)
    cells: tuple[Cell, ...] = ()
    cells_of: dict[SliceId, tuple[int, ...]] = field(default_factory=dict)
    version: int = 0

    def join(self, event: HostJoined) -> None:
        """A new host with free devices."""
        info = HostInfo(
            event.host,
            event.island,
            event.devices,
            event.kind,
            event.memory,
            event.block,
            event.site,
        )
        self.hosts[event.host] = _Host(info, [0] * event.devices)
        self.forget_down(event.host)

    def lose(self, host: str, failure: Failure) -> list[SliceRecord]:
        """Forget a host; returns the slices that are lost with it."""
        del self.hosts[host]
        self.leaving.discard(host)
        return self.lose_slices([s for s, r in self.slices.items() if host in r.hosts], failure)

    def fall(self, event: HostDown) -> None:
        """The device process of a host has ended."""
        remedy = event.remedy or _START.format(island=event.island)
        self.down[event.host] = _Down(event.island, event.reason, event.until, remedy)
        self.version += 1

    def forget_down(self, host: str) -> None:
        """It has a device process again, or will never have one."""
        self.down.pop(host, None)
        self.version += 1

    @property
    def due(self) -> float:
        """When the next host that was to come back is given up."""
        return min((d.until for d in self.down.values() if d.until), default=math.inf)

    def expect_no_more(self, now: float) -> bool:
        """Give up hosts that should have been back; whether there were any."""
        late = [host for host, down in self.down.items() if 0.0 < down.until <= now]
        for host in late:
            self.down[host] = replace(self.down[host], until=0.0)
            self.version += 1
        return bool(late)

    def coming_back(self, island: str | None) -> str:
        """Which hosts of an island (None: of any) are being started again, in words, or ""."""
        hosts = [h for h, d in self.down.items() if d.until and island in (None, d.island)]
        return f"{' and '.join(sorted(hosts))} to be started again" if hosts else ""

    def remedy(self, host: str) -> str:
        """For what was on a lost host."""
        down = self.down.get(host)
        return AGAIN if down is None or down.until else down.remedy

    def lose_slices(self, slices: Iterable[SliceId], failure: Failure) -> list[SliceRecord]:
        """Nothing computes on these any more; returns those that were not lost before."""
        found = [self.slices[s] for s in slices if s in self.slices]
        lost = [r for r in found if r.state != "lost"]
        for record in lost:
            if record.state == "bound":
                self._hold(record.binding, -1)
            record.state = SLICE.next(record.state, "lose", record.binding.slice)
            record.failure = failure
        self._divide()
        return lost

    def bind(self, slice_id: SliceId, client: str, request: SliceRequest) -> SliceBinding | Failure:
        """Find devices and hold them.  A wish that cannot be met is a Failure."""
        wrong = request.malformed or (
            f"slice {slice_id} exists already" if slice_id in self.slices else ""
        )
        if wrong:
            return Failure("refused", wrong, "ask again with a new, well-formed request")
        binding = self._place(slice_id, client, request)
        if isinstance(binding, Failure):
            return binding
        self.slices[slice_id] = SliceRecord(binding, binding.hosts, request)
        self._hold(binding, 1)
        self._divide()
        return binding

    def places(self, client: str, request: SliceRequest) -> list[Place]:
        """Islands on which a request could be met, the best one first; none for a malformed one."""
        if request.malformed:
            return []
        held = Counter(
            home[host]
            for record in self.slices.values()
            if record.state == "bound"
            for home in (record.binding.home,)
            for host, _ in record.binding.devices
        )
        found = []
        for (key, chosen), island, devices in sorted(self._options(request, self._open(client))):
            members = self._members(island)
            kind = self.hosts[devices[chosen[0]][0]].info.kind
            count = sum(host.info.devices for host in members)
            found.append(Place(island, kind, len(members), count, key[0], held[island]))
        return found

    def bind_again(self, slice_id: SliceId, island: str | None) -> SliceBinding | Failure:
        """Devices for a lost or suspended slice: a mesh of the same shape and kind.

        island: where; None: on as many as before, wherever there is room, best where it was.  A
        suspended slice that gets its old devices is of the same generation.
        """
        record = self.slices[slice_id]
        old = record.binding
        islands = old.spread if island is None else ()
        request = replace(record.request, island=island, islands=islands, kind=old.kind, at=())
        new = self._place(slice_id, old.client, request, old)
        if isinstance(new, Failure):
            return new
        if record.state == "lost" or new.devices != old.devices:
            new = replace(new, generation=old.generation + 1)
        record.state = SLICE.next(record.state, "bind", slice_id)
        record.hosts = tuple(dict.fromkeys((*new.hosts, *(old.hosts if record.away else ()))))
        record.binding, record.failure, record.told, record.away = new, None, False, False
        self._hold(new, 1)
        self._divide()
        return new

    def suspend(self, slice_id: SliceId) -> None:
        """The slice gives its devices to others for a while."""
        record = self.slices[slice_id]
        record.state = SLICE.next(record.state, "suspend", slice_id)
        record.away = True
        self._hold(record.binding, -1)
        self._divide()

    def unbind_again(self, slice_id: SliceId, old: SliceBinding) -> None:
        """Undo :meth:`bind_again` of a suspended slice."""
        self.suspend(slice_id)
        record = self.slices[slice_id]
        record.binding, record.hosts = old, old.hosts

    def _place(
        self,
        slice_id: SliceId,
        client: str,
        request: SliceRequest,
        old: SliceBinding | None = None,
    ) -> SliceBinding | Failure:
        """The best devices for a request.  old: where the slice was: preferred."""
        islands = self._open(client)
        best = self._best(request, islands)
        if old is not None and (request.island is None or (request.island,) == old.islands):
            before = self._most_shared(old.devices, islands)
            if before is not None and (best is None or before <= best[0]):
                best = before, old.devices
        if best is None:
            return self._unmet(client, request)
        _, where = best
        home = {host: self.hosts[host].info for host, _ in where}
        island, kind = home[where[0][0]].island, home[where[0][0]].kind
        elsewhere = tuple((host, at.island) for host, at in home.items() if at.island != island)
        if elsewhere and (wrong := self._apart(tuple(home.values()))):
            return wrong
        names = request.shape, request.axes
        return SliceBinding(slice_id, client, island, *names, where, kind, elsewhere=elsewhere)

    def _apart(self, hosts: Sequence[HostInfo]) -> Failure | None:
        """Why hosts of several islands do not compute together."""
        for host in hosts:
            if self._without_order(host.island):
                return Failure("refused", _LOOSE.format(island=host.island), "end that lease first")
            if (host.kind, host.site) != (hosts[0].kind, hosts[0].site):
                pair = f"{hosts[0].name} ({hosts[0].kind}) and {host.name} ({host.kind})"
                return Failure(
                    "refused",
                    f"{pair} cannot compute together: islands with CPU devices do, of one machine"
                    " or of several with TLS between them",
                    "take islands of one machine; of several, where you trust the network between"
                    " them: connect with plain_collectives=True",
                )
        return None

    def _best(
        self, request: SliceRequest, islands: Collection[str]
    ) -> tuple[int, tuple[Owned, ...]] | None:
        """The best devices of these islands, and the most slices that one of them is in."""
        if request.at:
            most = self._most_shared(request.at, islands)
            return None if most is None else (most, request.at)
        if not request.islands:
            return self._parts(request, islands)
        sites: dict[str, list[str]] = {}
        for island in islands:
            sites.setdefault(self._members(island)[0].info.site, []).append(island)
        found = [best for near in sites.values() if (best := self._parts(request, near))]
        return min(found, default=None) or self._parts(request, islands)

    def _parts(
        self, request: SliceRequest, islands: Collection[str]
    ) -> tuple[int, tuple[Owned, ...]] | None:
        """The same, a part of the mesh on each of as many islands, whatever their sites."""
        found: dict[str, tuple[int, tuple[Owned, ...]]] = {}
        for wanted in sorted(request.parts, reverse=True):  # those with a name choose first
            wish = replace(request, shape=request.part, island=wanted or None, islands=())
            best = min(self._options(wish, islands), key=itemgetter(0), default=None)
            if best is None:
                return None
            (key, chosen), island, devices = best
            found[island] = key[0], tuple(devices[d] for d in chosen)
            request = replace(request, kind=self.hosts[devices[chosen[0]][0]].info.kind)
            islands = [name for name in islands if name != island]
        free = iter(sorted(found.keys() - {*request.parts}, key=_natural))
        parts = [found[wanted or next(free)] for wanted in request.parts]
        return max(most for most, _ in parts), tuple(d for _, part in parts for d in part)

    def _options(
        self, request: SliceRequest, islands: Collection[str]
    ) -> Iterator[tuple[Choice, str, list[Owned]]]:
        """The best devices of each of these that would do, with its name and all its devices."""
        for island in islands:
            if request.island in (None, island):
                grid, devices, loads = self._ground(island, request)
                choice = place(grid, loads, request.shape)
                if choice is not None:
                    yield choice, island, devices

    def _most_shared(self, devices: Iterable[Owned], islands: Collection[str]) -> int | None:
        """Slices on the most shared one; None when not all are to be had, on these islands."""
        loads = []
        for name, device in devices:
            host = self.hosts.get(name)
            if host is None or name in self.leaving or device >= host.info.devices:
                return None
            if host.info.island not in islands:
                return None
            loads.append(host.loads[device])
        return max(loads)

    def lease(
        self, island: str, client: str, order: bool, handles: Mapping[SliceId, int]
    ) -> Failure | None:
        """Give an island to one client; a Failure while others have anything there.

        handles: how many buffers are named on each slice.
        """
        if island not in self.islands():
            known = ", ".join(self.islands()) or "no island"
            return Failure("refused", f"there is no island {island!r} to lease; there is {known}")
        others: dict[str, list[str]] = {}
        holder = self.leases.get(island)
        if holder is not None:
            others[holder.client] = ["a lease of it"]
        for number, record in self.slices.items():
            if island in record.binding.islands and not record.away:
                held, name = handles.get(number, 0), slice_name(number)
                also = f" with {held} handle{'s' * (held != 1)}" if held else ""
                what = f"slice {name} ({record.state}, {len(record.binding.devices)} devices)"
                others.setdefault(record.binding.client, []).append(what + also)
        others.pop(client, None)
        if holder is not None and holder.client == client:
            return Failure(
                "refused", f"{client} has {island} on lease already", "leave that lease first"
            )
        if others:
            who = "; ".join(f"{name} has {', '.join(things)}" for name, things in others.items())
            return Failure(
                "refused",
                f"{island} cannot be leased to {client}: {who}",
                "wait until they are gone, or take another island",
            )
        here = [r.binding for r in self.slices.values() if r.state in ("bound", "released")]
        if not order and any(b.elsewhere and island in b.islands for b in here):
            return Failure("refused", _LOOSE.format(island=island), "release such slices first")
        self.leases[island] = Lease(client, order)
        return None

    def held_by(self, client: str) -> dict[SliceId, int]:
        """Slices that a client holds, suspended ones too, with the number of their devices."""
        mine = [r for r in self.slices.values() if r.binding.client == client]
        return {
            r.binding.slice: len(r.binding.devices)
            for r in mine
            if r.state in ("bound", "suspended")
        }

    def kept_from(self, client: str, request: SliceRequest) -> str:
        """The passing obstacle that keeps a request from being met, or "" when there is none.

        Leases of others, and hosts that are being started again.
        """
        found = []
        if not request.malformed and (coming := self.coming_back(request.island)):
            found.append(coming)
        if not request.malformed:
            free, every = self._open(client), self.islands()
            leased = [island for island in every if island not in free]
            alone = [i for i in leased if self._best(request, (*free, i)) is not None]
            if not alone and self._best(request, every) is not None:
                alone = leased
            found += [f"{i} is leased to {self.leases[i].client}" for i in alone]
        return "; ".join(found)

    def _open(self, client: str) -> list[str]:
        """Islands that nobody else has for himself, in order."""
        return [island for island in self.islands() if self._open_to(island, client)]

    def _open_to(self, island: str, client: str) -> bool:
        """Whether nobody else has the island for himself."""
        lease = self.leases.get(island)
        return lease is None or lease.client == client

    def unordered(self, slice_id: SliceId) -> Lease | None:
        """The lease that switches the order off where a slice lies, if there is one."""
        island = self.slices[slice_id].binding.island
        return self.leases[island] if self._without_order(island) else None

    def _without_order(self, island: str) -> bool:
        return island in self.leases and not self.leases[island].order

    def end_lease(self, island: str, client: str) -> bool:
        """Give the island back; False when it was not leased to this client."""
        if island not in self.leases or self.leases[island].client != client:
            return False
        del self.leases[island]
        return True

    def release(self, slice_id: SliceId) -> None:
        """The slice takes no new work; its devices count as free."""
        record = self.slices[slice_id]
        if record.state == "bound":
            record.state = SLICE.next(record.state, "release", slice_id)
            self._hold(record.binding, -1)

    def free(self, slice_id: SliceId) -> SliceRecord:
        """Nothing uses the released or lost slice any more."""
        record = self.slices.pop(slice_id)
        record.state = SLICE.next(record.state, "free", slice_id)
        self._divide()
        return record

    def islands(self) -> tuple[str, ...]:
        """Names of the islands that have hosts, in order."""
        return tuple(sorted({h.info.island for h in self.hosts.values()}, key=_natural))

    def _members(self, island: str) -> list[_Host]:
        members = [h for h in self.hosts.values() if h.info.island == island]
        return sorted(members, key=lambda h: _natural(h.info.name))

    def _ground(
        self, island: str, request: SliceRequest
    ) -> tuple[Grid, list[Owned], list[int | None]]:
        """The island's grid, its devices row-major, and the load of those that will do."""
        members = self._members(island)
        devices: list[tuple[str, int]] = []
        loads: list[int | None] = []
        for host in members:
            fits = request.kind in (None, host.info.kind) and host.info.memory >= request.memory
            fits = fits and host.info.name not in self.leaving
            devices += [(host.info.name, d) for d in range(host.info.devices)]
            loads += host.loads if fits else [None] * host.info.devices
        return _grid(tuple(h.info for h in members)), devices, loads

    def _hold(self, binding: SliceBinding, by: int) -> None:
        for name, device in binding.devices:
            host = self.hosts.get(name)
            if host is not None:
                host.loads[device] += by

    def _divide(self) -> None:
        """Divide the devices of all living slices into cells."""
        cover: dict[tuple[str, int], list[SliceId]] = {}
        for slice_id, record in self.slices.items():
            if record.state != "lost" and not record.away:
                for device in record.binding.devices:
                    cover.setdefault(device, []).append(slice_id)
        groups: dict[tuple[tuple[SliceId, ...], int, str], int] = {}
        for (name, _), slices in cover.items():
            info = self.hosts[name].info
            key = (tuple(slices), info.memory, info.island)
            groups[key] = groups.get(key, 0) + 1
        self.cells = tuple(
            Cell(frozenset(slices), memory, count, island)
            for (slices, memory, island), count in groups.items()
        )
        of: dict[SliceId, list[int]] = {slice_id: [] for slice_id in self.slices}
        for index, cell in enumerate(self.cells):
            for slice_id in cell.slices:
                of[slice_id].append(index)
        self.cells_of = {slice_id: tuple(indices) for slice_id, indices in of.items()}
        self.version += 1

    def _unmet(self, client: str, request: SliceRequest) -> Failure:
        """The request, the devices that exist, those that are free, and the remedy."""
        islands = self.islands()
        down = {h: d for h, d in self.down.items() if request.island in (None, d.island)}
        lines = [f"{host} is down: {down[host].reason}" for host in sorted(down, key=_natural)]
        start = next((d.remedy for d in down.values() if not d.until), "")
        missing = next((name for name in request.parts if name not in ("", *islands)), None)
        if not islands or missing is not None:
            if lines:
                return Failure(
                    "refused",
                    f"there are no devices for the slice: {'; '.join(lines)}",
                    start or "it is being started again: ask again in some seconds",
                )
            if not islands:
                return Failure(
                    "refused",
                    "there are no devices for the slice: no host has joined, or all have left",
                    "wait until lab.islands has some, or start workers on the lab's Dask cluster",
                )
            return Failure(
                "refused",
                f"there is no island {missing!r} for the slice; there is {', '.join(islands)}",
                "name one that is there, or none",
            )
        asked = f"{request.devices} devices in shape {request.shape}"
        wishes = [
            f"{label} {value}"
            for label, value in (("island", request.island), ("kind", request.kind))
            if value is not None
        ]
        wishes += [f"at least {request.memory:,} bytes per device"] if request.memory else []
        wishes += [f"device {number} of {host}" for host, number in request.at]
        asked += f" with {', '.join(wishes)}" if wishes else ""
        for island in islands:
            members = self._members(island)
            count = sum(h.info.devices for h in members)
            free = sum(load == 0 for h in members for load in h.loads)
            kinds = sorted({f"{h.info.kind}, {h.info.memory:,} bytes" for h in members})
            line = f"{island} has {count} devices ({'; '.join(kinds)}), {free} of them unshared"
            if not self._open_to(island, client):
                line += f", and is leased to {self.leases[island].client}"
            if any(h.info.name in self.leaving for h in members):
                line += ", and hosts of it are about to leave"
            lines.append(line)
        count = len(request.islands)
        who = f"no {count} islands can hold equal parts of" if count else "no island can hold"
        rule = (
            "ask for fewer devices, or drop a constraint"
            if count
            else "a slice lies on one island unless it spans several (islands=2): ask for fewer"
            " devices there, or drop a constraint"
        )
        return Failure(
            "refused", f"{who} the slice: asked for {asked}; {'; '.join(lines)}", start or rule
        )


def _grid(hosts: tuple[HostInfo, ...]) -> Grid:
    """Blocks stacked along the first dimension; a row where hosts differ or say nothing."""
    blocks = {h.block for h in hosts}
    block = blocks.pop() if len(blocks) == 1 else ()
    if not block or any(math.prod(block) != h.devices for h in hosts):
        return (sum(h.devices for h in hosts),)
    return (len(hosts) * block[0], *block[1:])


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key: ``host10`` after ``host2``."""
    return tuple(
        (int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)
    )
