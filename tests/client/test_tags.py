"""Where priority and data of runs are said, and which of it counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.client.lab.policies import Tagging
from pathways_lab.client.session.connection import Connection
from tests.client.kit import FakeLab, fast

Said = list[tuple[int, dict[str, Any]]]


def said(fake: FakeLab) -> Said:
    """Priority and data of every run that was submitted."""
    runs = [fields for op, fields in fake.messages if op == "submit"]
    return [(fields["priority"], dict(fields.get("data", ()))) for fields in runs]


def test_a_program_says_it_for_its_runs(fake: FakeLab) -> None:
    f = pw.jit(lambda x: x + 1, on=fake.slice(2))

    @pw.program(priority=3, data={"deadline": 0.5})
    def step(x: Any) -> Any:
        return f(x)

    @pw.program
    def plain(x: Any) -> Any:
        return f(x)

    np.asarray(step(np.float32(1)))
    np.asarray(plain(np.float32(1)))
    np.asarray(step.capture(np.float32(1)).run([np.float32(1)]))
    assert said(fake) == [(3, {"deadline": 0.5}), (0, {}), (3, {"deadline": 0.5})]


def test_a_block_goes_before_a_program_and_a_program_before_the_client(fake: FakeLab) -> None:
    f = pw.jit(lambda x: x + 1, on=fake.slice(2))
    step = pw.program(lambda x: f(x), priority=3, data={"a": 1, "b": 1}, name="step")

    class Lab(Tagging):
        session = fake.session

    Lab().priority = 7
    assert Lab().priority == 7
    plain = pw.program(lambda x: f(x), name="plain")
    for call in (plain, step):
        np.asarray(call(np.float32(1)))
    with pw.tagged(priority=5, data={"b": 2, "c": 2}):
        np.asarray(step(np.float32(1)))
        with pw.tagged(data={"c": 3}):
            np.asarray(step(np.float32(1)))
    assert said(fake) == [
        (7, {}),
        (3, {"a": 1, "b": 1}),
        (5, {"a": 1, "b": 2, "c": 2}),
        (5, {"a": 1, "b": 2, "c": 3}),
    ]  # fmt: skip


def test_a_compiled_function_says_it_for_calls_outside_of_programs(fake: FakeLab) -> None:
    on = fake.slice(2)
    f = pw.jit(lambda x: x + 1, on=on, priority=2)
    inside = pw.program(lambda x: f(x), name="inside")
    np.asarray(f(np.float32(1)))
    np.asarray(inside(np.float32(1)))
    assert said(fake) == [(2, {}), (0, {})]


def test_calls_that_leave_together_have_one_tag(
    fake: FakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast(monkeypatch)
    f = pw.jit(lambda x: x + 1, on=fake.slice(2))
    x = f(np.float32(1))
    np.asarray(x)
    fake.messages.clear()
    for _ in range(4):
        x = f(x)
    with pw.tagged(priority=1):
        for _ in range(4):
            x = f(x)
    for _ in range(4):
        x = f(x)
    assert float(np.asarray(x)) == 14
    found = [priority for priority, _ in said(fake)]
    assert found == sorted(found[: found.index(1)]) + [1] * found.count(1) + [0] * (
        len(found) - found.index(1) - found.count(1)
    )
    assert found.count(1) < 5


def test_a_generator_is_tagged_by_the_block_that_iterates(fake: FakeLab) -> None:
    f = pw.jit(lambda x: x + 1, on=fake.slice(2))

    def loop() -> Any:
        for _ in range(2):
            yield np.asarray(f(np.float32(1)))

    with pw.tagged(priority=4):
        for _ in loop():
            pass
    assert [priority for priority, _ in said(fake)] == [4, 4]


@pytest.mark.parametrize(
    "options",
    [
        {"priority": 1.5},
        {"priority": True},
        {"priority": 10**9},
        {"data": {"a": [1]}},
        {"data": {"a": float("nan")}},
        {"data": {1: 1}},
        {"data": [("a", 1)]},
        {"data": {f"n{n}": n for n in range(17)}},
    ],
)
def test_what_policies_are_not_told_is_refused_at_once(options: dict[str, Any]) -> None:
    def enter() -> None:
        with pw.tagged(**options):
            raise AssertionError("it was taken")

    for say in (enter, lambda: pw.program(**options)(abs), lambda: pw.jit(abs, **options)):
        with pytest.raises(pw.PathwaysError, match=r"(priority is|data (is|has)) .*: "):
            say()


def test_a_lab_without_a_priority_has_none(fake: FakeLab) -> None:
    assert isinstance(fake.session.connection, Connection)

    class Lab(Tagging):
        session = fake.session

    assert Lab().priority == 0
    with pytest.raises(pw.PathwaysError, match="a whole number"):
        Lab().priority = "high"  # type: ignore[assignment]
