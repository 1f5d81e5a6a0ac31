"""Laws of the control plane's core, each shown by the smallest story that shows it."""

from __future__ import annotations

import pytest

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import (
    AbortRun,
    BufferDeclared,
    BuffersDropped,
    ClientLeft,
    FreeBuffers,
    FunctionAnnounced,
    Grant,
    HostLost,
    HostReport,
    Prepare,
    ProgramRegistered,
    Refused,
    Resolved,
    RunCancelled,
    RunEnded,
    RunSubmitted,
    ShareProgram,
    SliceBound,
    SliceFreed,
    SliceReleased,
    SliceRequested,
)
from pathways_lab.core.program import Plan
from pathways_lab.core.rules import Rules
from pathways_lab.core.topology import SliceRequest
from pathways_lab.testing import Script, Sketch

BROKEN = Failure("execute", "division by zero")


def told(script: Script, kind: type) -> list:
    """Every command of a kind so far."""
    return [c for _, commands in script.log for c in commands if isinstance(c, kind)]


def two_islands(**more: int) -> tuple[Script, int, int, Plan]:
    """A program a -> (transfer) -> b over two islands; returns it with both slices."""
    script = Script(islands=2, **more)
    first, second = script.slice(2, island="island0"), script.slice(2, island="island1")
    sketch = Sketch("pair")
    (x,) = sketch.call("a", first, [sketch.input(first, 4)], [4])
    (y,) = sketch.call("b", second, [x], [4])
    return script, first, second, script.register(sketch.output(x, y))


# --- pace: one message, ahead of data ------------------------------------------------


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
    script = Script(rules=Rules(window=0.02, ahead=0.02))
    where = script.slice(4)
    plan = script.register(Sketch("long").chain(where, *(f"f{n}" for n in range(8))))
    run = script.submit(plan)  # eight functions of 5 ms (assumed) each
    assert [(g.first, g.last) for g in script.grants] == [(0, 4)]
    script.finish(run.run, 0, seconds=0.005)
    assert [(g.first, g.last) for g in script.grants][1:] == [(4, 8)]
    script.finish_all(0.005)
    assert script.ended[run.run].outcome == "finished"


def test_measured_times_decide_how_far_grants_run_ahead() -> None:
    script = Script()
    plan = script.register(Sketch("slow").chain(script.slice(4), "f"))
    first = script.submit(plan)
    script.finish(first.run, seconds=1.0)
    runs = [script.submit(plan) for _ in range(3)]
    assert script.order == [first.run, runs[0].run]  # one second is far enough ahead
    script.finish(runs[0].run, seconds=1.0)
    assert script.order[-1] == runs[1].run


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


# --- compiling -----------------------------------------------------------------------


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


# --- outcomes ------------------------------------------------------------------------


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
    script = Script(rules=Rules(window=0.005, ahead=0.005))
    where = script.slice(4)
    plan = script.register(Sketch("p").chain(where, "f", "g"))
    half, waiting = script.submit(plan), script.submit(plan)
    for run in (half, waiting):
        script.send(RunCancelled(0.0, "interrupt", "kernel-1", run.run))
    assert script.ended[waiting.run].outcome == "cancelled"
    assert half.run not in script.ended
    script.finish(half.run)
    assert script.ended[half.run].outcome == "cancelled"
    assert [a.run for a in told(script, AbortRun)] == [half.run]
    assert [g.run for g in script.grants] == [half.run]
    done = script.submit(plan)
    script.finish_all()
    script.send(RunCancelled(0.0, "interrupt", "kernel-1", done.run))
    assert script.ended[done.run].outcome == "finished"


# --- buffers -------------------------------------------------------------------------


def test_buffers_are_freed_when_nothing_granted_reads_them_any_more() -> None:
    script = Script()
    plan = script.register(Sketch("p").chain(script.slice(4), "f", nbytes=4))
    first = script.submit(plan)
    second = script.submit(plan, first.outputs)
    script.drop(*first.outputs)
    script.finish(first.run)
    assert told(script, FreeBuffers) == []
    script.finish(second.run)
    assert [f.buffers for f in told(script, FreeBuffers)] == [first.outputs]


def test_a_thousand_runs_leave_nothing_behind() -> None:
    script = Script(memory=16)
    plan = script.register(Sketch("p").chain(script.slice(4), "f", nbytes=4))
    state = script.submit(plan)
    for _ in range(1000):
        new = script.submit(plan, state.outputs)
        script.drop(*state.outputs)
        script.finish_all()
        state = new
    assert script.used() == [4]
    assert len(script.control.state.store.buffers) == 1
    assert script.control.state.runs == {}


