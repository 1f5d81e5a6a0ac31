"""Calls of a trunk: which go together, when, and whose go first."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_lab.client.trunk.lineup import Call, Lineup
from pathways_lab.core.scheduling.policies import ProportionalShare


def lineup(*clients: str, most: int = 4, wait: float = 1.0, **more: Any) -> Lineup:
    """One call of each of these clients, a tenth of a second apart; "ann/2" is of another kind."""
    made = Lineup("gpt", most, wait, **more)
    for number, client in enumerate(clients):
        name, _, kind = client.partition("/")
        made.came(Call(number, name, kind, number / 10))
    return made


def numbers(calls: list[Call]) -> list[int]:
    return sorted(call.number for call in calls)


def test_a_call_waits_for_others_and_not_longer() -> None:
    assert lineup().due(0.0) is None
    made = lineup("ann", "bob")
    assert made.due(0.2) == 1.0
    assert numbers(made.take(1.0)) == [0, 1]
    assert (len(made), made.due(1.0)) == (0, None)


def test_a_full_gang_waits_for_nobody() -> None:
    made = lineup("ann", "bob", "ann", "eve", "ann")
    assert (made.due(0.4), made.full(0.4)) == (0.4, True)
    assert numbers(made.take(0.4)) == [0, 1, 2, 3]
    assert (made.due(0.4), made.full(0.4)) == (1.4, False)


def test_only_calls_of_a_kind_go_together_and_those_of_a_client_stay_in_order() -> None:
    made = lineup("ann", "ann/2", "ann", "bob", "bob/2")
    assert made.due(0.5) == 1.0, "two of a kind can leave, and four would be a full gang"
    assert numbers(made.take(1.0)) == [0, 3]
    assert numbers(made.take(1.0)) == [1, 4]
    assert numbers(made.take(1.0)) == [2]


def test_what_has_left_waits_no_more() -> None:
    made = lineup("ann", "bob", "ann")
    assert numbers(made.left("ann", 0.5)) == [0, 2]
    assert made.left("ann", 0.5) == []
    assert numbers(made.take(0.5)) == [1]


@pytest.mark.parametrize("most", [1, 3, 8])
def test_shares_hold_when_more_wait_than_go_together(most: int) -> None:
    weights = {"ann": 1, "bob": 2, "eve": 4}
    made = Lineup("gpt", most, 0.0, ProportionalShare(weights))
    number, had = 0, Counter[str]()
    for turn in range(700 // most):
        for client in weights:  # who has had its turn calls again
            while made.waits(client) < most:
                made.came(Call(number, client, "", turn / 1000))
                number += 1
        had.update(call.client for call in made.take(turn / 1000))
    for client, weight in weights.items():
        assert had[client] / had.total() == pytest.approx(weight / 7, rel=0.05)


class Broken:
    """A policy that was well when it was tried."""

    def choose(self, view: Any) -> int:
        raise RuntimeError("no more")


def test_without_its_policy_the_oldest_goes_first() -> None:
    made = lineup("bob", "ann", policy=Broken())
    assert numbers(made.take(1.0)) == [0, 1]
    assert made.removed is not None
    assert "policy Broken raised RuntimeError: no more" in made.removed.message


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["ann", "bob", "eve"]), st.sampled_from(["", "2"])),
        st.sampled_from(["take", "ann leaves"]),
    ),
    max_size=60,
)


@given(STEPS, st.integers(1, 5))
def test_every_call_goes_once_in_its_clients_order(steps: list[Any], most: int) -> None:
    made = Lineup("gpt", most, 0.5, ProportionalShare({"ann": 3}))
    waiting: dict[int, Call] = {}
    for time, step in enumerate([*steps, *["take"] * len(steps)]):
        if step == "ann leaves":
            gone = made.left("ann", time)
            assert numbers(gone) == [n for n, call in waiting.items() if call.client == "ann"]
            waiting = {n: call for n, call in waiting.items() if call.client != "ann"}
        elif step != "take":
            made.came(waiting.setdefault(time, Call(time, *step, float(time))))
        elif waiting:
            taken = made.take(float(time))
            assert 1 <= len(taken) <= most
            assert len({call.kind for call in taken}) == 1
            for call in taken:
                first = next(n for n, other in waiting.items() if other.client == call.client)
                assert waiting.pop(first) == call
            alike = [c for c in first_of_each(waiting) if c.kind == taken[0].kind]
            assert len(taken) == most or not alike
        assert len(made) == len(waiting)
    assert made.due(1e9) is None


def first_of_each(waiting: dict[int, Call]) -> list[Call]:
    return list({call.client: call for call in reversed(waiting.values())}.values())
