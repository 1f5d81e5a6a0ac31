"""Where slices lie is a policy's choice too: of islands, tried first, never waited for long."""

from __future__ import annotations

from typing import Any

import pytest

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import (
    AskPolicy,
    HostLost,
    PolicyAnswered,
    PolicyChosen,
    PolicyFailed,
    PolicyLate,
    SliceReleased,
    SliceRequested,
)
from pathways_lab.core.scheduling.policies import (
    FIFO,
    PlaceView,
    Policy,
    RemotePolicy,
    places,
    validate,
)
from pathways_lab.core.slices.topology import SliceRequest
from pathways_lab.testing import Script

REMOTE = RemotePolicy("Mine", 7, places=True)
FOUR = SliceRequest((4,), ("x",))


class Last(FIFO):
    """Slices lie on the last island that will do."""

    def place(self, view: PlaceView) -> str:
        return view.candidates[-1].island


def machine(policy: Policy | RemotePolicy | None = None) -> Script:
    """Two islands of a host of four devices."""
    script = Script(2, 1, 4)
    if policy is not None:
        script.send(PolicyChosen(script.time, "policy", "kernel-1", policy))
    return script


def island_of(script: Script, where: int) -> str | None:
    known = script.control.slices.get(where)
    return known.binding.island if known else None


def ask(script: Script, number: int, request: SliceRequest = FOUR) -> list[AskPolicy]:
    """A client asks for a slice; what the policy is asked then."""
    told = script.send(SliceRequested(script.time, "ask", "kernel-1", number, request))
    return [command for command in told if isinstance(command, AskPolicy)]


def test_a_policy_chooses_the_island() -> None:
    for policy, island in (None, "island0"), (FIFO(), "island0"), (Last(), "island1"):
        script = machine(policy)
        assert island_of(script, script.slice(4)) == island


def test_it_is_told_what_there_is() -> None:
    seen: list[PlaceView] = []

    class Looks(FIFO):
        def place(self, view: PlaceView) -> str:
            seen.append(view)
            return view.candidates[0].island

        def __deepcopy__(self, memo: Any) -> Looks:
            return self

    script = machine(Looks())
    first = script.slice(2)
    seen.clear()
    script.slice(4)
    (view,) = seen
    assert (view.client, view.shape) == ("kernel-1", (4,))
    assert island_of(script, first) == "island0"
    told = {c.island: (c.kind, c.hosts, c.devices, c.shared, c.held) for c in view.candidates}
    assert told == {"island1": ("null", 1, 4, 0, 0), "island0": ("null", 1, 4, 1, 2)}
    assert [c.island for c in view.candidates] == ["island1", "island0"]


def test_who_names_an_island_is_not_asked_about() -> None:
    script = machine(REMOTE)
    assert not ask(script, 50, SliceRequest((4,), ("x",), island="island1"))
    assert island_of(script, 50) == "island1"


@pytest.mark.parametrize("wrong", ["island9", None, 1])
def test_a_choice_that_is_none_removes_the_policy_and_the_slice_is_bound(wrong: Any) -> None:
    class Wrong(FIFO):
        def place(self, view: PlaceView) -> Any:
            return view.candidates[0].island if view.shape == (4,) and view.time == 0.0 else wrong

    script = machine()
    script.pass_time(1.0)
    script.send(PolicyChosen(script.time, "policy", "kernel-1", Wrong()))
    assert island_of(script, script.slice(4)) == "island0"
    failure = script.policies[-1].failure
    assert failure is not None
    assert "none of the islands (island0, island1)" in failure.message


def test_it_is_tried_before_it_is_in_force() -> None:
    class Raises(FIFO):
        def place(self, view: PlaceView) -> str:
            raise RuntimeError("never")

    failure = validate(Raises())
    assert failure is not None
    assert "raised RuntimeError: never" in failure.message
    assert "correct place()" in failure.remedy
    assert not places(FIFO())
    assert places(Last())
    assert places(REMOTE)


def test_a_slice_waits_for_an_answer_from_elsewhere_and_nothing_else_does() -> None:
    script = machine(REMOTE)
    (asked,) = ask(script, 50)
    assert island_of(script, 50) is None
    assert not ask(script, 51, SliceRequest((4,), ("x",), island="island0"))
    assert island_of(script, 51) == "island0"
    script.send(PolicyAnswered(script.time, "answer", 7, asked.question, 1))
    assert isinstance(asked.view, PlaceView)
    assert island_of(script, 50) == asked.view.candidates[1].island
    assert not script.refused


@pytest.mark.parametrize("how", ["late", "failed", "replaced"])
def test_without_an_answer_it_lies_where_it_would_without_a_policy(how: str) -> None:
    script = machine(REMOTE)
    (asked,) = ask(script, 50)
    if how == "late":
        script.send(PolicyLate(script.time, "late", 7))
    elif how == "failed":
        script.send(PolicyFailed(script.time, "failed", 7, Failure("policy", "it is gone")))
    else:
        script.send(PolicyChosen(script.time, "policy", "kernel-1", FIFO()))
    assert island_of(script, 50) == "island0"
    script.send(PolicyAnswered(script.time, "answer", 7, asked.question, 1))
    assert island_of(script, 50) == "island0"
    assert not script.control.bookings.line


def test_who_waits_no_longer_leaves_nothing_behind() -> None:
    script = machine(REMOTE)
    (asked,) = ask(script, 50)
    script.send(SliceReleased(script.time, "release", "kernel-1", 50))
    questions = script.control.state.turns.questions
    assert not script.control.bookings.line
    script.send(PolicyAnswered(script.time, "answer", 7, asked.question, 1))
    assert (questions.places, questions.placed, questions.late) == ({}, {}, set())
    assert script.control.state.turns.policy == REMOTE
    assert island_of(script, 50) is None


def test_an_island_that_is_gone_meanwhile_is_no_choice() -> None:
    script = machine(REMOTE)
    (asked,) = ask(script, 50)
    assert isinstance(asked.view, PlaceView)
    gone = asked.view.candidates[1].island
    script.send(HostLost(script.time, "lost", f"{gone}/host0", "it was killed"))
    script.send(PolicyAnswered(script.time, "answer", 7, asked.question, 1))
    assert island_of(script, 50) == asked.view.candidates[0].island
