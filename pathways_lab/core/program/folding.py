"""Plans that repeat themselves: a turn is held once, with the number of turns.

Problem: a loop has a number of turns at most, and its plan says each of them.  Turns differ in
nothing but the numbers of their values, which grow by as much from each turn to the next.
So a plan travels with one turn of each loop, and a process that takes it lays out a step
when the step is looked at, and keeps few of them.  Many values are alike, and a bundle of
hundreds of arrays takes kilobytes to describe: each description travels once.

How: :func:`folded` looks for neighbours that are alike, whoever wrote them; it knows no loops.
A loop inside of a loop is laid out in the turn of the outer one.  The first turns and the last
ones often differ from the others, and stay as they are.

Rule for maintainers: ``laid_out(folded(plan)) == plan``.  Steps of one kind touch the same
slices in every turn, so a host reads a turn once.  A form from a client may say anything:
:func:`laid_out` refuses what breaks this, and its cost is bounded.

Paper: section 4.3 (the size of a program does not grow with what it does).
"""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, overload

from pathways_lab.core.program.program import Call, Plan, SliceId, Step, Value, ValueId

MOST = 500_000
"""Steps, and values, of one plan."""

_NAMED = 20 * MOST
"""Values that the steps of a plan name, each as often as it is named."""

_FEW = 12
"""Steps that are not worth a look."""

_RECENT = 512
"""Steps that a process keeps of those it has laid out."""

_LENGTHS = 24
"""Lengths of a turn that are compared: those that equal neighbours are most often apart."""

_TRIED = 3
"""The best of them, whose numbers are compared too."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Values:
    """The same values *times* so many times.  kinds: of each, its place in the plan's kinds."""

    kinds: tuple[int, ...]
    times: int


@dataclass(frozen=True, slots=True)
class Turns:
    """The same steps *times* so many times.

    steps: of the first turn.
    strides: per step, by how much each of its numbers grows from turn to turn, in the order of
        :func:`_numbers`; () where none does.
    """

    steps: tuple[Step, ...]
    strides: tuple[tuple[int, ...], ...]
    times: int


@dataclass(frozen=True, slots=True)
class Folded:
    """A plan as it travels, see :class:`~pathways_lab.core.program.program.Plan`.

    kinds: the descriptions of its values, each once.
    """

    key: str
    name: str
    kinds: tuple[Value, ...]
    values: tuple[Values, ...]
    steps: tuple[Turns, ...]
    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]
    slices: tuple[SliceId, ...]


class Row(Sequence[T], Generic[T]):
    """A sequence of parts, each of which is repeated."""

    def __init__(self, parts: Sequence[tuple[Sequence[T], int]]) -> None:
        self.parts = parts
        ends = itertools.accumulate((len(items) * times for items, times in parts), initial=0)
        self.starts = list(ends)

    def __len__(self) -> int:
        return self.starts[-1]

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[T, ...]: ...
    def __getitem__(self, at: int | slice) -> T | tuple[T, ...]:
        if isinstance(at, slice):
            return tuple([self._item(index) for index in range(*at.indices(len(self)))])
        size = self.starts[-1]
        if not -size <= at < size:
            raise IndexError(at)
        return self._item(at % size)

    def __iter__(self) -> Iterator[T]:
        for items, times in self.parts:
            for _ in range(times):
                yield from items

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(map(_equal, self, other))

    __hash__ = None  # type: ignore[assignment]

    def where(self, index: int) -> tuple[int, int, int]:
        """The part, turn and place in the turn of an item."""
        part = bisect.bisect_right(self.starts, index) - 1
        turn, place = divmod(index - self.starts[part], len(self.parts[part][0]))
        return part, turn, place

    def _item(self, index: int) -> T:
        part = bisect.bisect_right(self.starts, index) - 1
        items = self.parts[part][0]
        return items[(index - self.starts[part]) % len(items)]


