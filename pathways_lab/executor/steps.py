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
from typing import Any

from pathways_lab.core.errors import Failure
from pathways_lab.core.program.program import Plan, Transfer, ValueId
from pathways_lab.executor.local_array import FAILED, Reader, Slot
from pathways_lab.executor.local_plans import Reading
from pathways_lab.executor.stretches import Part, Stretch, growth

Key = tuple[int, int]
"""Run and step."""


@dataclass(slots=True, eq=False)
class Run:
    """One execution of a program, as far as it concerns this host.

    inputs: buffers by value of the plan.
    values: slots by value of the plan, from their first use until their last one.
    steps: granted and unfinished, a segment by its first step.
    complete: all steps of this host were granted, or the run was aborted.
    """

    id: int
    reading: Reading
    inputs: dict[int, int] = field(default_factory=dict)
    values: dict[int, Slot] = field(default_factory=dict)
    steps: dict[int, Segment | Move] = field(default_factory=dict)
    complete: bool = False
    failure: Failure | None = None


@dataclass(slots=True, eq=False, repr=False)  # a segment knows segments: all would be told
class Segment:
    """The gangs of a stretch in progress; of a stretch of one, a gang alone.

    inputs: slots of the stretch's externals.  outputs: of what it exports, by value.
    locals: this host's own numbers of its devices.
    temporary: bytes that its gangs need on each of them beside inputs and outputs.
    seq: place of the first gang.
    alone: nothing else may be in flight on its lane, and first: no gang of this function was
        launched on this slice before; both of a gang alone.
    stamp: the driver's own mark, given back when the segment is handed over.
    room: see :class:`pathways_lab.executor.device_memory.Claim`.
    held: bytes that it gives back when it is done.
    waits: open conditions, and one for its registration.
    when_handed, when_done: segments that wait for this one.
    lost: by cell, why it has no value: each gang that depends on one, directly or not, has no
        result.
    copies: since it was handed over, cells of donated inputs that somebody else still names: a copy
        is given away.
    over: so many of its gangs are.
    number: of all segments, in the order in which this host was granted them.
    """

    run: Run
    stretch: Stretch
    lane: str
    devices: tuple[tuple[str, int], ...]
    locals: tuple[int, ...]
    inputs: tuple[Slot, ...]
    outputs: dict[ValueId, Slot]
    temporary: int
    seq: int
    alone: bool
    first: bool
    stamp: Any = None
    room: int = field(init=False)
    held: int = 0
    waits: int = 1
    handed: bool = False
    done: bool = False
    lost: dict[int, Failure] = field(default_factory=dict)
    copies: frozenset[int] = frozenset()
    over: int = 0
    when_handed: list[Segment] = field(default_factory=list)
    when_done: list[Segment] = field(default_factory=list)
    number: int = field(default_factory=itertools.count().__next__)

    def __post_init__(self) -> None:
        self.room = self.temporary + self.stretch.most + self.stretch.read

    @property
    def key(self) -> Key:
        """The run, and the step of the first gang."""
        return self.run.id, self.stretch.parts[0].index

    @property
    def plan(self) -> Plan:
        """Its program."""
        return self.run.reading.plan

    @property
    def together(self) -> bool:
        """Whether other hosts launch its gangs too, so that each is launched, with zeros for lost
        inputs; else a gang that lacks an input is not."""
        return len(self.devices) > len(self.locals)

    @property
    def last(self) -> bool:
        """Whether its last gang is the last step of its run here."""
        return self.stretch.parts[-1].index == self.run.reading.end - 1

    # --- donation -------------------------------------------------------------------------

    def shared(self) -> frozenset[int]:
        """Cells of donated inputs that another buffer or another input names: they survive."""
        inputs, gives = self.inputs, self.stretch.gives
        if not gives:
            return frozenset()
        named = Counter(inputs)
        found = [c for c in gives if len(inputs[c].buffers) > 1 or named[inputs[c]] > 1]
        return frozenset(found)

    def donation(self, part: Part, host: str) -> Failure:
        """The answer to a request for an array that a part was given."""
        call = part.call
        return Failure(
            "execute",
            f"the array was donated to {call.name or 'a compiled function'}, "
            "which has reused its memory",
            remedy="do not use an array after donating it, or drop donate_argnums",
            program=self.run.reading.plan.name,
            node=call.name,
            host=host,
            line=call.line,
        )

    # --- memory ---------------------------------------------------------------------------

    def growth(self, copies: frozenset[int]) -> int:
        """Bytes of what it makes beyond what it makes in donated arrays."""
        stretch = self.stretch
        return growth(stretch.parts, stretch.sizes, copies) if copies else stretch.grows

    def need(self) -> int:
        """Bytes of what it makes beyond donated inputs, and of inputs not on devices yet."""
        missing = {slot for slot in self.inputs if not slot.counted}
        arriving = sum(slot.value.nbytes for slot in missing)
        return arriving + self.growth(self.shared()) + self.temporary

    # --- failures -------------------------------------------------------------------------

    @property
    def spoiled(self) -> bool:
        """Whether something that it reads or makes has no value."""
        return bool(self.lost) or FAILED in [slot.state for slot in self.inputs]

    def cause(self, part: Part, failure: Failure | None = None) -> Failure | None:
        """Why a part has no results: what was known before, a lost input, or its own failure."""
        for cell in (*part.outputs[:1], *part.inputs):
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
