"""Laws of buffers and of memory, each shown by the smallest story."""

from __future__ import annotations

import math

from pathways_lab.core.messages import (
    CancelRequested,
    FreeBuffers,
    HostReport,
    RunWaited,
)
from pathways_lab.core.program.program import Plan
from pathways_lab.core.scheduling.rules import Rules
from pathways_lab.testing import Script, Sketch
from tests.core.stories import BROKEN, heavy, told


def consume(script: Script, where: int, result: int = 4) -> Plan:
    """A program that consumes its argument of 4 bytes."""
    sketch = Sketch("consume")
    made = sketch.call("f", where, [sketch.input(where, 4)], [result], donated=(0,))
    return script.register(sketch.output(*made))


# --- buffers -----------------------------------------------------------------------------


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


def test_a_value_that_failed_is_freed_once_although_its_handle_stays() -> None:
    script = Script()
    run = script.submit(script.register(Sketch("p").chain(script.slice(4), "f", nbytes=4)))
    script.finish(run.run, failure=BROKEN)
    script.drop(*run.outputs)
    assert [f.buffers for f in told(script, FreeBuffers)] == [run.outputs]


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
    plan = consume(script, where)
    buffer = script.upload(where, 4)
    donor = script.submit(plan, [buffer])
    script.send(CancelRequested(0.0, "interrupt", "kernel-1", (donor.run,)))
    assert script.ended[donor.run].outcome == "cancelled"
    script.submit(plan, [buffer])
    assert script.refused == []


def test_a_donor_waits_for_earlier_readers() -> None:
    """The reader is not compiled yet, the donor is: order is by submission."""
    script = Script(compile=False)
    where = script.slice(4)
    reads = script.register(Sketch("reads").chain(where, "r", nbytes=4))
    script.compiling.clear()
    donates = consume(script, where)
    script.compiled()
    buffer = script.upload(where, 4)
    reader, donor = script.submit(reads, [buffer]), script.submit(donates, [buffer])
    assert script.order == []
    script.send(HostReport(0.0, "c", "island0/host0", compiled=(("r", where, 0, None),)))
    assert script.order == [reader.run, donor.run]


def test_a_donor_takes_no_memory_that_an_earlier_reader_waits_for() -> None:
    """Its reservation would keep out the reader, which it then waits for: for ever."""
    script = Script(memory=16)
    where = script.slice(4)
    runs, sketch = Sketch("runs"), Sketch("reads")
    other = script.register(runs.output(*runs.call("o", where, [], [1])))
    reads = script.register(sketch.output(*sketch.call("r", where, [sketch.input(where, 4)], [12])))
    donates, buffer = consume(script, where, 5), script.upload(where, 4)
    first, reader = script.submit(other), script.submit(reads, [buffer])
    donor = script.submit(donates, [buffer])  # it would fit, but not beside the reader
    assert script.order == [first.run]
    script.drop(*first.outputs)
    script.finish(first.run)
    script.drop(*reader.outputs)
    script.finish_all()
    assert script.order == [first.run, reader.run, donor.run]


def test_a_donor_waits_for_readers_that_have_begun_and_not_come_that_far() -> None:
    """The second call of the reader waits for a value, and has no place yet."""
    script = Script()
    where = script.slice(4)
    sketch = Sketch("reads")
    x = sketch.input(where, 4)
    (y,) = sketch.call("a", where, [], [4])
    (z,) = sketch.call("b", where, [x, y], [4], ahead=False)
    reads, donates = script.register(sketch.output(z)), consume(script, where)
    buffer = script.upload(where, 4)
    reader, donor = script.submit(reads, [buffer]), script.submit(donates, [buffer])
    assert script.order == [reader.run]
    script.finish(reader.run)
    assert script.order == [reader.run, reader.run, donor.run]


# --- memory ------------------------------------------------------------------------------


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    script = Script(memory=10)
    run = script.submit(heavy(script, script.slice(4), 6))
    failure = script.ended[run.run].failure
    assert failure is not None
    assert failure.kind == "memory"
    assert "needs 12 bytes per device of island0" in failure.message
    assert "they have 10" in failure.message


def test_what_lies_on_other_devices_needs_no_room_on_these() -> None:
    script = Script(islands=2, memory=20)
    sketch = Sketch("apart")
    made, given = [], []
    for island in ("island0", "island1"):
        where = script.slice(4, island=island)
        made += sketch.call(f"on {island}", where, [sketch.input(where, 8)], [8])
        given.append(script.upload(where, 8))
    run = script.submit(script.register(sketch.output(*made)), given)
    script.finish_all()
    assert script.ended[run.run].outcome == "finished"


