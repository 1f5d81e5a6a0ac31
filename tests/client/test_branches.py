"""``pw.cond``, ``pw.switch`` and ``pw.until``: equal to plain JAX, whatever is decided."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pathways_lab as pw
from pathways_lab.core.errors import PathwaysError
from pathways_lab.core.memory.liveness import profile
from tests.client.kit import FakeLab


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeLab]:
    with FakeLab() as made:
        yield made


@pytest.fixture(scope="module")
def places(fake: FakeLab) -> list[pw.Slice]:
    return [fake.slice(2), fake.slice(2, island="island1")]


def functions(places: list[pw.Slice]) -> list[Callable[[Any], Any]]:
    double = pw.jit(lambda x: x * 2, on=places[0], name="double")
    less = pw.jit(lambda x: x - 3, on=places[1], name="less")
    half = pw.jit(lambda x: x / 2, on=places[0], name="half")
    return [double, less, half]


@pytest.mark.parametrize("value", [1.0, -1.0])
def test_one_branch_runs_and_the_other_is_skipped(
    fake: FakeLab, places: list[pw.Slice], value: float
) -> None:
    double, less, half = functions(places)

    @pw.program
    def choose(x: Any) -> Any:
        return half(pw.cond(x.sum() > 0, double, lambda v: double(less(v)), half(x)))

    fake.skipped.clear()
    x = np.full(4, value, np.float32)
    expected = x / 2 * 2 / 2 if value > 0 else (x / 2 - 3) * 2 / 2
    np.testing.assert_array_equal(choose(x).result(), expected)
    assert ("less" in fake.skipped) == (value > 0)
    if value > 0:
        assert any(" to " in name for name in fake.skipped), "transfers are skipped too"


def test_a_switch_clamps_its_index(fake: FakeLab, places: list[pw.Slice]) -> None:
    double, less, half = functions(places)

    @pw.program
    def route(which: Any, x: Any) -> Any:
        return pw.switch(which, [double, half, lambda v: double(less(v))], x)

    x = np.arange(4, dtype=np.float32)
    for which in (-2, 0, 1, 2, 9):
        expected = (x * 2, x / 2, (x - 3) * 2)[min(max(which, 0), 2)]
        np.testing.assert_array_equal(route(np.int32(which), x).result(), expected)


@pytest.mark.parametrize("start", [500.0, 100.0, 30.0, 0.5])
def test_a_loop_ends_where_its_condition_says(
    fake: FakeLab, places: list[pw.Slice], start: float
) -> None:
    double, less, _ = functions(places)

    @pw.program
    def grow(x: Any) -> Any:
        return pw.until(lambda v: v.max() > 120, lambda v: less(double(v)), x, at_most=5)

    x = np.full(4, start, np.float32)
    expected = x
    for _ in range(5):
        if expected.max() > 120:
            break
        expected = expected * 2 - 3
    np.testing.assert_array_equal(grow(x).result(), expected)


def test_branches_read_values_from_around_and_nest(fake: FakeLab, places: list[pw.Slice]) -> None:
    double, less, half = functions(places)

    @pw.program
    def nested(x: Any) -> Any:
        y = double(x)

        def inner(v: Any) -> Any:
            return pw.cond(y.sum() > 10, lambda w: double(w + y), half, v)

        return pw.cond(x.sum() > 0, inner, lambda v: double(less(y)), x)

    for value in (-1.0, 1.0, 5.0):
        x = np.full(4, value, np.float32)
        y = x * 2
        inner = (x + y) * 2 if y.sum() > 10 else x / 2
        expected = inner if x.sum() > 0 else (y - 3) * 2
        np.testing.assert_array_equal(nested(x).result(), expected)


def test_outside_of_a_program_the_value_is_read(fake: FakeLab, places: list[pw.Slice]) -> None:
    double, _, half = functions(places)
    x = double(np.ones(4, np.float32))
    np.testing.assert_array_equal(pw.cond(x.sum() > 0, half, double, x).result(), np.ones(4))
    np.testing.assert_array_equal(pw.switch(x.max() - 1, [half, double], x).result(), np.full(4, 4))
    grown = pw.until(lambda v: v.max() > 20, double, x, at_most=9)
    np.testing.assert_array_equal(grown.result(), np.full(4, 32))


def test_errors_name_the_difference_and_the_remedy(places: list[pw.Slice]) -> None:
    double, less, half = functions(places)
    x = np.ones(4, np.float32)
    for branches, text in (
        ((double, lambda v: double(v)[:2]), r"result 0 .*float32\[4\].*float32\[2\]"),
        ((double, lambda v: (v, v)), "all branches give the same structure"),
        ((double, less), "on different slices"),
    ):
        with pytest.raises(PathwaysError, match=text):
            pw.program(lambda v, b=branches: pw.cond(v.sum() > 0, *b, half(v)))(x)
    with pytest.raises(PathwaysError, match=r"one number.*\(4,\)"):
        pw.program(lambda v: pw.until(lambda w: half(w) > 0, half, v, at_most=2))(x)
    with pytest.raises(PathwaysError, match=r"pw\.cond\(value, f, g, \*args\)"):
        pw.program(lambda v: double(v) if half(v).sum() > 0 else v)(x)
    with pytest.raises(PathwaysError, match=r"use jax\.lax\.cond"):
        pw.jit(lambda v: pw.cond(v.sum() > 0, double, half, v), on=places[0])(x).result()
    with pytest.raises(PathwaysError, match="0 to 10000"):
        pw.until(lambda v: v, double, x, at_most=-1)
    with pytest.raises(PathwaysError, match=r"at_most=2\.5"):
        pw.until(lambda v: v, double, x, at_most=2.5)  # type: ignore[arg-type]


OPERATIONS = st.deferred(
    lambda: st.one_of(
        st.sampled_from(["double", "less", "half", "plus"]).map(lambda name: (name,)),
        st.tuples(st.just("cond"), st.integers(-20, 20), BODY, BODY),
        st.tuples(st.just("switch"), BODY, BODY, BODY),
        st.tuples(st.just("until"), st.integers(-20, 20), BODY, st.integers(0, 3)),
    )
)
BODY = st.lists(OPERATIONS, min_size=1, max_size=2)


def played(body: list[Any], x: Any, kit: dict[str, Any]) -> Any:
    for kind, *rest in body:
        if kind == "cond":
            limit, f, g = rest
            x = kit["cond"](
                x.sum() > limit,
                lambda v, f=f: kit["end"](played(f, v, kit)),
                lambda v, g=g: kit["end"](played(g, v, kit)),
                x,
            )
        elif kind == "switch":
            branches = [lambda v, b=b: kit["end"](played(b, v, kit)) for b in rest]
            x = kit["switch"](x.astype(jnp.int32).max() % 3, branches, x)
        elif kind == "until":
            limit, inner, most = rest
            x = kit["until"](
                lambda v, limit=limit: v.min() > limit,
                lambda v, inner=inner: kit["end"](played(inner, v, kit)),
                x,
                at_most=most,
            )
        else:
            x = kit[kind](x)
    return kit["end"](x)


def until(done: Any, body: Any, state: Any, *, at_most: int) -> Any:
    for _ in range(at_most):
        if done(state):
            break
        state = body(state)
    return state


PLAIN = {
    "double": lambda x: x * 2, "less": lambda x: x - 3, "half": lambda x: x / 2,
    "plus": lambda x: x + 1, "end": lambda x: x + 0, "until": until,
    "cond": lambda pred, f, g, x: f(x) if pred else g(x),
    "switch": lambda index, branches, x: branches[min(max(int(index), 0), 2)](x),
}  # fmt: skip


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(BODY, st.integers(-8, 8))
def test_random_programs_that_decide_equal_plain_jax(
    fake: FakeLab, places: list[pw.Slice], body: list[Any], start: int
) -> None:
    double, less, half = functions(places)
    kit = {
        "double": double, "less": less, "half": half, "plus": lambda x: x + 1,
        "end": pw.jit(lambda x: x + 0, on=places[0], name="end"), "until": pw.until,
        "cond": pw.cond, "switch": pw.switch,
    }  # fmt: skip
    x = np.arange(4, dtype=np.float32) + start
    program = pw.program(lambda v: played(body, kit["end"](v), kit))
    np.testing.assert_array_equal(program(x).result(), played(body, jax.device_put(x), PLAIN))
    assert "func.func public" in program.mlir(x), "the dialect has verified it"


def test_a_program_that_decides_is_not_fused(places: list[pw.Slice]) -> None:
    double, less, _ = functions(places)

    @pw.program(fuse=True)
    def choose(x: Any) -> Any:
        return pw.cond(x.sum() > 0, double, lambda v: double(less(v)), double(x))

    with pytest.raises(PathwaysError, match="this program decides which of its calls run"):
        choose(np.zeros(4, np.float32))


def test_the_memory_of_a_loop_does_not_grow_with_its_turns(places: list[pw.Slice]) -> None:
    double, less, _ = functions(places)
    peaks = []
    for most in (3, 30):

        @pw.program
        def loop(x: Any, most: int = most) -> Any:
            return pw.until(lambda v: v[0] > 5, lambda v: less(double(v)), double(x), at_most=most)

        loop(np.ones(4, np.float32))
        plan = loop.last.prepared.plan
        reserved = profile(plan, plan.inputs, [0] * len(plan.steps))
        peaks.append({on: max(bytes) for on, bytes in reserved.items()})
    assert peaks[0] == peaks[1]
