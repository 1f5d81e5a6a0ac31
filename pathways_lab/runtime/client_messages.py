"""The messages of clients to the control plane: their fields, types and bounds.

Problem and rule: see :mod:`pathways_lab.transport.edge`.  These classes say what a message
is; whether it may be is for :mod:`.control_plane.requests` and the core.  A field that
holds a user's own text has no bound here: a name that is too long is refused by answer.

``id``: the client's number of its question; one answer (``answered``) comes back with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pathways_lab.core.diagnosis.stall_actions import OnStuck
from pathways_lab.core.errors import Failure
from pathways_lab.core.memory.holdings import MOST
from pathways_lab.core.program.array_types import SHARD_BYTES
from pathways_lab.core.program.folding import Folded
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.program import NO_LINE, Line
from pathways_lab.core.scheduling.policies import BuiltIn
from pathways_lab.core.scheduling.tags import Data
from pathways_lab.core.slices.topology import SliceRequest
from pathways_lab.transport.codec import PACKED, Within
from pathways_lab.transport.edge import Count, Door, Id, Length, Number, Plain, Seconds, Size
from pathways_lab.transport.framing import TO_CONTROL

_Layouts = tuple[Annotated[Layout, PACKED], ...]
_Types = tuple[tuple[tuple[Length, ...], str], ...]
"""Shape and JAX type name per leaf."""
Kind = Literal["export", "callbacks", "apart"]


@dataclass(frozen=True, slots=True)
class Loop:
    """How hosts repeat a step function (:mod:`pathways_lab.runtime.host.host_loop`).

    carried: so many leading results become the leading arguments of the next step.
    wait: for the end of each step before the next one is launched.
    records: whether each step is in the timeline; else only the whole loop is.
    """

    steps: Annotated[int, Within(1, (1 << 31) - 1)]
    carried: Count
    wait: bool = False
    records: bool = True


@dataclass(frozen=True, slots=True)
class Question(Plain):
    """A message that is answered under this number."""

    id: Number


@dataclass(frozen=True, slots=True)
class Slice(Plain):
    """See :class:`pathways_lab.core.messages.SliceRequested`."""

    slice: Id
    request: Annotated[SliceRequest, PACKED]
    wait: bool = False


@dataclass(frozen=True, slots=True)
class ReleaseSlice(Plain):
    slice: Id


@dataclass(frozen=True, slots=True)
class Rebind(Plain):
    slice: Id
    island: str | None = None


@dataclass(frozen=True, slots=True)
class Function:
    """A compiled function, and perhaps its code.

    function: key of its content.  kind: ``"export"``, or ``"callbacks"``: with what it calls,
        or :data:`pathways_lab.core.program.bundles.APART`, which has no code.
    donated: positions of leaves that it may overwrite.
    loop: set where hosts repeat it by themselves.
    checks: what its gangs are tested for (:data:`pathways_lab.runtime.nan_checks.TESTS`).
    """

    parcels: ClassVar[tuple[int, int]] = 0, 1
    function: str
    slice: Id
    kind: Kind
    name: str
    in_layouts: _Layouts
    out_layouts: _Layouts
    in_types: _Types
    out_types: _Types
    donated: tuple[Count, ...]
    line: Annotated[Line, PACKED]
    loop: Annotated[Loop, PACKED] | None = None
    checks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Program(Plain):
    plan: Annotated[Folded, PACKED]


@dataclass(frozen=True, slots=True)
class Forget(Plain):
    """See :class:`pathways_lab.core.messages.ProgramsDropped`."""

    plans: tuple[str, ...]
    functions: tuple[tuple[str, Id], ...]


@dataclass(frozen=True, slots=True)
class Submit:
    """See :class:`pathways_lab.core.messages.RunSubmitted`.

    arguments: buffer of the message by input.  hear: a number under which hosts say that
        the only output is there; 0: none.
    race: the race's number and the controller's, of a run that enters one.
    dropped: buffers that nobody has any more once the run is submitted.
    waited, worked: where the client waited for a value since its last run, and where it works
        itself between calls.
    """

    parcels: ClassVar[tuple[int, int]] = 0, TO_CONTROL.buffers
    run: Id
    plan: str
    inputs: tuple[Id | None, ...]
    outputs: tuple[Id, ...]
    arguments: dict[Count, Count]
    priority: int = 0
    data: Data = ()
    hear: Count = 0
    race: tuple[Id, Count] | None = None
    dropped: tuple[Id, ...] = ()
    waited: Annotated[Line, PACKED] = NO_LINE
    worked: Annotated[Line, PACKED] = NO_LINE


@dataclass(frozen=True, slots=True)
class Declare(Plain):
    """nbytes: per device.  name, line: for people."""

    buffer: Id
    slice: Id
    nbytes: Annotated[int, Within(0, SHARD_BYTES)]
    ahead: bool = False
    name: str = ""
    line: Annotated[Line, PACKED] = NO_LINE


@dataclass(frozen=True, slots=True)
class LoseUpload(Plain):
    buffer: Id
    failure: Annotated[Failure, PACKED]


@dataclass(frozen=True, slots=True)
class Drop(Plain):
    buffers: tuple[Id, ...]


@dataclass(frozen=True, slots=True)
class Cancel(Plain):
    """See :class:`pathways_lab.core.messages.CancelRequested`.  id: 0: no answer."""

    runs: tuple[Id, ...]
    buffers: tuple[Id, ...] = ()
    id: Number = 0
    steps: tuple[tuple[Id, tuple[Count, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Policy:
    """One that comes with the lab, or code of an owner's own, which goes by *name*."""

    parcels: ClassVar[tuple[int, int]] = 0, 1
    id: Number
    policy: BuiltIn | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class QuotaFor(Question):
    """See :class:`pathways_lab.core.messages.QuotaChosen`."""

    whom: str
    devices: Count | None
    nbytes: Size | None


