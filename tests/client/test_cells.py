"""A cell as one program: names, containers, and nothing left behind when it fails."""

from __future__ import annotations

import textwrap
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.client.lab import stats
from pathways_lab.client.program import cell_program
from pathways_lab.client.program.cell_program import CellProgram
from tests.client.kit import FakeLab

X = np.arange(8, dtype=np.float32)


def cell(source: str, name: str = "cell") -> CellProgram:
    """What the magic makes of a cell's text."""
    code = compile(textwrap.dedent(source), "<cell>", "exec")
    return CellProgram(lambda names: exec(code, names), name)


@pytest.fixture
def f(fake: FakeLab) -> Any:
    return pw.jit(lambda x: x * 2, on=fake.slice(4), in_shardings=P("x"), name="f")


def test_names_that_it_assigns_become_handles(fake: FakeLab, f: Any) -> None:
    names = cell("y = f(x)\nz = jnp.sum(y) + x[0]\nn = 3\ntext = 'plain'\nsame = x")(
        {"f": f, "x": X, "jnp": jnp}
    )
    assert set(names) == {"y", "z", "n", "text", "same"}
    np.testing.assert_array_equal(names["y"].result(), X * 2)
    assert float(names["z"]) == X.sum() * 2
    assert (names["n"], names["text"]) == (3, "plain")
    assert names["same"] is X, "what it does not touch stays what it is"
    assert fake.count("submit") == 1


def test_pytrees_are_searched_for_arrays(fake: FakeLab, f: Any) -> None:
    Pair = namedtuple("Pair", "a b")
    params = {"layer": [Pair(X, "relu"), (X + 1, None)], "step": 3}
    names = cell("new = jax.tree.map(lambda p: f(p) if hasattr(p, 'shape') else p, params)")(
        {"f": f, "params": params, "jax": jax}
    )
    new = names["new"]
    assert jax.tree.structure(new) == jax.tree.structure(params)
    np.testing.assert_array_equal(new["layer"][0].a.result(), X * 2)
    np.testing.assert_array_equal(new["layer"][1][0].result(), (X + 1) * 2)
    assert (new["layer"][0].b, new["step"]) == ("relu", 3)
    assert isinstance(params["layer"][0].a, np.ndarray), "the original is untouched"


def test_containers_changed_in_place_are_changed(fake: FakeLab, f: Any) -> None:
    losses: list[Any] = []
    history = {"losses": losses, "last": None, "first": X}
    alias = losses
    names = cell(
        """
        for step in range(2):
            x = f(x)
            losses.append(x.sum())
        history["last"] = x
        history.pop("first")
        everything = [losses, history]
        """
    )({"f": f, "x": X, "losses": losses, "history": history})
    assert alias is losses
    assert [float(v) for v in losses] == [X.sum() * 2, X.sum() * 4]
    assert history["losses"] is losses, "one list stays one list"
    assert set(history) == {"losses", "last"}
    np.testing.assert_array_equal(history["last"].result(), X * 4)
    assert names["everything"][0] is losses
    assert names["everything"][1] is history
    assert "losses" not in names


def test_a_cell_that_fails_leaves_nothing_behind(fake: FakeLab, f: Any) -> None:
    losses: list[Any] = [X]
    program = cell("losses.append(f(losses[0]))\nif losses[-1].sum() > 0: pass", "training")
    with pytest.raises(pw.PathwaysError, match="control flow depends") as caught:
        program({"f": f, "losses": losses})
    assert caught.value.failure.program == "training"
    assert (caught.value.failure.line.file, caught.value.failure.line.number) == ("<cell>", 2)
    assert len(losses) == 1
    assert losses[0] is X
    assert fake.count("submit") == 0


def test_running_it_again_captures_nothing(fake: FakeLab, f: Any) -> None:
    program = cell("w = w - 0.5 * f(w)\nlog.append(w)", "step")
    log: list[Any] = []
    names = program({"f": f, "w": X, "log": log})
    for expected in (2, 3):
        before = stats.work.captured
        names = program({"f": f, "w": names["w"], "log": log})
        # One more capture: a handle in place of the array; and the log has grown.
        assert stats.work.captured - before == 1
        assert len(log) == expected
    before = stats.work.captured
    again = cell("y = f(w)")
    for _ in range(3):
        again({"f": f, "w": names["w"]})
    assert stats.work.captured - before == 1
    np.testing.assert_allclose(names["w"].result(), 0)


def test_python_values_are_part_of_the_program(fake: FakeLab, f: Any) -> None:
    program = cell("y = f(x)\nfor _ in range(n): y = y + rate")
    values = {"f": f, "x": X, "n": 2, "rate": 0.5}
    np.testing.assert_allclose(program(values)["y"].result(), X * 2 + 1)
    np.testing.assert_allclose(program({**values, "n": 4})["y"].result(), X * 2 + 2)
    np.testing.assert_allclose(program({**values, "rate": 1.0})["y"].result(), X * 2 + 2)


class Settings:
    rate = 1.0

    def __init__(self) -> None:
        self.rates: dict[Any, Any] = {"inner": SimpleNamespace(rate=1.0), "w": X}

    def scaled(self, x: Any) -> Any:
        return x * LIST[0]


LIST = [1.0]


