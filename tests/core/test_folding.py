"""Plans that repeat themselves: folded and laid out they are the same, and cost a turn."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pathways_lab.core.program.folding import (
    Folded,
    Steps,
    Turns,
    Values,
    fold,
    folded,
    laid_out,
)
from pathways_lab.core.program.lowering import lower
from pathways_lab.core.program.program import NO_LINE, Call, Plan, When
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.executor.local_plans import Book, Reading
from pathways_lab.testing import Sketch
from pathways_lab.transport.codec import pack, unpack
from tests.sim.drafts import Shape, random_plan


def loop(turns: int, *, inner: int = 1) -> Plan:
    """Turns over two slices, each of which keeps a value of an earlier one."""
    sketch = Sketch("loop")
    x = sketch.input(1, 4, "x")
    for _ in range(turns):
        for _ in range(inner):
            (y,) = sketch.call("f", 1, [x], [4])
            (x,) = sketch.call("g", 2, [y], [4])
        (x,) = sketch.call("h", 1, [x, y], [4])
    program = sketch.output(x).program({1: 1, 2: 1})
    nodes = tuple([replace(node, line=NO_LINE) for node in program.nodes])
    return lower(replace(program, nodes=nodes))


def deciding(turns: int) -> Plan:
    """The same, where each turn waits for a value of the one before."""
    plan, decider, steps = loop(turns), None, []
    for step in plan.steps:
        when = None if decider is None else When(decider, 0, 2)
        steps.append(replace(step, node=replace(step.node, when=when)))
        if isinstance(step.node, Call) and step.node.name == "h":
            (decider,) = step.node.outputs
    return replace(plan, steps=tuple(steps))


def reading_of(plan: Plan) -> Reading:
    """On a host that has one of two slices."""
    book = Book("host", "island")
    for number, host in ((1, "host"), (2, "other")):
        island = "island" if host == "host" else "beside"
        on = SliceBinding(number, "client", island, (1,), ("x",), ((host, 0),), "cpu")
        book.bind(on, "lane" if host == "host" else "")
    book.program(plan)
    return book.reading(plan.key)


def sent(plan: Plan) -> bytes:
    wire: bytes = msgpack.packb(pack(folded(fold(plan))))
    return wire


def arrived(wire: bytes) -> Plan:
    return laid_out(unpack(Folded, msgpack.unpackb(wire)))


def same(plan: Plan, other: Plan) -> bool:
    """All fields, and the steps one by one in any order."""
    order = random.Random(1).sample(range(len(plan.steps)), len(plan.steps))
    return (
        replace(plan, steps=(), values=()) == replace(other, steps=(), values=())
        and tuple(other.steps) == tuple(plan.steps)
        and tuple(other.values) == tuple(plan.values)
        and [other.steps[n] for n in order] == [plan.steps[n] for n in order]
        and tuple(other.steps[3:9]) == tuple(plan.steps[3:9])
    )


@pytest.mark.parametrize(("turns", "inner"), [(1, 1), (4, 1), (30, 1), (7, 5), (5, 40)])
def test_a_plan_arrives_as_it_was(turns: int, inner: int) -> None:
    plan = loop(turns, inner=inner)
    assert same(plan, arrived(sent(plan)))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 20))
def test_any_plan_arrives_as_it_was(seed: int) -> None:
    plan = random_plan(random.Random(seed), {1: 2, 2: 2, 3: 4}, Shape(nodes=20), "p")
    assert same(plan, arrived(sent(plan)))


def test_a_loop_is_as_large_as_its_turn() -> None:
    sizes = [len(sent(loop(turns))) for turns in (100, 1000, 3000)]
    assert max(sizes) - min(sizes) < 100 < max(sizes) < 3000


def test_a_host_reads_a_turn_once_and_lays_out_what_it_looks_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = arrived(sent(loop(2000)))
    made: list[int] = []
    plain: Callable[[Steps, int], object] = Steps._laid_out
    monkeypatch.setattr(Steps, "_laid_out", lambda self, n: made.append(n) or plain(self, n))
    reading = reading_of(laid_out(folded(plan)))
    assert not made
    assert reading.plan.steps[5000] == plan.steps[5000]
    assert made == [5000]


@pytest.mark.parametrize("turns", [1, 3, 30])
def test_a_host_reads_the_same_in_a_turn_as_in_all_of_them(turns: int) -> None:
    plan = deciding(turns)
    short = arrived(sent(plan))
    assert isinstance(short.steps, Steps) == (turns == 30)
    one, other = reading_of(plan), reading_of(short)
    assert tuple(one.ours) == tuple(other.ours)
    assert tuple(one.places) == tuple(other.places)
    assert one.end == other.end
    count, values = len(plan.steps), range(-3, len(plan.values) + 3)
    assert [one.decides(n) for n in range(count)] == [other.decides(n) for n in range(count)]
    assert list(map(one.decisions.cases, values)) == list(map(other.decisions.cases, values))
    assert sum(bool(other.decides(n)) for n in range(count)) == turns - 1


@given(st.integers(0, 120), st.integers(0, 120))
def test_values_that_a_range_of_steps_frees(one: int, other: int) -> None:
    plan = loop(30)
    first, last = sorted((one, other))
    last = min(last, len(plan.steps))
    steps = fold(plan).steps
    assert isinstance(steps, Steps)
    freed = [value for step in plan.steps[first:last] for value in step.frees]
    assert steps.freed(first, last, range(len(plan.values))) == freed
    assert steps.freed(first, last, freed[:2]) == freed[:2]


def wrong_forms() -> dict[str, Folded]:
    form = folded(fold(loop(30)))
    (at, turns) = next((n, t) for n, t in enumerate(form.steps) if t.times > 1)

    def with_turns(changed: Turns) -> Folded:
        return replace(form, steps=(*form.steps[:at], changed, *form.steps[at + 1 :]))

    flat = [kind for part in form.values for kind in part.kinds * part.times]
    last = replace(form.kinds[flat[-1]], slice=9 - (form.kinds[flat[-1]].slice or 0))
    new = len(form.kinds)
    return {
        "too many": with_turns(replace(turns, times=1 << 40)),
        "none": with_turns(replace(turns, times=0)),
        "empty": with_turns(replace(turns, steps=(), strides=())),
        "other strides": with_turns(replace(turns, strides=turns.strides[1:])),
        "other numbers": with_turns(replace(turns, strides=((1,) * 9, *turns.strides[1:]))),
        "values that are not there": replace(form, values=form.values[:1]),
        "other slices": replace(
            form, kinds=(*form.kinds, last), values=(Values((*flat[:-9], *[new] * 9), 1),)
        ),
        "a kind that is not there": replace(form, values=(Values((*flat[:-1], new), 1),)),
        "a kind before the first": replace(form, values=(Values((*flat[:-1], -1), 1),)),
    }


@pytest.mark.parametrize("what", wrong_forms())
def test_a_form_that_no_plan_folds_into_is_refused(what: str) -> None:
    with pytest.raises(ValueError):
        laid_out(wrong_forms()[what])
