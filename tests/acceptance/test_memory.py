"""Memory too small for what is asked: runs queue, limits hold, the impossible is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.timeline.records import Sample

pytestmark = pytest.mark.cluster

MIB = 1 << 20
LIMIT = 24 * MIB
SECONDS = 60.0


@pytest.fixture(scope="module")
def lab() -> Iterator[pw.Lab]:
    with pw.start(2, 1, 2, memory=LIMIT, platform="cpu", progress=False) as started:
        yield started


def most(lab: pw.Lab) -> int:
    """The most bytes that any device ever held, by the hosts' own accounts."""
    samples = [r for r in lab.timeline.records if isinstance(r, Sample) and r.name == "memory"]
    return max(int(sample.args["most"]) for sample in samples)


def test_runs_that_do_not_fit_together_queue_and_none_fails(lab: pw.Lab) -> None:
    """Forty runs over two islands at once, each with a peak of about half of the memory."""
    left, right = (lab.slice((2,), axes=("x",), island=i.name) for i in lab.islands)
    spec: Any = {"in_shardings": P("x"), "out_shardings": P("x")}
    grow = pw.jit(lambda v: v + 1, on=left, **spec)
    turn = pw.jit(lambda v: v * 2, on=right, **spec)
    small = pw.jit(lambda v: v[:2], on=right, **spec)

    @pw.program
    def work(v: Any) -> Any:
        return small(turn(grow(grow(grow(v)))))

    size = 2 * MIB  # 4 MiB on each of two devices
    source = grow(np.zeros(size, np.float32))
    handles = [work(source) for _ in range(40)]
    for handle in handles:
        np.testing.assert_array_equal(handle.result(timeout=SECONDS), [8.0, 8.0])
    assert LIMIT // 2 < most(lab) <= LIMIT
    for n in range(4):
        result = grow(pw.device_put(np.full(size, float(n), np.float32), left))
        assert float(result.result(timeout=SECONDS)[0]) == n + 1
    assert most(lab) <= LIMIT


def test_a_loop_of_large_arguments_waits_for_room(lab: pw.Lab) -> None:
    """Each argument takes a quarter of the memory, and its run two more."""
    on = lab.slice(2, island="island0")
    double = pw.jit(lambda v: pw.emulated(5)(2 * v), on=on)
    last = pw.jit(lambda v: v[-1:], on=on)
    found = [last(double(np.full(3 * MIB // 2, n, np.float32))) for n in range(20)]
    assert [float(handle.result(timeout=SECONDS)[0]) for handle in found] == [*range(0, 40, 2)]
    assert most(lab) <= LIMIT


def test_what_can_never_fit_is_refused_with_the_numbers(lab: pw.Lab) -> None:
    on = lab.slice((2,), axes=("x",), island="island0")
    wide = pw.jit(
        lambda v: (v[:, None] + np.ones(64, np.float32)).reshape(-1),
        on=on,
        in_shardings=P("x"),
        out_shardings=P("x"),
    )
    handle = wide(np.zeros(MIB // 4, np.float32))  # 32 MiB on each device
    with pytest.raises(pw.PathwaysError) as refused:
        handle.result(timeout=SECONDS)
    assert f"{LIMIT:,}" in str(refused.value)
    ok = pw.jit(lambda v: v + 1, on=on, in_shardings=P("x"), out_shardings=P("x"))
    np.testing.assert_array_equal(ok(np.zeros(2, np.float32)).result(timeout=SECONDS), [1.0, 1.0])
