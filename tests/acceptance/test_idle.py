"""A lab that nobody uses closes itself, and one that works does not."""

from __future__ import annotations

import time

import numpy as np
import pytest

import pathways_lab as pw
from tests.runtime.processes import gone, until

pytestmark = pytest.mark.cluster


def test_an_idle_lab_closes_itself_and_a_working_one_does_not() -> None:
    x = np.ones(4, np.float32)
    with pw.start(
        islands=1, hosts_per_island=1, devices_per_host=1, progress=False, idle_close=2.0
    ) as lab:
        assert lab.embedded is not None
        pids = [pid for kind in lab.embedded.pids.values() for pid in kind]
        slow = pw.jit(lambda v: pw.emulated(3000)(v + 1), on=lab.slice(1))
        assert slow(x).result(timeout=60)[0] == 2  # longer than the lab may be idle
        begun = time.monotonic()
        until(lambda: lab.closed, 30)
        assert time.monotonic() - begun > 1
        assert gone(pids, 30.0) == []
        with pytest.raises(pw.PathwaysError, match="nobody used it for 2 s"):
            slow(x).result(timeout=60)
