"""Calls that are sent together: the same results, few messages, bounded, never late."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.client.session import call_batching, connection
from pathways_lab.client.session.pending import Run
from pathways_lab.core.errors import PathwaysError
from pathways_lab.core.program.concatenate import Part, in_series
from pathways_lab.core.program.legality import check_plan
from pathways_lab.core.program.program import Call
from pathways_lab.transport.framing import TO_CONTROL, Letter, Limits, WireError
from tests.client.kit import FakeLab, fast, without_ticks
from tests.runtime.launch_kit import PlanBuilder
from tests.runtime.processes import until

pytestmark: list[pytest.MarkDecorator] = []


ONE = PlanBuilder("one").call(1, "f", ["a"], ["b"]).plan(["a"], ["b"])
TWO = PlanBuilder("two").call(1, "g", ["a", "b"], ["c"], (0,)).plan(["a", "b"], ["c"])


def test_a_chain_of_calls_is_one_plan_whose_inner_values_die_at_once() -> None:
    parts = [Part(ONE, ((-1, 0),), ())]
    parts += [Part(ONE, ((n, 0),), (0,) if n == 2 else ()) for n in range(3)]
    plan = in_series("chain", parts)
    assert check_plan(plan) is None
    assert (len(plan.steps), len(plan.inputs), len(plan.outputs)) == (4, 1, 1)
    made = [step.node.outputs[0] for step in plan.steps if isinstance(step.node, Call)]
    assert [step.frees for step in plan.steps[1:]] == [(value,) for value in made[:-1]]
    assert plan.key == in_series("chain", parts).key


def test_shared_inputs_are_one_input_and_donations_stay() -> None:
    plan = in_series("both", [Part(ONE, ((-1, 0),), (0,)), Part(TWO, ((-1, 1), (0, 0)), (0,))])
    assert check_plan(plan) is None
    assert len(plan.inputs) == 2
    last = plan.steps[-1].node
    assert isinstance(last, Call)
    assert last.donated == (0,)
    assert plan.values[last.inputs[0]].name == "a"


def test_a_program_can_be_registered_while_calls_wait(
    fake: FakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that leave together may need a plan of their own, in the middle of registering."""
    fast(monkeypatch)
    on = fake.slice(2)
    step = pw.jit(lambda x: x + 1, on=on)
    x = step(np.zeros(4, np.float32)).block_until_ready()
    ended = threading.Event()

    def work(x: pw.Handle) -> None:
        fake.held = True
        for number in range(4):
            kept = [step(x)]  # under way
            for _ in range(8):
                kept.append(step(kept[-1]))  # these wait, in the same way each time
            program = pw.program(lambda v, n=number: step(v) * n, name=f"p{number}")
            made = program(x)
            fake.settle()
            fake.held = False
            fake.release()
            jax.block_until_ready((kept, made))
            fake.held = True
        ended.set()

    thread = threading.Thread(target=work, args=(x,), daemon=True)
    thread.start()
    assert ended.wait(60), "registering waits for itself"


