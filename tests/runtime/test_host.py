"""A real device process, driven over real links by a control plane that the test plays."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.runtime import emulated as emulated_module
from pathways_lab.runtime.data_messages import upload_fields
from pathways_lab.runtime.emulated import emulated
from pathways_lab.timeline.records import Event, Sample
from tests.runtime.fake_control import FetchFailed, Lab, Program, spans
from tests.runtime.host_kit import HOST, binding, broken, code, layout
from tests.runtime.processes import until

pytestmark = pytest.mark.cluster

numbers = itertools.count(1)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    made = Lab()
    yield made
    made.close()


def row(lab: Lab, *devices: int) -> SliceBinding:
    return lab.bind(binding(next(numbers), (len(devices),), devices))


def test_compile_grant_launch_fetch(lab: Lab) -> None:
    """The thin path: one slice, one function, one run, its value and its records."""
    on = lab.bind(binding(next(numbers), (2, 2), [0, 1, 2, 3]))
    cut = layout(on, "a", "b")
    kind = ((4, 6), "float32")
    double = code(lambda x: (x * 2,), on, [(kind, cut)], [(kind, cut)], name="double")
    lab.prepare(double)
    program = Program("thin").value("x", on.slice, *kind, cut).call(double, ["x"], ["y"])
    plan = lab.program(program.plan(["x"], ["y"]))
    data = np.arange(24, dtype=np.float32).reshape(4, 6)
    run = next(numbers)
    lab.grant(run, plan, [data], [110])
    assert np.array_equal(lab.fetch(110, program["y"]), data * 2)
    lab.run_over(run, plan)
    assert lab.failed == {}
    (gang,) = [s for s in spans(lab.records, "gang") if s.run == run]
    assert (gang.host, gang.devices, gang.node) == (HOST, (0, 1, 2, 3), "double")
    assert gang.line == "cell.py:3: y = f(x)"
    assert gang.start < gang.end
    (launched,) = [r for r in lab.records if isinstance(r, Event) and r.run == run]
    assert launched.kind == "launched"
    assert tuple(launched.args["devices"]) == (0, 1, 2, 3)
    assert launched.time <= gang.start + 1e-3


def test_every_gang_runs_in_the_device_process(lab: Lab) -> None:
    """By process id: what the host said in its hello is the process that we started."""
    assert lab.hellos[HOST]["pid"] == lab.children[HOST].pid != os.getpid()
    assert lab.hellos[HOST]["emulated"] is True
    on = row(lab, 0)
    whole = layout(on, None)

    def pid(x: Any) -> Any:
        return (jax.pure_callback(lambda v: np.int32([os.getpid()]), x, x),)

    made = code(pid, on, [(((1,), "int32"), whole)], [(((1,), "int32"), whole)], kind="callbacks")
    lab.prepare(made)
    program = Program("pid").value("x", on.slice, (1,), "int32", whole).call(made, ["x"], ["y"])
    plan = lab.program(program.plan(["x"], ["y"]))
    lab.grant(next(numbers), plan, [np.zeros(1, np.int32)], [120])
    assert lab.fetch(120, program["y"]).tolist() == [lab.children[HOST].pid]


# --- devices behave like devices --------------------------------------------------------------


@pytest.mark.skipif(emulated_module.compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        ([(0,), (1,), (2,), (3,)], 1),
        ([(0,), (0,)], 2),
        ([(0, 1), (2, 3)], 1),
        ([(0, 1, 2, 3)] * 2, 2),
        ([(0, 1), (1, 2)], 2),  # overlapping lanes are chained
        ([(0, 1, 2, 3), (3,)], 2),
        ([(0, 1), (1, 2), (2, 3)], 3),
        ([(0,), (1, 2, 3)], 1),
        ([(0, 1), (2,), (3,)], 1),
    ],
)
def test_devices_behave_like_devices(
    lab: Lab, slices: list[tuple[int, ...]], expected: int
) -> None:
    """50 ms gangs on disjoint devices take about 50 ms together, on shared ones their sum.

    Once is enough: what else runs on the machine delays gangs, and lets none overlap.
    """
    program = Program(f"sleep {next(numbers)}")
    known: dict[tuple[int, ...], Any] = {}
    for number, devices in enumerate(slices):
        if devices not in known:
            on = row(lab, *devices)
            cut = layout(on, "a")
            kind = ((len(devices),), "float32")

            def sleep(n: int = len(devices)) -> Any:
                return (emulated(50)(jnp.zeros((n,))),)

            known[devices] = code(sleep, on, [], [(kind, cut)], name="sleep")
            lab.prepare(known[devices])
        program.call(known[devices], [], [f"x{number}"])
    plan = lab.program(program.plan([], []))
    for _ in range(20):
        run = next(numbers)
        lab.grant(run, plan)
        lab.run_over(run, plan)
        bars = [s for s in spans(lab.records, "gang") if s.run == run]
        assert all(s.end - s.start > 0.045 for s in bars)
        for a, b in itertools.combinations(bars, 2):
            if set(a.devices) & set(b.devices):
                assert a.end <= b.start or b.end <= a.start, "one device, two gangs at once"
        took = 1e3 * (max(s.end for s in bars) - min(s.start for s in bars))
        assert took > 50 * expected - 5
        if took < 50 * expected + 25:
            break
    else:
        pytest.fail(f"{took:.0f} ms, and never less than {50 * expected + 25}")


# --- what user code does ----------------------------------------------------------------------


def test_prints_come_with_host_run_and_device(lab: Lab) -> None:
    on = row(lab, 2, 3)
    cut = layout(on, "a")

    def f(x: Any) -> Any:
        jax.debug.print("sum {s}", s=x.sum())
        return (x,)

    kind = ((2,), "int32")
    made = code(f, on, [(kind, cut)], [(kind, cut)], kind="callbacks")
    lab.prepare(made)
    program = Program("prints").value("x", on.slice, *kind, cut)
    program.call(made, ["x"], ["y"]).call(made, ["y"], ["z"])
    plan = lab.program(program.plan(["x"], []))
    runs = [next(numbers), next(numbers)]
    for run in runs:
        lab.grant(run, plan, [np.int32([run, 1])])
        lab.run_over(run, plan)
    wanted = [(HOST, run, 2, f"sum {run + 1}\n") for run in runs for _ in range(2)]
    lab.wait(lambda: [o for o in lab.output if o[1] in runs] == wanted)


def test_an_error_in_a_callback_names_line_and_device_and_poisons_what_follows(lab: Lab) -> None:
    on = row(lab, 1, 2)
    cut = layout(on, "a")

    def f(x: Any) -> Any:
        def check(v: Any) -> Any:
            raise ValueError("bad luck")

        return (jax.pure_callback(check, x, x),)

    kind = ((2,), "float32")
    bad = code(f, on, [(kind, cut)], [(kind, cut)], kind="callbacks", name="check")
    good = code(lambda x: (x + x.sum(),), on, [(kind, cut)], [(kind, cut)], name="good")
    lab.prepare(bad), lab.prepare(good)
    program = Program("errors").value("x", on.slice, *kind, cut)
    program.call(bad, ["x"], ["y"]).call(good, ["y"], ["z"]).call(good, ["x"], ["w"])
    plan = lab.program(program.plan(["x"], ["z", "w"]))
    run = next(numbers)
    lab.grant(run, plan, [np.float32([1, 2])], [210, 211])
    assert lab.fetch(211, program["w"]).tolist() == [4, 5]
    with pytest.raises(FetchFailed, match="check failed: ValueError: bad luck") as caught:
        lab.fetch(210, program["z"])
    failure = caught.value.failure
    assert (failure.kind, failure.node, failure.program) == ("execute", "check", "errors")
    assert (failure.host, failure.device) == (HOST, "1")
    assert failure.line.text == "y = f(x)"
    assert "in check" in failure.details
    lab.run_over(run, plan)
    failed = {step: f.message for (_, r, step), f in lab.failed.items() if r == run}
    assert set(failed) == {0, 1}
    assert failed[0] == failed[1]


def test_a_function_that_cannot_be_compiled_is_reported(lab: Lab) -> None:
    on = row(lab, 0)

    kind = (((1,), "float32"), layout(on, None))
    made = broken(code(lambda x: (x,), on, [kind], [kind]), "not on this host")
    lab.prepare(made)
    _, failure = lab.compiled[HOST, made.function, on.slice]
    assert failure is not None
    assert failure.kind == "compile"
    assert "not on this host" in failure.message
    assert failure.line.number == 3


@pytest.mark.parametrize("what", ["shape", "size", "device"])
def test_a_wrong_upload_hurts_only_itself(lab: Lab, what: str) -> None:
    from tests.runtime.fake_control import Data

    on = row(lab, 0, 1)
    client = Data(lab, HOST)
    fields = upload_fields(300 + next(numbers), on.slice, [4], "float32", layout(on, "a"))
    fields["devices"] = [0, 5] if what == "device" else [0, 1]
    if what == "shape":
        fields["shape"] = [2, 2]
    size = 12 if what == "size" else 8
    client.link.send("put", fields, [bytes(size), bytes(size)])
    if what == "size":
        # Its bytes are what is wrong: whoever uses the buffer is told.
        with pytest.raises(FetchFailed, match="12 bytes for a shard"):
            client.fetch(fields["buffer"], [0])
    else:
        assert client.closed.wait(60)


# --- many runs ----------------------------------------------------------------------------------


def test_a_thousand_runs_leave_memory_where_it_was(lab: Lab) -> None:
    on = row(lab, 0, 1, 2, 3)
    cut = layout(on, "a", None)
    kind = ((64, 1024), "float32")
    step = code(lambda p, x: (p + x.sum(), p * x), on, [(kind, cut)] * 2, [(kind, cut)] * 2,
                donated=(0,))  # fmt: skip
    lab.prepare(step)
    program = Program("thousand").value("p", on.slice, *kind, cut).value("x", on.slice, *kind, cut)
    program.call(step, ["p", "x"], ["q", "y"])
    plan = lab.program(program.plan(["p", "x"], ["q", "y"]))
    lab.put(50_000, program["p"], np.zeros(kind[0], np.float32))
    data = np.ones(kind[0], np.float32)
    process = psutil.Process(lab.children[HOST].pid)
    compiled = len(lab.compiled)
    sizes, params = [], 50_000
    for number in range(1, 1001):
        run = next(numbers)
        outputs = (100_000 + 2 * number, 100_001 + 2 * number)
        lab.grant(run, plan, [params, data], outputs)
        if number % 20 == 0:
            lab.run_over(run, plan)
        lab.broadcast("free", buffers=[params, outputs[1]])
        params = outputs[0]
        if number in (100, 1000):
            lab.run_over(run, plan)
            sizes.append(process.memory_info().rss)
    lab.broadcast("free", buffers=[params])
    assert len(lab.compiled) == compiled
    assert sizes[1] - sizes[0] < 16 << 20, f"grew by {(sizes[1] - sizes[0]) >> 10} KiB"

    def drained() -> bool:
        last: dict[int, float] = {}
        for record in lab.records:
            if isinstance(record, Sample) and record.name == "memory":
                last[record.args["device"]] = record.value
        return bool(last) and not any(last.values())

    # Buffers of other tests live elsewhere: free them too before looking.
    lab.broadcast("free", buffers=list(range(1, 1000)))
    lab.wait(drained)


def test_windows_of_one_run_and_a_run_that_uses_its_result(lab: Lab) -> None:
    on = row(lab, 0, 1)
    cut = layout(on, "a")
    kind = ((2,), "float32")
    add = code(lambda x: (x + 1,), on, [(kind, cut)], [(kind, cut)], name="add")
    lab.prepare(add)
    program = Program("windows").value("x", on.slice, *kind, cut)
    program.call(add, ["x"], ["y"]).call(add, ["y"], ["z"])
    plan = lab.program(program.plan(["x"], ["z"]))
    first, second = next(numbers), next(numbers)
    zeros = np.zeros(2, np.float32)
    lab.grant(first, plan, [zeros], [60_001], last=1)
    lab.grant(first, plan, [None], [60_001], first=1)
    lab.grant(second, plan, [60_001], [60_002])
    assert lab.fetch(60_002, program["z"]).tolist() == [4, 4]
    lab.run_over(first, plan)
    lab.run_over(second, plan)


# --- ends -----------------------------------------------------------------------------------


def test_a_gap_in_the_grants_ends_the_process_with_its_reason() -> None:
    """Better a lost host, whose runs fail, than launches in an order that nobody knows."""
    lab = Lab()
    try:
        on = row(lab, 0)
        made = code(lambda: (jnp.zeros(2),), on, [], [(((2,), "float32"), layout(on, None))])
        lab.prepare(made)
        plan = lab.program(Program("gap").call(made, [], ["x"]).plan([], []))
        lab.grant(1, plan)
        lab.run_over(1, plan)
        lab.previous[HOST] = 5
        lab.grant(2, plan)
        lab.wait(lambda: HOST in lab.closed)
        assert "the last one it saw is 0" in lab.reasons[HOST]
        until(lambda: not lab.children[HOST].alive)
        assert lab.children[HOST].exit_code == 70
    finally:
        lab.close()


def test_the_process_ends_with_its_parent() -> None:
    lab = Lab()
    try:
        lab.children[HOST].let_go()
        until(lambda: not lab.children[HOST].alive)
    finally:
        lab.close()


def test_flags_that_xla_does_not_know_end_a_host_before_anybody_waits_for_it(
    tmp_path: Path,
) -> None:
    """At the first use of a device it would be a host that cannot be reached."""
    code = (
        "from pathways_lab.runtime.host import process as host;"
        " host.set_environment('cpu', 1);"
        f" made = {{'name': 'i0/h0', 'private': {str(tmp_path)!r}, 'platform': 'cpu', 'devices': 1,"
        f" 'memory': 1 << 20, 'data_listen': 'unix:{tmp_path}/data'}};"
        " host.find_runtime(made, None); print('went on')"
    )
    for flags, said in (("", "went on"), ("--no_flag=1", "Unknown flag in XLA_FLAGS: --no_flag=1")):
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "XLA_FLAGS": flags},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert said in done.stdout + done.stderr
        assert (done.returncode == 0) == (not flags)
