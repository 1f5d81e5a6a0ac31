"""Adaptive scaling of Dask takes no worker on whose devices there are slices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.runtime.control_plane.directory import HostSeen, Registry
from pathways_lab.runtime.control_plane.outbox import Switchboard

pytest.importorskip("distributed")

from pathways_lab.runtime.cluster.dask_plugins import ControlPlugin


def binding(number: int, *hosts: str) -> SliceBinding:
    devices = tuple((host, 0) for host in hosts)
    return SliceBinding(number, "kernel-1", "west", (len(devices),), ("x",), devices, "cpu", 0)


def test_dask_is_told_when_other_workers_come_into_use() -> None:
    registry = Registry()
    for name in "abc":
        host = f"west/{name}"
        registry.hosts[host] = HostSeen(
            host, "west", 1, "cpu", 1, 1, 1, "unix:/there", False, worker=f"c-{name}"
        )
    told: list[list[str]] = []
    board = Switchboard(registry)
    board.used = told.append
    for number, hosts in enumerate((("west/a",), ("west/a",), ("west/c", "west/a"))):
        registry.bind_slice(binding(number, *hosts))
        board.topology()
    registry.forget_slice(2)
    board.topology()
    registry.hosts.clear()  # they are lost, and their slices not yet
    board.topology()
    assert told == [["c-a"], ["c-a", "c-c"], ["c-a"], []]


def test_workers_in_use_cannot_be_taken() -> None:
    plugin = ControlPlugin(None)
    workers = [SimpleNamespace(name=name) for name in ("c-a", "c-b", 0)]
    assert plugin.valid_workers_downscaling(None, workers) == workers
    plugin._wanted(None, {"in_use": ["c-a", "0"]})
    assert plugin.valid_workers_downscaling(None, workers) == workers[1:2]
