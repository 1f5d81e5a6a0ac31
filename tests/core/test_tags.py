"""What clients say of their runs reaches the policy, small and plain, and changes nothing else."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest

from pathways_lab.core.scheduling.policies import APART, FIFO, Policy, PolicyView, Priority
from pathways_lab.core.scheduling.tags import HIGHEST, NAMES, TEXT, wrong
from pathways_lab.testing import Script, Sketch
from tests.core.test_policies import ONE


class EarliestDeadline:
    """What has no deadline goes last."""

    most: ClassVar[int] = 0

    def choose(self, view: PolicyView) -> int:
        shown = sum(candidate.program == "serve" for candidate in view.candidates)
        EarliestDeadline.most = max(EarliestDeadline.most, shown)
        return min(view.candidates, key=lambda c: c.data.get("deadline", math.inf)).run


def serving(policy: Policy) -> tuple[Script, list]:
    """One client, one program of one gang at a time."""
    script = Script(rules=ONE, policy=policy)
    where = script.slice(4)
    return script, [script.register(Sketch("serve").chain(where, "f"))]


def test_runs_of_one_program_are_told_apart_by_their_data() -> None:
    script, (plan,) = serving(EarliestDeadline())
    first, *runs = [
        script.submit(plan, data={"deadline": float(n)}).run for n in (9, 3, 1, 2, 3)
    ]  # fmt: skip
    late = script.submit(plan).run
    script.finish_all()
    assert script.order == [first, runs[1], runs[2], runs[0], runs[3], late]


def test_data_says_nothing_to_policies_that_do_not_read_it() -> None:
    for policy in FIFO(), Priority():
        script, (plan,) = serving(policy)
        runs = [script.submit(plan, data={"deadline": -float(n)}).run for n in range(5)]
        script.finish_all()
        assert script.order == runs


def test_so_many_runs_of_a_program_are_shown_however_many_wait() -> None:
    EarliestDeadline.most = 0
    script, (plan,) = serving(EarliestDeadline())
    for n in range(4 * APART):
        script.submit(plan, data={"deadline": -float(n)})
    script.finish_all()
    assert EarliestDeadline.most == APART
    assert len(script.order) == 4 * APART


def test_runs_with_equal_data_are_one_candidate() -> None:
    EarliestDeadline.most = 0
    script, (plan,) = serving(EarliestDeadline())
    for n in range(40):
        script.submit(plan, data={"user": "ann" if n % 2 else "bob"})
    script.finish_all()
    assert EarliestDeadline.most == 2


@pytest.mark.parametrize(
    "data",
    [
        [("a", 1)],
        (("a", [1]),),
        (("a", {}),),
        (("a", math.inf),),
        (("a", math.nan),),
        (("a", 1 << 63),),
        (("a", "x" * (TEXT + 1)),),
        (("", 1),),
        ((1, 1),),
        (("x" * (TEXT + 1), 1),),
        (("a", 1), ("a", 2)),
        (("a",),),
        tuple((f"n{n}", n) for n in range(NAMES + 1)),
        None,
    ],
)
def test_what_is_not_small_and_plain_is_none(data: object) -> None:
    assert "data" in wrong(0, data)


@pytest.mark.parametrize("priority", [HIGHEST + 1, -HIGHEST - 1, 1.0, True, "high", None])
def test_a_priority_is_a_whole_number(priority: object) -> None:
    assert "a whole number from" in wrong(priority, ())


def test_plain_values_of_every_kind_may_be_said() -> None:
    said = (("a", 1), ("b", -2.5), ("c", "x" * TEXT), ("d", None), ("e", True))
    assert wrong(-HIGHEST, said) == ""


def test_a_run_that_has_begun_yields_between_its_gangs_and_goes_on_afterwards() -> None:
    script = Script(rules=ONE, policy=Priority())
    where = script.slice(4)
    long = script.register(Sketch("long").chain(where, *"abcdef"))
    short = script.register(Sketch("short").chain(where, "g"))
    slow = script.submit(long).run
    script.finish_next(0.02)  # measured gangs fill a window each
    urgent = script.submit(short, priority=1).run
    script.finish_all(0.02)
    assert 0 < script.order.index(urgent) < len(script.order) - 1
    assert set(script.order) == {slow, urgent}
