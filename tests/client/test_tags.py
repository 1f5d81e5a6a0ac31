"""Where priority and data of runs are said, and which of it counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.client.feeds.feed_tasks import HostTasks
from pathways_lab.client.lab.policies import Tagging
from pathways_lab.client.lab.tags import NOTHING, Tag, beneath
from pathways_lab.client.session.connection import Connection
from pathways_lab.client.training import per_host_loop
from pathways_lab.client.training.elastic_loop import Elastic
from pathways_lab.runtime.client_messages import Loop
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


# --- loops, trainings and feeds -----------------------------------------------------------------


def test_a_loop_on_hosts_says_it_for_its_run(fake: FakeLab) -> None:
    on = fake.slice(2)
    plain, own = pw.jit(lambda x: x + 1, on=on), pw.jit(lambda x: x + 2, on=on, priority=3)
    x = np.ones(2, np.float32)
    job = Tag.of(2, {"a": 1})
    for step, tag in ((plain, job), (own, NOTHING), (own, job), (plain, NOTHING)):
        jax.block_until_ready(per_host_loop.start(step.bind((x,), {}), on, Loop(1, 1), tag))
    assert said(fake) == [(2, {"a": 1}), (3, {}), (2, {"a": 1}), (0, {})]


def layered() -> dict[str, Any]:
    """A model of two layers, and what a training needs beside it."""

    def layer(w: Any, x: Any) -> Any:
        return x * w

    return {
        "layers": [(layer, np.ones(1, np.float32))] * 2,
        "loss": lambda y, labels: jax.numpy.mean((y - labels) ** 2),
        "optimizer": optax.sgd(0.1),
        "example": np.ones((1, 1), np.float32),
    }


@pytest.mark.parametrize(
    ("make", "more"), [(pw.pipeline, {"microbatches": 2}), (pw.data_parallel, {"chunks": 1})]
)
def test_a_training_says_it_for_all_that_it_submits(
    fake: FakeLab, make: Any, more: dict[str, Any]
) -> None:
    model, x = layered(), np.ones((2, 1), np.float32)
    slices = [fake.slice(1), fake.slice(1)]
    training = make(slices=slices, priority=2, data={"job": "a"}, **model, **more)
    state, value = training.step(training.init(), x, x)
    jax.block_until_ready((state, value))
    found = said(fake)
    assert len(found) >= 1
    assert set(map(repr, found)) == {repr((2, {"job": "a"}))}
    with pw.tagged(priority=5):
        jax.block_until_ready(training.step(state, x, x))
    assert said(fake)[-1] == (5, {"job": "a"})


def test_an_elastic_loop_says_it_for_all_that_it_submits(fake: FakeLab) -> None:
    connection = fake.session.connection
    island = SimpleNamespace(name="island0", devices=2)
    lab: Any = SimpleNamespace(
        islands=(island,), closed=False, session=fake.session, slice=lambda *a, **k: fake.slice(2)
    )
    assert not connection.down
    loop = Elastic(
        lab, lambda w, x: (w + x.sum(), x.sum()), np.float32(0), [np.ones(2, np.float32)] * 3, None,
        None, 2, 1, 2, 2, 1, P(), P("x"), tag=Tag.of(2, {"job": "b"}),
    )  # fmt: skip
    for _ in loop:
        with pw.tagged(priority=9):
            pass
    found = said(fake)
    assert len(found) >= 3
    assert set(map(repr, found)) == {repr((2, {"job": "b"}))}


def test_elements_of_a_feed_are_made_in_the_order_of_priorities_and_steps(fake: FakeLab) -> None:
    asked: list[int] = []
    tasks: Any = object.__new__(HostTasks)
    tasks._connection = fake.session.connection
    tasks._dask = SimpleNamespace(submit=lambda *a, **options: asked.append(options["priority"]))
    made: list[tuple[int, int]] = []
    for priority, step in ((0, 0), (0, 10**6), (2, 0), (2, 10**6), (-1, 3), (-1, 4)):
        with beneath(Tag.of(priority, None)):
            tasks._submit(abs, 1, step=step)
        made.append((-priority, step))
    by_asking = sorted(range(6), key=lambda n: -asked[n])
    assert by_asking == sorted(range(6), key=made.__getitem__)


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