@dataclass(frozen=True, slots=True)
class Window(Question):
    """See :class:`pathways_lab.core.messages.WindowChosen`."""

    seconds: Seconds | None


@dataclass(frozen=True, slots=True)
class Lease(Question):
    """See :class:`pathways_lab.core.messages.LeaseRequested`."""

    island: str
    order: bool
    patience: Seconds


@dataclass(frozen=True, slots=True)
class ReturnLease(Question):
    island: str


@dataclass(frozen=True, slots=True)
class Publish:
    """The buffer of the message: what takers must know of the handles, as their client wrote it.

    keep: they stay when the client leaves.  to: the one client that may take them.
    ahead: before they are there, and the runs that make them go on without the client.
    """

    parcels: ClassVar[tuple[int, int]] = 0, 1
    id: Number
    name: str
    buffers: tuple[Id, ...]
    keep: bool = False
    to: str = ""
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Unpublish(Question):
    name: str


@dataclass(frozen=True, slots=True)
class Take(Question):
    """buffers: the client's own numbers for its references.  giver: see the core's HandleTaken."""

    name: str
    buffers: tuple[Id, ...]
    giver: str = ""


@dataclass(frozen=True, slots=True)
class Named(Question):
    """How many buffers are published under a name?"""

    name: str


@dataclass(frozen=True, slots=True)
class Donation(Question):
    """Which of these may not be donated, and why?"""

    buffers: tuple[Id, ...]


@dataclass(frozen=True, slots=True)
class Suspend(Question):
    whose: str


@dataclass(frozen=True, slots=True)
class Resume(Question):
    whose: str
    island: str | None = None


@dataclass(frozen=True, slots=True)
class Leave(Question):
    """The hosts of an island are to be taken away.  anyway: with the slices on them."""

    island: str
    anyway: bool


@dataclass(frozen=True, slots=True)
class Watch(Plain):
    """on: whether the client is told records from now on."""

    on: bool = True


@dataclass(frozen=True, slots=True)
class Topology(Plain):
    """The client wants to hear what there is."""


@dataclass(frozen=True, slots=True)
class Wonder(Question):
    """Which gangs were launched so many seconds ago, and have not ended?"""

    seconds: Seconds


@dataclass(frozen=True, slots=True)
class Watchdog(Question):
    """Set the watchdog; without *told*: ask for the setting in force."""

    told: Annotated[OnStuck, PACKED] | None = None


@dataclass(frozen=True, slots=True)
class Accounts(Question):
    """Ask for the use of every client."""


@dataclass(frozen=True, slots=True)
class Memory(Question):
    """Ask for the values on devices.  most: so many of them, the largest."""

    most: Annotated[int, Within(1, MOST)] = MOST


@dataclass(frozen=True, slots=True)
class Restart(Question):
    """An island, or one host, shall have new device processes."""

    name: str


@dataclass(frozen=True, slots=True)
class Race(Plain):
    """Runs that follow are launched in orders of the client's choice: controllers by host."""

    race: Id
    island: str
    orders: dict[str, tuple[Count, ...]]


@dataclass(frozen=True, slots=True)
class RaceGo(Plain):
    """Everything of the race was submitted."""

    race: Id


CLIENTS: Door = {
    "slice": Slice,
    "release-slice": ReleaseSlice,
    "rebind": Rebind,
    "function": Function,
    "program": Program,
    "forget": Forget,
    "submit": Submit,
    "cancel": Cancel,
    "declare": Declare,
    "lose-upload": LoseUpload,
    "drop": Drop,
    "policy": Policy,
    "quota": QuotaFor,
    "window": Window,
    "lease": Lease,
    "return-lease": ReturnLease,
    "publish": Publish,
    "unpublish": Unpublish,
    "take": Take,
    "suspend": Suspend,
    "resume": Resume,
    "leave": Leave,
    "watch": Watch,
    "topology": Topology,
    "stuck": Wonder,
    "watchdog": Watchdog,
    "accounts": Accounts,
    "named": Named,
    "donation": Donation,
    "memory": Memory,
    "restart": Restart,
    "race": Race,
    "race-go": RaceGo,
}
"""The messages of clients."""
