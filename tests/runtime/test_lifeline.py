"""A tree of processes ends with its root, however the root dies."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pathways_lab.runtime.processes import child_process
from pathways_lab.runtime.processes.child_process import Child, ChildDied, spawn
from tests.runtime.processes import until

pytestmark = pytest.mark.cluster
MODULE = "tests.runtime.lifeline_child"


def gone(pids: list[int], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and _runs(pid) for pid in pids):
            return True
        time.sleep(0.01)
    return False


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Child]:
    def make(**config: object) -> Child:
        return spawn(MODULE, {"folder": str(tmp_path), **config}, name="root", folder=tmp_path)

    return make


def test_grandchildren_go_when_the_root_is_killed(start: Callable[..., Child]) -> None:
    child = start(depth=2)
    pids = child.hear(20)["pids"]
    assert len(pids) == 3
    os.kill(child.pid, signal.SIGKILL)
    assert gone(pids)
    child.end()


@pytest.mark.parametrize("slowly", [0, 0.3])
def test_the_end_of_the_lifeline_runs_the_last_duties(
    start: Callable[..., Child], tmp_path: Path, slowly: float
) -> None:
    """All of them, also when another thread wants to end the process meanwhile."""
    child = start(leave_behind=str(tmp_path / "marker"), slowly=slowly)
    child.hear(20)
    child.end()
    child.end()
    assert not child.alive
    assert (tmp_path / "marker").read_text() == "ended"


def test_a_child_that_dies_tells_why(start: Callable[..., Child]) -> None:
    child = start(fail=True)
    with pytest.raises(ChildDied, match=r"root .* exit code 1; .*\n.*output\na reason on"):
        child.hear(20)
    child.end()


def test_who_tells_or_hears_one_that_was_ended_knows_one_kind_of_end(
    start: Callable[..., Child],
) -> None:
    """Two threads may end and tell one child; neither sees a closed file."""
    child = start()
    child.end()
    with pytest.raises(ChildDied, match="ended early with exit code 0"):
        child.tell({"more": 1})
    with pytest.raises(ChildDied, match="was ended with exit code 0"):
        child.hear(1.0)


def test_a_stopped_child_is_woken_by_end(start: Callable[..., Child]) -> None:
    child = start(deaf=True)
    child.hear(20)
    until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)
    child.end(patience=60.0)
    assert child.exit_code == 0, "it was killed"


def test_a_child_that_does_not_end_is_killed(
    start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = start(deaf=True)
    child.hear(20)
    monkeypatch.setattr(child, "let_go", lambda: None)
    child.end(patience=0.2)
    assert child.exit_code == -signal.SIGKILL


def test_a_forked_copy_of_the_parent_holds_nobody(start: Callable[..., Child]) -> None:
    """As left behind by ``multiprocessing`` in a notebook: alive, and no obstacle."""
    child = start(depth=1, fork=True)
    root, grandchild = child.hear(20)["pids"]
    copies = [p.pid for p in psutil.Process(root).children(recursive=True) if p.pid != grandchild]
    assert len(copies) == 2
    os.kill(root, signal.SIGKILL)
    assert gone([root, grandchild])
    for copy in copies:
        assert _runs(copy)
        os.kill(copy, signal.SIGKILL)
    child.end()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a stopped child")
def test_a_stopped_grandchild_goes_too(start: Callable[..., Child]) -> None:
    child = start(depth=2)
    pids = child.hear(20)["pids"]
    os.kill(pids[-1], signal.SIGSTOP)
    os.kill(pids[-2], signal.SIGSTOP)
    os.kill(child.pid, signal.SIGKILL)
    assert gone(pids)
    child.end()


def test_ctrl_c_is_for_the_parent_and_notebook_variables_stay_with_it(
    start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    child = start()
    assert "MPLBACKEND" not in child.hear(20)["variables"]
    for asked in (signal.SIGINT, signal.SIGTERM):
        os.kill(child.pid, asked)
    time.sleep(0.1)
    assert child.alive
    assert os.getpgid(child.pid) != os.getpgid(0)
    child.end()


def test_nothing_secret_is_visible_from_outside(start: Callable[..., Child]) -> None:
    child = start(key="f00dfeed")
    child.hear(20)
    process = psutil.Process(child.pid)
    assert "f00dfeed" not in " ".join(process.cmdline())
    assert "f00dfeed" not in str(process.environ())
    child.end()


def test_a_child_may_have_more_descriptors_than_its_parent(start: Callable[..., Child]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        child = start()
        raised, kept = child.hear(20)["files"]
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (200, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    child.end()
    assert raised > 200
    assert kept == hard


@pytest.mark.parametrize("frames", [3, 300])
def test_words_about_a_fatal_signal_name_it_however_many_functions_were_running(
    frames: int,
) -> None:
    running = [f'  File "/lib/python3.11/a.py", line {n} in f{n}' for n in range(frames)]
    fatal = ["Fatal Python error: Segmentation fault", "", "Current thread 0x1:", *running]
    log = "\n".join([*["it goes on"] * 500, *fatal, "Extension modules: a, b"])
    told = child_process._telling(log, 2000)
    assert len(told) <= 2000
    assert "it goes on\nFatal Python error: Segmentation fault" in told
    assert " in f0\n" in told
    assert "Extension" not in told


@pytest.mark.parametrize("signal", ["", "Fatal Python error: Aborted\n"])
def test_words_name_an_assertion_above_whatever_was_running(signal: str) -> None:
    frames = "".join(f"    @ 0x7f{n:08} tsl::PThread::PThread()\n" for n in range(200))
    said = "F1125 03:18:41.29 25696 env.cc:93] Check failed: ret == 0 (11 vs. 0)"
    told = child_process._telling(f"hello\n{said}\n{frames}{signal}{frames}", 2000)
    assert told.startswith(f"{said}\n...\n")
    assert signal in told
    assert len(told) <= 2000


def test_words_are_the_end_of_a_log() -> None:
    assert child_process._telling("a" * 50 + "\nthe end\n\n", 10) == "aa\nthe end"


def test_a_process_leaves_also_where_no_thread_can_be_started() -> None:
    code = """if True:
        import threading
        from pathways_lab.runtime.processes import child_process

        def refuse(self):
            raise RuntimeError("can't start new thread")

        threading.Thread.start = refuse
        child_process.at_end(lambda: print("ended", flush=True))
        child_process.leave(7)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (7, "ended\n"), done.stderr
