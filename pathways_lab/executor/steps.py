"""Runs, gangs and transfers in progress on one host: the launcher's nouns.

Problem: the launcher's rules are short when what they speak of is plain.

Rule for maintainers: data only; everything that changes them is in
:mod:`pathways_lab.executor.launcher`.

Paper: section 4.4.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pathways_lab.core.errors import Failure
from pathways_lab.core.program.program import Call, Transfer
from pathways_lab.executor.actions import LaunchRow
from pathways_lab.executor.local_array import FAILED, Reader, Slot
from pathways_lab.executor.local_plans import Reading
from pathways_lab.executor.stretches import Part, Stretch


@dataclass(slots=True, eq=False)
class Run:
    """One execution of a program, as far as it concerns this host.

    inputs: buffers by value of the plan.
    values: slots by value of the plan, from their first use until their last one.
    steps: granted and unfinished, a row by its first step.
    complete: all steps of this host were granted, or the run was aborted.
    """

    id: int
    reading: Reading
    inputs: dict[int, int] = field(default_factory=dict)
    values: dict[int, Slot] = field(default_factory=dict)
    steps: dict[int, Gang | Row | Move] = field(default_factory=dict)
    complete: bool = False
    failure: Failure | None = None


@dataclass(slots=True, eq=False)
class Gang:
    """A call of a compiled function.

    locals: this host's own numbers of its devices.
    temporary: bytes that it needs on each of them beside inputs and outputs.
    room: see :class:`pathways_lab.executor.device_memory.Claim`.
    held: bytes that it gives back when it is done.
    stamp: the driver's own mark, given back when the gang is handed over.
    waits: open conditions, and one for its registration.
    when_handed, when_done: gangs that wait for this one.
    number: of all gangs, in the order in which this host was granted them.
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
    locals: tuple[int, ...]
    temporary: int = 0
    room: int = field(init=False)
    held: int = 0
    stamp: Any = None
    waits: int = 1
    handed: bool = False
    done: bool = False
    poison: Failure | None = None
    when_handed: list[Gang | Row] = field(default_factory=list)
    when_done: list[Gang | Row] = field(default_factory=list)
    number: int = field(default_factory=itertools.count().__next__)

    @property
    def copies(self) -> frozenset[int]:
        """Donated inputs that another buffer or another input names: they must survive."""
        if not self.call.donated:
            return frozenset()
        named = Counter(self.inputs)
        return frozenset(
            [
                p
                for p in self.call.donated
                if len(self.inputs[p].buffers) > 1 or named[self.inputs[p]] > 1
            ]
        )

    def __post_init__(self) -> None:
        room = self.temporary
        for slot in self.inputs:
            room += slot.value.nbytes
        for slot in self.outputs:
            room += slot.value.nbytes
        self.room = room

    def donation(self, host: str) -> Failure:
        """The answer to a request for an array that it was given."""
        return Failure(
            "execute",
            f"the array was donated to {self.call.name or 'a compiled function'}, "
            "which has reused its memory",
            remedy="do not use an array after donating it, or drop donate_argnums",
            program=self.run.reading.plan.name,
            node=self.call.name,
            host=host,
            line=self.call.line,
        )

    def growth(self, copies: frozenset[int]) -> int:
        """Bytes of its outputs beyond those of the inputs in whose memory they are made."""
        given = sum(self.inputs[p].value.nbytes for p in self.call.donated if p not in copies)
        return sum(slot.value.nbytes for slot in self.outputs) - given

    def need(self) -> int:
        """Bytes of its outputs beyond donated inputs, and of inputs that are not on devices yet."""
        missing = {slot for slot in self.inputs if not slot.counted}
        arriving = sum(slot.value.nbytes for slot in missing)
        return arriving + max(self.growth(self.copies), 0) + self.temporary


@dataclass(slots=True, eq=False)
class Row:
    """The gangs of a stretch in progress; what :class:`Gang` says of one holds for all.

    inputs: slots of the stretch's externals.  outputs: of what it exports, by value.
    seq: place of the first part.
    held: bytes that it gives back when it is done.
    lost: by cell, why it has no value.
    over: so many parts are.
    """

    run: Run
    stretch: Stretch
    lane: str
    devices: tuple[tuple[str, int], ...]
    seq: int
    inputs: tuple[Slot, ...]
    outputs: dict[int, Slot]
    locals: tuple[int, ...]
    held: int
    stamp: Any = None
    room: int = field(init=False)
    waits: int = 1
    handed: bool = False
    done: bool = False
    lost: dict[int, Failure] = field(default_factory=dict)
    over: int = 0
    alone: ClassVar[bool] = False
    when_handed: list[Gang | Row] = field(default_factory=list)
    when_done: list[Gang | Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        slots = (*self.inputs, *self.outputs.values())
        self.room = self.held + sum(slot.value.nbytes for slot in slots)

    def need(self) -> int:
        """Bytes of all its values together, and of inputs that are not on devices yet."""
        arriving = sum(slot.value.nbytes for slot in self.inputs if not slot.counted)
        return arriving + self.held + sum(slot.value.nbytes for slot in self.outputs.values())

    def launch(self) -> LaunchRow:
        """The parts to hand to its device queue now."""
        for cell, slot in enumerate(self.inputs):
            if slot.lacking and slot.failure is not None:
                self.lost[cell] = slot.failure
        return LaunchRow(
            self.run.id,
            self.run.reading.plan,
            self.stretch,
            self.lane,
            self.inputs,
            self.outputs,
            frozenset(self.lost),
            len(self.devices) > len(self.locals),
            self.seq,
            self.stretch.parts[-1].index == self.run.reading.end - 1,
            self.when_done,
            self.stamp,
        )

    @property
    def spoiled(self) -> bool:
        """Whether something that it reads or makes has no value."""
        return bool(self.lost) or any(slot.state == FAILED for slot in self.inputs)

    def cause(self, part: Part, failure: Failure | None = None) -> Failure | None:
        """Why a part has no results: a lost input, or else its own failure."""
        for cell in part.inputs:
            if cell in self.lost:
                return self.lost[cell]
            if cell < len(self.inputs) and self.inputs[cell].state == FAILED:
                return self.inputs[cell].failure
        return failure


@dataclass(slots=True, eq=False)
class Move:
    """A transfer, as far as this host takes part in it.

    source: set while this host sends.  target: set while it receives.
    started: the driver was told to send.  accepted: it was told to receive.
    """

    run: Run
    index: int
    node: Transfer
    seq: int
    source: Slot | None = None
    reader: Reader = field(default_factory=Reader)
    started: bool = False
    target: Slot | None = None
    accepted: bool = False
    failure: Failure | None = None

    @property
    def locals(self) -> tuple[int, ...]:
        """Where it receives."""
        return self.target.locals if self.target is not None else ()

    @property
    def room(self) -> int:
        """Its receive buffer, as :class:`pathways_lab.executor.device_memory.Claim`."""
        return self.target.value.nbytes if self.target is not None else 0

    def need(self) -> int:
        """The same: nobody else takes it."""
        return self.room
