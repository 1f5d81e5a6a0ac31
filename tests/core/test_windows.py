"""How far ahead grants run: by measured time, by one gang until there is one, and as is asked."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from pathways_lab.core.messages import (
    ClientJoined,
    LeaseRequested,
    LeaseReturned,
    ProgramRegistered,
    Refused,
    SliceRequested,
    WindowChosen,
)
from pathways_lab.core.messages.elastic import Answer
from pathways_lab.core.program.functions import Functions
from pathways_lab.core.program.plans import index_plan
from pathways_lab.core.program.program import Plan
from pathways_lab.core.scheduling.order import LATELY
from pathways_lab.core.scheduling.policies import (
    FIFO,
    Policy,
    Priority,
    ProportionalShare,
    ShortestFirst,
)
from pathways_lab.core.scheduling.rules import Rules
from pathways_lab.core.slices.topology import SliceRequest
from pathways_lab.testing import Script, Sketch

ME = "kernel-1"


def one_gang(script: Script, where: int, name: str = "p", client: str = ME) -> Plan:
    return script.register(Sketch(name).chain(where, f"{name}.f"), client=client)


def measured(script: Script, plan: Plan, seconds: float, client: str = ME) -> Plan:
    """The same, after two runs that took so long."""
    for _ in range(2):
        script.finish(script.submit(plan, client=client).run, seconds=seconds)
    return plan


def windowed(script: Script, plan: Plan, seconds: float) -> Plan:
    """The same program, with a window of its own."""
    steps = tuple(replace(s, node=replace(s.node, window=seconds)) for s in plan.steps)
    other = replace(plan, key=f"{plan.key} {seconds}", steps=steps)
    script.plans[other.key] = other
    script.send(ProgramRegistered(script.time, "program", ME, other))
    return other


def ahead(script: Script) -> int:
    """Gangs that have their places and have not ended."""
    return sum(map(len, script.waiting.values()))


# --- until it is known how long a gang takes --------------------------------------------------


def test_of_a_function_that_was_never_measured_one_gang_runs_and_one_is_ahead() -> None:
    """Forty of 300 ms would be twelve seconds for whoever comes next."""
    script = Script()
    where = script.slice(4)
    plan = one_gang(script, where)
    runs = [script.submit(plan) for _ in range(40)]
    assert script.order == [runs[0].run, runs[1].run]
    urgent = script.submit(one_gang(script, where, "urgent"), priority=9)
    script.finish_next(0.3)
    script.finish_next(0.3)
    assert ahead(script) == 2
    script.finish_all(0.3)
    assert script.ended[urgent.run].outcome == "finished"


def test_without_the_rule_all_of_them_have_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Functions, "seconds", lambda self, key: 0.001)
    with pytest.raises(AssertionError):
        test_of_a_function_that_was_never_measured_one_gang_runs_and_one_is_ahead()


def test_one_measured_end_opens_the_window() -> None:
    """Also for runs that were waiting before it."""
    script = Script()
    plan = one_gang(script, script.slice(4))
    runs = [script.submit(plan) for _ in range(40)]
    script.finish(runs[0].run, seconds=0.0001)
    script.finish(runs[1].run, seconds=0.0001)
    assert script.order == [run.run for run in runs], "all the others take 4 ms"


def test_a_gang_that_is_over_at_once_is_measured() -> None:
    script = Script()
    plan = one_gang(script, script.slice(4))
    runs = [script.submit(plan) for _ in range(40)]
    script.finish(runs[0].run, seconds=0.0)
    script.finish(runs[1].run, seconds=0.0)
    assert len(script.order) == 40


def test_the_first_run_of_a_program_is_granted_as_its_functions_become_known() -> None:
    script = Script()
    names = [f"f{n}" for n in range(4)]
    plan = script.register(Sketch("p").chain(script.slice(4), *names, *names))
    first = script.submit(plan)
    assert [(g.first, g.last) for g in script.grants] == [(0, 1), (1, 2)]
    script.finish_all(0.0001)
    assert script.ended[first.run].outcome == "finished"
    second = script.submit(plan)
    assert [(g.first, g.last) for g in script.grants if g.run == second.run] == [(0, 8)]


def test_what_only_a_first_gang_does_is_no_part_of_the_estimate() -> None:
    script = Script()
    plan = one_gang(script, script.slice(4))
    for seconds in (0.5, 0.001):
        script.finish(script.submit(plan).run, seconds=seconds)
    runs = [script.submit(plan) for _ in range(50)]
    assert script.order[2:] == [run.run for run in runs]


# --- what is known ----------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.002, 0.01, 0.03, 0.08, 0.3])
def test_no_more_is_ahead_than_a_tenth_of_a_second_or_two_gangs(seconds: float) -> None:
    script = Script()
    where = script.slice(4)
    single = measured(script, one_gang(script, where), seconds)
    sketch = Sketch("long").chain(where, *["p.f"] * 100)
    long = script.register(sketch)
    for _ in range(20):
        script.submit(single)
        script.submit(long)
    while script.finish_next(seconds):
        assert ahead(script) * seconds <= max(0.1, 2 * seconds) + 1e-9
        if script.control.state.lanes.lanes:
            assert ahead(script) * seconds >= min(0.05, seconds) - 1e-9, "devices are fed"
    assert len(script.ended) == 42


def test_shorter_gangs_find_no_room_that_longer_ones_do_not() -> None:
    """Else whoever has them would have the devices for himself, whatever the policy."""
    script = Script(policy=ProportionalShare({ME: 1, "kernel-2": 3}))
    script.client("kernel-2")
    plans = {}
    for client, seconds in ((ME, 0.005), ("kernel-2", 0.0059)):
        plan = one_gang(script, script.slice(4, client=client), f"of {client}", client)
        plans[client] = measured(script, plan, seconds, client), seconds
    whose = {}
    for _ in range(300):
        for client, (plan, _) in plans.items():
            whose[script.submit(plan, client=client).run] = client
    for _ in range(250):
        run = next(run for waiting in script.waiting.values() for run, _ in waiting)
        script.finish(run, seconds=plans[whose[run]][1])
    got = [whose[run] for run in script.order[4:]]
    assert got.count("kernel-2") > 2 * got.count(ME)


def test_a_slice_may_ask_for_less() -> None:
    script = Script()
    wide = script.slice(4)
    request = SliceRequest((4,), ("x",), window=0.02)
    script.send(SliceRequested(0.0, "slice", ME, 77, request))
    plan = measured(script, one_gang(script, 77), 0.01)
    usual = measured(script, one_gang(script, wide, "q"), 0.01)
    for _ in range(10):
        script.submit(plan)
    assert ahead(script) == 2
    for _ in range(10):
        script.submit(usual)
    assert ahead(script) == 6, "others on the same devices are not bound by it"
    script.finish_all(0.01)
    assert len(script.ended) == 24
    for window in (-1.0, 1e308):  # which is no number of microseconds
        wrong = SliceRequested(0.0, "slice", ME, 78, replace(request, window=window))
        (refused,) = script.send(wrong)
        assert isinstance(refused, Refused)
        assert "a window is a number of seconds" in refused.failure.message


def test_an_owner_says_how_far_ahead_grants_run_for_all() -> None:
    script = Script()
    plan = measured(script, one_gang(script, script.slice(4)), 0.01)
    for _ in range(30):
        script.submit(plan)
    assert ahead(script) == 6
    (kept,) = script.send(WindowChosen(0.0, "window", ME, 0.02, 5))
    assert kept == Answer("window", ME, 5, numbers={"seconds": 0.02})
    script.finish_all(0.01)
    assert len(script.ended) == 32
    for _ in range(8):
        script.submit(plan)
    assert ahead(script) == 2
    script.send(WindowChosen(0.0, "window", ME, 0.05, 6))
    assert ahead(script) == 3, "what waits is granted by the new one"
    (asked,) = script.send(WindowChosen(0.0, "window", ME, None, 7))
    assert asked == Answer("window", ME, 7, numbers={"seconds": 0.05})
    script.send(ClientJoined(0.0, "join", "guest", 3, owner=False))
    (refused,) = script.send(WindowChosen(0.0, "window", "guest", 9.0, 8))
    assert isinstance(refused, Answer)
    assert refused.failure is not None
    assert "owner" in f"{refused.failure.message} {refused.failure.remedy}"
    unknown = script.register(Sketch("new").chain(plan.slices[0], "new"))
    script.finish_all(0.01)
    script.send(WindowChosen(0.0, "window", ME, 10.0, 9))
    for _ in range(8):
        script.submit(unknown)
    assert ahead(script) == 2, "of what is not known two have their places, however large it is"


# --- where a policy has a choice ---------------------------------------------------------------


def beside(
    policy: Policy, seconds: float, client: str = "kernel-2", rules: Rules | None = None
) -> tuple[Script, Plan, Plan]:
    """A lab, a training of gangs that take so long, and what somebody else serves, measured."""
    script = Script(policy=policy, rules=rules)
    if client != ME:
        script.client(client)
    train = measured(script, one_gang(script, script.slice(4), "train"), seconds)
    token = one_gang(script, script.slice(4, client=client), "token", client)
    measured(script, token, 0.001, client)
    script.pass_time(2 * LATELY)
    return script, train, token


@pytest.mark.parametrize(
    ("policy", "client"),
    [
        *product([Priority(), ProportionalShare(by="program"), ShortestFirst()], [ME, "kernel-2"]),
        (ProportionalShare(), "kernel-2"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("seconds", [0.003, 0.005, 0.3])
def test_where_two_want_the_same_devices_two_gangs_or_ten_milliseconds_are_ahead(
    policy: Policy, seconds: float, client: str
) -> None:
    script, train, token = beside(policy, seconds, client)
    for _ in range(40):
        script.submit(train)
    assert ahead(script) * seconds >= 0.05, "a training that is alone is far ahead"
    run = script.submit(token, client=client, priority=1)
    while run.run not in script.order:
        script.finish_next(seconds)
    for _ in range(4):
        run = script.submit(token, client=client, priority=1)
        behind = ahead(script) - (run.run in script.order)
        assert behind * seconds <= max(0.01, 2 * seconds) + 1e-9
        while run.run not in script.ended:
            script.finish_next(seconds)
            script.pass_time(seconds / 100)


@pytest.mark.parametrize("policy", [None, Priority(), ProportionalShare()], ids=repr)
def test_who_comes_later_waits_for_the_gangs_that_have_their_places_and_for_no_more(
    policy: Policy | None,
) -> None:
    """Also where the gangs of the other client were never measured before."""
    script = Script(policy=policy)
    script.client("kernel-2")
    train, token = one_gang(script, script.slice(4), "train"), script.slice(4, client="kernel-2")
    runs = [script.submit(train).run for _ in range(40)]
    script.finish_next(0.3)
    script.pass_time(0.3)
    run = script.submit(one_gang(script, token, "token", "kernel-2"), client="kernel-2").run
    while run not in script.order:
        script.finish_next(0.3)
        script.pass_time(0.3)
    assert len(script.order) <= 1 + 2 + 1, "one ended, one runs, one is ahead"
    assert runs[3] not in script.order


@pytest.mark.parametrize("policy", [Priority(), ProportionalShare()], ids=repr)
def test_a_newcomer_is_next_also_when_others_used_less_than_was_thought(policy: Policy) -> None:
    script = Script(policy=policy)
    script.client("kernel-2")
    train = measured(script, one_gang(script, script.slice(4), "train"), 0.3)
    token = one_gang(script, script.slice(4, client="kernel-2"), "token", "kernel-2")
    script.pass_time(2 * LATELY)
    for _ in range(40):
        script.submit(train)
    run = script.submit(token, client="kernel-2").run
    granted = len(script.order)
    script.finish_next(0.2)
    assert script.order[granted:] == [run]


def test_under_fifo_who_comes_later_waits_for_all() -> None:
    script = Script(policy=FIFO())
    script.client("kernel-2")
    train, token = one_gang(script, script.slice(4), "train"), script.slice(4, client="kernel-2")
    runs = [script.submit(train).run for _ in range(40)]
    run = script.submit(one_gang(script, token, "token", "kernel-2"), client="kernel-2").run
    script.finish_all(0.3)
    assert script.order == [*runs, run]


def test_without_the_rule_as_much_is_ahead_as_of_who_is_alone() -> None:
    far = Rules(close=0.1)
    script, train, token = beside(Priority(), 0.005, rules=far)
    script.submit(token, client="kernel-2", priority=1)
    for _ in range(20):
        script.submit(train)
    assert ahead(script) > 10


def test_small_calls_of_several_are_granted_as_far_ahead_as_those_of_one() -> None:
    """To hear of their ends so often would cost more than they take."""
    script, train, _ = beside(Priority(), 0.0003)
    other = measured(script, one_gang(script, script.slice(4), "other"), 0.0003)
    script.pass_time(2 * LATELY)
    for _ in range(60):
        script.submit(train)
        script.submit(other, priority=1)
    assert ahead(script) == 120
    assert not any(grant.prompt for grant in script.grants[-100:])


def test_who_has_been_alone_for_a_while_is_far_ahead_again() -> None:
    script, train, token = beside(Priority(), 0.005)
    script.submit(token, client="kernel-2", priority=1)
    for _ in range(20):
        script.submit(train)
    assert ahead(script) == 2
    script.finish_next(0.001)
    script.pass_time(0.9 * LATELY)
    script.finish_next(0.005)
    assert ahead(script) == 2
    script.pass_time(0.2 * LATELY)
    script.finish_next(0.005)
    assert ahead(script) > 10


def test_under_fifo_and_on_other_devices_nobody_has_a_choice_and_nothing_changes() -> None:
    script, train, token = beside(FIFO(), 0.005)
    script.submit(token, client="kernel-2", priority=1)
    for _ in range(20):
        script.submit(train)
    assert ahead(script) > 10
    script = Script(devices=8, policy=Priority())
    script.client("kernel-2")
    train = measured(script, one_gang(script, script.slice(4), "train"), 0.005)
    token = one_gang(script, script.slice(4, client="kernel-2"), "token", "kernel-2")
    script.submit(token, client="kernel-2", priority=1)
    for _ in range(20):
        script.submit(train)
    assert ahead(script) > 10


def test_that_devices_are_shared_outlives_a_change_of_the_slices() -> None:
    script, train, token = beside(Priority(), 0.005)
    script.submit(token, client="kernel-2", priority=1)
    script.submit(train)
    script.slice(2)
    for _ in range(20):
        script.submit(train)
    assert ahead(script) <= 3, "one more before it is seen how long they take"


def test_where_order_is_off_nothing_is_bounded_by_others_either() -> None:
    script, train, token = beside(Priority(), 0.5, ME)
    script.send(LeaseRequested(script.time, "lease", ME, "island0", order=False))
    for _ in range(9):
        script.submit(train)
        script.submit(token, priority=1)
    assert ahead(script) == 18


def test_many_small_gangs_are_granted_together_also_where_others_want_the_devices() -> None:
    """Messages do not grow with gangs."""
    script, _, token = beside(Priority(), 0.005)
    small = script.register(Sketch("small").chain(script.slice(4), *["small.f"] * 600))
    script.submit(small)
    script.finish_all(0.00005)
    script.submit(token, client="kernel-2", priority=1)
    before = len(script.grants)
    script.submit(small)
    script.finish_all(0.00005)
    assert len(script.grants) - before <= 600 * 0.00005 / 0.005 + 2


def test_a_long_run_goes_on_being_overtaken_between_its_windows() -> None:
    """Else whoever trains in one run would have the devices after 64 tokens, up to its end."""
    script, _, token = beside(Priority(), 0.005)
    long = script.register(Sketch("long").chain(script.slice(4), *["long.f"] * 400))
    script.submit(long)
    script.finish_all(0.005)
    training = script.submit(long).run
    behind = []
    for _ in range(100):
        run, behind = script.submit(token, client="kernel-2", priority=1).run, [*behind, 0]
        while run not in script.ended:
            script.finish_next(0.005)
            behind[-1] += 1
    assert max(behind[1:]) <= 3
    assert training not in script.ended


def test_where_order_is_off_nothing_bounds_what_is_granted() -> None:
    """Gangs meet in a deadlock only when they are granted before one of them has ended."""
    script = Script()
    script.send(LeaseRequested(0.0, "lease", ME, "island0", order=False))
    plan = one_gang(script, script.slice(4))
    for _ in range(9):
        script.submit(plan)
    assert ahead(script) == 9
    script.finish_all(0.5)
    script.send(LeaseReturned(0.0, "return", ME, "island0"))
    for _ in range(9):
        script.submit(plan)
    assert ahead(script) == 2


def test_where_the_next_grant_waits_for_an_end_it_is_reported_at_once() -> None:
    script = Script()
    plan = one_gang(script, script.slice(4))
    polite = windowed(script, plan, 0.0)
    script.submit(plan)
    script.finish_all()
    script.submit(polite)
    script.submit(plan)
    assert [grant.prompt for grant in script.grants] == [True, True, False], "measured, bounded"
    script.finish_all()
    script.submit(plan)
    script.submit(polite)
    script.submit(plan)
    assert script.grants[-1].prompt, "one that waits is told at once that its devices are free"


def test_a_program_may_ask_for_less_and_nobody_else_feels_it() -> None:
    script = Script()
    where = script.slice(4)
    plan = measured(script, one_gang(script, where), 0.01)
    polite = windowed(script, plan, 0.0)
    for _ in range(4):
        script.submit(polite)
    assert ahead(script) == 1, "a gang with nothing before it"
    for _ in range(20):
        script.submit(plan)
    assert ahead(script) == 6
    script.finish_all(0.01)
    assert len(script.ended) == 26


def test_with_a_window_of_nothing_a_gang_has_its_place_when_its_devices_have_nothing_to_do() -> (
    None
):
    script = Script(rules=Rules(ahead=0.0))
    where = script.slice(4)
    plan = script.register(Sketch("p").chain(where, "f", "g", "h"))
    runs = [script.submit(plan) for _ in range(5)]
    while script.finish_next(0.001):
        assert ahead(script) <= 1
    assert all(script.ended[run.run].outcome == "finished" for run in runs)


def test_calls_of_unlike_windows_are_not_granted_together() -> None:
    script = Script()
    where = script.slice(4)
    plan = measured(script, script.register(Sketch("p").chain(where, "f", "f", "f")), 0.001)
    steps = list(plan.steps)
    steps[1] = replace(steps[1], node=replace(steps[1].node, window=0.0))
    mixed = replace(plan, key="mixed", steps=tuple(steps))
    script.plans["mixed"] = mixed
    script.send(ProgramRegistered(0.0, "program", ME, mixed))
    run = script.submit(mixed)
    script.finish_all(0.001)
    windows = [(g.first, g.last) for g in script.grants if g.run == run.run]
    assert windows == [(0, 1), (1, 2), (2, 3)]


def test_a_window_is_cut_by_the_kinds_of_its_steps() -> None:
    """It is cut anew whenever it is known better how long gangs take."""
    script = Script()
    where = script.slice(4)
    sketch = Sketch("p")
    (value,) = sketch.call("p.f", where, [sketch.input(where, 1)], [1])
    for step in range(300):
        (value,) = sketch.call("p.f" if step % 2 else "p.g", where, [value], [1])
    plan = script.register(sketch.output(value))
    index = index_plan(plan, ME, {where: script.binding(where)})
    functions, asked = Functions(1e-6), []

    def limit(slice_id: int) -> int:
        asked.append(slice_id)
        return 100_000

    window = index.window(0, functions, Rules(), limit)
    assert (window.first, window.last) == (0, 301)
    assert window.costs == (1,) * 301
    assert len(asked) == 2, "once for each function, and not for each of its calls"
