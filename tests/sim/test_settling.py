"""Laws of the worklist: runs first, the other parts in their order, until nothing has work."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pathways_lab.core.control import Control
from pathways_lab.core.messages import Command, Event
from tests.sim.search import search


def test_runs_go_on_after_each_part_that_did_something(monkeypatch: pytest.MonkeyPatch) -> None:
    control, did = Control(), []
    left = {"a": 2, "b": 1, "c": 0}

    def part(name: str) -> Callable[[], bool]:
        def work() -> bool:
            did.append(name)
            left[name] -= 1
            return left[name] >= 0

        return work

    monkeypatch.setattr(control.grants, "work", lambda: did.append("runs"))
    monkeypatch.setattr(control, "_parts", tuple(map(part, "abc")))
    control.settle()
    assert " ".join(did) == "runs a runs a runs a b runs a b c"


def test_nothing_is_left_to_do_after_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    handle, left = Control.handle, []

    def twice(control: Control, event: Event) -> list[Command]:
        commands = handle(control, event)
        control.state.out = []
        control.settle()
        left.extend((event, command) for command in control.state.out)
        return commands

    monkeypatch.setattr(Control, "handle", twice)
    for seed in (*range(40), 294):  # in 294 a publication lets go of values
        search(seed, checks=False)
    assert not left