def test_a_call_that_is_too_large_for_a_message_is_refused_at_its_line(
    fake: FakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast(monkeypatch)
    step = pw.jit(lambda *xs: sum(xs[:3]), on=fake.slice(2))
    monkeypatch.setattr(connection, "TO_CONTROL", Limits(buffers=20))
    with pytest.raises(PathwaysError, match=r"(?s)30 buffers.*test_batching\.py") as refused:
        step(*[np.float32(n) for n in range(30)])
    assert "the limits are 20" in str(refused.value)
    program = pw.program(lambda *xs: step(*xs))
    before = set(fake.connection._buffers)
    with pytest.raises(PathwaysError, match="the limits are 20"):
        program(*[np.float32(n) for n in range(30)])
    assert not set(fake.connection._buffers) - before, "nobody has a handle to what it would make"
    assert step(*[np.float32(n) for n in range(9)]).result() == 3.0, "the lab goes on"


def test_calls_that_are_each_within_the_limits_stay_there_together(
    fake: FakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert TO_CONTROL.buffers >= call_batching.MOST * call_batching._ARGUMENTS
    assert TO_CONTROL.body >= call_batching.MOST * call_batching._BYTES
    fast(monkeypatch)
    monkeypatch.setattr(call_batching, "_ARGUMENTS", 3)
    step = pw.jit(lambda *xs: sum(xs), on=fake.slice(2))

    def call(count: int) -> Any:
        return step(*[np.float32(1)] * count)  # one line: another one would be another plan

    jax.block_until_ready([call(3), call(4)])
    calls = fake.session._calls
    with monkeypatch.context() as patch:
        patch.setattr(call_batching, "SOON", 60.0)
        patch.setattr(call_batching.Burst, "over", lambda *_: False)
        patch.setattr(type(fake.connection), "under_way", True)
        made = [call(3)]
        assert len(calls._entries) == 1
        made.append(call(4))
        assert not calls._entries
    assert [handle.result(timeout=60) for handle in made] == [3.0, 4.0]


def test_short_bursts_are_expected_to_be_as_long_as_the_last_one() -> None:
    burst, now = call_batching.Burst(), 5.0

    def leave(calls: int, steps: int = 9) -> list[int]:
        """Which calls of one burst leave at once."""
        nonlocal now
        now += 2 * call_batching.PAUSE
        return [n for n in range(1, calls + 1) if burst.over(now + n * 1e-6, steps)]

    assert leave(1) == [1]
    assert leave(3) == [1], "nobody knew"
    assert leave(3) == [1, 3]
    assert leave(2) == [1], "it waits for a third one"
    assert leave(20) == [1, 2]
    assert leave(20) == [], "a pause in a long burst may be the system's"
    assert leave(1) == []
    assert leave(1) == [1]
    assert leave(1, steps=call_batching.FEW) == [], (
        "so much is under way: no time for more messages"
    )


def test_who_calls_from_time_to_time_waits_for_nobody(
    fake: FakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell that computes in between keeps the interpreter, so nobody hears of what is over."""
    monkeypatch.setattr(call_batching, "SOON", 60.0)
    monkeypatch.setattr(call_batching, "PAUSE", 0.0)
    step = pw.jit(lambda x: x + 1, on=fake.slice(2))
    x = step(np.zeros(4, np.float32)).block_until_ready()
    fake.held = True
    for number in range(9):
        before = len(fake.of("submit"))
        x = step(x)
        fake.settle()
        assert len(fake.of("submit")) == before + 1, f"call {number} has left"
    fake.held = False
    fake.release()
    assert x.result().tolist() == [10.0] * 4


def test_what_is_left_over_waits_for_others_and_leaves_when_nothing_is_under_way(
    fake: FakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs are of 1, 2, 4 ... calls: a rest that left at once would cost a message for each bit."""
    fast(monkeypatch)
    without_ticks(fake, monkeypatch)
    step = pw.jit(lambda x: x + 1, on=fake.slice(2))
    calls = fake.session._calls
    x = step(np.zeros(4, np.float32)).block_until_ready()
    for again in (False, True):
        before = len(fake.of("submit"))
        until(lambda: not fake.connection.under_way)  # a value comes before the end of its run
        fake.held = True
        for _ in range(8):
            x = step(x)  # the first one leaves, the others wait
        waiting = []
        while calls._entries:
            waiting.append(len(calls._entries))
            fake.settle()
            fake.release()
            fake.settle()
        assert waiting == [7, 3, 1]
        sent = fake.of("submit")[before:]
        assert len(sent) == (4 if again else 8)
        fake.settle()
        fake.held = False
        fake.release()
        x.block_until_ready()
        assert any(fields.get("dropped") for fields in sent[:-1]), "told as early as it can be"
    produced_before_used(fake)


def test_what_goes_alone_or_asks_goes_after_the_calls_that_wait(
    fake: FakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast(monkeypatch)
    on = fake.slice(2)
    step, new = pw.jit(lambda x: x + 1, on=on), pw.jit(lambda x: x * 2, on=on)

    def sent() -> int:
        fake.settle()
        return len(fake.of("submit"))

    values = [step(np.zeros(4, np.float32))]
    for turn in ("the lab learns it", "under way", "waits", "waits too"):
        if turn == "under way":
            values[-1].block_until_ready()
            until(lambda: not fake.connection.under_way)
            fake.held, before = True, sent()
        if turn == "waits too":
            assert sent() == before + 1
            made = new(values[-1])  # the lab does not know this function yet
            assert sent() == before + 3
            produced_before_used(fake)
        values.append(step(values[-1]))
    assert sent() == before + 3
    fake.connection.send("watch", {"on": True})
    assert sent() == before + 4
    fake.held = False
    fake.release()
    assert [h.result()[0] for h in (made, values[-1])] == [8.0, 5.0]


def test_a_call_that_reads_an_element_still_to_come_travels_alone(
    fake: FakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others would wait for it, and fail with it."""
    fast(monkeypatch)
    step = pw.jit(lambda x: x + 1, on=fake.slice(2))
    values = [step(np.zeros(4, np.float32))]
    for turn in range(3):
        if turn == 1:
            values[-1].block_until_ready()
            until(lambda: not fake.connection.under_way)
            fake.held = True
        values[-1].buffer.fed = turn == 2
        before = len(fake.of("submit"))
        values.append(step(values[-1]))
        fake.settle()
    assert len(fake.of("submit")) == before + 1
    fake.held = False
    fake.release()
    assert values[-1].result()[0] == 4.0


def test_no_more_calls_wait_than_may(fake: FakeLab, monkeypatch: pytest.MonkeyPatch) -> None:
    fast(monkeypatch)
    monkeypatch.setattr(call_batching, "MOST", 4)
    step = pw.jit(lambda x: x + 1, on=fake.slice(2))
    x = step(np.zeros(4, np.float32)).block_until_ready()
    until(lambda: not fake.connection.under_way)
    fake.held = True
    made = [step(x) for _ in range(8)]  # the first one leaves at once
    assert len(fake.session._calls._entries) == 3
    fake.held = False
    fake.connection.flush()
    fake.settle()
    fake.release()
    jax.block_until_ready(made)


def test_plans_of_calls_go_with_their_slice(fake: FakeLab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for slices again and again does not keep what was made for each."""
    fast(monkeypatch)
    calls = fake.session._calls
    for _ in range(4):
        on = fake.slice(2)
        step = pw.jit(lambda x: x + 1, on=on)
        x = step(np.zeros(4, np.float32)).block_until_ready()
        for _ in range(3):
            fake.held = True
            made = [step(x) for _ in range(6)]
            fake.held = False
            fake.connection.flush()
            fake.settle()
            fake.release()
            jax.block_until_ready(made)
        assert len(calls._plans) == 1
        on.release()


def test_plans_of_calls_hold_a_bounded_number_of_calls(
    fake: FakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many ways there are in which calls may come."""
    fast(monkeypatch)
    monkeypatch.setattr(call_batching, "_CALLS", 12)
    on = fake.slice(2)
    steps = [pw.jit(lambda x, n=n: x + n, on=on) for n in range(3)]
    x = steps[0](np.zeros(4, np.float32)).block_until_ready()
    for order in itertools.product(range(3), repeat=2):
        for _ in range(2):
            fake.held = True
            made = [steps[0](x), *(steps[n](x) for n in order), *(steps[n](x) for n in order)]
            fake.held = False
            fake.connection.flush()
            fake.settle()
            fake.release()
            jax.block_until_ready(made)
    calls = fake.session._calls
    assert calls._plans
    assert sum(len(plan.steps) for plan in calls._plans.values()) <= 12
    assert all(isinstance(shape, int) for shape in calls._seen), "no shape is kept to be compared"


def test_one_run_may_wait_behind_another_however_large_they_are(
    fake: FakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_STEPS", 8)
    waits: list[Callable[[], bool]] = []
    step = pw.jit(lambda x: x + 1, on=fake.slice(2))
    large = pw.program(lambda x: step(step(step(step(step(step(x)))))))
    x = large(np.zeros(4, np.float32)).block_until_ready()
    until(lambda: not fake.connection.under_way)
    monkeypatch.setattr(fake.connection.board, "wait", lambda fits, *_: waits.append(fits))
    fake.held = True
    made = [large(x), large(x)]
    assert not waits
    made.append(large(x))
    (fits,) = waits
    assert not fits()
    monkeypatch.undo()
    fake.settle()
    fake.held = False
    fake.release()
    jax.block_until_ready(made)
    until(fits)


@pytest.fixture(scope="module")
def lab() -> Iterator[pw.Lab]:
    with pw.start(islands=1, hosts_per_island=2, devices_per_host=1, progress=False) as made:
        yield made


@pytest.mark.cluster
def test_a_flood_of_calls_is_bounded_and_right(lab: pw.Lab) -> None:
    """20,000 calls that nobody looks at: few messages, bounded memory, every result right."""
    on = lab.slice(2, axes="x")
    step = pw.jit(lambda x: x + 1, on=on)
    x = step(np.float32(0)).block_until_ready()
    link, most = lab.session.connection, 0
    before = lab.stats().sent["submit"]
    kept = {}
    for number in range(2, 20_001):
        x = step(x)
        if number % 1999 == 0:
            kept[number] = x
        most = max(most, link.steps)
    assert float(x.result()) == 20_000
    assert {n: float(h.result()) for n, h in kept.items()} == {n: float(n) for n in kept}
    assert most <= connection._STEPS + call_batching.MOST
    assert lab.stats().sent["submit"] - before < 20_000 / 3
    x.delete()
    kept.clear()
    step(np.float32(0)).block_until_ready()
    assert len(link._buffers) < 50
    assert not lab.session._calls._entries


@pytest.mark.cluster
def test_what_is_alive_stays_and_what_failed_fails_alone(lab: pw.Lab) -> None:
    on = lab.slice(1)
    add, double = (
        pw.jit(lambda x, y: x + y, on=on),
        pw.jit(lambda x: x * 2, on=on, donate_argnums=0),
    )

    def loop(x: pw.Handle) -> list[pw.Handle]:
        seen = [x]
        for number in range(40):
            x = add(x, np.float32(number))
            if number % 7 == 0:
                seen.append(x)
        gone = add(x, x)
        last = double(gone)
        with pytest.raises(PathwaysError, match="donated"):
            gone.result()
        return [*seen, last]

    for _ in range(4):
        found = [float(h.result()) for h in loop(add(np.float32(0), np.float32(0)))]
        sums = [float(sum(range(n + 1))) for n in range(0, 40, 7)]
        assert found == [0.0, *sums, 4.0 * sum(range(40))]


@pytest.mark.cluster
def test_threads_may_call_at_the_same_time(lab: pw.Lab) -> None:
    on = lab.slice(1)
    step = pw.jit(lambda x: x + 1, on=on)
    results: list[float] = []

    def work(start: int) -> None:
        x = step(np.float32(start))
        for _ in range(300):
            x = step(x)
        results.append(float(x.result()))

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == [301.0, 1301.0, 2301.0]


@pytest.mark.cluster
def test_an_interrupt_while_sending_fails_the_calls_and_loses_none(
    lab: pw.Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = lab.slice(1)
    step = pw.jit(lambda x: x + 1, on=on)
    x = jax.block_until_ready(step(np.float32(0)))
    calls = lab.session._calls

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(lab.session.connection), "under_way", True)
        fast(patch)
        patch.setattr(call_batching.Calls, "_send", interrupted)
        waiting = [step(x) for _ in range(4)][1:]  # the first from a line brings its code
        assert len(calls._entries) == 3
        with pytest.raises(KeyboardInterrupt):
            step(x).block_until_ready()
    for handle in waiting:
        with pytest.raises(PathwaysError, match="interrupted"):
            handle.result(timeout=60)
    assert float(step(x).result()) == 2.0


# --- order ----------------------------------------------------------------------------------


def produced_before_used(fake: FakeLab) -> None:
    """Every input of every run was made by an earlier one and not dropped before."""
    there: set[int] = set()
    for fields in fake.of("submit"):
        assert there.issuperset(b for b in fields["inputs"] if b is not None)
        there |= set(fields["outputs"])
    for number, (op, fields) in enumerate(fake.messages):
        gone = fields.get("buffers", ()) if op == "drop" else fields.get("dropped", ())
        for op_later, later in fake.messages[number + 1 :]:
            assert op_later != "submit" or not set(gone) & set(later["inputs"]), later


@pytest.mark.parametrize("where", ["submit", "registered", "batch"])
def test_what_a_failed_call_should_have_told_is_told_later(
    fake: FakeLab, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Whose handles are gone, although the message that was to say so could not be made."""
    fast(monkeypatch)
    on, link = fake.slice(2), fake.connection.link
    step = pw.jit(lambda x: x + 1, on=on)
    new = pw.jit(lambda x: x * 2, on=on)

    def call(f: Any, x: Any) -> Any:
        return f(x)  # one line: another one would be another plan

    zero = call(step, np.full(4, -1, np.float32)).block_until_ready()
    x, *others = [call(step, zero).block_until_ready() for _ in range(3)]
    until(lambda: not fake.connection.under_way)
    gone = {handle.buffer.id for handle in others}
    failing = "function" if where == "registered" else "submit"
    forward, runs = link.forward, list[Run]()

    def fails(letter: Letter) -> int:
        if letter.op == failing:
            runs.extend(fake.connection.runs)
            raise WireError("too large")
        return forward(letter)

    made = []

    with monkeypatch.context() as patch:
        patch.setattr(link, "forward", fails)
        if where == "batch":
            patch.setattr(type(fake.connection), "under_way", True)
            made = [call(step, x) for _ in range(2)]
        others.clear()
        if where == "batch":
            fake.connection.flush()
        elif where == "registered":
            with pytest.raises(PathwaysError, match="cannot be sent"):
                call(new, x)
        else:
            made = [call(step, x)]
    for handle in made:
        with pytest.raises(PathwaysError, match="cannot be sent"):
            handle.result(timeout=60)

    def told() -> set[int]:
        return {b for fields in fake.of("drop") for b in fields["buffers"]}

    until(lambda: gone <= told())
    assert not fake.connection.under_way, "what did not leave is not waited for"
    assert all(pending.failure for run in runs for pending in (run, *run.outputs))
    assert call(step, x).result().tolist() == [2.0] * 4


def test_a_program_does_not_overtake_calls_that_another_thread_is_sending(
    fake: FakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = fake.slice(2)
    step = pw.jit(lambda x: x + 1, on=on)
    program = pw.program(lambda x: step(x))

    def call(x: Any) -> Any:
        return step(x)  # one line: another one would be another plan

    x = call(np.zeros(4, np.float32)).block_until_ready()
    jax.block_until_ready((call(x), program(x)))
    until(lambda: not fake.connection.under_way)
    submit, sending, go_on = fake.connection.submit, threading.Event(), threading.Event()
    fake.held = True
    busy = call(x)
    fast(monkeypatch)

    def slowly(*args: Any, **more: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            sending.set()
            assert go_on.wait(60)
        return submit(*args, **more)

    monkeypatch.setattr(fake.connection, "submit", slowly)
    late = call(x)  # waits for others
    other = threading.Thread(target=fake.connection.flush, daemon=True)
    other.start()
    assert sending.wait(60)
    threading.Timer(0.2, go_on.set).start()
    made = program(late)
    fake.settle()
    produced_before_used(fake)
    fake.release()
    jax.block_until_ready((busy, late, made))


@pytest.mark.parametrize("known", [False, True], ids=["first", "again"])
def test_what_a_call_consumes_is_not_dropped_before_it_is_sent(
    fake: FakeLab, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    fast(monkeypatch)
    here, there = fake.slice(2), fake.slice(2, island="island1")
    step = pw.jit(lambda x: x + 1, on=here)
    consume = pw.jit(lambda x: x * 2, on=there, donate_argnums=0)

    def call(f: Any, x: Any) -> Any:
        return f(x)  # one line: another one would be another plan

    x = call(step, np.zeros(4, np.float32)).block_until_ready()
    y = call(consume, np.ones(4, np.float32)).block_until_ready()
    call(step, x).block_until_ready()
    if known:
        y = call(consume, y).block_until_ready()
    until(lambda: not fake.connection.under_way)
    fake.held = True
    busy, waiting = [call(step, x) for _ in range(2)]
    made = call(consume, y)  # elsewhere: what waits is sent first
    fake.connection.flush()
    fake.settle()
    produced_before_used(fake)
    fake.release()
    jax.block_until_ready((busy, waiting, made))
