"""Laws: policies order runs and nothing else; bad ones go; nobody is overtaken for ever."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pathways_lab.core.messages import PolicyChosen, PolicySet
from pathways_lab.core.scheduling.policies import (
    FIFO,
    Candidate,
    Policy,
    PolicyView,
    Priority,
    ProportionalShare,
    ShortestFirst,
    validate,
)
from pathways_lab.core.scheduling.rules import Rules
from pathways_lab.core.scheduling.turns import AWAY, TRACE, Usage
from pathways_lab.testing import Script, Sketch

ONE = Rules(window=0.01, ahead=0.001, least=1)
"""One gang is granted at a time."""


def crowd(policy: Policy, clients: int = 2, rules: Rules = ONE) -> tuple[Script, list]:
    """Clients with one-gang programs on the same four devices."""
    script = Script(rules=rules, policy=policy)
    plans = []
    for n in range(1, clients + 1):
        if n > 1:
            script.client(f"kernel-{n}")
        where = script.slice(4, client=f"kernel-{n}")
        sketch = Sketch(f"p{n}").chain(where, f"f{n}")
        plans.append(script.register(sketch, client=f"kernel-{n}"))
    return script, plans


def owners(script: Script) -> list[int]:
    """Whose run every grant was, as the number of its client."""
    names = {r: c.client for r, c in script.ended.items()}
    return [int(names[r].rpartition("-")[2]) for r in script.order]


def test_fifo_is_the_order_of_submission() -> None:
    script, plans = crowd(FIFO())
    runs = [script.submit(plans[n % 2], client=f"kernel-{1 + n % 2}").run for n in range(6)]
    script.finish_all()
    assert script.order == runs


def test_the_highest_priority_goes_first() -> None:
    script, plans = crowd(Priority(), 1)
    low, mid, high = (script.submit(plans[0], priority=p).run for p in (0, 1, 2))
    last = script.submit(plans[0], priority=2).run
    script.finish_all()
    assert script.order == [low, high, last, mid]  # the first was alone when it came


def test_producers_inherit_the_priority_of_those_who_wait_for_them() -> None:
    script, plans = crowd(Priority(), 1)
    script.submit(plans[0])
    rival = script.submit(plans[0], priority=1)
    maker = script.submit(plans[0])
    urgent = script.submit(plans[0], maker.outputs, priority=2)
    script.finish_all()
    assert script.order[1:] == [maker.run, urgent.run, rival.run]


def test_readers_inherit_the_priority_of_who_consumes_what_they_read() -> None:
    script, plans = crowd(Priority(), 1)
    where = plans[0].slices[0]
    reads, sketch = Sketch("reads"), Sketch("consumes")
    reading = script.register(reads.chain(where, "r"))
    made = sketch.call("c", where, [sketch.input(where, 1)], [1], donated=(0,))
    consuming, buffer = script.register(sketch.output(*made)), script.upload(where, 1)
    script.submit(plans[0])
    rival = script.submit(plans[0], priority=1)
    reader = script.submit(reading, [buffer])
    urgent = script.submit(consuming, [buffer], priority=2)
    script.finish_all()
    assert script.order[1:] == [reader.run, urgent.run, rival.run]


def test_an_upload_has_its_memory_before_runs_whatever_the_policy() -> None:
    """Its bytes are on the hosts already."""
    script = Script(memory=16, policy=Priority(), rules=Rules(assumed=0.001))
    where = script.slice(4)
    sketch = Sketch("p")
    plan = script.register(sketch.output(*sketch.call("f", where, [], [8])))
    first = script.submit(plan)
    run, upload = script.submit(plan, priority=2), script.upload(where, 10)
    assert script.order == [first.run, run.run]
    third = script.submit(plan, priority=2)
    script.drop(*first.outputs, *run.outputs)
    assert script.control.state.store.buffers[upload].admitted
    assert script.order == [first.run, run.run]
    script.drop(upload)
    assert script.order == [first.run, run.run, third.run]


@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (1, 2, 4, 8)])
def test_shares_of_device_time_are_those_of_the_weights(weights: tuple[int, ...]) -> None:
    names = {f"kernel-{n + 1}": float(w) for n, w in enumerate(weights)}
    script, plans = crowd(ProportionalShare(names), 4)
    seconds = (0.004, 0.002, 0.001, 0.003)
    spent = [0.0] * 4
    owner: dict[int, int] = {}
    for n in [*range(4)] * 6:
        owner[script.submit(plans[n], client=f"kernel-{n + 1}").run] = n
    for turn in range(1300):
        run = next(w[0][0] for w in script.waiting.values() if w)
        n = owner[run]
        script.pass_time(seconds[n])
        spent[n] += seconds[n] * (turn >= 100)
        script.finish(run, seconds=seconds[n])
        owner[script.submit(plans[n], client=f"kernel-{n + 1}").run] = n
    for share, weight in zip(spent, weights, strict=True):
        assert share / sum(spent) == pytest.approx(weight / sum(weights), rel=0.05)


def served(script: Script, turns: int) -> dict[str, float]:
    """Device seconds by client in so many turns of 10 ms, everybody having work to do."""
    spent: dict[str, float] = {}
    for _ in range(turns):
        run = next(w[0][0] for w in script.waiting.values() if w)
        client = script.control.state.runs[run].client
        spent[client] = spent.get(client, 0.0) + 0.01
        script.pass_time(0.01)
        script.finish(run, seconds=0.01)
    return spent


def test_who_comes_does_not_get_everything_because_others_were_alone() -> None:
    script, plans = crowd(ProportionalShare())
    for _ in range(700):
        script.submit(plans[0])
    assert served(script, 500) == {"kernel-1": pytest.approx(5.0)}
    for _ in range(60):
        script.submit(plans[1], client="kernel-2")
    spent = served(script, 40)
    assert spent["kernel-1"] == pytest.approx(spent["kernel-2"], abs=0.03)


def test_who_pauses_for_a_moment_is_not_new() -> None:
    """Who submits the next run when the last one has ended keeps what it has used."""
    usage = Usage()
    usage.came("a", 0.0)
    usage.came("b", 0.0)
    usage.add("a", 3.0)
    usage.went("a", 5.0)
    usage.came("a", 5.0 + AWAY / 2)
    assert usage.used == {"a": TRACE + 3.0}
    usage.went("a", 6.0)
    usage.came("a", 6.0 + AWAY)
    assert usage.used == {"b": TRACE}, "who was away for longer is new, and goes before others"


def test_a_new_policy_forgets_what_was_used_before() -> None:
    script, plans = crowd(FIFO())
    for _ in range(300):
        script.submit(plans[0])
    script.submit(plans[1], client="kernel-2")
    served(script, 100)
    script.send(PolicyChosen(script.time, "set", "kernel-1", ProportionalShare()))
    for _ in range(60):
        script.submit(plans[1], client="kernel-2")
    spent = served(script, 40)
    assert spent["kernel-1"] == pytest.approx(spent["kernel-2"], abs=0.03)


def test_clients_share_equally_among_equal_priorities() -> None:
    script, plans = crowd(Priority())
    for _ in range(60):
        script.submit(plans[0], client="kernel-1")
    for _ in range(60):
        script.submit(plans[1], client="kernel-2")
    spent = served(script, 40)
    assert spent["kernel-1"] == pytest.approx(spent["kernel-2"], abs=0.03)


def test_shares_may_be_by_program() -> None:
    script, plans = crowd(ProportionalShare({"p1": 3.0, "p2": 1.0}, by="program"))
    for _ in range(40):
        for n, plan in enumerate(plans):
            script.submit(plan, client=f"kernel-{n + 1}")
    for _ in range(40):
        script.finish_next(0.001)
        script.pass_time(0.001)
    script.finish_all()
    assert owners(script)[:40].count(1) == pytest.approx(30, abs=2)


def test_the_shortest_by_measured_time_goes_first() -> None:
    script, plans = crowd(ShortestFirst())
    slow, quick = (script.submit(p, client=f"kernel-{n + 1}") for n, p in enumerate(plans))
    script.finish(slow.run, seconds=0.1)
    script.finish(quick.run, seconds=0.01)
    script.submit(plans[0], client="kernel-1")
    first = script.submit(plans[0], client="kernel-1").run
    second = script.submit(plans[1], client="kernel-2").run
    script.finish_all(0.1)
    assert script.order.index(second) < script.order.index(first)


@dataclass(frozen=True)
class Latest:
    """A user's own policy is a few lines."""

    def choose(self, view: PolicyView) -> int:
        return max(view.candidates, key=lambda c: c.order).run


