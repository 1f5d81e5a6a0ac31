"""The order switched off on a leased island: a real deadlock, a real wrong answer, recovery."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import psutil
import pytest
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.client.lab.lab import Lab
from pathways_lab.timeline.records import Event
from tests.runtime.processes import until

pytestmark = pytest.mark.cluster

SECONDS = 60.0
X = np.arange(16, dtype=np.float32).reshape(4, 4)
HOSTS = ("island0/host0", "island0/host1")


@pytest.fixture(scope="module")
def lab() -> Iterator[pw.Lab]:
    with pw.start(islands=2, hosts_per_island=2, devices_per_host=2, progress=False) as started:
        yield started


def sum_over(on: pw.Slice, *axes: str) -> Any:
    """A (4, 4) array's blocks summed over mesh axes."""
    out = P(*(None if axis in axes else axis for axis in ("h", "d")))
    summed = jax.shard_map(
        lambda block: jax.lax.psum(block, axes), mesh=on.mesh, in_specs=P("h", "d"), out_specs=out
    )
    return pw.jit(summed, on=on, in_shardings=P("h", "d"), out_shardings=out, name="_".join(axes))


def programs(on: pw.Slice) -> tuple[Any, Any]:
    """Two programs with collectives over the same devices, in different groups."""
    everything, columns = sum_over(on, "h", "d"), sum_over(on, "h")

    @pw.program
    def total(x: Any) -> Any:
        return everything(x)

    @pw.program
    def rows(x: Any) -> Any:
        return columns(x)

    return total, rows


def threads(lab: pw.Lab, island: str) -> int:
    hosts = next(i for i in lab.islands if i.name == island).hosts
    return sum(psutil.Process(host.pid).num_threads() for host in hosts)


def deadlocks(lab: pw.Lab) -> int:
    return sum(isinstance(r, Event) and r.kind == "deadlock" for r in lab.timeline.records)


def test_a_real_deadlock_a_wrong_answer_and_recovery(lab: pw.Lab) -> None:
    with Lab(lab._control, name="other") as other:
        theirs = other.slice((2, 2), axes=("h", "d"), island="island1")
        busy = sum_over(theirs, "h", "d")
        expected = busy(X).result(timeout=SECONDS)
        pids = {h.name: h.pid for island in lab.islands for h in island.hosts}
        with lab.lease("island0", order=False, patience=2.0) as lease:
            on = lab.slice((2, 2), axes=("h", "d"), island="island0")
            total, rows = programs(on)
            x = pw.device_put(X, on.sharding(P("h", "d")))
            right = [f(x).result(timeout=SECONDS) for f in (total, rows)]
            np.testing.assert_array_equal(right[0], expected)

            # Two collectives of one group: they end, and mix each other's numbers.
            mixed = lease.race(lambda: total(x), lambda: total(X * 10))
            wrong = [h.result(timeout=SECONDS) for h in mixed]
            assert not np.array_equal(wrong[0], right[0])
            assert not np.array_equal(wrong[1], right[0] * 10)
            # In one order on both hosts the same two are right.
            same = lease.race(lambda: total(x), lambda: total(X * 10), orders=("ba", "ba"))
            np.testing.assert_array_equal(same[0].result(timeout=SECONDS), right[0])
            np.testing.assert_array_equal(same[1].result(timeout=SECONDS), right[0] * 10)

            # Two groups: each host is in one collective, and waits for the other host.
            hung = lease.race(lambda: total(x), lambda: rows(x))
            later = total(x)  # behind them, on the same devices
            beside = []  # whether they hung when the other client had its result
            while not hung[0].is_ready():
                np.testing.assert_array_equal(busy(X).result(timeout=SECONDS), expected)
                beside.append(all(not h.is_ready() for h in hung))
            assert any(beside), "the other client's work on the other island stood still"
            for handle in hung:
                with pytest.raises(pw.PathwaysError) as caught:
                    handle.result(timeout=SECONDS)
                check_cycle(caught.value)
            with pytest.raises(pw.PathwaysError, match="for ever"):
                later.result(timeout=SECONDS)
            # The same slice, the same array, the same hosts; right again.
            for f, value in zip((total, rows), right, strict=True):
                np.testing.assert_array_equal(f(x).result(timeout=SECONDS), value)
            until(lambda: deadlocks(lab) > 0)
            assert deadlocks(lab) == 1
            assert {h.name: h.pid for island in lab.islands for h in island.hosts} == pids
        # With the order on, both at once, many times.
        found = [(total(X + n), rows(X - n)) for n in range(20)]
        for n, (a, b) in enumerate(found):
            np.testing.assert_array_equal(a.result(timeout=SECONDS), right[0] + 4.0 * n)
            np.testing.assert_array_equal(b.result(timeout=SECONDS), right[1] - 2.0 * n)
        on.release()


