"""A host without a device process: waited for while another is started, named when none is."""

from __future__ import annotations

import pytest

from pathways_lab.core.messages import (
    HostLost,
    PatienceEnded,
    Prepare,
    Refused,
    SliceBound,
    SliceRequested,
    SliceWaiting,
)
from pathways_lab.core.messages.elastic import Compiling, HostDown, HostForgotten, RebindRequested
from pathways_lab.core.program.program import Line
from pathways_lab.core.slices.topology import SliceRequest
from pathways_lab.testing import Script, Sketch
from tests.core.stories import heavy, told

ME, HOST = "kernel-1", "island0/host0"
WHY = "its device process was ended by signal 11"


def down(script: Script, until: float) -> None:
    script.send(HostDown(script.time, "down", HOST, "island0", WHY, until))
    script.send(HostLost(script.time, "lost", HOST, WHY))
    script.waiting.pop(HOST, None)


def ask(script: Script, number: int, wait: bool = True, island: str | None = None) -> None:
    request = SliceRequest((2,), ("x",), island)
    script.send(SliceRequested(script.time, "slice", ME, number, request, wait))


def test_a_slice_waits_for_a_host_that_is_started_again() -> None:
    script = Script(islands=1)
    down(script, until=30.0)
    ask(script, 77)
    assert f"{HOST} to be started again" in told(script, SliceWaiting)[-1].why
    script.join(HOST)
    assert told(script, SliceBound)[-1].binding.slice == 77


def test_a_lost_slice_that_is_bound_again_waits_too() -> None:
    script = Script(islands=1)
    where = script.slice(2)
    down(script, until=30.0)
    script.send(RebindRequested(script.time, "rebind", ME, where))
    assert not told(script, Refused)
    before = len(told(script, SliceBound))
    script.join(HOST)
    assert told(script, SliceBound)[before].binding.slice == where


def test_the_remedy_is_that_of_the_worker_where_a_restart_would_not_help() -> None:
    script = Script(islands=1)
    event = HostDown(script.time, "down", HOST, "island0", WHY, remedy="mend its worker")
    script.send(event)
    script.send(HostLost(script.time, "lost", HOST, WHY))
    ask(script, 77)
    (refused,) = told(script, Refused)
    assert "mend its worker" in str(refused.failure)
    assert "restart" not in str(refused.failure)


@pytest.mark.parametrize("end", ["given up", "late", "gone"])
def test_the_wait_has_an_end_with_the_reason(end: str) -> None:
    script = Script(islands=1)
    where = script.slice(2)
    down(script, until=30.0)
    ask(script, 77)
    script.send(RebindRequested(script.time, "rebind", ME, where))
    assert script.control.due == 30.0
    assert not told(script, Refused)
    if end == "given up":
        script.send(HostDown(script.time, "down", HOST, "island0", WHY))
    elif end == "late":
        script.time = 30.0
        script.send(PatienceEnded(script.time, "clock"))
    else:
        script.send(HostForgotten(script.time, "gone", HOST))
    refused = told(script, Refused)
    assert {each.subject for each in refused} == {"slice 77", f"slice {where}"}
    for each in refused:
        text = str(each.failure)
        assert (WHY in text and "lab.restart('island0')" in text) == (end != "gone")
    assert script.control.due > 30.0


def test_who_does_not_wait_reads_at_once_that_it_is_started_again() -> None:
    script = Script(islands=1)
    down(script, until=30.0)
    ask(script, 77, wait=False)
    failure = told(script, Refused)[-1].failure
    assert WHY in failure.message
    assert "ask again" in failure.remedy


def test_others_wait_for_nothing() -> None:
    script = Script(islands=2)
    down(script, until=30.0)
    ask(script, 77)
    ask(script, 78, island="island1")
    assert {bound.binding.island for bound in told(script, SliceBound)} == {"island1"}
    ask(script, 79, island="island7")
    assert "no island 'island7'" in told(script, Refused)[-1].failure.message


def test_what_was_on_a_host_that_is_given_up_names_the_way_back() -> None:
    script = Script(islands=1)
    run = script.submit(heavy(script, script.slice(2), 4))
    down(script, until=0.0)
    failure = script.ended[run.run].failure
    assert failure is not None
    assert failure.message == f"host {HOST} was lost: {WHY}"
    assert "lab.restart('island0')" in failure.remedy


def compiling(*functions: str) -> tuple[Compiling, ...]:
    return tuple(Compiling(f, f.upper(), Line("a.py", 7, "f(x)")) for f in functions)


def crash(script: Script, *functions: str) -> None:
    """Its process ends while it compiles, and another one comes."""
    how = "was ended by signal 6"
    what = compiling(*functions)
    script.send(HostDown(script.time, "down", HOST, "island0", WHY, 30.0, what, how))
    script.send(HostLost(script.time, "lost", HOST, WHY))
    script.waiting.pop(HOST, None)
    script.join(HOST)


def prepared(script: Script) -> list[str]:
    return [each.function for each in told(script, Prepare)]


def test_what_ended_the_process_that_compiled_it_is_not_compiled_again() -> None:
    """Neither where it was wanted, when that is there again, nor elsewhere; others are."""
    script = Script(islands=1)
    where = script.slice(2)
    bad = script.register(Sketch("bad").chain(where, "f"))
    good = script.register(Sketch("good").chain(where, "g"))
    crash(script, "f")
    before = prepared(script)
    script.send(RebindRequested(script.time, "rebind", ME, where))
    assert prepared(script)[len(before) :] == ["g"]
    elsewhere = script.register(Sketch("elsewhere").chain(script.slice(1), "f"))
    for plan in (bad, elsewhere):
        failure = script.ended[script.submit(plan).run].failure
        assert failure is not None
        assert failure.kind == "compile"
        assert f"F is not compiled again: the process of {HOST} compiled it and" in failure.message
        assert (failure.line.file, failure.line.number) == ("a.py", 7)
    run = script.submit(good)
    script.finish_all()
    assert script.ended[run.run].outcome == "finished"
    assert "f" not in prepared(script)[len(before) :]


@pytest.mark.parametrize("doubt", ["two at once", "a gang ran"])
def test_in_doubt_a_function_has_a_second_try(doubt: str) -> None:
    script = Script(islands=1)
    where = script.slice(2)
    plans = [script.register(Sketch(f).chain(where, f)) for f in "fg"]
    functions = "fg" if doubt == "two at once" else "f"
    for last in (False, True):
        if doubt == "a gang ran":
            script.submit(plans[1])
        crash(script, *functions)
        before = len(prepared(script))
        script.send(RebindRequested(script.time, "rebind", ME, where))
        assert ("f" in prepared(script)[before:]) == (not last)


def test_axes_that_would_end_the_process_are_refused_on_the_wire_too() -> None:
    script = Script(islands=1)
    request = SliceRequest((2,), ("größe",))
    script.send(SliceRequested(script.time, "slice", ME, 77, request, True))
    assert "must be ASCII" in told(script, Refused)[-1].failure.message
