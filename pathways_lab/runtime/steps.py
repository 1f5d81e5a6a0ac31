"""Runs, gangs and transfers in progress on one host: the launcher's nouns.

Problem: the launcher's rules are short when what they speak of is plain.

Rule for maintainers: data only; everything that changes them is in
:mod:`pathways_lab.runtime.launch`.

Paper: section 4.4.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pathways_lab.core.errors import Failure
from pathways_lab.core.program import Call, Transfer
from pathways_lab.runtime.book import Reading
from pathways_lab.runtime.slots import Reader, Slot


@dataclass(slots=True, eq=False)
class Run:
    """One execution of a program, as far as it concerns this host.

    values: slots by value of the plan, until their last use.
    steps: granted and unfinished.
    complete: all steps of this host were granted, or the run was aborted.
    """

    id: int
    reading: Reading
    values: dict[int, Slot] = field(default_factory=dict)
    steps: dict[int, Gang | Move] = field(default_factory=dict)
    complete: bool = False
    failure: Failure | None = None


@dataclass(slots=True, eq=False)
class Gang:
    """A call of a compiled function.

    waits: open conditions, and one for its registration.
    when_handed, when_done: gangs that wait for this one.
    """

    run: Run
    index: int
    call: Call
    lane: str
    devices: tuple[tuple[str, int], ...]
    alone: bool
    first: bool
    seq: int
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    waits: int = 1
    handed: bool = False
    done: bool = False
    poison: Failure | None = None
    when_handed: list[Gang] = field(default_factory=list)
    when_done: list[Gang] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Move:
    """A transfer, as far as this host takes part in it.

    source: set while this host sends.  target: set while it receives.
    started: the rim was told to send.
    """

    run: Run
    index: int
    node: Transfer
    seq: int
    source: Slot | None = None
    reader: Reader = field(default_factory=Reader)
    started: bool = False
    target: Slot | None = None
    failure: Failure | None = None
