"""Laws: a policy that runs elsewhere is asked and not waited for; nobody else is held up."""

from __future__ import annotations

import pytest

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import (
    AskPolicy,
    Command,
    PolicyAnswered,
    PolicyChosen,
    PolicyFailed,
    PolicyLate,
    PolicySet,
)
from pathways_lab.core.program.program import Plan
from pathways_lab.core.scheduling.policies import FIFO, RemotePolicy
from pathways_lab.core.scheduling.rules import Rules
from pathways_lab.testing import Script, Sketch

ONE = Rules(window=0.01, ahead=0.001, least=1)
"""One gang is granted at a time."""
FAR = RemotePolicy("Far", 7)


class Elsewhere:
    """Two clients on island0, one on island1, and a policy that the test plays."""

    def __init__(self, rules: Rules = ONE) -> None:
        self.script = Script(islands=2, devices=4, rules=rules)
        self.plans: dict[str, Plan] = {}
        for n, island in enumerate(("island0", "island0", "island1"), 1):
            name = f"kernel-{n}"
            if n > 1:
                self.script.client(name)
            where = self.script.slice(4, client=name, island=island)
            sketch = Sketch(f"p{n}").chain(where, f"f{n}")
            self.plans[name] = self.script.register(sketch, client=name)
        self.send(PolicyChosen(0.0, "set", "kernel-2", FAR, 3))

    def send(self, event: object) -> list[Command]:
        return self.script.send(event)  # type: ignore[arg-type]

    def submit(self, n: int) -> int:
        return self.script.submit(self.plans[f"kernel-{n}"], client=f"kernel-{n}").run

    @property
    def asked(self) -> list[AskPolicy]:
        return [c for _, commands in self.script.log for c in commands if isinstance(c, AskPolicy)]

    def answer(self, run: int, question: int | None = None, policy: int = 7) -> list[Command]:
        number = self.asked[-1].question if question is None else question
        return self.send(PolicyAnswered(self.script.time, "answer", policy, number, run))

    def contested(self) -> tuple[int, int, int]:
        """One run is granted; two behind it wait for the policy."""
        runs = self.submit(1), self.submit(1), self.submit(2)
        assert self.script.order == [runs[0]]
        self.script.finish(runs[0])
        assert self.script.order == [runs[0]]
        return runs


def test_the_run_that_an_answer_names_is_granted() -> None:
    lab = Elsewhere()
    first, second, third = lab.contested()
    (asked,) = lab.asked
    assert [c.run for c in asked.view.candidates] == [second, third]
    assert asked.policy == 7
    assert [c.devices for c in asked.view.candidates] == [4, 4]
    lab.answer(third)
    assert lab.script.order == [first, third]
    lab.script.finish(third)
    assert lab.script.order == [first, third, second], "who is alone needs no answer"
    assert len(lab.asked) == 1


def test_other_islands_go_on_while_an_answer_is_pending() -> None:
    lab = Elsewhere()
    lab.contested()
    for _ in range(5):
        there = lab.submit(3)
        assert lab.script.order[-1] == there
        lab.script.finish(there)


def test_a_late_answer_changes_nothing_and_then_the_policy_is_asked_again() -> None:
    lab = Elsewhere()
    first, second, third = lab.contested()
    lab.send(PolicyLate(0.0, "late", 7))
    assert lab.script.order == [first, second], "FIFO decides this turn"
    more = lab.submit(1), lab.submit(2)
    lab.script.finish(second)
    assert lab.script.order == [first, second, third], "and the next ones, at once"
    assert len(lab.asked) == 1, "who is behind is not asked more"
    lab.answer(third)
    lab.script.finish(third)
    assert [asked.question for asked in lab.asked] == [1, 2]
    lab.answer(more[1])
    assert lab.script.order[-1] == more[1]


def test_an_answer_about_what_has_changed_meanwhile_is_no_fault() -> None:
    """The named run was cancelled: the policy is asked about the rest."""
    from pathways_lab.core.messages import CancelRequested

    lab = Elsewhere()
    first, second, third = lab.contested()
    fourth = lab.submit(2)
    lab.send(CancelRequested(0.0, "cancel", "kernel-2", (third,)))
    lab.answer(third)
    assert lab.script.order == [first]
    assert [c.run for c in lab.asked[-1].view.candidates] == [second, fourth]
    lab.answer(fourth)
    assert lab.script.order == [first, fourth]


