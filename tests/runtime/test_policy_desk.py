"""Laws: a policy is tried before it is in force, timed while it is, and ended in every case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pathways_lab.core import messages as m
from pathways_lab.core.errors import Failure
from pathways_lab.core.scheduling.policies import FIFO, Place, PlaceView, PolicyView, RemotePolicy
from pathways_lab.runtime.control_plane.policy_supervisor import PATIENCE, PolicyDesk
from pathways_lab.runtime.control_plane.policy_worker import CHOICE_SECONDS, LOAD_SECONDS
from pathways_lab.transport.codec import pack, unpack


class Link:
    """The end of a link to a process that the test plays."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any], list[bytes]]] = []
        self.closed = False

    def send(
        self, op: str, fields: dict[str, Any] | None = None, buffers: Sequence[Any] = ()
    ) -> int:
        self.sent.append((op, fields or {}, [bytes(b) for b in buffers]))
        return 1

    def close(self, reason: str = "") -> None:
        self.closed = True


class Play:
    """Plays core, processes and time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.events: list[Any] = []
        self.refused: list[tuple[str, int, str]] = []
        self.printed: list[tuple[str, str, str]] = []
        self.running: dict[str, Callable[[str], None]] = {}
        self.ended: list[str] = []
        self.desk = PolicyDesk(self, self, lambda: self.now, self.later)

    # what the desk tells
    def happened(self, event: m.Event) -> None:
        self.events.append(event)

    def policy_refused(self, client: str, request: int, failure: Failure) -> None:
        self.refused.append((client, request, failure.message))

    def policy_printed(self, client: str, name: str, text: str) -> None:
        self.printed.append((client, name, text))

    def start(self, token: str, gone: Callable[[str], None]) -> None:
        self.running[token] = gone

    def end(self, token: str) -> None:
        self.ended.append(token)

    def later(self, seconds: float, function: Callable[..., None], *args: Any) -> None:
        self.timers.append((self.now + seconds, len(self.timers), function, args))

    # what the test plays
    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while self.timers and min(self.timers)[0] <= until:
            timer = min(self.timers)
            self.timers.remove(timer)
            self.now = max(self.now, timer[0])
            timer[2](*timer[3])
        self.now = until

    def tried(self, name: str = "Mine", client: str = "a") -> tuple[str, Link]:
        """A policy whose process has joined."""
        self.desk.try_out(client, 4, name, b"code")
        token, link = list(self.running)[-1], Link()
        assert self.desk.knows(token)
        self.desk.joined(token, link)
        assert not self.desk.knows(token)
        assert link.sent == [("load", {}, [b"code"])]
        return token, link

    def in_force(self) -> tuple[str, Link]:
        token, link = self.tried()
        self.desk.said(token, "loaded", {"name": "Mine"})
        self.desk.said(token, "ready", {})
        return token, link

    def ask(self, question: int, policy: int = 1) -> None:
        self.desk.ask(m.AskPolicy("c", policy, question, PolicyView(0.0, ())))

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events]


def test_a_policy_is_in_force_after_it_was_tried() -> None:
    play = Play()
    token, link = play.tried()
    play.desk.said(token, "loaded", {"name": "Mine"})
    assert not play.events
    play.desk.said(token, "ready", {})
    (event,) = play.events
    assert (event.client, event.policy, event.request) == ("a", RemotePolicy("Mine", 1), 4)
    play.pass_time(2 * LOAD_SECONDS)
    assert not play.refused
    play.desk.keep(RemotePolicy("Mine", 1))
    assert not play.ended
    play.desk.keep(FIFO())
    assert play.ended == [token]
    assert link.closed


def test_a_policy_that_chooses_islands_says_so_and_is_asked_in_the_same_way() -> None:
    play = Play()
    token, link = play.tried()
    play.desk.said(token, "loaded", {"name": "Mine", "places": True})
    play.desk.said(token, "ready", {})
    (event,) = play.events
    assert event.policy == RemotePolicy("Mine", 1, places=True)
    place = Place("island0", "cpu", 1, 4, 0, 0)
    view = PlaceView(0.0, "a", (4,), (place, place))
    play.desk.ask(m.AskPolicy("c", 1, 5, view))
    op, fields, _ = link.sent[-1]
    assert op == "ask"
    assert unpack(PolicyView | PlaceView, fields["view"]) == view
    play.pass_time(PATIENCE + 0.01)
    assert play.kinds()[-1] == "PolicyLate"


def test_the_one_before_stays_in_force_while_another_is_tried() -> None:
    play = Play()
    first, _ = play.in_force()
    second, _ = play.tried("Other", "b")
    play.desk.keep(RemotePolicy("Mine", 1))
    play.desk.said(second, "refused", {"failure": pack(Failure("policy", "it raises"))})
    assert play.refused == [("b", 4, "it raises")]
    assert play.ended == [second]
    assert first not in play.ended


@pytest.mark.parametrize(
    ("steps", "seconds", "words"),
    [
        (0, LOAD_SECONDS, "took longer than 10 s to be loaded"),
        (1, LOAD_SECONDS, "took longer than 10 s to be loaded"),
        (2, CHOICE_SECONDS, "took longer than 0.4 s to choose"),
    ],
)
def test_a_policy_that_hangs_while_it_is_tried(steps: int, seconds: float, words: str) -> None:
    play = Play()
    if not steps:
        play.desk.try_out("a", 4, "Mine", b"code")
        token = next(iter(play.running))
    else:
        token, _ = play.tried()
        if steps == 2:
            play.desk.said(token, "loaded", {"name": "Mine"})
    play.pass_time(seconds - 0.01)
    assert not play.refused
    play.pass_time(0.02)
    ((_, _, why),) = play.refused
    assert words in why
    assert play.ended == [token]


def test_answers_are_passed_on() -> None:
    play = Play()
    token, link = play.in_force()
    for question in (1, 2):
        play.ask(question)
        assert link.sent[-1][1]["question"] == question
        play.pass_time(PATIENCE / 2)
        play.desk.said(token, "answer", {"question": question, "run": 40 + question})
    play.pass_time(10.0)
    assert play.kinds() == ["PolicyChosen", "PolicyAnswered", "PolicyAnswered"]
    assert [(e.question, e.run) for e in play.events[1:]] == [(1, 41), (2, 42)]


def test_a_slow_answer_is_late_and_then_heard() -> None:
    play = Play()
    token, _ = play.in_force()
    play.ask(1)
    play.pass_time(PATIENCE + 0.001)
    assert play.kinds() == ["PolicyChosen", "PolicyLate"]
    play.pass_time(0.1)
    play.desk.said(token, "answer", {"question": 1, "run": 7})
    play.ask(2)
    play.pass_time(PATIENCE + 0.001)
    expected = ["PolicyChosen", "PolicyLate", "PolicyAnswered", "PolicyLate"]
    assert play.kinds() == expected, "each question has its own patience"


def test_a_policy_that_does_not_answer_is_removed_well_within_a_second() -> None:
    play = Play()
    token, link = play.in_force()
    play.ask(1)
    play.pass_time(CHOICE_SECONDS + 0.001)
    assert play.kinds() == ["PolicyChosen", "PolicyLate", "PolicyFailed"]
    assert "took longer than 0.4 s to choose" in play.events[-1].failure.message
    assert play.ended == [token]
    assert link.closed
    assert CHOICE_SECONDS < 0.5


def test_each_question_has_the_whole_time() -> None:
    """Two questions of two islands: the second waits for the first, and is not to blame."""
    play = Play()
    token, _ = play.in_force()
    play.ask(1)
    play.ask(2)
    play.pass_time(0.75 * CHOICE_SECONDS)
    play.desk.said(token, "answer", {"question": 1, "run": 7})
    play.pass_time(0.75 * CHOICE_SECONDS)
    play.desk.said(token, "answer", {"question": 2, "run": 8})
    assert "PolicyFailed" not in play.kinds()


@pytest.mark.parametrize(
    ("op", "fields", "words"),
    [
        ("failed", {"failure": pack(Failure("policy", "it raised"))}, "it raised"),
        ("answer", {"question": 3, "run": 1}, "an answer that was not asked for"),
        ("answer", {"question": 1, "run": "one"}, "an answer that was not asked for"),
        ("answer", {}, "nonsense"),
        ("sing", {}, "no message of policies is called"),
    ],
)
def test_a_policy_that_fails_or_talks_nonsense(op: str, fields: dict[str, Any], words: str) -> None:
    play = Play()
    token, _ = play.in_force()
    play.ask(1)
    play.desk.said(token, op, fields)
    assert play.kinds() == ["PolicyChosen", "PolicyFailed"]
    assert words in play.events[-1].failure.message
    play.desk.said(token, "answer", {"question": 1, "run": 1})
    play.desk.left(token, "closed")
    assert len(play.events) == 2, "the dead are not heard"
    assert play.ended == [token]


def test_a_process_that_ends() -> None:
    play = Play()
    token, _ = play.in_force()
    play.desk.left(token, "end of stream")
    assert "its process ended (end of stream)" in play.events[-1].failure.message
    play.desk.try_out("b", 6, "Other", b"")
    play.running[list(play.running)[-1]]("it could not be started")
    assert play.refused == [("b", 6, "policy Other is gone: it could not be started")]


def test_what_it_prints_is_for_who_set_it() -> None:
    play = Play()
    token, _ = play.in_force()
    play.desk.said(token, "printed", {"text": "hello\n"})
    assert play.printed == [("a", "Mine", "hello\n")]
