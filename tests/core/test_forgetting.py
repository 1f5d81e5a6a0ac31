"""What clients need no more: gone when no run needs it, and not before."""

from __future__ import annotations

import pytest

from pathways_lab.core import checks
from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import (
    CancelRequested,
    ClientLeft,
    HostLost,
    Prepare,
    ProgramsDropped,
    ProgramsForgotten,
    ShareProgram,
)
from pathways_lab.core.messages.elastic import RebindRequested
from pathways_lab.core.program.program import Call, Plan
from pathways_lab.core.scheduling.rules import Rules
from pathways_lab.testing import Script, Sketch
from tests.core.stories import heavy, told, two_islands

ME = "kernel-1"


def functions_of(plan: Plan) -> tuple[tuple[str, int], ...]:
    calls = [step.node for step in plan.steps if isinstance(step.node, Call)]
    return tuple((call.function, call.slice) for call in calls)


def forget(script: Script, plan: Plan, client: str = ME) -> None:
    dropped = (plan.key,), functions_of(plan)
    script.send(ProgramsDropped(script.time, "forget", client, *dropped))


def known(script: Script) -> tuple[list[str], list[str]]:
    plans = script.control.clients[ME].plans.values()
    return [i.plan.name for i in plans], [
        name for name, _ in script.control.state.functions.records
    ]


def test_a_program_goes_with_its_last_run_and_its_hosts_are_told_then() -> None:
    script, first, second, plan = two_islands()
    runs = [script.submit(plan), script.submit(plan)]
    forget(script, plan)
    assert known(script) == (["pair"], ["a", "b"])
    script.finish(runs[0].run)
    assert not told(script, ProgramsForgotten)
    script.finish_all()
    (gone,) = told(script, ProgramsForgotten)
    assert gone.hosts == ("island0/host0", "island1/host0")
    assert (gone.plans, gone.functions) == ((plan.key,), (("a", first), ("b", second)))
    assert known(script) == ([], [])
    assert not script.control.forgetting.busy
    assert {end.outcome for end in script.ended.values()} == {"finished"}


def test_what_nobody_runs_goes_at_once_also_when_it_was_never_accepted() -> None:
    script = Script()
    plan = heavy(script, script.slice(4), 1)
    other = Sketch("q").chain(script.slice(4, client=ME), "q.f")
    forget(script, plan)
    script.send(ProgramsDropped(0.0, "forget", ME, ("unknown",), ()))
    assert [g.plans for g in told(script, ProgramsForgotten)] == [(plan.key,), ("unknown",)]
    assert script.register(other).key


def test_functions_stay_as_long_as_another_program_calls_them() -> None:
    script = Script()
    where = script.slice(4)
    one = script.register(Sketch("one").chain(where, "f", "g"))
    two = script.register(Sketch("two").chain(where, "g", "h"))
    forget(script, one)
    assert known(script) == (["two"], ["g", "h"])
    forget(script, two)
    assert known(script) == ([], [])


def test_a_dropped_program_is_unknown_to_its_client_until_it_is_registered_again() -> None:
    script = Script(rules=Rules(ahead=0.001, least=1))
    where = script.slice(4)
    sketch = Sketch("p").chain(where, "f")
    plan = script.register(sketch)
    before = script.submit(plan)
    forget(script, plan)
    early = script.submit(plan)
    failure = script.ended[early.run].failure
    assert failure is not None
    assert failure.remedy == "register the program first"
    prepared = len(told(script, Prepare))
    assert script.register(sketch) == plan
    after = script.submit(plan)
    script.finish_all()
    assert {script.ended[r.run].outcome for r in (before, after)} == {"finished"}
    assert len(told(script, Prepare)) == prepared, "it was never gone"
    forget(script, plan)
    assert known(script) == ([], [])
    script.register(sketch)
    again = script.submit(plan)
    script.finish_all()
    assert script.ended[again.run].outcome == "finished"
    assert (len(told(script, Prepare)), len(told(script, ShareProgram))) == (prepared + 1, 2)


def test_announcing_again_keeps_a_function_whose_last_program_is_about_to_go() -> None:
    script = Script()
    where = script.slice(4)
    plan = script.register(Sketch("p").chain(where, "f"))
    run = script.submit(plan)
    forget(script, plan)
    other = Sketch("q").chain(where, "f")
    script.control.forgetting.announced(("f", where))
    script.finish(run.run)
    assert known(script) == ([], ["f"])
    script.register(other)
    assert known(script) == (["q"], ["f"])


def test_a_function_that_is_being_compiled_goes_when_that_is_over() -> None:
    """Its host would else be believed to have the next one of its name, which it compiles again."""
    script = Script(compile=False)
    sketch = Sketch("p").chain(script.slice(4), "f")
    forget(script, script.register(sketch))
    assert [g.functions for g in told(script, ProgramsForgotten)] == [()]
    assert known(script) == ([], ["f"])
    script.register(sketch)
    assert len(told(script, Prepare)) == 1, "it is compiled already"
    script.compiled()
    assert known(script) == (["p"], ["f"])
    forget(script, script.register(sketch))
    assert known(script) == ([], [])
    again = script.register(sketch)
    forget(script, again)
    script.compiled()
    assert known(script) == ([], [])
    assert not script.control.forgetting.busy


def test_a_cancelled_run_keeps_its_program_until_it_has_ended_on_hosts() -> None:
    script = Script()
    plan = heavy(script, script.slice(4), 1)
    run = script.submit(plan)
    script.send(CancelRequested(0.0, "cancel", ME, (run.run,)))
    forget(script, plan)
    assert not told(script, ProgramsForgotten)
    script.finish_all()
    assert len(told(script, ProgramsForgotten)) == 1


def test_only_its_own_client_can_have_code_forgotten() -> None:
    script = Script()
    script.client("kernel-2")
    plan = heavy(script, script.slice(4), 1)
    forget(script, plan, "kernel-2")
    assert known(script) == (["p"], ["p.f"])
    assert not any(gone.functions for gone in told(script, ProgramsForgotten))


def test_nothing_is_left_of_a_client_that_goes_in_between() -> None:
    script = Script()
    plan = heavy(script, script.slice(4), 1)
    run = script.submit(plan)
    forget(script, plan)
    script.send(ClientLeft(0.0, "left", ME, "killed"))
    script.finish(run.run)
    forgetting = script.control.forgetting
    assert not (forgetting.plans)
    assert not (forgetting.functions)
    assert not (script.control.slices)
    assert not script.control.state.functions.records


def test_a_slice_that_is_bound_again_has_nothing_of_what_was_dropped() -> None:
    script, first, _, plan = two_islands()
    kept = script.register(Sketch("kept").chain(first, "c"))
    forget(script, plan)
    script.send(HostLost(0.0, "lost", "island0/host0", "killed"))
    script.join("island0/host0")
    prepared = len(told(script, Prepare))
    script.send(RebindRequested(0.0, "rebind", ME, first, "island0"))
    assert [p.function for p in told(script, Prepare)[prepared:]] == ["c"]
    run = script.submit(kept)
    script.finish_all()
    assert script.ended[run.run].outcome == "finished"


def test_so_many_reasons_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_REMEMBERED", 3)
    client = checks.ClientRecord()
    for number in range(5):
        client.refuse(f"p{number}", Failure("refused", "its slice was released"))
    assert list(client.gone) == ["p2", "p3", "p4"]
