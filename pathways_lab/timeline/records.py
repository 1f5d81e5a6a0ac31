"""The records of the timeline: three kinds of plain record, and nothing else.

Problem: views, tests, exports and replays all ask what happened; they must
agree, and none of them may disturb what happens.  So everything that is shown
anywhere is computed from these records.

Rule for maintainers: change a field only with :data:`VERSION`; data that only one
view needs go into ``args``.  Times are seconds on the control plane's
monotonic clock (hosts convert before they send).

Kinds in use:

======== ======================================================================
Span     ``gang`` (computation running on devices), ``transfer`` (first byte
         sent to all bytes resident), ``compile``, and host control work
         ``receive``, ``prepare``, ``launch``, ``send``;
         ``host-computation`` (an element of a feed, from its making to its
         arrival, on the Dask worker *host*; args step, made: when its function
         had returned, nbytes; only its own client hears of it)
Event    ``host-joined``, ``host-lost``, ``client-joined``, ``client-left``,
         ``host-down`` (its worker says why its process has ended; args text, words: its
         last ones, again: another one is started),
         ``slice-bound``, ``slice-freed``, ``slices-lost``, ``slice-withdrawn``
         (lost, and may be bound again), ``slice-suspended``, ``hosts-left`` (on
         purpose; args hosts, reason), ``plan`` (a program was
         registered; args plan: its key, steps: see :mod:`.flow`), ``submitted``
         (args plan; reads, makes: the first of its buffers), ``admitted`` (of a run that had to
         wait for it: args since, waited_for: memory or turn), ``granted``, ``resolved``,
         ``finished``, ``failed``, ``cancelled``,
         ``compiling`` (a host begins to make a function; args function, slice, waiting: how many
         it was asked for and has not looked at),
         ``launched`` (a gang was handed to its devices: it shows as open bar),
         ``policy`` (set, refused or removed; args policy and owner: in force
         now, message: why it was refused or removed), ``policy-late`` (it did
         not answer in time: the order of submission decides until it does),
         ``message`` (one wire message: args source, target, kind, bytes),
         ``output`` (text printed by user code on a host),
         ``rows`` (a value that decides has said how many there are; args expert: which of its
         step's it is, rows),
         ``leased``, ``lease-ended`` (an island is one client's own; args order),
         ``late``, ``deadlock`` (what stands still; args text, story), ``silent``,
         ``answers`` (a host that says nothing, or does again; args text)
Sample   ``memory`` (bytes in use on one host's devices; args device, most: the most
         since the sample before),
         ``dropped`` (records lost before they were remembered),
         ``clock`` (by how many seconds a host's stamps may be off)
======== ======================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VERSION = 1

ENDS = ("finished", "failed", "cancelled")
"""Kinds of event with which a run ends."""


def own(number: int) -> int:
    """The number of a run or slice as its client counts; the upper half says which client."""
    return number % (1 << 32)


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time on a host.

    devices: local device numbers that it held; empty for host work.
    step: index in the plan, -1 when it belongs to no step.
    line: the user's source line, as text.
    args: e.g. ``seq`` (place in the island's order), ``slice``, ``poisoned``,
        ``nbytes``, ``source``, ``target``, ``emulated``, ``inputs_ready``.
    """

    kind: str
    start: float
    end: float
    island: str
    host: str
    devices: tuple[int, ...] = ()
    run: int = 0
    step: int = -1
    program: str = ""
    node: str = ""
    client: str = ""
    line: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at once."""

    kind: str
    time: float
    island: str = ""
    host: str = ""
    run: int = 0
    step: int = -1
    program: str = ""
    node: str = ""
    client: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """A quantity at a moment."""

    name: str
    time: float
    value: float
    island: str = ""
    host: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)


Record = Span | Event | Sample
