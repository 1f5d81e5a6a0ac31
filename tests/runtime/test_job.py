"""A worker takes what its job was given, and not the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pathways_lab.runtime.processes import job
from pathways_lab.runtime.processes.memory_budget import DEVICE_PROCESS, MIB, WORKER
from pathways_lab.transport.machine_share import processors

SLURM = {"SLURM_JOB_ID": "17", "SLURM_CPUS_ON_NODE": "8"}
PROCESSES = WORKER + DEVICE_PROCESS


def test_the_number_of_a_job() -> None:
    assert job.number_of(SLURM) == "17"
    assert job.number_of({"PBS_JOBID": "4.head"}) == "4.head"
    assert job.number_of({"SLURM_JOB_ID": ""}) == ""


@pytest.mark.parametrize(
    ("environment", "threads", "expected"),
    [
        (SLURM, 16, 8),
        (SLURM, 4, 4),
        ({**SLURM, "SLURM_CPUS_PER_TASK": "2"}, 4, 2),
        ({**SLURM, "SLURM_CPUS_PER_TASK": "(null)"}, 9, 8),
        ({"PBS_JOBID": "4"}, 3, 3),
        ({"SLURM_CPUS_ON_NODE": "8"}, 3, None),
    ],
)
def test_the_least_number_of_processors_counts(
    environment: dict[str, str], threads: int, expected: int | None
) -> None:
    assert job.processors_of(environment, threads) == expected


@pytest.mark.parametrize(
    ("environment", "limit", "given"),
    [
        ({}, None, None),
        ({}, 900 * MIB, 900),
        ({**SLURM, "SLURM_MEM_PER_NODE": "800"}, 900 * MIB, 800),
        ({**SLURM, "SLURM_MEM_PER_NODE": "800"}, 500 * MIB, 500),
        ({**SLURM, "SLURM_MEM_PER_CPU": "100"}, None, 800),
        ({**SLURM, "SLURM_MEM_PER_NODE": "0"}, None, None),  # all of the node
    ],
)
def test_the_least_memory_counts_without_that_of_the_processes(
    environment: dict[str, str], limit: int | None, given: int | None
) -> None:
    room = None if given is None else given * MIB - PROCESSES
    assert job.room_of(environment, limit) == room


def test_a_job_without_room_for_the_processes_says_so() -> None:
    environment = {**SLURM, "SLURM_MEM_PER_NODE": "200"}
    with pytest.raises(ValueError, match="its job 17 gives it 200 MiB of memory, and the proc"):
        job.room_of(environment, None)
    with pytest.raises(ValueError, match="Dask gives it 10 MiB"):
        job.room_of({}, 10 * MIB)


def test_a_notice_says_what_is_known() -> None:
    assert job.notice({}, 0.0) == "its worker was told to end (SIGTERM)"
    assert "it was cancelled, preempted, or is out of time" in job.notice(SLURM, 0.0)
    ends = {**SLURM, "SLURM_JOB_END_TIME": "100"}
    assert job.notice(ends, 99.0).endswith("it was cancelled or preempted")
    assert job.notice(ends, 100.0) == "its job 17 has reached its time limit"


def test_processors_are_those_of_the_control_groups(tmp_path: Path) -> None:
    whole = processors(tmp_path)
    assert whole <= (os.cpu_count() or 1)
    (tmp_path / "proc/self").mkdir(parents=True)
    groups = tmp_path / "proc/self/cgroup"
    groups.write_text("0::/job/step\n")
    step = tmp_path / "sys/fs/cgroup/job/step"
    step.mkdir(parents=True)
    (step / "cpu.max").write_text("max 100000\n")
    assert processors(tmp_path) == whole
    (step.parent / "cpu.max").write_text("150000 100000\n")
    assert processors(tmp_path) == 1
    groups.write_text("4:cpu,cpuacct:/job\n")
    first = tmp_path / "sys/fs/cgroup/cpu,cpuacct/job"
    first.mkdir(parents=True)
    (first / "cpu.cfs_period_us").write_text("100000\n")
    (first / "cpu.cfs_quota_us").write_text("-1\n")
    assert processors(tmp_path) == whole
    (first / "cpu.cfs_quota_us").write_text("100000\n")
    assert processors(tmp_path) == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_processors_are_those_of_the_affinity() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert processors() == 1
    finally:
        os.sched_setaffinity(0, before)