def scaled(x: Any) -> Any:
    return jax.tree.map(lambda part: part * LIST[0], x)


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("given.rate * f(x)", lambda s: setattr(s, "rate", 3.0)),
        ("given.rate * f(x)", lambda s: setattr(Settings, "rate", 3.0)),
        ("given.rates['inner'].rate * f(x)", lambda s: setattr(s.rates["inner"], "rate", 3.0)),
        ("len(given.rates) * f(x) / 2", lambda s: s.rates.update(dict.fromkeys(range(4), 0))),
        ("given.scaled(f(x))", lambda s: LIST.__setitem__(0, 3.0)),
        ("scaled(f(x))", lambda s: LIST.__setitem__(0, 3.0)),
        ("part(f(x))", lambda s: LIST.__setitem__(0, 3.0)),
        ("f(given.rates['w'])", lambda s: s.rates.update(w=X * 3)),
    ],
)
def test_what_objects_and_functions_say_is_what_they_say_now(
    fake: FakeLab, f: Any, monkeypatch: Any, text: str, change: Callable[[Settings], Any]
) -> None:
    monkeypatch.setattr(Settings, "rate", 1.0)
    monkeypatch.setitem(globals(), "LIST", [1.0])
    given, program = Settings(), cell(f"y = {text}")
    values = {"f": f, "x": X, "given": given, "scaled": scaled, "part": partial(scaled)}
    before = stats.work.captured
    for _ in range(2):
        np.testing.assert_allclose(program(values)["y"].result(), X * 2)
    assert stats.work.captured - before == 1
    change(given)
    np.testing.assert_allclose(program(values)["y"].result(), X * 6)
    assert stats.work.captured - before == 2


@pytest.mark.parametrize("kind", [list, tuple, set, dict.fromkeys])
def test_large_containers_of_numbers_are_taken_in_at_once(kind: Callable[[Any], Any]) -> None:
    """Not entry by entry at every call; and whatever changes in them is seen."""

    def read(entries: list[Any]) -> tuple[Any, Any]:
        held = SimpleNamespace(entries=kind(entries))
        reads = cell_program._Reads({"here": held.entries})
        reads._reach(held.entries)
        assert len(reads.pattern) + len(reads.state) < 10
        # A set is known by its identity, and by what it says.
        return None if kind is set else reads.key, reads.state

    entries: list[Any] = [*range(2, 100_000), "text", b"bytes", 2.5, None, 0]
    key, state = read(entries)
    assert read(list(entries)) == (key, state)
    for other in (1, False, -0.0, 0j, "0", b"0", ""):
        changed_key, changed_state = read([*entries[:-1], other])
        assert kind is set or changed_key != key
        assert changed_state != state


def test_what_is_reached_may_be_a_long_chain(fake: FakeLab, f: Any) -> None:
    chain = SimpleNamespace(rate=2.0, after=None)
    for _ in range(5000):
        chain = SimpleNamespace(rate=1.0, after=chain)
    names = cell("y = f(x) * chain.rate")({"f": f, "x": X, "chain": chain})
    np.testing.assert_allclose(names["y"].result(), X * 2)


def test_handles_reached_through_objects_are_inputs(fake: FakeLab, f: Any) -> None:
    class Trainer:
        pass

    trainer = Trainer()
    trainer.w = f(X)  # type: ignore[attr-defined]
    trainer.w.block_until_ready()  # type: ignore[attr-defined]
    before = fake.count("submit")
    names = cell("y = f(trainer.w) + trainer.w * 2")({"f": f, "trainer": trainer})
    np.testing.assert_allclose(names["y"].result(), X * 8)
    assert fake.count("submit") - before == 1


def test_functions_of_the_cell(fake: FakeLab, f: Any) -> None:
    names = cell("def twice(v):\n    return f(f(v))\ny = twice(x)")({"f": f, "x": X})
    np.testing.assert_allclose(names["y"].result(), X * 4)
    assert callable(names["twice"])


def test_capture_without_running(fake: FakeLab, f: Any) -> None:
    program = cell("y = f(x)")
    captured = program.capture({"f": f, "x": X})
    assert captured.inputs == ("x",)
    assert "call f" in program.ir()
    assert fake.count("submit") == 0


def test_the_same_array_under_two_names_is_one_input(fake: FakeLab, f: Any) -> None:
    program, values = cell("z = f(x) + y"), {"f": f, "x": X, "y": X}
    assert program.capture(values).inputs == ("x",)
    np.testing.assert_allclose(program(values)["z"].result(), X * 3)


def test_a_call_that_does_not_fit_the_function_is_refused_at_its_line(fake: FakeLab) -> None:
    double = pw.jit(lambda x: 2 * x, on=fake.slice(1))
    with pytest.raises(pw.PathwaysError, match="unexpected keyword argument 'y'") as caught:
        double(np.ones(2), y=3)  # here
    assert caught.value.failure.line.text == "double(np.ones(2), y=3)  # here"
    with pytest.raises(pw.PathwaysError, match="incompatible shapes") as caught:
        double(np.ones(2)) + double(np.ones(3))
    assert caught.value.failure.line.text == "double(np.ones(2)) + double(np.ones(3))"


def test_python_that_reads_an_argument_is_told_of_static_ones(fake: FakeLab) -> None:
    flagged = pw.jit(lambda x, flag: x if flag else -x, on=fake.slice(1))
    with pytest.raises(pw.PathwaysError, match="Python control flow") as caught:
        flagged(np.ones(2), True)
    assert "static_argnames" in caught.value.failure.remedy
