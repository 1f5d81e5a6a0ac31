"""The worker of a group's machine: its first device process is there before a lab asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import distributed
import numpy as np
import psutil
import pytest

import pathways_lab as pw
from pathways_lab.runtime.processes.child_copies import can_fork
from tests.runtime.processes import until

HERE: dict[str, Any] = {"protocol": "tcp", "host": "127.0.0.1", "dashboard_address": None}


@pytest.mark.cluster
@pytest.mark.skipif(not can_fork(), reason="copies of processes go on as others on Linux only")
def test_a_device_process_is_a_copy_of_its_worker_and_imports_nothing() -> None:
    """After its death an interpreter takes its place, and no folder stays behind."""
    command = [sys.executable, "-m", "pathways_lab", "cluster", "worker"]
    with distributed.LocalCluster(n_workers=0, processes=False, **HERE) as cluster:
        options = [cluster.scheduler_address, "--island", "west", "--devices", "1"]
        with (
            subprocess.Popen([*command, *options], stderr=subprocess.DEVNULL) as supervisor,
            distributed.Client(cluster) as client,
        ):
            try:
                client.wait_for_workers(1, timeout=60)
                (worker,) = psutil.Process(supervisor.pid).children()
                (copy,) = worker.children()
                folder = log(copy).parent
                with pw.connect(client) as lab:
                    assert pids(lab) == [copy.pid]
                    assert copy.environ()["MALLOC_ARENA_MAX"]
                    assert 3 * seconds(copy) < seconds(worker), "it has imported nothing"
                    # Nor has its first function to: what JAX loads with it is there.
                    assert "cython_lapack" in Path(f"/proc/{copy.pid}/maps").read_text()
                    copy.kill()
                    until(lambda: pids(lab) not in ([], [copy.pid]))
                    (pid,) = pids(lab)
                    assert "pathways_lab.runtime.host.process" in psutil.Process(pid).cmdline()
                    add = pw.jit(lambda x: x + 1, on=lab.slice(1))
                    assert add(np.ones(3)).result().sum() == 6
            finally:
                supervisor.terminate()
        assert not folder.exists()


@pytest.mark.cluster
@pytest.mark.skipif(not can_fork(), reason="copies of processes go on as others on Linux only")
def test_a_copy_that_no_lab_asked_for_ends_with_its_worker(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pathways_lab.cli.worker", "tcp://127.0.0.1:9"]
    with subprocess.Popen(
        [*command, "--name", "west/m", "--no-nanny", "--local-directory", str(tmp_path)],
        stderr=subprocess.DEVNULL,
    ) as started:
        try:
            worker = psutil.Process(started.pid)
            until(worker.children)
            (copy,) = worker.children()
            until(lambda: log(copy).suffix == ".log")  # until then it is its worker's
            folder = log(copy).parent
            assert folder.exists()
        finally:
            started.kill()
        until(lambda: not copy.is_running() and not folder.exists())


def pids(lab: pw.Lab) -> list[int]:
    """The device processes that the lab has."""
    return [host.pid for island in lab.islands for host in island.hosts]


def log(copy: psutil.Process) -> Path:
    """The file that a copy prints to."""
    return Path(os.readlink(f"/proc/{copy.pid}/fd/2"))


def seconds(process: psutil.Process) -> float:
    """Seconds of a processor that a process has taken."""
    times = process.cpu_times()
    return float(times.user + times.system)
