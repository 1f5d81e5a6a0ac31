"""Every message that enters or leaves the core, in one place.

Problem: the control plane must be understood, replayed and simulated; so the core never acts.
A driver (real or simulated) hands it *events*, with the time in them, and obeys its *commands*.

Rule for maintainers: frozen, plain data; every message names its ``cause``, the id of the event
that led to it.  Messages speak of gangs and hosts, never of single devices or shards.

Identities: islands, hosts and clients are short strings (``"island0/host1"``, ``"kernel-1"``).
Runs and buffers are integers whose high 32 bits are the client's number: it need not ask.

Paper: section 4 (resource manager, client, coordination, gang scheduler).
"""

from __future__ import annotations

from dataclasses import dataclass

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages.cancelling import CancelRequested
from pathways_lab.core.messages.elastic import ElasticCommand, ElasticEvent
from pathways_lab.core.messages.programs import ProgramsDropped, ProgramsForgotten, RunWaited
from pathways_lab.core.messages.sharing import SharingCommand, SharingEvent
from pathways_lab.core.messages.uploads import UploadEvent
from pathways_lab.core.messages.windows import WindowChosen
from pathways_lab.core.program.program import NO_LINE, Line, Plan, SliceId
from pathways_lab.core.scheduling.policies import (
    PlaceView,
    Policy,
    PolicyView,
    RemotePolicy,
    name_of,
)
from pathways_lab.core.scheduling.tags import Data
from pathways_lab.core.slices.topology import SliceBinding, SliceRequest

Buffer = int
Run = int


# --- events: what happened --------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostJoined:
    """A device process is connected and owns *devices* devices.

    block: the shape in which they are wired (1 to 3 dimensions, () for a row);
        an island's hosts are stacked along the first one, in name order.
    memory: bytes per device that may be used.
    """

    time: float
    cause: str
    host: str
    island: str
    devices: int
    kind: str
    memory: int
    block: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HostLost:
    time: float
    cause: str
    host: str
    reason: str


@dataclass(frozen=True, slots=True)
class SlicesLost:
    """The hosts of these slices live, but cannot compute together there any more.

    host: says so, of slices of which it has something; "": the control plane does.
    """

    time: float
    cause: str
    slices: tuple[SliceId, ...]
    reason: str
    host: str = ""


@dataclass(frozen=True, slots=True)
class ClientJoined:
    """number: the high 32 bits of its ids (0: of no particular ones).  owner: decides for all."""

    time: float
    cause: str
    client: str
    number: int = 0
    owner: bool = True


@dataclass(frozen=True, slots=True)
class ClientLeft:
    time: float
    cause: str
    client: str
    reason: str


@dataclass(frozen=True, slots=True)
class SliceRequested:
    """wait: in line, while what keeps it from being met can end."""

    time: float
    cause: str
    client: str
    slice: SliceId
    request: SliceRequest
    wait: bool = False


@dataclass(frozen=True, slots=True)
class SliceReleased:
    time: float
    cause: str
    client: str
    slice: SliceId


@dataclass(frozen=True, slots=True)
class FunctionAnnounced:
    """A compiled function was registered for *slice*; its hosts compile it now."""

    time: float
    cause: str
    client: str
    function: str
    slice: SliceId


@dataclass(frozen=True, slots=True)
class ProgramRegistered:
    time: float
    cause: str
    client: str
    plan: Plan


@dataclass(frozen=True, slots=True)
class BufferDeclared:
    """A client uploads *nbytes* per device of *slice*; ahead: counted from a first reader on."""

    time: float
    cause: str
    client: str
    buffer: Buffer
    slice: SliceId
    nbytes: int
    ahead: bool = False
    name: str = ""  # this and the line: for people
    line: Line = NO_LINE


@dataclass(frozen=True, slots=True)
class RunSubmitted:
    """inputs: per plan input a buffer, or None for an argument in the message.  outputs: the
    buffers that the plan's outputs become, chosen by the client.  data: see :mod:`.tags`."""

    time: float
    cause: str
    client: str
    run: Run
    plan: str
    inputs: tuple[Buffer | None, ...]
    outputs: tuple[Buffer, ...]
    priority: int = 0
    data: Data = ()


