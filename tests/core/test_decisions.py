"""Steps with a condition: granted when it is decided, skipped when it does not hold."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pathways_lab.core.errors import PathwaysError
from pathways_lab.core.memory.liveness import profile
from pathways_lab.core.messages import (
    FunctionAnnounced,
    Grant,
    HostReport,
    ProgramRegistered,
    Refused,
)
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.legality import outputs_of
from pathways_lab.core.program.lowering import lower
from pathways_lab.core.program.program import (
    Call,
    Node,
    Plan,
    Program,
    Signature,
    Transfer,
    Value,
    When,
)
from pathways_lab.testing import Script, Submitted
from tests.core.stories import BROKEN, KNOWN, told
from tests.lines import lines

TWO = Layout((("x", 2),), ())


class Draft:
    """A program of calls on two slices."""

    def __init__(self, *slices: int) -> None:
        self.slices = slices
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.signatures: dict[str, Signature] = {}

    def value(self, where: int, nbytes: int = 4) -> int:
        self.values.append(Value((), "int32", where, TWO, nbytes))
        return len(self.values) - 1

    def call(
        self, name: str, where: int, *inputs: int, when: When | None = None, into: int = -1,
        nbytes: int = 4,
    ) -> int:  # fmt: skip
        made = self.value(where, nbytes) if into < 0 else into
        self.signatures[name] = Signature(name, where, (TWO,) * len(inputs), (TWO,))
        self.nodes.append(Call(name, where, inputs, (made,), name=name, when=when))
        return made

    def program(self, *outputs: int, inputs: tuple[int, ...] = (0,)) -> Program:
        return Program("p", tuple(self.values), tuple(self.nodes), inputs, outputs, self.signatures)


def registered(script: Script, plan: Plan) -> Plan:
    script.plans[plan.key] = plan
    for step in plan.steps:
        if isinstance(step.node, Call):
            f, s = step.node.function, step.node.slice
            script.send(FunctionAnnounced(0.0, "function", "kernel-1", f, s))
    script.send(ProgramRegistered(0.0, "program", "kernel-1", plan))
    return plan


def conditional(a: int, b: int) -> Program:
    """If d: f on *a* and g on *b*, else h on *b*; k reads what they make, free reads the input."""
    draft = Draft(a, b)
    x = draft.value(a)
    d = draft.call("d", a, x)
    out = draft.value(b)
    yes, no = When(d, 1, 2), When(d, 0, 2)
    y = draft.call("f", a, x, when=yes, nbytes=64)
    draft.call("g", b, y, when=yes, into=out)
    draft.call("h", b, x, when=no, into=out)
    k = draft.call("k", b, out)
    free = draft.call("free", a, x)
    return draft.program(k, free)


def story(**more: int) -> tuple[Script, Plan]:
    script = Script(islands=2, rules=KNOWN, **more)
    a, b = script.slice(2, island="island0"), script.slice(2, island="island1")
    return script, registered(script, lower(conditional(a, b)))


def named(plan: Plan, grants: list[Grant], *, skipped: bool = False) -> list[str]:
    found = dict.fromkeys((g.first, g.last) for g in grants if g.skipped == skipped)
    return [plan.steps[s].node.name for first, last in found for s in range(first, last)]


def decide(script: Script, plan: Plan, run: Submitted, case: int, name: str = "d") -> None:
    node = next(s.node for s in plan.steps if s.node.name == name)
    host = script.binding(plan.slices[0]).hosts[0]
    decided = tuple((run.run, value, case) for value in outputs_of(node))
    script.send(HostReport(0.0, "r", host, decided=decided))


@pytest.mark.parametrize("case", [0, 1])
def test_only_what_depends_on_a_decision_waits_for_it(case: int) -> None:
    script, plan = story()
    run = script.submit(plan)
    first = named(plan, script.grants)
    assert set(first) == {"d", "free"}
    script.finish_all()
    assert named(plan, script.grants) == first
    decide(script, plan, run, case)
    decide(script, plan, run, 1 - case)  # a repeat changes nothing
    script.finish_all()
    taken = {*named(plan, script.grants)} - {*first}
    assert {"f", "g"} <= taken if case else "h" in taken
    assert {"f", "g"}.isdisjoint(taken) if not case else "h" not in taken
    assert "k" in taken
    left = {*named(plan, script.grants, skipped=True)}
    assert left.isdisjoint(taken)
    assert left | taken | {*first} == {s.node.name for s in plan.steps}
    assert script.ended[run.run].outcome == "finished"
    assert [script.resolved[b] for b in run.outputs] == [None, None]
    script.drop(*run.outputs)
    assert not any(script.used())


def test_what_is_not_taken_is_given_back_at_once() -> None:
    script, plan = story()
    run = script.submit(plan)
    before = script.used()
    decide(script, plan, run, 0)
    assert max(before) >= 64
    assert max(script.used()) < 64  # nothing of the other branch has ended: only h was granted


def test_the_places_of_skipped_steps_leave_no_gap() -> None:
    script, plan = story()
    decide(script, plan, script.submit(plan), 0)
    last: dict[str, int] = {}
    for grant in script.grants:
        assert grant.previous == last.get(grant.host, -1)
        last[grant.host] = grant.place


def test_a_decision_that_fails_ends_its_run() -> None:
    script, plan = story()
    run = script.submit(plan)
    step = next(i for i, s in enumerate(plan.steps) if s.node.name == "d")
    script.finish(run.run, step, failure=BROKEN)
    script.finish_all()
    assert script.ended[run.run].outcome == "failed"
    assert script.resolved[run.outputs[0]] is not None
    assert script.resolved[run.outputs[1]] is None  # what does not depend on it is good
    script.drop(*run.outputs)
    assert not any(script.used())


def test_a_host_that_is_lost_before_it_decides_ends_the_run() -> None:
    from pathways_lab.core.messages import HostLost

    script, plan = story()
    run = script.submit(plan)
    script.send(HostLost(0.0, "lost", script.binding(plan.slices[0]).hosts[0], "gone"))
    script.finish_all()
    assert script.ended[run.run].outcome == "failed"


def test_steps_that_exclude_each_other_may_make_one_value_and_no_others() -> None:
    a, b = 1 << 32 | 1, 1 << 32 | 2
    right = conditional(a, b)
    lower(right)

    def without(name: str, **change: object) -> Program:
        nodes = [replace(n, **change) if n.name == name else n for n in right.nodes]  # type: ignore[arg-type]
        return replace(right, nodes=tuple(nodes))

    for wrong, text in (
        (without("h", when=None), "a second time"),
        (without("h", when=When(1, 1, 2)), "a second time"),
        (without("h", when=When(1, 0, 3)), "case 0 of 3"),
        (without("k", inputs=(3,)), "which only another branch makes"),
        (replace(right, outputs=(3,)), "which only a branch makes"),
        (without("f", donated=(0,)), "outside of its branch"),
    ):
        with pytest.raises(PathwaysError, match=text):
            lower(wrong)


def test_a_decision_is_one_number() -> None:
    script = Script(islands=2, rules=KNOWN)
    a, b = script.slice(2, island="island0"), script.slice(2, island="island1")
    plan = lower(conditional(a, b))
    values = tuple(replace(v, dtype="float32") for v in plan.values)
    script.send(ProgramRegistered(0.0, "program", "kernel-1", replace(plan, values=values)))
    assert "a decision is one int32" in told(script, Refused)[-1].failure.message


def loop(a: int, b: int, most: int) -> Program:
    """A loop whose body goes over both slices and back, as nested conditions."""
    draft = Draft(a, b)
    state, out = draft.value(a), -1
    out = draft.value(a)
    when: When | None = None
    for turn in range(most):
        d = draft.call(f"d{turn}", a, state, when=when)
        draft.nodes.append(Transfer(state, out, f"exit{turn}", when=When(d, 0, 2)))
        when = When(d, 1, 2)
        y = draft.call(f"f{turn}", b, state, when=when)
        last = out if turn == most - 1 else -1
        state = draft.call(f"g{turn}", a, y, when=when, into=last)
    return draft.program(out)


@pytest.mark.parametrize("turns", range(5))
def test_a_loop_ends_when_it_is_decided(turns: int) -> None:
    script = Script(islands=2, rules=KNOWN)
    a, b = script.slice(2, island="island0"), script.slice(2, island="island1")
    plan = registered(script, lower(loop(a, b, 4)))
    run = script.submit(plan)
    script.finish_all()
    for turn in range(min(turns + 1, 4)):
        decide(script, plan, run, int(turn < turns), f"d{turn}")
        script.finish_all()
    ran = [name for name in named(plan, script.grants) if name[0] in "fg"]
    assert ran == [f"{n}{turn}" for turn in range(min(turns, 4)) for n in "fg"]
    assert script.ended[run.run].outcome == "finished"
    script.drop(*run.outputs)
    assert not any(script.used())


def test_twice_as_many_turns_take_twice_as_many_steps() -> None:
    def cost(turns: int) -> int:
        program = loop(1 << 32 | 1, 1 << 32 | 2, turns)
        return lines(lambda: lower(program))

    cost(10)  # what is made once
    assert cost(400) < 2.2 * cost(200)


def test_a_join_counts_once() -> None:
    plan = lower(conditional(1 << 32 | 1, 1 << 32 | 2))
    lines = profile(plan, plan.inputs, [0] * len(plan.steps))
    made = sum(plan.values[v].nbytes for v in plan.outputs)
    assert sum(line[-1] for line in lines.values()) == made


def test_random_decisions_end_all_runs() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        script = Script(islands=2, rules=KNOWN)
        a, b = script.slice(2, island="island0"), script.slice(2, island="island1")
        plans = [registered(script, lower(p)) for p in (conditional(a, b), loop(a, b, 3))]
        runs = [(plan, script.submit(plan)) for plan in rng.choices(plans, k=4)]
        for _ in range(60):
            plan, run = rng.choice(runs)
            names = [s.node.name for s in plan.steps if s.node.name[0] == "d"]
            decide(script, plan, run, rng.randrange(2), rng.choice(names))
            script.finish_next()
        for plan, run in runs:
            for step in plan.steps:
                script.finish_all()
                if step.node.name[0] == "d":
                    decide(script, plan, run, rng.randrange(2), step.node.name)
        script.finish_all()
        assert all(run.run in script.ended for _, run in runs), seed
        for _, run in runs:
            script.drop(*run.outputs)
        assert not any(script.used()), seed


def test_one_step_makes_several_values_that_decide() -> None:
    """Each by itself, also when they are known one after the other."""
    script = Script(islands=1, rules=KNOWN)
    a, b = script.slice(2), script.slice(2)
    draft = Draft(a, b)
    x = draft.value(a)
    first, second = draft.value(a), draft.value(a)
    draft.signatures["d"] = Signature("d", a, (TWO,), (TWO, TWO))
    draft.nodes.append(Call("d", a, (x,), (first, second), name="d"))
    made = []
    for number, decision in enumerate((first, second)):
        out = draft.value(b)
        draft.call(f"yes{number}", b, x, when=When(decision, 1, 2), into=out)
        draft.call(f"no{number}", b, x, when=When(decision, 0, 2), into=out)
        made.append(out)
    plan = registered(script, lower(draft.program(*made)))
    run = script.submit(plan)
    script.finish_all()
    host = script.binding(plan.slices[0]).hosts[0]
    node = next(s.node for s in plan.steps if s.node.name == "d")
    for value, case in zip(outputs_of(node), (1, 0), strict=True):
        script.send(HostReport(0.0, "r", host, decided=((run.run, value, case),)))
        script.finish_all()
    taken = named(plan, script.grants)
    assert {"yes0", "no1"} <= {*taken}
    assert {"no0", "yes1"}.isdisjoint(taken)
