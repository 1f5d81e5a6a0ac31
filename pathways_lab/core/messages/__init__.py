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
from pathways_lab.core.messages.base import Commanded, Happened, ToClient, ToHosts, Wished
from pathways_lab.core.messages.elastic import ElasticCommand, ElasticEvent
from pathways_lab.core.program.program import NO_LINE, Line, Plan, SliceId, ValueId
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
class HostJoined(Happened):
    """A device process is connected and owns *devices* devices.

    block: the shape in which they are wired (1 to 3 dimensions, () for a row); an island's hosts
        are stacked along the first one, in name order.  memory: bytes per device for values.
    site: a slice spans islands of one site only, whose hosts can compute together.
    """

    host: str
    island: str
    devices: int
    kind: str
    memory: int
    block: tuple[int, ...] = ()
    site: str = ""


@dataclass(frozen=True, slots=True)
class HostLost(Happened):
    host: str
    reason: str


@dataclass(frozen=True, slots=True)
class SlicesLost(Happened):
    """The hosts of these slices live, but cannot compute together there any more.
    host: says so, of slices of which it has something; "": the control plane does."""

    slices: tuple[SliceId, ...]
    reason: str
    host: str = ""


@dataclass(frozen=True, slots=True)
class ClientJoined(Wished):
    """number: the high 32 bits of its ids (0: of no particular ones).  owner: decides for all."""

    number: int = 0
    owner: bool = True


@dataclass(frozen=True, slots=True)
class ClientLeft(Wished):
    reason: str


@dataclass(frozen=True, slots=True)
class SliceRequested(Wished):
    """wait: in line, while what keeps it from being met can end."""

    slice: SliceId
    request: SliceRequest
    wait: bool = False


@dataclass(frozen=True, slots=True)
class SliceReleased(Wished):
    slice: SliceId


@dataclass(frozen=True, slots=True)
class FunctionAnnounced(Wished):
    """A compiled function was registered for *slice*; its hosts compile it now."""

    function: str
    slice: SliceId


@dataclass(frozen=True, slots=True)
class ProgramRegistered(Wished):
    plan: Plan


@dataclass(frozen=True, slots=True)
class BufferDeclared(Wished):
    """A client uploads *nbytes* per device of *slice*; ahead: counted from a first reader on."""

    buffer: Buffer
    slice: SliceId
    nbytes: int
    ahead: bool = False
    name: str = ""  # this and the line: for people
    line: Line = NO_LINE


@dataclass(frozen=True, slots=True)
class RunSubmitted(Wished):
    """inputs: per plan input a buffer, or None for an argument in the message.  outputs: buffers,
    chosen by the client.  data: see :mod:`.tags`.  waited, worked: lines of the client before it.
    dropped: buffers that nobody has a handle to any more; inputs may be among them."""

    run: Run
    plan: str
    inputs: tuple[Buffer | None, ...]
    outputs: tuple[Buffer, ...]
    priority: int = 0
    data: Data = ()
    waited: Line = NO_LINE
    worked: Line = NO_LINE
    dropped: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class BuffersDropped(Wished):
    buffers: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True)