class Steps(Row[Step]):
    """The steps of a folded plan, each laid out when it is looked at.

    at_once: for a process that looks at all of them, again and again.
    """

    def __init__(self, turns: Sequence[Turns], at_once: bool = False) -> None:
        super().__init__([(part.steps, part.times) for part in turns])
        self.turns = tuple(turns)
        self._recent = functools.lru_cache(_RECENT)(self._laid_out)
        self._all = tuple(self._each()) if at_once else ()

    def __iter__(self) -> Iterator[Step]:
        return iter(self._all) if self._all else self._each()

    def _each(self) -> Iterator[Step]:
        for part in self.turns:
            for turn in range(part.times):
                for step, strides in zip(part.steps, part.strides, strict=True):
                    yield _shifted(step, strides, turn)

    def freed(self, first: int, last: int, held: Collection[ValueId]) -> list[ValueId]:
        """Those of the values *held* that steps *first* to *last* (exclusive) free, in order."""
        found = []
        for start, part in zip(self.starts, self.turns, strict=False):
            size = len(part.steps)
            if start >= last or start + size * part.times <= first:
                continue
            for place, (step, strides) in enumerate(zip(part.steps, part.strides, strict=True)):
                still = (0,) * len(step.frees)
                grows = strides[len(strides) - len(step.frees) :] or still
                for value, stride in zip(step.frees, grows, strict=True):
                    for one in held:
                        turn, rest = divmod(one - value, stride) if stride else (0, one - value)
                        at = start + turn * size + place
                        if not rest and 0 <= turn < part.times and first <= at < last:
                            found.append((at, one))
        return [value for _, value in sorted(found)]

    def _item(self, index: int) -> Step:
        return self._all[index] if self._all else self._recent(index)

    def _laid_out(self, index: int) -> Step:
        part, turn, place = self.where(index)
        turns = self.turns[part]
        return _shifted(turns.steps[place], turns.strides[place], turn)


def parts_of(steps: Sequence[Step]) -> tuple[Turns, ...]:
    """The turns of the steps of a plan; of one that is laid out there is one, of all of them."""
    if isinstance(steps, Steps):
        return steps.turns
    return (Turns(tuple(steps), ((),) * len(steps), 1),) if steps else ()


def fold(plan: Plan) -> Plan:
    """The same plan, in which turns are held once."""
    turns = tuple(_fold_steps(plan, tuple(plan.steps)))
    if all(part.times == 1 for part in turns):
        return plan
    grown = Counter(by for part in turns for strides in part.strides for by in strides if by > 0)
    parts = list(_fold_values(tuple(plan.values), grown))
    return replace(plan, values=Row(parts), steps=Steps(turns))


def folded(plan: Plan) -> Folded:
    """The form in which a plan travels: turns that it holds once are in it once."""
    values = plan.values
    parts = values.parts if isinstance(values, Row) else [(values, 1)] if values else []
    kinds, numbers = numbered([value for items, _ in parts for value in items])
    rest = iter(numbers)
    return Folded(
        plan.key,
        plan.name,
        kinds,
        tuple([Values(tuple(itertools.islice(rest, len(items))), times) for items, times in parts]),
        parts_of(plan.steps),
        plan.inputs,
        plan.outputs,
        plan.slices,
    )