@pytest.mark.parametrize(("bound", "most"), [(3, 3), (None, 19)])
def test_overtaking_is_bounded_whatever_the_policy(bound: int | None, most: int) -> None:
    """Without the rule the first to come is the last to go."""
    rules = Rules(window=0.01, ahead=0.001, least=1, overtaking=bound)
    script, plans = crowd(Latest(), 2, rules)
    script.submit(plans[1], client="kernel-2")
    patient = script.submit(plans[0]).run
    for _ in range(19):
        script.submit(plans[1], client="kernel-2")
    script.finish_all()
    assert script.order.index(patient) - 1 == most


def test_a_run_that_needs_two_busy_slices_is_not_passed_for_ever() -> None:
    """Each of its slices is always kept busy by others; FIFO alone would starve it."""
    script = Script(devices=2, rules=Rules(window=0.01, ahead=0.01, least=1, overtaking=4))
    left, right = script.slice(1), script.slice(1)
    lonely = [
        script.register(Sketch(n).chain(s, f"{n}.f")) for n, s in (("left", left), ("right", right))
    ]
    sketch = Sketch("both")
    v, w = sketch.input(left, 1), sketch.input(right, 1)
    made = sketch.call("l", left, [v], [1]) + sketch.call("r", right, [w], [1])
    both = script.register(sketch.output(*made))
    for _ in range(4):
        for plan in lonely:
            script.submit(plan)
    run = script.submit(both).run
    passed = 0
    while run not in script.order:
        passed += 1
        assert passed < 30
        busy = [s for w in script.waiting.values() for s in w]
        script.finish(busy[passed % len(busy)][0], seconds=0.005)
        for plan in lonely:
            script.submit(plan)


