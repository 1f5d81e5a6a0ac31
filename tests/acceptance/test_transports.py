"""The lab over Dask's comms: the same programs, the same faults, the same end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.core.errors import PathwaysError

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def lab() -> Iterator[pw.Lab]:
    with pw.start(
        islands=2, hosts_per_island=1, devices_per_host=2, transport="dask", progress=False
    ) as started:
        yield started


def pids(lab: pw.Lab, name: str) -> list[int]:
    return [host.pid for island in lab.islands if island.name == name for host in island.hosts]


def test_every_link_is_a_comm(lab: pw.Lab) -> None:
    assert lab.embedded is not None
    assert lab.embedded.control.address.startswith("dask+tls://127.0.0.1:")
    hosts = [host for island in lab.islands for host in island.hosts]
    assert all(host.data_address.startswith("dask+tls://127.0.0.1:") for host in hosts)


def test_uploads_transfers_and_fetches_of_every_size(lab: pw.Lab) -> None:
    near, far = lab.slice(2, island="island0"), lab.slice(2, island="island1")
    plus, twice = pw.jit(lambda x: x + 1, on=near), pw.jit(lambda x: x * 2, on=far)

    @pw.program
    def both(x: object) -> object:
        return twice(plus(x))

    for size in (1, 1000, 1 << 20):
        x = np.arange(size, dtype=np.float32)
        assert np.array_equal(both(x).result(), (x + 1) * 2)
    near.release()
    far.release()


def test_a_long_chain_keeps_its_order(lab: pw.Lab) -> None:
    with lab.slice(2, island="island0") as near:
        step = pw.jit(lambda x, k: x * 3 % 1009 + k, on=near)
        handle, expected, before = step(np.int32(1), np.int32(0)), 3, lab.submitted
        for k in range(200):
            handle, expected = step(handle, np.int32(k)), expected * 3 % 1009 + k
        assert handle.item() == expected
        assert 0 < lab.submitted - before <= 200


def test_a_killed_device_process_fails_what_it_held_and_comes_back(lab: pw.Lab) -> None:
    on = lab.slice(2, island="island1")
    held = pw.jit(lambda x: x + 1, on=on)(np.zeros(8, np.float32)).block_until_ready()
    victim = pids(lab, "island1")
    os.kill(victim[0], signal.SIGKILL)
    with pytest.raises(PathwaysError, match="lost"):
        held.result()
    deadline = time.monotonic() + 60
    while pids(lab, "island1") in ([], victim):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    again = lab.slice(2, island="island1")
    assert pw.jit(lambda x: x + 1, on=again)(np.float32(1)).item() == 2


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(PathwaysError, match=r"transport is 'pigeon'"):
        pw.start(transport="pigeon")  # type: ignore[arg-type]
