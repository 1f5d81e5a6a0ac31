"""Names, addresses and parcels, which the control plane keeps beside the core.

Problem: the core decides about ids; somebody must remember whose ids they are,
where a host listens, and the bytes (code, arguments, plans) that go with an id
until the core says to whom.

Rule for maintainers: parcels are kept as they came and never looked into; each
has a moment at which it is dropped.  A client may only name ids that carry its
own number in their high 32 bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from pathways_lab.core.messages import Run
from pathways_lab.core.program.program import Plan, SliceId
from pathways_lab.core.program.wellformed import Types
from pathways_lab.core.scheduling.policies import INITIAL, Policy, RemotePolicy, name_of
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.runtime.control_plane.used_numbers import Once
from pathways_lab.transport.codec import Within, pack
from pathways_lab.transport.edge import Count, Size

_NAME = re.compile(r"[^\W_][\w .@-]{0,39}")
_Name = Annotated[str, Within(1, 1000)]
COLLECTIVES = (
    "and JAX sends what hosts of one island compute together in the clear, to anybody who connects"
)
OWN_ISLANDS = (
    "give each machine an island of its own, or connect with plain_collectives=True where you"
    " trust the network between them"
)
GIVEN_UP = "it was given up: lab.restart({!r}) starts it again"
LEFT_OUT = "mend its worker and start that again: the lab goes on without it meanwhile"
"""The remedy for a worker that does not suit the lab; nothing that the lab does would help."""
_OURS = re.compile(r"control|policy|kernel-\d+")


def why_no_name(name: str) -> str:
    """Why no client of any lab can be called so, or ""."""
    if not _NAME.fullmatch(name):
        return (
            f"{name[:60]!r} cannot be a client's name: 1 to 40 letters, digits, spaces or any"
            " of . @ - _, and first a letter or digit"
        )
    if _OURS.fullmatch(name):
        return f"{name!r} is a name that the lab gives itself: choose another"
    return ""


@dataclass(slots=True)
class ClientSeen:
    """A connected notebook kernel.  number: the high 32 bits of its ids.

    owner: it may decide for all (policies, quotas, chaos, an island's order).
    holder: the number of its invitation; 0: it has the lab's own key.
    inherited: slices that were kept for it from a connection before.
    """

    name: str
    number: int
    pid: int
    owner: bool = False
    holder: int = 0
    inherited: frozenset[SliceId] = frozenset()
    messages: int = 0
    used: dict[str, Once] = field(
        default_factory=lambda: {w: Once() for w in ("run", "buffer", "race")}
    )
    """Numbers that it has given to something, by what."""


@dataclass(frozen=True, slots=True)
class ObserverSeen:
    """A connected process that is told what happens, and says nothing."""

    name: str


@dataclass(frozen=True, slots=True)
class HostSeen:
    """A connected device process, as its hello says.  memory: bytes per device."""

    name: _Name
    island: _Name
    devices: Count
    kind: _Name
    memory: Size
    pid: Count
    worker_pid: Count
    data_address: _Name
    emulated: bool
    block: tuple[Count, ...] = ()
    worker: str = ""
    """Dask's name of the worker that owns the process."""
    assembled: bool = False
    """Whether its island's hosts started as one runtime, and need no formations."""
    make: str = ""
    """The make of its devices: those of one make compute the same, to the bit."""
    machine: str = ""
    """An id of its machine, as every hello has it."""
    hostname: str = ""
    """The name that its machine gives itself."""
    job: str = ""
    """The number of its job, where a scheduler of jobs runs it."""
    clear: bool = False
    """Whether it computes together with hosts of other machines in the clear."""
    versions: dict[str, str] | None = field(default=None, compare=False)
    """Those of Python, JAX and this package, as every hello has them."""


@dataclass(frozen=True, slots=True)
class Fallen:
    """A host whose device process has ended, and whose worker lives.

    again: another process is being started.  reason: a sentence.
    remedy: what helps where none is started; empty: an owner restarts it.
    """

    name: str
    island: str
    worker: str
    reason: str
    again: bool
    remedy: str = ""

    @property
    def told(self) -> str:
        """Why, and what comes of it."""
        how = self.remedy or GIVEN_UP.format(self.island)
        return f"{self.reason}; {'it is being started again' if self.again else how}"


@dataclass(slots=True)
class Arguments:
    """Arguments that travel with a run: sent to each host with its first grant.

    places: of small arrays: input index -> index in *buffers*.
    hear: the number under which hosts tell its client by themselves that the output is there.
    """

    places: dict[int, int]
    buffers: list[memoryview]
    hear: int = 0
    sent: set[str] = field(default_factory=set)


class Function(NamedTuple):
    """A compiled function that was announced.  fields: of the announcement."""

    fields: dict[str, Any]
    types: Types


class Seat(NamedTuple):
    """A place for a client that comes back.

    holder: of its invitation.  slices, runs: that are kept, and go on without it.
    """

    holder: int
    slices: tuple[SliceId, ...]
    runs: tuple[Run, ...]


@dataclass(slots=True)
class Registry:
    """Clients and hosts by name; bindings by slice; parcels by their ids."""

    plain_collectives: bool = False
    """Whether hosts of an island on several machines may compute together in the clear."""
    clients: dict[str, ClientSeen] = field(default_factory=dict)
    hosts: dict[str, HostSeen] = field(default_factory=dict)
    down: dict[str, Fallen] = field(default_factory=dict)
    bindings: dict[SliceId, SliceBinding] = field(default_factory=dict)
    plans: dict[str, tuple[str, Plan]] = field(default_factory=dict)
    """By key: the client that registered it, and the plan."""
    devices: dict[SliceId, int] = field(default_factory=dict)
    """How many each slice has, also while it has lost them."""
    functions: dict[tuple[str, SliceId], Function] = field(default_factory=dict)
    """By key and slice."""
    blobs: dict[tuple[int, str], memoryview] = field(default_factory=dict)
    """Code, by the number in its slices' ids and key: another client's code is never served."""
    arguments: dict[Run, Arguments] = field(default_factory=dict)
    programs: dict[Run, tuple[str, str]] = field(default_factory=dict)
    """The client and the plan's key of each run that is not over."""
    told: dict[SliceId, set[str]] = field(default_factory=dict)
    """By slice that programs move something to or from: hosts that have one of them."""
    away: dict[SliceId, str] = field(default_factory=dict)
    """Slices without devices: ``"suspended"``, or ``"lost"``."""
    published: dict[str, str] = field(default_factory=dict)
    """By name of a shared handle: the client that published it."""
    kept: set[str] = field(default_factory=set)
    """Those of these names that stay when their client leaves."""
    seats: dict[str, Seat] = field(default_factory=dict)
    """By name of a client that has left: what is kept for the next client of its name."""
    taken: set[tuple[int, SliceId]] = field(default_factory=set)
    """Client numbers with slices of others on which lies, or lay, what they have taken."""
    leases: dict[str, str] = field(default_factory=dict)
    """By island: the client that has it for itself."""
    disorder: dict[str, float] = field(default_factory=dict)
    """By island that is leased without order: seconds after which a deadlock is ended."""
    policy: Policy | RemotePolicy = INITIAL
    policy_owner: str = ""
    """The policy in force, and the client who set it."""

    def check_name(self, name: str, holder: int = 0) -> str:
        """Why a new client cannot be called so, or "".  holder: of which invitation it is."""
        wrong = why_no_name(name)
        seat = self.seats.get(name)
        if seat is not None and holder not in (0, seat.holder):
            return (
                f"values are kept for a client named {name!r} that came with another invitation:"
                " choose another name, or come with that lab file"
            )
        if not wrong and name in self.clients:
            pid = self.clients[name].pid
            return (
                f"a client named {name!r} is connected already (process {pid}): choose another,"
                " or have that one leave first (lab.close())"
            )
        return wrong

    def newcomer(self, name: str, number: int, pid: int, holder: int) -> ClientSeen:
        """A client that is about to join.  Raises ValueError when it cannot be called so."""
        if name and (wrong := self.check_name(name, holder)):
            raise ValueError(wrong)
        seat = self.seats.get(name)
        kept = frozenset(() if seat is None else seat.slices)
        called = name or f"kernel-{number}"
        return ClientSeen(called, number, pid, holder == 0, holder, kept)

    def check_host(self, host: HostSeen) -> str:
        """Why a new device process cannot be this host, or "".

        A second host of the same worker is a new incarnation of it; hosts of two workers would
        replace each other for ever.
        """
        there = self.hosts.get(host.name)
        if there is None or there.worker == host.worker:
            return self._check_machine(host)
        return (
            f"the Dask workers {there.worker!r} and {host.worker!r} are both to be the host"
            f" {host.name!r}: give one of them a name of its own, for example"
            f" --name {host.island}/another"
        )

    def site_of(self, host: HostSeen) -> str:
        """The hosts of other islands that a host can compute with have the same.

        Accelerators of an island are a runtime of its own.
        """
        if host.assembled or host.kind != "cpu":
            return host.island
        return host.machine if host.clear and not self.plain_collectives else ""

    def _check_machine(self, host: HostSeen) -> str:
        if self.plain_collectives:
            return ""
        others = (h for h in self.hosts.values() if h.island == host.island and h.name != host.name)
        apart = (h for h in others if h.machine != host.machine and (h.clear or host.clear))
        far = next((other.name for other in apart), "")
        if not far:
            return ""
        return f"{host.name} and {far} are on two machines, {COLLECTIVES}: {OWN_ISLANDS}"

    def client_of(self, identity: int) -> ClientSeen | None:
        """The connected client to whom an id belongs."""
        number = identity >> 32
        return next((c for c in self.clients.values() if c.number == number), None)

    def forget_run(self, run: Run) -> None:
        """The run is over, or was refused."""
        self.arguments.pop(run, None)
        self.programs.pop(run, None)

    def bindings_of(self, slices: Iterable[SliceId]) -> list[Any]:
        """Where slices lie, of those that have devices; packed."""
        return [pack(self.bindings[s]) for s in sorted(slices) if s in self.bindings]

    def bind_slice(self, binding: SliceBinding) -> None:
        """The slice has these devices."""
        self.bindings[binding.slice] = binding
        self.devices[binding.slice] = len(binding.devices)

    def withdraw_slice(self, slice_id: SliceId) -> None:
        """The slice has no devices any more; it may get others."""
        if self.bindings.pop(slice_id, None) is not None:
            self.away[slice_id] = "lost"

    def forget_slice(self, slice_id: SliceId) -> None:
        """The slice is gone, and with it what was announced for it."""
        self.withdraw_slice(slice_id)
        self.away.pop(slice_id, None)
        self.devices.pop(slice_id, None)
        self.told.pop(slice_id, None)
        self.taken = {entry for entry in self.taken if entry[1] != slice_id}
        self.forget_programs(
            [key for key, (_, plan) in self.plans.items() if slice_id in plan.slices],
            [key for key in self.functions if key[1] == slice_id],
        )

    def forget_programs(
        self, plans: Iterable[str], functions: Iterable[tuple[str, SliceId]]
    ) -> None:
        """Nobody needs these any more, nor code that nothing else is announced with."""
        for plan in plans:
            self.plans.pop(plan, None)
        for function in functions:
            self.functions.pop(function, None)
        used = {(slice_id >> 32, key) for key, slice_id in self.functions}
        for blob in [blob for blob in self.blobs if blob not in used]:
            del self.blobs[blob]

    def forget_client(self, name: str) -> None:
        """The client left; its slices are forgotten as the core frees them.

        Code stays with slices that are kept: they compute with it again.  So do runs that go on,
        with their programs.
        """
        client = self.clients.pop(name, None)
        if client is None:
            return
        _, stay, going = self.seats.get(name, Seat(0, (), ()))
        for run in [run for run, (owner, _) in self.programs.items() if owner == name]:
            if run not in going:
                self.forget_run(run)
        needed = {self.programs[run][1] for run in going}
        for key in [key for key, (owner, _) in self.plans.items() if owner == name]:
            if key not in needed:
                del self.plans[key]
        self.taken = {entry for entry in self.taken if entry[0] != client.number}
        mine = [
            a for a in self.functions if a[1] >> 32 == client.number or a[1] in client.inherited
        ]
        self.forget_programs((), [a for a in mine if a[1] not in stay])

    def seat(
        self, name: str, slices: tuple[SliceId, ...] | None, runs: tuple[Run, ...] = ()
    ) -> None:
        """These slices are kept for the next client of a name; None: it has no seat any more.

        runs: those of its runs that go on.
        """
        client, seat = self.clients.get(name), self.seats.pop(name, None)
        holder = client.holder if client is not None else seat.holder if seat is not None else 0
        if slices is not None:
            self.seats[name] = Seat(holder, slices, runs)

    def going(self, name: str) -> list[Run]:
        """The runs of a client that has left that go on without it."""
        return [run for run in self.seats[name].runs if run in self.programs]

    def workers_in_use(self) -> frozenset[str]:
        """The Dask workers on whose devices there are slices."""
        hosts = {host for binding in self.bindings.values() for host in binding.hosts}
        return frozenset(self.hosts[host].worker for host in hosts if host in self.hosts)

    def topology(self) -> dict[str, Any]:
        """Islands with their hosts, and the bound slices, for clients."""
        islands: dict[str, list[dict[str, Any]]] = {}
        for host in sorted(self.hosts.values(), key=lambda host: host.name):
            islands.setdefault(host.island, []).append(
                {
                    "name": host.name,
                    "pid": host.pid,
                    "worker_pid": host.worker_pid,
                    "devices": host.devices,
                    "kind": host.kind,
                    "memory": host.memory,
                    "data_address": host.data_address,
                    "worker": host.worker,
                    "emulated": host.emulated,
                    "make": host.make,
                    "machine": host.hostname,
                    "versions": host.versions or {},
                }
            )
        down = sorted(self.down.values(), key=lambda fallen: fallen.name)
        return {
            "down": [
                {"name": d.name, "island": d.island, "told": d.told, "again": d.again} for d in down
            ],
            "islands": [{"name": name, "hosts": islands[name]} for name in sorted(islands)],
            "slices": [pack(binding) for binding in self.bindings.values()],
            "away": dict(self.away),
            "plain_collectives": self.plain_collectives,
            "clients": list(self.clients),
            "published": dict(self.published),
            "kept": sorted(self.kept),
            "going": {name: len(self.going(name)) for name in self.seats if self.going(name)},
        }

    def policy_in_force(self) -> dict[str, Any]:
        """For clients.  Code of another client's own is a name and no more."""
        remote = isinstance(self.policy, RemotePolicy)
        return {
            "policy": None if remote else pack(self.policy),
            "name": name_of(self.policy),
            "owner": self.policy_owner,
        }