def test_a_donated_buffer_is_refused_to_later_readers() -> None:
    script = Script()
    where = script.slice(4)
    sketch = Sketch("consume")
    made = sketch.call("f", where, [sketch.input(where, 4, "params")], [4], donated=(0,))
    plan = script.register(sketch.output(*made))
    buffer = script.upload(where, 4)
    script.submit(plan, [buffer])
    late = script.submit(plan, [buffer])
    assert "was donated" in script.refused[-1].failure.message
    assert script.ended[late.run].outcome == "failed"


def test_a_cancelled_donor_gives_the_buffer_back() -> None:
    script = Script(compile=False)
    where = script.slice(4)
    sketch = Sketch("consume")
    made = sketch.call("f", where, [sketch.input(where, 4)], [4], donated=(0,))
    plan = script.register(sketch.output(*made))
    buffer = script.upload(where, 4)
    donor = script.submit(plan, [buffer])
    script.send(RunCancelled(0.0, "interrupt", "kernel-1", donor.run))
    assert script.ended[donor.run].outcome == "cancelled"
    script.submit(plan, [buffer])
    assert script.refused == []


def test_a_donor_waits_for_earlier_readers() -> None:
    """The reader is not compiled yet, the donor is: order is by submission."""
    script = Script(compile=False)
    where = script.slice(4)
    reads = script.register(Sketch("reads").chain(where, "r", nbytes=4))
    script.compiling.clear()
    sketch = Sketch("consume")
    made = sketch.call("f", where, [sketch.input(where, 4)], [4], donated=(0,))
    donates = script.register(sketch.output(*made))
    script.compiled()
    buffer = script.upload(where, 4)
    reader, donor = script.submit(reads, [buffer]), script.submit(donates, [buffer])
    assert script.order == []
    script.send(HostReport(0.0, "c", "island0/host0", compiled=(("r", where, 0, None),)))
    assert script.order == [reader.run, donor.run]


# --- memory --------------------------------------------------------------------------


def heavy(script: Script, where: int, size: int, name: str = "p") -> Plan:
    return script.register(Sketch(name).chain(where, f"{name}.f", nbytes=size))


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    script = Script(memory=10)
    run = script.submit(heavy(script, script.slice(4), 6))
    failure = script.ended[run.run].failure
    assert failure is not None
    assert failure.kind == "memory"
    assert "needs 12 bytes per device of island0" in failure.message
    assert "they have 10" in failure.message


def test_temporary_bytes_of_a_function_count() -> None:
    script = Script(memory=10, compile=False)
    plan = heavy(script, script.slice(4), 4)
    script.compiled(temporary=3)
    run = script.submit(plan)
    assert "needs 11 bytes" in script.ended[run.run].failure.message  # type: ignore[union-attr]


def test_a_run_waits_for_memory_and_begins_when_a_handle_goes() -> None:
    script = Script(memory=10)
    plan = heavy(script, script.slice(4), 4)
    first = script.submit(plan)
    second = script.submit(plan)
    assert script.order == [first.run]  # 4 held as a result, and 8 more do not fit
    script.drop(*first.outputs)
    assert script.order == [first.run, second.run]  # before anything has ended


def test_donating_needs_no_second_copy() -> None:
    script = Script(memory=10)
    where = script.slice(4)
    sketch = Sketch("update")
    made = sketch.call("f", where, [sketch.input(where, 8)], [8], donated=(0,))
    plan = script.register(sketch.output(*made))
    state = script.upload(where, 8)
    for _ in range(3):
        run = script.submit(plan, [state])
        script.finish_all()
        assert script.ended[run.run].outcome == "finished"
        (state,) = run.outputs
    assert script.used() == [8]


def test_a_stalemate_is_told_at_once_with_who_holds_what() -> None:
    script = Script(memory=10)
    plan = heavy(script, script.slice(4), 4)
    first = script.submit(plan)
    script.finish_all()
    second = script.submit(plan)
    failure = script.ended[second.run].failure
    assert failure is not None
    assert failure.kind == "stalemate"
    assert "needs 8 bytes per device of island0, 6 of 10 are free" in failure.message
    assert "p.f.0 of kernel-1 (4 bytes on slice" in failure.message
    assert "kept by its handle" in failure.message
    assert script.ended[first.run].outcome == "finished"


