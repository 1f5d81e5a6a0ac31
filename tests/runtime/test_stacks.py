"""The stacks of another process: of one that answers, that hangs, and that would end by it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pathways_lab.runtime.processes import stacks
from tests.runtime.processes import until

pytestmark = pytest.mark.cluster

HANGS = """
import re
from pathways_lab.runtime.processes import stacks
def holds_the_interpreter():
    re.match("(a?){40}" + "a" * 40, "a" * 40)
stacks.answer_signal()
print("here", flush=True)
holds_the_interpreter()
"""
WRITES = """
import sys
from pathways_lab.runtime.processes import stacks
def listens():
    print("here", flush=True)
    for _ in sys.stdin:
        stacks.write()
listens()
"""
HEEDS_NOT = "import time; print('here', flush=True); time.sleep(60)"


@contextmanager
def running(code: str, log: Path) -> Iterator[subprocess.Popen[str]]:
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=file, stderr=file, text=True
        )
    try:
        until(lambda: "here" in log.read_text())
        yield process
    finally:
        process.kill()
        process.communicate()


def telling(process: subprocess.Popen[str]) -> Callable[[], None]:
    def tell() -> None:
        assert process.stdin is not None
        process.stdin.write("stacks\n")
        process.stdin.flush()

    return tell


def test_a_process_that_can_writes_them_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "SIGNAL", signal.SIGKILL)  # nothing is sent
    with running(WRITES, tmp_path / "log") as process:
        text = stacks.ask(process.pid, tmp_path / "log", telling(process))
        assert "in listens" in text
        assert "here" not in text, "only the answer"
        assert process.poll() is None


def test_one_that_holds_the_interpreter_is_seen_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "_PATIENCE", 0.1)
    with running(HANGS, tmp_path / "log") as process:
        text = stacks.ask(process.pid, tmp_path / "log", lambda: None)
        assert "in holds_the_interpreter" in text


def test_one_that_would_end_by_the_signal_is_spared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "_PATIENCE", 0.1)
    with running(HEEDS_NOT, tmp_path / "log") as process:
        assert stacks.ask(process.pid, tmp_path / "log", lambda: None) == ""
        assert process.poll() is None


def test_one_that_is_stopped_is_asked_nothing(tmp_path: Path) -> None:
    with running(WRITES, tmp_path / "log") as process:
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: stacks.state(process.pid) == "T")
        assert stacks.ask(process.pid, tmp_path / "log", lambda: pytest.fail("told")) == ""


def test_without_a_debugger_native_frames_have_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError, match="pip install py-spy"):
        stacks.native(1)
    script = tmp_path / "py-spy"
    script.write_text("#!/bin/sh\necho 'Error: Permission denied' >&2\nexit 1\n")
    script.chmod(0o755)
    with pytest.raises(OSError, match=r"could not look: Error: Permission denied; ask without"):
        stacks.native(1)
