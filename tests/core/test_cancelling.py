"""Cancelling: what its client does not want any more ends as far as it has no place."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from pathways_lab.core.messages import (
    BuffersDropped,
    CancelRequested,
    FreeBuffers,
    Grant,
    HandlePublished,
    HandleTaken,
    ProgramRegistered,
    SliceReleased,
)
from pathways_lab.core.messages.elastic import Answer
from pathways_lab.core.program.program import Plan
from pathways_lab.core.scheduling.outcomes import Outcomes
from pathways_lab.core.scheduling.rules import Rules
from pathways_lab.testing import Script, Sketch, Submitted
from tests.core.stories import told

ME = "kernel-1"
ONE = Rules(window=0.005, ahead=0.005, least=1)


def cancel(
    script: Script,
    *buffers: int,
    runs: tuple[int, ...] = (),
    steps: dict[int, tuple[int, ...]] | None = None,
) -> SimpleNamespace:
    """What is answered to a client that does not want these any more."""
    script.send(CancelRequested(0.0, "cancel", ME, runs, buffers, 7, tuple((steps or {}).items())))
    return SimpleNamespace(**(told(script, Answer)[-1].numbers or {}))


def busy(**more: int) -> tuple[Script, int, Plan, Submitted]:
    """One gang of a program has its place, and nothing else gets one before it ends."""
    script = Script(rules=ONE, **more)
    where = script.slice(4)
    plan = script.register(Sketch("p").chain(where, "f", nbytes=4))
    return script, where, plan, script.submit(plan)


def granted(script: Script) -> set[int]:
    return {grant.run for grant in script.grants}


def two_results(script: Script, where: int) -> Plan:
    """Two gangs that have nothing to do with each other, and what they make."""
    sketch = Sketch("two")
    (left,) = sketch.call("left", where, [], [4])
    (right,) = sketch.call("right", where, [], [4])
    return script.register(sketch.output(left, right))


# --- what is cancelled by name ------------------------------------------------------------


def test_a_cancelled_run_ends_at_once_and_says_who_cancelled_it() -> None:
    script, _, plan, first = busy()
    runs = [script.submit(plan) for _ in range(3)]
    answer = cancel(script, *[r.outputs[0] for r in runs])
    assert (answer.cancelled, answer.begun, answer.going) == (3, 0, 0)
    for run in runs:
        assert script.ended[run.run].outcome == "cancelled"
        why = script.resolved[run.outputs[0]]
        assert why is not None
        assert why.kind == "cancelled"
        assert "'p' was cancelled by kernel-1" in why.message
    script.finish_all()
    assert granted(script) == {first.run}
    assert script.resolved[first.outputs[0]] is None


def test_the_answer_comes_after_what_has_become_of_the_values() -> None:
    script, where, _, _ = busy()
    plan = two_results(script, where)
    run = script.submit(plan)
    commands = script.send(CancelRequested(0.0, "cancel", ME, (), run.outputs[:1], request=7))
    kinds = [type(command).__name__ for command in commands]
    assert kinds.index("Resolved") < kinds.index("Answer")


def test_what_has_its_place_is_too_late_to_cancel() -> None:
    script, _, _, first = busy()
    answer = cancel(script, *first.outputs)
    assert (answer.cancelled, answer.begun, answer.going) == (0, 0, 1)
    script.finish_all()
    assert script.resolved[first.outputs[0]] is None
    over = cancel(script, *first.outputs, runs=(first.run,))
    assert (over.cancelled, over.begun, over.going) == (0, 0, 0)


def test_a_run_that_has_begun_ends_behind_what_has_its_place() -> None:
    script = Script(rules=ONE)
    where = script.slice(4)
    run = script.submit(script.register(Sketch("p").chain(where, "f", "g", "h")))
    assert cancel(script, *run.outputs).begun == 1
    script.finish_all()
    assert {grant.last for grant in script.grants} == {1}
    assert script.ended[run.run].outcome == "cancelled"


def test_results_that_nobody_named_still_come() -> None:
    """Calls of several programs may travel as one run: each handle is cancelled by itself."""
    script, where, _, _ = busy()
    run = script.submit(two_results(script, where))
    answer = cancel(script, run.outputs[0])
    assert (answer.cancelled, answer.going) == (0, 1)
    script.finish_all()
    left, right = (script.resolved[b] for b in run.outputs)
    assert left is not None
    assert left.kind == "cancelled"
    assert right is None
    assert script.ended[run.run].outcome == "finished"


@pytest.mark.parametrize("keep", [False, True])
def test_calls_that_travel_with_others_are_cancelled_by_their_steps(keep: bool) -> None:
    script, where, _, first = busy()
    sketch = Sketch("f, g, h")
    (made,) = sketch.call("f", where, [], [4])
    (read,) = sketch.call("g", where, [made], [4])
    (apart,) = sketch.call("h", where, [], [4])
    sketch.nodes[2] = replace(sketch.nodes[2], keep=keep)  # type: ignore[call-arg]
    run = script.submit(script.register(sketch.output(read, apart)))
    assert cancel(script, steps={run.run: (0, 99)}).going == 1
    assert script.resolved[run.outputs[0]] is not None, "it reads what is not made"
    script.drop(run.outputs[1])
    answer = cancel(script, steps={run.run: (1,)})
    assert (answer.cancelled, answer.going) == ((0, 1) if keep else (0, 0))
    script.finish_all()
    assert granted(script) == ({first.run, run.run} if keep else {first.run})


def test_a_run_ends_with_the_last_result_that_is_wanted() -> None:
    script, where, _, first = busy()
    run = script.submit(two_results(script, where))
    cancel(script, run.outputs[1])
    assert run.run not in script.ended
    script.drop(run.outputs[0])
    assert script.ended[run.run].outcome == "cancelled"
    script.finish_all()
    assert granted(script) == {first.run}


def test_who_reads_what_is_cancelled_is_cancelled_for_the_same_reason() -> None:
    script, where, plan, _ = busy()
    reads = script.register(Sketch("reader").chain(where, "g", nbytes=4))
    made = script.submit(plan)
    reader = script.submit(reads, made.outputs)
    last = script.submit(reads, reader.outputs)
    cancel(script, *made.outputs)
    for run in (reader, last):
        assert script.ended[run.run].outcome == "cancelled"
        assert script.resolved[run.outputs[0]] == script.resolved[made.outputs[0]]


def test_cancelling_everything_of_a_client_leaves_others_alone() -> None:
    script, _, plan, first = busy()
    script.client("other")
    at = script.slice(4, client="other")
    theirs = script.register(Sketch("theirs").chain(at, "t"), client="other")
    other = script.submit(theirs, client="other")
    mine = [script.submit(plan) for _ in range(4)]
    answer = cancel(script, runs=(first.run, *(r.run for r in mine), other.run))
    assert (answer.cancelled, answer.begun, answer.going) == (4, 0, 1)
    assert "belongs to another client" in script.refused[-1].failure.message
    script.finish_all()
    assert script.ended[other.run].outcome == "finished"


def test_a_cancelled_donor_gives_back_what_it_would_have_consumed() -> None:
    script, where, _, _ = busy()
    sketch = Sketch("donor")
    x = sketch.input(where, 4)
    donor = script.register(sketch.output(*sketch.call("d", where, [x], [4], donated=(0,))))
    value = script.upload(where, 4)
    run = script.submit(donor, [value])
    cancel(script, *run.outputs)
    script.finish_all()
    buffer = script.control.state.store.buffers[value]
    assert (buffer.state, buffer.donor, buffer.counted) == ("resident", 0, True)


# --- what nobody can read -----------------------------------------------------------------


def test_a_run_ends_with_the_last_handle_to_its_results() -> None:
    script, _, plan, first = busy()
    runs = [script.submit(plan) for _ in range(200)]
    script.drop(*[b for run in runs for b in run.outputs])
    assert {script.ended[run.run].outcome for run in runs} == {"cancelled"}
    why = script.ended[runs[0].run].failure
    assert why is not None
    assert "nobody can read its results" in why.message
    script.drop(*first.outputs)
    script.finish_all()
    assert granted(script) == {first.run}
    assert script.ended[first.run].outcome == "finished", "what has begun ends by itself"
    assert script.used() == [0]


def test_what_a_later_run_or_another_client_reads_is_wanted() -> None:
    script, where, plan, _ = busy()
    script.client("other")
    reads = script.register(Sketch("reader").chain(where, "g", nbytes=4))
    read, taken, named = (script.submit(plan) for _ in range(3))
    reader = script.submit(reads, read.outputs)
    script.send(HandlePublished(0.0, "publish", ME, "t", taken.outputs))
    script.send(HandleTaken(0.0, "take", "other", "t", (99,)))
    script.send(HandlePublished(0.0, "publish", ME, "n", named.outputs))
    script.drop(*read.outputs, *taken.outputs, *named.outputs)
    assert not {read.run, taken.run, named.run} & script.ended.keys()
    script.drop(*reader.outputs)
    assert {reader.run, read.run} <= script.ended.keys(), "its maker ends with the only reader"
    script.finish_all()
    assert {taken.run, named.run} <= granted(script)
    script.send(BuffersDropped(0.0, "drop", "other", (99,)))


def test_a_run_that_is_wanted_for_what_it_does_goes_on() -> None:
    """A function that calls back into Python, for one."""
    script, where, _, _ = busy()
    drawn = script.register(Sketch("saves").chain(where, "save"))
    (step,) = drawn.steps
    keeps = replace(drawn, key="kept", steps=(replace(step, node=replace(step.node, keep=True)),))
    script.plans["kept"] = keeps
    script.send(ProgramRegistered(0.0, "program", ME, keeps))
    run = script.submit(keeps)
    script.drop(*run.outputs)
    script.finish_all(0.01)
    assert script.ended[run.run].outcome == "finished"
    named = script.submit(keeps), script.submit(keeps)
    assert cancel(script, *named[1].outputs).cancelled == 1, "but it can be cancelled"


def test_a_run_without_results_goes_on() -> None:
    script, where, _, _ = busy()
    sketch = Sketch("silent")
    sketch.call("f", where, [], [4])
    run = script.submit(script.register(sketch))
    script.finish_all()
    assert script.ended[run.run].outcome == "finished"


def test_without_the_rule_what_nobody_can_read_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outcomes, "_unread", lambda self, buffer: None)
    with pytest.raises(AssertionError, match=r"counts 0 of 1 unread results"):
        test_a_run_ends_with_the_last_handle_to_its_results()


# --- slices that are given back -----------------------------------------------------------


def test_what_waits_for_a_released_slice_ends_and_what_is_there_stays() -> None:
    script, where, plan, first = busy()
    other = script.slice(4)
    elsewhere = script.register(Sketch("q").chain(other, "q"))
    there = script.upload(where, 4)
    runs = [script.submit(plan) for _ in range(200)]
    unharmed = script.submit(elsewhere)
    script.send(SliceReleased(0.0, "release", ME, where))
    for run in runs:
        why = script.resolved[run.outputs[0]]
        assert why is not None
        assert why.kind == "cancelled"
        assert "was released by kernel-1 while a run of 'p' waited for it" in why.message
    script.finish_all()
    assert script.resolved[first.outputs[0]] is None
    assert script.ended[unharmed.run].outcome == "finished"
    script.drop(there, *first.outputs, *[b for run in runs for b in run.outputs])
    assert told(script, FreeBuffers)
    assert where not in script.control.slices


def test_grants_of_a_cancelled_run_are_not_repeated() -> None:
    """Places are given out once: nothing is granted to a run after it was cancelled."""
    script, _, plan, _ = busy()
    run = script.submit(plan)
    cancel(script, *run.outputs)
    before = len(told(script, Grant))
    script.finish_all()
    assert len(told(script, Grant)) == before