def laid_out(form: Folded, at_once: bool = False) -> Plan:
    """The plan of this form.  at_once: see :class:`Steps`.

    Raises ValueError for what no plan folds into.
    """
    sizes = {
        "steps": [(len(part.steps), part.times) for part in form.steps],
        "values": [(len(part.kinds), part.times) for part in form.values],
    }
    for what, parts in sizes.items():
        if any(times < 1 or not 0 < size <= MOST for size, times in parts):
            raise ValueError(f"its {what} have a turn without content, or none")
        if sum([size * times for size, times in parts]) > MOST:
            raise ValueError(f"it has more than {MOST:,} {what}")
    if any(min(part.kinds) < 0 or max(part.kinds) >= len(form.kinds) for part in form.values):
        raise ValueError("it describes not all of its values")
    values = Row([(tuple([form.kinds[k] for k in p.kinds]), p.times) for p in form.values])
    named = 0
    for part in form.steps:
        if len(part.steps) != len(part.strides):
            raise ValueError("its turns have not as many strides as steps")
        named += part.times * sum([len(_numbers(step)) for step in part.steps])
        if named > _NAMED:
            raise ValueError(f"its steps name values more than {_NAMED:,} times")
        for step, strides in zip(part.steps, part.strides, strict=True):
            if strides and len(strides) != len(_numbers(step)):
                raise ValueError("a step has not as many strides as numbers")
            if part.times > 1 and not _alike(step, strides, part.times, values):
                raise ValueError("a step touches other slices in another turn")
    steps: Sequence[Step] = Steps(form.steps, at_once)
    listed: Sequence[Value] = values
    if all(times == 1 for parts in sizes.values() for _, times in parts):
        listed, steps = tuple(values), tuple(steps)
    return Plan(form.key, form.name, listed, steps, form.inputs, form.outputs, form.slices)


def _equal(one: object, other: object) -> bool:
    return one == other


def _numbers(step: Step) -> tuple[ValueId, ...]:
    """All values that a step names: read, made, asked for its condition, freed."""
    node = step.node
    asked = () if node.when is None else (node.when.value,)
    if isinstance(node, Call):
        return (*node.inputs, *node.outputs, *asked, *step.frees)
    return (node.input, node.output, *asked, *step.frees)


def _shifted(step: Step, strides: tuple[int, ...], turn: int) -> Step:
    """The same step so many turns later."""
    if not turn or not strides:
        return step
    node = step.node
    numbers = [number + turn * by for number, by in zip(_numbers(step), strides, strict=True)]
    if isinstance(node, Call):
        reads, ends = len(node.inputs), len(node.inputs) + len(node.outputs)
        made: dict[str, Any] = {
            "inputs": tuple(numbers[:reads]), "outputs": tuple(numbers[reads:ends])
        }  # fmt: skip
    else:
        ends = 2
        made = {"input": numbers[0], "output": numbers[1]}
    if node.when is not None:
        made["when"] = replace(node.when, value=numbers[ends])
        ends += 1
    return Step(replace(node, **made), tuple(numbers[ends:]))


def _alike(step: Step, strides: tuple[int, ...], times: int, values: Row[Value]) -> bool:
    """Whether what a step reads, makes and waits for is on the same slices in every turn."""
    named = _numbers(step)
    grows = strides or (0,) * len(named)
    for number, stride in [*zip(named, grows, strict=True)][: len(named) - len(step.frees)]:
        last = number + (times - 1) * stride
        if not 0 <= min(number, last) <= max(number, last) < len(values):
            return False
        part, _, place = values.where(number)
        if values.where(last)[::2] == (part, place) and not stride % len(values.parts[part][0]):
            continue  # the same value of every turn
        if stride and len({values[number + n * stride].slice for n in range(times)}) > 1:
            return False
    return True


# --- looking for turns ---------------------------------------------------------------------


def numbered(values: Iterable[Value]) -> tuple[tuple[Value, ...], list[int]]:
    """The kinds of values, and of each value its kind.

    A value that is there many times is looked at once.
    """
    kinds: dict[Value, int] = {}
    known: dict[int, int] = {}
    numbers = []
    for value in values:
        number = known.get(id(value))
        if number is None:
            number = known[id(value)] = kinds.setdefault(value, len(kinds))
        numbers.append(number)
    return tuple(kinds), numbers


def _fold_values(
    values: tuple[Value, ...], lengths: Counter[int]
) -> Iterator[tuple[tuple[Value, ...], int]]:
    """Values, and how often they come.

    lengths: by which the numbers of values grow, turn by turn, with how often they do.
    """
    _, kinds = numbered(values)
    at = 0
    for first, length, times in _repeated(kinds, (), lengths):
        if at < first:
            yield values[at:first], 1
        yield values[first : first + length], times
        at = first + length * times
    if at < len(values):
        yield values[at:], 1