@pytest.mark.parametrize("run", [12345, -1])
def test_a_choice_that_is_not_eligible_removes_the_policy(run: int) -> None:
    lab = Elsewhere()
    first, second, third = lab.contested()
    commands = lab.answer(run)
    (told,) = (c for c in commands if isinstance(c, PolicySet))
    assert (told.client, told.name, told.owner) == ("kernel-2", "ProportionalShare", "")
    assert f"policy Far chose {run}, which is none of the eligible runs ({second}, {third})" in str(
        told.failure
    )
    assert lab.script.order == [first, second], "the order of submission goes on"
    lab.script.finish_all()
    assert lab.script.order == [first, second, third]


def test_an_answer_to_what_was_not_asked_removes_the_policy() -> None:
    lab = Elsewhere()
    first, second, third = lab.contested()
    commands = lab.answer(third, question=99)
    (told,) = (c for c in commands if isinstance(c, PolicySet))
    assert f"policy Far chose {third}, which is none" in str(told.failure)
    assert lab.script.order == [first, second]


def test_a_policy_that_failed_is_removed_and_fifo_goes_on() -> None:
    lab = Elsewhere()
    first, second, _ = lab.contested()
    why = Failure("policy", "it is gone")
    assert not lab.send(PolicyFailed(0.0, "failed", 6, why)), "last words of an older one"
    commands = lab.send(PolicyFailed(0.0, "failed", 7, why))
    assert any(isinstance(c, PolicySet) and c.failure == why for c in commands)
    assert lab.script.order == [first, second]


def test_answers_of_a_policy_that_was_replaced_are_not_heard() -> None:
    lab = Elsewhere()
    first, second, third = lab.contested()
    commands = lab.send(PolicyChosen(0.0, "set", "kernel-1", FIFO(), 9))
    (told,) = (c for c in commands if isinstance(c, PolicySet))
    assert (told.client, told.request, told.failure) == ("kernel-1", 9, None)
    assert lab.script.order == [first, second]
    assert not lab.answer(third)
    lab.script.finish_all()


def test_overtaking_is_bounded_for_answers_too() -> None:
    rules = Rules(window=0.01, ahead=0.001, least=1, overtaking=3)
    lab = Elsewhere(rules)
    running, patient = lab.submit(2), lab.submit(1)
    for _ in range(8):
        lab.submit(2)
    while patient not in lab.script.order:
        lab.script.finish(lab.script.order[-1])
        if patient in lab.script.order:
            break
        later = [c.run for c in lab.asked[-1].view.candidates if c.run != patient]
        lab.answer(later[0])
    assert lab.script.order.index(patient) - lab.script.order.index(running) - 1 == 3


def test_who_waits_for_memory_is_chosen_by_the_policy_too() -> None:
    script = Script(devices=4, memory=100, rules=ONE)
    script.client("kernel-2")
    plans = {}
    for name in ("kernel-1", "kernel-2"):
        where = script.slice(4, client=name)
        sketch = Sketch(name).chain(where, f"{name}.f", nbytes=45)
        plans[name] = script.register(sketch, client=name)
    script.send(PolicyChosen(0.0, "set", "kernel-1", FAR))
    running = script.submit(plans["kernel-1"], client="kernel-1")
    waiting = [script.submit(plans[n], client=n) for n in ("kernel-1", "kernel-2")]
    script.drop(*running.outputs)
    assert script.order == [running.run]
    script.finish(running.run)
    asked = [c for _, cs in script.log for c in cs if isinstance(c, AskPolicy)]
    assert [c.run for c in asked[-1].view.candidates] == [w.run for w in waiting]
    last = asked[-1].question
    script.send(PolicyAnswered(0.0, "answer", 7, last, waiting[1].run))
    assert script.order == [running.run, waiting[1].run]
    assert running.run in script.ended
    assert not script.ended.keys() & {w.run for w in waiting}
