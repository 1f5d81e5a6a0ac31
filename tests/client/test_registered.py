"""What is registered: sent once, kept as long as somebody has it, and a little longer."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.client.session import call_batching, code_registry
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.program import NO_LINE
from pathways_lab.runtime.client_messages import CLIENTS
from pathways_lab.transport.codec import pack
from pathways_lab.transport.edge import parsed
from tests.client.kit import FakeLab, fast
from tests.runtime.processes import until

X = np.arange(4, dtype=np.float32)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stays registered that nobody has."""
    monkeypatch.setattr(code_registry, "_KEPT", 0)


def plus(number: int, on: pw.Slice) -> Callable[..., Any]:
    return pw.jit(lambda x: x + number, on=on)


def forgotten(fake: FakeLab, programs: int) -> None:
    """So many programs were let go, and that was told."""
    gc.collect()
    until(lambda: sum(len(told["plans"]) for told in fake.of("forget")) == programs, 20)


def test_a_function_that_nobody_has_is_forgotten_and_can_come_again(
    fake: FakeLab, at_once: None
) -> None:
    on = fake.slice(2)
    kept = plus(1, on)
    np.testing.assert_array_equal(kept(X).result(), X + 1)
    for _ in range(2):
        gone = plus(2, on)
        for _ in range(2):
            np.testing.assert_array_equal(gone(X).result(), X + 2)
        del gone
        forgotten(fake, fake.count("program") - 1)
    assert (fake.count("function"), fake.count("program")) == (3, 3)
    (first, again) = fake.of("forget")
    assert first == again, "it has the same key each time"
    assert [on_ for _, on_ in first["functions"]] == [on.id]
    (plan,) = fake.connection._witnesses._plans
    assert plan == fake.of("submit")[0]["plan"]
    assert fake.connection.registered.knows(plan)
    np.testing.assert_array_equal(kept(X).result(), X + 1)


def test_a_run_that_is_under_way_does_not_keep_its_function(fake: FakeLab, at_once: None) -> None:
    on = fake.slice(2)
    fake.held = True
    handle = plus(2, on)(X)
    forgotten(fake, 1)
    fake.release()
    np.testing.assert_array_equal(handle.result(), X + 2)


def test_code_stays_as_long_as_another_program_calls_it(fake: FakeLab, at_once: None) -> None:
    on = fake.slice(2)
    one, two = plus(1, on), plus(2, on)
    one(X).result()
    both = pw.program(lambda x: two(one(x)))
    np.testing.assert_array_equal(both(X).result(), X + 3)
    del both
    forgotten(fake, 1)
    (told,) = fake.of("forget")
    assert len(told["functions"]) == 1, "only the call of the other one was made for it"
    np.testing.assert_array_equal(one(X).result(), X + 1)


def test_functions_of_one_content_are_one_program_until_the_last_has_gone(
    fake: FakeLab, at_once: None
) -> None:
    on = fake.slice(2)
    both = [plus(1, on) for _ in range(2)]
    for number in range(2):
        both[number](X).result()
    known = fake.connection.registered
    assert (fake.count("program"), len(known._users)) == (1, 2)
    both.pop()
    gc.collect()
    until(lambda: len(known._users) == 1, 20)
    fake.settle()
    assert not fake.count("forget")
    both.pop()
    forgotten(fake, 1)


def test_the_last_ones_stay_and_cost_nothing_when_they_come_again(
    fake: FakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell that is run again, and a move of a handle, which is a new program each time."""
    on, there = fake.slice(2), fake.slice(2)
    for _ in range(3):
        handle = plus(1, on)(X)
        pw.device_put(handle, there).result()
        del handle
        gc.collect()
    assert (fake.count("program"), fake.count("function")) == (2, 1)
    monkeypatch.setattr(code_registry, "_KEPT", 3)
    for number in range(2, 5):
        plus(number, on)(X).result()
    forgotten(fake, 2)


def test_calls_sent_together_are_forgotten_with_one_of_their_functions(
    fake: FakeLab, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast(monkeypatch)
    on = fake.slice(2)

    def together(one: Any, two: Any) -> None:
        x = one(two(X)).block_until_ready()
        for _ in range(3):
            fake.held = True
            made = [one(x), *(two(x) for _ in range(5))]
            fake.held = False
            fake.connection.flush()
            fake.settle()
            fake.release()
            np.testing.assert_array_equal(made[-1].result(), np.asarray(x) + 2)

    one, two = plus(1, on), plus(2, on)
    together(one, two)
    calls = fake.session._calls
    (plan,) = calls._plans.values()
    del two
    forgotten(fake, 3)  # called on two lines
    assert plan.key in {key for told in fake.of("forget") for key in told["plans"]}
    two = plus(2, on)
    together(one, two)
    assert [again.key for again in calls._plans.values()] == [plan.key], "registered again"
    assert not calls._room(on.id, call_batching._CALLS)
    del two
    forgotten(fake, 6)
    assert calls._room(on.id, call_batching._CALLS), "what is gone takes no room"


def test_a_released_slice_takes_what_was_registered_along(fake: FakeLab, at_once: None) -> None:
    on, other = fake.slice(2), fake.slice(2)
    function, stays = plus(1, on), plus(1, other)
    function(X).result()
    stays(X).result()
    on.release()
    known = fake.connection.registered
    assert [slices for slices, _ in known._plans.values()] == [(other.id,)]
    assert [place for _, place in known._functions] == [other.id]
    del function
    gc.collect()
    until(lambda: len(known._users) == 1, 20)
    assert not fake.count("forget"), "the slice was all that had to be said"


def test_the_lab_judges_a_dimension_of_any_length() -> None:
    """An honest message parses, or its client would lose the lab for a shape."""
    whole = pack(Layout((("x", 1),), ((),)))
    fields = {
        "function": "f", "slice": 1, "kind": "export", "name": "zeros", "in_layouts": [],
        "out_layouts": [whole], "in_types": [], "out_types": [[[1 << 40], "int8"]], "donated": [],
        "line": pack(NO_LINE), "loop": None, "checks": [],
    }  # fmt: skip
    assert parsed(CLIENTS, "function", fields, [b""]).out_types == (((1 << 40,), "int8"),)


def test_a_dimension_that_no_machine_has_is_refused_where_it_is_made(fake: FakeLab) -> None:
    made = pw.jit(lambda: jnp.zeros((1 << 62,), jnp.int8), on=fake.slice(1))
    with pytest.raises(pw.PathwaysError, match=r"int8.* is no array of a lab: a dimension of 46"):
        made()