def test_waiting_is_not_a_stalemate_while_somebody_may_make_room() -> None:
    script = Script(memory=10)
    plan = heavy(script, script.slice(4), 4)
    first, second = script.submit(plan), script.submit(plan)
    assert second.run not in script.ended
    script.finish(first.run)  # and its result stays: now nothing can make room
    assert script.ended[second.run].failure.kind == "stalemate"  # type: ignore[union-attr]


def test_memory_of_slices_that_share_devices_is_counted_together() -> None:
    script = Script(devices=2, memory=10)
    small, wide = script.slice(1), script.slice(2)
    first = script.submit(heavy(script, small, 4, "small"))
    second = script.submit(heavy(script, wide, 4, "wide"))
    assert script.order == [first.run]
    script.drop(*first.outputs)
    assert script.order == [first.run, second.run]


# --- ownership and errors ------------------------------------------------------------


def test_requests_about_things_of_others_are_refused() -> None:
    script = Script()
    where = script.slice(2)
    plan = heavy(script, where, 4)
    mine = script.submit(plan)
    script.client("kernel-2")
    other = script.slice(2, client="kernel-2")
    their = script.register(Sketch("q").chain(other, "g"), client="kernel-2")
    at, who = 0.0, "kernel-2"
    for event, words in (
        (BuffersDropped(at, "x", who, mine.outputs), "belongs to another client"),
        (RunCancelled(at, "x", who, mine.run), "belongs to another client"),
        (SliceReleased(at, "x", who, where), "has no such slice"),
        (FunctionAnnounced(at, "x", who, "f", where), "belongs to another client"),
        (ProgramRegistered(at, "x", who, plan), "belongs to another client"),
        (BufferDeclared(at, "x", who, 9, where, 1), "belongs to another client"),
        (RunSubmitted(at, "x", who, 8, plan.key, (None,), (9,)), "is unknown"),
        (RunSubmitted(at, "x", who, 9, their.key, mine.outputs, (10,)), "another client"),
        (RunSubmitted(at, "x", who, 10, their.key, (), (11,)), "takes 1 inputs"),
        (RunSubmitted(at, "x", who, mine.run, their.key, (None,), (12,)), "in use"),
        (RunSubmitted(at, "x", who, 11, their.key, (None,), mine.outputs), "in use"),
        (SliceRequested(at, "x", who, where, SliceRequest((1,), ("x",))), "exists already"),
        (RunCancelled(at, "x", "kernel-9", mine.run), "is not connected"),
    ):
        answers = [c for c in script.send(event) if isinstance(c, Refused)]
        assert len(answers) == 1, event
        assert words in answers[0].failure.message, event
    script.finish_all()
    assert script.ended[mine.run].outcome == "finished"


def test_a_refused_run_still_ends_and_its_outputs_carry_the_reason() -> None:
    script = Script()
    plan = heavy(script, script.slice(2), 4)
    refused = script.submit(plan, [12345])
    assert script.ended[refused.run].outcome == "failed"
    after = script.submit(plan, refused.outputs)
    assert "buffer 12345 is unknown" in script.resolved[after.outputs[0]].message  # type: ignore[union-attr]


def test_unknown_runs_steps_and_buffers_in_reports_change_nothing() -> None:
    script = Script()
    run = script.submit(heavy(script, script.slice(2), 4))
    host = "island0/host0"
    script.send(HostReport(0.0, "r", host, ((999, 0, 0.1), (run.run, 7, 0.1), (run.run, -1, 0.1))))
    script.send(HostReport(0.0, "r", host, (), ((run.run, 7, BROKEN), (999, 0, BROKEN))))
    script.send(HostReport(0.0, "r", host, resident=(4242,), compiled=(("zz", 3, 0, None),)))
    script.send(HostReport(0.0, "r", "island9/host0", ((run.run, 0, 0.1),)))
    assert script.ended == {}
    script.finish(run.run)
    script.send(HostReport(0.0, "r", host, ((run.run, 0, 0.1),)))
    assert script.ended[run.run].outcome == "finished"


def test_a_released_slice_takes_nothing_new_and_ends_with_its_last_buffer() -> None:
    script = Script()
    where = script.slice(2)
    plan = heavy(script, where, 4)
    run = script.submit(plan)
    script.send(SliceReleased(0.0, "release", "kernel-1", where))
    late = script.submit(plan)
    assert "was released" in script.ended[late.run].failure.message  # type: ignore[union-attr]
    script.finish_all()
    assert script.ended[run.run].outcome == "finished"
    assert told(script, SliceFreed) == []
    script.drop(*run.outputs)
    assert [f.slice for f in told(script, SliceFreed)] == [where]
    assert script.control.slices == {}


