"""Laws of lowering: what moves is shared, frees are last uses, mistakes name the user's line."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pathways_lab.core.errors import PathwaysError
from pathways_lab.core.program import lowering
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.legality import check_plan, inputs_of, last_uses, outputs_of
from pathways_lab.core.program.lowering import (
    abreast,
    live,
    lower,
    moved,
    ordered,
    placed,
    planned,
    show,
    show_plan,
)
from pathways_lab.core.program.program import (
    Call,
    Line,
    Plan,
    Program,
    Signature,
    Step,
    Transfer,
    Value,
)
from pathways_lab.testing import Sketch, replicated
from tests.sim.drafts import Shape, random_plan

CUT = Layout((("x", 2),), (("x",),))
WHOLE = Layout((("x", 2),), ((),))


def line(number: int) -> Line:
    return Line("cell.py", number, f"line {number}")


def test_the_papers_example_becomes_four_calls_and_two_transfers() -> None:
    """b(a(v)) and a(c(a(v))) on three slices; v has no place of its own."""
    sketch = Sketch("figure 2")
    v = sketch.input(None, 8, "v")
    (x,) = sketch.call("a", 1, [v], [8])
    (y,) = sketch.call("b", 2, [x], [8])
    (z,) = sketch.call("c", 3, [x], [8])
    (w,) = sketch.call("a", 1, [z], [8])
    plan = lower(sketch.output(y, w).program({1: 2, 2: 2, 3: 2}))
    kinds = [type(s.node).__name__ for s in plan.steps]
    assert kinds == ["Call", "Transfer", "Transfer", "Call", "Call", "Transfer", "Call"]
    assert plan.slices == (1, 2, 3)
    assert plan.values[plan.inputs[0]].slice == 1
    assert len({s.node.function for s in plan.steps if isinstance(s.node, Call)}) == 3


def test_one_transfer_per_target_is_shared_and_follows_its_producer() -> None:
    sketch = Sketch("shared")
    v = sketch.input(1, 4)
    (x,) = sketch.call("a", 1, [v], [4])
    sketch.call("other", 1, [v], [4])
    used = [sketch.call("b", 2, [x], [4])[0] for _ in range(3)]
    plan = lower(sketch.output(*used).program({1: 2, 2: 2}))
    names = [s.node.name for s in plan.steps]
    assert [n.startswith("a.0 to") for n in names] == [False, True, False, False, False]


def test_resharding_on_one_slice_is_a_transfer_with_its_own_bytes() -> None:
    values = (Value((8,), "float32", 1, CUT, 16, "v"), Value((8,), "float32", 1, WHOLE, 32, "y"))
    program = Program(
        "reshard", values, (Call("f", 1, (0,), (1,), name="f", line=line(3)),), (0,), (1,),
        {"f": Signature("f", 1, (WHOLE,), (WHOLE,))},
    )  # fmt: skip
    plan = lower(program)
    transfer, call = (s.node for s in plan.steps)
    assert isinstance(transfer, Transfer)
    assert isinstance(call, Call)
    assert plan.values[transfer.output].nbytes == 32
    assert transfer.line == line(3)
    assert call.inputs == (transfer.output,)


def test_zero_size_and_scalar_values_move() -> None:
    values = (
        Value((0, 4), "bfloat16", 1, Layout((("x", 2),), ((), ())), 0),
        Value((), "float32", 1, Layout((("x", 2),), ()), 4),
        Value((), "float32", 2, Layout((("x", 4),), ()), 4),
    )
    row = Layout((("x", 4),), ((), ())), Layout((("x", 4),), ())
    program = Program(
        "small", values, (Call("f", 2, (0, 1), (2,), name="f"),), (0, 1), (2,),
        {"f": Signature("f", 2, row, (Layout((("x", 4),), ()),))},
    )  # fmt: skip
    plan = lower(program)
    assert [plan.values[s.node.output].nbytes for s in plan.steps[:2]] == [0, 4]


def test_dead_nodes_go_and_nodes_without_results_stay() -> None:
    sketch = Sketch("dead")
    v = sketch.input(1, 4)
    (x,) = sketch.call("a", 1, [v], [4])
    sketch.call("unused", 1, [x], [4])
    sketch.call("print", 1, [v], [])
    program = sketch.output(x).program({1: 1})
    assert [n.name for n in live(program).nodes] == ["a", "print"]
    assert [s.node.name for s in lower(program).steps] == ["a", "print"]


def test_a_program_is_on_the_slices_of_its_calls_also_where_they_read_and_make_nothing() -> None:
    sketch = Sketch("beep")
    sketch.call("beep", 2, [], [])
    plan = lower(sketch.output(*sketch.call("a", 1, [], [4])).program({1: 1, 2: 1}))
    assert plan.slices == (1, 2)


def test_every_output_is_a_buffer_of_its_own() -> None:
    """Returned inputs and values returned twice are copied: they may be donated apart."""
    sketch = Sketch("twice")
    v = sketch.input(1, 4, "v")
    (x,) = sketch.call("a", 1, [v], [4])
    plan = lower(sketch.output(x, x, v, v).program({1: 2}))
    assert len(set(plan.outputs)) == 4
    assert not set(plan.outputs) & set(plan.inputs)
    assert sum(isinstance(s.node, Transfer) for s in plan.steps) == 3


def test_an_unused_input_needs_no_place() -> None:
    sketch = Sketch("unused")
    sketch.input(None, 4)
    v = sketch.input(1, 4)
    plan = lower(sketch.output(*sketch.call("a", 1, [v], [4])).program({1: 1}))
    assert plan.values[plan.inputs[0]].slice is None


def test_frees_are_last_uses_and_never_outputs() -> None:
    sketch = Sketch("frees")
    v = sketch.input(1, 4)
    x, dead = sketch.call("a", 1, [v], [4, 4])
    (y,) = sketch.call("b", 1, [v, x], [4])
    plan = lower(sketch.output(y).program({1: 1}))
    assert plan.steps[0].frees == (dead,)
    assert plan.steps[1].frees == (v, x)


def test_the_key_is_the_content() -> None:
    def plan(size: int, name: str = "p") -> Plan:
        return lower(Sketch(name).chain(1, "a", "b", nbytes=size).program({1: 2}))

    assert plan(4).key == plan(4).key
    assert len({plan(4).key, plan(5).key, plan(4, "q").key}) == 3


def test_every_stage_prints() -> None:
    program = Sketch("show").chain(1, "a").program({1: 2})
    stage = placed(live(program))
    text = show(ordered(moved(stage)))
    assert "call a on slice s1 (%0)" in text
    assert "# sketch.py:1: a(...)" in text
    text = show_plan(lower(program))
    assert "\n  input  %0" in text
    assert "frees %0" in text
    assert "on slice s1 P(None), 1 B/device" in text


def bad(case: str) -> Program:
    """Programs that are wrong in one way each."""
    sketch = Sketch("bad")
    v = sketch.input(1, 4, "v")
    (x,) = sketch.call("a", 1, [v], [4], donated=(0,) if case in ("reuse", "return") else ())
    if case == "reuse":
        sketch.call("b", 1, [v], [4])
    if case == "double":
        (x,) = sketch.call("b", 1, [v, v], [4], donated=(0,))
    if case == "cycle":
        sketch.call("b", 1, [x + 2], [4])
        sketch.call("c", 1, [x + 1], [4])
    if case == "unknown":
        sketch.call("b", 1, [77], [4])
    if case == "nowhere":
        x = sketch.input(None, 4, "lost")
    sketch.output(v if case == "return" else x)
    program = sketch.program({1: 2})
    if case == "arity":
        signature = Signature("a", 1, (replicated(2),) * 2, (replicated(2),))
        program.signatures["a"] = signature
    return program


@pytest.mark.parametrize(
    ("case", "words", "where"),
    [
        ("reuse", "'b' uses value 0 (v), which was donated to 'a' at sketch.py:1", 2),
        ("return", "'a' consumes value 0 (v), which the program returns", 1),
        ("double", "'b' donates value 0 (v), which it also reads", 2),
        ("cycle", "which only a later node makes: the nodes form a cycle", 2),
        ("unknown", "'b' uses value 77, which nobody makes", 2),
        ("nowhere", "(lost) of 'bad' has no place", 0),
        ("arity", "'a' has 1 arguments, 'a' has 2", 1),
    ],
)
def test_a_mistake_is_told_at_the_users_line(case: str, words: str, where: int) -> None:
    with pytest.raises(PathwaysError) as raised:
        lower(bad(case))
    assert words in raised.value.failure.message
    assert raised.value.failure.line.number == where


@settings(deadline=None)
@given(st.integers(0, 10_000))
def test_random_plans_are_legal_and_in_a_legal_order(seed: int) -> None:
    plan = random_plan(random.Random(seed), {1: 2, 2: 2, 3: 4}, Shape(nodes=8), "p")
    assert check_plan(plan) is None
    known = set(plan.inputs)
    for step in plan.steps:
        assert known.issuperset(inputs_of(step.node))
        known.update(outputs_of(step.node))
        for value in inputs_of(step.node):
            where = plan.values[value]
            if isinstance(step.node, Call):
                assert where.slice == step.node.slice
    freed = [v for step in plan.steps for v in step.frees]
    assert len(freed) == len(set(freed))
    assert not set(freed) & set(plan.outputs)


def test_a_plan_that_frees_too_early_is_refused() -> None:
    """The control plane believes no client."""
    plan = lower(Sketch("p").chain(1, "a", "b").program({1: 1}))
    early = Step(plan.steps[0].node, (*plan.steps[0].frees, 1))
    wrong = Plan(
        plan.key, plan.name, plan.values, (early, plan.steps[1]), plan.inputs, plan.outputs,
        plan.slices,
    )  # fmt: skip
    failure = check_plan(wrong)
    assert failure is not None
    assert "frees other values" in failure.message
    assert last_uses((), ()) == {}


@pytest.mark.parametrize("window", [-1.0, 1e10, 1e308, math.inf, math.nan])
def test_a_plan_with_a_window_that_is_no_time_is_refused(window: float) -> None:
    """As microseconds some of them are no number, and the core would fail on it."""
    plan = lower(Sketch("p").chain(1, "a", "b").program({1: 1}))
    first = plan.steps[0]
    assert isinstance(first.node, Call)
    steps = (replace(first, node=replace(first.node, window=window)), *plan.steps[1:])
    failure = check_plan(replace(plan, steps=steps))
    assert failure is not None
    assert "has a window of" in failure.message


def test_transfers_name_slices_as_their_client_does() -> None:
    near, far = 1 << 32 | 1, 1 << 32 | 3
    sketch = Sketch("names")
    (x,) = sketch.call("a", near, [sketch.input(near, 4)], [4])
    (y,) = sketch.call("b", far, [x], [4])
    plan = lower(sketch.output(y).program({near: 2, far: 2}))
    assert [step.node.name for step in plan.steps] == ["a", "a.0 to s3", "b"]
    assert "transfer %1" in show_plan(plan)
    assert str(1 << 32)[:8] not in show_plan(plan)


def sources(program: Program) -> dict[int | None, list[Call | Transfer]]:
    """By slice, calls on it and transfers from it, in their order."""
    found: dict[int | None, list[Call | Transfer]] = {}
    for node in program.nodes:
        where = node.slice if isinstance(node, Call) else program.values[node.input].slice
        found.setdefault(where, []).append(node)
    return found


def held(program: Program) -> dict[int | None, list[int]]:
    """By slice, the bytes that it holds during each of its calls."""
    plan = planned(program)
    now: Counter[int | None] = Counter(plan.values[v].slice for v in plan.inputs)
    found: dict[int | None, list[int]] = {}
    for step in plan.steps:
        now.update(plan.values[v].slice for v in outputs_of(step.node))
        if isinstance(step.node, Call):
            found.setdefault(step.node.slice, []).append(now[step.node.slice])
        now.subtract(plan.values[v].slice for v in step.frees)
    return found


def test_slices_take_turns_and_each_keeps_its_own_order(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Program, Program]] = []

    def noted(program: Program) -> Program:
        seen.append((program, abreast(program)))
        return seen[-1][1]

    monkeypatch.setattr(lowering, "abreast", noted)
    for seed in range(300):
        shape = Shape(nodes=12, decide=0.2, exchange=0.2)
        random_plan(random.Random(seed), {1: 2, 2: 2, 3: 4}, shape, "p")
    assert sum(before.nodes != after.nodes for before, after in seen) > 30
    for before, after in seen:
        assert sources(before) == sources(after)
        for slice_id, most in held(before).items():
            pairs = zip(held(after)[slice_id], most, strict=True)
            assert all(now <= then for now, then in pairs), "no slice holds more"
        assert [node.when for node in before.nodes] == [node.when for node in after.nodes]


def test_microbatches_one_after_the_other_go_through_all_stages_at_once() -> None:
    sketch = Sketch("pipeline")
    outs = []
    for each in [sketch.input(1, 4) for _ in range(3)]:
        (x,) = sketch.call("a", 1, [each], [4])
        (y,) = sketch.call("b", 2, [x], [4])
        outs += sketch.call("c", 3, [y], [4])
    program = sketch.output(*outs).program({1: 1, 2: 1, 3: 1})
    orders = {True: [1, 2, 3] * 3, False: [1, 2, 1, 3, 2, 1, 3, 2, 3]}
    for written, order in orders.items():
        plan = lower(replace(program, written=written))
        calls = [step.node.slice for step in plan.steps if isinstance(step.node, Call)]
        assert calls == order
