"""Islands of several hosts: slices that span them, and what a lost host takes along."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import psutil
import pytest
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from tests.acceptance import competing
from tests.runtime.processes import children, stop

pytestmark = pytest.mark.cluster

SECONDS = 60.0


@pytest.fixture(scope="module")
def lab() -> Iterator[pw.Lab]:
    with pw.start(islands=2, hosts_per_island=2, devices_per_host=2) as started:
        yield started


def whole(lab: pw.Lab, island: str = "island0") -> pw.Slice:
    """All four devices of an island: rows are hosts."""
    on = lab.slice((2, 2), axes=("h", "d"), island=island)
    assert set(on.hosts) == {f"{island}/host0", f"{island}/host1"}
    return on


def sum_over(on: pw.Slice, *axes: str) -> Any:
    """A compiled function: a (4, 4) array's blocks summed over mesh axes."""
    out = P(*(None if axis in axes else axis for axis in ("h", "d")))

    def body(block: jax.Array) -> Any:
        return jax.lax.psum(block, axes)

    summed = jax.shard_map(body, mesh=on.mesh, in_specs=P("h", "d"), out_specs=out)
    return pw.jit(summed, on=on, in_shardings=P("h", "d"), out_shardings=out)


def expected(v: np.ndarray[Any, Any], *axes: str) -> Any:
    """The same with NumPy."""
    blocks = v.reshape(2, 2, 2, 2)  # host, row, device, column
    kept = blocks.sum(axis=tuple({"h": 0, "d": 2}[a] for a in axes), keepdims=True)
    return kept.reshape(kept.shape[0] * 2, kept.shape[2] * 2)


V = np.arange(16, dtype=np.float32).reshape(4, 4)


def test_a_sum_over_all_devices_of_two_hosts(lab: pw.Lab) -> None:
    on = whole(lab)
    total = sum_over(on, "h", "d")
    np.testing.assert_array_equal(total(V).result(timeout=SECONDS), expected(V, "h", "d"))
    on.release()


def test_a_slice_on_a_part_of_the_island(lab: pw.Lab) -> None:
    """Both devices of one host and one of the other, beside a slice that has all four."""
    wide = whole(lab)
    total = sum_over(wide, "h", "d")
    part = lab.slice((3,), axes=("x",), island="island0")
    assert len(set(part.hosts)) == 2
    share = pw.jit(lambda v: v / v.sum(), on=part, in_shardings=P("x"), out_shardings=P("x"))
    w = np.arange(6, dtype=np.float32)
    for _ in range(5):
        one, other = share(w), total(V)
        np.testing.assert_allclose(one.result(timeout=SECONDS), w / 15.0, rtol=1e-6)
        np.testing.assert_array_equal(other.result(timeout=SECONDS), expected(V, "h", "d"))
    part.release()
    wide.release()


def test_arrays_go_from_one_spanning_slice_to_another(lab: pw.Lab) -> None:
    """Another island, another mesh, another cut."""
    near = whole(lab, "island0")
    far = lab.slice((4,), axes=("x",), island="island1")
    assert len(set(far.hosts)) == 2
    keep = pw.jit(lambda v: v + 0, on=near, in_shardings=P("h", "d"), out_shardings=P("h", "d"))
    cut = pw.jit(lambda v: v * 2, on=far, in_shardings=P(None, "x"), out_shardings=P("x"))

    @pw.program
    def across(v: Any) -> Any:
        return cut(keep(v))

    rng = np.random.default_rng(3)
    for _ in range(3):
        v = rng.standard_normal((8, 12)).astype(np.float32)
        np.testing.assert_array_equal(across(v).result(timeout=SECONDS), v * 2)
        np.testing.assert_array_equal(cut(keep(v)).result(timeout=SECONDS), v * 2)
    near.release()
    far.release()