class Raises:
    def choose(self, view: PolicyView) -> int:
        raise ZeroDivisionError("oh")


class Elsewhere:
    def choose(self, view: PolicyView) -> int:
        return -1


class Nothing:
    pass


class Fickle:
    """Passes the validation and fails at work."""

    def choose(self, view: PolicyView) -> int:
        return view.candidates[0].run if view.time < 5 else 12345


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Raises(), "raised ZeroDivisionError: oh"),
        (Elsewhere(), "chose -1, which is none of the eligible runs"),
        (Nothing(), "has no method choose"),
    ],
)
def test_a_bad_policy_is_not_installed(policy: Policy, words: str) -> None:
    script = Script()
    commands = script.send(PolicyChosen(0.0, "set", "kernel-1", policy))
    (answer,) = (c for c in commands if isinstance(c, PolicySet))
    assert answer.name == "ProportionalShare"
    assert answer.failure is not None
    assert words in answer.failure.message
    assert answer.failure.remedy


def test_a_policy_that_fails_at_work_is_removed_and_equal_shares_go_on() -> None:
    script, plans = crowd(Fickle())
    script.pass_time(10.0)
    runs = [script.submit(plans[n % 2], client=f"kernel-{1 + n % 2}").run for n in range(6)]
    script.finish_all()
    assert sorted(script.order) == runs
    assert [p.name for p in script.policies] == ["Fickle", "ProportionalShare"]
    assert "chose 12345" in script.policies[-1].failure.message  # type: ignore[union-attr]


def test_wrong_shares_are_refused() -> None:
    with pytest.raises(ValueError, match="weights are positive"):
        ProportionalShare({"a": 0})
    with pytest.raises(ValueError, match="'client' or by 'program'"):
        ProportionalShare(by="moon")
    with pytest.raises(ValueError, match=r"weights are numbers by name, like .*, not 3"):
        ProportionalShare(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", [FIFO(), Priority(), ShortestFirst(), ProportionalShare()])
def test_policies_are_pure(policy: Policy) -> None:
    some = tuple(Candidate(n, "c", "p", 0, n, 0, 0, 0, 4, False, 0) for n in (1, 2))
    assert validate(policy) is None
    assert policy.choose(PolicyView(0.0, some)) == policy.choose(PolicyView(0.0, some)) == 1
