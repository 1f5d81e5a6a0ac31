"""Bundles in the plan of one call, and what the control plane takes for one."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_lab.core.program import wellformed
from pathways_lab.core.program.bundles import (
    Ranges,
    apart,
    arrays_of,
    bundle,
    gathered,
    in_ranges,
    is_bundle,
    may_have_bundles,
    with_bundles,
)
from pathways_lab.core.program.concatenate import Part, in_series
from pathways_lab.core.program.folding import Folded, folded, laid_out
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


@st.composite
def programs(draw: st.DrawFn) -> Plan:
    """Calls of results of earlier ones, often of many side by side, and transfers of some."""
    values, nodes, alive = [array(n + 1) for n in range(4)], [], list[list[int]]([[0, 1, 2, 3]])
    for number in range(draw(st.integers(1, 5))):
        given: list[int] = []
        for _ in range(draw(st.integers(1, 3))):
            among = draw(st.sampled_from(alive))
            begin = draw(st.integers(0, len(among) - 1))
            given += among[begin : begin + draw(st.integers(1, 6))]
        donated = set(draw(st.sampled_from(alive))) if draw(st.booleans()) else set()
        at = tuple(p for p, v in enumerate(given) if v in donated and given.count(v) == 1)
        gone = {given[p] for p in at}
        made = list(range(len(values), len(values) + draw(st.integers(1, 6))))
        values += [array(v + 1) for v in made]
        nodes.append(Call(f"f{number}", SLICE, tuple(given), tuple(made), at, f"f{number}"))
        alive = [left for many in [*alive, made] if (left := [v for v in many if v not in gone])]
        if not alive:
            break
        if draw(st.booleans()):
            moved = draw(st.sampled_from(draw(st.sampled_from(alive))))
            nodes.append(Transfer(moved, len(values), "moved"))
            alive.append([len(values)])
            values.append(values[moved])
    left = [v for many in alive for v in many if v > 3]
    outputs = draw(st.lists(st.sampled_from(left), unique=True, max_size=4)) if left else []
    return planned(Program("p", tuple(values), tuple(nodes), (0, 1, 2, 3), tuple(outputs)))


@given(programs())
def test_calls_between_which_arrays_are_gathered_take_and_give_the_same(plain: Plan) -> None:
    assert check_plan(plain) is None
    plan = gathered(plain, 2)
    assert check_plan(plan) is None
    assert [plan.values[v] for v in plan.inputs] == [plain.values[v] for v in plain.inputs]
    assert [plan.values[v] for v in plan.outputs] == [plain.values[v] for v in plain.outputs]
    for step, before in zip(plan.steps, plain.steps, strict=True):
        new, old = step.node, before.node
        for attribute in ("inputs", "outputs") if isinstance(old, Call) else ("input", "output"):
            found, wanted = (
                [of.values[v] for v in (n if isinstance(n, tuple) else (n,))]
                for of, n in ((plan, getattr(new, attribute)), (plain, getattr(old, attribute)))
            )
            assert arrays_of(found) == wanted
        ends = [
            arrays_of([of.values[v] for v in s.frees]) for of, s in ((plan, step), (plain, before))
        ]
        assert sorted(ends[0], key=repr) == sorted(ends[1], key=repr)
        if isinstance(old, Call):
            assert isinstance(new, Call)
            taken = arrays_of([plan.values[new.inputs[p]] for p in new.donated])
            assert taken == [plain.values[old.inputs[p]] for p in old.donated]
    assert gathered(plan, 2) is plan or len(plan.values) < len(plain.values)


def test_arrays_between_two_calls_are_a_bundle_unless_one_goes_another_way() -> None:
    first = Call("f", SLICE, (0,), (1, 2, 3, 4), (), "f")
    second = Call("g", SLICE, (1, 2, 3, 4), (5,), (0, 1, 2, 3), "g")

    def between(*nodes: Call | Transfer, outputs: tuple[int, ...] = (5,), least: int = 2) -> int:
        """How many arrays one bundle has at most."""
        values = tuple(array(n + 1) for n in range(7))
        plan = gathered(planned(Program("p", values, nodes, (0,), outputs)), least)
        return max(len(value.leaves) for value in plan.values)

    assert between(first, second) == 4
    assert between(first, second, least=5) == 0
    assert between(first, replace(second, donated=(0, 1, 2))) == 3
    assert between(first, replace(second, inputs=(1, 3, 2, 4))) == 0
    assert between(first, replace(second, donated=()), outputs=(5, 2)) == 2
    assert between(first, Transfer(3, 6, "copy"), replace(second, donated=())) == 2
    read = Call("h", SLICE, (4,), (6,), (), "h")
    assert between(first, read, second) == 3


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


def series(calls: int, arrays: int = 300) -> Plan:
    """Calls, each of which takes the bundle that the one before it made, as they arrive."""
    one = with_bundles(one_call(arrays, arrays), ((0, arrays),), ((0, arrays),))
    parts = [Part(one, ((number - 1, 0),), ()) for number in range(calls)]
    plan = in_series("f", [replace(parts[0], sources=((-1, 0),)), *parts[1:]])
    return laid_out(unpack(Folded, msgpack.unpackb(msgpack.packb(pack(folded(plan))))))


def test_a_bundle_is_described_once_however_many_values_are_like_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []
    whole = wellformed.wrong_leaves
    monkeypatch.setattr(
        wellformed, "wrong_leaves", lambda *all: looked.append(len(all[0])) or whole(*all)
    )
    for calls in (2, 8):
        plan = series(calls)
        assert len(plan.values) == calls + 1
        assert len(msgpack.packb(pack(folded(plan)))) < len(msgpack.packb(pack(plan.values[0]))) * 3
        assert check_values(plan, {SLICE: 2}, {}) is None
    assert looked == [300] * 4, "the bundle that a call takes, and the one that it makes"


def test_a_call_that_takes_what_another_makes_is_looked_at_too() -> None:
    one = one_call(1, 1)
    (step,) = one.steps
    known = {("f", SLICE): types(one)}
    for inputs, outputs in (((0, 1), ()), ((), (0, 1)), ((), ())):
        other = replace(step, node=replace(step.node, inputs=inputs, outputs=outputs))
        failure = check_values(replace(one, steps=(step, other)), {SLICE: 2}, known)
        assert failure is not None
        assert "other arguments or results" in failure.message
