"""What happens to one host happens to its lanes only; memory stays where it was."""

from __future__ import annotations

import os
import signal
import time

import jax
import numpy as np
import psutil
import pytest
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from tests.runtime.processes import stop

pytestmark = pytest.mark.cluster


def host_pids(lab: pw.Lab) -> dict[str, int]:
    """Device process ids by island name (one host an island here)."""
    return {island.name: island.hosts[0].pid for island in lab.islands}


def test_a_stopped_host_stops_only_the_lanes_that_depend_on_it(lab: pw.Lab) -> None:
    slices = {i.name: lab.slice((2,), axes=("x",), island=i.name) for i in lab.islands}
    double = {
        name: pw.jit(lambda v: v * 2, on=s, in_shardings=P("x"), out_shardings=P("x"))
        for name, s in slices.items()
    }
    v = np.arange(4, dtype=np.float32)
    for f in double.values():
        jax.block_until_ready(f(v))
    pid = host_pids(lab)["island0"]
    stop(pid)
    try:
        waiting = double["island0"](v)
        there = [double["island1"](v + i) for i in range(20)]
        for i, handle in enumerate(there):
            np.testing.assert_array_equal(handle.result(timeout=60), (v + i) * 2)
        crossing = double["island1"](waiting)
        assert not waiting.is_ready()
        assert not crossing.is_ready()
    finally:
        os.kill(pid, signal.SIGCONT)
    np.testing.assert_array_equal(waiting.result(timeout=60), v * 2)
    np.testing.assert_array_equal(crossing.result(timeout=60), v * 4)


def test_many_runs_leave_memory_where_it_was(lab: pw.Lab) -> None:
    left, right = (lab.slice((2,), axes=("x",), island=i.name) for i in lab.islands)
    f = pw.jit(lambda v: v + 1, on=left, in_shardings=P("x"), out_shardings=P("x"))
    g = pw.jit(lambda v: v * 2, on=right, in_shardings=P("x"), out_shardings=P("x"))

    @pw.program
    def step(v: np.ndarray) -> pw.Handle:
        return g(f(v))

    v = np.zeros((256, 1024), np.float32)  # a megabyte: a leak of one buffer a run shows

    def work(runs: int) -> None:
        held = jax.block_until_ready(step(v))
        for _ in range(runs):
            held = step(held)
        jax.block_until_ready(held)
        held.delete()

    def resident() -> dict[str, float]:
        time.sleep(0.5)  # drops travel with the next message or a timer
        return {n: psutil.Process(p).memory_info().rss / 2**20 for n, p in host_pids(lab).items()}

    work(100)
    counts = lab.stats()
    before = resident()
    work(500)
    after = resident()
    assert lab.stats().exported == counts.exported
    assert lab.stats().lowered == counts.lowered
    assert lab.stats().compiled == counts.compiled
    for name in before:
        # A leak would be 500 MiB; runs in flight and the allocator keep what they need.
        assert after[name] < before[name] + 250, (before, after)
