"""Laws of buffers and of memory, each shown by the smallest story."""

from __future__ import annotations

from pathways_lab.core.messages import (
    FreeBuffers,
    HostReport,
    RunCancelled,
)
from pathways_lab.testing import Script, Sketch
from tests.core.stories import heavy, told

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


# --- memory ------------------------------------------------------------------------------


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
    assert "p.f.0 of kernel-1 (4 bytes on slice s1," in failure.message
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