def test_a_run_that_waited_for_memory_says_since_when_and_others_say_nothing() -> None:
    script = Script(memory=10)
    plan = heavy(script, script.slice(4), 4)
    first = script.submit(plan)
    script.pass_time(1.0)
    second = script.submit(plan)
    script.pass_time(2.0)
    script.drop(*first.outputs)
    script.finish_all()
    waits = told(script, RunWaited)
    assert [(w.run, w.since, w.waited_for) for w in waits] == [(second.run, 1.0, "memory")]


def test_one_buffer_given_twice_is_there_once() -> None:
    """And that such a run fits says nothing of one with two buffers."""
    script = Script(memory=10)
    where = script.slice(4)
    sketch = Sketch("adds")
    made = sketch.call("f", where, [sketch.input(where, 4), sketch.input(where, 4)], [4])
    plan = script.register(sketch.output(*made))
    one = script.upload(where, 4)
    twice = script.submit(plan, [one, one])
    assert script.order == [twice.run]
    script.finish_all()
    script.drop(*twice.outputs)
    two = script.submit(plan, [one, script.upload(where, 4)])
    assert script.ended[two.run].failure.kind == "memory"  # type: ignore[union-attr]


def test_temporary_bytes_of_a_function_count() -> None:
    script = Script(memory=10, compile=False)
    plan = heavy(script, script.slice(4), 4)
    script.compiled(temporary=3)
    run = script.submit(plan)
    assert "needs 11 bytes" in script.ended[run.run].failure.message  # type: ignore[union-attr]


def test_what_a_cancelled_run_has_made_before_counts_until_its_handle_goes() -> None:
    script = Script(rules=Rules(window=0.005, ahead=0.005, least=1))
    where = script.slice(4)
    sketch = Sketch("p")
    (first,) = sketch.call("f", where, [], [4])
    (last,) = sketch.call("g", where, [first], [8])
    run = script.submit(script.register(sketch.output(first, last)))
    script.send(CancelRequested(0.0, "interrupt", "kernel-1", (run.run,)))
    script.finish_all()
    assert script.resolved[run.outputs[0]] is None
    assert script.used() == [4]
    script.drop(*run.outputs)
    assert script.used() == [0]


def test_an_upload_that_waited_for_memory_and_was_dropped_waits_no_more() -> None:
    script = Script(memory=10, compile=False)
    where = script.slice(4)
    script.submit(heavy(script, where, 1))  # it is not compiled: nothing is settled before
    script.upload(where, 8)
    waits = script.upload(where, 8)
    assert script.control.state.admission.kinds
    script.drop(waits)
    assert not script.control.state.admission.kinds


def test_who_was_overtaken_too_often_keeps_nobody_back_where_nothing_makes_room() -> None:
    """A run that is not compiled yet may make room one day: until then devices have work."""
    script = Script(memory=16, compile=False, rules=Rules(overtaking=2))
    where = script.slice(4)
    small, large, late = (Sketch(name) for name in ("small", "large", "late"))
    for sketch, size in ((small, 4), (large, 12), (late, 1)):
        sketch.output(*sketch.call(sketch.name, where, [], [size]))
    plans = [script.register(small), script.register(large)]
    script.compiled()
    script.submit(script.register(late))
    kept = script.upload(where, 8)
    waits = script.submit(plans[1])
    for _ in range(4):
        run = script.submit(plans[0])
        script.drop(*run.outputs)
        script.finish_all()
        assert script.order[-1] == run.run
    script.drop(kept)
    assert script.order[-1] == waits.run


def test_who_stood_back_begins_when_that_for_which_it_did_is_dropped() -> None:
    script = Script(memory=16, rules=Rules(overtaking=2, assumed=0.005))
    where = script.slice(4)
    long, short = Sketch("long"), Sketch("short")
    long.output(*long.call("l", where, [], [8]))
    short.output(*short.call("s", where, [], [1]))
    script.submit(script.register(long))
    large, plan = script.upload(where, 12), script.register(short)
    runs = [script.submit(plan).run for _ in range(3)]
    assert script.order[1:] == runs[:2]
    script.drop(large)
    assert script.order[1:] == runs


def test_who_waits_for_room_gives_hope_to_others_on_all_its_devices() -> None:
    script = Script(devices=2, memory=10)
    wide, left, right = script.slice(2), script.slice(1), script.slice(1)
    assert script.binding(left).devices != script.binding(right).devices
    plans = []
    for name, where, size in (("busy", left, 8), ("waits", wide, 4)):
        sketch = Sketch(name)
        plans.append(script.register(sketch.output(*sketch.call(name, where, [], [size]))))
    kept = script.upload(right, 4)
    busy, waits = script.submit(plans[0]), script.submit(plans[1])
    last = script.upload(right, 8)
    assert script.resolved[last] is None, "it was not given up"
    script.drop(kept, *busy.outputs)
    script.finish(busy.run)
    script.drop(*waits.outputs)
    script.finish_all()
    assert script.order == [busy.run, waits.run]
    assert script.control.state.store.buffers[last].admitted


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


