"""The slices and programs that a host knows, and the numbers of its grants.

Problem: a grant is a few numbers; their meaning here follows from the plan
and from the places of its slices.  And the numbers themselves must be right: a
repeated grant is ignored, a missing one means that the island's order is not
known any more.

Rule for maintainers: lookups only; the meaning of a plan on this host is worked
out once, not with every run.

Paper: section 4.4 (consistent order on all hosts), section 4.5.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from pathways_lab.core.messages import Grant
from pathways_lab.core.program.folding import Row, Steps, parts_of
from pathways_lab.core.program.legality import outputs_of
from pathways_lab.core.program.program import Call, Plan, SliceId, Transfer, Value, ValueId
from pathways_lab.core.slices.topology import SliceBinding, locals_of

REPEATED = "repeated"


@dataclass(frozen=True, slots=True)
class Reading:
    """A plan as it concerns one host.

    ours: per step, whether this host takes part.
    places: per step, whether it takes a place in the order of this host's island.
    end: one more than the last step that is ours.
    decisions: the values that decide.
    begins: whether the first device of a slice is on this host.
    """

    plan: Plan
    ours: Sequence[bool]
    places: Sequence[bool]
    end: int
    decisions: Decisions
    begins: Callable[[SliceId | None], bool]

    def decides(self, index: int) -> Sequence[ValueId]:
        """Values that decide, made by a step, of which this host has the first device."""
        if not self.decisions:
            return ()
        plan, cases = self.plan, self.decisions.cases
        made = outputs_of(plan.steps[index].node)
        return [v for v in made if cases(v) and self.begins(plan.values[v].slice)]

    def freed(self, first: int, last: int, held: Collection[ValueId]) -> list[ValueId]:
        """Those of the values *held* that steps *first* to *last* (exclusive) free, in order."""
        steps = self.plan.steps
        if isinstance(steps, Steps):
            return steps.freed(first, last, held)
        return [value for index in range(first, last) for value in steps[index].frees]


class Decisions:
    """The values that decide in a plan, and their cases.

    A turn that is repeated is read once: values that decide in it lie in one row of numbers.
    """

    def __init__(self, plan: Plan) -> None:
        self._cases: dict[ValueId, int] = {}
        self._rows: dict[tuple[ValueId, int, int], int] = {}
        for part in parts_of(plan.steps):
            for step, strides in zip(part.steps, part.strides, strict=True):
                when = step.node.when
                if when is None:
                    continue
                stride = strides[-1 - len(step.frees)] if strides else 0
                if stride:
                    self._rows[when.value, stride, part.times] = when.cases
                else:
                    self._cases[when.value] = when.cases

    def cases(self, value: ValueId) -> int:
        """How many cases a value has that decides; 0 of any other."""
        found = self._cases.get(value, 0)
        for (first, stride, times), cases in self._rows.items():
            turn, rest = divmod(value - first, stride)
            if not rest and 0 <= turn < times:
                return cases
        return found

    def __bool__(self) -> bool:
        return bool(self._cases or self._rows)


class Book:
    """Slices, programs and grants of one host."""

    def __init__(self, host: str, island: str) -> None:
        self.host = host
        self.island = island
        self._slices: dict[SliceId, tuple[SliceBinding, str]] = {}
        self._locals: dict[SliceId, tuple[int, ...]] = {}
        self._plans: dict[str, Plan] = {}
        self._readings: dict[str, Reading] = {}
        self._epoch = -1
        self._place = -1

    # --- slices -----------------------------------------------------------------------

    def bind(self, binding: SliceBinding, lane: str) -> None:
        """lane: the slice's queue on this host, "" when it has no device here."""
        self._slices[binding.slice] = (binding, lane)
        self._locals[binding.slice] = locals_of(binding).get(self.host, ())

    def unbind(self, slice_id: SliceId) -> None:
        """A slice is gone, and with it the programs that used it."""
        self._slices.pop(slice_id, None)
        self._locals.pop(slice_id, None)
        self.forget([key for key, plan in self._plans.items() if slice_id in plan.slices])

    def lane(self, slice_id: SliceId | None) -> str:
        """The slice's queue here, or "" when it has no device on this host.

        A slice that no step of a program touches, of an unused input, may be unknown.
        """
        known = self._slices.get(slice_id) if slice_id is not None else None
        return known[1] if known is not None else ""

    def devices(self, slice_id: SliceId) -> tuple[tuple[str, int], ...]:
        """``(host, local number)`` of all devices of a slice."""
        return self._slices[slice_id][0].devices

    def _near(self, slice_id: SliceId) -> bool:
        return self.island in self._slices[slice_id][0].islands

    def _begins(self, slice_id: SliceId | None) -> bool:
        """Whether the first device of a slice is on this host."""
        return slice_id is not None and self.devices(slice_id)[0][0] == self.host

    def locals_on(self, slice_id: SliceId) -> tuple[int, ...]:
        """This host's own numbers of its devices in a slice."""
        return self._locals[slice_id]

    def locals_of(self, value: Value) -> tuple[int, ...]:
        """The same of the devices that hold a value."""
        assert value.slice is not None
        return self._locals[value.slice]

    # --- programs ---------------------------------------------------------------------

    def program(self, plan: Plan) -> None:
        self._plans[plan.key] = plan
        self._readings.pop(plan.key, None)

    def forget(self, plans: Iterable[str]) -> None:
        """Nothing of these will be granted any more."""
        for key in plans:
            self._plans.pop(key, None)
            self._readings.pop(key, None)

    def plan(self, key: str) -> Plan | None:
        return self._plans.get(key)

    def reading(self, key: str) -> Reading:
        """The meaning of a plan here.  Its slices must be known."""
        reading = self._readings.get(key)
        if reading is None:
            plan = self._plans[key]
            turns = [
                ([_slices_of(plan, step.node) for step in part.steps], part.times)
                for part in parts_of(plan.steps)
            ]
            touched = {slices for part, _ in turns for slices in part}
            mine = {slices: any(map(self.lane, slices)) for slices in touched}
            near = {slices: any(map(self._near, slices)) for slices in touched}
            ours = _row([([mine[slices] for slices in part], times) for part, times in turns])
            places = _row([([near[slices] for slices in part], times) for part, times in turns])
            end = next((n for n in range(len(ours), 0, -1) if ours[n - 1]), 0)
            reading = Reading(plan, ours, places, end, Decisions(plan), self._begins)
            self._readings[key] = reading
        return reading

    # --- grants -----------------------------------------------------------------------

    def take(self, grant: Grant, free: bool = False) -> str:
        """Note a grant: "", REPEATED, or what makes it impossible to go on.

        free: the order is off, and it may come before or after others.
        """
        if grant.epoch < self._epoch:
            return REPEATED
        if grant.epoch == self._epoch and grant.place <= self._place and not free:
            return REPEATED
        if grant.epoch > self._epoch:
            self._epoch, self._place = grant.epoch, -1
        where = f"{self.host} was granted place {grant.place} of epoch {grant.epoch}"
        if grant.previous != self._place and not free:
            return f"{where} after place {grant.previous}, but the last one it saw is {self._place}"
        plan = self._plans.get(grant.plan)
        if plan is None:
            return f"{where} for a program that it was never sent"
        unknown = [s for s in plan.slices if s not in self._slices]
        if unknown:
            return f"{where}, but was never told where slice {unknown[0]} is"
        self._place = max(self._place, grant.place)
        return ""


def _row(parts: Sequence[tuple[list[bool], int]]) -> Sequence[bool]:
    """Per step; where no turn is repeated as a tuple, in which one looks faster."""
    row = Row(parts)
    return row if any(times > 1 for _, times in parts) else tuple(row)


def _slices_of(plan: Plan, node: Call | Transfer) -> tuple[SliceId, ...]:
    if isinstance(node, Call):
        return (node.slice,)
    ends = (plan.values[node.input].slice, plan.values[node.output].slice)
    return tuple(s for s in ends if s is not None)