class HostReport(Happened):
    """Everything that one host has to say since its last report.

    ended: ``(run, first step, device seconds of each)`` of steps that ended here one after
        the other, also poisoned ones; a transfer has ended on its receiving hosts when its
        bytes are resident, on its sending hosts when its source may be freed;
        every host of a step's slices says so once, also one with nothing to send.
    failed: ``(run, step, why)`` of those that could not give their value here.
    resident: uploaded buffers whose parts for this host have all arrived.
    compiled: ``(function, slice, temporary bytes per device, error or None)``.
    parked, moved: slices whose values are in its own memory (see ``Park``), or were sent on.
    decided: ``(run, value, case)`` of values that decide, as it has read them.
    crossing: ``(function, slice, bytes that each of its gangs brings here from other islands)``.
    """

    host: str
    ended: tuple[tuple[Run, int, tuple[float, ...]], ...] = ()
    failed: tuple[tuple[Run, int, Failure], ...] = ()
    resident: tuple[Buffer, ...] = ()
    compiled: tuple[tuple[str, SliceId, int, Failure | None], ...] = ()
    parked: tuple[SliceId, ...] = ()
    moved: tuple[SliceId, ...] = ()
    decided: tuple[tuple[Run, ValueId, int], ...] = ()
    crossing: tuple[tuple[str, SliceId, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PolicyChosen(Wished):
    """A client chooses whose gangs go first, for everybody.

    A policy of a user's own is tried elsewhere before, and comes as a
    RemotePolicy.  request: the client's number for it, which comes back.
    """

    policy: Policy | RemotePolicy
    request: int = 0


@dataclass(frozen=True, slots=True)
class PolicyAnswered(Happened):
    """The remote policy of number *policy* has chosen *run*, or which of the islands."""

    policy: int
    question: int
    run: Run


@dataclass(frozen=True, slots=True)
class PolicyLate(Happened):
    """The remote policy has not answered yet, and nobody shall wait longer."""

    policy: int


@dataclass(frozen=True, slots=True)
class PolicyFailed(Happened):
    """The remote policy raised, never answered, or is gone."""

    policy: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class QuotaChosen(Wished):
    """An owner limits what a client may have; whom "": those without a limit of their own.

    devices, nbytes: see :class:`pathways_lab.core.memory.quotas.Quota`.
    """

    whom: str
    devices: int | None = None
    nbytes: int | None = None
    request: int = 0


@dataclass(frozen=True, slots=True)
class LeaseRequested(Wished):
    """A client wants an island for itself.

    order: False where its hosts shall be free to launch in orders of their
        own, to teach what happens then; the core goes on numbering its gangs.
    patience: seconds after which a cycle of waits there is ended.
    """

    island: str
    order: bool = True
    patience: float = 3.0
    request: int = 0


@dataclass(frozen=True, slots=True)
class LeaseReturned(Wished):
    island: str
    request: int = 0


@dataclass(frozen=True, slots=True)
class GivenUp(Happened):
    """Gangs and runs whose results are worthless for this reason; on devices they still end.

    gangs: ``(run, step)`` of those that wait for each other for ever, launched without order;
        their hosts are made to end them.
    runs: those that everybody waits for, and that shall fail as an owner has said.
    """

    failure: Failure
    gangs: tuple[tuple[Run, int], ...] = ()
    runs: tuple[Run, ...] = ()


@dataclass(frozen=True, slots=True)
class HandlePublished(Wished):
    """A client gives buffers that it has a name under which others may take them, all together.

    about: words for takers, never looked into.  keep: they stay when the client leaves.
    ahead: also before they are there, and then the runs that make them go on without the client.
    to: the one client that may take them, once; "": anybody may.
    """

    name: str
    buffers: tuple[Buffer, ...]
    about: bytes = b""
    request: int = 0
    keep: bool = False
    to: str = ""
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class HandleUnpublished(Wished):
    """A client takes a name back: its own, or as an owner that of a client that has left."""

    name: str
    request: int = 0


@dataclass(frozen=True, slots=True)
class HandleTaken(Wished):
    """A client takes what is published.  buffers: its own numbers for its references.

    giver: the client that has given it to this one; "": it is published for all.
    """

    name: str
    buffers: tuple[Buffer, ...]
    request: int = 0
    giver: str = ""


@dataclass(frozen=True, slots=True)
class CancelRequested(Wished):
    """A client does not want runs of its own, or values that runs of its own make, any more.

    runs: whole ones.  buffers: single results; what reads them ends as well.
    steps: by run, those of some of the calls that travel in it as one; what reads what they
        make ends as well, and the other calls go on.
    request: the client's number for the question; 0: it waits for no answer.  Numbers of the
        Answer are the fates of the named runs that are not over.  ``cancelled``: how many end
        before anything of them has begun.  ``begun``: how many end after what has its place.
        ``going``: how many go on, all that was meant having its place already, or with results
        that somebody wants.
    """

    runs: tuple[int, ...]
    buffers: tuple[int, ...] = ()
    request: int = 0
    steps: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class ProgramsDropped(Wished):
    """A client will submit no more runs of these plans, unless it registers them again.

    functions: ``(function, slice)`` that none of its other plans calls.
    """

    plans: tuple[str, ...]
    functions: tuple[tuple[str, SliceId], ...]


@dataclass(frozen=True, slots=True)
class UploadLost(Wished):
    """The bytes of a declared buffer of this client will never come, and why."""

    buffer: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class PatienceEnded(Happened):
    """It is so late (``Control.due``) that bytes which nobody has declared are given up."""


@dataclass(frozen=True, slots=True)
class WindowChosen(Wished):
    """An owner says how many seconds of work may be ahead on any device; None: asks only.

    request: the client's number for it, which comes back with Answer and the ``seconds`` in force.
    """

    seconds: float | None = None
    request: int = 0


Event = (
    HostJoined | HostLost | SlicesLost | ClientJoined | ClientLeft | SliceRequested |
    SliceReleased | FunctionAnnounced | ProgramRegistered | BufferDeclared | RunSubmitted |
    CancelRequested | BuffersDropped | HostReport | PolicyChosen | PolicyAnswered | PolicyLate |
    PolicyFailed | QuotaChosen | LeaseRequested | LeaseReturned | GivenUp |
    HandlePublished | HandleUnpublished | HandleTaken | ElasticEvent | UploadLost | PatienceEnded |
    ProgramsDropped | WindowChosen
)  # fmt: skip


# --- commands: what shall be done ---------------------------------------------


@dataclass(frozen=True, slots=True)
class SliceBound(ToClient):
    """Tell the client and the slice's hosts where the slice lives."""

    binding: SliceBinding


@dataclass(frozen=True, slots=True)
class SliceWaiting(ToClient):
    """The request has this place (from 1) in the line of all that wait for devices, and why."""

    slice: SliceId
    place: int
    waiting: int
    why: str


@dataclass(frozen=True, slots=True)
class SliceFreed(ToHosts):
    """Hosts forget the slice with its executables and lane."""

    slice: SliceId


@dataclass(frozen=True, slots=True)
class Refused(ToClient):
    """A request without a number of its own cannot be met.  subject: ``"slice 3"``, ``"run 7"``."""

    subject: str
    failure: Failure


@dataclass(frozen=True, slots=True)
class Prepare(ToHosts):
    """Hosts compile *function* for *slice* in the background."""

    function: str
    slice: SliceId


@dataclass(frozen=True, slots=True)
class ShareProgram(ToHosts):
    """Send the plan to hosts that do not have it yet, before the first grant."""

    plan: str


@dataclass(frozen=True, slots=True)
class Grant(Commanded):
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
class FreeBuffers(ToHosts):
    """Hosts forget these buffers (dropped by their owner, or of a dead one)."""

    buffers: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True)
class AbortRun(ToHosts):
    """The run ends early: hosts forget its values and wait for nothing of it.

    Gangs that were granted and not launched are still launched in their places
    (other hosts may have entered them), missing inputs being zeros.
    """

    run: Run


@dataclass(frozen=True, slots=True)
class Resolved(ToClient):
    """Buffers of a client got their value, or never will (failure).

    A buffer that got its value may be lost later: then it comes again, failed.
    """

    buffers: tuple[Buffer, ...]
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class RunEnded(ToClient):
    """The run is ``"finished"``, ``"failed"`` or ``"cancelled"`` on all hosts; comes once."""

    run: Run
    outcome: str
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class AskPolicy(Commanded):
    """Ask the remote policy; the core goes on meanwhile, and hears PolicyAnswered."""

    policy: int
    question: int
    view: PolicyView | PlaceView


@dataclass(frozen=True, slots=True)
class PolicySet(ToClient):
    """The policy in force, and who chose it ("": nobody).

    client: who asked for one (request: see PolicyChosen), or whose was removed.
    failure: why theirs is not in force (any more).
    """

    policy: Policy | RemotePolicy
    owner: str
    failure: Failure | None = None
    request: int = 0

    @property
    def name(self) -> str:
        """The name of the policy in force, for people."""
        return name_of(self.policy)


@dataclass(frozen=True, slots=True)
class Leased(ToClient):
    """The island is the client's alone until it is returned or the client leaves."""

    island: str
    order: bool = True
    patience: float = 3.0


@dataclass(frozen=True, slots=True)
class LeaseEnded(ToClient):
    """The island is everybody's again."""

    island: str


@dataclass(frozen=True, slots=True)
class Published(ToClient):
    """Anybody may take what has this name now.  kept: it stays when the client leaves."""

    name: str
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Given(ToClient):
    """One client, *to*, may take *stored*, each on one of *slices*."""

    name: str
    to: str
    stored: tuple[Buffer, ...]
    slices: tuple[SliceId, ...]
    about: bytes


@dataclass(frozen=True, slots=True)
class Unpublished(ToClient):
    """Nobody can take it by this name any more.  client: who had published it."""

    name: str


@dataclass(frozen=True, slots=True)
class Taken(ToClient):
    """The client may read *stored*, each on one of *slices*; *buffers* are its own numbers."""

    name: str
    buffers: tuple[Buffer, ...]
    stored: tuple[Buffer, ...]
    slices: tuple[SliceId, ...]
    about: bytes
    request: int = 0


@dataclass(frozen=True, slots=True)
class ProgramsForgotten(ToHosts):
    """Hosts forget plans, and functions with what was compiled: no run needs them."""

    plans: tuple[str, ...]
    functions: tuple[tuple[str, SliceId], ...]


@dataclass(frozen=True, slots=True)
class RunWaited(Commanded):
    """A run is admitted after it was ready, and this is why not at once.

    since: when it had everything else (seconds).
    waited_for: ``"memory"`` (of devices, or of its client's quota) or ``"turn"`` (the policy
        preferred others).
    """

    run: int
    since: float
    waited_for: str


@dataclass(frozen=True, slots=True)
class SlicesKept(ToClient):
    """These stay for the next client of this name; None: nothing is kept for it any more.

    runs: those of its runs that go on without it.
    """

    slices: tuple[SliceId, ...] | None
    runs: tuple[Run, ...] = ()


Command = (
    SliceBound | SliceWaiting | SliceFreed | Refused | Prepare | ShareProgram | Grant |
    FreeBuffers | AbortRun | Resolved | RunEnded | AskPolicy | PolicySet | Leased |
    LeaseEnded | Published | Given | SlicesKept | Unpublished | Taken | ElasticCommand |
    ProgramsForgotten | RunWaited
)  # fmt: skip
