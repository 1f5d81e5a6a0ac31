"""Who is silent is noticed, and what is stuck is dealt with as an owner has said."""

from __future__ import annotations

from typing import Any

import pytest

from pathways_lab.core.diagnosis.heartbeat import Pulse
from pathways_lab.core.diagnosis.stall_actions import Action, Acts, OnStuck
from pathways_lab.core.diagnosis.stall_story import Arrow, Member, Stuck
from pathways_lab.core.errors import Failure
from pathways_lab.core.program.program import Line


class Watch:
    """Acts with everything that they do written down."""

    def __init__(self, action: Action, after: float = 5.0, silence: float | None = 60.0) -> None:
        self.told: list[Stuck] = []
        self.failed: list[tuple[Any, Failure]] = []
        self.restarted: list[tuple[str, str]] = []
        self.acts = Acts(
            self.told.append,
            lambda gang, failure: self.failed.append((gang, failure)),
            lambda host, reason: self.restarted.append((host, reason)),
        )
        self.acts.told = OnStuck(action, after, silence, "ann")

    def see(self, story: Stuck, *times: float) -> None:
        for now in times:
            self.acts.story(story, 2.0, now)


def member(run: int, *inside: str) -> Member:
    return Member(run, 0, "bob", "train", f"n{run}", Line("cell", 3, "f(x)"), inside, 9.0)


CHAIN = Stuck("late", (member(1), member(2, "i0/h1")), (Arrow(0, 1, "i0/h1"),))


@pytest.mark.parametrize("action", ["report", "fail", "restart"])
def test_what_was_told_is_done_once_and_to_the_culprit(action: Action) -> None:
    watch = Watch(action)
    watch.see(CHAIN, 10.0, 12.9)
    assert [watch.told, watch.failed, watch.restarted] == [[], [], []]
    watch.see(CHAIN, 13.0, 13.5, 99.0)
    assert len(watch.told) == (action == "report")
    assert [gang for gang, _ in watch.failed] == [(2, 0)] * (action == "fail")
    assert [host for host, _ in watch.restarted] == ["i0/h1"] * (action == "restart")
    if action == "fail":
        failure = watch.failed[0][1]
        assert failure.story == CHAIN
        assert failure.line.number == 3
        assert "ann's rule" in failure.remedy
        assert "'n1' waits for i0/h1, which is in 'n2'" in failure.message


def test_another_culprit_has_its_own_time() -> None:
    watch = Watch("fail")
    watch.see(CHAIN, 10.0)
    watch.see(Stuck("late", (member(3, "i0/h0"),), ()), 14.0)
    watch.see(CHAIN, 14.5)
    assert watch.failed == []


def test_who_does_not_answer_is_restarted_instead_of_who_waits_for_it() -> None:
    watch = Watch("restart")
    watch.see(Stuck("late", CHAIN.gangs, CHAIN.arrows, ("i0/h0",)), 10.0, 13.0)
    assert [host for host, _ in watch.restarted] == ["i0/h0"]


def test_what_no_host_has_launched_fails_where_hosts_shall_be_restarted() -> None:
    """A transfer, for one: there is no host to be blamed."""
    watch = Watch("restart")
    watch.see(Stuck("late", (member(4),), ()), 10.0, 13.0)
    assert [gang for gang, _ in watch.failed] == [(4, 0)]


@pytest.mark.parametrize(
    ("action", "silence", "when"),
    [("report", 60.0, 60.0), ("restart", 60.0, 5.0), ("restart", None, 5.0), ("fail", None, None)],
)
def test_silence_has_an_end_of_its_own(
    action: Action, silence: float | None, when: float | None
) -> None:
    watch = Watch(action, 5.0, silence)
    for seconds in (4.9, 59.9, 1000.0):
        if when is not None and seconds >= when:
            break
        watch.acts.silent([("i0/h1", seconds)])
    assert watch.restarted == []
    if when is not None:
        watch.acts.silent([("i0/h1", when)])
        assert watch.restarted == [("i0/h1", f"it has not answered for {when:.1f} s")]


@pytest.mark.parametrize("wrong", [OnStuck("explode"), OnStuck("fail", 0), OnStuck(silence=-1.0),
                                   OnStuck(after="soon")])  # type: ignore[arg-type]  # fmt: skip
def test_rules_that_cannot_be(wrong: OnStuck) -> None:
    assert wrong.wrong()
    assert not OnStuck("fail", 3, None).wrong()


def test_only_quiet_hosts_are_asked_and_only_silent_ones_named() -> None:
    asked: list[str] = []
    pulse = Pulse(asked.append)
    pulse.heard("a", 0.0)
    pulse.heard("b", 0.0)
    pulse.look(0.9)
    pulse.heard("a", 0.9)
    pulse.look(1.1)
    assert asked == ["b"]
    pulse.look(1.5)
    assert asked == ["b"]
    assert pulse.silent(2.5) == {}
    pulse.heard("a", 2.5)
    assert pulse.silent(2.7) == {"b": 2.7}
    pulse.heard("b", 2.8)
    assert pulse.silent(9.0) == {}
    pulse.lost("b")
    pulse.look(9.0)
    assert asked == ["b", "a"]
