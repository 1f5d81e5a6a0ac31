"""Device processes are restarted when they die, but not for ever, and end with their worker."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from pathways_lab.runtime.cluster import device_supervisor
from pathways_lab.runtime.cluster.device_supervisor import (
    Change,
    DeviceProcess,
    DeviceSettings,
)
from pathways_lab.runtime.processes.child_process import Child, ChildDied, log_of
from tests.runtime.processes import until

pytestmark = pytest.mark.cluster
FAKE = "tests.runtime.fake_host"


@pytest.fixture(autouse=True)
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds for which it would have waited between two starts; it does not."""
    waited: list[float] = []

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is None:
                return super().wait()
            waited.append(timeout)
            return self.is_set()

    instead = SimpleNamespace(**{**vars(threading), "Event": Event})
    monkeypatch.setattr(device_supervisor, "threading", instead)
    return waited


def make(folder: Path, name: str, changes: list[str]) -> DeviceProcess:
    """changes: gets what has become of it, in words."""

    def changed(change: Change) -> None:
        changes.append(f"{change.state}: {change.reason}" if change.reason else change.state)

    config = DeviceSettings(
        control="", key=b"k" * 32, data_key=b"d" * 32, name=name, island="i", devices=2,
        platform="cpu", memory=None, data_listen=str(folder / "marker"), worker="w",
    ).configuration()  # fmt: skip
    return DeviceProcess(config, folder, changed, module=FAKE)


def test_a_crashed_one_comes_back_under_the_same_name(tmp_path: Path) -> None:
    changes: list[str] = []
    process = make(tmp_path, "i/crashes-2", changes)
    process.wait_ready()
    until(lambda: changes.count("ready") == 3)
    assert process.restarts == 2
    assert "signal 6 (SIGABRT, Aborted)" in changes[1]
    pid = process.pid
    process.close()
    process.close()
    assert not psutil.pid_exists(pid)
    assert changes[-1] == "ready"


def test_one_that_always_crashes_is_given_up(tmp_path: Path) -> None:
    changes: list[str] = []
    process = make(tmp_path, "i/crashes-99", changes)
    until(lambda: changes[-1:] != [] and changes[-1].startswith("given up"))
    assert process.restarts == 6
    assert "for the 6th time" in changes[-1]
    process.restart()
    until(lambda: changes.count("ready") > 6)
    process.close()


def test_one_that_is_given_up_ends_with_its_worker(tmp_path: Path) -> None:
    changes: list[str] = []
    process = make(tmp_path, "i/crashes-99", changes)
    until(lambda: changes[-1:] != [] and changes[-1].startswith("given up"))
    process.retire(0.1)
    assert not process._thread.is_alive()


def test_its_last_words_are_not_those_of_the_one_before(tmp_path: Path) -> None:
    log = log_of(tmp_path, device_supervisor.label("i/stays"))
    log.write_text("the one before was unhappy")
    process = make(tmp_path, "i/stays", [])
    process.wait_ready()
    assert process._child.last_words() == "it printed nothing"
    process.close()


@pytest.mark.parametrize(("times", "outcome"), [(3, "ready"), (99, "given up: ")])
def test_one_for_which_there_is_no_process_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rests: list[float], times: int, outcome: str
) -> None:
    popen, starts = subprocess.Popen, itertools.count()

    def refused(*args: Any, **options: Any) -> Any:
        if 1 <= next(starts) <= times:
            raise OSError(errno.EAGAIN, "no process left")
        return popen(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", refused)
    changes: list[str] = []
    process = make(tmp_path, "i/crashes-1", changes)
    until(lambda: any(change.startswith(outcome) for change in changes[1:]))
    why = f"could not be started: [Errno {errno.EAGAIN}] no process left"
    assert changes[2].startswith(f"died: {why}: ")
    assert "processes and threads" in changes[2]
    assert changes[-1] == "ready" or changes[-1].startswith(f"given up: {why}")
    assert process.restarts == min(times + 1, 6)
    assert len(rests) == min(times + 1, 5)
    assert min(rests[1:]) > 0.5 * device_supervisor._APART, "not all of them in one moment"
    process.close()


def test_no_folder_stays_of_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = tmp_path / "private"
    private.mkdir()
    monkeypatch.setattr(
        device_supervisor, "private_folder", lambda: Path(tempfile.mkdtemp(dir=private))
    )
    process = make(tmp_path, "i/stays", [])
    process.wait_ready()
    (first,) = private.iterdir()
    killed = process.pid
    assert process.kill(killed)
    until(lambda: not first.exists() and process.pid != killed)
    assert any(private.iterdir())
    os.kill(process.pid, signal.SIGKILL)
    process.close()
    assert not any(private.iterdir())


@pytest.mark.parametrize("lab_lost", [False, True])
def test_a_lost_lab_is_not_asked_whether_a_host_may_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lab_lost: bool
) -> None:
    told: list[dict[str, object]] = []
    monkeypatch.setattr(Child, "tell", lambda child, plain: told.append(plain))
    process = make(tmp_path, "i/stays", [])
    told.clear()
    process.retire(0.1, lab_lost=lab_lost)
    assert told == ([] if lab_lost else [{"leave": "Dask removed the worker w"}])
    assert not psutil.pid_exists(process.pid)


def test_the_reason_of_a_failed_start_reaches_whoever_waits(tmp_path: Path) -> None:
    process = make(tmp_path, "i/never", [])
    with pytest.raises(ChildDied, match=r"(?s)device process i/never .*no devices today"):
        process.wait_ready()
    assert process.restarts == 0
    process.close()
