"""The path of accelerators of several hosts, with CPU devices that start as they do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.client.lab.lab import Lab
from pathways_lab.runtime.cluster.embedded import start_cluster
from pathways_lab.runtime.cluster.lab_spec import Wishes
from tests.acceptance.collective import SECONDS, V, pids, right, total

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def lab() -> Iterator[pw.Lab]:
    cluster = start_cluster(Wishes(1, 2, 2, platform="cpu"), stand_in=True)
    with Lab(cluster.control, cluster) as made:
        yield made


def test_slices_over_all_hosts_over_a_part_and_on_one(lab: pw.Lab) -> None:
    wide = lab.slice((4,), axes=("x",))
    assert len(set(wide.hosts)) == 2
    near = lab.slice((2,), axes=("x",))
    one, other = total(wide), total(near)

    @pw.program
    def both(v: Any) -> Any:
        return other(one(v))

    for n in range(5):
        right(one(V + n), V + n)
        right(other(V - n), V - n)
        right(both(V + n), np.full_like(V, (V + n).sum()))


def test_a_lost_host_takes_its_island_along_and_all_come_back(lab: pw.Lab) -> None:
    f = total(lab.slice((4,), axes=("x",)))
    right(f(V))
    before = pids(lab)
    os.kill(before["island0/host1"], signal.SIGKILL)
    until = time.monotonic() + SECONDS
    failure = None
    while failure is None and time.monotonic() < until:
        try:
            f(V).result(timeout=SECONDS)
        except pw.PathwaysError as error:
            failure = error
    assert "island0/host1" in str(failure)
    while len(pids(lab)) < 2 or set(pids(lab).values()) & set(before.values()):
        assert time.monotonic() < until, f"the island did not come back: {pids(lab)}"
        time.sleep(0.05)
    right(total(lab.slice((4,), axes=("x",)))(V + 1), V + 1)