def test_clients_of_the_runtime_that_ended_keep_no_threads(lab: pw.Lab) -> None:
    """But for the last few: what was compiled for them is forgotten a little later.

    How many are few depends on the moments in which JAX forgets: more rounds tell it from all.
    """
    each = 45
    until_free(lab, "island0")
    with lab.lease("island0", order=False, patience=1.0) as lease:
        on = lab.slice((2, 2), axes=("h", "d"), island="island0")
        total, rows = programs(on)
        x = pw.device_put(X, on.sharding(P("h", "d")))
        for f in (total, rows):
            f(x).result(timeout=SECONDS)
        before = threads(lab, "island0")
        for rounds in range(1, 21):
            hung = lease.race(lambda: total(x), lambda: rows(x))
            for handle in hung:
                with pytest.raises(pw.PathwaysError, match="for ever"):
                    handle.result(timeout=SECONDS)
            kept = threads(lab, "island0") - before
            if rounds >= 6 and kept < rounds * each * 0.7:
                break
        else:
            pytest.fail(f"{rounds} clients of the runtime ended, {kept} threads are left")
        on.release()


def check_cycle(error: pw.PathwaysError) -> None:
    """The error tells who waits in which gang for whom, and where that is written."""
    text, story = str(error), error.failure.story
    assert error.failure.kind == "deadlock"
    assert story is not None
    assert {gang.node for gang in story.gangs} == {"h_d", "h"}
    assert {gang.program for gang in story.gangs} == {"total", "rows"}
    inside = {gang.node: gang.inside for gang in story.gangs}
    assert inside == {"h_d": (HOSTS[0],), "h": (HOSTS[1],)}
    assert f"'h_d' waits for {HOSTS[1]}, which is in 'h'" in text
    assert f"'h' waits for {HOSTS[0]}, which is in 'h_d'" in text
    assert "return everything(x)" in text
    assert "return columns(x)" in text
    assert "pw.possible_deadlock" in text


def test_what_a_race_needs(lab: pw.Lab) -> None:
    with lab.lease("island0") as lease, pytest.raises(pw.PathwaysError, match="order=False"):
        lease.race(lambda: None)
    with lab.lease("island0", order=False) as lease:
        on = lab.slice((2, 2), axes=("h", "d"), island="island0")
        total, rows = programs(on)
        for orders in (("ab",), ("ab", "aa"), {"island0/host7": "ab"}):
            with pytest.raises(pw.PathwaysError, match="in which order"):
                lease.race(lambda: total(X), lambda: rows(X), orders=orders)
        made: list[Any] = []

        def one() -> Any:
            made.append(total(X))
            return made[-1]

        with pytest.raises(pw.PathwaysError, match="know nothing of each other"):
            lease.race(one, lambda: rows(made[-1]), rehearse=False)
        # What was submitted before that is not held back for ever.
        made[-1].block_until_ready()
        on.release()
    with pytest.raises(pw.PathwaysError, match="returned"):
        lease.race(lambda: None)


def test_no_deadlock_outlives_its_lease(lab: pw.Lab) -> None:
    """The block is left while hosts hang."""
    lease = lab.lease("island0", order=False, patience=1000.0)
    on = lab.slice((2, 2), axes=("h", "d"), island="island0")
    total, rows = programs(on)
    right = total(X).result(timeout=SECONDS)
    hung = lease.race(lambda: total(X), lambda: rows(X))
    time.sleep(0.5)
    assert not hung[0].is_ready()
    lease.release()
    for handle in hung:
        with pytest.raises(pw.PathwaysError, match="the lease of island0 ended"):
            handle.result(timeout=SECONDS)
    np.testing.assert_array_equal(total(X).result(timeout=SECONDS), right)
    on.release()


def test_no_deadlock_outlives_its_client(lab: pw.Lab) -> None:
    """It leaves while hosts hang."""
    with Lab(lab._control, name="passing") as passing:
        until_free(passing, "island0")
        theirs = passing.slice((2, 2), axes=("h", "d"), island="island0")
        total, rows = programs(theirs)
        lease = passing.lease("island0", order=False, patience=1000.0)
        hung = lease.race(lambda: total(X), lambda: rows(X))
        time.sleep(0.5)
        assert not hung[0].is_ready()
    on = lab.slice((2, 2), axes=("h", "d"), island="island0")
    right = X.reshape(2, 2, 2, 2).sum(axis=(0, 2))
    np.testing.assert_array_equal(programs(on)[0](X).result(timeout=SECONDS), right)
    on.release()


def until_free(lab: Lab, island: str) -> None:
    """Until nobody else has anything on an island."""
    deadline = time.monotonic() + SECONDS
    while True:
        gc.collect()  # errors that were caught keep the handles of their frames
        try:
            lab.lease(island).release()
        except pw.PathwaysError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        else:
            return
