"""Law: a user's own policy is a few lines, and its test is a few more."""

from __future__ import annotations

from pathways_lab.core.scheduling.policies import PolicyView
from pathways_lab.core.scheduling.rules import Rules
from pathways_lab.testing import Script, Sketch


class NewestFirst:
    """What a user might write in a cell."""

    def choose(self, view: PolicyView) -> int:
        return max(view.candidates, key=lambda c: c.order).run


def test_a_policy_is_tested_without_devices_or_waiting() -> None:
    script = Script(devices=4, policy=NewestFirst(), rules=Rules(ahead=0.001, least=1))
    where = script.slice(4)
    plans = [script.register(Sketch(name).chain(where, f"{name}.f")) for name in "abc"]
    first, second, third = (script.submit(plan) for plan in plans)
    assert script.order == [first.run]
    script.finish_all()
    assert script.order == [first.run, third.run, second.run]
    assert "RunEnded" in script.story(third.run)
    assert [p.failure for p in script.policies] == [None]


class InTurns:
    """It remembers, in an attribute, whose turn it was."""

    def __init__(self) -> None:
        self.last = ""

    def choose(self, view: PolicyView) -> int:
        chosen = next((c for c in view.candidates if c.program != self.last), view.candidates[0])
        self.last = chosen.program
        return chosen.run


def test_a_policy_may_remember_and_the_object_of_the_user_is_not_touched() -> None:
    policy = InTurns()
    script = Script(devices=4, policy=policy, rules=Rules(ahead=0.001, least=1))
    where = script.slice(4)
    a, b = (script.register(Sketch(name).chain(where, f"{name}.f")) for name in "ab")
    runs = {script.submit(plan).run: plan.name for plan in (a, a, a, a, b, b, b)}
    script.finish_all()
    assert "".join(runs[run] for run in script.order) == "aababab"
    assert policy.last == ""