@dataclass(frozen=True, slots=True)
class BuffersDropped:
    time: float
    cause: str
    client: str
    buffers: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True)
class HostReport:
    """Everything that one host has to say since its last report.

    ended: ``(run, first step, device seconds of each)`` of steps that ended here one after
        the other, also poisoned ones; a transfer has ended on its receiving hosts when its
        bytes are resident, on its sending hosts when its source may be freed;
        every host of a step's slices says so once, also one with nothing to send.
    failed: ``(run, step, why)`` of those that could not give their value here.
    resident: uploaded buffers whose parts for this host have all arrived.
    compiled: ``(function, slice, temporary bytes per device, error or None)``.
    parked, moved: slices whose values are in its own memory (see ``Park``), or were sent on.
    decided: ``(run, step, case)`` of steps whose values decide, as it has read them.
    """

    time: float
    cause: str
    host: str
    ended: tuple[tuple[Run, int, tuple[float, ...]], ...] = ()
    failed: tuple[tuple[Run, int, Failure], ...] = ()
    resident: tuple[Buffer, ...] = ()
    compiled: tuple[tuple[str, SliceId, int, Failure | None], ...] = ()
    parked: tuple[SliceId, ...] = ()
    moved: tuple[SliceId, ...] = ()
    decided: tuple[tuple[Run, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PolicyChosen:
    """A client chooses whose gangs go first, for everybody.

    A policy of a user's own is tried elsewhere before, and comes as a
    RemotePolicy.  request: the client's number for it, which comes back.
    """

    time: float
    cause: str
    client: str
    policy: Policy | RemotePolicy
    request: int = 0


@dataclass(frozen=True, slots=True)
class PolicyAnswered:
    """The remote policy of number *policy* has chosen *run*, or which of the islands."""

    time: float
    cause: str
    policy: int
    question: int
    run: Run


@dataclass(frozen=True, slots=True)
class PolicyLate:
    """The remote policy has not answered yet, and nobody shall wait longer."""

    time: float
    cause: str
    policy: int


@dataclass(frozen=True, slots=True)
class PolicyFailed:
    """The remote policy raised, never answered, or is gone."""

    time: float
    cause: str
    policy: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class QuotaChosen:
    """An owner limits what a client may have; whom "": those without a limit of their own.

    devices, nbytes: see :class:`pathways_lab.core.memory.quotas.Quota`.
    """

    time: float
    cause: str
    client: str
    whom: str
    devices: int | None = None
    nbytes: int | None = None
    request: int = 0


@dataclass(frozen=True, slots=True)
class LeaseRequested:
    """A client wants an island for itself.

    order: False where its hosts shall be free to launch in orders of their
        own, to teach what happens then; the core goes on numbering its gangs.
    patience: seconds after which a cycle of waits there is ended.
    """

    time: float
    cause: str
    client: str
    island: str
    order: bool = True
    patience: float = 3.0
    request: int = 0


@dataclass(frozen=True, slots=True)
class LeaseReturned:
    time: float
    cause: str
    client: str
    island: str
    request: int = 0


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Gangs and runs whose results are worthless for this reason; on devices they still end.

    gangs: ``(run, step)`` of those that wait for each other for ever, launched without order;
        their hosts are made to end them.
    runs: those that everybody waits for, and that shall fail as an owner has said.
    """

    time: float
    cause: str
    failure: Failure
    gangs: tuple[tuple[Run, int], ...] = ()
    runs: tuple[Run, ...] = ()


Event = (
    HostJoined | HostLost | SlicesLost | ClientJoined | ClientLeft | SliceRequested |
    SliceReleased | FunctionAnnounced | ProgramRegistered | BufferDeclared | RunSubmitted |
    CancelRequested | BuffersDropped | HostReport | PolicyChosen | PolicyAnswered | PolicyLate |
    PolicyFailed | QuotaChosen | LeaseRequested | LeaseReturned | GivenUp | SharingEvent |
    ElasticEvent | UploadEvent | ProgramsDropped | WindowChosen
)  # fmt: skip


# --- commands: what shall be done ---------------------------------------------


@dataclass(frozen=True, slots=True)
class SliceBound:
    """Tell the client and the slice's hosts where the slice lives."""

    cause: str
    client: str
    binding: SliceBinding


@dataclass(frozen=True, slots=True)
class SliceWaiting:
    """The request has this place (from 1) in the line of all that wait for devices, and why."""

    cause: str
    client: str
    slice: SliceId
    place: int
    waiting: int
    why: str


@dataclass(frozen=True, slots=True)
class SliceFreed:
    """Hosts forget the slice with its executables and lane."""

    cause: str
    hosts: tuple[str, ...]
    slice: SliceId


@dataclass(frozen=True, slots=True)
class Refused:
    """A request without a number of its own cannot be met.  subject: ``"slice 3"``, ``"run 7"``."""

    cause: str
    client: str
    subject: str
    failure: Failure


@dataclass(frozen=True, slots=True)
class Prepare:
    """Hosts compile *function* for *slice* in the background."""

    cause: str
    hosts: tuple[str, ...]
    function: str
    slice: SliceId


@dataclass(frozen=True, slots=True)
class ShareProgram:
    """Send the plan to hosts that do not have it yet, before the first grant."""

    cause: str
    hosts: tuple[str, ...]
    plan: str


@dataclass(frozen=True, slots=True)
class Grant:
    """One window of one run for one host: steps ``first <= i < last``.

    The host launches those of them that involve it, in order, after everything
    that it was granted before.  *place* is the number, on the host's island, of
    the first gang of the window (the island's gangs in it, calls and transfers
    alike, follow each other), *previous* the *place* of the last grant sent to
    this host under this *epoch* (-1: none), so that repeats are ignored and gaps
    are reported.  inputs and outputs bind the plan's inputs and outputs, as in
    RunSubmitted; they are filled in every window (hosts may see a late one).
    prompt: grants wait for the end of this one: it is reported at once.
    skipped: a decision was against it: none of it is launched, nor reported.
    """

    cause: str
    host: str
    run: Run
    plan: str
    first: int
    last: int
    epoch: int
    place: int
    previous: int
    inputs: tuple[Buffer | None, ...]
    outputs: tuple[Buffer, ...]
    prompt: bool = False
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class FreeBuffers:
    """Hosts forget these buffers (dropped by their owner, or of a dead one)."""

    cause: str
    hosts: tuple[str, ...]
    buffers: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True)
class AbortRun:
    """The run ends early: hosts forget its values and wait for nothing of it.

    Gangs that were granted and not launched are still launched in their places
    (other hosts may have entered them), missing inputs being zeros.
    """

    cause: str
    hosts: tuple[str, ...]
    run: Run


@dataclass(frozen=True, slots=True)
class Resolved:
    """Buffers of a client got their value, or never will (failure).

    A buffer that got its value may be lost later: then it comes again, failed.
    """

    cause: str
    client: str
    buffers: tuple[Buffer, ...]
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run is ``"finished"``, ``"failed"`` or ``"cancelled"`` on all hosts; comes once."""

    cause: str
    client: str
    run: Run
    outcome: str
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class AskPolicy:
    """Ask the remote policy; the core goes on meanwhile, and hears PolicyAnswered."""

    cause: str
    policy: int
    question: int
    view: PolicyView | PlaceView


@dataclass(frozen=True, slots=True)
class PolicySet:
    """The policy in force, and who chose it ("": nobody).

    client: who asked for one (request: see PolicyChosen), or whose was removed.
    failure: why theirs is not in force (any more).
    """

    cause: str
    client: str
    policy: Policy | RemotePolicy
    owner: str
    failure: Failure | None = None
    request: int = 0

    @property
    def name(self) -> str:
        """The name of the policy in force, for people."""
        return name_of(self.policy)


@dataclass(frozen=True, slots=True)
class Leased:
    """The island is the client's alone until it is returned or the client leaves."""

    cause: str
    client: str
    island: str
    order: bool = True
    patience: float = 3.0


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The island is everybody's again."""

    cause: str
    client: str
    island: str


Command = (
    SliceBound | SliceWaiting | SliceFreed | Refused | Prepare | ShareProgram | Grant |
    FreeBuffers | AbortRun | Resolved | RunEnded | AskPolicy | PolicySet | Leased |
    LeaseEnded | SharingCommand | ElasticCommand | ProgramsForgotten | RunWaited
)  # fmt: skip