def test_a_stalemate_is_told_soon_with_who_holds_what() -> None:
    script = Script(memory=10)
    plan = heavy(script, script.slice(4), 4)
    first = script.submit(plan)
    script.finish_all()
    second = script.submit(plan)
    script.pass_time(0.4)
    assert second.run not in script.ended
    script.pass_time(0.2)
    failure = script.ended[second.run].failure
    assert failure is not None
    assert failure.kind == "stalemate"
    assert "needs 8 bytes per device of island0, 6 of 10 are free" in failure.message
    assert "p.f.0 of kernel-1 (4 bytes on slice s1," in failure.message
    assert "kept by its handle" in failure.message
    assert "quota" not in failure.remedy
    assert script.ended[first.run].outcome == "finished"


def test_a_loop_that_binds_its_result_anew_has_room_although_the_drop_comes_after_the_call() -> (
    None
):
    script = Script(memory=20)
    plan = heavy(script, script.slice(4), 8)
    state = script.submit(plan)
    for _ in range(3):
        script.finish_all()
        again = script.submit(plan)
        script.pass_time(0.4)
        script.drop(*state.outputs)
        state = again
        script.pass_time(1.0)
    script.finish_all()
    assert script.ended[state.run].outcome == "finished"


def test_what_is_given_up_takes_no_patience_from_others() -> None:
    """Each is given up when nothing could make room for so long, and not for others."""
    script = Script(memory=20)
    plan = heavy(script, script.slice(4), 8)
    script.submit(plan)
    script.finish_all()
    second = script.submit(plan)
    script.pass_time(0.4)
    where = script.slice(4)
    upload = script.upload(where, 15)
    script.pass_time(0.2)
    assert script.ended[second.run].outcome == "failed"
    assert script.resolved[upload] is None
    script.pass_time(0.4)
    assert script.resolved[upload] is not None
    assert script.control.due == math.inf


def test_a_stalemate_counts_values_that_are_alike() -> None:
    """A loop that holds too much made them all by one line, under one name."""
    script = Script(memory=18)
    plan = heavy(script, script.slice(4), 4)
    for _ in range(3):
        script.submit(plan)
        script.finish_all()
    last = script.submit(plan)
    script.pass_time(1.0)
    failure = script.ended[last.run].failure
    assert failure is not None
    assert "Held by 3 times p.f.0 of kernel-1 (4 bytes each on slice s1, kept" in failure.message
    assert failure.message.count("p.f.0") == 1


def test_a_run_has_the_room_of_handles_that_were_dropped_with_it() -> None:
    script = Script(memory=30)
    plan = heavy(script, script.slice(4), 12)
    state = script.submit(plan)
    for _ in range(3):
        script.finish(state.run)
        state = script.submit(plan, dropped=state.outputs)
    assert state.run not in script.ended, "it runs"
    script.finish(state.run)
    refused = script.submit(plan, (1, 2), dropped=state.outputs)
    assert script.ended[refused.run].outcome == "failed"
    script.drop(*refused.outputs)
    assert script.used() == [0]
    assert not script.control.state.store.buffers


def test_a_run_may_take_what_is_dropped_with_it() -> None:
    script = Script(memory=16)
    where = script.slice(4)
    first = script.submit(heavy(script, where, 4))
    second = script.submit(consume(script, where), first.outputs, dropped=first.outputs)
    script.finish_all()
    assert script.ended[second.run].outcome == "finished"
    assert script.refused == []


def test_a_stalemate_is_told_also_while_others_wait_with_hope() -> None:
    script = Script(islands=2, memory=10)
    left, right = script.slice(4, island="island0"), script.slice(4, island="island1")
    plan = heavy(script, left, 4)
    _, hopes = script.submit(plan), script.submit(plan)
    script.upload(right, 6)
    upload = script.upload(right, 8)
    script.pass_time(1.0)
    failure = script.resolved[upload]
    assert failure is not None
    assert failure.kind == "stalemate"
    assert hopes.run not in script.ended


def test_waiting_is_not_a_stalemate_while_somebody_may_make_room() -> None:
    script = Script(memory=10)
    plan = heavy(script, script.slice(4), 4)
    first, second = script.submit(plan), script.submit(plan)
    assert second.run not in script.ended
    script.finish(first.run)  # and its result stays: now nothing can make room
    script.pass_time(1.0)
    assert script.ended[second.run].failure.kind == "stalemate"  # type: ignore[union-attr]


def test_memory_of_slices_that_share_devices_is_counted_together() -> None:
    script = Script(devices=2, memory=10)
    small, wide = script.slice(1), script.slice(2)
    first = script.submit(heavy(script, small, 4, "small"))
    second = script.submit(heavy(script, wide, 4, "wide"))
    assert script.order == [first.run]
    script.drop(*first.outputs)
    assert script.order == [first.run, second.run]
