"""Bundles in the plan of one call, and what the control plane takes for one."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pathways_lab.core.program.bundles import (
    Ranges,
    apart,
    arrays_of,
    bundle,
    in_ranges,
    is_bundle,
    may_have_bundles,
    with_bundles,
)
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.legality import check_plan
from pathways_lab.core.program.lowering import planned
from pathways_lab.core.program.program import NO_LINE, Call, Plan, Program, Transfer, Value
from pathways_lab.core.program.wellformed import Types, check_values
from pathways_lab.transport.codec import pack, unpack

SLICE = 7
WHOLE = Layout((("x", 2),), ((),))


def array(length: int) -> Value:
    return Value((length,), "float32", SLICE, WHOLE, 4 * length, f"a{length}")


def one_call(inputs: int, outputs: int, donated: tuple[int, ...] = ()) -> Plan:
    """A call that takes and gives arrays of different lengths."""
    values = tuple(array(n + 1) for n in range(inputs + outputs))
    given, made = tuple(range(inputs)), tuple(range(inputs, inputs + outputs))
    call = Call("f", SLICE, given, made, donated, "f")
    return planned(Program("f", values, (call,), given, made))


def leaf(value: Value) -> tuple[tuple[int, ...], str, Layout]:
    assert value.layout is not None
    return value.shape, value.dtype, value.layout


def types(plan: Plan) -> Types:
    (step,) = plan.steps
    call = step.node
    assert isinstance(call, Call)
    ins, outs = (
        tuple([leaf(v) for v in arrays_of([plan.values[n] for n in numbers])])
        for numbers in (call.inputs, call.outputs)
    )
    return Types(ins, outs)


@st.composite
def ranges(draw: st.DrawFn, count: int) -> Ranges:
    ends = sorted(draw(st.sets(st.integers(0, count), max_size=6)))
    return tuple((a, b) for a, b in zip(ends[::2], ends[1::2], strict=False) if b - a > 1)


@given(st.data())
def test_a_call_with_bundles_takes_and_gives_the_same_arrays(data: st.DataObject) -> None:
    inputs, outputs = data.draw(st.integers(2, 12)), data.draw(st.integers(2, 12))
    given, made = data.draw(ranges(inputs)), data.draw(ranges(outputs))
    consumed = [r for r in given if data.draw(st.booleans())]
    donated = tuple(p for a, b in consumed for p in range(a, b))
    plain = one_call(inputs, outputs, donated)
    plan = with_bundles(plain, given, made)
    assert types(plan) == types(plain)
    assert sum(v.nbytes for v in plan.values) == sum(v.nbytes for v in plain.values)
    assert len(plan.inputs) == inputs - sum(b - a - 1 for a, b in given)
    (step,) = plan.steps
    call = step.node
    assert isinstance(call, Call)
    heads = in_ranges(range(inputs), given)
    assert [heads[p] for p in call.donated] == [a for a, _ in consumed]
    assert check_plan(plan) is None
    assert check_values(plan, {SLICE: 2}, {("f", SLICE): types(plain)}) is None
    assert unpack(Plan, pack(plan)) == plan


def test_plans_of_one_call_may_have_bundles_and_others_may_not() -> None:
    plain = one_call(3, 3)
    assert may_have_bundles(plain)
    (step,) = plain.steps
    assert isinstance(step.node, Call)
    assert not may_have_bundles(replace(plain, steps=(step, step)))
    swapped = replace(step.node, inputs=(1, 0, 2))
    assert not may_have_bundles(replace(plain, steps=(replace(step, node=swapped),)))


def test_a_bundle_comes_apart_into_its_arrays() -> None:
    arrays = [array(n + 1) for n in range(4)]
    plan = apart("arrays of f", "key", arrays, NO_LINE)
    whole, *parts = plan.values
    assert arrays_of([whole]) == parts == arrays
    assert check_plan(plan) is None
    assert check_values(plan, {SLICE: 2}, {("key", SLICE): types(plan)}) is None


def refused(value: Value) -> str:
    plan = apart("arrays", "key", [array(n + 1) for n in range(4)], NO_LINE)
    failure = check_values(replace(plan, values=(value, *plan.values[1:])), {SLICE: 2}, {})
    return "" if failure is None else failure.message


def test_a_bundle_that_is_none_is_refused() -> None:
    whole = bundle([array(n + 1) for n in range(4)])
    assert is_bundle(whole)
    assert refused(whole) == ""
    first, *rest = whole.leaves
    assert "a shard has 40 bytes, and not 44" in refused(replace(whole, nbytes=44))
    assert "described otherwise than its arrays" in refused(replace(whole, shape=(5,)))
    assert "described otherwise" in refused(replace(whole, layout=Layout((("x", 9),), ((),))))
    assert "described otherwise" in refused(replace(whole, dtype="float32"))
    strange = replace(first, dtype="bundle")
    assert "'bundle' is not a type" in refused(replace(whole, leaves=(strange, *rest)))
    wide = replace(first, layout=Layout((("x", 4),), ((),)))
    assert "mesh of 4 devices" in refused(replace(whole, leaves=(wide, *rest)))
    assert "'bundle' is not a type" in refused(replace(whole, leaves=()))


def test_a_bundle_is_never_transferred() -> None:
    whole = bundle([array(1), array(2)])
    move = Transfer(0, 1)
    plan = planned(Program("move", (whole, whole), (move,), (0,), (1,)))
    failure = check_values(plan, {SLICE: 2}, {})
    assert failure is not None
    assert "transfers a bundle" in failure.message
