"""Laws of pace, compilation and outcomes, each shown by the smallest story."""

from __future__ import annotations

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import (
    AbortRun,
    BufferDeclared,
    CancelRequested,
    HostReport,
    Prepare,
    ShareProgram,
)
from pathways_lab.core.scheduling.rules import Rules
from pathways_lab.testing import Script, Sketch
from tests.core.stories import BROKEN, told, two_islands

# --- pace: one message, ahead of data ----------------------------------------------------


def test_a_run_that_fits_a_window_is_one_grant_per_host_before_anything_ran() -> None:
    script, *_, plan = two_islands()
    run = script.submit(plan)
    assert [(g.host, g.run, g.first, g.last) for g in script.grants] == [
        ("island0/host0", run.run, 0, 3),
        ("island1/host0", run.run, 0, 3),
    ]
    assert [c.hosts for c in told(script, ShareProgram)] == [("island0/host0", "island1/host0")]
    script.submit(plan)
    assert len(told(script, ShareProgram)) == 1


def test_places_follow_each_other_on_every_island() -> None:
    script, first, _, pair = two_islands()
    alone = script.register(Sketch("alone").chain(first, "c"))
    for plan in (pair, alone, pair):
        script.submit(plan)
    left = [(g.place, g.previous) for g in script.grants if g.host == "island0/host0"]
    right = [(g.place, g.previous) for g in script.grants if g.host == "island1/host0"]
    assert left == [(0, -1), (2, 0), (3, 2)]  # a and its transfer, c, a and its transfer
    assert right == [(0, -1), (2, 0)]  # the transfer and b, twice


def test_a_long_run_is_granted_in_windows_as_its_gangs_end() -> None:
    script = Script(rules=Rules(window=0.01, ahead=0.02, least=1, assumed=0.005))
    where = script.slice(4)
    plan = script.register(Sketch("long").chain(where, *(f"f{n}" for n in range(8))))
    run = script.submit(plan)  # eight functions of 5 ms (assumed) each
    assert [(g.first, g.last) for g in script.grants] == [(0, 2), (2, 4)]
    script.finish(run.run, 0, seconds=0.005)
    assert len(script.grants) == 2, "the next one would be more than may be ahead"
    script.finish(run.run, 1, seconds=0.005)
    assert [(g.first, g.last) for g in script.grants][2:] == [(4, 6)]
    script.finish_all(0.005)
    assert script.ended[run.run].outcome == "finished"


def test_measured_times_decide_how_far_grants_run_ahead() -> None:
    script = Script()
    plan = script.register(Sketch("slow").chain(script.slice(4), "f"))
    first = script.submit(plan)
    script.finish(first.run, seconds=1.0)
    runs = [script.submit(plan) for _ in range(4)]
    assert script.order == [first.run, runs[0].run, runs[1].run]  # one runs, one is next
    script.finish(runs[0].run, seconds=1.0)
    assert script.order[-1] == runs[2].run


def test_a_gang_that_may_not_run_ahead_waits_for_its_input() -> None:
    script = Script()
    where = script.slice(4)
    sketch = Sketch("depends on data")
    (x,) = sketch.call("a", where, [sketch.input(where, 4)], [4])
    (y,) = sketch.call("b", where, [x], [4], ahead=False)
    run = script.submit(script.register(sketch.output(y)))
    assert [(g.first, g.last) for g in script.grants] == [(0, 1)]
    script.finish(run.run, 0)
    assert [(g.first, g.last) for g in script.grants][1:] == [(1, 2)]


def test_an_upload_holds_up_its_reader_and_nobody_else() -> None:
    script = Script()
    where = script.slice(4)
    plan = script.register(Sketch("reads").chain(where, "f", nbytes=8))
    buffer = script.upload(where, 8, arrive=False)
    reader, other = script.submit(plan, [buffer]), script.submit(plan)
    assert script.order == [other.run]
    script.arrive(buffer, where)
    assert script.order == [other.run, reader.run]
    assert script.resolved[buffer] is None


def test_bytes_that_come_before_their_declaration_count() -> None:
    script = Script()
    where = script.slice(2)
    script.arrive(77, where)
    script.send(BufferDeclared(0.0, "declare", "kernel-1", 77, where, 8))
    assert script.resolved[77] is None


# --- compiling ---------------------------------------------------------------------------


def test_nothing_is_granted_before_all_hosts_have_compiled() -> None:
    script = Script(hosts=2, devices=2, compile=False)
    plan = script.register(Sketch("p").chain(script.slice(4), "f"))
    script.submit(plan)
    script.send(HostReport(0.0, "c", "island0/host0", compiled=(("f", plan.slices[0], 0, None),)))
    assert script.grants == []
    script.send(HostReport(0.0, "c", "island0/host1", compiled=(("f", plan.slices[0], 0, None),)))
    assert len(script.grants) == 2


def test_a_function_is_compiled_once_per_slice() -> None:
    script = Script()
    where, other = script.slice(2), script.slice(2)
    for _ in range(2):
        script.register(Sketch("p").chain(where, "f"))
    script.register(Sketch("q").chain(other, "f"))
    assert [(p.function, p.slice) for p in told(script, Prepare)] == [("f", where), ("f", other)]


