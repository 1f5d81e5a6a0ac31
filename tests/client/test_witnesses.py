"""Witnesses: whose word is taken that a value is there, and that only a good one is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.client.session.host_completion import MOST, Witnesses
from pathways_lab.client.session.pending import Buffer
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.core.program.program import Plan
from tests.client.kit import FakeLab
from tests.runtime.processes import until

A, B, AB = frozenset({"a"}), frozenset({"b"}), frozenset({"a", "b"})


@dataclass(frozen=True)
class Bound:
    slice: int
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class Planned:
    key: str
    slices: tuple[int, ...]
    steps: tuple[Any, ...] = ()


def of(known: Witnesses, slices: tuple[int, ...], *inputs: Buffer | None) -> frozenset[str]:
    return known.of(cast(Plan, Planned(f"plan{slices}", slices)), inputs)


def buffer(witnesses: frozenset[str], *, done: bool = False) -> Buffer:
    made = Buffer(1, 1)
    made.witnesses, made.done = witnesses, done
    return made


@pytest.fixture
def known() -> Witnesses:
    made = Witnesses()
    many = tuple(f"h{n}" for n in range(MOST + 1))
    for number, hosts in enumerate((("a",), ("a",), ("b",), ("a", "b"), many)):
        made.bound(cast(Any, Bound(number, hosts)))
    return made


def test_one_set_of_hosts_knows_all_of_a_run(known: Witnesses) -> None:
    assert of(known, (0,)) == of(known, (0, 1)) == A
    assert of(known, (3,)) == AB
    assert of(known, (0, 2)) == of(known, (0, 3)) == of(known, (7,)) == of(known, ()) == frozenset()
    assert of(known, (4,)) == frozenset(), "so many are not asked"
    some = tuple(f"h{n}" for n in range(MOST))
    known.bound(cast(Any, Bound(4, some)))
    assert of(known, (4,)) == frozenset(some), "the slice is elsewhere now"


def test_what_inputs_wait_for_is_made_by_the_same_hosts(known: Witnesses) -> None:
    assert of(known, (0,), None, buffer(A), buffer(B, done=True)) == A
    for other in (B, AB, frozenset[str]()):
        assert of(known, (0,), buffer(A), buffer(other)) == frozenset()
    # Of two hosts one may have failed: what the other says of its own gang is not the whole story.
    assert of(known, (3,), buffer(A)) == frozenset()


def test_a_slice_that_is_gone_has_no_witnesses(known: Witnesses) -> None:
    assert of(known, (0,)) == A
    known.released(0)
    assert of(known, (0,)) == frozenset()


@pytest.fixture
def told(fake: FakeLab) -> Any:
    """A function on two hosts, to both of which there are links."""
    function = pw.jit(lambda x: x * 2, on=fake.slice(4), in_shardings=P("x"))
    value = np.ones(8, np.float32)
    function(value).result()
    assert len(fake.session.data._links) == 2
    return lambda: function(value)


def wait(fake: FakeLab, told: Any) -> None:
    """Call, and wait for the result before it is there."""

    def waited() -> bool:
        told().block_until_ready()
        return fake.session.data._waiting

    until(waited)


def test_their_word_ends_the_wait(fake: FakeLab, told: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(fake, "_end", lambda *_: fake._answer_fetches())
    handle = told().block_until_ready()
    assert handle.state == "ready"
    assert not fake.connection.under_way, "the next call leaves at once"
    np.testing.assert_array_equal(told().result(), np.full(8, 2.0))


def silent(fake: FakeLab, monkeypatch: Any) -> Callable[[], None]:
    """Nobody says anything, but the hosts when this is called."""
    answer = fake._answer_fetches
    monkeypatch.setattr(fake, "_end", lambda *_: None)
    monkeypatch.setattr(fake, "_answer_fetches", lambda: None)
    return answer


def test_all_of_them_have_to_say_it(fake: FakeLab, told: Any, monkeypatch: Any) -> None:
    answer = silent(fake, monkeypatch)
    handle = told()
    with pytest.raises(TimeoutError):
        handle.result(timeout=0.1)
    assert len(fake._fetches) == 2
    one = fake._fetches.pop()
    answer()
    with pytest.raises(TimeoutError):
        handle.result(timeout=0.1)
    assert handle.state == "pending"
    fake._fetches.append(one)
    answer()
    handle.result(timeout=10)


def test_a_bad_word_waits_for_the_whole_story(fake: FakeLab, told: Any, monkeypatch: Any) -> None:
    silent(fake, monkeypatch)
    handle = told()
    fake.session.data.hurry(handle.buffer)
    until(lambda: len(fake._fetches) == 2)
    for (host, number), fetch in tuple(fake.session.data._fetches.items()):
        link = fake.session.data._links[host]
        fake.session.data._message(link, "fetch-failed", {"id": number, "failure": None}, [])
        assert not fetch.done
    assert handle.state == "pending"
    failure = Failure("execute", "it broke on the other host")
    fake.connection.board.settle((handle.buffer,), failure)
    with pytest.raises(PathwaysError, match="the other host"):
        handle.block_until_ready()


def test_who_waits_for_each_call_need_not_ask(fake: FakeLab, told: Any, monkeypatch: Any) -> None:
    wait(fake, told)
    fake.settle()
    # Not before somebody waits: else the next call would have to ask.
    later = functools.partial(fake._control.call_later, 0.05, fake._answer_fetches)
    monkeypatch.setattr(fake, "_end", lambda *_: later())
    asked = fake.fetches
    for _ in range(3):
        told().block_until_ready()
    assert fake.fetches == asked, "the witnesses said it by themselves"
    assert [bool(fields.get("hear")) for fields in fake.of("submit")[-3:]] == [True] * 3


def test_who_does_not_wait_or_wants_the_value_is_not_told(fake: FakeLab, told: Any) -> None:
    wait(fake, told)
    handles = [told() for _ in range(3)]
    handles[-1].result()
    told().result()
    told().result()
    fake.settle()
    hear = [bool(fields.get("hear")) for fields in fake.of("submit")[-6:]]
    assert hear == [False, True, False, False, False, False], "only the call after the wait"


def test_what_is_not_said_after_all_is_expected_no_more(
    fake: FakeLab, told: Any, monkeypatch: Any
) -> None:
    """The run has ended, whether or not its hosts have come to say so."""
    wait(fake, told)
    fake.settle()
    monkeypatch.setattr(fake, "_answer_fetches", lambda: None)
    handle = told().block_until_ready()
    assert fake.of("submit")[-1].get("hear")
    until(lambda: not fake.connection.runs)
    assert fake.session.data._fetches == {}
    assert handle.state == "ready"


def test_a_host_that_is_gone_is_not_relied_on(fake: FakeLab, told: Any) -> None:
    """Neither when the run is sent, nor when its link ends while it is awaited."""
    wait(fake, told)
    fake.held = True
    handle = told()
    fake.settle()
    assert fake.of("submit")[-1].get("hear")
    link = next(iter(fake.session.data._links.values()))
    link.close("gone")
    until(lambda: link.closed is not None)
    fake.release()
    handle.block_until_ready()
    fake.held = False
    told()
    fake.settle()
    assert not fake.of("submit")[-1].get("hear")