def _fold_steps(plan: Plan, steps: tuple[Step, ...]) -> Iterator[Turns]:
    names: dict[Hashable, int] = {}
    kinds = [names.setdefault(_kind(plan, step), len(names)) for step in steps]
    numbers = [_numbers(step) for step in steps]
    at = 0
    for first, length, times in _repeated(kinds, numbers):
        if at < first:
            yield Turns(steps[at:first], ((),) * (first - at), 1)
        strides = [
            _grown(numbers[index], numbers[index + length])
            for index in range(first, first + length)
        ]
        moving = tuple([by if any(by) else () for by in strides])
        yield Turns(steps[first : first + length], moving, times)
        at = first + length * times
    if at < len(steps):
        yield Turns(steps[at:], ((),) * (len(steps) - at), 1)


def _kind(plan: Plan, step: Step) -> Hashable:
    """The properties that a step has in every turn."""
    node = step.node
    case = None if node.when is None else (node.when.case, node.when.cases)
    numbers = _numbers(step)
    places = [plan.values[v].slice for v in numbers[: len(numbers) - len(step.frees)]]
    if isinstance(node, Call):
        known: tuple[Hashable, ...] = (
            node.function, node.slice, len(node.inputs), node.donated, node.name, node.line,
            node.ahead, node.keep, node.window,
        )  # fmt: skip
    else:
        known = (node.name, node.line, node.trimmed)
    return known, tuple(places), case, len(step.frees)


def _grown(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([b - a for a, b in zip(one, other, strict=True)])


def _repeated(
    kinds: Sequence[int],
    numbers: Sequence[tuple[int, ...]] = (),
    lengths: Counter[int] | None = None,
) -> Iterator[tuple[int, int, int]]:
    """First item, length of a turn, and turns of each part that repeats itself, in order."""
    todo: list[tuple[int, int, int]] = [(0, len(kinds), 0)]
    while todo:
        begin, end, times = todo.pop()
        if times:
            yield begin, end, times
            continue
        if end - begin < _FEW:
            continue
        apart = _apart(kinds, begin, end) if lengths is None else lengths
        likely = [length for length, _ in apart.most_common(_LENGTHS)]

        def alike(length: int, begin: int = begin, end: int = end) -> int:
            return sum(map(operator.eq, kinds[begin:end], kinds[begin + length : end]))

        likely = sorted(likely, key=alike)[-_TRIED:]
        tried = [_longest(kinds, numbers, begin, end, length) for length in likely]
        most = max(tried, key=lambda each: each[1] * (each[2] - 1), default=(0, 0, 0))
        first, length, times = most
        if length * (times - 1) >= _FEW:
            todo += [(first + length * times, end, 0), most, (begin, first, 0)]


def _apart(kinds: Sequence[int], begin: int, end: int) -> Counter[int]:
    """How far equal neighbours are apart, with how often they are."""
    seen: dict[int, int] = {}
    apart: Counter[int] = Counter()
    for index in range(begin, end):
        kind = kinds[index]
        if kind in seen:
            apart[index - seen[kind]] += 1
        seen[kind] = index
    return apart


def _longest(
    kinds: Sequence[int], numbers: Sequence[tuple[int, ...]], begin: int, end: int, length: int
) -> tuple[int, int, int]:
    """First item, length and turns of the longest part with turns of this length."""
    best, start = (begin, length, 1), begin
    grown: list[tuple[int, ...] | None] = []
    for index in range(begin, end - length + 1):
        more: tuple[int, ...] | None = None
        if index < end - length and kinds[index] == kinds[index + length]:
            more = _grown(numbers[index], numbers[index + length]) if numbers else ()
        before = grown[index - length - begin] if index - length >= start else more
        grown.append(more)
        if more is None or before != more:
            turns = (index - start) // length + 1
            if turns > best[2]:
                best = start, length, turns
            start = index + 1 if more is None else index - length + 1
    return best
