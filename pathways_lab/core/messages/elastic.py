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
from pathways_lab.core.messages.base import Commanded, Happened, ToClient, ToHosts, Wished
from pathways_lab.core.program.program import Line, SliceId
from pathways_lab.core.slices.topology import SliceBinding

# --- events ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RebindRequested(Wished):
    """A client wants other devices behind a slice that has lost its own.

    island: where; None means wherever there is room, best where it was.
    """

    slice: SliceId
    island: str | None = None


@dataclass(frozen=True, slots=True)
class SuspendRequested(Wished):
    """The slices of client *whose* shall leave their devices.

    request: the asking client's number for it, which comes back with Answer.
    """

    whose: str
    request: int = 0


@dataclass(frozen=True, slots=True)
class ResumeRequested(Wished):
    """They shall have devices again, on *island* if one is named, and go on."""

    whose: str
    island: str | None = None
    request: int = 0


@dataclass(frozen=True, slots=True)
class HostsLeaving(Happened):
    """These hosts will be taken away as soon as what is admitted there has ended.

    client: who wants it, and hears of it by Answer; None: nobody asks, for
        example Dask retires a worker.
    anyway: also when there are slices on them, which are then lost.
    """

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
class HostDown(Happened):
    """The worker of a host says that the device process has ended.

    until: when another one should have joined; 0: the worker starts no other one by itself.
    reason: why it ended, and what it was doing.
    compiling: what it was compiling, if that may have ended it.
    how: the end itself: ``"was ended by signal 6 ..."``.
    remedy: what helps where no other one is started; empty: an owner restarts it.
    """

    host: str
    island: str
    reason: str
    until: float = 0.0
    compiling: tuple[Compiling, ...] = ()
    how: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class HostForgotten(Happened):
    """The worker of a host that is down has gone too: no device process is to be expected."""

    host: str


# --- commands -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SliceWithdrawn(ToHosts):
    """Hosts forget a lost slice.  Its code and programs stay: it may be bound again."""

    slice: SliceId


@dataclass(frozen=True, slots=True)
class Park(ToHosts):
    """Hosts take what lies on the slice's devices into their own memory, and report it parked."""

    slice: SliceId


@dataclass(frozen=True, slots=True)
class SliceSuspended(Commanded):
    """The slice holds no devices; what lay on them is in its hosts' own memory."""

    slice: SliceId


@dataclass(frozen=True, slots=True)
class SliceMoved(ToHosts):
    """A suspended slice has devices again.

    hosts: where its values are parked: they send them to the hosts of *binding*,
        and report the slice moved.  (): on the same devices as before.
    """

    binding: SliceBinding


@dataclass(frozen=True, slots=True)
class HostsLeft(ToHosts):
    """Nothing runs on these hosts any more: they hand over what clients wait for, and end."""

    reason: str


@dataclass(frozen=True, slots=True)
class Answer(ToClient):
    """The request of a client under this number is done, or not (failure).

    lines: what it was done to, in words.  numbers: what was asked for, by name.
    """

    request: int
    lines: tuple[str, ...] = ()
    failure: Failure | None = None
    numbers: Mapping[str, float] | None = None


ElasticEvent = (
    RebindRequested | SuspendRequested | ResumeRequested | HostsLeaving | HostDown | HostForgotten
)
ElasticCommand = SliceWithdrawn | Park | SliceSuspended | SliceMoved | HostsLeft | Answer
