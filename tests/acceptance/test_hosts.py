"""What happens to one host happens to its lanes only; memory stays where it was."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
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


def test_a_host_that_starts_again_reads_what_it_had_compiled() -> None:
    def long(add: int) -> Callable[[jax.Array], jax.Array]:
        def body(v: jax.Array) -> jax.Array:
            for _ in range(60):
                v = jnp.sort(jnp.tanh(v @ v), 0)
            return v * 0 + add

        return body

    v = np.zeros((64, 64), np.float32)
    with pw.start(1, 1, 1, progress=False) as lab:
        on = lab.slice(1)
        one, two = (pw.jit(long(n), on=on, name=f"add{n}") for n in (1, 2))
        assert lab.embedded is not None
        folder = lab.embedded.folder / "compiled-island0-host0"
        assert one(v).result(timeout=60)[0, 0] == 1
        (first,) = folder.glob("*-cache")
        assert two(v).result(timeout=60)[0, 0] == 2
        (second,) = set(folder.glob("*-cache")) - {first}
        # The code of each in the place of the other's tells where code comes from.
        first.write_bytes(second.read_bytes())
        with lab.chaos.kill("island0/host0"):
            pass
        on.rebind()
        assert one(v).result(timeout=60)[0, 0] == 2
        assert second.exists()
    assert not folder.exists()
