"""A lab waits for the workers that were asked for, and names those that do not come."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from pathways_lab.runtime.cluster.await_workers import (
    WORKER_SECONDS,
    absent,
    outlook,
    story,
)
from pathways_lab.runtime.processes.job import State, states_of
from pathways_lab.runtime.processes.slurm import ask, explain

distributed = pytest.importorskip("distributed")

JOBS = {"c-0": "7", "c-1": "8", "c-2": "9", "c-3": "10"}
PENDING, RUNNING = State("PENDING", "Resources"), State("RUNNING", "None")
FAILED = State("FAILED", "NonZeroExitCode")


@pytest.mark.parametrize(
    ("there", "missing", "jobs", "states", "seconds", "timeout", "expected"),
    [
        # Everybody is there; nobody was asked for yet.
        (2, [], JOBS, {}, 0, None, "go on"),
        (0, [], {}, {}, 0, None, "wait"),
        # A queue takes hours, unless somebody says how long.
        (0, ["c-0", "c-1"], JOBS, {"7": PENDING}, 9999, None, "wait"),
        (0, ["c-0"], JOBS, {"7": PENDING}, 30, 30, "give up"),
        (0, ["c-0"], JOBS, {}, 9999, None, "wait"),
        # Others than the first are waited for, but not for ever.
        (1, ["c-1"], JOBS, {"8": PENDING}, WORKER_SECONDS - 1, None, "wait"),
        (1, ["c-1"], JOBS, {"8": PENDING}, WORKER_SECONDS, None, "go on"),
        (1, ["c-1"], JOBS, {"8": RUNNING}, 30, 30, "go on"),
        # Workers that are no jobs.
        (0, ["0"], {"0": ""}, {}, WORKER_SECONDS - 1, None, "wait"),
        (0, ["0"], {"0": ""}, {}, WORKER_SECONDS, None, "give up"),
        # A job that is over brings no worker.
        (0, ["c-0"], JOBS, {"7": FAILED}, 1, None, "give up"),
        (1, ["c-1"], JOBS, {"8": FAILED}, 1, None, "go on"),
        (0, ["c-0", "c-1"], JOBS, {"7": FAILED, "8": PENDING}, 1, None, "wait"),
        (0, ["c-0", "c-1"], JOBS, {"7": FAILED}, 1, None, "wait"),
    ],
)
def test_the_next_step_of_a_wait(
    there: int,
    missing: list[str],
    jobs: dict[str, str],
    states: dict[str, State],
    seconds: float,
    timeout: float | None,
    expected: str,
) -> None:
    assert outlook(there, missing, jobs, states, seconds, timeout) == expected
    if expected == "wait" and missing and not timeout:
        assert outlook(there, missing, jobs, states, seconds, math.inf) == "wait"


def test_the_missing_are_named_with_their_jobs() -> None:
    assert story(["c-1", "c-0"], JOBS, {"7": PENDING}) == (
        "c-0 (job 7: pending, Resources), c-1 (job 8)"
    )
    assert story(["a"], {"a": ""}, {}) == "a"
    assert story(list(JOBS), JOBS, {"9": RUNNING}).endswith("c-2 (job 9: running) and 1 more")


def test_workers_may_have_other_names_than_their_cluster_has_for_them() -> None:
    assert absent(JOBS, {"c-0", "c-3"}) == ["c-1", "c-2"]
    assert absent({"0": "", "1": ""}, {"tls://one:1"}) == ["0"]
    assert absent({"0": "", "1": ""}, {"tls://one:1", "tls://two:1", "mine"}) == []
    assert story(["0"], {"0": "", "1": ""}, {}) == ""


def test_slurm_says_how_jobs_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = "7 PENDING Resources\n8 OUT_OF_MEMORY None\nslurm_load_jobs error: Invalid\n9 X\n"
    states = states_of(told)
    assert states["7"] == PENDING
    assert not PENDING.ended
    assert states["8"].ended
    assert str(states["8"]) == "out of memory"
    assert states["8"].why_ended("8").startswith("its job 8 was killed by Slurm for want of memory")
    assert State("COMPLETING", "TimeLimit").why_ended("8") == "its job 8 has reached its time limit"
    assert PENDING.why_ended("7") == ""
    assert "9" not in states
    squeue = tmp_path / "squeue"
    squeue.write_text('#!/bin/sh\necho "$5 PENDING Priority"\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert ask({"7"}) == {"7": State("PENDING", "Priority")}
    assert ask(()) == {}
    # A job that has just lost its processes may run for Slurm a moment longer.
    ended = f"if test -e {tmp_path}/asked; then echo 7 OUT_OF_MEMORY None; else echo 7 RUNNING None"
    squeue.write_text(f"#!/bin/sh\n{ended}; fi; touch {tmp_path}/asked\n")
    assert "killed by Slurm" in explain("7")
    # Where Slurm measures memory itself the job has just failed, and its log says why.
    squeue.write_text("#!/bin/sh\necho 7 FAILED JobLaunchFailure\n")
    assert explain("7") == "its job 7 has ended (failed, JobLaunchFailure)"
    log, scontrol = tmp_path / "7.out", tmp_path / "scontrol"
    log.write_text(
        "x\n" * 9999 + "slurmstepd-n1: error: StepId=7.batch exceeded memory limit (9 > 8)\n"
    )
    scontrol.write_text(f"#!/bin/sh\necho JobId=7 StdErr={log} Power=\n")
    scontrol.chmod(0o755)
    assert "killed by Slurm for want of memory" in explain("7")
    squeue.unlink()
    assert explain("7") == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask({"7"}) == {}