def test_everything_of_a_client_that_left_is_freed_and_others_go_on() -> None:
    script = Script(rules=Rules(window=0.005, ahead=0.005))
    where = script.slice(4)
    mine = script.submit(heavy(script, where, 4))
    script.client("kernel-2")
    theirs = script.slice(4, client="kernel-2")
    plan = script.register(Sketch("q").chain(theirs, "g", "h", nbytes=4), client="kernel-2")
    script.upload(theirs, 4, client="kernel-2", arrive=False)
    for _ in range(3):
        script.submit(plan, client="kernel-2")
    script.send(ClientLeft(0.0, "gone", "kernel-2", "its kernel died"))
    script.finish_all()
    assert list(script.control.slices) == [where]
    assert script.used() == [4]
    assert set(script.control.state.store.buffers) == set(mine.outputs)
    assert {c.client for c in told(script, RunEnded)} == {"kernel-1"}


# --- faults --------------------------------------------------------------------------


def test_a_lost_host_fails_what_used_it_by_name_and_leaves_the_rest_alone() -> None:
    script, first, second, pair = two_islands(hosts=2, devices=2)
    lone = script.register(Sketch("lone").chain(second, "c", nbytes=4))
    kept = script.submit(lone)
    script.finish_all()
    run, safe = script.submit(pair), script.submit(lone, kept.outputs)
    dead = script.binding(first).hosts[0]
    script.send(HostLost(1.0, "watch", dead, "killed"))
    failure = script.ended[run.run].failure if run.run in script.ended else None
    assert failure is None or failure.kind == "lost"
    assert all(
        f is not None and f.kind == "lost" and dead in f.message
        for f in map(script.resolved.get, run.outputs)
    )
    script.waiting.pop(dead)
    script.finish_all()
    assert script.ended[run.run].outcome == "failed"
    assert script.ended[safe.run].outcome == "finished"
    assert [a.run for a in told(script, AbortRun)] == [run.run]
    later = script.submit(pair)
    assert dead in script.ended[later.run].failure.message  # type: ignore[union-attr]


def test_a_lost_host_ends_the_epoch_of_its_island() -> None:
    script = Script(hosts=2, devices=1)
    whole, single = script.slice(2), script.slice(1)
    for where, name in ((whole, "w"), (single, "s")):
        script.submit(heavy(script, where, 1, name))
    dead = next(
        h for h in ("island0/host0", "island0/host1") if h not in script.binding(single).hosts
    )
    script.send(HostLost(1.0, "watch", dead, "killed"))
    script.waiting.pop(dead)
    script.join(dead, devices=1)
    again = script.slice(2)
    script.submit(heavy(script, again, 1, "again"))
    last = [g for g in script.grants if g.run == script.order[-1]]
    assert {(g.epoch, g.place, g.previous) for g in last} == {(1, 0, -1)}


def test_results_on_a_lost_host_are_taken_back() -> None:
    script = Script()
    where = script.slice(4)
    plan = heavy(script, where, 4)
    run = script.submit(plan)
    script.finish_all()
    assert script.resolved[run.outputs[0]] is None
    script.send(HostLost(1.0, "watch", "island0/host0", "killed"))
    assert script.resolved[run.outputs[0]].kind == "lost"  # type: ignore[union-attr]
    script.drop(*run.outputs)
    assert told(script, FreeBuffers) == []  # there is nobody left to tell


def test_a_replaced_device_process_is_a_lost_one() -> None:
    script = Script()
    where = script.slice(4)
    run = script.submit(heavy(script, where, 4))
    script.join("island0/host0")
    assert "was replaced" in script.ended[run.run].failure.message  # type: ignore[union-attr]
    assert script.submit(heavy(script, script.slice(4), 4, "again")).run in script.order


def test_the_story_of_a_run_is_told_by_its_messages() -> None:
    script = Script()
    run = script.submit(heavy(script, script.slice(4), 4))
    script.finish_all()
    story = script.story(run.run)
    for word in ("RunSubmitted", "Grant", "HostReport", "Resolved", "RunEnded"):
        assert word in story
    assert "SliceBound" not in story
    assert [type(c) for c in told(script, SliceBound)] == [SliceBound]
    assert len(told(script, Resolved)) == 1
    assert len(told(script, Grant)) == 1


@pytest.mark.parametrize("size", [0, 1])
def test_a_program_without_steps_ends_at_once(size: int) -> None:
    script = Script()
    where = script.slice(1)
    sketch = Sketch("nothing")
    sketch.input(where, size)
    run = script.submit(script.register(sketch))
    assert script.ended[run.run].outcome == "finished"
