"""Devices behave like devices: FIFO each, disjoint ones in parallel."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.timeline.records import Span
from tests.acceptance.reading import gangs

pytestmark = pytest.mark.cluster

MS = 50.0


def makespan(gangs: Sequence[Span]) -> float:
    """From the first start to the last end, in milliseconds."""
    return 1e3 * (max(g.end for g in gangs) - min(g.start for g in gangs))


def holders(lab: pw.Lab, shapes: Sequence[int], shared: bool) -> float:
    """Run one 50 ms gang on each of two slices at once; the makespan in ms."""
    island = lab.islands[0].name
    slices = []
    for size in shapes:
        slices.append(lab.slice((size,), axes=("x",), island=island))
    functions = [
        pw.jit(pw.emulated(MS), on=s, in_shardings=P("x"), out_shardings=P("x")) for s in slices
    ]
    if shared:
        functions = [functions[0], functions[0]]
    v = np.arange(8, dtype=np.float32)
    jax.block_until_ready([f(v) for f in functions])
    before = len(gangs(lab))

    @pw.program
    def both(v: np.ndarray) -> list[pw.Handle]:
        return [f(v) for f in functions]

    jax.block_until_ready(both(v))
    ran = gangs(lab)[before:]
    for s in slices:
        s.release()
    return makespan([g for g in ran if g.program == "both"])


@pytest.mark.parametrize("shapes", [(1, 1), (2, 2), (1, 2)], ids=str)
def test_disjoint_devices_run_in_parallel(lab: pw.Lab, shapes: tuple[int, int]) -> None:
    assert holders(lab, shapes, shared=False) == pytest.approx(MS, rel=0.4)


@pytest.mark.parametrize("shapes", [(1,), (2,), (4,)], ids=str)
def test_the_same_devices_run_one_after_the_other(lab: pw.Lab, shapes: tuple[int]) -> None:
    assert holders(lab, shapes, shared=True) == pytest.approx(2 * MS, rel=0.3)
