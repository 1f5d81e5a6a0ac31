"""The quickstart's pipeline: right numbers, real overlap, on the cluster's devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.workloads import digits
from tests.acceptance.reading import gangs
from tests.acceptance.training import BATCH, MICROBATCHES, RATE, pipeline
from tests.runtime.processes import until

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("optimised")]

STEPS = 8


def batches() -> list[digits.Batch]:
    data = digits.load(BATCH * STEPS if BATCH * STEPS <= 1536 else 1536)
    count = len(data.images) // BATCH
    return [
        digits.Batch(
            data.images[i * BATCH : (i + 1) * BATCH], data.labels[i * BATCH : (i + 1) * BATCH]
        )
        for i in (step % count for step in range(STEPS))
    ]


def reference(stage1: Any, stage2: Any) -> list[float]:
    step = jax.jit(digits.plain_step, static_argnums=(3, 4))
    losses = []
    for batch in batches():
        stage1, stage2, loss = step(stage1, stage2, batch, RATE, MICROBATCHES)
        losses.append(float(loss))
    return losses


def train(train_step: Any, stage1: Any, stage2: Any) -> list[float]:
    losses = []
    for batch in batches():
        stage1, stage2, loss = train_step(stage1, stage2, batch)
        losses.append(loss)
    return [float(loss) for loss in losses]


def test_sharded_pipeline_follows_plain_jax(lab: pw.Lab) -> None:
    """Losses over four devices a stage agree with one device to float tolerance."""
    step = pipeline(lab.slice((4,), axes=("data",)), lab.slice((4,), axes=("data",)), P("data"))
    losses = train(step, *digits.init())
    assert losses[-1] < losses[0] / 2
    np.testing.assert_allclose(losses, reference(*digits.init()), rtol=2e-3)


def test_pipeline_of_single_devices_follows_plain_jax(lab: pw.Lab) -> None:
    """With one device a stage no reduction is split: only fusion may differ."""
    step = pipeline(lab.slice((1,), axes=("data",)), lab.slice((1,), axes=("data",)), P("data"))
    losses = train(step, *digits.init())
    np.testing.assert_allclose(losses, reference(*digits.init()), rtol=1e-5)


def test_different_functions_overlap_on_the_two_islands(lab: pw.Lab) -> None:
    """MPMD: while one island runs one function, the other runs another."""
    left, right = (lab.slice((4,), axes=("data",), island=f"island{i}") for i in range(2))
    step = pipeline(left, right, P("data"))
    stage1, stage2 = digits.init()

    def overlap() -> bool:
        """Whether two did in three more steps: a busy machine may run one after the other."""
        nonlocal stage1, stage2
        known = len(gangs(lab))
        for batch in batches()[:3]:
            stage1, stage2, loss = step(stage1, stage2, batch)
        jax.block_until_ready((stage1, stage2, loss))
        mine = [g for g in gangs(lab)[known:] if g.program == "train_step"]
        assert {g.island for g in mine} == {"island0", "island1"}
        return any(
            a.island == "island0"
            and b.island == "island1"
            and a.node != b.node
            and min(a.end, b.end) - max(a.start, b.start) > 0.2e-3
            for a in mine
            for b in mine
        )

    until(overlap)


def test_every_gang_ran_in_a_device_process_of_a_worker(lab: pw.Lab) -> None:
    """The kernel computes nothing: gangs name hosts, hosts are children of workers."""
    import os

    import psutil

    step = pipeline(lab.slice((4,), axes=("data",)), lab.slice((4,), axes=("data",)), P("data"))
    jax.block_until_ready(step(*digits.init(), batches()[0]))
    hosts = {host.name: host for island in lab.islands for host in island.hosts}
    ran = gangs(lab)
    assert ran
    for gang in ran:
        host = hosts[gang.host]
        assert host.pid != os.getpid()
        assert psutil.Process(host.pid).ppid() == host.worker_pid