def test_a_compile_error_fails_the_runs_that_need_it_at_the_users_line() -> None:
    script = Script(compile=False)
    where = script.slice(2)
    plan = script.register(Sketch("p").chain(where, "f", "g"))
    run = script.submit(plan)
    script.compiled(Failure("compile", "no such operation"))
    later = script.submit(plan)
    for number in (run.run, later.run):
        failure = script.ended[number].failure
        assert failure is not None
        assert failure.kind == "compile"
        assert failure.program == "p"
        assert failure.line.number == 1
        assert failure.host == "island0/host0"
    assert script.grants == []


# --- outcomes ----------------------------------------------------------------------------


def test_outputs_resolve_one_by_one_when_their_gang_has_ended_everywhere() -> None:
    script, *_, plan = two_islands(hosts=2, devices=1)
    run = script.submit(plan)
    script.finish(run.run, 0, "island0/host0")
    assert run.outputs[0] not in script.resolved
    script.finish(run.run, 0, "island0/host1")
    assert script.resolved == {run.outputs[0]: None}
    script.finish(run.run, 1)
    script.finish(run.run, 2)
    assert script.resolved[run.outputs[1]] is None
    assert script.ended[run.run].outcome == "finished"


def test_a_result_counts_only_when_all_it_depends_on_has_ended() -> None:
    """The second host is quick: it reports b before anybody reports a."""
    script, *_, plan = two_islands()
    run = script.submit(plan)
    script.finish(run.run, host="island1/host0")
    assert script.resolved == {}
    script.finish(run.run, 0, failure=BROKEN)
    failure = script.resolved[run.outputs[1]]
    assert failure is not None
    assert (failure.program, failure.node, failure.host) == ("pair", "a", "island0/host0")


def test_a_failure_spoils_what_depends_on_it_and_nothing_else() -> None:
    script = Script()
    where = script.slice(4)
    sketch = Sketch("fork")
    v = sketch.input(where, 4)
    (x,) = sketch.call("bad", where, [v], [4])
    (y,) = sketch.call("child", where, [x], [4])
    (z,) = sketch.call("other", where, [v], [4])
    run = script.submit(script.register(sketch.output(x, y, z)))
    script.finish(run.run, 0, failure=BROKEN)
    script.finish(run.run)
    kinds = [None if f is None else f.node for f in map(script.resolved.get, run.outputs)]
    assert kinds == ["bad", "bad", None]
    assert script.ended[run.run].outcome == "failed"


def test_later_runs_that_read_a_failed_result_fail_with_the_first_cause() -> None:
    script = Script()
    where = script.slice(4)
    plan = script.register(Sketch("p").chain(where, "f", nbytes=4))
    first = script.submit(plan)
    second = script.submit(plan, first.outputs)
    third = script.submit(plan, second.outputs)
    script.finish(first.run, failure=BROKEN)
    script.finish_all()
    after = script.submit(plan, third.outputs)
    for run in (first, second, third, after):
        failure = script.ended[run.run].failure
        assert failure is not None
        assert failure.message == "division by zero"
        assert failure.line.number == 1


def test_cancelling_stops_what_is_not_granted_and_lets_the_rest_end() -> None:
    script = Script(rules=Rules(window=0.005, ahead=0.005, least=1))
    where = script.slice(4)
    plan = script.register(Sketch("p").chain(where, "f", "g"))
    half, waiting = script.submit(plan), script.submit(plan)
    for run in (half, waiting):
        script.send(CancelRequested(0.0, "interrupt", "kernel-1", (run.run,)))
    assert script.ended[waiting.run].outcome == "cancelled"
    why = script.ended[waiting.run].failure
    assert why is not None
    assert "cancelled by kernel-1: by handle.cancel()" in why.message
    assert "call it again" in why.remedy
    assert half.run not in script.ended
    script.finish(half.run)
    assert script.ended[half.run].outcome == "cancelled"
    assert [a.run for a in told(script, AbortRun)] == [half.run]
    assert [g.run for g in script.grants] == [half.run]
    done = script.submit(plan)
    script.finish_all()
    script.send(CancelRequested(0.0, "interrupt", "kernel-1", (done.run,)))
    assert script.ended[done.run].outcome == "finished"


def test_a_run_that_can_only_fail_any_more_gets_no_more_places() -> None:
    script = Script(rules=Rules(window=0.005, ahead=0.005, least=1))
    where = script.slice(4)
    run = script.submit(script.register(Sketch("p").chain(where, "f", "g", "h")))
    script.finish(run.run, failure=BROKEN)
    assert script.order == [run.run]
    assert script.ended[run.run].failure.message == BROKEN.message  # type: ignore[union-attr]


def test_how_long_a_failed_gang_took_says_nothing_of_its_function() -> None:
    """Where it did not fail it was perhaps computed with zeros."""
    script = Script(hosts=2, devices=2)
    where = script.slice(4)
    plan = script.register(Sketch("p").chain(where, "f"))
    functions, assumed = script.control.state.functions, script.control.state.rules.assumed
    run = script.submit(plan).run
    script.finish(run, host="island0/host0", seconds=7.0)
    script.finish(run, host="island0/host1", failure=BROKEN)
    assert functions.seconds(("f", where)) == assumed
    script.finish(script.submit(plan).run, seconds=7.0)
    assert functions.seconds(("f", where)) == 7.0
