"""A lab over jobs of a real Slurm, whose nodes are machines of the test."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator

import pytest

from tests.machines.bench import until
from tests.machines.conftest import Make
from tests.machines.group import lines_of
from tests.machines.slurm import Slurm, refusal

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def slurm(machines: Make) -> Iterator[Slurm]:
    if reason := refusal():
        pytest.skip(reason)
    # Not imported here: that would take Ctrl-C away from all later tests of this process.
    if importlib.util.find_spec("dask_jobqueue") is None:
        pytest.skip("dask-jobqueue is not installed")
    group = machines(("login", "n1", "n2"))
    yield Slurm(group, "login", "n1", "n2", cpus=1, memory=1000)
    group.close()


BEGIN = """
import os, signal, subprocess, sys, time
def say(*what): print(*what, flush=True)
def slurm(*command): return subprocess.run(command, capture_output=True, text=True).stdout
def until(done):
    end = time.monotonic() + 60
    while not done():
        if time.monotonic() > end: raise TimeoutError("60 s are over")
        time.sleep(0.05)
import jax, numpy as np
os.chdir(os.path.dirname(os.environ["SLURM_CONF"]))
"""

STORY = """
def hosts(): return {host.name: host for island in lab.islands for host in island.hosts}
def host(island): return next(host for name, host in hosts().items() if island in name)
def number(island): return cluster.workers[host(island).name.split("/")[1]].job_id
first = host("n1")
say("there", lab, first.devices, first.memory < 10**9 / 2)
def slow(x):
    return jax.pure_callback(lambda v: (time.sleep(float(v[0])), v)[1], x, x)
on = {island: lab.slice(1, island=island) for island in ("n1", "n2")}
slow = {island: pw.jit(slow, on=s) for island, s in on.items()}
twice = {island: pw.jit(lambda x: x * 2, on=s) for island, s in on.items()}
value = {island: call(np.arange(3.0)) for island, call in twice.items()}
assert all((v.result() == np.arange(3.0) * 2).all() for v in value.values())
cluster.scale(jobs=3)
until(lambda: "PENDING" in slurm("squeue", "-h", "-o", "%T"))
begun = slow["n1"](np.full(3, 11.0))
time.sleep(0.5)
slurm("scancel", number("n1"))
say("begun", begun.result())
until(lambda: first.name not in hosts())
try: twice["n1"](value["n1"]).result()
except pw.PathwaysError as error: say("lost:", error.failure.message)
until(lambda: "n1" in [i.name for i in lab.islands])
on["n1"].rebind()
say("back", twice["n1"](np.arange(3.0)).result(), host("n1").name)
begun = {island: call(np.full(3, 2.0)) for island, call in slow.items()}
cluster.adapt(minimum=1, maximum=2, interval="100ms", wait_count=1)
say("in use", *(each.result() for each in begun.values()), len(lab.islands))
del begun, value["n1"]
on["n1"].release()
until(lambda: len(lab.islands) == 1)
say("one is left", lab, twice["n2"](value["n2"]).result())
os.kill(os.getpid(), signal.SIGKILL)
"""

ENDS = """
hosts = [host for island in lab.islands for host in island.hosts]
jobs = {host.machine: cluster.workers[host.name.split("/")[1]].job_id for host in hosts}
# Slurm looks at limits every half a minute.
slurm("scontrol", "update", f"JobId={jobs['n2']}", "EndTime=now+1seconds")
def hog(x):
    return jax.pure_callback(lambda v: (np.ones(2 * 10**8), time.sleep(60), v)[2], x, x)
def late(x):
    return jax.pure_callback(lambda v: (time.sleep(4), v)[1], x, x)
on = {island: lab.slice(1, island=island) for island in jobs}
hogs, late = pw.jit(hog, on=on["n1"])(np.arange(3.0)), pw.jit(late, on=on["n2"])
kept = late(np.arange(3.0))
def lost(handle):
    try: return handle.result()
    except pw.PathwaysError as error: return error.failure.message
say("n1:", lost(hogs))
until(lambda: not lab.islands)
say("n2:", lost(kept))
cluster.close()
"""
"""One job of 1 GB takes 1.6, and the time of the other is over."""

FAILS = """
from dask_jobqueue import SLURMCluster
import pathways_lab as pw
cluster = SLURMCluster(cores=1, memory="1 GB", n_workers=1, job_script_prologue=["exit 3"])
try: pw.connect(cluster)
except pw.PathwaysError as error: say(error.failure.message)
"""


def test_the_lines_of_the_page_make_a_lab_of_jobs(slurm: Slurm) -> None:
    """One job waits, one is cancelled, one is not in use any more; the kernel is killed."""
    nodes = {node: slurm.machines[node] for node in slurm.nodes}
    before = {node: machine.files() for node, machine in nodes.items()}
    taken = slurm.run("sbatch", "-w", "n2", "--exclusive", "--wrap", "sleep 999").split()[-1]
    said = []
    lines = lines_of("Slurm", "python").replace('"cores": 8', '"cores": 1').replace("16 GB", "1 GB")
    with slurm.client(BEGIN + lines + STORY) as client:
        assert client.stdout
        for line in client.stdout:
            said.append(line)
            if taken and "pending, Resources" in line:
                slurm.run("scancel", taken)
                taken = ""
    told = "".join(said)
    assert re.search(
        r"waiting for [12] of 2 workers: SLURM.* \(job \d+: pending, Resources\)", told
    )
    assert "there <Lab kernel-1: 2 islands, 2 devices> 1 True\n" in told
    assert "begun [11. 11. 11.]\n" in told
    assert re.search(
        r"lost: host n1/SLURMCluster-\d was lost: .*: its job \d+ was cancelled", told
    ), told
    assert "back [0. 2. 4.] n1/SLURMCluster-2\n" in told
    assert "in use [2. 2. 2.] [2. 2. 2.] 2\n" in told
    assert "one is left <Lab kernel-1: 1 island, 1 device> [0. 4. 8.]\n" in told
    assert "Traceback" not in told
    until(lambda: not slurm.run("squeue", "-h"), "the end of all jobs")
    for node in slurm.nodes:
        until(
            lambda node=node: not slurm.machines[node].pythons(), f"the end of processes on {node}"
        )
        assert set(slurm.machines[node].files()) - set(before[node]) <= {"dask-scratch-space"}


def test_jobs_that_slurm_ends_are_lost_for_its_reasons(slurm: Slurm) -> None:
    lines = lines_of("Slurm", "python").replace('"cores": 8', '"cores": 1').replace("16 GB", "1 GB")
    with slurm.client(BEGIN + lines + ENDS) as client:
        told = client.communicate(timeout=120)[0]
    lost = r": host \S+ was lost: .*its job \d+"
    assert re.search(f"n1{lost} was killed by Slurm for want of memory", told), told
    assert re.search(f"n2{lost} has reached its time limit", told), told


def test_a_job_that_ends_before_its_worker_comes_is_an_error_at_once(slurm: Slurm) -> None:
    with slurm.client(BEGIN + FAILS) as client:
        told = client.communicate(timeout=60)[0]
    failed = r"no workers after \d+ s, .* SLURMCluster-0 \(job \d+: failed, NonZeroExitCode\)"
    assert re.search(failed, told), told
