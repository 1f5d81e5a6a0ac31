"""The whole embedded lab with real device processes: what it takes, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import psutil
import pytest

import pathways_lab as pw
from pathways_lab.client.lab.lab import Lab
from pathways_lab.client.session.transfers import DataLinks
from pathways_lab.runtime.cluster.attach import attach
from pathways_lab.runtime.processes.child_copies import can_fork
from tests.runtime.processes import gone, runs, tree, until

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
HOST = "pathways_lab.runtime.host.process"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with pw.start(islands=2, hosts_per_island=1, devices_per_host=2) as lab:
        yield lab


def everything(lab: Lab) -> list[int]:
    assert lab.embedded is not None
    return [pid for pids in lab.embedded.pids.values() for pid in pids]


def test_the_budget_is_about_what_the_processes_take(lab: Lab) -> None:
    assert lab.embedded is not None
    pids = lab.embedded.pids
    started = [pids["scheduler"][0], psutil.Process(pids["workers"][0]).ppid()]
    all_of_them = [pid for one in started for pid in (one, *tree(one))]
    assert {*everything(lab)} < {*all_of_them}
    taken = sum(psutil.Process(pid).memory_full_info().pss for pid in all_of_them)
    assert taken <= lab.embedded.budget.processes <= 3 * taken


@pytest.mark.skipif(not can_fork(), reason="copies of processes go on as others on Linux only")
def test_workers_and_device_processes_are_copies_of_one_process(lab: Lab) -> None:
    assert lab.embedded is not None
    pids = lab.embedded.pids
    (root,) = {psutil.Process(pid).ppid() for pid in pids["workers"]}
    (command,) = {
        tuple(psutil.Process(pid).cmdline()) for pid in (root, *pids["workers"], *pids["devices"])
    }
    assert command[-1] == "pathways_lab.runtime.cluster.workers_main"


def test_gangs_run_in_device_processes_of_dask_workers(lab: Lab) -> None:
    assert lab.embedded is not None
    hosts = [host for island in lab.islands for host in island.hosts]
    for host in hosts:
        assert host.pid in lab.embedded.pids["devices"]
        assert psutil.Process(host.pid).ppid() == host.worker_pid
        assert host.worker_pid in lab.embedded.pids["workers"]


def test_who_waits_for_each_call_is_told_by_hosts_that_it_does_not_ask(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, asked, told, made = lab.session.connection, set(), [], []
    ask, vouch = DataLinks._ask, connection.vouch
    with lab.slice(2) as place:
        step = pw.jit(lambda x: pw.emulated(5)(x + 1), on=place)
        x = step(np.zeros(4, np.float32))
        for _ in range(3):
            x = step(x).block_until_ready()
        monkeypatch.setattr(
            DataLinks, "_ask", lambda *how: (asked.add(how[1].buffer.id), ask(*how))
        )
        monkeypatch.setattr(connection, "vouch", lambda b: (told.append(b.id), vouch(b)))
        unasked: list[int] = []
        while len(unasked) < 10:
            assert len(made) < 1000
            x = step(x).block_until_ready()
            made.append(x.buffer_id)
            # Where a value is there before it is waited for, its successor's hosts are asked.
            unasked = [buffer for buffer in told if buffer not in asked]
        assert unasked == [buffer for buffer in made if buffer in unasked]
        assert x.result().tolist() == [4.0 + len(made)] * 4


def test_what_waits_behind_others_is_cancelled_dropped_or_given_back(lab: Lab) -> None:
    on = lab.slice(1, island="island1")
    hold = pw.jit(lambda x: pw.emulated(1500)(x), on=on, name="hold")
    step = pw.jit(lambda x: pw.emulated(1)(x + 1), on=on, name="step")
    x = pw.device_put(np.ones(4, np.float32), on)
    jax.block_until_ready([hold(x), step(x)])
    until(lambda: not lab.session.connection.runs)
    before = lab.accounts().clients[lab.name].gangs
    busy = [hold(x), hold(x)]  # one runs, and one is ahead
    named, lost, left = ([step(x) for _ in range(20)] for _ in range(3))
    assert named[-1].cancel()
    told = lab.cancel(named)
    assert told.cancelled >= 1
    with pytest.raises(pw.PathwaysError, match="was cancelled by"):
        named[-1].result()
    del lost
    on.release()
    with pytest.raises(pw.PathwaysError, match=r"was released by .* waited for it"):
        left[-1].result(timeout=60)
    for handle in busy:
        np.testing.assert_array_equal(handle.result(timeout=60), 1.0)
    until(lambda: not lab.session.connection.runs)
    assert lab.accounts().clients[lab.name].gangs - before <= 22, "the machine may be slow"


def test_a_second_client_finds_the_same_lab_and_has_names_of_its_own(lab: Lab) -> None:
    assert lab.embedded is not None
    with lab.dask_client() as client:
        control = attach(client)
    assert control == lab.embedded.control
    with Lab(control, name="second") as second:
        assert second.name == "second"
        assert set(second.clients) == {lab.name, "second"}
        assert second.devices() == lab.devices()
        double = pw.jit(lambda x: x * 2, on=second.slice((2,), ("x",)))
        assert np.array_equal(np.asarray(double(np.arange(4.0))), np.arange(4.0) * 2)
    until(lambda: len(lab.session.connection.topology["slices"]) == 0)


def test_a_killed_device_process_is_told_and_its_island_comes_back(lab: Lab) -> None:
    devices = lab.slice((2,), ("x",), island="island1")
    double = pw.jit(lambda x: x * 2, on=devices)
    kept = jax.block_until_ready(double(np.arange(4.0)))
    (host,) = next(island for island in lab.islands if island.name == "island1").hosts
    os.kill(host.pid, signal.SIGKILL)
    until(lambda: _pid_of(lab, "island1/host0") not in (None, host.pid))
    with pytest.raises(pw.PathwaysError, match="island1/host0"):
        kept.result()
    with pytest.raises(pw.PathwaysError):
        double(np.arange(4.0)).result()
    again = pw.jit(lambda x: x * 2, on=lab.slice((2,), ("x",), island="island1"))
    assert np.array_equal(np.asarray(again(np.arange(4.0))), np.arange(4.0) * 2)


def _pid_of(lab: Lab, name: str) -> int | None:
    hosts = [host for island in lab.islands for host in island.hosts]
    return next((host.pid for host in hosts if host.name == name), None)


def test_no_process_outlives_a_killed_kernel_that_computes() -> None:
    """Killed while gangs are in flight: soon nothing is left."""
    code = (
        "import json, numpy as np, pathways_lab as pw\n"
        "lab = pw.start(islands=2, hosts_per_island=1, devices_per_host=2)\n"
        "f = pw.jit(lambda x: (x @ x) / 1e3, on=lab.slice((2,), ('x',)))\n"
        "x = f(np.ones((500, 500), np.float32)); x.result()\n"
        "print(json.dumps([p for ps in lab.embedded.pids.values() for p in ps]), flush=True)\n"
        "while True:\n"
        "    x = f(x)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdout is not None
    pids = json.loads(process.stdout.readline())
    assert len(pids) == 6
    assert all(runs(pid) for pid in pids)
    everything = set(pids) | set(tree(process.pid))
    time.sleep(0.2)
    process.kill()
    assert gone(everything, 20.0) == []
    process.wait()
