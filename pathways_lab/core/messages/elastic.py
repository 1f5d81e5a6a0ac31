"""Messages about devices that come, go, and are lent to others.

Problem: slices outlive their devices: these may be lost, may leave on purpose,
or may be wanted by somebody else for a while.  See
:mod:`pathways_lab.core.slices.migration` for what each of them leads to.

Rule for maintainers: as in :mod:`pathways_lab.core.messages`, whose unions have them all.

Paper: section 4.1 (resources are added and removed), section 4.2 (suspend,
resume, migration of a client's slices).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pathways_lab.core.errors import Failure
from pathways_lab.core.program.program import Line, SliceId
from pathways_lab.core.slices.topology import SliceBinding

# --- events ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RebindRequested:
    """A client wants other devices behind a slice that has lost its own.

    island: where; None means wherever there is room, best where it was.
    """

    time: float
    cause: str
    client: str
    slice: SliceId
    island: str | None = None


@dataclass(frozen=True, slots=True)
class SuspendRequested:
    """The slices of client *whose* shall leave their devices.

    request: the asking client's number for it, which comes back with Answer.
    """

    time: float
    cause: str
    client: str
    whose: str
    request: int = 0


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """They shall have devices again, on *island* if one is named, and go on."""

    time: float
    cause: str
    client: str
    whose: str
    island: str | None = None
    request: int = 0


@dataclass(frozen=True, slots=True)
class HostsLeaving:
    """These hosts will be taken away as soon as what is admitted there has ended.

    client: who wants it, and hears of it by Answer; None: nobody asks, for
        example Dask retires a worker.
    anyway: also when there are slices on them, which are then lost.
    """

    time: float
    cause: str
    hosts: tuple[str, ...]
    reason: str
    client: str | None = None
    anyway: bool = True
    request: int = 0


@dataclass(frozen=True, slots=True)
class Compiling:
    """A function that a host was compiling when its process ended.  function: its key."""

    function: str
    name: str
    line: Line


@dataclass(frozen=True, slots=True)
class HostDown:
    """The worker of a host says that the device process has ended.

    until: when another one should have joined; 0: the worker starts no other one by itself.
    reason: why it ended, and what it was doing.
    compiling: what it was compiling, if that may have ended it.
    how: the end itself: ``"was ended by signal 6 ..."``.
    remedy: what helps where no other one is started; empty: an owner restarts it.
    """

    time: float
    cause: str
    host: str
    island: str
    reason: str
    until: float = 0.0
    compiling: tuple[Compiling, ...] = ()
    how: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class HostForgotten:
    """The worker of a host that is down has gone too: no device process is to be expected."""

    time: float
    cause: str
    host: str


# --- commands -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SliceWithdrawn:
    """Hosts forget a lost slice.  Its code and programs stay: it may be bound again."""

    cause: str
    hosts: tuple[str, ...]
    slice: SliceId


@dataclass(frozen=True, slots=True)
class Park:
    """Hosts take what lies on the slice's devices into their own memory, and report it parked."""

    cause: str
    hosts: tuple[str, ...]
    slice: SliceId


@dataclass(frozen=True, slots=True)
class SliceSuspended:
    """The slice holds no devices; what lay on them is in its hosts' own memory."""

    cause: str
    slice: SliceId


@dataclass(frozen=True, slots=True)
class SliceMoved:
    """A suspended slice has devices again.

    hosts: where its values are parked: they send them to the hosts of *binding*,
        and report the slice moved.  (): on the same devices as before.
    """

    cause: str
    hosts: tuple[str, ...]
    binding: SliceBinding


@dataclass(frozen=True, slots=True)
class HostsLeft:
    """Nothing runs on these hosts any more: they hand over what clients wait for, and end."""

    cause: str
    hosts: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The request of a client under this number is done, or not (failure).

    lines: what it was done to, in words.  numbers: what was asked for, by name.
    """

    cause: str
    client: str
    request: int
    lines: tuple[str, ...] = ()
    failure: Failure | None = None
    numbers: Mapping[str, float] | None = None


ElasticEvent = (
    RebindRequested | SuspendRequested | ResumeRequested | HostsLeaving | HostDown | HostForgotten
)
ElasticCommand = SliceWithdrawn | Park | SliceSuspended | SliceMoved | HostsLeft | Answer
