"""Devices behave like devices: FIFO each, disjoint ones in parallel."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.notebook.panels import utilisation
from pathways_lab.notebook.scene.scene import Scene
from pathways_lab.timeline.log import within
from pathways_lab.timeline.records import Span
from tests.acceptance.reading import gangs

pytestmark = pytest.mark.cluster

MS = 50.0
ROUNDS = 20


def makespan(gangs: Sequence[Span]) -> float:
    """From the first start to the last end, in milliseconds."""
    return 1e3 * (max(g.end for g in gangs) - min(g.start for g in gangs))


def holders(lab: pw.Lab, shapes: Sequence[int], shared: bool, least: float, most: float) -> None:
    """Run one 50 ms gang on each of two slices at once: never in less than *least* ms.

    Once in at most *most*: what else runs on the machine delays gangs, and lets none overlap.
    """
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

    @pw.program
    def both(v: np.ndarray) -> list[pw.Handle]:
        return [f(v) for f in functions]

    for _ in range(ROUNDS):
        before = len(gangs(lab))
        jax.block_until_ready(both(v))
        found = makespan([g for g in gangs(lab)[before:] if g.program == "both"])
        assert found >= 0.99 * least
        if found <= most:
            break
    else:
        pytest.fail(f"{found:.0f} ms, and {ROUNDS} times more than {most:.0f}")
    for s in slices:
        s.release()


@pytest.mark.parametrize("shapes", [(1, 1), (2, 2), (1, 2)], ids=str)
def test_disjoint_devices_run_in_parallel(lab: pw.Lab, shapes: tuple[int, int]) -> None:
    holders(lab, shapes, False, MS, 1.4 * MS)


@pytest.mark.parametrize("shapes", [(1,), (2,), (4,)], ids=str)
def test_the_same_devices_run_one_after_the_other(lab: pw.Lab, shapes: tuple[int]) -> None:
    holders(lab, shapes, True, 2 * MS, 2.6 * MS)


SHARE, PERIOD, TIMES = 0.3, 0.8, 2


def read_share(lab: pw.Lab, hold: Callable[..., pw.Handle]) -> tuple[list[float], float, float]:
    """Hold all devices for three tenths of the time; what queries say of each, the figure
    of their island, and what all computations together took of it."""
    v = np.arange(8, dtype=np.float32)
    known = len(gangs(lab))
    begun = lab.timeline.clock()
    for n in range(TIMES):
        time.sleep(max(0.0, begun + n * PERIOD - lab.timeline.clock()))
        jax.block_until_ready(hold(v))
    ran = gangs(lab)[known:]
    start = ran[0].start
    end = start + TIMES * PERIOD
    shares = lab.timeline.utilisation(start, end)
    scene = Scene(start, end - start, final=True)
    scene.add([r for r in lab.timeline.records if within(r, start, end)], end)
    row = scene.machine.islands.index(ran[0].island)
    drawn = utilisation.plot(scene, end).readouts[float(row)]
    return (
        [share for lane, share in shares.items() if lane.island == ran[0].island],
        float(drawn.removesuffix("%")) / 100,
        sum(max(0.0, min(g.end, end) - g.start) for g in ran) / (TIMES * PERIOD),
    )


def test_devices_that_work_three_tenths_of_the_time_read_so(lab: pw.Lab) -> None:
    place = lab.slice((4,), axes=("x",), island=lab.islands[1].name)
    hold = pw.jit(pw.emulated(1e3 * SHARE * PERIOD), on=place, in_shardings=P("x"),
                  out_shardings=P("x"))  # fmt: skip
    jax.block_until_ready(hold(np.arange(8, dtype=np.float32)))
    devices, drawn, took = read_share(lab, hold)
    assert took >= 0.99 * SHARE, "a busy machine makes it more"
    assert devices == pytest.approx([took] * 4)
    assert drawn == pytest.approx(took, abs=0.006)  # it is rounded to a hundredth
    place.release()
