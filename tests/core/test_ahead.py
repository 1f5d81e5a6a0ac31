"""Uploads declared ahead: no claim on memory before a reader, no reader without the bytes."""

from __future__ import annotations

from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import (
    BufferDeclared,
    CancelRequested,
    FreeBuffers,
    RunEnded,
    UploadLost,
)
from pathways_lab.testing import Script, Sketch
from tests.core.stories import told

NUMBERS = (9001, 9002, 9003)
BATCH, WORK = 4, 3
"""Bytes per device; devices have 10, so that a run fits beside its batch and not beside two."""


def start() -> tuple[Script, int]:
    script = Script(memory=10)
    return script, script.slice(1)


def declare(script: Script, where: int, *numbers: int, ahead: bool = True) -> None:
    for number in numbers:
        script.send(BufferDeclared(0.0, "feed", "kernel-1", number, where, BATCH, ahead))


def reader(where: int) -> Sketch:
    sketch = Sketch("reader")
    batch = sketch.input(where, BATCH)
    (made,) = sketch.call("f", where, [batch], [WORK])
    return sketch.output(made)


def test_what_nobody_reads_yet_keeps_nobody_from_beginning() -> None:
    for ahead in (True, False):
        script, where = start()
        plan = script.register(reader(where))
        script.compiled()
        declare(script, where, *NUMBERS[:2], ahead=ahead)
        script.arrive(NUMBERS[0], where)
        script.arrive(NUMBERS[1], where)
        assert script.resolved[NUMBERS[1]] is None  # it can be fetched
        assert max(script.used()) == (0 if ahead else 2 * BATCH)
        run = script.submit(plan, [NUMBERS[0]])
        # Counted from the start they would be in each other's way for ever.
        assert (run.run in script.order) is ahead
        if ahead:
            script.drop(NUMBERS[0])
            script.finish_all()
            again = script.submit(plan, [NUMBERS[1]])
            script.drop(*run.outputs)
            assert again.run in script.order


def test_a_reader_is_granted_when_the_bytes_have_come() -> None:
    script, where = start()
    plan = script.register(reader(where))
    script.compiled()
    declare(script, where, NUMBERS[0])
    run = script.submit(plan, [NUMBERS[0]])
    assert run.run not in script.order
    assert max(script.used()) >= BATCH  # its memory waits for it, and not it for memory
    script.arrive(NUMBERS[0], where)
    assert run.run in script.order


def test_bytes_that_never_come_fail_those_who_read_them_and_nobody_else() -> None:
    script, where = start()
    plan = script.register(reader(where))
    script.compiled()
    declare(script, where, *NUMBERS[:2])
    lost = script.submit(plan, [NUMBERS[0]])
    other = script.submit(plan, [NUMBERS[1]])
    why = Failure("execute", "no such picture")
    script.send(UploadLost(1.0, "feed", "kernel-1", NUMBERS[0], why))
    assert script.resolved[NUMBERS[0]] == why
    ended = {c.run: c.failure for c in told(script, RunEnded)}
    assert ended[lost.run] is not None
    assert ended[lost.run].message == why.message  # type: ignore[union-attr]
    script.arrive(NUMBERS[1], where)
    script.finish_all()
    ended = {c.run: c.failure for c in told(script, RunEnded)}
    assert ended[other.run] is None
    script.drop(*NUMBERS[:2], *lost.outputs, *other.outputs)
    assert max(script.used()) == 0
    assert not script.control.state.store.buffers
    assert not script.control.uploads.ahead
    # Bytes that come all the same are not kept, and what has a value does not lose it.
    script.send(UploadLost(2.0, "feed", "kernel-1", NUMBERS[0], why))


def test_bytes_that_nobody_can_use_any_more_need_not_come() -> None:
    """Their client was interrupted before it sent them: memory goes with the handle."""
    for ahead in (True, False):
        script, where = start()
        plan = script.register(reader(where))
        script.compiled()
        declare(script, where, *NUMBERS[:2], ahead=ahead)
        script.drop(*NUMBERS[:2])
        assert not script.control.state.store.buffers
        assert not script.control.uploads.ahead
        assert max(script.used()) == 0
        declare(script, where, NUMBERS[2])
        script.arrive(NUMBERS[2], where)
        run = script.submit(plan, [NUMBERS[2]])
        assert run.run in script.order
        # What comes all the same is freed.
        script.arrive(NUMBERS[0], where)
        freed = [n for c in told(script, FreeBuffers) for n in c.buffers]
        assert NUMBERS[0] in freed
        script.send(UploadLost(1.0, "feed", "kernel-1", NUMBERS[1], Failure("cancelled", "closed")))
        assert not script.control.uploads.orphans


def test_bytes_that_a_run_waits_for_are_waited_for_without_a_handle() -> None:
    script, where = start()
    plan = script.register(reader(where))
    script.compiled()
    declare(script, where, NUMBERS[0])
    run = script.submit(plan, [NUMBERS[0]])
    script.drop(NUMBERS[0])
    assert script.control.state.store.buffers
    script.arrive(NUMBERS[0], where)
    assert run.run in script.order
    script.finish_all()
    assert [c.failure for c in told(script, RunEnded)] == [None]


def test_a_run_that_is_cancelled_waits_for_no_bytes() -> None:
    script, where = start()
    plan = script.register(reader(where))
    script.compiled()
    declare(script, where, NUMBERS[0])
    run = script.submit(plan, [NUMBERS[0]])
    script.drop(NUMBERS[0], *run.outputs)
    script.send(CancelRequested(1.0, "test", "kernel-1", (run.run,)))
    assert not script.control.state.store.buffers
    assert max(script.used()) == 0
