"""The embedded lab: starts, says what it takes, and is gone without trace, however it ends."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any
from unittest.mock import Mock

import psutil
import pytest

from pathways_lab.core.errors import PathwaysError
from pathways_lab.runtime import devices
from pathways_lab.runtime.cluster import accelerators, embedded, worker_spec
from pathways_lab.runtime.cluster.accelerators import Found, assign, find
from pathways_lab.runtime.cluster.attach import attach, write_lab_file
from pathways_lab.runtime.cluster.embedded import EmbeddedCluster, start_cluster
from pathways_lab.runtime.cluster.lab_spec import Wishes, outline
from pathways_lab.runtime.processes.child_process import ChildDied
from pathways_lab.runtime.processes.memory_budget import MIB, plan_budget, usual_hosts
from pathways_lab.runtime.processes.start_progress import Progress, line
from pathways_lab.transport.auth import AuthenticationError, new_key
from pathways_lab.transport.machine_share import available_memory
from pathways_lab.transport.reactor import Reactor
from tests.runtime.processes import gone, runs, tree, until

FAKE = "tests.runtime.fake_host"
ROOT = Path(__file__).parents[2]


# --- pure ------------------------------------------------------------------------


def test_memory_that_does_not_fit_is_refused_with_the_numbers() -> None:
    budget = plan_budget(2, 4, None, 8 << 30)
    assert budget.device_memory is not None
    assert budget.device_memory * 8 <= budget.available
    assert budget.total == budget.processes + 8 * budget.device_memory
    with pytest.raises(PathwaysError) as caught:
        plan_budget(2, 4, 2 << 30, 8 << 30)
    assert "2 hosts with 4 devices" in str(caught.value)
    assert "8 GiB are free" in str(caught.value)
    assert "remedy" in str(caught.value)
    with pytest.raises(PathwaysError):
        plan_budget(20, 8, None, 1 << 30)


def test_available_memory_is_a_fact_of_this_machine() -> None:
    assert 0 < available_memory() <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("line", "folder", "files"),
    [
        ("0::/job/step", "job", ("memory.max", "memory.current", "inactive_file")),
        ("0::/job", ".", ("memory.max", "memory.current", "inactive_file")),
        (
            "7:memory:/job/step", "memory/job",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
        ("", ".", None),
    ],
)  # fmt: skip
def test_the_memory_of_a_job_is_what_its_groups_leave(
    line: str, folder: str, files: tuple[str, str, str] | None, tmp_path: Path
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{line}\n")
    group = tmp_path / "sys/fs/cgroup" / folder
    group.mkdir(parents=True)
    if files is None:
        assert available_memory(tmp_path) > 50 * MIB
        return
    limit, used, cache = files
    (group / used).write_text(f"{30 * MIB}\n")
    (group / "memory.stat").write_text(f"anon {20 * MIB}\n{cache} {10 * MIB}\n")
    (group / limit).write_text("max\n")
    assert available_memory(tmp_path) > 50 * MIB
    (group / limit).write_text(f"{50 * MIB}\n")
    assert available_memory(tmp_path) == 30 * MIB
    (group / limit).write_text(f"{10 * MIB}\n")
    assert available_memory(tmp_path) == 0


def test_every_host_gets_accelerators_of_its_own_or_none() -> None:
    four = Found(gpus=("0", "1", "2", "3"), tpus=8)
    given = assign(2, 2, "auto", four)
    assert given.platform == "auto"
    assert [given.environment(host) for host in range(2)] == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]
    assert assign(3, 2, "auto", four).platform == "cpu"
    assert assign(1, 1, "cpu", four).environment(0) == {}
    assert assign(1, 8, "auto", four).platform == "auto"
    assert assign(2, 4, "auto", four).platform == "cpu"
    with pytest.raises(PathwaysError, match="JAX can use 4 here"):
        assign(3, 2, "gpu", four)
    with pytest.raises(PathwaysError, match="JAX can use 8 here"):
        assign(2, 4, "tpu", four)
    with pytest.raises(PathwaysError, match="'auto', 'cpu', 'gpu' or 'tpu'"):
        assign(3, 2, "abacus", four)


def test_accelerators_are_found_without_importing_jax(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "accel0", "accel1"):
        (tmp_path / name).touch()
    monkeypatch.setattr(accelerators, "_installed", lambda module: False)
    assert find(tmp_path) == Found()
    monkeypatch.setattr(accelerators, "_installed", lambda module: True)
    assert find(tmp_path) == Found(("2", "10"), 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7,1")
    assert find(tmp_path).gpus == ("GPU-7", "1")


def test_the_memory_of_gpus_is_left_to_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (accelerators.PREALLOCATE, accelerators._RESTRAINED):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    assert accelerators.claims()
    accelerators.restrain_kernel()
    assert not accelerators.claims()
    accelerators.unrestrained()  # as a host, which has inherited it
    assert accelerators.claims()
    monkeypatch.setenv(accelerators.PREALLOCATE, "false")  # the user's own word holds everywhere
    accelerators.restrain_kernel()
    accelerators.unrestrained()
    assert not accelerators.claims()


class _Gpu:
    """A device whose pool is what another process has left."""

    def __init__(self, **stats: int) -> None:
        self._stats = stats

    def memory_stats(self) -> dict[str, int]:
        return self._stats


def test_a_device_has_the_memory_that_could_be_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.jax, "device_put", lambda value, device: value)
    monkeypatch.delenv(accelerators.PREALLOCATE, raising=False)
    assert devices._claimed(_Gpu(bytes_limit=100, pool_bytes=30)) == 30
    assert devices._claimed(_Gpu(bytes_limit=100)) == 100
    assert devices._claimed(_Gpu()) == 16 << 30
    monkeypatch.setenv(accelerators.PREALLOCATE, "false")
    assert devices._claimed(_Gpu(bytes_limit=100, pool_bytes=1)) == 100


def test_a_lab_takes_the_accelerators_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def lab(islands: int, gpus: int, **chosen: int) -> tuple[int, int, bool, str]:
        found = Found(tuple(str(n) for n in range(gpus)))
        monkeypatch.setattr(accelerators, "find", lambda: found)
        made = outline(Wishes(islands, **chosen))
        return made.hosts, made.devices, made.emulated, made.note

    assert lab(2, 8) == (1, 4, False, "")
    assert lab(2, 3) == (1, 1, False, "")
    assert lab(1, 1) == (1, 1, False, "")
    hosts, devices, emulated, note = lab(2, 1)
    assert emulated
    assert f"{2 * hosts * devices} are asked for and this machine has 1 GPU:" in note
    assert "this machine has 2 GPUs" in lab(1, 2, hosts_per_island=3)[3]
    assert outline(Wishes(2, platform="cpu")).note == ""


def test_accelerators_memory_is_not_the_machines() -> None:
    budget = plan_budget(1, 8, 80 << 30, 8 << 30, emulated=False)
    assert budget.device_memory is None
    assert "accelerators' memory" in str(budget)


def test_progress_is_one_line_in_terminals_and_nothing_elsewhere(tmp_path: Path) -> None:
    assert str(Progress("a", 1, 3, 0.52)) == "█░░ a (0.5 s)"
    with open(tmp_path / "out", "w") as file:
        line(file)(Progress("a", 1, 3, 0.5))
    assert (tmp_path / "out").read_text() == ""


def test_wrong_numbers_are_refused_before_anything_starts() -> None:
    with pytest.raises(PathwaysError, match="islands is 0"):
        start_cluster(Wishes(islands=0))
    with pytest.raises(PathwaysError, match="idle_close is nan"):
        start_cluster(Wishes(idle_close=math.nan))


@pytest.mark.parametrize("name", ["islands", "hosts_per_island", "devices_per_host"])
def test_labs_that_are_too_large_are_refused_with_the_numbers_at_once(name: str) -> None:
    """Nothing is made for each of their hosts before."""
    wishes: dict[str, Any] = {name: 10**18}
    with pytest.raises(PathwaysError, match=r"000000000000000000 .* GiB are free"):
        outline(Wishes(**wishes))


# --- with processes ----------------------------------------------------------------


@pytest.fixture(scope="module")
def lab() -> Iterator[EmbeddedCluster]:
    cluster = start_cluster(Wishes(2, 1, 2, memory=MIB, platform="cpu"), host_module=FAKE)
    yield cluster
    cluster.close()


def everything(cluster: EmbeddedCluster) -> list[int]:
    return [pid for pids in cluster.pids.values() for pid in pids]


@pytest.mark.cluster
def test_all_processes_are_there_and_in_their_places(lab: EmbeddedCluster) -> None:
    assert lab.alive
    assert {name: len(pids) for name, pids in lab.pids.items()} == {
        "scheduler": 1, "control": 1, "workers": 2, "devices": 2,
    }  # fmt: skip
    assert psutil.Process(lab.pids["control"][0]).ppid() == lab.pids["scheduler"][0]
    for device in lab.pids["devices"]:
        assert psutil.Process(device).ppid() in lab.pids["workers"]
    assert lab.seconds < 60


@pytest.mark.cluster
def test_a_client_sees_the_hosts_and_a_stranger_nothing(lab: EmbeddedCluster) -> None:
    reactor = Reactor("test", lambda *message: None, lambda link, reason: None)
    reactor.start()
    link = reactor.connect(lab.control.address, lab.control.key, {"role": "client", "name": "me"})
    islands = link.peer["topology"]["islands"]
    hosts = [host["name"] for island in islands for host in island["hosts"]]
    assert hosts == ["island0/host0", "island1/host0"]
    assert {h["memory"] for island in islands for h in island["hosts"]} == {MIB}
    with pytest.raises(AuthenticationError):
        reactor.connect(lab.control.address, new_key(), {"role": "client", "name": "stranger"})
    reactor.close()


@pytest.mark.cluster
def test_nothing_is_open_to_other_accounts(lab: EmbeddedCluster) -> None:
    """One private folder; TCP listeners on loopback only, and those of Dask with TLS."""
    assert stat.S_IMODE(lab.folder.stat().st_mode) == 0o700
    for pid in everything(lab):
        for connection in psutil.Process(pid).net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip == "127.0.0.1"
    assert lab.address.startswith("tls://127.0.0.1:")
    secrets = (lab.control.key.hex(), "BEGIN PRIVATE")
    for pid in everything(lab):
        process = psutil.Process(pid)
        visible = " ".join(process.cmdline()) + str(process.environ())
        assert not any(secret in visible for secret in secrets)


@pytest.mark.cluster
def test_it_is_a_real_dask_cluster(lab: EmbeddedCluster) -> None:
    import distributed

    with lab.dask_client() as client:
        assert client.submit(sum, [1, 2]).result(timeout=60) == 3
        workers = client.scheduler_info()["workers"].values()
        assert {w["name"] for w in workers} == {"island0/host0", "island1/host0"}
    with pytest.raises((OSError, TypeError)):
        distributed.Client(lab.address, timeout=5)
    # What is left of it closes itself when it is collected, which hangs inside the start of
    # another client.
    gc.collect()
    assert lab.dashboard().startswith("http://127.0.0.1:")
    assert lab.dashboard() == lab.dashboard()


@pytest.mark.cluster
def test_attaching_to_it_finds_the_same_control_plane(lab: EmbeddedCluster, tmp_path: Path) -> None:
    """By its Dask client, and by an invitation that holds nothing else."""
    with lab.dask_client() as client:
        assert attach(client) == attach(client) == lab.control
    invitation = tmp_path / "lab.json"
    write_lab_file(invitation, lab.control)
    assert stat.S_IMODE(invitation.stat().st_mode) == 0o600
    assert attach(str(invitation)) == lab.control
    assert [runs(pid) for pid in everything(lab)] == [True] * 6


@pytest.mark.cluster
def test_a_killed_device_process_is_replaced(lab: EmbeddedCluster) -> None:
    worker = lab.pids["workers"][0]
    (old,) = tree(worker)
    os.kill(old, signal.SIGKILL)
    until(lambda: tree(worker) not in ([], [old]))
    assert lab.alive


@pytest.mark.cluster
def test_without_copies_each_process_is_an_interpreter_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_spec, "can_fork", lambda: False)
    with start_cluster(Wishes(2, 1, 1, memory=MIB, platform="cpu"), host_module=FAKE) as cluster:
        pids = everything(cluster)
        modules = [psutil.Process(pid).cmdline()[-1] for pid in cluster.pids["workers"]]
        assert modules == ["pathways_lab.runtime.cluster.worker_main"] * 2
    assert gone(pids, 10.0) == []


@pytest.mark.cluster
def test_the_first_islands_end_one_by_one() -> None:
    with start_cluster(Wishes(2, 2, 1, memory=MIB, platform="cpu"), host_module=FAKE) as cluster:
        (root,) = {psutil.Process(pid).ppid() for pid in cluster.pids["workers"]}
        assert len(tree(root)) == 8
        cluster.remove_island("island0")
        assert len(tree(root)) == 4
        cluster.add_island("island0", hosts=1)
        assert cluster.alive
        cluster.remove_island("island1")
        assert gone([root], 10.0) == []
        cluster.remove_island("island1")
        assert cluster.alive


def test_an_end_that_is_interrupted_again_and_again_is_an_end(tmp_path: Path) -> None:
    """Ctrl-C while it waits for a child, for each of them, counts when all is done."""
    folder = tmp_path / "lab"
    folder.mkdir()

    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    children = [Mock(end=Mock(side_effect=interrupt)) for _ in range(3)]
    ended = EmbeddedCluster(Mock(), folder, Mock(), Mock(), _children=children)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        ended.close()
    assert all(child.let_go.called and child.end.called for child in children)
    assert not folder.exists()


def test_a_worker_that_does_not_start_is_ended_and_the_others_go_on(tmp_path: Path) -> None:
    there, broken = Mock(), Mock(hear=Mock(side_effect=ChildDied("no room")))
    recipe = Mock(start_feeder=Mock(return_value=broken))
    lab = EmbeddedCluster(Mock(), tmp_path, Mock(), recipe, _children=[there])
    with pytest.raises(PathwaysError, match="a worker for feeds did not start: no room"):
        lab.add_feeders(1)
    assert broken.let_go.called
    assert broken.end.called
    assert lab._children == [there]


@pytest.mark.cluster
def test_closing_twice_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    cluster = start_cluster(Wishes(1, 2, 1, memory=MIB, platform="cpu"), host_module=FAKE)
    pids = everything(cluster)
    assert [*cluster.folder.glob("dask-scratch-space/scheduler-*")], "what Dask writes is ours"
    assert len(pids) == 6
    cluster.close()
    cluster.close()
    assert gone(pids, 10.0) == []
    assert not cluster.folder.exists()
    assert not cluster.alive
    assert [*tmp_path.iterdir()] == []


@pytest.mark.cluster
def test_the_reason_of_a_failed_start_is_told_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[EmbeddedCluster] = []
    spawn_all = embedded._spawn_all
    monkeypatch.setattr(
        embedded,
        "_spawn_all",
        lambda cluster, *rest: (started.append(cluster), spawn_all(cluster, *rest)),
    )
    with pytest.raises(
        PathwaysError, match=r"(?s)the lab did not start: device process .*No module"
    ):
        start_cluster(Wishes(1, 1, 1, memory=MIB, platform="cpu"), host_module="no_such_module")
    assert not started[0].alive
    assert not started[0].folder.exists()


@pytest.mark.cluster
@pytest.mark.parametrize(("step", "after"), [(0, 0.0), (0, 0.05), (0, 0.4), (1, 0.0), (3, 0.0)])
def test_an_interrupted_start_cleans_up(step: int, after: float) -> None:
    """Some time after one of its five steps."""
    before = set(tree(os.getpid()))
    seen: set[int] = set()

    def interrupt(progress: Progress) -> None:
        if progress.done == step:
            signal.setitimer(signal.ITIMER_REAL, after or 1e-6)

    def strike(*_: object) -> None:
        seen.update(tree(os.getpid()))
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, strike)
    try:
        with pytest.raises(KeyboardInterrupt):
            start_cluster(Wishes(1, 1, 1, MIB, "cpu"), interrupt, host_module=FAKE)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert seen
    assert gone(seen - before, 30.0) == []  # or what is only being imported must come so far


def kernel() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("embedded_kernel.py")), FAKE],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def told(out: IO[str] | None) -> dict[str, dict[str, list[int]]]:
    assert out is not None
    reply: dict[str, dict[str, list[int]]] = json.loads(out.readline())
    return reply


@pytest.mark.cluster
def test_no_process_outlives_a_killed_kernel() -> None:
    """Nothing could run in the kernel: the lifelines alone do it."""
    process = kernel()
    told(process.stdout)
    reply = told(process.stdout)
    pids = [pid for group in reply["pids"].values() for pid in group]
    assert len(pids) == 6
    process.kill()
    assert gone(pids, 20.0) == []
    process.wait()
    until(lambda: not Path(str(reply["folder"])).exists())


@pytest.mark.cluster
def test_no_process_outlives_a_kernel_killed_during_the_start() -> None:
    process = kernel()
    told(process.stdout)
    until(lambda: len(tree(process.pid)) >= 4)
    pids = tree(process.pid)
    process.kill()
    assert gone(pids, 20.0) == []
    process.wait()


@pytest.mark.cluster
def test_a_script_that_ends_takes_its_lab_along() -> None:
    """Also without ``close`` and without a ``__main__`` guard."""
    code = (
        "from pathways_lab.runtime.cluster.embedded import start_cluster\n"
        "from pathways_lab.runtime.cluster.lab_spec import Wishes\n"
        f"c = start_cluster(Wishes(1, 1, 1, 1 << 20, 'cpu'), host_module={FAKE!r})\n"
        "print(*[p for ps in c.pids.values() for p in ps])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, cwd=ROOT, timeout=100,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert gone([int(pid) for pid in done.stdout.split()], 10.0) == []


# --- how many hosts an island has ----------------------------------------------------


def test_islands_have_two_hosts_unless_something_speaks_against_it() -> None:
    plenty = 16 << 30
    assert usual_hosts(2, None, None, plenty, "") == (2, 2, "")
    assert usual_hosts(2, 3, None, plenty, "") == (2, 3, "")
    assert usual_hosts(2, None, None, plenty, "no collectives") == (1, 4, "no collectives")
    assert usual_hosts(2, 3, None, plenty, "no collectives") == (1, 3, "no collectives")
    hosts, devices, note = usual_hosts(2, None, None, 1200 * MIB, "")
    assert (hosts, devices) == (1, 4)
    assert "leave little for their devices" in note
    hosts, devices, note = usual_hosts(2, None, None, 700 * MIB, "")
    assert (hosts, devices) == (1, 4)
    assert "needs" in note


def test_several_hosts_are_refused_where_they_cannot_compute_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything is started, with the way out."""
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(PathwaysError, match="cannot compute together") as refused:
        start_cluster(Wishes(1, 2, 2, platform="cpu"), host_module="never_started")
    assert "hosts_per_island=1" in refused.value.failure.remedy
