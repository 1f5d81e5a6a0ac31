"""Several things that end once, waited for by a callback."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_lab.client.session.waiting import Board, Pending


def board() -> Board:
    reactor: Any = SimpleNamespace(nudge=lambda: None)
    return Board(reactor)


@given(st.permutations(range(5)), st.integers(0, 5))
def test_a_callback_comes_once_when_the_last_has_ended(order, before):
    made, entries, called = board(), [Pending() for _ in order], []
    made.settle([entries[n] for n in order[:before]], None)
    made.when_all(entries, lambda: called.append(before))
    for n in order[before:]:
        assert not called
        made.settle([entries[n]], None)
    assert called == [before]


def test_none_are_there_at_once():
    called: list[int] = []
    board().when_all([], lambda: called.append(1))
    assert called == [1]


@pytest.mark.parametrize("done", [False, True])
def test_what_a_callback_keeps_goes_with_it(done):
    """And not when somebody looks for garbage: arrays of a gigabyte would wait for that."""

    class Kept:
        """As a handle."""

    kept, made, entry = Kept(), board(), Pending()
    gone = weakref.ref(kept)
    gc.disable()
    try:
        if done:
            made.settle([entry], None)
        made.when_all([entry], lambda kept=kept: None)
        made.settle([entry], None)
        del kept
        assert gone() is None
    finally:
        gc.enable()
