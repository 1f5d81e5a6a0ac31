"""Cancelling, as a kernel sees it: handles, trees, everything; and what functions say of runs."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.client.lab.cancelling import UnderWay
from pathways_lab.client.lab.slice_request import slice_request
from pathways_lab.client.program.cell_program import CellProgram
from pathways_lab.core.program.folding import Folded, laid_out
from pathways_lab.core.program.program import Call
from pathways_lab.transport.codec import unpack
from tests.client.kit import FakeLab, fast

V = np.arange(1, 9, dtype=np.float32)


@pytest.fixture
def double(fake: FakeLab) -> Any:
    return pw.jit(lambda x: x * 2, on=fake.slice(4))


def test_a_handle_is_cancelled_and_says_so(fake: FakeLab, double: Any) -> None:
    fake.held = True
    first, second = double(V), double(V + 1)
    assert second.cancel()
    assert not first.is_ready()
    assert second.state == "failed"
    with pytest.raises(pw.PathwaysError, match="cancelled") as told:
        second.result(timeout=10)
    assert told.value.failure.kind == "cancelled"
    assert second.cancel(), "it still is"
    fake.release()
    np.testing.assert_array_equal(first.result(), V * 2)
    assert not first.cancel(), "its value is there"
    assert fake.count("cancel") == 1, "of what is known nobody is asked"


def test_a_call_that_has_not_left_yet_is_cancelled_too(
    fake: FakeLab, double: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast(monkeypatch)
    fake.held = True
    made = [double(V) for _ in range(12)]
    waits = [each for each in made if not each._buffer.run]
    assert waits, "calls that come faster than answers leave together, later"
    assert waits[-1].cancel()


def test_values_that_no_run_makes_cannot_be_cancelled(fake: FakeLab) -> None:
    put = pw.device_put(V, fake.slice(2))
    assert not put.cancel()
    put.delete()
    assert not put.cancel()
    assert fake.count("cancel") == 0


def test_a_lab_cancels_a_tree_or_everything(fake: FakeLab, double: Any) -> None:
    lab = UnderWay()
    lab.session = fake.session
    fake.held = True
    first, second, third = (double(V + n) for n in range(3))
    made = lab.cancel({"a": first, "b": [second, 3, V]})
    assert (made.cancelled, made.begun, made.going) == (2, 0, 0)
    assert lab.cancel(None, []) == pw.Cancelled(0, 0, 0)
    assert not third.is_ready()
    donated = pw.jit(lambda x: x + 1, donate_argnums=0)(third)
    assert lab.cancel(third) == pw.Cancelled(0, 0, 0), "it is the other call's by now"
    assert not donated.is_ready()
    assert lab.cancel().cancelled == 2
    assert donated.failure is not None
    for wrong in (len, object(), b"double", {"a": "double"}):
        with pytest.raises(pw.PathwaysError, match=r"functions of pw\.jit.*names of these, not "):
            lab.cancel(wrong)


def test_a_lab_cancels_the_runs_of_a_function_or_a_program(fake: FakeLab, double: Any) -> None:
    lab = UnderWay()
    lab.session = fake.session
    on = fake.slice(4)
    mapped = pw.pmap(lambda x: x + 3, devices=on)
    program = pw.program(lambda x: double(x) + 1, name="both")
    cell = CellProgram(lambda names: names.update(made=double(names["v"])), "train")

    class Model:
        step = pw.program(lambda self, x: double(x) + 2, static_argnums=0)

    model = Model()
    fake.held = True

    def begin() -> dict[str, Any]:
        return {
            "double": double(V), "mapped": mapped(V.reshape(4, 2)), "program": program(V),
            "method": model.step(V), "cell": cell({"v": V})["made"],
        }  # fmt: skip

    for wanted, names in (
        (double, {"double"}), ([mapped], {"mapped"}), (program, {"program"}),
        (model.step, {"method"}), (cell, {"cell"}), ("both", {"program"}), ("train", {"cell"}),
        ("<lambda>", {"double", "mapped", "method"}),
        ([double, {"a": program}], {"double", "program"}),
    ):  # fmt: skip
        made = begin()
        assert lab.cancel(wanted).cancelled == len(names)
        assert {key for key, handle in made.items() if handle.failure is not None} == names
        assert lab.cancel().cancelled == len(made) - len(names)
    assert lab.cancel("another") == pw.Cancelled(0, 0, 0)


def test_calls_of_a_function_are_cancelled_that_travel_with_others(
    fake: FakeLab, double: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast(monkeypatch)
    lab = UnderWay()
    lab.session = fake.session
    other = pw.jit(lambda x: x - 1, on=double.slice)
    x = pw.device_put(V, double.slice)
    fake.held, kept = True, [double(x)]
    for _ in range(3):  # they are registered, seen, and sent together
        kept += [f(x) for f in (double, other, double, double)]
        fake.connection.flush()
    (run,) = [run for run in fake.connection.runs if len(run.plans) > 1]
    assert [plan.name for plan in run.plans] == [kept[1].name, kept[2].name, *2 * [kept[1].name]]
    lab.cancel(double)
    assert fake.of("cancel")[-1]["steps"] == [[run.id, [0, 2, 3]]]
    assert run.id not in fake.of("cancel")[-1]["runs"]
    lab.cancel(other, double)
    assert run.id in fake.of("cancel")[-1]["runs"]


def test_the_window_of_a_lab_is_read_and_set(fake: FakeLab) -> None:
    lab = UnderWay()
    lab.session = fake.session
    assert lab.window == 0.1
    lab.window = 0
    assert lab.window == 0.0
    for wrong in (-1, "soon", float("inf"), None):
        with pytest.raises(pw.PathwaysError, match="is not a number of seconds"):
            lab.window = wrong  # type: ignore[assignment]
    assert slice_request(2, window=0.5).window == 0.5
    with pytest.raises(pw.PathwaysError, match="is not a number of seconds"):
        slice_request(2, window=-0.5)


def test_what_a_function_says_of_its_runs_goes_along(fake: FakeLab) -> None:
    on = fake.slice(2)

    def told(f: Any) -> list[tuple[bool, float | None]]:
        f(V).block_until_ready()
        plan = laid_out(unpack(Folded, fake.of("program")[-1]["plan"]))
        return [(s.node.keep, s.node.window) for s in plan.steps if isinstance(s.node, Call)]

    plain = pw.jit(lambda x: x + 1, on=on)
    slow = pw.jit(lambda x: x + 2, on=on, keep=True, window=0.5)
    prints = pw.jit(lambda x: (jax.debug.print("hello"), x + 3)[1], on=on)
    assert told(plain) == [(False, None)]
    assert told(slow) == [(True, 0.5)]
    assert told(prints) == [(True, None)]
    assert told(pw.program(lambda x: plain(slow(x)), window=0.25)) == [(True, 0.25), (False, 0.25)]
    for wrong in ({"keep": 1}, {"window": -1.0}, {"window": "soon"}):
        with pytest.raises(pw.PathwaysError, match="is not a "):
            pw.jit(lambda x: x, **wrong)