def test_competing_collectives_of_two_programs(lab: pw.Lab) -> None:
    """In turns over the same devices, all in flight at once: every one is right."""
    on, also = whole(lab), whole(lab)
    everything, rows = sum_over(on, "h", "d"), sum_over(also, "h")

    @pw.program
    def first(v: Any) -> Any:
        return everything(v)

    @pw.program
    def second(v: Any) -> Any:
        return rows(v)

    found = [(n, first(V + n), second(V - n)) for n in range(50)]
    for n, a, b in found:
        np.testing.assert_array_equal(a.result(timeout=SECONDS), expected(V + n, "h", "d"))
        np.testing.assert_array_equal(b.result(timeout=SECONDS), expected(V - n, "h"))
    on.release()
    also.release()


def test_two_threads_and_two_processes_compete(lab: pw.Lab) -> None:
    """While the policy changes; ``python -m tests.acceptance.competing`` takes longer."""
    found = competing.run(20, lab=lab)
    assert found["right"] == found["wanted"] == 80
    lab.policy = pw.ProportionalShare()


def coordination(lab: pw.Lab) -> list[psutil.Process]:
    """The lab's processes that introduce hosts to each other."""
    assert lab.embedded is not None
    return children(
        lab.embedded.pids["control"][0], "pathways_lab.runtime.islands.coordination_service"
    )


def test_the_process_that_introduces_hosts_may_die(lab: pw.Lab) -> None:
    """What computes together goes on, and hosts are introduced again by the next one."""
    on = whole(lab)
    total = sum_over(on, "h", "d")
    np.testing.assert_array_equal(total(V).result(timeout=SECONDS), expected(V, "h", "d"))
    (process,) = coordination(lab)
    process.kill()
    np.testing.assert_array_equal(total(V + 1).result(timeout=SECONDS), expected(V + 1, "h", "d"))
    part = lab.slice((3,), axes=("x",), island="island0")
    double = pw.jit(lambda v: v * 2, on=part, in_shardings=P("x"), out_shardings=P())
    w = np.arange(6, dtype=np.float32)
    np.testing.assert_array_equal(double(w).result(timeout=SECONDS), w * 2)
    (after,) = coordination(lab)
    assert after.pid != process.pid
    np.testing.assert_array_equal(total(V).result(timeout=SECONDS), expected(V, "h", "d"))
    part.release()
    on.release()


def host_pid(lab: pw.Lab, name: str) -> int | None:
    hosts = [host for island in lab.islands for host in island.hosts]
    return next((host.pid for host in hosts if host.name == name), None)


def test_a_killed_device_process(lab: pw.Lab) -> None:
    """Errors name the host, the other island goes on, the next slice over both hosts works."""
    on, other = whole(lab, "island0"), whole(lab, "island1")
    here, there = sum_over(on, "h", "d"), sum_over(other, "h", "d")
    for f in (here, there):
        np.testing.assert_array_equal(f(V).result(timeout=SECONDS), expected(V, "h", "d"))
    victim, survivor = "island0/host1", host_pid(lab, "island0/host0")
    dead = host_pid(lab, victim)
    assert dead is not None
    # Stopped first, so that the collective waits for it on the other host.
    stop(dead)
    waiting = here(V)
    time.sleep(0.3)
    assert not waiting.is_ready()
    os.kill(dead, signal.SIGKILL)
    with pytest.raises(pw.PathwaysError, match=victim):
        waiting.result(timeout=SECONDS)
    with pytest.raises(pw.PathwaysError):
        here(V).result(timeout=SECONDS)
    np.testing.assert_array_equal(there(V).result(timeout=SECONDS), expected(V, "h", "d"))
    until = time.monotonic() + SECONDS
    while host_pid(lab, victim) in (dead, None):
        assert time.monotonic() < until, "the device process was not restarted"
        time.sleep(0.05)
    assert host_pid(lab, "island0/host0") == survivor
    again = whole(lab, "island0")
    total = sum_over(again, "h", "d")
    np.testing.assert_array_equal(total(V).result(timeout=SECONDS), expected(V, "h", "d"))
    np.testing.assert_array_equal(there(V + 1).result(timeout=SECONDS), expected(V + 1, "h", "d"))
