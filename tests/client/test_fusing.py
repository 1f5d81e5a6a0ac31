"""Fused programs and sequential dispatch: other gangs, or another time, and the same results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.timeline.records import Event, Span
from tests.runtime.processes import until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def lab() -> Iterator[pw.Lab]:
    with pw.start(islands=2, hosts_per_island=1, devices_per_host=2, progress=False) as made:
        yield made


def spans(lab: pw.Lab, program: str, kind: str, start: float) -> int:
    return sum(
        isinstance(r, Span) and (r.program, r.kind) == (program, kind) and r.end > start
        for r in lab.timeline.records
    )


def steps_of(program: Any, *args: Any) -> int:
    return len(program.capture(*args).prepared.plan.steps)


def test_a_fused_chain_is_one_gang_with_the_same_bits(lab: pw.Lab) -> None:
    on = lab.slice(2, axes="x")
    mean = pw.jit(lambda v: v - v.mean(), on=on, in_shardings=P("x"), out_shardings=P("x"))
    turn = pw.jit(lambda v: v[::-1], on=on)

    def work(v: Any) -> Any:
        for _ in range(3):
            v = turn(mean(v))
        return v

    plain, fused = pw.program(work), pw.program(work, fuse=True)
    data = np.linspace(0, 7, 8, dtype=np.float32) ** 2
    assert steps_of(fused, data) == 1
    assert steps_of(plain, data) >= 6
    np.testing.assert_array_equal(fused(data).result(), plain(data).result())
    text = fused.ir()
    assert "6 calls" in text
    assert "--- fused ---" in text


def test_donation_outputs_and_other_slices_are_respected(lab: pw.Lab) -> None:
    a, b = lab.slice(1), lab.slice(1)
    add = pw.jit(lambda x, y: x + y, on=a, donate_argnums=0)
    double = pw.jit(lambda x: x * 2, on=a)
    away = pw.jit(lambda x: x + 100, on=b)

    @pw.program(fuse=True)
    def work(x: Any, y: Any) -> Any:
        s = add(double(x), y)
        t = away(s)
        u = double(t)
        return s, double(u), t

    x, y = (pw.device_put(np.float32(n), a) for n in (3, 4))
    s, u, t = work(x, y)
    assert (float(s), float(u), float(t)) == (10.0, 440.0, 110.0)
    assert not x.is_deleted()
    program = work.last
    assert program is not None
    calls = [n for n in program.prepared.program.nodes if hasattr(n, "function")]  # type: ignore[union-attr]
    assert len(calls) == 3

    @pw.program(fuse=True)
    def consume(x: Any, y: Any) -> Any:
        return double(add(x, y))

    assert float(consume(x, y)) == 14.0
    assert x.is_deleted()
    assert not y.is_deleted()


def test_what_calls_back_into_python_stays_alone(lab: pw.Lab) -> None:
    import jax

    on = lab.slice(1)
    f = pw.jit(lambda x: x + 1, on=on)

    def shout(x: Any) -> Any:
        jax.debug.print("x is {}", x)
        return x * 2

    g = pw.jit(shout, on=on)
    program = pw.program(lambda x: f(g(f(f(x)))), fuse=True)
    assert float(program(np.float32(1))) == 7.0
    assert steps_of(program, np.float32(1)) == 3


def test_sequential_dispatch_does_the_hosts_work_node_by_node(lab: pw.Lab) -> None:
    a, b = (lab.slice(1, island=f"island{n}") for n in range(2))
    f = pw.jit(pw.emulated(20), on=a)
    g = pw.jit(pw.emulated(20), on=b)

    def work(x: Any) -> Any:
        return g(f(g(f(x))))

    x = pw.device_put(np.ones(1, np.float32), a)

    def once(program: Any) -> tuple[list[float], list[float]]:
        """When its parts were prepared, and when they had been computed."""
        with lab.timeline.recording() as run:
            assert float(program(x).result()[0]) == 1.0
        until(lambda: spans(lab, program.name, "gang", run.start) == 4)  # records come behind
        gangs = [r for r in lab.timeline.records if isinstance(r, Span) and r.end > run.start]
        gangs = [g for g in gangs if g.program == program.name]
        granted = [r for r in run.records if isinstance(r, Event) and r.kind == "granted"]
        assert len([g for g in granted if g.program == program.name]) == 4
        prepared = sorted(g.end for g in gangs if g.kind == "prepare")
        return prepared, sorted(g.end for g in gangs if g.kind == "gang")

    def ahead() -> bool:
        prepared, ended = once(parallel)
        return prepared[-1] < ended[0]

    parallel, sequential = (
        pw.program(work, dispatch=name, name=name) for name in ("parallel", "sequential")
    )
    for program in (parallel, sequential):
        program(x).block_until_ready()
    # All of it is prepared before the first computation ends, unless the machine is too busy.
    until(ahead)
    prepared, ended = once(sequential)
    assert prepared[-1] > ended[2]
    assert len(prepared) == 4
    with pytest.raises(pw.PathwaysError, match="dispatch='never'"):
        pw.program(work, dispatch="never")
